"""A program of the twin: ``python -m cuda_twin.training_run FOLDER SAVES CONFIG OVERRIDE…``, a whole run.

The training loop is lightscale's own, on the computing twin or, where no device is visible, on the CPU: kernels are
compared at start, batches fetched ahead, replicas compared, steps profiled, and what comes out is FOLDER/run. With
SAVES other than 0 the run is stopped after that many steps, as by a cluster, and resumed.
"""

import functools
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cuda_twin.forks import keep_devices_unused


def main() -> int:
    """The run; its directory is what is left."""
    keep_devices_unused()
    from cuda_twin.computing import Computing  # noqa: PLC0415 - imports what asks for devices
    from cuda_twin.null_steps import NullCase, configuration, write_store  # noqa: PLC0415
    from lightscale.runs.run_directory import RunDirectory  # noqa: PLC0415
    from lightscale.training import train as training  # noqa: PLC0415

    folder, saves = Path(sys.argv[1]), int(sys.argv[2])
    case = NullCase(config=sys.argv[3], overrides=sys.argv[4:], steps=6, validate=True, save=True)
    config = configuration(case, folder / "store")
    write_store(
        folder / "store",
        sequence_length=config.data.sequence_length,
        documents=3,
        vocab_size=config.model.vocab_size,
    )
    directory = RunDirectory(folder / "run")
    directory.create(config)
    ranks = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_PORT="29400")

    def stopping(step: Any) -> Any:
        @functools.wraps(step)
        def take(trainer: training.Trainer, *words: Any) -> None:
            step(trainer, *words)
            if trainer.step == saves:
                os.kill(os.getpid(), signal.SIGTERM)

        return take

    mode = Computing() if torch.cuda.is_available() else nullcontext()
    step = training.Trainer._train_step
    with mode, mock.patch.object(training.Trainer, "_train_step", stopping(step) if saves else step):
        status = training.train(config, directory)
        if saves:
            assert status == "resumable"
            status = training.train(config, directory)
    assert status == "finished"
    return 0


if __name__ == "__main__":
    sys.exit(main())

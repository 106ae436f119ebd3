"""Checkpoints of every format that was ever released: read bit by bit, or refused with the format's name.

``golden/format-N`` was written once, by the first version with that format: one step of the model below. When the
format changes, the folder stays, and another comes beside it:

    python tests/training/checkpoints/test_golden_checkpoint.py
"""

import hashlib
import json
import runpy
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from lightscale.errors import UserError
from lightscale.training.checkpoints.manifest import FORMAT
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tiny_engine.py")))

RunRanks = Callable[..., list[Any]]

GOLDEN = Path(__file__).resolve().parent / "golden"
FOLDERS = sorted(path.name for path in GOLDEN.iterdir()) if GOLDEN.exists() else []
MODEL = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
COMMON = {"data": {"tokens": 192, "fingerprint": "golden"}}


def digests(engine: Any) -> dict[str, Any]:
    """The state of the only rank: sha256 of the bytes of tensors, other things as they are."""
    return {
        key: hashlib.sha256(value.numpy().tobytes()).hexdigest() if isinstance(value, Tensor) else value
        for key, value in tiny.own_state(engine).items()
    }


def read(rank: int, world_size: int, init_method: str, folder: str) -> tuple[Any, dict[str, Any]] | str:
    """What was restored beside the tensors, and the digests; or the refusal."""
    with tiny.engine_on((1, 1, 1, 1), rank, init_method, seed=7, **MODEL) as engine:
        try:
            restored = Checkpoints(Path(folder), engine.mesh).restore(engine, allow=["versions"])
        except UserError as refusal:
            return str(refusal)
        assert restored is not None
        return restored.common, digests(engine)


@pytest.mark.parametrize("name", FOLDERS)
def test_checkpoints_of_all_formats(run_ranks: RunRanks, name: str) -> None:
    (found,) = run_ranks(read, 1, str(GOLDEN / name))
    number = int(name.removeprefix("format-"))
    if number == FORMAT:
        expected = json.loads((GOLDEN / name / "digests.json").read_text())
        common, state = found
        assert common == {**COMMON, "step": 1}
        assert json.loads(json.dumps(state)) == expected
    else:
        assert f"has format {number}, and this version of lightscale reads {FORMAT}" in found


def test_the_format_that_is_written_has_one() -> None:
    assert f"format-{FORMAT}" in FOLDERS


def write(target: Path) -> None:
    """A checkpoint of step 1, and the digests of what is in it."""
    with ExitStack() as stack:
        meeting = stack.enter_context(tempfile.NamedTemporaryFile())
        stack.enter_context(mock.patch("socket.gethostname", return_value="golden"))
        engine = stack.enter_context(tiny.engine_on((1, 1, 1, 1), 0, f"file://{meeting.name}", **MODEL))
        tiny.train(engine, 0, 1)
        Saver(target, engine.mesh).save(engine, step=1, common=COMMON, facts={"tokens": 192})
        (target / "digests.json").write_text(json.dumps(digests(engine), indent=1) + "\n")


if __name__ == "__main__":
    target = GOLDEN / f"format-{FORMAT}"
    if target.exists():
        sys.exit(f"{target} is there already; it is never written again")
    write(target)

"""The sink for Weights & Biases, the package of the extra `wandb`.

Unset keys of [metrics.wandb] default to wandb's environment variables: WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY,
WANDB_NAME, WANDB_API_KEY and so on.
"""

import json
import os
import uuid
from pathlib import Path

from lightscale.config.schema import RunConfig
from lightscale.runs.metrics.sink import Measurement, RunFacts, Sink

try:
    import wandb
except ImportError as error:
    raise ImportError(f"wandb cannot be imported ({error}); pip install 'lightscale[wandb]'") from error

_PROJECT = "lightscale"
_VOID = "void steps"


class WandbSink(Sink):
    """One wandb run for a run, over all its attempts.

    wandb cannot replace the values of a step, so a step is sent once. After a resume, repeated steps have the same
    values; after a rollback, wandb keeps the values from before it, and the run's summary lists these steps as "void
    steps".
    """

    def __init__(self, run: RunFacts) -> None:
        directory = run.directory / "wandb"
        # wandb takes another place, without an error, where this one is not there.
        directory.mkdir(exist_ok=True)
        self._state = _State(directory / "lightscale.json")
        settings = run.config.metrics.wandb
        self._run = wandb.init(
            id=self._state.id,
            project=settings.project or os.environ.get("WANDB_PROJECT") or _PROJECT,
            entity=settings.entity,
            name=settings.name or os.environ.get("WANDB_NAME") or run.directory.absolute().name,
            mode=settings.mode,
            dir=str(run.directory),
            resume="allow",
            config={**_values(run.config), "command": run.command},
            # The output of ranks is in the run's logs.
            settings=wandb.Settings(console="off"),
        )
        self._first = self._state.step + 1

    def write(self, measurement: Measurement) -> None:
        """See ``Sink``."""
        step = measurement.step
        if measurement.scalars and step >= self._first:
            self._run.log(dict(measurement.scalars), step=step)
            self._state.advance(step)

    def go_back(self, step: int) -> None:
        """See ``Sink``."""
        self._first = self._state.step + 1
        if step < self._state.step:
            void = f"{step + 1} to {self._state.step}"
            before = self._run.summary.get(_VOID)
            self._run.summary[_VOID] = f"{before}, {void}" if before else void

    def close(self) -> None:
        """See ``Sink``."""
        self._run.finish()


class _State:
    """The id of wandb's run, and the last step that it was sent; kept in `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.id, self.step = os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex, 0
        if path.exists():
            stored = json.loads(path.read_text("utf-8"))
            self.id, self.step = stored["id"], stored["step"]
        else:
            self._write()

    def advance(self, step: int) -> None:
        if step > self.step:
            self.step = step
            self._write()

    def _write(self) -> None:
        # By a rename, but without waiting for the disk: after a power failure some steps are sent twice, no more.
        draft = self._path.with_suffix(".tmp")
        draft.write_text(json.dumps({"id": self.id, "step": self.step}), "utf-8")
        draft.replace(self._path)


def _values(config: RunConfig) -> dict[str, object]:
    return config.model_dump(mode="json")

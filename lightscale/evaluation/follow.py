"""The evaluation of a run that trains in another job: each checkpoint as it comes, until the run is finished.

A checkpoint is not removed while it waits for its turn: see ``lightscale.runs.followers``.
"""

import contextlib
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import ChosenRun
from lightscale.evaluation.evaluate import EvaluationSettings, RunEvaluation
from lightscale.evaluation.model import LoadedModel, mesh_of, restore
from lightscale.evaluation.results import Result
from lightscale.evaluation.task import Task
from lightscale.parallel.agreement import Agreement
from lightscale.parallel.mesh import Mesh
from lightscale.runs.followers import Follower
from lightscale.runs.metrics.tensorboard import EventFile
from lightscale.training.checkpoints.directories import CheckpointName, list_checkpoints
from lightscale.training.checkpoints.manifest import NAME as MANIFEST
from lightscale.training.checkpoints.restore import NoGoodCheckpoint
from lightscale.training.health.heartbeat import STARTING, Heartbeat

POLL_S = 2.0
"""Between two looks at a run that has nothing new."""
CURVES = "evaluation"
"""Folder in RUN/tensorboard: a separate run there, since a reader takes one file of a folder at a time."""
_WAIT = -1

_Stamp = tuple[int, int]
"""Of a manifest: another one has the same name when a run has gone back and come again."""


def follow(run: ChosenRun, tasks: Sequence[Task], settings: EvaluationSettings) -> list[Result]:
    """The results of all ``tasks`` on all checkpoints of ``run`` until it is finished; on every rank.

    Called by every rank with torchrun's variables in the environment, or without them by one process.
    """
    results: list[Result] = []
    with mesh_of(run.config) as mesh, contextlib.ExitStack() as stack:
        heartbeat = Heartbeat(run.config.restart.hang_timeout_s)
        heartbeat.beat(STARTING, step=0)
        ranks, waiting = Agreement(mesh.control), _Waiting(run)
        if mesh.rank == 0:
            waiting.follower = stack.enter_context(Follower(run.directory, [task.name for task in tasks]))
            _say(f"following {run.directory.path} until it is finished")
        while (step := ranks.on_first(waiting.next)) is not None:
            # An activity that may take long, also where it is waiting.
            heartbeat.beat("evaluation", step=max(0, step))
            if step == _WAIT:
                continue
            loaded = _read(replace(run, step=step), mesh, ranks)
            if loaded is not None:
                evaluation = RunEvaluation(run, loaded, mesh, settings, heartbeat)
                found = [evaluation.of_task(task) for task in tasks]
                results += found
                if mesh.rank == 0:
                    _show(run, step, found)
    return results


class _Waiting:
    """The checkpoints that wait to be evaluated; used by rank 0."""

    def __init__(self, run: ChosenRun) -> None:
        self.follower: Follower | None = None
        self._run = run
        self._done: dict[int, set[_Stamp]] = {}
        self._at: int | None = None

    def next(self) -> int | None:
        """The next step, once the one before is done; ``_WAIT`` after a pause; None: the run is finished."""
        assert self.follower is not None, "rank 0 follows"
        # Before its checkpoints are listed: those that it saved until then are among them.
        status = self._run.directory.read_status()
        steps = self._look()
        self.follower.set_done(self._done)
        for step in steps:
            if self.follower.take(step):
                self._at = step
                return step
        if not steps and status is not None and status.status == "finished":
            return None
        time.sleep(POLL_S)
        return _WAIT

    def _look(self) -> list[int]:
        """The steps that were not evaluated, oldest first."""
        found: dict[int, set[_Stamp]] = {}
        for name in list_checkpoints(self._run.directory.checkpoints):
            with contextlib.suppress(FileNotFoundError):
                found.setdefault(name.step, set()).add(_stamp(self._run.directory.checkpoints / name.directory))
        if self._at is not None:
            self._done[self._at] = found.get(self._at, set())
            self._at = None
        # Of a step that is done its weights alone may come later, and stay when all else of it is gone.
        self._done = {step: stamps for step, stamps in found.items() if stamps & self._done.get(step, set())}
        return [step for step in sorted(found) if step not in self._done]


def _stamp(checkpoint: Path) -> _Stamp:
    status = (checkpoint / MANIFEST).stat()
    return status.st_ino, status.st_mtime_ns


def _read(run: ChosenRun, mesh: Mesh, ranks: Agreement) -> LoadedModel | None:
    """The model of a step; None where its checkpoint is damaged, or was removed all the same."""
    try:
        return restore(run, mesh)
    except (UserError, OSError) as error:
        names: list[CheckpointName] = ranks.on_first(lambda: list_checkpoints(run.directory.checkpoints))
        # Anything else is as wrong of every checkpoint.
        if not isinstance(error, (NoGoodCheckpoint, OSError)) and any(name.step == run.step for name in names):
            raise
        if mesh.rank == 0:
            _say(f"step {run.step} is skipped: {error}")
    return None


def _show(run: ChosenRun, step: int, results: Sequence[Result]) -> None:
    values = {
        f"{result['task']}/{name}": score["value"]
        for result in results
        for name, score in result["scores"].items()
        if score["value"] is not None and math.isfinite(score["value"])
    }
    _say(f"{run.directory.path}@{step}: {', '.join(f'{name} {value:.4g}' for name, value in values.items())}")
    if "tensorboard" in run.config.metrics.sinks:
        with contextlib.closing(EventFile(run.directory.tensorboard / CURVES)) as curves:
            curves.scalars(step, {f"evaluation/{name}": value for name, value in values.items()})


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

"""Exports beside checkpoints: `lightscale export` of the steps that are due, by a process in the background.

    RUN/exports/step-00000100/                an export of RUN@100: whole, as it got its name last
    RUN/exports/step-00000100.HOST-PID.tmp/   while process PID of HOST writes it

The disk shows the missing exports: steps that are due and have a checkpoint, but no export. A resumed run therefore
makes the exports that an earlier start skipped. One process at a time writes one export, with low priority and one
thread. It reads only the files of the checkpoint. A failed export is reported and does not affect the run.
"""

import contextlib
import itertools
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import psutil

from lightscale.config.schema import RunConfig
from lightscale.config.tasks import task_class
from lightscale.runs.journal import Journal
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.checkpoints.directories import clear, directory_name, list_steps
from lightscale.training.health.heartbeat import HEARTBEATS_VARIABLE

MOST_WAIT_S = 1800.0
"""That a finished run waits for its last exports."""
_STALE_S = 3600.0
"""After which a draft of another host is given up."""
_POLL_S = 0.2
_NICENESS = 10
"""Above that of the rank: at 19, an export beside ranks that take all cores would need hours."""
_COMMAND = [sys.executable, "-P", "-m", "lightscale", "export"]
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", HEARTBEATS_VARIABLE)
_DRAFT = re.compile(r"step-\d{8}\.(?P<host>.+)-(?P<process>\d+)\.tmp", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class _Export:
    """One that is being written."""

    step: int
    process: "subprocess.Popen[bytes]"
    output: IO[bytes]
    began_s: float


def export_options(config: RunConfig) -> list[str]:
    """Options of `lightscale export`: adapters are exported alone, or in the weights where PEFT has no such models."""
    if config.adapters is None:
        return []
    return ["--merge"] if task_class(config.task.name).predicts_noise else ["--adapter"]


def unexported(run: RunDirectory, every: int | None, steps: Collection[int], *, after: int) -> set[int]:
    """Those of ``steps`` that `checkpoint.export_every` = ``every`` asks exports of, and that have none yet.

    ``after``: the last step that is not the run's own: the first checkpoint of a branch is its parent's.
    """
    if every is None:
        return set()
    due = (step for step in steps if step > after and step % every == 0)
    return {step for step in due if not (run.exports / directory_name(step)).exists()}


class Exports:
    """The exports of one run, written by the rank that owns them; a context manager, which ends an export in progress.

    Args:
        directory: of the run.
        journal: where each is recorded.
        every: steps between two of them; None: none are made, as on all ranks but one.
        after: see ``unexported``.
        options: further ones of `lightscale export`.
    """

    def __init__(
        self,
        directory: RunDirectory,
        journal: Journal,
        *,
        every: int | None,
        after: int = 0,
        options: Sequence[str] = (),
    ) -> None:
        self._run, self._journal, self._every, self._after = directory, journal, every, after
        self._options = options
        self._current: _Export | None = None
        self._failed: set[int] = set()
        self._last_reason = ""
        self._gave_up = False

    def __enter__(self) -> Self:
        if self._every is not None:
            self._remove_drafts()
            self._begin_next()
        return self

    def __exit__(self, *error: object) -> None:
        if self._current is not None:
            again = f"{self._run.path}@{self._current.step}"
            self._journal.say(f"the export of {again} is not finished: resume the run, or lightscale export {again}")
            self._end()

    @property
    def is_busy(self) -> bool:
        """Whether one is being written."""
        return self._current is not None

    def needed(self, steps: Collection[int]) -> set[int]:
        """Those of ``steps`` whose checkpoints are still to be exported. For any thread."""
        if self._gave_up:
            return set()
        return unexported(self._run, self._every, steps, after=self._after) - self._failed

    def saved(self, step: int) -> None:
        """A checkpoint of ``step`` was written just now."""
        if self._is_due(step):
            # The run has been here before, and returned to an earlier checkpoint.
            self._put_aside(step)
            self._begin_next()

    def poll(self) -> None:
        """Record the export that has ended since, and begin the next."""
        if self._current is None or self._current.process.poll() is None:
            return
        ended, code = self._current, self._current.process.returncode
        seconds, reason = time.monotonic() - ended.began_s, _last_line(ended.output)
        self._current = None
        ended.output.close()
        name = self._path(ended.step).name
        # By its name: a process that the last start left behind may have written it, and this one found it.
        if self._path(ended.step).exists():
            self._journal.note("export", step=ended.step, export=name, seconds=seconds)
            self._journal.say(f"exported step {ended.step} to {self._path(ended.step)} in {seconds:.0f} s")
        else:
            self._report(ended.step, reason or f"the process ended with {code}")
        self._begin_next()

    def go_back(self, step: int) -> None:
        """The run continues after ``step``; its weights of later steps are no longer valid."""
        if self._every is None:
            return
        if self._current is not None and self._current.step > step:
            self._end()
        for later in list_steps(self._run.exports):
            if later > step:
                self._put_aside(later)
        self._failed = {failed for failed in self._failed if failed <= step}

    def _is_due(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0 and step not in self._failed

    def _path(self, step: int) -> Path:
        return self._run.exports / directory_name(step)

    def _begin_next(self) -> None:
        if self._current is not None:
            return
        for step in sorted(self.needed(list_steps(self._run.checkpoints))):
            try:
                self._current = self._begin(step)
                return
            except OSError as error:
                self._report(step, str(error))

    def _begin(self, step: int) -> _Export:
        environment = {key: value for key, value in os.environ.items() if key not in _OF_RANKS}
        # The ranks' cores and devices are theirs.
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        output = tempfile.TemporaryFile()  # noqa: SIM115 - until the process has ended
        process = subprocess.Popen(
            [*_COMMAND, f"{self._run.path}@{step}", "--to", str(self._path(step)), *self._options],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, min(19, os.nice(0) + _NICENESS))
        return _Export(step=step, process=process, output=output, began_s=time.monotonic())

    def _end(self) -> None:
        """Kill what is being written, and remove what there is of it."""
        assert self._current is not None
        current, self._current = self._current, None
        current.process.kill()
        current.process.wait()
        current.output.close()
        self._remove_drafts()

    def _report(self, step: int, reason: str) -> None:
        # Not again in this attempt: it would fail again, and its checkpoint is not kept for it.
        self._failed.add(step)
        self._journal.note("export_failed", step=step, reason=reason)
        consequence = "training continues"
        if reason == self._last_reason:
            # Of the model or the tokenizer, and not of a moment: a process for each step would find it again.
            self._gave_up = True
            consequence += " without exports until the next start"
        self._last_reason = reason
        self._journal.say(f"WARNING: the export of step {step} failed: {reason}; {consequence}")

    def _put_aside(self, step: int) -> None:
        path = self._path(step)
        if path.exists():
            names = (path.with_suffix(f".bad{number or ''}") for number in itertools.count())
            path.rename(next(name for name in names if not os.path.lexists(name)))

    def _remove_drafts(self) -> None:
        """Those that no process writes any more."""
        with contextlib.suppress(OSError):
            for path in list(self._run.exports.glob("step-*.tmp")):
                if (match := _DRAFT.fullmatch(path.name)) is not None and _is_dead(path, match):
                    clear(path)


def wait_for_exports(
    exports: Exports, *, largest: Callable[[int], int], should_stop: Callable[[], bool], beat: Callable[[], None]
) -> None:
    """Wait, on all ranks together, until nothing is being written: at most ``MOST_WAIT_S``, and not where a job ends.

    Args:
        largest: the maximum over the ranks of a number of each.
        should_stop: the same on all ranks.
        beat: called on each again and again.
    """
    until_s = time.monotonic() + MOST_WAIT_S
    while largest(exports.is_busy and time.monotonic() < until_s) and not should_stop():
        beat()
        time.sleep(_POLL_S)
        exports.poll()


def _is_dead(draft: Path, match: re.Match[str]) -> bool:
    if match["host"] == socket.gethostname():
        return not psutil.pid_exists(int(match["process"]))
    newest_s = max(path.stat().st_mtime for path in (draft, *draft.iterdir()))
    return time.time() - newest_s > _STALE_S


def _last_line(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else ""

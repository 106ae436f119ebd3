"""Trains the cells of a study, several at a time, until all have ended."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from lightscale.errors import UserError, counted
from lightscale.files import lock_or_refuse
from lightscale.runs.goodput import duration
from lightscale.runs.run_directory import LineWriter, read_lines, timestamp
from lightscale.study.cells import Cell
from lightscale.study.launchers import CellLauncher
from lightscale.study.study import Study

_POLL_S = 0.2


@dataclass(kw_only=True)
class Outcome:
    """Result of a command."""

    finished: list[str] = field(default_factory=list)
    """Cells finished now or before."""
    failed: dict[str, str] = field(default_factory=dict)
    """Failed cells with their reasons."""
    stopped: dict[str, str] = field(default_factory=dict)
    """Cells that a search has stopped before their last steps, with its reasons; also those that diverged."""
    left: list[str] = field(default_factory=list)
    """Cells that the same command trains later."""


class StudyRunner:
    """Runs at most `jobs` cells at a time; a cell that fails stops no other.

    Args:
        is_wanted: selects cells by name.
        deadline_s: of ``time.monotonic``; all runs are then asked to save and exit.
        say: prints a line.
    """

    def __init__(
        self,
        study: Study,
        launcher: CellLauncher,
        *,
        jobs: int,
        is_wanted: Callable[[str], bool],
        deadline_s: float | None,
        say: Callable[[str], None],
    ) -> None:
        self._study, self._launcher, self._jobs = study, launcher, jobs
        self._is_wanted, self._deadline_s, self._say = is_wanted, deadline_s, say
        self._stopping: str | None = None
        self._outcome = Outcome()
        self._cells: list[Cell] = []
        self._running: dict[str, Cell] = {}
        self._began: dict[str, float] = {}

    def run(self) -> Outcome:
        """Run until all wanted cells have ended, or a signal or the deadline stops it."""
        with _stop_signals(self._stop):
            self._skip_finished()
            while True:
                if self._deadline_s is not None and time.monotonic() > self._deadline_s:
                    self._stop("--stop-after has passed")
                self._start_waiting()
                if not self._running:
                    break
                self._collect()
                time.sleep(_POLL_S)
        self._outcome.stopped = {cell.name: cell.stopped for cell in self._cells if cell.stopped is not None}
        ended = {*self._outcome.finished, *self._outcome.failed, *self._outcome.stopped}
        self._outcome.left = [cell.name for cell in self._cells if cell.name not in ended]
        return self._outcome

    def _wanted(self) -> list[Cell]:
        return [cell for cell in self._study.cells() if self._is_wanted(cell.name)]

    def _skip_finished(self) -> None:
        for part in ("sweep", "main"):
            # With the sweep's own cells finished, the others may wait for nothing any more.
            for cell in (cell for cell in self._wanted() if cell.part == part and not cell.is_pending):
                if self._is_finished(cell):
                    self._outcome.finished.append(cell.name)
        self._look_again()
        if self._outcome.finished:
            self._say(f"{len(self._outcome.finished)} of {len(self._cells)} cells are finished already")

    def _start_waiting(self) -> None:
        if self._stopping is not None or len(self._running) >= self._jobs:
            return
        begun = {*self._outcome.finished, *self._outcome.failed, *self._outcome.left, *self._running}
        ready = (cell for cell in self._cells if not cell.is_pending and cell.stopped is None)
        waiting = (cell for cell in ready if cell.name not in begun)
        for cell in waiting:
            # A signal may come between two of them.
            if self._stopping is not None or len(self._running) >= self._jobs:
                return
            try:
                self._launcher.start(cell)
            except UserError as error:
                self._fail(cell, str(error))
                continue
            self._running[cell.name], self._began[cell.name] = cell, time.monotonic()
            self._say(f"{cell.name}: started")
            # The signal came while it was started, and the launcher did not know it yet.
            if self._stopping is not None:
                self._launcher.stop(cell.name)

    def _collect(self) -> None:
        for name, cell in list(self._running.items()):
            if not self._has_ended(cell):
                continue
            del self._running[name]
            if self._is_finished(cell):
                self._outcome.finished.append(name)
                record = self._study.finished_record(cell)
                assert record is not None
                took = duration(time.monotonic() - self._began[name])
                done = f"{len(self._outcome.finished)} of {len(self._cells)}"
                self._say(f"{name}: finished, loss {record['smoothed']:.4f}, after {took} here ({done})")
            elif name in self._outcome.failed:
                continue
            elif (score := self._study.score(cell)) is not None:
                self._say(f"{name}: {score.text()}")
            elif (failure := self._launcher.failure(cell)) is not None:
                self._fail(cell, failure)
            else:
                self._outcome.left.append(name)
                self._say(f"{name}: stopped; the same command continues it")
            if cell.part == "sweep" or cell.trial is not None:
                # It may have chosen for others.
                self._look_again()

    def _has_ended(self, cell: Cell) -> bool:
        try:
            return self._launcher.has_ended(cell)
        except UserError as error:
            # It could not be started again.
            self._fail(cell, str(error))
            return True

    def _is_finished(self, cell: Cell) -> bool:
        """Record what the run of `cell` has reached; a run whose records cannot be read fails, and stops no other."""
        try:
            self._study.add_score(cell)
            return self._study.finish(cell)
        except UserError as error:
            self._fail(cell, str(error))
            return False

    def _look_again(self) -> None:
        for decision in self._study.decide():
            self._say(decision.text())
        self._cells = self._wanted()

    def _fail(self, cell: Cell, reason: str) -> None:
        self._outcome.failed[cell.name] = reason
        record_failure(self._study, cell, reason)
        self._say(f"{cell.name}: failed: {reason}")

    def _stop(self, reason: str) -> None:
        if self._stopping is None:
            self._stopping = reason
            self._say(f"stopping ({reason}): saving {counted(len(self._running), 'run')}")
        self._launcher.stop()


def record_failure(study: Study, cell: Cell, reason: str) -> None:
    """Record the reason of a cell's failure in STUDY/failures.jsonl."""
    with LineWriter(study.path / "failures.jsonl") as writer:
        writer.write({"time": timestamp(), "cell": cell.name, "reason": reason})


def recorded_failures(study: Study) -> dict[str, str]:
    """Newest reason of each cell that has failed, including those finished since."""
    lines: Sequence[dict[str, Any]] = read_lines(study.path / "failures.jsonl")
    return {str(line.get("cell")): str(line.get("reason")) for line in lines}


@contextlib.contextmanager
def study_lock(path: Path) -> Iterator[None]:
    """Lock the study in the directory `path`: one command at a time starts its runs."""
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip()
        lock_or_refuse(
            descriptor, path, held=f"in use by `lightscale study run`, process {holder}; wait for it, or stop it"
        )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _stop_signals(stop: Callable[[str], None]) -> Iterator[None]:
    def handle(number: int, _: FrameType | None) -> None:
        stop(signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

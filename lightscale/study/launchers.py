"""Start and supervision of a cell's run: as a local process, or as a scheduler job."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path

from lightscale.launch.commands.runs import is_running
from lightscale.launch.commands.submit import submit_run
from lightscale.launch.scheduler import JobRequest, get_scheduler, job_states, live_jobs
from lightscale.launch.settings import LaunchSettings
from lightscale.runs.jobs import recorded_jobs
from lightscale.runs.lock import process_here
from lightscale.runs.run_directory import RunDirectory
from lightscale.study.cells import Cell
from lightscale.study.study import Study

_RESUMABLE = 75
_TAIL_BYTES = 4096


class CellLauncher(ABC):
    """Starts runs and reports their ends."""

    def __init__(self, study: Study) -> None:
        self._study = study

    @abstractmethod
    def start(self, cell: Cell) -> None:
        """Start the run of `cell`, or take over one in progress. Raises `UserError` if it cannot start."""

    @abstractmethod
    def has_ended(self, cell: Cell) -> bool:
        """Whether the process or job of `cell` has ended."""

    @abstractmethod
    def failure(self, cell: Cell) -> str | None:
        """Reason of a cell's failure; None: it was stopped, and a new start continues it."""

    @abstractmethod
    def stop(self, only: str | None = None) -> None:
        """Ask all runs started by this launcher, or that of the cell `only`, to save and exit, if it owns them."""

    def _ended_at_a_rung(self, cell: Cell) -> bool:
        """Whether the run of `cell` has ended at an earlier rung than the one that it is to reach."""
        status = self._study.run(cell).read_status()
        return status is not None and status.status == "finished" and status.step < cell.job.last_step

    def _status_failure(self, cell: Cell) -> str | None:
        status = self._study.run(cell).read_status()
        return status.reason if status is not None and status.status == "stopped" else None


class Here(CellLauncher):
    """Runs cells as local processes of ``lightscale train``.

    Each has its own session: a kill of this process leaves them running, and the next one detects that their runs are
    held and waits for them.
    """

    def __init__(self, study: Study, *, jobs: int, processes: int | None) -> None:
        super().__init__(study)
        self._processes = processes
        self._children: dict[str, subprocess.Popen[bytes] | None] = {}
        self._has_stopped = False
        # More threads than cores only wait for each other.
        threads = max(1, (os.cpu_count() or 1) // (jobs * (processes or 1)))
        self._environment = {"OMP_NUM_THREADS": str(threads), **os.environ}

    def start(self, cell: Cell) -> None:
        """See `CellLauncher`."""
        run = self._study.run(cell)
        if is_running(run):
            self._children[cell.name] = None
            return
        run.path.parent.mkdir(parents=True, exist_ok=True)
        run.create(cell.job)
        command = [sys.executable, "-m", "lightscale", "train", str(run.config), "--run", str(run.path)]
        if cell.trial is not None:
            # The run may have ended at an earlier rung.
            command.append(f"train.stop_step={cell.job.train.stop_step or 'none'}")
        if self._processes is not None:
            command += ["--processes", str(self._processes)]
        log = self._study.log(cell)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._children[cell.name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def has_ended(self, cell: Cell) -> bool:
        """See `CellLauncher`."""
        child, is_held = self._children[cell.name], is_running(self._study.run(cell))
        if child is not None and child.poll() and is_held:
            # One that an earlier command had started was about to take the run, and took it.
            self._children[cell.name] = child = None
        if child is not None:
            return child.poll() is not None
        if not is_held and not self._has_stopped and self._ended_at_a_rung(cell):
            # What was taken over was about to end.
            self.start(cell)
            return False
        return not is_held

    def failure(self, cell: Cell) -> str | None:
        """See `CellLauncher`."""
        child = self._children[cell.name]
        # It may have been stopped before it could answer a signal.
        was_stopped = self._has_stopped and child is not None and child.returncode == -signal.SIGTERM
        if child is None or child.returncode == _RESUMABLE or was_stopped:
            return self._status_failure(cell)
        return self._status_failure(cell) or f"exit code {child.returncode}: {_last_line(self._study.log(cell))}"

    def stop(self, only: str | None = None) -> None:
        """See `CellLauncher`. Includes runs started by an earlier command."""
        self._has_stopped = True
        for name, child in self._children.items():
            if only not in (None, name):
                continue
            if child is not None:
                # Of one that has ended nothing is sent.
                child.send_signal(signal.SIGTERM)
            elif (holder := process_here(RunDirectory(self._study.path / "runs" / name))) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(holder, signal.SIGTERM)


class Through(CellLauncher):
    """Runs cells as scheduler jobs; they continue when this process ends."""

    _ASK_EVERY_S = 5.0

    def __init__(self, study: Study, *, scheduler: str, settings: LaunchSettings) -> None:
        super().__init__(study)
        self._scheduler, self._settings = scheduler, settings
        get_scheduler(scheduler).require("submit")
        self._asked: dict[str, float] = {}
        self._taken_over: set[str] = set()

    def start(self, cell: Cell) -> None:
        """See `CellLauncher`."""
        run = self._study.run(cell)
        if live_jobs(recorded_jobs(run)):
            self._taken_over.add(cell.name)
            return
        self._taken_over.discard(cell.name)
        submit_run(cell.job, JobRequest(run=run, settings=self._settings), scheduler=self._scheduler)

    def has_ended(self, cell: Cell) -> bool:
        """See `CellLauncher`. A scheduler that does not answer is asked again later."""
        now = time.monotonic()
        if now - self._asked.get(cell.name, -self._ASK_EVERY_S) < self._ASK_EVERY_S:
            return False
        self._asked[cell.name] = now
        states = job_states(recorded_jobs(self._study.run(cell))).values()
        if not all(state.phase == "ended" for state in states):
            return False
        if cell.name in self._taken_over and self._ended_at_a_rung(cell):
            # Its job was about to end.
            self.start(cell)
            return False
        return True

    def failure(self, cell: Cell) -> str | None:
        """See `CellLauncher`."""
        status = self._study.run(cell).read_status()
        if status is not None and status.status == "resumable":
            return None
        return self._status_failure(cell) or f"its job has ended; `lightscale logs {self._study.run(cell).path}`"

    def stop(self, only: str | None = None) -> None:
        """See `CellLauncher`. Jobs belong to the scheduler: `lightscale cancel` ends them."""


def _last_line(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        lines = []
    said = [line.strip() for line in lines if line.strip()]
    return said[-1] if said else f"{log} is empty"

"""``lightscale train`` as a process that is observed, killed and restarted from outside."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from lightscale.files import NotRegular, open_regular
from lightscale.launch.chaos.harness.history import History
from lightscale.launch.launcher.rank import LAUNCHER_VARIABLE, rank_of
from lightscale.records import Record, parse_line
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.health import fault_injection

# Longer than a kernel needs to end a process that holds much memory.
ORPHAN_S = 30.0
_POLL_S = 0.01


class Training:
    """A `command` that trains in the directory `run`, with its output in the file `log`.

    Ranks read their faults from `faults_folder`. `variables` are added to its environment.
    """

    def __init__(
        self,
        command: Sequence[str],
        run: RunDirectory,
        *,
        faults_folder: Path,
        log: Path,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.run = run
        self.faults_folder = faults_folder
        self.log = log
        self.steps = Tail(run.metrics)
        self.histories = {record.name: History(record) for record in (run.metrics, run.events)}
        self.starts = 0
        """Number of starts of the command."""
        self.command = command
        self._variables = dict(variables or {})
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        """Start the command with the arguments `more`; it must not be running."""
        assert self.has_ended
        self.faults_folder.mkdir(parents=True, exist_ok=True)
        faults = {fault_injection.VARIABLE: f"@{self.faults_folder.absolute()}"}
        environment = {**own_environment(), **self._variables, **faults}
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C is for this process, which then ends that one.
            self._process = subprocess.Popen(
                [*self.command, *more],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.starts += 1

    @property
    def has_ended(self) -> bool:
        """Whether the command is not running."""
        return self._process is None or self._process.poll() is not None

    @property
    def is_finished(self) -> bool:
        """Whether the command ended with all steps done."""
        return self._process is not None and self._process.poll() == 0

    @property
    def exit_code(self) -> int | None:
        """Exit code of the last start; None: it is running, or there was none."""
        return None if self._process is None else self._process.poll()

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the ranks, by rank."""
        found: dict[int, psutil.Process] = {}
        for process in self._descendants():
            # The process may end between any two of these questions.
            with contextlib.suppress(psutil.Error):
                rank = rank_of(process)
                # Parents come first: processes that a rank started are not the rank.
                if rank is not None and process.status() != psutil.STATUS_ZOMBIE:
                    found.setdefault(rank, process)
        return found

    def kill(self, ranks: Iterable[psutil.Process], *, launcher: bool) -> None:
        """Send SIGKILL to the launcher, if asked, and then to `ranks`."""
        if launcher and self._process is not None:
            # First, so that it neither starts the ranks again nor records how they ended.
            self._process.kill()
            self._process.wait()
        for rank in ranks:
            send(rank, signal.SIGKILL)

    def end(self) -> None:
        """End all processes."""
        # Listed first: when the launcher is dead they are no longer below it.
        processes = self._descendants()
        self.kill(processes, launcher=True)
        psutil.wait_procs(processes, timeout=ORPHAN_S)

    def arm(self, rank: int, fault: fault_injection.InjectedFault) -> None:
        """Give `rank` its fault, at once or at its start."""
        file = fault_injection.fault_file(self.faults_folder, rank)
        draft = file.with_suffix(".draft")
        draft.write_text(str(fault), encoding="utf-8")
        # By a rename: a rank reads the file at any moment, and half a specification is an error.
        draft.replace(file)

    def is_armed(self, rank: int) -> bool:
        """Whether the fault of `rank` is pending."""
        return fault_injection.fault_file(self.faults_folder, rank).exists()

    def disarm(self) -> None:
        """Withdraw all faults."""
        for file in self.faults_folder.glob("rank-*"):
            file.unlink(missing_ok=True)

    def lines(self) -> list[Record]:
        """The lines of metrics.jsonl, including those destroyed by a fault."""
        return self.histories[self.run.metrics.name].lines()

    def events(self) -> list[Record]:
        """The lines of events.jsonl, including those destroyed by a fault."""
        return self.histories[self.run.events.name].lines()

    @property
    def attempt(self) -> int:
        """Number of the newest attempt, from all events."""
        return max((event["attempt"] for event in self.events()), default=0)

    @property
    def num_output_bytes(self) -> int:
        """Length of the output so far."""
        return self.log.stat().st_size if self.log.exists() else 0

    def output(self, first_byte: int = 0) -> str:
        """The output of the command from `first_byte` on."""
        return self.log.read_bytes()[first_byte:].decode(errors="replace") if self.log.exists() else ""

    def _descendants(self) -> list[psutil.Process]:
        """All processes below the launcher, parents first."""
        if self._process is None or self._process.poll() is not None:
            return []
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


class Tail:
    """The new lines of a metrics.jsonl; only the newest is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes = 0
        self.attempt = 0
        """Of the newest line."""
        self.step = 0
        """Of the newest line."""
        self.num_lines = 0

    def update(self) -> None:
        """Read the lines written since."""
        try:
            with open_regular(self._path, what="a record of a run") as file:
                file.seek(self._bytes)
                data = file.read()
        except (FileNotFoundError, NotRegular):
            return
        # The rank may be writing the last line, or may have been killed while it did.
        whole = data[: data.rfind(b"\n") + 1]
        self._bytes += len(whole)
        for line in whole.split(b"\n")[:-1]:
            # Damaged lines are no steps.
            with contextlib.suppress(ValueError):
                newest = parse_line(line, self._path.name)
                self.attempt, self.step = newest["attempt"], newest["step"]
                self.num_lines += 1

    def go_to_end(self) -> None:
        """Skip all complete lines after a change of the file."""
        try:
            with open_regular(self._path, what="a record of a run") as file:
                self._bytes = file.read().rfind(b"\n") + 1
        except (FileNotFoundError, NotRegular):
            self._bytes = 0


def own_environment() -> dict[str, str]:
    """This process's variables, without those that make a command a rank of the current job."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", LAUNCHER_VARIABLE)
    return {name: value for name, value in os.environ.items() if name not in outer}


def send(process: psutil.Process, signum: signal.Signals) -> None:
    """Send a signal to a process, which may have ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)


def wait_until_gone(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait at most `timeout_s` for processes to end; returns those still running."""
    deadline = time.monotonic() + timeout_s
    left = list(processes)
    while left := [process for process in left if _is_alive(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    return left


def _is_alive(process: psutil.Process) -> bool:
    try:
        # `is_running` also compares start times: the id of a process that has ended may be used again.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

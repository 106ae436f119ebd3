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
from lightscale.launch.chaos.harness.hosts import Host, this_machine
from lightscale.launch.launcher.rank import LAUNCHER_VARIABLE, rank_of
from lightscale.records import Record, parse_line
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.health import fault_injection

# Longer than a kernel needs to end a process that holds much memory.
ORPHAN_S = 30.0
_POLL_S = 0.01
PORT = 29500
"""Of the host of rank 0, on several hosts."""


class Training:
    """A `command` that trains in the directory `run`, with its output in the file `log`.

    Ranks read their faults from `faults_folder`. `variables` are added to its environment. On several `hosts` it is
    started on each, as a user would, and ranks meet at `port` of the first; without any it is started here.
    """

    def __init__(
        self,
        command: Sequence[str],
        run: RunDirectory,
        *,
        faults_folder: Path,
        log: Path,
        variables: Mapping[str, str] | None = None,
        hosts: Sequence[Host] = (),
        port: int = PORT,
    ) -> None:
        self.run = run
        self.hosts = tuple(hosts) or (this_machine(),)
        self.faults_folder = faults_folder
        self.log = log
        self.steps = Tail(run.metrics)
        self.histories = {record.name: History(record) for record in (run.metrics, run.events)}
        self.starts = 0
        """Number of starts of the command."""
        self.command = command
        self._variables = dict(variables or {})
        self._port = port
        # In the order of the hosts.
        self._launchers: list[subprocess.Popen[bytes]] = []

    def start(self, *more: str) -> None:
        """Start the command with the arguments `more`; it must not be running."""
        assert self.has_ended
        self.faults_folder.mkdir(parents=True, exist_ok=True)
        faults = {fault_injection.VARIABLE: f"@{self.faults_folder.absolute()}"}
        environment = {**own_environment(), **self._variables, **faults}
        self._launchers.clear()
        for number, (host, path) in enumerate(zip(self.hosts, self._logs, strict=True)):
            with path.open("ab") as log:
                # A session of its own: Ctrl-C is for this process, which then ends that one.
                launcher = subprocess.Popen(
                    host.inside([*self.command, *self._place(number), *more]),
                    env={**environment, **host.variables},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._launchers.append(launcher)
        self.starts += 1

    def _place(self, number: int) -> list[str]:
        """The options of the launcher of a host."""
        if len(self.hosts) == 1:
            return []
        address = f"--master-addr={self.hosts[0].address}"
        return [f"--nodes={len(self.hosts)}", f"--node-rank={number}", address, f"--master-port={self._port}"]

    @property
    def has_ended(self) -> bool:
        """Whether the command is not running, on any host."""
        return None not in self.exit_codes

    @property
    def is_finished(self) -> bool:
        """Whether the command ended with all steps done, on all hosts."""
        return set(self.exit_codes) == {0}

    @property
    def exit_codes(self) -> list[int | None]:
        """Exit codes of the last start, by host; None: it is running. Empty: there was none."""
        return [launcher.poll() for launcher in self._launchers]

    @property
    def end_text(self) -> str:
        """The exit codes, as text."""
        return " and ".join(map(str, self.exit_codes))

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
        """Send SIGKILL to the launchers of all hosts, if asked, and then to `ranks`."""
        for process in self._launchers if launcher else ():
            # First, so that it neither starts the ranks again nor records how they ended.
            process.kill()
            process.wait()
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
    def num_output_bytes(self) -> list[int]:
        """Length of the output so far, by host."""
        return [log.stat().st_size if log.exists() else 0 for log in self._logs]

    def outputs(self, first_bytes: Sequence[int] = ()) -> list[str]:
        """The output of the command by host, each from its first byte on."""
        firsts = first_bytes or [0] * len(self._logs)
        pairs = zip(self._logs, firsts, strict=True)
        return [log.read_bytes()[first:].decode(errors="replace") if log.exists() else "" for log, first in pairs]

    @property
    def _logs(self) -> list[Path]:
        """That of the first host is `log`."""
        return [self.log, *(self.log.with_suffix(f".{host.name}.log") for host in self.hosts[1:])]

    def _descendants(self) -> list[psutil.Process]:
        """All processes below the launchers, parents first."""
        found = []
        for launcher in self._launchers:
            if launcher.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found += psutil.Process(launcher.pid).children(recursive=True)
        return found


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

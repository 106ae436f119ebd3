"""Start the ranks of a run on this machine by torch's elastic launcher, and tell how they ended.

The elastic agent runs in this process. Three of its habits are changed, by its own settings:

- Stop signals. torchrun answers a signal by signalling every process of every rank and ending them after 30
  s, and forwards a second signal too. Here the first stop signal goes once to each rank, to none of their
  children, and nobody hurries them: the agent sees its ranks end by themselves. That needs no shutdown
  timeout, which torch has only from 2.12 on; TORCH_ELASTIC_SHUTDOWN_TIMEOUT is set for the cases where
  torch itself ends the ranks.
- Rendezvous. The ranks get a store of their own (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1): the shared one
  keeps the addresses of dead ranks, and restarts fail.
- Output. All ranks write to files under the run's logs/; rank 0's is shown. After a failure the traceback
  of the rank that failed first is printed, not those of the ranks that only lost their peer.

Whoever starts torchrun by hand (`torchrun … -m lightscale train CONFIG`) should set both variables too, and
give `--signals-to-handle SIGTERM,SIGINT,SIGUSR1`.

Exit codes. Ranks that stop together leave 0 and status.json, which becomes 0 (finished), 75 (resumable:
start the same command again) or 78 (stopped: a person must look). A mistake of the user that a rank finds
is "stopped", 78. Any other failure of a rank is 1, and the run is "resumable": whether a machine broke or
the program is wrong cannot be told from one failure. A job script may try again after it, as long as the
run makes progress.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import psutil
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightscale.errors import UserError
from lightscale.launch.rank import ERROR_FILE_VARIABLE, EXIT_CRASHED, LAUNCHER_VARIABLE
from lightscale.training.metrics import TERMINAL_VARIABLE
from lightscale.training.run_directory import RunDirectory, Status
from lightscale.training.signals import STOP_SIGNALS

EXIT_CODES: dict[Status, int] = {"finished": 0, "resumable": 75, "stopped": UserError.EXIT_CODE}

# Longer than the save of a large model. torch before 2.12 does not read it and takes 30.
_SHUTDOWN_TIMEOUT_S = 600
_POLL_S = 0.1
# Ranks notice a dead peer at once; what dies later was ended by the agent.
_CAUSE_S = 10
_LOG_TAIL_LINES = 30


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The failure of one rank."""

    rank: int
    summary: str
    """One line, or for a user's mistake its whole message."""
    traceback: str | None = None
    """What Python said; None: the process ended without a word, by a signal for instance."""
    time_s: float
    """When, in seconds since the epoch."""
    killer: signal.Signals | None = None
    """The signal that ended the process."""
    is_user_error: bool = False


def run_ranks(run: RunDirectory, command: Sequence[str], *, processes: int, resume: str) -> int:
    """Run `command` as `processes` ranks until they end; returns the exit code described above.

    `resume` is the command line that goes on with the run, for the last message. Raises UserError for a
    mistake of the user that a rank found.
    """
    logs = run.new_log_directory()
    # What it says is about an earlier attempt.
    run.status.unlink(missing_ok=True)
    with (
        _changed_environment(_rank_variables(processes)),
        _agent_log(logs / "launcher.log"),
        _StopRelay() as relay,
    ):
        failures = _launch(command, processes, logs)
    for failure in failures:
        # The ranks leave their traceback to the launcher, which shows only the first.
        if failure.traceback is not None:
            with (logs / f"rank-{failure.rank}.err").open("a", encoding="utf-8") as file:
                file.write(failure.traceback)
    if sys.stderr.isatty():
        # A rank that was killed while it drew its line has not given the cursor back.
        print("\x1b[?25h", end="\n" if failures else "", file=sys.stderr)
    return _conclude(run, first_failure(failures), stop=relay.received, logs=logs, resume=resume)


def _launch(command: Sequence[str], processes: int, logs: Path) -> list[RankFailure]:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        # The prefix of the lines shown; an empty role makes an empty one.
        role="",
        log_line_prefix_template="${role_name}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        # The name of this machine may not resolve, or resolve to an address behind a VPN.
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=_POLL_S,
        logs_specs=_RankLogs(logs),
        # Not the stop signals: those are the relay's.
        signals_to_handle="SIGQUIT",
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        return [_read_failure(rank, failure) for rank, failure in error.failures.items()]
    except SignalException as error:
        killed = RankFailure(rank=0, summary=str(error), time_s=time.time(), killer=error.sigval)
        return [killed]
    return []


def _conclude(
    run: RunDirectory, failure: RankFailure | None, *, stop: signal.Signals | None, logs: Path, resume: str
) -> int:
    """Say how the ranks ended, in status.json, on stderr, and as the exit code."""
    status = run.read_status()
    step, tokens = run.progress()
    if failure is not None and failure.traceback is None:
        if failure.killer in STOP_SIGNALS:
            # A rank that was signalled itself, before the training loop took over the signals.
            stop = stop or failure.killer
        if stop is not None:
            if status is None:
                reason = f"{stop.name}, and rank {failure.rank} did not save: {failure.summary}"
                status = run.write_status("resumable", reason=reason, step=step, tokens=tokens)
            failure = None
    if failure is None and status is None:
        reason = "all ranks ended without writing status.json"
        failure = RankFailure(rank=0, summary=reason, time_s=time.time())
    if failure is not None:
        kind: Status = "stopped" if failure.is_user_error else "resumable"
        run.write_status(kind, reason=f"rank {failure.rank}: {failure.summary}", step=step, tokens=tokens)
        run.event("failed", rank=failure.rank, reason=failure.summary, step=step, logs=str(logs))
        if failure.is_user_error:
            raise UserError(failure.summary)
        _print_failure(failure, logs)
        print(f"go on from the newest checkpoint with: {resume}", file=sys.stderr)
        return EXIT_CRASHED
    assert status is not None
    end = f"{status.status} at step {status.step}, {status.tokens:,} tokens: {status.reason}"
    print(end, file=sys.stderr)
    if status.status == "resumable":
        print(f"go on with: {resume}", file=sys.stderr)
    return EXIT_CODES[status.status]


def _print_failure(failure: RankFailure, logs: Path) -> None:
    if failure.traceback is not None:
        print(failure.traceback, file=sys.stderr, end="")
    elif failure.rank != 0:
        # Rank 0's output was shown as it came.
        text = (logs / f"rank-{failure.rank}.err").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines()[-_LOG_TAIL_LINES:]:
            print(line, file=sys.stderr)
    print(f"rank {failure.rank} failed: {failure.summary} (output of all ranks: {logs})", file=sys.stderr)


def _read_failure(rank: int, failure: ProcessFailure) -> RankFailure:
    message: Any = failure.message
    if isinstance(message, dict) and "time_s" in message["extraInfo"]:
        extra = message["extraInfo"]
        return RankFailure(
            rank=rank,
            summary=message["message"],
            traceback=extra["py_callstack"],
            time_s=extra["time_s"],
            is_user_error=extra["user_error"],
        )
    if failure.exitcode < 0:
        killer = signal.Signals(-failure.exitcode)
        hint = "; the machine may be out of memory" if killer is signal.SIGKILL else ""
        summary = f"killed by {killer.name}{hint}"
        return RankFailure(rank=rank, summary=summary, time_s=failure.timestamp, killer=killer)
    return RankFailure(rank=rank, summary=f"exit code {failure.exitcode}", time_s=failure.timestamp)


def first_failure(failures: Sequence[RankFailure]) -> RankFailure | None:
    """The failure that the others follow from.

    A process that is killed, or exits, leaves no record, and its peers raise before the agent sees it: at
    about the time of the first exception it is the cause. SIGTERM is how the agent ends the other ranks.
    """
    if not failures:
        return None
    raised = min((one.time_s for one in failures if one.traceback is not None), default=float("inf"))

    def order(one: RankFailure) -> tuple[int, float]:
        if one.killer is signal.SIGTERM:
            return 2, one.time_s
        silent = one.traceback is None and one.time_s < raised + _CAUSE_S
        return (0 if silent else 1), one.time_s

    return min(failures, key=order)


def _rank_variables(processes: int) -> dict[str, str]:
    """What the ranks find in their environment beside torchrun's variables; the user's own settings stay."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // processes)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_SHUTDOWN_TIMEOUT_S),
    }
    variables = {
        LAUNCHER_VARIABLE: str(os.getpid()),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # Otherwise folders of the current directory could be imported in place of packages.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }
    variables[TERMINAL_VARIABLE] = ""
    if sys.stderr.isatty():
        with contextlib.suppress(OSError):
            variables[TERMINAL_VARIABLE] = os.ttyname(sys.stderr.fileno())
    return {**{name: os.environ.get(name, value) for name, value in defaults.items()}, **variables}


@contextlib.contextmanager
def _changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set `variables` for the ranks, which inherit this process's environment; the agent takes no other."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _agent_log(path: Path) -> Iterator[None]:
    """Keep what the agent says about its work out of the user's way, in `path`."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)
        handler.close()


class _RankLogs(LogsSpecs):
    """Files rank-N.out and rank-N.err in one directory; rank 0's are shown as they grow."""

    def __init__(self, directory: Path) -> None:
        super().__init__(log_dir=str(directory))
        self._directory = directory

    @property
    def root_log_dir(self) -> str:
        return str(self._directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destination = LogsDest()
        for local_rank, variables in envs.items():
            stem = str(self._directory / f"rank-{variables['RANK']}")
            destination.stdouts[local_rank] = f"{stem}.out"
            destination.stderrs[local_rank] = f"{stem}.err"
            destination.error_files[local_rank] = variables[ERROR_FILE_VARIABLE] = f"{stem}.error.json"
            if variables["RANK"] == "0":
                destination.tee_stdouts[local_rank] = f"{stem}.out"
                destination.tee_stderrs[local_rank] = f"{stem}.err"
        return destination


class _StopRelay:
    """Passes the first stop signal of this process on to each rank, once.

    A rank is in a session of its own: neither Ctrl-C nor a closed terminal (SIGHUP) reaches it directly.
    SIGHUP counts as SIGTERM, unless nohup made it ignored. The third Ctrl-C kills the ranks.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._interrupts = 0
        self._previous: dict[signal.Signals, Any] = {}
        self._told: set[int] = set()
        self._done = threading.Event()
        # A handler alone would miss the ranks that start after the signal came.
        self._thread = threading.Thread(target=self._relay, name="stop-relay", daemon=True)

    def __enter__(self) -> Self:
        for signum in (*STOP_SIGNALS, signal.SIGHUP):
            if signum is not signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._handle)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.SIGTERM if signum == signal.SIGHUP else signal.Signals(signum)
        elif signum == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts == 1:
                os.write(2, b"already stopping; Ctrl-C once more ends the run without saving\n")

    def _relay(self) -> None:
        while not self._done.wait(_POLL_S):
            if self.received is None:
                continue
            for rank in psutil.Process().children():
                with contextlib.suppress(ProcessLookupError):
                    if self._interrupts > 1:
                        os.killpg(rank.pid, signal.SIGKILL)
                    elif rank.pid not in self._told:
                        self._told.add(rank.pid)
                        os.kill(rank.pid, self.received)

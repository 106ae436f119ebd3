"""Starts the ranks of a run and restarts them after every failure, for as long as the run makes progress.

One failure cannot show whether a machine or the program is at fault. So any failure of a rank (a crash, a kill, a hang)
causes a new start from the newest intact checkpoint, with a new agent and a new rendezvous. After `restart.max_cycles`
consecutive starts without a new checkpoint, or two that end alike before their first step or at a limit of the
operating system, the launcher gives up. A mistake of the user is not retried, and a stop signal or the deadline ends
the run.

Exit codes of `lightscale train`, for people and job scripts:

    0   finished    all steps are done
    75  resumable   stopped by a signal or the deadline, and saved: start the same command again
    1   resumable   a rank failed, with --no-restart or --nodes: start again while the run makes progress
        70  stopped     given up: the ranks failed repeatedly without a new checkpoint
        74  stopped     there are checkpoints, but none is intact; or all checkpoints are gone
        78  stopped     a mistake of the user, a limit of the operating system, or another fault that needs attention

The second word is the status in status.json.
"""

import functools
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lightscale.config.schema import RestartConfig
from lightscale.errors import UserError
from lightscale.launch.launcher.failures import RankFailure
from lightscale.launch.launcher.rank import EXIT_CRASHED
from lightscale.launch.launcher.relay import StopRelay
from lightscale.launch.launcher.torchrun import Launch
from lightscale.runs.full_disk import when_possible
from lightscale.runs.run_directory import RunDirectory, Status
from lightscale.training.health.heartbeat import STARTING
from lightscale.training.signals import DEADLINE, STOP_SIGNALS

EXIT_CODES: dict[Status, int] = {"finished": 0, "resumable": 75, "stopped": UserError.EXIT_CODE}
# The codes above 1 are those of sysexits.h: 70 EX_SOFTWARE, 74 EX_IOERR, 75 EX_TEMPFAIL, 78 EX_CONFIG. Python itself
# leaves with 1 or 2, and a shell reports a death by signal n as 128 + n, so that job scripts can tell them apart.
EXIT_GIVEN_UP = 70

# No scheduler or program sends the last one (Ctrl-\ in a terminal): the run is not restarted after it either.
_STOPPING = (*STOP_SIGNALS, signal.SIGQUIT)
_FROM_OUTSIDE = (*_STOPPING, signal.SIGKILL)
_LOG_TAIL_LINES = 30
# Of what a start writes before its first checkpoint.
_LEAST_BYTES = 1 << 20


class Nodes(Protocol):
    """The nodes of a run and the start of ranks on them: this machine, or the nodes of a job."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes when the launcher starts."""

    @property
    def translation(self) -> Mapping[signal.Signals, signal.Signals]:
        """Stop signals that its processes receive as other signals."""

    def launch_ranks(
        self, command: Sequence[str], *, processes: int, logs: Path, hang_timeout_s: float, deadline_s: float | None
    ) -> Launch:
        """Run `command` as ranks, `processes` per node, until they end; see `torchrun.run_node`.

        Raises NodesLost if that is no longer possible.
        """


class NodesLost(Exception):
    """Too few nodes are left: the run continues when the job has others."""


class RankMistake(UserError):
    """A UserError raised by a rank, with the rank's exit code."""

    def __init__(self, message: str, exit_code: int = UserError.EXIT_CODE) -> None:
        super().__init__(message)
        self.EXIT_CODE = exit_code


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Limits for hanging ranks, restarts and the end of a run."""

    config: RestartConfig
    again: bool = True
    """Whether to restart the ranks after a failure."""
    deadline_s: float | None = None
    """Time to save and exit, by this process's monotonic clock, because the wall clock may be set meanwhile."""


def run_ranks(
    run: RunDirectory, command: Sequence[str], *, processes: int, resume: str, policy: RestartPolicy, nodes: Nodes
) -> int:
    """Run `command` as ranks, `processes` on each of `nodes`, with restarts.

    Returns an exit code listed above. `resume` is the command line that resumes the run, for the last message. Raises
    UserError for a mistake of the user found by a rank, and DirectoryReplaced if `run`, which the caller holds, is
    gone.
    """
    # Of what the disk has, not of events: only a checkpoint that is there saves the next start from doing it again.
    newest, fruitless, launches = run.newest_checkpoint(), 0, 0
    wall: str | None = None

    def start() -> Launch:
        nonlocal launches
        # It describes an earlier start; a launch that is killed must leave none, so that the run counts as dead.
        run.remove_status()
        _check_space(run)
        logs = run.new_log_directory()
        launches += 1
        return nodes.launch_ranks(
            command,
            processes=processes,
            logs=logs,
            hang_timeout_s=policy.config.hang_timeout_s,
            deadline_s=since_the_epoch(policy.deadline_s),
        )

    def is_in_vain() -> bool:
        # A first start that cannot write is a mistake, which is said at once.
        late = policy.deadline_s is not None and time.monotonic() >= policy.deadline_s
        return launches == 0 or late or relay.received is not None

    # Around the loop, not around each launch: a signal between two launches must stop the next one.
    with StopRelay(nodes.translation) as relay:
        while True:
            try:
                launch = when_possible(start, give_up=is_in_vain)
            except NodesLost as error:
                # Resumable, as after a stop: the job script queues the job again, and gets other nodes.
                write_status(run, "resumable", str(error))
                return say_end(run, resume)
            except OSError:
                # The logs of the ranks are in the run: where it was removed, that is what happened.
                run.check_held()
                raise
            run.check_held()
            failure = launch.failure or missing_status(run)
            # A user's mistake (with an exit code) is reported as such even if a stop was requested meanwhile.
            if failure is not None and failure.mistake_code is None:
                stop = stop_reason(relay.received, failure, policy.deadline_s)
                # A job that is to stop is killed soon: a new start would not come as far as its first save.
                if stop is not None:
                    _leave_unsaved(run, failure, stop, launch)
                    failure = None
            if failure is None:
                return say_end(run, resume)
            # Nothing is lost by waiting for the disk that a start from the newest checkpoint needs too.
            when_possible(functools.partial(_record, run, failure, launch), give_up=is_in_vain)
            if failure.mistake_code is not None:
                # Another start would bury the message.
                write_status(run, "stopped", _reason(failure))
                raise RankMistake(failure.summary, failure.mistake_code)
            print_failure(failure, launch.logs)
            if not policy.again:
                # Not 75: a job script that restarts by itself must be able to tell a failure from a stop in time.
                write_status(run, "resumable", _reason(failure))
                print(f"resume from the newest checkpoint with: {resume}", file=sys.stderr)
                return EXIT_CRASHED
            # Damage may have removed checkpoints: going back is no progress, and reaching the same one again is none.
            reached = run.newest_checkpoint()
            fruitless = 0 if reached > newest else fruitless + 1
            newest = max(newest, reached)
            before, wall = wall, _wall(failure, launch)
            # A limit may also be met after steps: where they led to a checkpoint, the next start is no repetition.
            is_again = fruitless > 0 and wall is not None and wall == before
            if fruitless >= policy.config.max_cycles or is_again:
                return _give_up(run, failure, fruitless)
            again = functools.partial(
                run.event, "restart", reason=_reason(failure), checkpoint=reached, fruitless_starts=fruitless
            )
            when_possible(again, give_up=is_in_vain)
            _say_restart(reached, fruitless, policy.config.max_cycles)


def _check_space(run: RunDirectory) -> None:
    """Raise OSError where the records of ranks have no space: they could not even say so."""
    probe = run.path / ".space"
    try:
        with probe.open("wb") as file:
            file.write(bytes(_LEAST_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


def since_the_epoch(deadline_s: float | None) -> float | None:
    """`deadline_s` in seconds since the epoch, for other machines, whose monotonic clocks differ."""
    return None if deadline_s is None else time.time() + deadline_s - time.monotonic()


def missing_status(run: RunDirectory) -> RankFailure | None:
    """The failure of ranks that all exit with code 0 without writing status.json; None: they wrote it."""
    if run.read_status() is not None:
        return None
    return RankFailure(rank=0, summary="all ranks ended without writing status.json", time_s=time.time())


def stop_reason(received: signal.Signals | None, failure: RankFailure, deadline_s: float | None) -> str | None:
    """Reason not to restart the ranks after `failure`; None: no stop was requested."""
    # A rank may have been signalled itself, before the ranks agreed on stopping: the scheduler signals all processes.
    stop = received or (failure.killer if failure.killer in _STOPPING else None)
    if stop is None and deadline_s is not None and time.monotonic() >= deadline_s:
        return DEADLINE
    return stop.name if stop is not None else None


def _leave_unsaved(run: RunDirectory, failure: RankFailure, stop: str, launch: Launch) -> None:
    """The ranks were to stop, but at least one was lost on the way."""
    if failure.traceback is not None:
        print_failure(failure, launch.logs)
    # Rank 0 may have written it, and another rank died afterwards.
    if run.read_status() is None:
        write_status(run, "resumable", f"{stop}, and rank {failure.rank} did not save: {failure.summary}")


def say_end(run: RunDirectory, resume: str) -> int:
    """Print the end of the run from its status; returns the exit code."""
    status = run.read_status()
    # Ranks that end without one have failed.
    assert status is not None
    print(f"{status.status} at step {status.step}, {status.tokens:,} tokens: {status.reason}", file=sys.stderr)
    if status.status == "resumable":
        print(f"resume with: {resume}", file=sys.stderr)
    return EXIT_CODES[status.status]


def _give_up(run: RunDirectory, failure: RankFailure, starts: int) -> int:
    reason = f"given up after {starts} starts in a row without a new checkpoint; last failure: {_reason(failure)}"
    write_status(run, "stopped", reason)
    run.event("given_up", reason=reason)
    print(reason, file=sys.stderr)
    return EXIT_GIVEN_UP if failure.limit is None else UserError.EXIT_CODE


def _wall(failure: RankFailure, launch: Launch) -> str | None:
    """What a start met, alike each time but for numbers; None: the next start may not meet it.

    That is a limit, or whatever it met before its first step. Signals that people, schedulers and the kernel send come
    at any time, and ranks that did not come may come.
    """
    if failure.limit is not None:
        # Which rank meets it first, and where, differs from start to start.
        return failure.limit
    if failure.killer in _FROM_OUTSIDE or failure.exit_code == os.EX_TEMPFAIL:
        return None
    if any(beat.doing != STARTING for beat in launch.beats.values()):
        return None
    return re.sub(r"\d+", "0", _reason(failure))


def _say_restart(checkpoint: int, fruitless: int, max_cycles: int) -> None:
    origin = f"from the checkpoint of step {checkpoint}" if checkpoint else "from the beginning"
    count = f"; {fruitless} of at most {max_cycles} starts in a row without a new checkpoint" if fruitless else ""
    print(f"restarting the ranks {origin}{count}", file=sys.stderr)


def _record(run: RunDirectory, failure: RankFailure, launch: Launch) -> None:
    """An event with what each rank was doing when the failure was met."""
    doing = {
        str(rank): {"step": beat.step, "doing": beat.doing, "silent_s": round(time.monotonic() - beat.time_s, 1)}
        for rank, beat in launch.beats.items()
    }
    step, _ = run.progress()
    run.event("failed", rank=failure.rank, reason=failure.summary, step=step, logs=str(launch.logs), ranks=doing)


def write_status(run: RunDirectory, status: Status, reason: str) -> None:
    """Replace the run's status, at the step that its records have reached."""
    step, tokens = run.progress()
    run.write_status(status, reason=reason, step=step, tokens=tokens)


def _reason(failure: RankFailure) -> str:
    return f"rank {failure.rank}: {failure.summary}"


def print_failure(failure: RankFailure, logs: Path) -> None:
    """Print the rank's traceback, if any, and one line about the failure."""
    if failure.traceback is not None:
        # Not to blame for a limit is the place in the program where it was met; the log of the rank has it.
        if failure.limit is None:
            print(failure.traceback, file=sys.stderr, end="")
    elif failure.rank != 0:
        # Rank 0's output was shown as it came.
        text = (logs / f"rank-{failure.rank}.err").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines()[-_LOG_TAIL_LINES:]:
            print(line, file=sys.stderr)
    print(f"rank {failure.rank} failed: {failure.summary} (output of all ranks: {logs})", file=sys.stderr)

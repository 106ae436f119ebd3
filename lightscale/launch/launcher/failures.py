"""Failures of ranks: their records, and the first cause among them."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lightscale.launch.launcher.rank import TIMED_OUT
from lightscale.training.health.heartbeat import Beat

# Ranks notice a dead peer at once; what dies later was ended by the agent.
_CAUSE_S = 10
# A heartbeat until then was written before the failure was noticed.
_LATE_S = 1.0
# Of the limits at which the kernel sends a signal.
_REMEDIES = {signal.SIGXCPU: "raise the limit of CPU time (`ulimit -t`)"}


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The failure of one rank."""

    rank: int
    summary: str
    """One line, or the complete message of a user's mistake."""
    traceback: str | None = None
    """Python's traceback; None: the process ended without a record, for example by a signal."""
    time_s: float
    """Time of the failure, in seconds since the epoch."""
    killer: signal.Signals | None = None
    """The signal that ended the process."""
    is_recorded: bool = False
    """Whether the rank itself recorded the time and the cause."""
    exit_code: int | None = None
    """Exit code of a UserError; None for other failures."""
    limit: str | None = None
    """The remedy where a limit of the operating system was met, also in `summary`; None for other failures."""

    @property
    def mistake_code(self) -> int | None:
        """`exit_code` if another start would fail in the same way; None if it may succeed, as after missing ranks."""
        return None if self.exit_code == os.EX_TEMPFAIL else self.exit_code


def read_failure(rank: int, failure: ProcessFailure) -> RankFailure:
    """Combine the agent's report with the rank's own record (`launch/launcher/rank.py`)."""
    message: Any = failure.message
    # Only records of `rank.py` have time_s. Otherwise the process left none, and its exit code is all there is.
    if isinstance(message, dict) and "time_s" in message["extraInfo"]:
        extra = message["extraInfo"]
        return RankFailure(
            rank=rank,
            summary=message["message"],
            traceback=extra["py_callstack"] or None,
            time_s=extra["time_s"],
            killer=signal.Signals(extra["signal"]) if extra["signal"] else None,
            is_recorded=True,
            exit_code=extra["exit_code"],
            limit=extra["limit"],
        )
    if failure.exitcode < 0:
        killer = signal.Signals(-failure.exitcode)
        limit = _REMEDIES.get(killer)
        # The kernel's out-of-memory killer sends SIGKILL, and leaves no trace in the output of the rank.
        hint = limit or ("the machine may be out of memory" if killer is signal.SIGKILL else None)
        summary = f"killed by {killer.name}" if hint is None else f"killed by {killer.name}; {hint}"
        return RankFailure(rank=rank, summary=summary, time_s=failure.timestamp, killer=killer, limit=limit)
    return RankFailure(rank=rank, summary=f"exit code {failure.exitcode}", time_s=failure.timestamp)


def first_failure(failures: Sequence[RankFailure]) -> RankFailure | None:
    """The failure that caused the others.

    A process that is killed, or exits, leaves no record, and its peers raise before the agent detects it. If it ended
    at about the time of the first record, it is the cause. The agent ends the other ranks with SIGTERM.
    """
    if not failures:
        return None
    recorded = min((one.time_s for one in failures if one.is_recorded), default=float("inf"))

    def order(one: RankFailure) -> tuple[int, float]:
        if one.killer is signal.SIGTERM and not one.is_recorded:
            return 2, one.time_s
        silent = not one.is_recorded and one.time_s < recorded + _CAUSE_S
        return (0 if silent else 1), one.time_s

    return min(failures, key=order)


def out_of_memory(failure: RankFailure) -> RankFailure:
    """`failure`, after the kernel has killed processes for want of memory: a rank without a record was one of them."""
    if failure.killer is not signal.SIGKILL:
        return failure
    remedy = "raise the memory of the job or container, or use smaller batches or fewer ranks per host"
    summary = f"killed by SIGKILL, by the kernel for want of memory; {remedy}"
    return replace(failure, summary=summary, limit=remedy)


def located(failure: RankFailure, beats: Mapping[int, Beat]) -> RankFailure:
    """`failure` with the rank's position and, after a timeout of a collective, the missing rank."""
    own = beats.get(failure.rank)
    if own is None or failure.exit_code is not None:
        return failure
    notes = [own.where]
    if TIMED_OUT.search(failure.summary):
        # Heartbeats are times of the monotonic clock, failures of the wall clock.
        failed_s = time.monotonic() - (time.time() - failure.time_s)
        first, last = (choose(beats.values(), key=lambda beat: beat.time_s) for choose in (min, max))
        # A rank that still wrote heartbeats after the time-out was slow, not stuck. Otherwise the one that has been
        # silent the longest is the one that all others waited for.
        if last.time_s > failed_s + _LATE_S:
            notes.append(f"rank {last.rank} arrived {last.time_s - failed_s:.0f} s later")
        elif first.where != own.where:
            notes.append(f"no heartbeat of rank {first.rank} for {failed_s - first.time_s:.0f} s, at {first.where}")
    return replace(failure, summary=f"{failure.summary} ({'; '.join(notes)})")

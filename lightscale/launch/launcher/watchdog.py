"""Detects hanging ranks, reports their position, and kills all ranks; the launcher decides about a restart.

No rank needs to cooperate: its heartbeats are read from a file in mapped memory. Python's fault handler writes the
stacks from a signal handler, which works while a thread holds the interpreter. Only a stopped process cannot write its
stacks; it is reported instead.

A rank's last heartbeat sets its longest silence (`Beat.allowed_s`): a save or a first step takes longer than a step.
Before the first heartbeat, a start has its own limit.
"""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from lightscale.launch.launcher.rank import STACKS_SIGNAL, stacks_file
from lightscale.runs.repeated import Repeated
from lightscale.training.health.heartbeat import Beat, read_heartbeats, start_allowance_s

# Short against the least time that a rank may be silent (restart.hang_timeout_s, 60 s by default). Each look reads 128
# bytes a rank.
_POLL_S = 0.2
# A longer pause is the watchdog's own, as when the whole job was suspended: ranks may be silent meanwhile.
_LONGEST_POLL_S = 1.0
# Writing the stacks takes milliseconds. A rank that has not begun by then is in a system call that no signal
# interrupts, as on a dead file system, and never will.
_STACKS_S = 2.0
# What a rank does in a step, and behind it with the number of that step, in this order; then all else, such as saving.
# A rollback comes before the steps that it leads back to, whose numbers are lower.
_ROLLBACK = "rolling back"
_ORDER = ("reading data", "forward and backward", "optimizer", "validation", "evaluation", "agreeing")


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Ranks that were silent for too long."""

    ranks: tuple[int, ...]
    """Ranks that the others probably wait for."""
    reason: str
    since_s: float
    """Time of their last heartbeat, in seconds since the epoch."""
    time_s: float
    """Time of the detection, in seconds since the epoch."""
    are_stopped: bool = False
    """Whether a signal stopped them; they then wait for no other rank."""


class Watchdog:
    """Watches `ranks`, children of this process, whose heartbeats are in the file `heartbeats`, their output in `logs`.

    A context manager. After a rank has been silent for too long, `hang` names it, `logs` has the stacks of all ranks'
    threads, and all ranks have been killed. A rank may always be silent for `patience_s`, for example while it waits
    for another host.
    """

    def __init__(
        self, heartbeats: Path, *, logs: Path, ranks: range, hang_timeout_s: float, patience_s: float = 0.0
    ) -> None:
        self.hang: Hang | None = None
        self._path, self._logs = heartbeats, logs
        self._ranks, self._patience_s = ranks, patience_s
        self._start_allowance_s = start_allowance_s(hang_timeout_s)
        self._silent_s = dict.fromkeys(ranks, 0.0)
        self._last: dict[int, Beat] = {}
        self._looked_s = 0.0
        # torch's agent has the main thread until all ranks have ended.
        self._watching = Repeated(self._watch, period_s=_POLL_S, name="watchdog")

    def __enter__(self) -> Self:
        self._looked_s = time.monotonic()
        self._watching.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._watching.stop()
        # Each rank opens its file when it starts, because a signal handler can only write.
        for rank in self._ranks:
            path = stacks_file(self._logs, rank)
            # Where the disk forbids it, an empty file remains.
            with contextlib.suppress(OSError):
                if not path.stat().st_size:
                    path.unlink()

    def _watch(self) -> None:
        # Once is enough: no rank is left, torch's agent detects that, and the launcher decides about the next start.
        if self.hang is not None:
            return
        now_s = time.monotonic()
        late = self._late_ranks(min(now_s - self._looked_s, _LONGEST_POLL_S))
        self._looked_s = now_s
        processes = rank_processes()
        # Without processes torch's agent has detected a failure already, and is about to end.
        if late and processes:
            # Before the stacks, which take seconds: the reason is about this moment.
            self.hang = self._describe(late, processes)
            self._dump_stacks(processes)
            for process in processes:
                # With all processes that the rank started. SIGKILL is the only signal that ends a stopped process.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _late_ranks(self, passed_s: float) -> list[int]:
        """The ranks that have been silent for too long, `passed_s` after the last look."""
        beats, late = read_heartbeats(self._path), []
        for rank in self._ranks:
            beat = beats.get(rank)
            # Counted by this process's looks, not by the beat's time: silence while all were suspended does not count.
            changed = beat != self._last.get(rank)
            self._silent_s[rank] = 0.0 if changed else self._silent_s[rank] + passed_s
            allowed_s = self._start_allowance_s if beat is None else beat.allowed_s
            # A rank that has ended is silent too, and is torchrun's to notice.
            if self._silent_s[rank] > max(allowed_s, self._patience_s) and (beat is None or _is_alive(beat.process_id)):
                late.append(rank)
        self._last = beats
        return late

    def _describe(self, late: Sequence[int], processes: Sequence[psutil.Process]) -> Hang:
        beats = {rank: beat for rank, beat in self._last.items() if _is_alive(beat.process_id)}
        stopped = {process.pid for process in processes if _status(process) == psutil.STATUS_STOPPED}
        silent_s = max(self._silent_s[rank] for rank in late)
        ranks = [rank for rank, beat in beats.items() if beat.process_id in stopped]
        are_stopped = bool(ranks)
        if are_stopped:
            doing = f", stopped by a signal at {beats[ranks[0]].where}"
        elif mute := [rank for rank in late if rank not in beats]:
            ranks, doing = mute, ", starting Python"
        else:
            # Others wait for the one that is least far: it may have come there last, when it had to wait for a core.
            cause = min(beats.values(), key=lambda beat: (_progress(beat), beat.time_s))
            # Ranks that do the same wait for one another; the times do not show which of them is the cause.
            ranks = [rank for rank, beat in beats.items() if beat.where == cause.where]
            doing = f" at {cause.where}"
        others = f", like {_names(ranks[1:])}" if len(ranks) > 1 else ""
        reason = f"no heartbeat for {silent_s:.1f} s{doing}{others}"
        # Not by this watchdog's own readings, which are too far apart to show who was silent first on another node.
        clock_s = time.monotonic()
        oldest_s = max(clock_s - beats[rank].time_s if rank in beats else self._silent_s[rank] for rank in ranks)
        now_s = time.time()
        return Hang(ranks=tuple(ranks), reason=reason, since_s=now_s - oldest_s, time_s=now_s, are_stopped=are_stopped)

    def _dump_stacks(self, processes: Sequence[psutil.Process]) -> None:
        """Have each rank write its stacks, and wait for those that can."""
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, STACKS_SIGNAL)
        running = sum(_status(process) != psutil.STATUS_STOPPED for process in processes)
        deadline = time.monotonic() + _STACKS_S
        while time.monotonic() < deadline:
            sizes = [stacks_file(self._logs, rank) for rank in self._ranks]
            if sum(path.exists() and path.stat().st_size > 0 for path in sizes) >= running:
                break
            time.sleep(0.05)
        # What has begun to be written gets a moment to be whole.
        time.sleep(0.2)


def rank_processes() -> list[psutil.Process]:
    """The ranks of this launcher that have not ended."""
    return [process for process in psutil.Process().children() if _is_alive(process.pid)]


def _is_alive(process_id: int) -> bool:
    try:
        # Until torch's agent has reaped it, a dead rank keeps its process id.
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


def _names(ranks: Sequence[int]) -> str:
    """rank 1; ranks 0, 2"""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _progress(beat: Beat) -> tuple[int, int]:
    """How far a rank is: its step, and its place in it."""
    if beat.doing == _ROLLBACK:
        return -1, 0
    return beat.step, _ORDER.index(beat.doing) if beat.doing in _ORDER else len(_ORDER)

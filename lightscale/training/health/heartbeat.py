"""Heartbeats of the ranks, in a small file in memory that the launcher's watchdog reads without asking them.

A rank records its next action, and how long it may be silent from then on. It writes to mapped memory, which needs no
other process or thread. The last record stays readable if the rank hangs in the interpreter, is stopped or dead. The
file has two slots for each rank, written in turn, so that one of them is always whole. It is not on the disk of the
run: a mapped file on a disk that becomes read-only or full would kill its writers.

How long a rank may be silent, for `restart.hang_timeout_s` = H:

- within a step, the longer of H and 5 times the slowest (99th percentile) of the last steps;
- in validation, evaluation, saving, rolling back and leaving, the longer of 10 H and 5 times the longest of that kind
  so far;
- when starting, and in the first steps, whose kernels are compiled, the longer of 10 H and two minutes.
"""

import contextlib
import math
import mmap
import os
import struct
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightscale.errors import UserError
from lightscale.files import read_regular

# The file, for the ranks of a launch; without it no watchdog reads them.
HEARTBEATS_VARIABLE = "LIGHTSCALE_HEARTBEATS"

STARTING = "starting"
"""What a rank does before its first step."""
# These differ too much from step to step to be part of a step's time, and have allowances of their own.
_LONG = {STARTING, "validation", "evaluation", "saving", "rolling back", "leaving"}
_LONGER = 10.0
_LEAST_START_S = 120.0
_SLOWER = 5.0
# With 100 the 99th percentile passes over exactly one step.
_STEPS_REMEMBERED = 100

# Time, allowed time, step, process id, activity; a checksum comes before.
# 64 bytes with the checksum, and without padding: a slot is one cache line, which no other rank writes to.
_FIELDS = struct.Struct("<ddqq28s")
_CHECKSUM = struct.Struct("<I")
_SLOT_BYTES = _CHECKSUM.size + _FIELDS.size
_RANK_BYTES = 2 * _SLOT_BYTES
_MOST_BYTES = _RANK_BYTES << 20


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The last heartbeat of a rank."""

    rank: int
    time_s: float
    """When, by the machine's monotonic clock."""
    allowed_s: float
    """How long it may be silent from then on."""
    step: int
    process_id: int
    doing: str

    @property
    def where(self) -> str:
        """step 7, reading data"""
        return f"step {self.step}, {self.doing}"


class Heartbeat:
    """Writes this rank's heartbeats; without effect where no watchdog reads them."""

    def __init__(self, hang_timeout_s: float, environ: Mapping[str, str] = os.environ) -> None:
        self._hang_timeout_s = hang_timeout_s
        self.where = "the beginning"
        """The step and activity that was said last."""
        self._last: Beat | None = None
        self._longest_s: dict[str, float] = {}
        self._steps_s: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._step_s = 0.0
        self._is_first_step = True
        self._writes = 0
        self._file: mmap.mmap | None = None
        # Set by our launcher only: with torchrun or srun nobody reads heartbeats, and only `where` is kept, for
        # messages.
        path = environ.get(HEARTBEATS_VARIABLE)
        if path:
            self._rank = int(environ["RANK"])
            # The mapping outlives the file object.
            with Path(path).open("r+b") as file:
                self._file = mmap.mmap(file.fileno(), 0)

    def beat(self, doing: str, *, step: int) -> None:
        """From now on this rank is `doing` that (at most 28 bytes), as part of `step`."""
        self.where = f"step {step}, {doing}"
        if self._file is None:
            return
        now_s = time.monotonic()
        if self._last is not None:
            self._learn(self._last, now_s, step)
        self._last = Beat(
            rank=self._rank,
            time_s=now_s,
            allowed_s=self._allowed_s(doing),
            step=step,
            process_id=os.getpid(),
            doing=doing,
        )
        # The slot that is older now: a kill in the middle of the copy leaves the other one whole.
        start = self._rank * _RANK_BYTES + self._writes % 2 * _SLOT_BYTES
        self._file[start : start + _SLOT_BYTES] = _pack(self._last)
        self._writes += 1

    def expect_other_steps(self) -> None:
        """The step that begins now is not like those before it, as after a change of the sequence length."""
        self._steps_s.clear()
        self._is_first_step = True
        self._step_s = 0.0
        # The next beat ends an activity of the old kind of step, and must not count as one of the new kind.
        self._last = None

    def _learn(self, before: Beat, now_s: float, step: int) -> None:
        elapsed_s = now_s - before.time_s
        if before.doing in _LONG:
            self._longest_s[before.doing] = max(elapsed_s, self._longest_s.get(before.doing, 0.0))
        else:
            self._step_s += elapsed_s
        # All phases of a step make up its time, except those of `_LONG`; it is known when the next one begins.
        if step != before.step and self._step_s:
            # The first one compiles kernels: later ones must not be measured by it.
            if not self._is_first_step:
                self._steps_s.append(self._step_s)
            self._is_first_step = False
            self._step_s = 0.0

    def _allowed_s(self, doing: str) -> float:
        if doing in _LONG - {STARTING}:
            return max(_LONGER * self._hang_timeout_s, _SLOWER * self._longest_s.get(doing, 0.0))
        # No step of this kind is known yet, and the first one may compile kernels.
        if doing == STARTING or not self._steps_s:
            return start_allowance_s(self._hang_timeout_s)
        # Not the longest: one step in a hundred may have waited for the file system.
        slowest_s = sorted(self._steps_s)[math.ceil(0.99 * len(self._steps_s)) - 1]
        return max(self._hang_timeout_s, _SLOWER * slowest_s)


def start_allowance_s(hang_timeout_s: float) -> float:
    """How long a rank may take to start."""
    return max(_LONGER * hang_timeout_s, _LEAST_START_S)


def create_heartbeats(path: Path, num_ranks: int) -> None:
    """Make the file for the ranks of one launch."""
    path.write_bytes(bytes(num_ranks * _RANK_BYTES))


@contextlib.contextmanager
def shared_heartbeats(path: Path, num_ranks: int) -> Iterator[Path]:
    """Such a file in memory, under the name that is returned, for as long as this process is within.

    `path` is a link to it, and afterwards a file with its last content, for readers of the logs.
    """
    if not hasattr(os, "memfd_create"):
        create_heartbeats(path, num_ranks)
        yield path.absolute()
        return
    # Without a name of its own: nothing remains of it when this process is killed.
    file = os.memfd_create("heartbeats")
    try:
        os.ftruncate(file, num_ranks * _RANK_BYTES)
        shared = Path(f"/proc/{os.getpid()}/fd/{file}")
        path.symlink_to(shared)
        try:
            yield shared
        finally:
            # No more than a help for readers: the disk of the run may be full, or gone.
            with contextlib.suppress(OSError):
                path.unlink()
                path.write_bytes(os.pread(file, num_ranks * _RANK_BYTES, 0))
    finally:
        os.close(file)


def read_heartbeats(path: Path) -> dict[int, Beat]:
    """The last heartbeat of each rank; empty without a file. Ranks without a heartbeat are missing."""
    # Read without a lock: a slot that is being written fails its checksum, and the other one of its rank holds.
    try:
        data = read_regular(path, what="the heartbeats of the ranks", most_bytes=_MOST_BYTES, follow_links=True)
    except (OSError, UserError):
        # Removed with the run, or damaged: a rank that says nothing is late, which the watchdog decides about.
        return {}
    beats = {}
    for rank in range(len(data) // _RANK_BYTES):
        slots = (data[rank * _RANK_BYTES + i * _SLOT_BYTES :][:_SLOT_BYTES] for i in range(2))
        whole = [beat for beat in (_unpack(rank, slot) for slot in slots) if beat is not None]
        if whole:
            beats[rank] = max(whole, key=lambda beat: beat.time_s)
    return beats


def _pack(beat: Beat) -> bytes:
    doing = beat.doing.encode()
    assert len(doing) <= 28, beat.doing
    fields = _FIELDS.pack(beat.time_s, beat.allowed_s, beat.step, beat.process_id, doing)
    return _CHECKSUM.pack(zlib.crc32(fields)) + fields


def _unpack(rank: int, slot: bytes) -> Beat | None:
    """None: nothing was written there, or it is being written."""
    fields = slot[_CHECKSUM.size :]
    if zlib.crc32(fields) != _CHECKSUM.unpack_from(slot)[0] or not any(fields):
        return None
    time_s, allowed_s, step, process_id, doing = _FIELDS.unpack(fields)
    return Beat(
        rank=rank,
        time_s=time_s,
        allowed_s=allowed_s,
        step=step,
        process_id=process_id,
        doing=doing.rstrip(b"\0").decode(errors="replace"),
    )

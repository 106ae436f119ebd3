"""Whether the streams of a run wait for each other wherever they meet in memory: a happens-before check of its records.

Two accesses of the same bytes, one of them a write, must be ordered: by the order of a stream, or by a chain of events
that streams wait for and of waits of the host. What nothing orders may be right on one GPU and wrong on the next.
Vector clocks (Fidge; Mattern, 1988) of the streams and of the host are kept along the records, and for each byte who
wrote it last and who has read it since, as race detectors of threads do (Flanagan and Freund, FastTrack, 2009).

The rules are CUDA's and those of PyTorch's allocator:

- A stream's work comes in the order in which it was launched, behind all that the host has waited for till then.
- A stream that waits for an event comes behind what the event's stream had been given when the event was recorded.
- Memory belongs to the stream on which it was taken: the allocator hands it out again in the order of that stream, and
  asks no other one but those that ``record_stream`` has named. Pinned memory that PyTorch itself copies from or to is
  not handed out again before the copy is done.

All threads of the host are taken for one, which orders more than there is: a race between two of them can be missed;
none is reported that is not there.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cuda_twin.recorded.kinds import Kind

HOST = 2**64 - 1
"""In place of a stream: the host, as ``HOST_STREAM`` in ``device.h``."""
_ACCESSES = (Kind.READ, Kind.WRITE, Kind.FRESH)
_WAITS_FOR_ALL = {"cudaDeviceSynchronize", "cudaMemcpy", "cudaFree"}
_Clock = dict[int, int]


@dataclass(frozen=True)
class Access:
    """What a stream, or the host, did to some bytes."""

    agent: int
    time: int
    """Of the agent: how many accesses it had made."""
    what: str


@dataclass(frozen=True)
class Race:
    """Two accesses that nothing orders."""

    first: str
    second: str

    def __str__(self) -> str:
        return f"nothing orders {self.first} before {self.second}"


@dataclass(slots=True)
class _Range:
    """Bytes that all were accessed alike."""

    start: int
    end: int
    written: Access | None = None
    read: dict[int, Access] = field(default_factory=dict)
    """By agent, the last one."""
    shared: frozenset[int] = frozenset()
    """Streams that the allocator waits for before it hands the bytes out again."""

    def cut(self, at: int) -> "_Range":
        """The part from ``at`` on; this one ends there."""
        rest = _Range(at, self.end, self.written, dict(self.read), self.shared)
        self.end = at
        return rest


class _Memory:
    """What was done to each byte last."""

    def __init__(self) -> None:
        self._ranges: list[_Range] = []
        self._starts: list[int] = []

    def within(self, start: int, end: int) -> list[_Range]:
        """The ranges of exactly these bytes, cut and made as needed."""
        place = max(bisect_right(self._starts, start) - 1, 0)
        found: list[_Range] = []
        last = place
        kept: list[_Range] = []
        at = start
        while last < len(self._ranges) and self._ranges[last].start < end:
            one = self._ranges[last]
            last += 1
            if one.end <= start:
                kept.append(one)
                continue
            if one.start < start:
                kept.append(one)
                one = one.cut(start)
            if one.start > at:
                found.append(_Range(at, one.start))
            rest = one.cut(end) if one.end > end else None
            found.append(one)
            at = one.end
            if rest:
                self._replace(place, last, [*kept, *found, rest])
                return found
        if at < end:
            found.append(_Range(at, end))
        self._replace(place, last, [*kept, *found])
        return found

    def as_one(self, start: int, end: int, made: _Range) -> None:
        """``made`` in place of the ranges of these bytes, which were just asked for."""
        first, last = bisect_right(self._starts, start) - 1, bisect_right(self._starts, end - 1)
        self._replace(first, last, [made])

    def _replace(self, first: int, last: int, ranges: list[_Range]) -> None:
        self._ranges[first:last] = ranges
        self._starts[first:last] = [one.start for one in ranges]


class _Order:
    """Clocks of streams, events and the host, and the memory that they meet in."""

    def __init__(self) -> None:
        self.races: Counter[Race] = Counter()
        self._clocks: dict[int, _Clock] = {HOST: {HOST: 0}}
        self._events: dict[int, _Clock] = {}
        self._memory = _Memory()

    def wait(self, stream: int, event: int) -> None:
        """The stream waits for the event."""
        _join(self._clock(stream), self._events.get(event, {}))

    def record(self, stream: int, event: int) -> None:
        """The event is recorded on the stream."""
        self._events[event] = dict(self._clock(stream))

    def host_wait(self, call: str, stream: int, event: int) -> None:
        """The host waits, as the call does."""
        host = self._clocks[HOST]
        if call in _WAITS_FOR_ALL:
            for clock in list(self._clocks.values()):
                _join(host, clock)
        elif event:
            _join(host, self._events.get(event, {}))
        else:
            _join(host, self._clock(stream))

    def share(self, stream: int, start: int, end: int) -> None:
        """The allocator hands these bytes out again when the stream is done with them."""
        for one in self._memory.within(start, end):
            one.shared |= {stream}

    def access(self, kind: Kind, agent: int, start: int, end: int, what: str) -> None:
        """Look at an access, and remember it."""
        clock = self._clock(agent)
        clock[agent] = clock.get(agent, 0) + 1
        own = Access(agent, clock[agent], what)
        for one in self._memory.within(start, end):
            others = [one.written] if one.written else []
            if kind != Kind.READ:
                others += one.read.values()
            for other in others:
                excused = kind == Kind.FRESH and (agent == HOST or other.agent in one.shared)
                if other.time > clock.get(other.agent, 0) and not excused:
                    self.races[Race(_said(other), _said(own))] += 1
            if kind == Kind.READ:
                one.read[agent] = own
            else:
                # Who comes behind this write comes behind all that it was ordered behind.
                one.written, one.read = own, {}
                one.shared = frozenset() if kind == Kind.FRESH else one.shared
        if kind == Kind.FRESH:
            self._memory.as_one(start, end, _Range(start, end, own))

    def _clock(self, agent: int) -> _Clock:
        clock = self._clocks.setdefault(agent, {agent: 0})
        if agent != HOST:
            # What the host launches comes behind all that it has done and waited for.
            _join(clock, self._clocks[HOST])
        return clock


def _join(clock: _Clock, other: _Clock) -> None:
    for agent, time in other.items():
        if time > clock.get(agent, 0):
            clock[agent] = time


def _in_time(rows: NDArray[np.void]) -> list[int]:
    """Numbers of rows; fresh memory, which is noted behind the operation that was handed it, comes before that."""
    numbers = np.arange(len(rows), dtype=np.float64)
    fresh = rows["kind"] == Kind.FRESH
    numbers[fresh] = rows["d"][fresh] - 0.5
    found: list[int] = np.argsort(numbers, kind="stable").tolist()
    return found


def _said(access: Access) -> str:
    return f"{access.what} on {'the host' if access.agent == HOST else f'stream {access.agent:#x}'}"


def races(
    rows: NDArray[np.void], names: dict[int, str], places: Sequence[str], *, without: Collection[int] = ()
) -> Counter[Race]:
    """Every pair of accesses that nothing orders, and in how many ranges of bytes.

    Args:
        rows: all records of a run, in order.
        names: of calls, by address.
        places: what accesses were made by, that Python knows.
        without: numbers of rows that are taken for not being there.
    """
    order = _Order()
    kinds = {kind.value: kind for kind in Kind}
    columns = [rows[key].tolist() for key in ("kind", "stream", "name", "a", "b", "c")]
    for number in _in_time(rows):
        if number in without:
            continue
        kind_number, stream, name, a, b, c = (column[number] for column in columns)
        kind = kinds[kind_number]
        if kind in _ACCESSES:
            order.access(kind, stream, a, a + b, names[name] or places[c])
        elif kind == Kind.SHARED:
            order.share(stream, a, a + b)
        elif kind == Kind.EVENT:
            order.record(stream, a)
        elif kind == Kind.WAIT:
            order.wait(stream, a)
        elif kind == Kind.HOST_WAIT or names[name] == "cudaFree":
            order.host_wait(names[name], stream, a)
    return order.races

"""What was asked of the null device: its records, read back and summed up."""

import ctypes
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType

import numpy as np
from numpy.typing import NDArray

from cuda_twin.installation import library
from cuda_twin.lone_rank import group_of
from cuda_twin.recorded.kinds import OF_MEMORY, Kind

_RECORD = np.dtype(
    [("kind", "u4"), ("device", "u4"), ("stream", "u8"), ("name", "u8"), *((key, "u8") for key in "abcd")]
)
_PAGEABLE = {"HtoD pageable", "DtoH pageable"}


class _CRecord(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        *((key, ctypes.c_uint64) for key in "abcd"),
    )


_HOOK = ctypes.CFUNCTYPE(None, ctypes.POINTER(_CRecord))


@dataclass(frozen=True, kw_only=True)
class HostWait:
    """A place where the host waited for the device."""

    call: str
    where: str
    """File and line: of lightscale, and of Megatron if it is between."""


@dataclass(kw_only=True)
class Recording:
    """What happened between the begin and the end of ``Recorder.record``."""

    rows: NDArray[np.void]
    names: Mapping[int, str]
    """By address."""
    communicators: Mapping[int, str]
    host_waits: Counter[HostWait] = field(default_factory=Counter)
    marks: list[tuple[int, str]] = field(default_factory=list)
    """(index of the first record, what began there), in order."""
    first: int = 0
    """Of this recording among all records, those of memory with them."""
    accessed_bytes: int = 0
    """That operations and Triton kernels read and write, each of their tensors once; 0 where nobody notes them."""
    stream_waits: list[str] = field(default_factory=list)
    """Where each wait of a stream for an event was asked for, in their order."""

    def of(self, *kinds: Kind) -> NDArray[np.void]:
        """The records of these kinds, in order."""
        return self.rows[np.isin(self.rows["kind"], kinds)]

    def count(self, *kinds: Kind) -> int:
        """How many there are."""
        return len(self.of(*kinds))

    def calls(self, *kinds: Kind) -> Counter[str]:
        """How often each name occurs."""
        addresses, counts = np.unique(self.of(*kinds)["name"], return_counts=True)
        found: Counter[str] = Counter()
        for address, count in zip(addresses, counts, strict=True):
            found[self.names[int(address)]] += int(count)
        return found

    def sections(self) -> Iterator[tuple[str, "Recording"]]:
        """What happened from each mark to the next."""
        ends = [first for first, _ in self.marks[1:]] + [len(self.rows)]
        for (first, name), end in zip(self.marks, ends, strict=True):
            yield name, Recording(rows=self.rows[first:end], names=self.names, communicators=self.communicators)

    @cached_property
    def product_flops(self) -> int:
        """Of all matrix products."""
        found = self.of(Kind.PRODUCT)
        return int(2 * (found["a"] * found["b"] * found["c"] * found["d"]).sum()) if len(found) else 0

    def collectives(self) -> dict[tuple[str, int, str, int], tuple[int, int]]:
        """(group, ranks, call, stream) to (calls, bytes that this rank gives to all of them together)."""
        found: dict[tuple[str, int, str, int], tuple[int, int]] = {}
        for row in self.of(Kind.COLLECTIVE):
            group = self.communicators[int(row["c"])]
            key = group, int(row["b"]), self.names[int(row["name"])], int(row["stream"])
            calls, num_bytes = found.get(key, (0, 0))
            found[key] = calls + 1, num_bytes + int(row["a"])
        return found

    def copies(self) -> dict[str, tuple[int, int]]:
        """Direction to (copies, bytes)."""
        found: dict[str, tuple[int, int]] = {}
        for row in self.of(Kind.COPY):
            name = self.names[int(row["name"])]
            calls, num_bytes = found.get(name, (0, 0))
            found[name] = calls + 1, num_bytes + int(row["a"])
        return found

    def streams(self) -> dict[int, Counter[str]]:
        """What each stream was given."""
        found: dict[int, Counter[str]] = {}
        for row in self.rows[~np.isin(self.rows["kind"], (Kind.ALLOCATE, Kind.HOST_WAIT, Kind.UNKNOWN))]:
            found.setdefault(int(row["stream"]), Counter())[Kind(int(row["kind"])).name.lower()] += 1
        return found


def merged(parts: Iterable[Recording]) -> NDArray[np.void]:
    """The records of several recordings, one after another."""
    return np.concatenate([part.rows for part in parts])


class Recorder:
    """Records what this process asks of its null device, with the Python stack of every wait."""

    def __init__(self) -> None:
        self._library = library()
        self._library.null_count.restype = ctypes.c_size_t
        self._library.null_copy.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
        self._library.null_communicator_identifier.restype = ctypes.c_uint64
        self._library.null_note_triton.argtypes = [ctypes.c_char_p, ctypes.c_void_p, *[ctypes.c_uint64] * 4]
        # Kept here: C calls it for as long as this process lives.
        self._hook = _HOOK(self._see)
        self._current: Recording | None = None
        self._library.null_recording(1)

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Record until the end; the recording is complete then."""
        made = Recording(rows=np.empty(0, _RECORD), names={}, communicators={}, first=self._library.null_count())
        self._current = made
        self._library.null_observe(self._hook, 1 << Kind.HOST_WAIT | 1 << Kind.COPY | 1 << Kind.WAIT)
        try:
            yield made
        finally:
            self._library.null_observe(None, 0)
            self._current = None
            rows = self._rows(made.first)
            made.accessed_bytes = int(rows["b"][np.isin(rows["kind"], (Kind.READ, Kind.WRITE, Kind.FRESH))].sum())
            (kept,) = np.nonzero(~np.isin(rows["kind"], OF_MEMORY))
            made.rows = rows[kept]
            made.marks = [(int(np.searchsorted(kept, at - made.first)), name) for at, name in made.marks]
            made.names = _names(made.rows)
            numbers = set(made.rows[made.rows["kind"] == Kind.COLLECTIVE]["c"].tolist())
            made.communicators = {number: group_of(self._identifier(number)) for number in numbers}
            # A blocking copy of pageable memory is one wait, of two calls.
            for wait in [one for one in made.host_waits if one.call in _PAGEABLE]:
                blocking = HostWait(call="cudaStreamSynchronize", where=wait.where)
                made.host_waits[wait] -= min(made.host_waits[wait], made.host_waits[blocking])
            made.host_waits = +made.host_waits

    def all_rows(self) -> tuple[NDArray[np.void], dict[int, str]]:
        """All records since this recorder was made, those of memory too, and names by address."""
        rows = self._rows(0)
        return rows, _names(rows)

    def mark(self, name: str) -> None:
        """From here on something else happens."""
        if self._current is not None:
            self._current.marks.append((self._library.null_count(), name))

    def note_triton(self, name: str, stream: int, grid: tuple[int, int, int], threads: int) -> None:
        """A launch that was checked and not made."""
        self._library.null_note_triton(name.encode(), stream, *grid, threads)

    def _identifier(self, communicator: int) -> bytes:
        number: int = self._library.null_communicator_identifier(communicator)
        return number.to_bytes(8, "little")

    def _rows(self, first: int) -> NDArray[np.void]:
        rows = np.empty(self._library.null_count() - first, _RECORD)
        self._library.null_copy(first, len(rows), rows.ctypes.data)
        return rows

    def _see(self, record: Callable[..., object]) -> None:
        made: _CRecord = record.contents  # type: ignore[attr-defined]
        call = made.name.decode()
        if self._current is not None and made.kind == Kind.WAIT:
            self._current.stream_waits.append(place(sys._getframe(1)))
            return
        # A copy from or to pageable memory is staged by the driver, while the host waits, whatever it was told.
        if self._current is not None and (made.kind == Kind.HOST_WAIT or call in _PAGEABLE):
            self._current.host_waits[HostWait(call=call, where=place(sys._getframe(1)))] += 1


def place(frame: FrameType | None) -> str:
    """Where in lightscale a frame is, and where in Megatron if that is between."""
    stack = traceback.extract_stack(frame)
    of = {name: [one for one in stack if f"/{name}/" in one.filename] for name in ("lightscale", "megatron")}
    own, other = of["lightscale"][-1:], of["megatron"][-1:]
    if own and other and stack.index(other[0]) < stack.index(own[0]):
        other = []
    lines = [f"{short_name(one.filename)}:{one.lineno}" for one in own + other] or [
        f"{short_name(stack[-1].filename)}:{stack[-1].lineno}" if stack else "a thread without Python"
    ]
    return " via ".join(lines)


def short_name(filename: str) -> str:
    """A file as people know it: from the package on."""
    parts = Path(filename).parts
    for package in ("lightscale", "megatron"):
        if package in parts:
            last = len(parts) - 1 - parts[::-1].index(package)
            return "/".join(parts[last:])
    return "/".join(parts[-2:])


def _names(rows: NDArray[np.void]) -> dict[int, str]:
    return {address: _text(address) for address in set(rows["name"].tolist())}


def _text(address: int) -> str:
    return (ctypes.string_at(address) if address else b"?").decode()


def demangled(names: Iterable[str]) -> dict[str, str]:
    """C++ names as people read them; as they are where the tool is missing."""
    listed = list(names)
    try:
        done = subprocess.run(["c++filt"], input="\n".join(listed), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {name: name for name in listed}
    return dict(zip(listed, done.stdout.split("\n"), strict=False))

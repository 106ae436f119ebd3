"""Reads arrays in shards: values by index, each block verified against its hash.

Where the hashes of the blocks are given (``blocks.py``), a block is compared with its hash when this process first
reads it, and again when its file has changed since.
"""

import bisect
import errno
import functools
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.store.blocks import BlockHashes, CheckedBlocks, hash_blocks
from lightscale.data_pipeline.store.shards import block_range, read_metadata
from lightscale.errors import UserError

_MAX_OPEN_SHARDS = 64
# How often the time of a file's last change is asked for, at most: file systems do not tell shorter times apart.
_LOOK_EVERY_NS = 1_000_000
# So much is compared at once: it stays in the processor's caches from reading to copying, and larger buffers would be
# taken from the system anew each time.
_BYTES_AT_ONCE = 112 * 2**10


class _ShardFile:
    """A file descriptor that is closed with the last reference.

    The cache of open shards may drop one while another thread reads from it; closing it at once would break that read.
    """

    __slots__ = ("descriptor", "mapped")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.mapped: NDArray[Any] | None = None
        """Its values, once they were asked for."""

    def __del__(self) -> None:
        os.close(self.descriptor)


class ShardedArray:
    """Reads an array written by ``ShardWriter``, several threads at a time if need be.

    Ranges are read by pread: unlike with a memory map, values do not stay in the process's memory. At most 64 shard
    files are open at once.

    With block hashes every block is verified at its first read; one byte per block records this. After reads, at most
    every millisecond, the reader checks the time of the file's last change. It verifies a changed file again.
    """

    def __init__(self, directory: Path, *, hashes: BlockHashes | None = None) -> None:
        """Checks the metadata and, in a list of the directory, that no shard is missing; no shard is opened.

        At a thousand ranks and ten thousand shards all would be opened ten million times, most of them for nothing: a
        shard's size and index are checked when it is first opened.

        ``hashes``: those of its blocks; none: values are not verified. ``UserError`` names the damaged file.
        """
        self.directory = directory
        self.length, self.layout = read_metadata(directory / "zarr.json")
        self._dtype = self.layout.numpy_dtype
        self._value_bytes, self._block_length = self.layout.value_bytes, self.layout.block_length
        self._hashes = hashes
        self._checked: dict[int, CheckedBlocks] = {}
        # The cache belongs to the object: one on the method would keep every array alive.
        self._open: Callable[[int], _ShardFile] = functools.lru_cache(maxsize=_MAX_OPEN_SHARDS)(self._open_shard)
        self._last_values: dict[int, int] = {}
        """Last value by shard, filled on demand."""
        self._known: set[int] = set()
        """The shards that were found whole when they were first opened."""
        self._require_shards()

    @property
    def num_shards(self) -> int:
        """Number of shard files."""
        return self.layout.num_shards(self.length)

    def check_sizes(self) -> None:
        """``UserError`` for a shard that is not of the size that its values need; none is opened.

        For one process that starts many others, which verify the blocks that they read.
        """
        for shard in range(self.num_shards):
            try:
                size = self._path(shard).stat().st_size
            except OSError as error:
                raise UserError(f"{self._path(shard)}: {error.strerror}; a shard is missing") from error
            self._check_size(shard, size)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """(stop - start,) or (stop - start, width) values from ``start`` on, in memory of their own."""
        if start > stop:
            raise IndexError(f"{self.directory}: values {start} to {stop} of {self.length}")
        out = np.empty(stop - start, dtype=self._dtype)
        self.read_into(start, out)
        return out

    def read_into(self, start: int, out: NDArray[Any]) -> None:
        """The values from ``start`` on into ``out``, contiguous and of the array's width, without a copy between."""
        if not 0 <= start <= start + len(out) <= self.length:
            raise IndexError(f"{self.directory}: values {start} to {start + len(out)} of {self.length}")
        shard, offset = divmod(start, self.layout.shard_length)
        done = self.layout.shard_length - offset
        if len(out):
            self._fill(shard, offset, out if len(out) <= done else out[:done])
        while done < len(out):
            shard += 1
            size = min(len(out) - done, self.layout.shard_length)
            self._fill(shard, 0, out[done : done + size])
            done += size

    def searchsorted(self, value: int) -> int:
        """Number of values ≤ ``value`` of an ascending array; reads about log2(length) of them."""
        if value < 0:
            return 0
        # The last values say which shard; only that one is mapped, and its pages are few in a bisection.
        shard = self._shard_of(value)
        if shard == self.num_shards:
            return self.length
        _, found = self._bisect(shard, np.array([[value]]))
        return shard * self.layout.shard_length + int(found[0, 0])

    def between(self, low: int, high: int) -> NDArray[Any]:
        """For an ascending array: the last value that is ≤ ``low`` (0 if none is), and all above it up to ``high``."""
        first, last = self.searchsorted(low), self.searchsorted(high)
        values = self.read(max(first - 1, 0), last)
        return values if first else np.concatenate([np.zeros(1, dtype=self._dtype), values])

    def between_each(self, lows: NDArray[np.int64], highs: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """``between`` of each pair of (k,) ``lows`` and ``highs``, one after another, and (k,) their numbers."""
        shard = self._shard_of(int(lows.min()))
        if shard == self._shard_of(int(highs.max())) < self.num_shards:
            values, (firsts, ends) = self._bisect(shard, np.array([lows, highs]))
            if firsts.all():  # nearly always: all of them are in one shard
                counts = ends - firsts + 1
                # Index i of the result holds value i + shift of the shard.
                shifts = firsts - 1 - (np.cumsum(counts) - counts)
                return values[np.arange(counts.sum()) + np.repeat(shifts, counts)], counts
        found = [self.between(low, high) for low, high in zip(lows.tolist(), highs.tolist(), strict=True)]
        return np.concatenate(found), np.array([len(values) for values in found])

    def _shard_of(self, value: int) -> int:
        """The first shard whose last value is more than ``value``; as many as there are where none is."""
        return bisect.bisect_right(range(self.num_shards), value, key=self._last_value)

    def _last_value(self, shard: int) -> int:
        if (found := self._last_values.get(shard)) is None:
            end = min((shard + 1) * self.layout.shard_length, self.length)
            found = self._last_values[shard] = int(self.read(end - 1, end)[0])
        return found

    def _bisect(self, shard: int, keys: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """(the shard's values, mapped; of (m, k) ``keys`` how many values are ≤ each), keys below the last value.

        Keys ascend along the first axis; what lies between those of a column is compared with its hashes too.
        """
        file = self._open(shard)
        keys = keys.astype(self._dtype)
        if self._hashes is None:
            values = self._mapped(shard, file)
            return values, values.searchsorted(keys, side="right")
        length, last = self._block_length, self.layout.values_in(shard, self.length) - 1
        while True:
            # Before the values are touched: to read a map beyond the end of its file ends the process.
            checked = self._checked_blocks(shard, file, look_now=True)
            values = self._mapped(shard, file)
            found = values.searchsorted(keys, side="right")
            # A bisection through damaged values may lead anywhere. But it ends between two values that it has compared
            # with its key: where both are as they were prepared, it found what it would have found undamaged.
            before, after = np.maximum(found - 1, 0), np.minimum(found, last)
            missing = []
            if not checked.cover(int(before.min()) // length, int(after.max()) // length + 1):
                # The ends of a column may come in any order where the values are damaged.
                firsts, stops = before.min(axis=0) // length, after.max(axis=0) // length + 1
                blocks = zip(firsts.tolist(), stops.tolist(), strict=True)
                missing = [one for one in blocks if not checked.cover(*one)]
            if not missing and self._is_unchanged(file, checked, look_now=True):
                return values, found
            for first, stop in missing:
                if not checked.cover(first, stop):  # not yet, for one of the same blocks before
                    self._check(shard, first, stop)

    def _check(self, shard: int, first: int, stop: int) -> None:
        """Compare the blocks ``first`` … ``stop`` - 1 of a shard."""
        begin = first * self.layout.block_length
        end = min(stop * self.layout.block_length, self.layout.values_in(shard, self.length))
        self._fill_checked(shard, begin, np.empty(end - begin, dtype=self._dtype))

    def _path(self, shard: int) -> Path:
        return self.layout.path(self.directory, shard)

    def _open_shard(self, shard: int) -> _ShardFile:
        try:
            file = _ShardFile(os.open(self._path(shard), os.O_RDONLY))
        except OSError as error:
            raise UserError(f"{self._path(shard)}: {error.strerror}; a shard is missing") from error
        if shard not in self._known:
            self._check_shard(shard, file)
            self._known.add(shard)
        return file

    def _mapped(self, shard: int, file: _ShardFile) -> NDArray[Any]:
        if file.mapped is None:
            num_values = self.layout.values_in(shard, self.length)
            try:
                raw = mmap.mmap(file.descriptor, num_values * self.layout.value_bytes, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise UserError(f"{self._path(shard)}: cannot map the file ({error}); {self._remedy}") from error
            file.mapped = np.frombuffer(raw, dtype=self._dtype)
        return file.mapped

    def _fill(self, shard: int, offset: int, out: NDArray[Any]) -> None:
        file = self._open(shard)
        checked = self._checked.get(shard)
        if self._hashes is not None:
            length = self._block_length
            stop = (offset + len(out) - 1) // length + 1
            if checked is None or checked.flags.find(0, offset // length, stop) >= 0:
                self._fill_checked(shard, offset, out)
                return
        position = offset * self._value_bytes
        # preadv: into the caller's memory without a copy, and without a file position that threads would share.
        if os.preadv(file.descriptor, [out], position) < out.nbytes:  # type: ignore[list-item] # hardly ever
            self._read_at(shard, file, position, memoryview(out).cast("B"))  # type: ignore[arg-type]
        # After the read: what was written into the file before it has changed the file's time.
        if checked is not None and not self._is_unchanged(file, checked):
            self._fill_checked(shard, offset, out)

    @staticmethod
    def _is_unchanged(file: _ShardFile, checked: CheckedBlocks, *, look_now: bool = False) -> bool:
        """Whether a file is as it was when its blocks were compared, as far as was seen at most a millisecond ago."""
        now_ns = time.monotonic_ns()
        if look_now or now_ns - checked.looked_ns > _LOOK_EVERY_NS:
            if os.fstat(file.descriptor).st_ctime_ns != checked.changed_ns:
                return False
            checked.looked_ns = now_ns
        return True

    def _fill_checked(self, shard: int, offset: int, out: NDArray[Any]) -> None:
        """Read the blocks that (n,) ``out`` lies in whole, compare them, and copy what was compared into ``out``."""
        assert self._hashes is not None
        file, width = self._open(shard), self._value_bytes
        checked = self._checked_blocks(shard, file)
        block_bytes = self._block_length * width
        wanted, wanted_bytes = offset * width, memoryview(out).cast("B")  # type: ignore[arg-type]
        first = wanted // block_bytes
        stop = (wanted + len(wanted_bytes) - 1) // block_bytes + 1
        end = min(stop * block_bytes, self.layout.values_in(shard, self.length) * width)
        at_once = max(1, _BYTES_AT_ONCE // block_bytes)
        if end - first * block_bytes > _BYTES_AT_ONCE:  # the disk need not wait for what is compared
            os.posix_fadvise(file.descriptor, first * block_bytes, end - first * block_bytes, os.POSIX_FADV_WILLNEED)
        scratch = memoryview(bytearray(min(at_once * block_bytes, end - first * block_bytes)))
        for block in range(first, stop, at_once):
            begin, last = block * block_bytes, min(block + at_once, stop)
            raw = scratch[: min(last * block_bytes, end) - begin]
            self._read_at(shard, file, begin, raw)
            found, expected = hash_blocks(raw, block_bytes), self._hashes.of(shard, block, last, len(checked.flags))
            if found != expected:
                differing = np.frombuffer(found, dtype="<u8") != np.frombuffer(expected, dtype="<u8")
                raise UserError(self._damage(shard, block + int(np.flatnonzero(differing)[0])))
            skipped = max(wanted - begin, 0)
            into = wanted_bytes[max(begin - wanted, 0) :][: len(raw) - skipped]
            into[:] = raw[skipped : skipped + len(into)]
        checked.add(first, stop)

    def _checked_blocks(self, shard: int, file: _ShardFile, *, look_now: bool = False) -> CheckedBlocks:
        """Which blocks of a shard were compared, of the file as it is; ``look_now`` as in ``_is_unchanged``."""
        checked = self._checked.get(shard)
        if checked is not None and self._is_unchanged(file, checked, look_now=look_now):
            return checked
        now_ns, status = time.monotonic_ns(), os.fstat(file.descriptor)
        num_values = self.layout.values_in(shard, self.length)
        expected = self.layout.padded_bytes(num_values) + self.layout.index_bytes
        if status.st_size != expected:
            raise UserError(
                f"{self._path(shard)}: {status.st_size} bytes instead of {expected}; it changed while in use; "
                f"{self._remedy}"
            )
        flags = bytearray(self.layout.num_blocks(num_values))
        checked = self._checked[shard] = CheckedBlocks(status.st_ctime_ns, now_ns, flags)
        return checked

    def _damage(self, shard: int, block: int) -> str:
        first, stop = block_range(self.layout, self.length, shard, block)
        return (
            f"{self._path(shard)}: source {self.directory.parent.name}, shard {shard}, block {block} "
            f"({self.directory.name} {first:,} to {stop - 1:,}) has changed since preparation; {self._remedy}"
        )

    @property
    def _remedy(self) -> str:
        store = self.directory.parent.parent
        return (
            f"`lightscale data verify {store}` lists all damaged blocks; restore the file from a copy, or prepare the "
            "corpus again"
        )

    def _read_at(self, shard: int, file: _ShardFile, position: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``position`` on."""
        count = os.preadv(file.descriptor, [out], position)
        while count < len(out):  # hardly ever: Linux reads at most 2 GiB at once
            if not count:
                raise UserError(f"{self._path(shard)}: ends at byte {position}; the file was truncated while in use")
            position, out = position + count, out[count:]
            count = os.preadv(file.descriptor, [out], position)

    def _require_shards(self) -> None:
        """``UserError`` where the file of a shard is not there."""
        try:
            # A row of an array with a width lies in a directory of its shard.
            names = {entry.name for entry in os.scandir(self.directory / "c")} if self.num_shards else set()
        except OSError as error:
            raise UserError(f"{self._path(0)}: {error.strerror}; a shard is missing") from error
        for shard in range(self.num_shards):
            if str(shard) not in names:
                raise UserError(f"{self._path(shard)}: {os.strerror(errno.ENOENT)}; a shard is missing")

    def _check_size(self, shard: int, size: int) -> None:
        expected = self.layout.padded_bytes(self.layout.values_in(shard, self.length)) + self.layout.index_bytes
        if size != expected:
            raise UserError(f"{self._path(shard)}: {size} bytes instead of {expected}; the store is damaged")

    def _check_shard(self, shard: int, file: _ShardFile) -> None:
        """Size and index say that a shard is complete; no values are read."""
        # First of all the size: the index of a length that somebody made up may be larger than the memory.
        self._check_size(shard, os.fstat(file.descriptor).st_size)
        path, num_values = self._path(shard), self.layout.values_in(shard, self.length)
        values_bytes = self.layout.padded_bytes(num_values)
        if os.pread(file.descriptor, self.layout.index_bytes, values_bytes) != self.layout.index(num_values):
            raise UserError(f"{path}: the index does not list the chunks in order; the store is damaged")

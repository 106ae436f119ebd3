"""One-dimensional zarr v3 arrays in large uncompressed shards: any zarr program can read them, this module fast.

A shard file is, byte for byte, its values in order (little-endian, the last inner chunk filled up with zeros)
and then an index: an (offset, bytes) pair of uint64 for every inner chunk of the shard, all bits set for a
chunk beyond the end of the array, and the CRC-32C of that. Because nothing is compressed the index is known
beforehand, so a writer streams values and holds no shard in memory, and a reader checks the index once and
then reads values at offsets that it computes, without zarr: a training step makes thousands of small reads.
"""

import bisect
import contextlib
import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
import xxhash
import zarr
from numpy.typing import NDArray

from lightscale.errors import UserError

_LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
_FORM = {
    "node_type": "array",
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    "codec": "sharding_indexed",
    "codecs": [_LITTLE_ENDIAN],
    "index_codecs": [_LITTLE_ENDIAN, {"name": "crc32c"}],
    "index_location": "end",
}
_NO_CHUNK = 0xFFFF_FFFF_FFFF_FFFF
_MAX_OPEN_SHARDS = 64


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """How values are stored in shard files; the chunks here are zarr's."""

    dtype: str
    """zarr's name of the type: ``uint32`` or ``uint64``."""
    shard_length: int
    """Values in a shard."""
    chunk_length: int
    """Values in an inner chunk; divides ``shard_length``."""

    def __post_init__(self) -> None:
        if self.chunk_length < 1 or self.shard_length < 1 or self.shard_length % self.chunk_length:
            raise ValueError(
                f"a shard of {self.shard_length} values cannot be divided into zarr chunks of {self.chunk_length}; "
                "use a multiple"
            )

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The type on disk: little-endian on every machine."""
        return np.dtype(self.dtype).newbyteorder("<")

    def padded_bytes(self, num_values: int) -> int:
        """Bytes of the chunks that hold ``num_values`` values."""
        return -(-num_values // self.chunk_length) * self.chunk_length * self.numpy_dtype.itemsize

    def index(self, num_values: int) -> bytes:
        """The index at the end of a shard that holds ``num_values`` values."""
        chunk_bytes = self.chunk_length * self.numpy_dtype.itemsize
        num_chunks = -(-num_values // self.chunk_length)
        entries = np.full((self.shard_length // self.chunk_length, 2), _NO_CHUNK, dtype="<u8")
        entries[:num_chunks, 0] = np.arange(num_chunks) * chunk_bytes
        entries[:num_chunks, 1] = chunk_bytes
        # The CRC is of the index alone; the values are covered by the hash of the shard, which `verify` checks.
        raw = entries.tobytes()
        return raw + int(google_crc32c.value(raw)).to_bytes(4, "little")


class ShardFileWriter:
    """Streams the values of one shard into its file; ``close`` completes it and gives its hash."""

    def __init__(self, path: Path, layout: ShardLayout) -> None:
        self.layout = layout
        self.num_values = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("wb")
        self._hash = xxhash.xxh3_128()

    @property
    def room(self) -> int:
        """How many values still fit."""
        return self.layout.shard_length - self.num_values

    def append(self, values: NDArray[np.unsignedinteger[Any]]) -> None:
        """Add (n,) ``values``, at most ``room`` of them."""
        assert len(values) <= self.room
        self._write(np.ascontiguousarray(values, dtype=self.layout.numpy_dtype).tobytes())
        self.num_values += len(values)

    def close(self) -> str:
        """Fill up the last chunk, write the index; the XXH3-128 of the file."""
        written_bytes = self.num_values * self.layout.numpy_dtype.itemsize
        self._write(bytes(self.layout.padded_bytes(self.num_values) - written_bytes))
        self._write(self.layout.index(self.num_values))
        self._file.close()
        return self._hash.hexdigest()

    def abandon(self) -> None:
        """Close the file after an error, without completing it."""
        with contextlib.suppress(OSError):  # the disk may still be full; the file is removed next
            self._file.close()

    def _write(self, raw: bytes) -> None:
        self._file.write(raw)
        self._hash.update(raw)


class ShardWriter:
    """Streams values into the shard files of a new array; ``close`` writes the array's metadata last."""

    def __init__(self, directory: Path, layout: ShardLayout) -> None:
        """Nothing is written before the first value: an array without values leaves no file."""
        self.directory = directory
        self.layout = layout
        self.length = 0
        self.shard_hashes: list[str] = []
        self._shard: ShardFileWriter | None = None

    def append(self, values: NDArray[np.unsignedinteger[Any]]) -> None:
        """Add (n,) ``values`` at the end."""
        while len(values):
            if self._shard is None:
                self._shard = ShardFileWriter(shard_path(self.directory, len(self.shard_hashes)), self.layout)
            fitting = values[: self._shard.room]
            self._shard.append(fitting)
            self.length += len(fitting)
            values = values[len(fitting) :]
            if not self._shard.room:
                self._finish_shard(self._shard)

    def close(self) -> None:
        """Complete the last shard and write ``zarr.json``. The array must have at least one value."""
        if self._shard is not None:
            self._finish_shard(self._shard)
        write_metadata(self.directory, self.layout, self.length)

    def abandon(self) -> None:
        """Close the open file after an error, without completing anything."""
        if self._shard is not None:
            self._shard.abandon()
            self._shard = None

    def _finish_shard(self, shard: ShardFileWriter) -> None:
        self.shard_hashes.append(shard.close())
        self._shard = None


def shard_path(directory: Path, shard: int) -> Path:
    """The file of shard number ``shard`` of the array in ``directory``."""
    return directory / "c" / str(shard)


def write_metadata(directory: Path, layout: ShardLayout, length: int) -> None:
    """The ``zarr.json`` of an array of ``length`` values whose shards are there."""
    zarr.create_array(
        directory,
        shape=(length,),
        dtype=layout.dtype,
        shards=(layout.shard_length,),
        chunks=(layout.chunk_length,),
        compressors=None,
        filters=None,
        fill_value=0,
        zarr_format=3,
    )


class _ShardFile:
    """A file descriptor that is closed with the last reference.

    The cache of open shards may drop one while another thread reads from it; closing it at once would break that read.
    """

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class ShardedArray:
    """Reads an array written by ``ShardWriter``, several threads at a time if need be.

    Ranges are read by pread: unlike with a memory map, what was read does not stay in the process's memory.
    At most 64 shard files are open at once.
    """

    def __init__(self, directory: Path) -> None:
        """Checks metadata and every shard's size and index, so that a damaged store fails here and not in a later step.

        ``UserError`` names the damaged file.
        """
        self.directory = directory
        self.length, self.layout = _read_metadata(directory / "zarr.json")
        self._dtype = self.layout.numpy_dtype
        # Caches belong to the object: a cache on the method would keep every array alive.
        cache = functools.lru_cache(maxsize=_MAX_OPEN_SHARDS)
        self._open: Callable[[int], _ShardFile] = cache(self._open_shard)
        self._map: Callable[[int], NDArray[Any]] = cache(self._map_shard)
        full_index = self.layout.index(self.layout.shard_length)
        for shard in range(self.num_shards):
            num_values = self._num_values(shard)
            is_full = num_values == self.layout.shard_length
            self._check_shard(shard, num_values, full_index if is_full else self.layout.index(num_values))

    @property
    def num_shards(self) -> int:
        """Number of shard files."""
        return -(-self.length // self.layout.shard_length)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """(stop - start,) values from ``start`` on, in memory of their own."""
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
        """For an ascending array: how many values are ≤ ``value``; touches about log2(length) of them."""
        if value < 0:
            return 0
        # The last values say which shard; only that one is mapped, and its pages are few in a bisection.
        shard = bisect.bisect_right(self._last_values, value)
        if shard == self.num_shards:
            return self.length
        within = self._map(shard).searchsorted(self._dtype.type(value), side="right")
        return shard * self.layout.shard_length + int(within)

    def between(self, low: int, high: int) -> NDArray[Any]:
        """For an ascending array: the last value that is ≤ ``low`` (0 if none is), and all above it up to ``high``."""
        first, last = self.searchsorted(low), self.searchsorted(high)
        values = self.read(max(first - 1, 0), last)
        return values if first else np.concatenate([np.zeros(1, dtype=self._dtype), values])

    def between_each(self, lows: NDArray[np.int64], highs: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """``between`` of each pair of (k,) ``lows`` and ``highs``, one after another, and (k,) how many each gave."""
        shard = bisect.bisect_right(self._last_values, int(lows.min()))
        if shard == bisect.bisect_right(self._last_values, int(highs.max())) < self.num_shards:
            values = self._map(shard)
            firsts, ends = values.searchsorted(np.array([lows, highs], dtype=self._dtype), side="right")
            if firsts.all():  # nearly always: all of them are in one shard
                counts = ends - firsts + 1
                # Index i of the result holds value i + shift of the shard.
                shifts = firsts - 1 - (np.cumsum(counts) - counts)
                return values[np.arange(counts.sum()) + np.repeat(shifts, counts)], counts
        found = [self.between(low, high) for low, high in zip(lows.tolist(), highs.tolist(), strict=True)]
        return np.concatenate(found), np.array([len(values) for values in found])

    @functools.cached_property
    def _last_values(self) -> list[int]:
        """The last value of every shard."""
        ends = [min((shard + 1) * self.layout.shard_length, self.length) for shard in range(self.num_shards)]
        return [int(self.read(end - 1, end)[0]) for end in ends]

    def _path(self, shard: int) -> Path:
        return shard_path(self.directory, shard)

    def _num_values(self, shard: int) -> int:
        return min(self.layout.shard_length, self.length - shard * self.layout.shard_length)

    def _open_shard(self, shard: int) -> _ShardFile:
        try:
            return _ShardFile(os.open(self._path(shard), os.O_RDONLY))
        except OSError as error:
            raise UserError(f"{self._path(shard)}: {error.strerror}; a shard is missing") from error

    def _map_shard(self, shard: int) -> NDArray[Any]:
        num_values = self._num_values(shard)
        mapped = np.memmap(self._path(shard), dtype=self._dtype, mode="r", shape=(num_values,))
        return mapped.view(np.ndarray)  # memmap's own arithmetic is slow

    def _fill(self, shard: int, offset: int, out: NDArray[Any]) -> None:
        descriptor = self._open(shard).descriptor
        position = offset * self._dtype.itemsize
        # preadv: into the caller's memory without a copy, and without a file position that threads would share.
        count = os.preadv(descriptor, [out.data], position)
        if count == out.nbytes:  # nearly always
            return
        view = out.data.cast("B")
        while view := view[count:]:
            position += count
            count = os.preadv(descriptor, [view], position)
            if count == 0:
                raise UserError(f"{self._path(shard)}: it ends at byte {position}; it was truncated while in use")

    def _check_shard(self, shard: int, num_values: int, expected_index: bytes) -> None:
        path = self._path(shard)
        # Size and index say that a shard is complete; opening a store reads no values.
        values_bytes = self.layout.padded_bytes(num_values)
        try:
            with path.open("rb", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(values_bytes)
                index = file.read(len(expected_index) + 1)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; a shard is missing") from error
        expected_size = values_bytes + len(expected_index)
        if size != expected_size:
            raise UserError(f"{path}: {size} bytes instead of {expected_size}; the store is damaged")
        if index != expected_index:
            raise UserError(f"{path}: its index does not list the chunks in order; the store is damaged")


def _read_metadata(path: Path) -> tuple[int, ShardLayout]:
    """Length and layout from a ``zarr.json``, which must be of the form that ``ShardWriter`` writes."""
    metadata = read_json(path)
    try:
        (sharding,) = metadata["codecs"]
        configuration = sharding["configuration"]
        form = {
            "node_type": metadata["node_type"],
            "chunk_key_encoding": metadata["chunk_key_encoding"],
            "codec": sharding["name"],
            "codecs": configuration["codecs"],
            "index_codecs": configuration["index_codecs"],
            "index_location": configuration.get("index_location", "end"),
        }
        if form != _FORM or metadata["data_type"] not in ("uint32", "uint64"):
            raise UserError(
                f"{path}: not an array of uncompressed uint32 or uint64 shards; "
                "lightscale reads the stores that `lightscale data prepare` writes"
            )
        (length,) = metadata["shape"]
        (shard_length,) = metadata["chunk_grid"]["configuration"]["chunk_shape"]
        (chunk_length,) = configuration["chunk_shape"]
        dtype = metadata["data_type"]
        return int(length), ShardLayout(dtype=dtype, shard_length=shard_length, chunk_length=chunk_length)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged metadata ({error!r})") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; ``UserError`` where there is none."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; the store is incomplete") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); the store is damaged") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: a JSON object was expected; the store is damaged")
    return content

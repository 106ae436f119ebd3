"""One-dimensional zarr v3 arrays in large uncompressed shards: any zarr program can read them, this module fast.

A shard file is, byte for byte, its values in order (little-endian, the last inner chunk filled up with zeros)
and then an index: an (offset, bytes) pair of uint64 for every inner chunk of the shard, all bits set for a
chunk beyond the end of the array, and the CRC-32C of that. Because nothing is compressed the index is known
beforehand, so a writer streams values and holds no shard in memory, and a reader checks the index once and
then reads values at offsets that it computes, without zarr: a training step makes thousands of small reads
(``sharded_array.py``).
"""

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import google_crc32c
import numpy as np
import xxhash
import zarr
from numpy.typing import NDArray

from lightscale.data_pipeline.store.blocks import (
    BLOCK_BYTES,
    GROUP_BLOCKS,
    BlockHasher,
    digests_of,
)
from lightscale.errors import UserError

_LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
_FORM = {
    "node_type": "array",
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    "codec": "sharding_indexed",
    "index_codecs": [_LITTLE_ENDIAN, {"name": "crc32c"}],
    "index_location": "end",
}
DTYPES = ("uint8", "int32", "uint32", "int64", "uint64", "float16", "float32")
"""zarr's names of the types of numbers; numpy's are the same."""
_NO_CHUNK = 0xFFFF_FFFF_FFFF_FFFF
_MAX_VALUE_BYTES = 2**20
_READ_BYTES = 2**23
# What the metadata of a store may ask for: an index of 16 MiB, and marks for the blocks of a shard of 64 MiB.
_MAX_CHUNKS, _MAX_SHARD_BYTES, _MAX_COUNT = 2**20, 2**40, 2**62


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """How values are stored in shard files; the chunks here are zarr's."""

    dtype: str
    """One of ``DTYPES``."""
    shard_length: int
    """Values in a shard."""
    chunk_length: int
    """Values in an inner chunk; divides ``shard_length``."""
    width: int | None = None
    """Numbers in a value, which is a row of a two-dimensional array then; none: one, and the array has one axis."""

    def __post_init__(self) -> None:
        if self.chunk_length < 1 or self.shard_length < 1 or self.shard_length % self.chunk_length:
            raise ValueError(
                f"a shard of {self.shard_length} values cannot be divided into zarr chunks of {self.chunk_length}; "
                "use a multiple"
            )
        if self.width is not None and not 1 <= self.width * np.dtype(self.dtype).itemsize <= _MAX_VALUE_BYTES:
            raise ValueError(f"{self.width} numbers per value; use 1 to {_MAX_VALUE_BYTES} bytes per value")

    @property
    def number_dtype(self) -> np.dtype[Any]:
        """The type of a number on disk: little-endian on every machine."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The type of a value."""
        return self.number_dtype if self.width is None else np.dtype((self.number_dtype, (self.width,)))

    @property
    def value_bytes(self) -> int:
        """Bytes of a value."""
        return self.number_dtype.itemsize * (self.width or 1)

    @property
    def num_chunks(self) -> int:
        """zarr chunks in a whole shard."""
        return self.shard_length // self.chunk_length

    @property
    def block_length(self) -> int:
        """Values in a block."""
        return max(1, BLOCK_BYTES // self.value_bytes)

    @property
    def index_bytes(self) -> int:
        """Bytes of the index at the end of every shard."""
        return 16 * self.num_chunks + 4

    @property
    def hashes(self) -> "ShardLayout":
        """Of the array of its block hashes: the hashes of a shard are in a shard of the same number."""
        length = self.num_blocks(self.shard_length)
        return ShardLayout(dtype="uint64", shard_length=length, chunk_length=math.gcd(length, GROUP_BLOCKS))

    def num_blocks(self, num_values: int) -> int:
        """Blocks of a shard that holds ``num_values`` values."""
        return -(-num_values // self.block_length)

    def num_hashes(self, length: int) -> int:
        """The length of the array of block hashes of an array of ``length`` values."""
        whole, last = divmod(length, self.shard_length)
        return whole * self.hashes.shard_length + self.num_blocks(last)

    def num_shards(self, length: int) -> int:
        """Shard files of an array of ``length`` values."""
        return -(-length // self.shard_length)

    def values_in(self, shard: int, length: int) -> int:
        """Values in shard number ``shard`` of an array of ``length``."""
        return min(self.shard_length, length - shard * self.shard_length)

    def path(self, directory: Path, shard: int) -> Path:
        """The file of shard number ``shard`` of the array in ``directory``."""
        return directory / "c" / str(shard) if self.width is None else directory / "c" / str(shard) / "0"

    def padded_bytes(self, num_values: int) -> int:
        """Bytes of the chunks that hold ``num_values`` values."""
        return -(-num_values // self.chunk_length) * self.chunk_length * self.value_bytes

    def index(self, num_values: int) -> bytes:
        """The index at the end of a shard that holds ``num_values`` values."""
        chunk_bytes = self.chunk_length * self.value_bytes
        num_chunks = -(-num_values // self.chunk_length)
        entries = np.full((self.num_chunks, 2), _NO_CHUNK, dtype="<u8")
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
        self.block_hashes = b""
        """As ``BlockHasher`` gives them, when it is closed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("wb")
        self._hash = xxhash.xxh3_128()
        self._blocks = BlockHasher(layout.block_length * layout.value_bytes)

    @property
    def room(self) -> int:
        """Number of values that still fit."""
        return self.layout.shard_length - self.num_values

    def append(self, values: NDArray[Any]) -> None:
        """Add (n,) or (n, width) ``values``, at most ``room`` of them."""
        assert len(values) <= self.room
        raw = np.ascontiguousarray(values, dtype=self.layout.number_dtype).tobytes()
        self._write(raw)
        self._blocks.update(memoryview(raw))
        self.num_values += len(values)

    def close(self) -> str:
        """Fill up the last chunk, write the index; the XXH3-128 of the file."""
        written_bytes = self.num_values * self.layout.value_bytes
        self._write(bytes(self.layout.padded_bytes(self.num_values) - written_bytes))
        self._write(self.layout.index(self.num_values))
        self._file.close()
        self.block_hashes = self._blocks.finish()
        return self._hash.hexdigest()

    def abandon(self) -> None:
        """Close the file after an error, without completing it."""
        with contextlib.suppress(OSError):  # the disk may still be full; the file is removed next
            self._file.close()

    def _write(self, raw: bytes) -> None:
        self._file.write(raw)
        self._hash.update(raw)


def write_shard_file(path: Path, layout: ShardLayout, values: NDArray[Any]) -> str:
    """A shard of ``values`` in the file ``path``; the XXH3-128 of the file."""
    shard = ShardFileWriter(path, layout)
    try:
        shard.append(values)
        return shard.close()
    finally:
        shard.abandon()


@dataclass(frozen=True, kw_only=True)
class ShardHashes:
    """The record of a written shard."""

    shard: str
    """XXH3-128 of its file."""
    blocks: str
    """XXH3-128 of the file with the hashes of its blocks."""
    digests: str
    """Of those hashes; see ``blocks.digests_of``."""


def finish_shard(shard: ShardFileWriter, blocks: Path) -> ShardHashes:
    """Complete ``shard`` and write the hashes of its blocks into the file ``blocks``."""
    digest = shard.close()
    return write_block_hashes(blocks, shard.layout, shard.block_hashes, shard_hash=digest)


def write_block_hashes(path: Path, layout: ShardLayout, hashes: bytes, *, shard_hash: str) -> ShardHashes:
    """The file ``path`` with the ``hashes`` of a shard's blocks; ``layout`` and ``shard_hash`` are the shard's own."""
    written = write_shard_file(path, layout.hashes, np.frombuffer(hashes, dtype="<u8"))
    return ShardHashes(shard=shard_hash, blocks=written, digests=digests_of(hashes))


class ShardWriter:
    """Streams values into the shard files of a new array; ``close`` writes the array's metadata last."""

    def __init__(self, directory: Path, layout: ShardLayout, *, hashes: Path | None = None) -> None:
        """``hashes``: the directory of the array of its block hashes; none: they are not written.

        Nothing is written before the first value: an array without values leaves no file.
        """
        self.directory = directory
        self.layout = layout
        self.length = 0
        self.shard_hashes: list[ShardHashes] = []
        """Of every finished shard."""
        self._hashes = hashes
        self._shard: ShardFileWriter | None = None

    def append(self, values: NDArray[Any]) -> None:
        """Add (n,) or (n, width) ``values`` at the end."""
        while len(values):
            if self._shard is None:
                path = self.layout.path(self.directory, len(self.shard_hashes))
                self._shard = ShardFileWriter(path, self.layout)
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
        if self._hashes is not None:
            write_metadata(self._hashes, self.layout.hashes, self.layout.num_hashes(self.length))

    def abandon(self) -> None:
        """Close the open file after an error, without completing anything."""
        if self._shard is not None:
            self._shard.abandon()
            self._shard = None

    def _finish_shard(self, shard: ShardFileWriter) -> None:
        if self._hashes is None:
            self.shard_hashes.append(ShardHashes(shard=shard.close(), blocks="", digests=""))
        else:
            path = self.layout.hashes.path(self._hashes, len(self.shard_hashes))
            self.shard_hashes.append(finish_shard(shard, path))
        self._shard = None


def write_metadata(directory: Path, layout: ShardLayout, length: int) -> None:
    """The ``zarr.json`` of an array of ``length`` values whose shards are there."""
    row = () if layout.width is None else (layout.width,)
    zarr.create_array(
        directory,
        shape=(length, *row),
        dtype=layout.dtype,
        shards=(layout.shard_length, *row),
        chunks=(layout.chunk_length, *row),
        compressors=None,
        filters=None,
        fill_value=0,
        zarr_format=3,
    )


def hash_shard(path: Path, layout: ShardLayout, num_values: int, advance: Callable[[int], None]) -> tuple[str, bytes]:
    """The XXH3-128 of a shard's file, and the hashes of its blocks; ``advance`` gets numbers of bytes."""
    digest, hasher = xxhash.xxh3_128(), BlockHasher(layout.block_length * layout.value_bytes)
    left = num_values * layout.value_bytes
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
            hasher.update(memoryview(data)[:left])
            left = max(left - len(data), 0)
            advance(len(data))
    return digest.hexdigest(), hasher.finish()


def block_range(layout: ShardLayout, length: int, shard: int, block: int) -> tuple[int, int]:
    """(first, stop) of the values of a block in an array of ``length`` values."""
    begin = shard * layout.shard_length
    first = begin + block * layout.block_length
    return first, min(first + layout.block_length, begin + layout.values_in(shard, length))


def read_metadata(path: Path) -> tuple[int, ShardLayout]:
    """Length and layout from a ``zarr.json``, which must be of the form that ``ShardWriter`` writes.

    Raises ``UserError`` that names the file and its fault.
    """
    metadata = read_json(path)
    try:
        (sharding,) = metadata["codecs"]
        configuration = sharding["configuration"]
        dtype = metadata["data_type"]
        form = {
            "node_type": metadata["node_type"],
            "chunk_key_encoding": metadata["chunk_key_encoding"],
            "codec": sharding["name"],
            "index_codecs": configuration["index_codecs"],
            "index_location": configuration.get("index_location", "end"),
        }
        # A single byte has no order.
        values = {"name": "bytes"} if dtype == "uint8" else _LITTLE_ENDIAN
        if form != _FORM or dtype not in DTYPES or configuration["codecs"] != [values]:
            raise UserError(
                f"{path}: not an array of uncompressed shards of {', '.join(DTYPES)}; use a store of `lightscale data "
                "prepare`"
            )
        length, *row = _sizes(path, "shape", metadata["shape"])
        shard_length, *shard_row = _sizes(path, "chunk_shape", metadata["chunk_grid"]["configuration"]["chunk_shape"])
        chunk_length, *chunk_row = _sizes(path, "chunk_shape", configuration["chunk_shape"])
        if len(row) > 1 or not row == shard_row == chunk_row:
            raise UserError(f"{path}: shape {metadata['shape']}; every zarr chunk must hold whole rows")
        layout = ShardLayout(
            dtype=dtype, shard_length=shard_length, chunk_length=chunk_length, width=row[0] if row else None
        )
    except UserError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged metadata ({error!r})") from error
    if layout.num_chunks > _MAX_CHUNKS or layout.shard_length * layout.value_bytes > _MAX_SHARD_BYTES:
        raise UserError(
            f"{path}: chunk_shape gives {shard_length} values per shard and {chunk_length} per zarr chunk; a shard "
            f"has at most {_MAX_SHARD_BYTES} bytes and {_MAX_CHUNKS} zarr chunks"
        )
    return length, layout


def _sizes(path: Path, key: str, values: Any) -> list[int]:
    """``values`` if they are one or more lengths: JSON also has 2.5, true and Infinity, which int() would take."""
    if not isinstance(values, list) or not values:
        raise UserError(f"{path}: {key} = {values!r}: must be a list of whole numbers")
    for value in values:
        if not is_count(value) or value < 1:
            raise UserError(f"{path}: {key} = {values!r}: must be whole numbers from 1 to 2^62")
    return values


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value out of JSON can be a number of things: an integer from 0 to 2^62."""
    return type(value) is int and 0 <= value <= _MAX_COUNT


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises ``UserError`` if there is none."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; the store is incomplete") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); the store is damaged") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object; the store is damaged")
    return content

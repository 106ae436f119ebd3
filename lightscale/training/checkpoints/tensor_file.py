"""Tensor shards of one rank in one file of the safetensors format: a JSON header, then the bytes of each box.

Nothing in such a file is ever executed, and any tool that knows safetensors opens it. Beside the format's own fields
the header's ``__metadata__`` has the shapes of the whole tensors; a box is named KEY@OFFSET, as in
``model.output.weight@128,0``. The bytes are hashed as they are written.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from lightscale.parallel.shards import Box, TensorShard
from lightscale.training.checkpoints.manifest import DamagedCheckpoint, FileRecord
from lightscale.training.health.fault_injection import fault_point

# 16 MiB: each block is hashed and then written while it is in the cache. Linux writes at most 2 GiB in one call anyway.
_BLOCK_BYTES = 1 << 24
# The format begins with the length of the header as a little-endian number of 8 bytes.
_LENGTH_BYTES = 8
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A box in a file."""

    box: Box
    dtype: torch.dtype
    first_byte: int


def write_tensors(path: Path, shards: Sequence[TensorShard]) -> FileRecord:
    """Write ``shards`` (on the CPU, contiguous) to the new file ``path``; it is on disk when this returns."""
    # The widest numbers first, so that every shard begins at a multiple of its element size and can be mapped.
    ordered = sorted(shards, key=lambda shard: -shard.data.element_size())
    digest, size = xxhash.xxh3_128(), 0
    # "x": the draft is new, so that a file of this name means two writers. Unbuffered: each write goes to the kernel,
    # which may take only a part of a block.
    with path.open("xb", buffering=0) as file:
        for block in _blocks(ordered):
            fault_point("save:write")
            digest.update(block)
            size += len(block)
            while block:
                block = block[file.write(block) :]
        fault_point("save:sync")
        os.fsync(file.fileno())
    return FileRecord(num_bytes=size, xxh3_128=digest.hexdigest())


def _blocks(shards: Sequence[TensorShard]) -> Iterator[memoryview]:
    yield memoryview(_header(shards))
    for shard in shards:
        content = shard.data.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), _BLOCK_BYTES):
            yield content[start : start + _BLOCK_BYTES]


def _header(shards: Sequence[TensorShard]) -> bytes:
    shapes = {shard.box.key: shard.box.shape for shard in shards}
    header: dict[str, Any] = {"__metadata__": {"shapes": json.dumps(shapes)}}
    end = 0
    for shard in shards:
        box, start = shard.box, end
        end += shard.data.nbytes
        name = f"{box.key}@{','.join(map(str, box.offset))}"
        header[name] = {"dtype": _NAMES[shard.data.dtype], "shape": box.sizes, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    # So that the data begins at a multiple of 8, the largest element size.
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


class TensorFile:
    """The boxes in a file that was verified before; their bytes are read when they are copied."""

    def __init__(self, path: Path) -> None:
        """``DamagedCheckpoint`` where the file is not what ``write_tensors`` writes."""
        self._path = path
        try:
            self._entries = _read_header(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{path} cannot be read as a file of tensors: {error!r}") from None

    @property
    def boxes(self) -> list[Box]:
        """What the file holds."""
        return [entry.box for entry in self._entries]

    def shards(self) -> Iterator[TensorShard]:
        """The boxes with their elements, mapped from the file: changing them does not change it.

        One at a time, so that what was read takes no memory while the next is read.
        """
        with self._path.open("rb") as file:
            for entry in self._entries:
                if entry.box.numel:
                    shape = (entry.box.numel * entry.dtype.itemsize,)
                    mapped = np.memmap(file, dtype=np.uint8, mode="c", offset=entry.first_byte, shape=shape)
                    data = torch.frombuffer(mapped, dtype=entry.dtype).view(entry.box.sizes)
                    yield TensorShard(box=entry.box, data=data)


def _read_header(path: Path) -> list[_Entry]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > size - _LENGTH_BYTES:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(file.read(length))
    shapes = json.loads(header.pop("__metadata__")["shapes"])
    entries = []
    for name, value in header.items():
        # From the right, as only the offset is known to have no @.
        key, _, text = name.rpartition("@")
        offset = tuple(map(int, text.split(","))) if text else ()
        box = Box(key=key, shape=tuple(shapes[key]), offset=offset, sizes=tuple(value["shape"]))
        dtype, (start, end) = _DTYPES[value["dtype"]], value["data_offsets"]
        first_byte = _LENGTH_BYTES + length + start
        # The hash says that the file is as it was written, not that it makes sense: a wrong offset would give a tensor
        # bytes of another one.
        if end - start != box.numel * dtype.itemsize or not 0 <= start <= end <= size - _LENGTH_BYTES - length:
            raise ValueError(f"{name}: bytes {start} to {end} of {size}")
        if len(offset) != len(box.sizes) or any(
            at < 0 or at + count > whole for at, count, whole in zip(offset, box.sizes, box.shape, strict=True)
        ):
            raise ValueError(f"{name}: {box.sizes} does not fit into {box.shape}")
        if math.prod(box.sizes) and first_byte % dtype.itemsize:
            raise ValueError(f"{name}: begins at byte {first_byte}")
        entries.append(_Entry(box=box, dtype=dtype, first_byte=first_byte))
    return entries

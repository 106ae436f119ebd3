"""Tensor shards of one rank in one file of the safetensors format: the header (``header.py``), then the bytes.

Nothing in such a file is ever executed, and any tool that knows safetensors opens it. The bytes are hashed as they are
written.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import xxhash

from lightscale.parallel.shards import Box, TensorShard
from lightscale.training.checkpoints.header import Entry, write_header
from lightscale.training.checkpoints.manifest import FileRecord
from lightscale.training.checkpoints.reading import open_file
from lightscale.training.health.fault_injection import fault_point

# 16 MiB: each block is hashed and then written while it is in the cache. Linux writes at most 2 GiB in one call anyway.
_BLOCK_BYTES = 1 << 24
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


def write_tensors(path: Path, shards: Sequence[TensorShard]) -> FileRecord:
    """Write ``shards`` (on the CPU, contiguous) to the new file ``path``; it is on disk when this returns."""
    # The widest numbers first, so that every shard begins at a multiple of its element size and can be mapped.
    return write_blocks(path, _blocks(sorted(shards, key=lambda shard: -shard.data.element_size())))


def write_blocks(path: Path, blocks: Iterable[memoryview]) -> FileRecord:
    """Write ``blocks``, a header and its tensors, to the new file ``path``, and sync it to disk."""
    digest, size = xxhash.xxh3_128(), 0
    # "x": the draft is new, so that a file of this name means two writers. Unbuffered: each write goes to the kernel,
    # which may take only a part of a block.
    with path.open("xb", buffering=0) as file:
        for block in blocks:
            fault_point("save:write")
            digest.update(block)
            size += len(block)
            while block:
                block = block[file.write(block) :]
        fault_point("save:sync")
        os.fsync(file.fileno())
    return FileRecord(num_bytes=size, xxh3_128=digest.hexdigest())


def _blocks(shards: Sequence[TensorShard]) -> Iterator[memoryview]:
    yield memoryview(write_header([(shard.box, _NAMES[shard.data.dtype]) for shard in shards]))
    for shard in shards:
        content = shard.data.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), _BLOCK_BYTES):
            yield content[start : start + _BLOCK_BYTES]


class TensorFile:
    """The boxes in a file that was verified before; their bytes are read when they are copied."""

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        """``entries``: those of the file, as ``reader.read_headers`` found them."""
        self._path, self._entries = path, entries

    @property
    def boxes(self) -> list[Box]:
        """The content of the file."""
        return [entry.box for entry in self._entries]

    def shards(self) -> Iterator[TensorShard]:
        """The boxes with their elements, mapped from the file: changing them does not change it.

        Yield one at a time, so that memory holds one tensor.
        """
        with open_file(self._path) as file:
            for entry in self._entries:
                shape = (entry.num_bytes,)
                mapped = np.memmap(file, dtype=np.uint8, mode="c", offset=entry.first_byte, shape=shape)
                data = torch.frombuffer(mapped, dtype=_DTYPES[entry.dtype]).view(entry.box.sizes)
                yield TensorShard(box=entry.box, data=data)


def tensor_files(directory: Path, headers: Mapping[str, Sequence[Entry]]) -> list[TensorFile]:
    """The files of the checkpoint ``directory``, whose boxes are known."""
    return [TensorFile(directory / name, entries) for name, entries in headers.items()]

"""The weights of a checkpoint, read from its files: no mesh, no model, and never more of a tensor than is asked for."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.exchange.files.weights import TensorRows
from lightscale.parallel.shards import Box, Shape, TensorShard, copy_overlap
from lightscale.training.checkpoints.directories import WEIGHTS_PREFIX
from lightscale.training.checkpoints.header import Entry
from lightscale.training.checkpoints.reading import open_file

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Of numbers, as the safetensors format names them."""
_BLOCK_BYTES = 1 << 22
"""4 MiB, the part of a tensor in memory at once. Larger parts leave the processor's caches between read and write."""


class StoredTensors:
    """The weights in the checkpoint or export ``directory``, which was verified, by their names in the model.

    Args:
        directory: of the files.
        headers: the boxes in each of them.
        opener: opens one of them.
        prefix: of the names of the tensors that are read; of an average of the weights, another one.
    """

    def __init__(
        self,
        directory: Path,
        headers: Mapping[str, Sequence[Entry]],
        opener: Callable[[Path], BufferedReader] = open_file,
        *,
        prefix: str = WEIGHTS_PREFIX,
    ) -> None:
        self.directory, self._opener = directory, opener
        self._boxes: dict[str, list[tuple[Path, Entry]]] = {}
        for name, entries in headers.items():
            for entry in entries:
                if entry.box.key.startswith(prefix):
                    key = entry.box.key.removeprefix(prefix)
                    self._boxes.setdefault(key, []).append((directory / name, entry))

    def shapes(self) -> dict[str, Shape]:
        """Of all tensors, by name."""
        return {key: held[0][1].box.shape for key, held in sorted(self._boxes.items())}

    def shape(self, rows: TensorRows) -> Shape:
        """Of what ``rows`` are together."""
        whole = self._boxes[rows.key][0][1].box.shape
        if rows.ranges is None:
            return whole
        return (sum(last - first for first, last in rows.ranges), *whole[1:])

    def read(self, rows: TensorRows) -> Tensor:
        """All of ``rows``, in memory."""
        found = torch.empty(self.shape(rows), dtype=self._dtype(rows.key))
        at = 0
        for block in self.blocks(rows):
            found[at : at + len(block)] = block
            at += len(block)
        return found

    def blocks(self, rows: TensorRows) -> Generator[Tensor]:
        """``rows`` in their order, some at a time: at most 4 MiB, or one row, valid until the next is asked for."""
        for _, block in self._placed_blocks(rows):
            yield block

    def _placed_blocks(self, rows: TensorRows) -> Generator[tuple[int, Tensor]]:
        """``blocks``, each with the number of its first row in the whole tensor."""
        shape = self._boxes[rows.key][0][1].box.shape
        dtype = self._dtype(rows.key)
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        ranges = rows.ranges or ((0, shape[0]),)
        longest = max((stop - start for start, stop in ranges), default=0)
        at_once = max(1, min(_BLOCK_BYTES // row_bytes, longest))
        # One for all: new memory would cost as much as reading.
        memory = torch.empty((at_once, *shape[1:]), dtype=dtype)
        with _Files(self._opener) as files:
            for start, stop in ranges:
                for first in range(start, stop, at_once):
                    last = min(first + at_once, stop)
                    sizes = (last - first, *shape[1:])
                    box = Box(key=rows.key, shape=shape, offset=(first, *(0 for _ in shape[1:])), sizes=sizes)
                    block = TensorShard(box=box, data=memory[: last - first])
                    held = 0
                    for path, entry in self._boxes[rows.key]:
                        held += _copy(files.open(path), entry, block)
                    assert held == box.numel, f"{rows.key}: the checkpoint was verified"
                    yield first, block.data

    def check(self, expected: Mapping[str, TensorRows], shapes: Mapping[str, Shape]) -> None:
        """UserError unless the checkpoint has exactly the tensors that ``expected`` are rows of, in these shapes.

        Args:
            expected: by the names that they will have.
            shapes: of the rows, by the same names.
        """
        keys = {rows.key for rows in expected.values()}
        if different := sorted(keys ^ self._boxes.keys()):
            where = "missing" if different[0] in keys else "in the file, but not in the model of its configuration"
            raise UserError(f"{self.directory} is of another model: {different[0]} is {where}")
        for name, rows in expected.items():
            whole = self._boxes[rows.key][0][1].box.shape
            if (rows.ranges and rows.ranges[-1][1] > whole[0]) or self.shape(rows) != shapes[name]:
                raise UserError(
                    f"{self.directory} is of another model: {rows.key} is {whole}, and {name} must be {shapes[name]}"
                )

    def _dtype(self, key: str) -> torch.dtype:
        return DTYPES[self._boxes[key][0][1].dtype]


class _Files:
    """The files that are read, each opened once."""

    def __init__(self, opener: Callable[[Path], BufferedReader]) -> None:
        self._opener = opener
        self._open: dict[Path, BufferedReader] = {}

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    def open(self, path: Path) -> BufferedReader:
        if path not in self._open:
            self._open[path] = self._opener(path)
        return self._open[path]


def _copy(file: BufferedReader, entry: Entry, target: TensorShard) -> int:
    """Copy to ``target`` what ``entry`` holds of it, whose rows alone are read; the number of elements copied."""
    source, wanted = entry.box, target.box
    first = max(source.offset[0], wanted.offset[0])
    last = min(source.offset[0] + source.sizes[0], wanted.offset[0] + wanted.sizes[0])
    if first >= last:
        return 0
    dtype, inner = DTYPES[entry.dtype], source.sizes[1:]
    row_bytes = math.prod(inner) * dtype.itemsize
    sizes = (last - first, *inner)
    # Straight into its place where the box has whole rows; not mapped, as mapped pages would count as memory.
    whole = inner == source.shape[1:]
    at = first - wanted.offset[0]
    data = target.data[at : at + last - first] if whole else torch.empty(sizes, dtype=dtype)
    buffer = data.reshape(-1).view(torch.uint8).numpy().data
    file.seek(entry.first_byte + (first - source.offset[0]) * row_bytes)
    if file.readinto(buffer) != len(buffer):
        raise UserError(f"{file.name}: truncated while it was read")
    if whole:
        return data.numel()
    part = Box(key=wanted.key, shape=wanted.shape, offset=(first, *source.offset[1:]), sizes=sizes)
    return copy_overlap(TensorShard(box=part, data=data), target)

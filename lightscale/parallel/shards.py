"""Boxes of whole tensors: they describe a rank's part of the model and of the optimizer.

Every layout cuts the same whole tensors into other boxes: tensor ranks along a dim, pipeline ranks by layer, and the
distributed optimizer into ranges of the flattened parameters. A checkpoint is the boxes of the ranks that wrote
it, and another layout reads the intersections with its own.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The boxes of a checkpoint are listed without torch.
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Box:
    """The elements offset … offset + sizes - 1 along each dim of the whole tensor ``key`` of ``shape``."""

    key: str
    shape: Shape
    offset: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


@dataclass(frozen=True, kw_only=True)
class TensorShard:
    """A box and its elements, ``data`` of the box's sizes: a view, through which the rank's own state is written."""

    box: Box
    data: "Tensor"


def range_boxes(sizes: Shape, first: int, last: int) -> Iterator[tuple[Shape, Shape]]:
    """(offset, sizes) of boxes that together are the elements first … last - 1 of a flattened tensor of ``sizes``.

    In order, and few: at most 2 d - 1 of them for d dims (the ends of the first and last row, and whole rows between).
    """
    if first >= last:
        return
    if not sizes:
        yield (), ()
        return
    row = math.prod(sizes[1:])
    # The rows that are wholly inside; what is left at either end is a range of one row, a tensor of a dim less.
    whole_first, whole_last = -(-first // row), last // row
    # First and last element are in one row, and neither at its end.
    if whole_first > whole_last:
        yield from _in_row(sizes, whole_last, first, last)
        return
    if first < whole_first * row:
        yield from _in_row(sizes, whole_first - 1, first, whole_first * row)
    if whole_first < whole_last:
        yield (whole_first, *(0 for _ in sizes[1:])), (whole_last - whole_first, *sizes[1:])
    if whole_last * row < last:
        yield from _in_row(sizes, whole_last, whole_last * row, last)


def _in_row(sizes: Shape, row: int, first: int, last: int) -> Iterator[tuple[Shape, Shape]]:
    start = row * math.prod(sizes[1:])
    for offset, inner in range_boxes(sizes[1:], first - start, last - start):
        yield (row, *offset), (1, *inner)


def copy_overlap(source: TensorShard, target: TensorShard) -> int:
    """Copy the common part of the same tensor to ``target``, in its number format; the number of copied elements.

    Both boxes must be of one key and shape.
    """
    at_source, at_target = [], []
    for source_start, source_size, start, size in zip(
        source.box.offset, source.box.sizes, target.box.offset, target.box.sizes, strict=True
    ):
        first, last = max(source_start, start), min(source_start + source_size, start + size)
        if first >= last:
            return 0
        at_source.append(slice(first - source_start, last - source_start))
        at_target.append(slice(first - start, last - start))
    overlap = target.data[tuple(at_target)]
    overlap.copy_(source.data[tuple(at_source)])
    return overlap.numel()


def moved_rows(shard: TensorShard, first: int, last: int, *, key: str, shape: Shape, to: int) -> TensorShard | None:
    """The part of rows first … last - 1 of its tensor in ``shard``, as rows ``to`` … of tensor ``key`` of ``shape``.

    Rows are indices of the first dim; a tensor without dims is one row. None where it holds none of them.
    """
    box = shard.box
    if not box.shape:
        return TensorShard(box=Box(key=key, shape=shape, offset=(), sizes=()), data=shard.data)
    start, stop = max(box.offset[0], first), min(box.offset[0] + box.sizes[0], last)
    if start >= stop:
        return None
    offset, sizes = (start - first + to, *box.offset[1:]), (stop - start, *box.sizes[1:])
    data = shard.data[start - box.offset[0] : stop - box.offset[0]]
    return TensorShard(box=Box(key=key, shape=shape, offset=offset, sizes=sizes), data=data)


def fault_of_cover(boxes: Iterable[Box]) -> str | None:
    """Why ``boxes`` do not hold every element of every tensor exactly once; None where they do."""
    by_key: dict[str, list[Box]] = {}
    for box in boxes:
        by_key.setdefault(box.key, []).append(box)
    for key, parts in by_key.items():
        shapes = {box.shape for box in parts}
        if len(shapes) > 1:
            return f"{key} has several shapes: {', '.join(map(str, sorted(shapes)))}"
        found, whole = sum(box.numel for box in parts), math.prod(parts[0].shape)
        if found != whole:
            return f"{key} of {parts[0].shape} has {whole} elements, and the ranks hold {found}"
        if (corner := _odd_corner(parts)) is not None:
            times = sum(_holds(box, corner) for box in parts)
            return f"{key} is stored {times} times at {corner}"
    return None


def _odd_corner(boxes: Sequence[Box]) -> Shape | None:
    """An element of the whole tensor that an even number of ``boxes`` hold; None where there is none.

    As many elements as the tensor has, and each in an odd number of boxes, so in one at least: then each in one. How
    often an element is held, modulo 2, is the sum of the corners of the boxes up to it, so that every corner but those
    of the whole must be there an even number of times. Time is linear in the boxes, whoever has made them.
    """
    whole = Box(key="", shape=boxes[0].shape, offset=(0,) * len(boxes[0].shape), sizes=boxes[0].shape)
    odd: set[Shape] = set()
    for box in (whole, *boxes):
        # (first, behind the last) along each dim.
        ends = zip(box.offset, map(sum, zip(box.offset, box.sizes, strict=True)), strict=True)
        for corner in itertools.product(*ends):
            odd ^= {corner}
    # The first in order begins the first such element: no other corner is up to it.
    return min(odd, default=None)


def _holds(box: Box, element: Shape) -> bool:
    return all(start <= at < start + size for at, start, size in zip(element, box.offset, box.sizes, strict=True))

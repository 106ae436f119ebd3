"""Where the heads of queries, keys, values and gates stand in the columns of one projection."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

ACTIVATIONS = ("none", "copy", "silu", "rotate")
"""``none``: a view of the projection's columns; ``copy``: the same, dense."""


class Heads(NamedTuple):
    """Consecutive columns: head by head, and in each head ``width`` channels of every part."""

    heads: int
    width: int
    activations: tuple[str, ...]
    """Of each part, from ``ACTIVATIONS``."""

    @property
    def columns(self) -> int:
        """Their number."""
        return self.heads * self.width * len(self.activations)


class HeadsPart(NamedTuple):
    """The heads of one part: columns start + head · stride + channel."""

    start: int
    stride: int
    heads: int
    width: int
    activation: str

    def of(self, x: Tensor) -> Tensor:
        """A view (n, b, heads, width) of x (n, b, columns), whose columns are contiguous."""
        shape, strides = (*x.shape[:2], self.heads, self.width), (*x.stride()[:2], self.stride, 1)
        return x.as_strided(shape, strides, x.storage_offset() + self.start)


def parts_of(groups: Sequence[Heads]) -> list[HeadsPart]:
    """The parts of all groups, in their order."""
    found, start = [], 0
    for heads, width, activations in groups:
        stride = width * len(activations)
        found += [HeadsPart(start + n * width, stride, heads, width, one) for n, one in enumerate(activations)]
        start += heads * stride
    return found

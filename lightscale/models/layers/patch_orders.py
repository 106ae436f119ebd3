"""Patches of an image in two other orders than row by row, as LION-S (v2) reads them (arXiv 2502.16249, C.8).

One order goes along the rows and one along the columns, every second of them backwards, so that neighbours in an order
are neighbours in the image. Leading tokens stay in front. Over sequence ranks, tokens are gathered, and each rank takes
its share of an order; outputs are gathered back. An order is a permutation of one document per row.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightscale.config.model import GridConfig
from lightscale.models.layers.context import SequenceContext
from lightscale.parallel.sequence import begin_gather


def alternating_orders(grid: GridConfig) -> Tensor:
    """(2, n) int64: the tokens of a document in each order, of a grid of two axes."""
    rows, columns = grid.shape
    cells = torch.arange(rows * columns).view(rows, columns)
    orders = []
    for lines in (cells, cells.T):
        turned = lines.clone()
        turned[1::2] = lines[1::2].flip(1)
        orders.append(torch.cat([torch.arange(grid.leading_tokens), grid.leading_tokens + turned.flatten()]))
    return torch.stack(orders)


@lru_cache(maxsize=32)
def _orders(shape: tuple[int, ...], leading_tokens: int, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    found = alternating_orders(GridConfig(shape=list(shape), leading_tokens=leading_tokens))
    return [order.to(device) for order in found], [order.argsort().to(device) for order in found]


class _Permuted(torch.autograd.Function):
    """x (b, n, …) by ``order``; its gradient by ``back``, the inverse, without a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(1, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(1, ctx.saved_tensors[0]), None, None


class PatchOrders:
    """The orders of the images of a pass, one to a row."""

    def __init__(self, context: SequenceContext) -> None:
        assert context.grid is not None and context.grid.axes == 2, "checked with the configuration"
        self.exchange, self.lengths = context.exchange, context.lengths
        shape, device = tuple(context.grid.shape), context.positions.device
        self.orders, self.inverses = _orders(shape, context.grid.leading_tokens, device)
        n, self.own = context.positions.size(1), slice(None)
        if self.exchange is not None:
            sizes = [n] * self.exchange.size if self.lengths is None else list(self.lengths)
            first = sum(sizes[: self.exchange.rank])
            self.own, n = slice(first, first + n), sum(sizes)
        assert n == len(self.orders[0]), f"a row of {n} tokens is no image of {len(self.orders[0])}"

    def begin(self, x: Tensor) -> Callable[[], list[Tensor]]:
        """Start putting x (b, n, …) into each order; on a sequence rank, n are those of its segment."""
        if self.exchange is None:
            pairs = list(zip(self.orders, self.inverses, strict=True))
            return lambda: [_Permuted.apply(x, *pair) for pair in pairs]
        wait = begin_gather(x, self.exchange, self.lengths)

        def finish() -> list[Tensor]:
            whole = wait()
            return [whole.index_select(1, order[self.own]) for order in self.orders]

        return finish

    def summed(self, ys: list[Tensor]) -> Tensor:
        """The sum (b, n, …) of tokens in each order, row by row again."""
        if self.exchange is None:
            first, second = map(_Permuted.apply, ys, self.inverses, self.orders)
            return first + second
        wholes = begin_gather(torch.stack(ys, dim=2), self.exchange, self.lengths)().unbind(2)
        first, second = (
            whole.index_select(1, inverse[self.own]) for whole, inverse in zip(wholes, self.inverses, strict=True)
        )
        return first + second

"""Softmax attention by tiles of scores, for options that PyTorch's kernels lack: windows, capped scores, sinks.

    s_tj = cap tanh(q_t·k_j / (sqrt(k) cap));  o_t = Σ_j exp(s_tj) v_j / (Σ_j exp(s_tj) + exp(sink_h)),  j in t's range

Every query reads one range of keys. A block of queries visits only the keys between the first and the last that its
queries read: no tile is entirely hidden. Running sums replace the matrix of scores (arXiv 2112.05682), and the backward
pass recomputes scores: memory is linear in the tokens. Arithmetic is fp32 or wider; there are no second derivatives.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.kernels.common.states import state_dtype

_QUERIES = 128
"""Most queries of a block: longer blocks add hidden pairs at the edges of windows and documents."""
_KEYS = 512
"""Most keys of a tile."""


class Tile(NamedTuple):
    """Queries ``rows`` and keys ``keys`` of a row."""

    rows: slice
    keys: slice
    is_whole: bool
    """Whether every query sees every key."""


@dataclass(frozen=True, eq=False)
class KeyRanges:
    """The keys that each query reads: ``first`` … ``end`` - 1, (b, n) int64 on the host, no range empty."""

    first: Tensor
    end: Tensor
    device: torch.device

    @cached_property
    def on_device(self) -> tuple[Tensor, Tensor]:
        """``first`` and ``end`` on the device."""
        both = torch.stack([self.first, self.end])
        both = both.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else both
        return both[0], both[1]

    def blocks(self, row: int) -> Iterator[list[Tile]]:
        """Tiles of each block of queries of a row, in order."""
        yield from self._blocks[row]

    @cached_property
    def pairs(self) -> int:
        """Number of computed scores per head."""
        tiles = (tile for row in self._blocks for block in row for tile in block)
        return sum(_length(tile.rows) * _length(tile.keys) for tile in tiles)

    @cached_property
    def _blocks(self) -> list[list[list[Tile]]]:
        # Blocks longer than a window would mostly read keys that only some of their queries read.
        widest = int((self.end - self.first).max()) if self.first.numel() else 1
        size = max(1, min(_QUERIES, max(16, widest)))
        return [
            [self._tiles(row, slice(start, min(start + size, len(firsts)))) for start in range(0, len(firsts), size)]
            for row, firsts in enumerate(self.first)
        ]

    def _tiles(self, row: int, rows: slice) -> list[Tile]:
        first, end = self.first[row, rows], self.end[row, rows]
        low, high, inner, outer = (int(x) for x in (first.min(), end.max(), first.max(), end.min()))
        return [
            Tile(rows, slice(start, stop), inner <= start and stop <= outer)
            for start, stop in ((start, min(start + _KEYS, high)) for start in range(low, high, _KEYS))
        ]


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges, *, cap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Attention of q (b, n, h, k) to k, v (b, keys, g, k), g a divisor of h: (b, n, h, k). Differentiable.

    Args:
        q, k, v: queries, keys, values; neighbouring heads of queries share one head of keys and values.
        ranges: the keys that each query reads.
        cap: largest score, by tanh; None: scores without a cap.
        sinks: (h,) logits, one more term of each head's sum; None: none.
    """
    o: Tensor = _Tiled.apply(q, k, v, sinks, ranges, cap)
    return o


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, cap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """``tiled_attention`` under a mask ``seen`` (b, n, keys), all scores at once: for the few queries of generation."""
    wide = state_dtype(q.dtype)
    q, keys, values = (x.to(wide).transpose(1, 2) for x in (q, k, v))
    queries = q.unflatten(1, (keys.size(1), -1))
    scores = torch.einsum("bgrtk, bgsk -> bgrts", queries, keys).flatten(1, 2) * q.size(-1) ** -0.5
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(wide)[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.size(2)].unflatten(1, (keys.size(1), -1))
    o = torch.einsum("bgrts, bgsk -> btgrk", weights, values)
    return o.flatten(2, 3).to(v.dtype)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ranges: KeyRanges, cap: float | None
    ) -> Tensor:
        heads = _Heads(q, k, ranges, cap)
        o, lse = torch.empty_like(q, memory_format=torch.contiguous_format), heads.per_query(q)
        for row in range(q.size(0)):
            for block in ranges.blocks(row):
                rows = block[0].rows
                largest, total, summed = heads.beginning(_length(rows), sinks, v)
                for tile in block:
                    scores = heads.scores(q, k, row, tile)[0]
                    grown = torch.maximum(largest, scores.amax(dim=-1, keepdim=True))
                    # Before a query's first key, its sums are 0 and stay 0.
                    safe = grown.masked_fill(grown == -torch.inf, 0)
                    weights, kept = (scores - safe).exp(), (largest - safe).exp()
                    total = kept * total + weights.sum(dim=-1, keepdim=True)
                    summed = kept * summed + weights @ heads.keys(v, row, tile.keys)
                    largest = grown
                o[row, rows] = heads.back(summed / total).to(o.dtype)
                lse[row, rows] = heads.back(largest + total.log())
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        ctx.ranges, ctx.cap = ranges, cap
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, o, lse = ctx.saved_tensors
        heads = _Heads(q, k, ctx.ranges, ctx.cap)
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype, memory_format=torch.contiguous_format) for x in (q, k, v))
        delta = (do.to(lse.dtype) * o.to(lse.dtype)).sum(dim=-1, keepdim=True)
        for row in range(q.size(0)):
            for block in ctx.ranges.blocks(row):
                rows = block[0].rows
                of_block = [heads.queries(x, row, rows) for x in (do, delta, lse, q)]
                cotangent, own_delta, own_lse, queries = of_block
                gradient = torch.zeros_like(queries)
                for tile in block:
                    scores, slope = heads.scores(q, k, row, tile)
                    weights = (scores - own_lse).exp()
                    values, keys = heads.keys(v, row, tile.keys), heads.keys(k, row, tile.keys)
                    dv[row, tile.keys] += (weights.mT @ cotangent).transpose(0, 1)
                    ds = weights * (cotangent @ values.mT - own_delta) * heads.scale
                    ds = ds if slope is None else ds * slope
                    gradient += ds @ keys
                    dk[row, tile.keys] += (ds.mT @ queries).transpose(0, 1)
                dq[row, rows] = heads.back(gradient)
        dsinks = None
        if sinks is not None:
            shares = (sinks.to(lse.dtype)[:, None] - lse).exp()
            dsinks = -(shares * delta).sum(dim=(0, 1, 3)).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None


class _Heads:
    """Blocks of queries and tiles of keys by heads of keys, each with the queries of all heads that share it."""

    def __init__(self, q: Tensor, k: Tensor, ranges: KeyRanges, cap: float | None) -> None:
        self.groups, self.dtype = k.size(2), state_dtype(q.dtype)
        self.shared = q.size(2) // self.groups
        self.scale = q.size(-1) ** -0.5
        self.ranges, self.cap = ranges, cap

    def per_query(self, q: Tensor) -> Tensor:
        """(b, n, h, 1), a number for each query."""
        return q.new_empty(*q.shape[:3], 1, dtype=self.dtype)

    def queries(self, x: Tensor, row: int, rows: slice) -> Tensor:
        """(b, n, h, w) -> (g, h / g · queries, w)."""
        return x[row, rows].unflatten(1, (self.groups, self.shared)).permute(1, 2, 0, 3).flatten(1, 2).to(self.dtype)

    def keys(self, x: Tensor, row: int, keys: slice) -> Tensor:
        """(b, keys, g, w) -> (g, keys, w)."""
        return x[row, keys].transpose(0, 1).to(self.dtype)

    def back(self, x: Tensor) -> Tensor:
        """The inverse of ``queries``: (g, h / g · queries, w) -> (queries, h, w)."""
        return x.unflatten(1, (self.shared, -1)).permute(2, 0, 1, 3).flatten(1, 2)

    def beginning(self, size: int, sinks: Tensor | None, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Before the first key: the largest score, and below it the sums of weights and of weighted values."""
        shape = (self.groups, self.shared * size)
        if sinks is None:
            largest = v.new_full((*shape, 1), -torch.inf, dtype=self.dtype)
        else:
            largest = sinks.to(self.dtype).view(self.groups, self.shared, 1).expand(-1, -1, size).reshape(*shape, 1)
        total = torch.zeros_like(largest) if sinks is None else torch.ones_like(largest)
        return largest, total, v.new_zeros(*shape, v.size(-1), dtype=self.dtype)

    def scores(self, q: Tensor, k: Tensor, row: int, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """Scores (g, h / g · queries, keys), -inf where hidden, and their slope by the uncapped scores; None: 1."""
        scores = self.queries(q, row, tile.rows) @ self.keys(k, row, tile.keys).mT * self.scale
        slope = None
        if self.cap is not None:
            share = torch.tanh(scores / self.cap)
            scores, slope = self.cap * share, 1 - share.square()
        if not tile.is_whole:
            place = torch.arange(tile.keys.start, tile.keys.stop, device=q.device)
            first, end = (x[row, tile.rows, None] for x in self.ranges.on_device)
            hidden = ((place < first) | (place >= end)).repeat(self.shared, 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores, slope


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length

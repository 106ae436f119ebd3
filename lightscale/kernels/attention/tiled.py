"""Softmax attention by tiles of scores, for options that PyTorch's kernels lack: windows, capped scores, sinks.

    s_tj = cap tanh(q_t·k_j / (sqrt(k) cap));  o_t = Σ_j exp(s_tj) v_j / (Σ_j exp(s_tj) + exp(sink_h)),  j in t's range

Every query reads one range of keys. A block of queries visits only the keys between the first and the last that its
queries read: no tile is entirely hidden. Running sums replace the matrix of scores (arXiv 2112.05682), and the backward
pass recomputes scores: memory is linear in the tokens. Arithmetic is fp32 or wider; there are no second derivatives.

Keys may come in parts: ``AttentionSums`` takes in one part after the other; so do gradients (``add_gradients``).
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
    """The keys that each query reads: ``first`` … ``end`` - 1, (b, n) int64 on the host."""

    first: Tensor
    end: Tensor
    device: torch.device
    part: tuple[int, int] | None = None
    """First and end of the keys that are given; tiles count from the first. None: all, from 0."""
    whole: "KeyRanges | None" = None
    """Those of all keys, whose copies on the device a part shares."""

    def of_part(self, first: int, end: int) -> "KeyRanges":
        """The same queries, of which each reads those of the keys ``first`` … ``end`` - 1 that it read before."""
        return KeyRanges(self.first, self.end, self.device, (first, end), self)

    @cached_property
    def on_device(self) -> tuple[Tensor, Tensor]:
        """``first`` and ``end`` on the device."""
        if self.whole is not None:
            return self.whole.on_device
        both = torch.stack([self.first, self.end])
        both = both.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else both
        return both[0], both[1]

    @property
    def start(self) -> int:
        """The number of the first key that is given."""
        return 0 if self.part is None else self.part[0]

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
        rows = [slice(start, start + size) for start in range(0, self.first.size(1), size)]
        found = [[self._tiles(row, slice(*one.indices(self.first.size(1)))) for one in rows] for row in self._rows]
        return [[tiles for tiles in of_row if tiles] for of_row in found]

    @property
    def _rows(self) -> range:
        return range(self.first.size(0))

    def _tiles(self, row: int, rows: slice) -> list[Tile]:
        first, end = self.first[row, rows], self.end[row, rows]
        if self.part is not None:
            first, end = (x.clamp(*self.part) - self.start for x in (first, end))
        reading = first < end
        if not reading.any():
            return []
        low, high = int(first[reading].min()), int(end[reading].max())
        # A query that reads nothing has its first key behind each tile, or the end of its keys before it.
        inner, outer = int(first.max()), int(end.min())
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


class AttentionSums(NamedTuple):
    """Attention to the keys that have been taken in so far."""

    o: Tensor
    """(b, n, h, k), fp32 or wider: means of values; 0 before a query's first key."""
    lse: Tensor
    """(b, n, h, 1): log of the sum of exp(score), the sink's among them; -inf before a query's first key."""

    @staticmethod
    def before(q: Tensor, sinks: Tensor | None) -> "AttentionSums":
        """Of queries q (b, n, h, k), before any key; a sink is a key without a value."""
        dtype = state_dtype(q.dtype)
        lse = q.new_full((*q.shape[:3], 1), -torch.inf, dtype=dtype)
        if sinks is not None:
            lse = lse.copy_(sinks.to(dtype)[:, None].expand_as(lse))
        return AttentionSums(torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format), lse)

    def add(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges, cap: float | None) -> None:
        """Take in keys and values (b, keys, g, k), in place."""
        heads = HeadTiles(q, k, ranges, cap)
        for row in range(q.size(0)):
            for block in ranges.blocks(row):
                rows = block[0].rows
                largest, summed = (heads.queries(x, row, rows) for x in (self.lse, self.o))
                total = (largest > -torch.inf).to(largest.dtype)
                for tile in block:
                    scores = heads.scores(q, k, row, tile)[0]
                    grown = torch.maximum(largest, scores.amax(dim=-1, keepdim=True))
                    # Before a query's first key, its sums are 0 and stay 0.
                    safe = grown.masked_fill(grown == -torch.inf, 0)
                    weights, kept = (scores - safe).exp(), (largest - safe).exp()
                    total = kept * total + weights.sum(dim=-1, keepdim=True)
                    summed = kept * summed + weights @ heads.keys(v, row, tile.keys)
                    largest = grown
                self.o[row, rows] = heads.back(summed / total.masked_fill(total == 0, 1))
                self.lse[row, rows] = heads.back(largest + total.log())


class Cotangents(NamedTuple):
    """What gradients are made of, whatever the part of the keys."""

    do: Tensor
    """(b, n, h, k), of the outputs."""
    o: Tensor
    """(b, n, h, k): the outputs."""
    delta: Tensor
    """(b, n, h, 1): do · o."""
    lse: Tensor
    """(b, n, h, 1), of all keys (``AttentionSums``)."""

    @staticmethod
    def of(do: Tensor, o: Tensor, lse: Tensor) -> "Cotangents":
        """For the cotangent of outputs ``o``."""
        return Cotangents(do, o, (do.to(lse.dtype) * o.to(lse.dtype)).sum(dim=-1, keepdim=True), lse)

    def of_sinks(self, sinks: Tensor) -> Tensor:
        """The gradient of ``sinks`` (h,)."""
        shares = (sinks.to(self.lse.dtype)[:, None] - self.lse).exp()
        return -(shares * self.delta).sum(dim=(0, 1, 3)).to(sinks.dtype)


def add_gradients(
    found: tuple[Tensor, Tensor, Tensor],
    cotangents: Cotangents,
    inputs: tuple[Tensor, Tensor, Tensor],
    ranges: KeyRanges,
    cap: float | None,
) -> None:
    """Add the gradients by a part of the keys, in place.

    Args:
        found: (dq, dk, dv) in the shapes of the inputs, fp32 or wider.
        cotangents: of all keys.
        inputs: q (b, n, h, k), and k, v (b, keys, g, k) of the part.
        ranges: of the part.
        cap: see ``tiled_attention``.
    """
    (dq, dk, dv), (q, k, v) = found, inputs
    heads = HeadTiles(q, k, ranges, cap)
    for row in range(q.size(0)):
        for block in ranges.blocks(row):
            rows = block[0].rows
            read = (cotangents.do, cotangents.delta, cotangents.lse, q)
            cotangent, own_delta, own_lse, queries = (heads.queries(x, row, rows) for x in read)
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
            dq[row, rows] += heads.back(gradient)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ranges: KeyRanges, cap: float | None
    ) -> Tensor:
        sums = AttentionSums.before(q, sinks)
        sums.add(q, k, v, ranges, cap)
        o = sums.o.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, o, sums.lse)
        ctx.ranges, ctx.cap = ranges, cap
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, o, lse = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype, memory_format=torch.contiguous_format) for x in (q, k, v))
        cotangents = Cotangents.of(do, o, lse)
        add_gradients((dq, dk, dv), cotangents, (q, k, v), ctx.ranges, ctx.cap)
        dsinks = None if sinks is None else cotangents.of_sinks(sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None


class HeadTiles:
    """Blocks of queries and tiles of keys by heads of keys, each with the queries of all heads that share it."""

    def __init__(self, q: Tensor, k: Tensor, ranges: KeyRanges, cap: float | None) -> None:
        self.groups, self.dtype = k.size(2), state_dtype(q.dtype)
        self.shared = q.size(2) // self.groups
        self.scale = q.size(-1) ** -0.5
        self.ranges, self.cap = ranges, cap

    def queries(self, x: Tensor, row: int, rows: slice) -> Tensor:
        """(b, n, h, w) -> (g, h / g · queries, w)."""
        return x[row, rows].unflatten(1, (self.groups, self.shared)).permute(1, 2, 0, 3).flatten(1, 2).to(self.dtype)

    def keys(self, x: Tensor, row: int, keys: slice) -> Tensor:
        """(b, keys, g, w) -> (g, keys, w)."""
        return x[row, keys].transpose(0, 1).to(self.dtype)

    def back(self, x: Tensor) -> Tensor:
        """The inverse of ``queries``: (g, h / g · queries, w) -> (queries, h, w)."""
        return x.unflatten(1, (self.shared, -1)).permute(2, 0, 1, 3).flatten(1, 2)

    def scores(self, q: Tensor, k: Tensor, row: int, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """Scores (g, h / g · queries, keys), -inf where hidden, and their slope by the uncapped scores; None: 1."""
        scores = self.queries(q, row, tile.rows) @ self.keys(k, row, tile.keys).mT * self.scale
        slope = None
        if self.cap is not None:
            share = torch.tanh(scores / self.cap)
            scores, slope = self.cap * share, 1 - share.square()
        if not tile.is_whole:
            start = self.ranges.start
            place = torch.arange(start + tile.keys.start, start + tile.keys.stop, device=q.device)
            first, end = (x[row, tile.rows, None] for x in self.ranges.on_device)
            hidden = ((place < first) | (place >= end)).repeat(self.shared, 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores, slope


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length

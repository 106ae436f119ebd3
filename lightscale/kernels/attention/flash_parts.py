"""A part of the keys by PyTorch's flash attention, for GPUs and half precision: sums and gradients as in ``tiled``.

Flash attention computes rectangles of queries and keys, triangles and bands. What a row's queries read of a part is
cut into such runs (``runs``): of a document a rectangle, or a triangle at its own tokens; of a window a band, or the
corner of one where a part ends. Runs of one kind are one launch. The backward pass reads outputs and normalisers of all
parts together, so its gradients are those of all of them.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightscale.kernels.attention import tiled
from lightscale.kernels.attention.documents import to_device
from lightscale.kernels.attention.tiled import AttentionSums, Cotangents, KeyRanges


class Kind(NamedTuple):
    """What a run's queries read of its keys, in flash attention's words: aligned at the last query and the last key."""

    causal: bool
    left: int | None
    """Keys before a query's own place that it reads; None: all."""


class Run(NamedTuple):
    """Consecutive queries of a row, and the keys that any of them reads."""

    row: int
    queries: slice
    keys: slice
    """From the part's first key."""


def _takes(q: Tensor, cap: float | None) -> bool:
    """Whether flash attention computes these queries; it knows no cap."""
    return cap is None and q.is_cuda and q.dtype.itemsize == 2 and q.size(-1) % 8 == 0 and q.size(-1) <= 256


def runs(ranges: KeyRanges) -> dict[Kind, list[Run]]:
    """All that the queries read of the part, without overlap."""
    found: dict[Kind, list[Run]] = defaultdict(list)
    for row in range(ranges.first.size(0)):
        for kind, run in _of_row(row, ranges):
            found[kind].append(run)
    return found


def _of_row(row: int, ranges: KeyRanges) -> Iterator[tuple[Kind, Run]]:
    first, end = ranges.first[row].numpy(), ranges.end[row].numpy()
    if ranges.part is not None:
        first, end = (np.clip(x, *ranges.part) - ranges.start for x in (first, end))
    # How first and end move from a query to the next: by 0 or 1 each within a run, otherwise one ends.
    moves = np.stack([np.diff(first), np.diff(end)])
    inside = ((moves == 0) | (moves == 1)).all(axis=0) & (first < end)[:-1] & (first < end)[1:]
    kinds = np.where(inside, 2 * moves[0] + moves[1], -1)
    edges = [*(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
    start, length = 0, len(first)
    while start < length:
        kind, stop = -1, start + 1
        if start < length - 1 and kinds[start] >= 0:
            kind, stop = int(kinds[start]), 1 + next(edge for edge in edges if edge > start)
        low, high = int(first[start]), int(end[stop - 1])
        if low < high:
            yield _kind(kind, stop - start, high - low), Run(row, slice(start, stop), slice(low, high))
        start = stop


def _kind(moves: int, num_queries: int, num_keys: int) -> Kind:
    # Where the first key moves on, what the last query reads is as wide as the first one's, or ends with the part.
    left = num_keys - num_queries if moves >= 2 else None
    return Kind(causal=moves in (1, 3), left=left)


class _Call:
    """The runs of one kind as one launch: packed tensors and their boundaries."""

    def __init__(self, kind: Kind, of_kind: list[Run], device: torch.device) -> None:
        self.runs = of_kind
        sizes = np.array([(_length(run.queries), _length(run.keys)) for run in of_kind]).T
        cuts = torch.from_numpy(np.pad(sizes.cumsum(axis=1), ((0, 0), (1, 0))).astype(np.int32))
        on_device = to_device(cuts, device)
        self.arguments = (on_device[0], on_device[1], *(int(x) for x in sizes.max(axis=1)), 0.0, kind.causal)
        self.window: dict[str, Any] = {}
        if kind.left is not None:
            self.window = {"window_size_left": kind.left, "window_size_right": 0 if kind.causal else -1}

    def queries(self, x: Tensor) -> Tensor:
        """(b, n, …) -> (queries of the runs, …)."""
        return torch.cat([x[run.row, run.queries] for run in self.runs])

    def keys(self, x: Tensor) -> Tensor:
        """(b, keys, …) -> (keys of the runs, …)."""
        return torch.cat([x[run.row, run.keys] for run in self.runs])

    def of_queries(self, packed: Tensor) -> Iterator[tuple[Run, Tensor]]:
        """What ``queries`` packs, run by run."""
        return zip(self.runs, packed.split([_length(run.queries) for run in self.runs]), strict=True)

    def of_keys(self, packed: Tensor) -> Iterator[tuple[Run, Tensor]]:
        """What ``keys`` packs, run by run."""
        return zip(self.runs, packed.split([_length(run.keys) for run in self.runs]), strict=True)


def add_keys(sums: AttentionSums, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges, cap: float | None) -> None:
    """``AttentionSums.add``, by flash attention where it can."""
    if _takes(q, cap):
        flash(sums, q, k, v, ranges)
    else:
        sums.add(q, k, v, ranges, cap)


def add_gradients(
    found: tuple[Tensor, Tensor, Tensor],
    cotangents: Cotangents,
    inputs: tuple[Tensor, Tensor, Tensor],
    ranges: KeyRanges,
    cap: float | None,
) -> None:
    """``tiled.add_gradients``, by flash attention where it can."""
    if _takes(inputs[0], cap):
        flash_gradients(found, cotangents, inputs, ranges)
    else:
        tiled.add_gradients(found, cotangents, inputs, ranges, cap)


def flash(sums: AttentionSums, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> None:
    """``AttentionSums.add`` without a cap."""
    for kind, of_kind in runs(ranges).items():
        call = _Call(kind, of_kind, q.device)
        packed = (call.queries(q), call.keys(k), call.keys(v))
        # (queries, h, k), and (h, queries).
        o, lse, *_ = torch.ops.aten._flash_attention_forward(*packed, *call.arguments, False, **call.window)
        for (run, part), (_, of_part) in zip(call.of_queries(o), call.of_queries(lse.mT[..., None]), strict=True):
            before, own = sums.lse[run.row, run.queries], of_part.to(sums.lse.dtype)
            total = torch.logaddexp(before, own)
            kept = sums.o[run.row, run.queries] * (before - total).exp()
            sums.o[run.row, run.queries] = kept + part.to(sums.o.dtype) * (own - total).exp()
            sums.lse[run.row, run.queries] = total


def flash_gradients(
    found: tuple[Tensor, Tensor, Tensor],
    cotangents: Cotangents,
    inputs: tuple[Tensor, Tensor, Tensor],
    ranges: KeyRanges,
) -> None:
    """``tiled.add_gradients`` without a cap."""
    (dq, dk, dv), (q, k, v) = found, inputs
    for kind, of_kind in runs(ranges).items():
        call = _Call(kind, of_kind, q.device)
        packed = (call.queries(cotangents.do), call.queries(q), call.keys(k), call.keys(v), call.queries(cotangents.o))
        lse = call.queries(cotangents.lse)[..., 0].mT.contiguous()
        # Of dropout, which there is none of.
        random = (
            torch.zeros(2, dtype=torch.uint64, device=q.device),
            torch.zeros((), dtype=torch.uint64, device=q.device),
        )
        gradients = torch.ops.aten._flash_attention_backward(*packed, lse, *call.arguments, *random, **call.window)
        for run, part in call.of_queries(gradients[0]):
            dq[run.row, run.queries] += part
        for into, packed_gradient in ((dk, gradients[1]), (dv, gradients[2])):
            for run, part in call.of_keys(packed_gradient):
                into[run.row, run.keys] += part


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length

"""Softmax attention whose rows are split over sequence ranks: three ways for queries and keys to meet.

``gather``      every rank gets the keys and values of all ranks (``keys_values``).
``ring``        blocks of keys and values go from rank to rank; two of them are held at once (``key_ring``).
``all_to_all``  every rank gets all tokens of some heads (``head_exchange``).

Keys and values grow with the sequence: no state of constant size stands for them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from lightscale.kernels.attention import DocumentAttention, HeadMaxima, KeyRanges, read_starts
from lightscale.parallel.sequence.exchange import StateExchange
from lightscale.parallel.sequence.ring_plan import HalfReads, RingPlan, first_half
from lightscale.parallel.sequence.trade import trade


@dataclass(frozen=True, eq=False)
class SplitAttention:
    """Attention of one kind over the rows of a pass; one for all its layers."""

    own: DocumentAttention
    """Of this rank's queries to the keys of all ranks."""
    positions: Tensor
    """(b, n) int64 of this rank's tokens."""
    lengths: tuple[int, ...]
    """n of every rank."""
    exchange: StateExchange
    """The ranks."""

    @cached_property
    def whole(self) -> DocumentAttention:
        """Of whole rows. Positions of all ranks are gathered; on a GPU the host waits for them."""
        own, longest = self.own, max(self.lengths)
        padded = torch.nn.functional.pad(self.positions, (0, longest - own.length))
        gathered = self._gathered(padded)
        parts = [part[:, :length] for part, length in zip(gathered, self.lengths, strict=True)]
        positions = torch.cat(parts, dim=1)
        after = None if own.is_causal else torch.zeros(own.rows, dtype=torch.int64)
        rows, length = positions.shape
        starts = read_starts(positions)
        return DocumentAttention(starts, rows, length, 0, own.device, after=after, window=own.window, cap=own.cap)

    @cached_property
    def plan(self) -> RingPlan:
        """The ring's. What each rank reads is gathered, six numbers; on a GPU the host waits for them."""
        first, end = self.own.ranges.first, self.own.ranges.end
        middle = first_half(self.own.length)
        reads = [_reads(first[:, part], end[:, part]) for part in (slice(middle), slice(middle, None))]
        own = torch.tensor(reads, dtype=torch.int64).to(self.own.device)
        halves = [tuple(HalfReads(*half) for half in rank) for rank in self._gathered(own).tolist()]
        return RingPlan(self.lengths, tuple((one, other) for one, other in halves))

    @cached_property
    def ring_ranges(self) -> KeyRanges:
        """What the queries read that this rank computes in the ring: of two halves, one may be another rank's."""
        ranges = self.own.ranges
        if not self.plan.trades:
            return ranges
        both = torch.stack(ranges.on_device, dim=2)
        first, end = trade(both, self.plan, self.exchange).cpu().unbind(dim=2)
        return KeyRanges(first, end, self.own.device)

    def _gathered(self, x: Tensor) -> Tensor:
        """(ranks, …) of x, of the same shape on all ranks."""
        gathered: Tensor = self.exchange.submit(_all_gather, self.exchange, x)()
        return gathered


def _all_gather(exchange: StateExchange, x: Tensor) -> Tensor:
    gathered = x.new_empty(exchange.size * x.size(0), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=exchange.group)
    exchange.count(x)
    return gathered.unflatten(0, (exchange.size, x.size(0)))


def _reads(first: Tensor, end: Tensor) -> HalfReads:
    if not first.numel():
        return HalfReads(0, 0, 0)
    return HalfReads(int(first.min()), int(end.max()), int((end - first).sum()))


Finish = Callable[[Tensor], Tensor]
"""Queries (b, n, h, k) to outputs (b, n, h, k)."""


class AttentionExchange(ABC):
    """A way for queries and keys to meet over the ranks of ``exchange``."""

    def __init__(self, exchange: StateExchange) -> None:
        self.exchange = exchange

    @abstractmethod
    def begin(
        self, k: Tensor, v: Tensor, attention: SplitAttention, sinks: Tensor | None, maxima: HeadMaxima | None = None
    ) -> Finish:
        """Start bringing keys and values of this rank's tokens, (b, n, g, k), to the queries.

        Segments may differ in length from rank to rank, and be empty. Nothing is replayed as states are: what a
        recomputed layer needs of other ranks it asks for again, in one order on every rank.

        Args:
            k, v: keys and values.
            attention: of the pass, with its documents, window and cap.
            sinks: (h,) logits, one more term of each head's sum; None: none.
            maxima: takes in the largest logits that this rank computes; None: they are not measured.

        Returns:
            A function to be called once.
        """

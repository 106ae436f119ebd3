"""Ring attention: keys and values go from rank to rank, and no rank ever holds all of them (arXiv 2310.01889).

    step s of rank i:  block i - s arrives ▸ it goes on to rank i + 1 ∥ the queries' sums take it in
    backward:          the same, and dk, dv of a block follow it, to end at its owner

Beside its own keys and values a rank holds two blocks, the one that it computes with and the one that arrives, whatever
the number of ranks; backward also gradients of at most four, fp32 or wider: computed and leaving ones, and arriving
ones to add to and of its own block. Blocks that no query of a rank reads, because of the mask, a window or documents,
are neither computed nor sent there. ``RingPlan`` decides what goes where, and whether ranks trade queries, so that a
causal mask keeps all of them busy.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.kernels.attention import HeadMaxima, KeyRanges, add_gradients, add_keys, largest_logits
from lightscale.kernels.attention.tiled import AttentionSums, Cotangents
from lightscale.kernels.common.states import state_dtype
from lightscale.parallel.sequence.attention import AttentionExchange, Finish, SplitAttention
from lightscale.parallel.sequence.exchange import StateExchange, Wait
from lightscale.parallel.sequence.ring_plan import RingPlan
from lightscale.parallel.sequence.trade import Sent, Wanted, messages, trade, trade_back


class KeyRing(AttentionExchange):
    """Messages between ranks, each beside the computation with the block before."""

    def begin(
        self, k: Tensor, v: Tensor, attention: SplitAttention, sinks: Tensor | None, maxima: HeadMaxima | None = None
    ) -> Finish:
        """See ``AttentionExchange``."""
        plan, kv = attention.plan, torch.stack([k, v])
        ring = _RingOf(plan, self.exchange, attention.ring_ranges, attention.own.cap, maxima)
        blocks = _Blocks(ring, kv.detach())

        def finish(q: Tensor) -> Tensor:
            queries = trade(q, plan, self.exchange) if plan.trades else q
            o: Tensor = _Ring.apply(queries, kv, sinks, ring, blocks)
            return trade_back(o, plan, self.exchange) if plan.trades else o

        return finish


class _RingOf:
    """One layer's ring, as this rank takes part in it."""

    def __init__(
        self,
        plan: RingPlan,
        exchange: StateExchange,
        ranges: KeyRanges,
        cap: float | None,
        maxima: HeadMaxima | None,
    ) -> None:
        self.plan, self.exchange, self.cap, self.maxima = plan, exchange, cap, maxima
        self.rank, self._ranges = exchange.rank, ranges

    def ranges(self, step: int) -> KeyRanges:
        """What the queries read of the block of ``step``."""
        block = self.plan.block(self.rank, step)
        return self._ranges.of_part(*self.plan.edges[block : block + 2])

    def begin(self, like: Tensor, sent: Sent, sources: tuple[tuple[int, int], ...]) -> Wait:
        """Start messages; ``sources``: a rank, and the number of the block that what it sends is of, or belongs to."""
        wanted: Wanted = tuple(
            (source, (*like.shape[:2], self.plan.lengths[block], *like.shape[3:])) for source, block in sources
        )
        if not sent and not wanted:
            return tuple
        return self.exchange.submit(messages, self.exchange, like, sent, wanted)


class _Blocks:
    """The blocks (2, b, n, g, k) of keys and values that arrive at this rank; the first is on its way at once."""

    def __init__(self, ring: _RingOf, own: Tensor) -> None:
        self._ring, self._own = ring, own
        self._arriving = self._begin(1, own)

    def _begin(self, step: int, held: Tensor | None) -> Wait:
        ring = self._ring
        found = ring.plan.keys(ring.rank, step)
        sent = []
        if found.held_to is not None:
            assert held is not None, "the plan sends a block from a rank that has it"
            sent.append((found.held_to, held))
        if found.own_to is not None:
            sent.append((found.own_to, self._own))
        block = ring.plan.block(ring.rank, step)
        return ring.begin(self._own, tuple(sent), tuple((source, block) for source in found.sources))

    def visit(self, compute: Callable[[int, Tensor | None], None]) -> None:
        """``compute`` each step and its block, None where this rank computes nothing; the next one comes meanwhile.

        A call and not an iterator: the variables of a loop would hold the last block while two others are here.
        """
        ring = self._ring
        held: Tensor | None = self._own
        for step in range(ring.plan.num_steps):
            if step:
                arrived: tuple[Tensor, ...] = self._arriving()
                held = arrived[0] if arrived else None
                del arrived
            self._arriving = self._begin(step + 1, held)
            compute(step, held if ring.plan.computes(ring.rank, step) else None)


class _Gradients:
    """Gradients (2, b, n, g, k) of blocks, which go where the blocks go, and then to their owners."""

    def __init__(self, ring: _RingOf, own: Tensor) -> None:
        self._ring = ring
        self.own = torch.zeros_like(own, dtype=state_dtype(own.dtype))
        """Of the own block."""
        self._arriving: Wait = tuple

    def pass_on(self, step: int, found: Tensor | None) -> None:
        """Behind the computation of ``step`` ≥ 1, whose gradients are ``found``; None: it computed nothing."""
        ring, plan, rank = self._ring, self._ring.plan, self._ring.rank
        self.take_in(step, found)
        coming = plan.gradients(rank, step + 1)
        sent = () if coming.held_to is None or found is None else ((coming.held_to, found),)
        blocks = [plan.block(rank, step + 1)] * plan.adds(rank, step + 1) + [rank] * plan.returns(rank, step + 1)
        self._arriving = ring.begin(self.own, sent, tuple(zip(coming.sources, blocks, strict=True)))

    def take_in(self, step: int, found: Tensor | None) -> None:
        """What has come beside the computation of ``step``: for the same block, and for the own one."""
        arrived: list[Tensor] = list(self._arriving())
        if self._ring.plan.adds(self._ring.rank, step):
            assert found is not None, "gradients of a block come to a rank that computes with it"
            found += arrived.pop(0)
        for returned in arrived:
            self.own += returned


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, sinks: Tensor | None, ring: _RingOf, blocks: _Blocks) -> Tensor:
        sums = AttentionSums.before(q, sinks)

        def take_in(step: int, block: Tensor | None) -> None:
            if block is not None:
                ranges = ring.ranges(step)
                add_keys(sums, q, block[0], block[1], ranges, ring.cap)
                if ring.maxima is not None:
                    ring.maxima.take_in(largest_logits(q, block[0], ranges))

        blocks.visit(take_in)
        o = sums.o.to(q.dtype)
        ctx.save_for_backward(q, kv, sinks, o, sums.lse)
        ctx.ring = ring
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, sinks, o, lse = ctx.saved_tensors
        ring: _RingOf = ctx.ring
        cotangents = Cotangents.of(do, o, lse)
        dq = torch.zeros_like(q, dtype=lse.dtype, memory_format=torch.contiguous_format)
        gradients = _Gradients(ring, kv)

        def add(step: int, block: Tensor | None) -> None:
            found = None
            if block is not None:
                found = gradients.own if step == 0 else torch.zeros_like(block, dtype=lse.dtype)
                inputs = (q, block[0], block[1])
                add_gradients((dq, found[0], found[1]), cotangents, inputs, ring.ranges(step), ring.cap)
            if step:
                gradients.pass_on(step, found)

        _Blocks(ring, kv).visit(add)
        gradients.take_in(ring.plan.num_steps, None)
        dsinks = None if sinks is None else cotangents.of_sinks(sinks)
        return dq.to(q.dtype), gradients.own.to(kv.dtype), dsinks, None, None

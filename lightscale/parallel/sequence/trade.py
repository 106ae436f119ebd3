"""Ranks of a ring trade the second halves of their segments (``RingPlan``), and messages between ranks.

A trade there and back moves half of a rank's queries and half of its outputs, whatever the number of ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.parallel.sequence.exchange import StateExchange
from lightscale.parallel.sequence.ring_plan import RingPlan, first_half

Sent = tuple[tuple[int, Tensor], ...]
"""Ranks of the group, and what each of them gets."""
Wanted = tuple[tuple[int, tuple[int, ...]], ...]
"""Ranks of the group, and the shape of what each of them sends."""


def messages(exchange: StateExchange, like: Tensor, sent: Sent, wanted: Wanted) -> tuple[Tensor, ...]:
    """What ``wanted`` names, in its order and the dtype of ``like``. Work for ``StateExchange.submit``.

    All messages are begun together, so no rank waits for another's turn. Ranks number their messages alike.
    """
    received = tuple(like.new_empty(shape) for _, shape in wanted)
    group = exchange.group
    begun = [dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=to) for to, x in sent]
    begun += [
        dist.P2POp(dist.irecv, x, group=group, group_peer=source)
        for x, (source, _) in zip(received, wanted, strict=True)
    ]
    for work in dist.batch_isend_irecv(begun) if begun else ():
        work.wait()
    for _, x in sent:
        exchange.count(x)
    return received


def trade(x: Tensor, plan: RingPlan, exchange: StateExchange) -> Tensor:
    """(b, n, …) of this rank's tokens to (b, m, …): its first half, and behind it the partner's second. Differentiable.

    Where the partner is the rank itself, both are its own.
    """
    return _traded(x, plan, exchange, plan.lengths[plan.partner(exchange.rank)] // 2)


def trade_back(x: Tensor, plan: RingPlan, exchange: StateExchange) -> Tensor:
    """The inverse of ``trade``."""
    return _traded(x, plan, exchange, plan.lengths[exchange.rank] // 2)


def _traded(x: Tensor, plan: RingPlan, exchange: StateExchange, wanted: int) -> Tensor:
    if plan.partner(exchange.rank) == exchange.rank:
        return x
    out: Tensor = _Trade.apply(x, plan, exchange, wanted)
    return out


class _Trade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: RingPlan, exchange: StateExchange, wanted: int) -> Tensor:
        kept = first_half(plan.lengths[exchange.rank])
        ctx.plan, ctx.exchange, ctx.given = plan, exchange, x.size(1) - kept
        partner, given = plan.partner(exchange.rank), x[:, kept:]
        sent = ((partner, given),) if given.numel() else ()
        shapes = ((partner, (x.size(0), wanted, *x.shape[2:])),) if wanted else ()
        received: tuple[Tensor, ...] = exchange.submit(messages, exchange, x, sent, shapes)()
        return torch.cat([x[:, :kept], *received], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # What was received goes back, and what was given comes back.
        return _Trade.apply(grad, ctx.plan, ctx.exchange, ctx.given), None, None, None

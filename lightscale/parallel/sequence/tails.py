"""The last tokens before a segment, which a short convolution reads beyond a rank's own.

Each rank contributes as many of its last tokens as a convolution looks back, whatever the length of its segment; where
segments are shorter than that, those before them count too. Backward, the cotangents of these tokens are gathered, and
each rank adds up those of its own tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.parallel.sequence.exchange import StateExchange
from lightscale.parallel.sequence.passing import Incoming, Replay

_Place = tuple[int, int]
"""A rank, and which of the tokens that it contributes."""


def begin_tail(
    own: Tensor, exchange: StateExchange, lengths: Sequence[int], size: int, *, name: str, replay: Replay | None = None
) -> Callable[[], Tensor]:
    """Start fetching the ``size`` tokens before this rank's; the returned function gives (size, B, C), differentiable.

    Zeros stand for tokens before the first one. One gather forward and one backward, of ``size`` tokens of each rank.

    Args:
        own: (m, B, C), this rank's last tokens, m of them the least of ``size`` and its number of tokens.
        exchange: the ranks that hold the other segments of these rows.
        lengths: tokens of every rank.
        size: at least 1.
        name: of the layer; ``replay`` keeps the tokens under it.
        replay: for a layer whose activations are recomputed, which exchanges once (``passing.begin``).
    """
    places = [_before(rank, lengths, size) for rank in range(exchange.size)]
    key = f"{name}-tail"
    if replay is not None and torch.is_grad_enabled():
        (kept,) = replay[key].popleft().state
        found: Tensor = _Tail.apply(own, exchange, places, size, lambda: kept)
        return lambda: found
    wait = exchange.submit(_fetch, exchange, own.detach(), places[exchange.rank], size)

    def arrive() -> Tensor:
        before: Tensor = wait()
        if replay is not None:
            replay[key].append(Incoming(state=(before,), kept=()))
        return before

    return lambda: _Tail.apply(own, exchange, places, size, arrive)


def _before(rank: int, lengths: Sequence[int], size: int) -> list[_Place | None]:
    """Where the ``size`` tokens before the segment of ``rank`` are, in their order; None before the first token."""
    found: list[_Place | None] = []
    for other in reversed(range(rank)):
        held = min(lengths[other], size, size - len(found))
        # What a rank contributes ends with its last token.
        found += [(other, size - 1 - back) for back in range(held)]
    return [*[None] * (size - len(found)), *reversed(found)]


def _gathered(exchange: StateExchange, own: Tensor) -> Tensor:
    """(ranks, size, B, C) of (size, B, C)."""
    own = own.contiguous()
    found = own.new_empty(exchange.size * own.size(0), *own.shape[1:])
    dist.all_gather_into_tensor(found, own, group=exchange.group)
    exchange.count(own)
    return found.unflatten(0, (exchange.size, own.size(0)))


def _fetch(exchange: StateExchange, own: Tensor, places: list[_Place | None], size: int) -> Tensor:
    padded = torch.nn.functional.pad(own, (0, 0, 0, 0, size - own.size(0), 0))
    tails = _gathered(exchange, padded)
    # Copied: views would keep the tails of all ranks until the backward pass.
    return torch.stack([torch.zeros_like(padded[0]) if place is None else tails[place] for place in places])


def _give_back(exchange: StateExchange, cotangent: Tensor, places: list[list[_Place | None]], held: int) -> Tensor:
    """The cotangents (held, B, C) of this rank's last tokens, by those (size, B, C) of what each rank has read."""
    read = _gathered(exchange, cotangent)
    size = cotangent.size(0)
    found = cotangent.new_zeros(size, *cotangent.shape[1:])
    for rank, of_rank in enumerate(places):
        for slot, place in enumerate(of_rank):
            if place is not None and place[0] == exchange.rank:
                found[place[1]] += read[rank, slot]
    return found[size - held :]


class _Tail(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        own: Tensor,
        exchange: StateExchange,
        places: list[list[_Place | None]],
        size: int,
        arrive: Callable[[], Tensor],
    ) -> Tensor:
        ctx.exchange, ctx.places, ctx.held = exchange, places, own.size(0)
        return arrive()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        # Beside the computation too, though nothing is left to compute: so all collectives keep one order.
        own = ctx.exchange.submit(_give_back, ctx.exchange, cotangent, ctx.places, ctx.held)()
        return own, None, None, None, None

"""All tokens of some heads on every rank, by all-to-alls (DeepSpeed-Ulysses, arXiv 2309.14509).

A rank attends over whole rows for 1 / W of the heads. It holds all tokens of their keys and values, as many numbers as
its own segment has of all heads. Four tensors move: queries, keys, values and outputs.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.kernels.attention import HeadMaxima, largest_logits
from lightscale.parallel.sequence.attention import AttentionExchange, Finish, SplitAttention
from lightscale.parallel.sequence.exchange import StateExchange, Wait


class HeadExchange(AttentionExchange):
    """Ranks divide the heads of queries. Heads of keys are divided too, or copied where they are fewer than ranks."""

    def begin(
        self, k: Tensor, v: Tensor, attention: SplitAttention, sinks: Tensor | None, maxima: HeadMaxima | None = None
    ) -> Finish:
        """See ``AttentionExchange``."""
        exchange, lengths, whole = self.exchange, attention.lengths, attention.whole
        kv = torch.stack([k, v], dim=3)
        if kv.size(2) % exchange.size:
            # The configuration is checked: then the ranks are a multiple of the heads.
            kv = kv.repeat_interleave(exchange.size // kv.size(2), dim=2)
        wait = exchange.submit(_to_heads, exchange, kv.detach(), lengths)

        def finish(q: Tensor) -> Tensor:
            queries: Tensor = _ToHeads.apply(
                q, exchange, lengths, exchange.submit(_to_heads, exchange, q.detach(), lengths)
            )
            keys, values = _ToHeads.apply(kv, exchange, lengths, wait).unbind(dim=3)
            if maxima is not None:
                maxima.take_in(largest_logits(queries, keys, whole.ranges), exchange.rank * queries.size(2))
            own_sinks = None if sinks is None else sinks.chunk(exchange.size)[exchange.rank]
            o: Tensor = _ToTokens.apply(whole(queries, keys, values, own_sinks), exchange, lengths)
            return o

        return finish


def _to_heads(exchange: StateExchange, x: Tensor, lengths: Sequence[int]) -> Tensor:
    """(b, n, h, …) -> (b, tokens of all ranks, h / ranks, …)."""
    sent = x.unflatten(2, (exchange.size, -1)).movedim(2, 0)
    b, _, *rest = sent.shape[1:]
    found = _all_to_all(exchange, [part.flatten() for part in sent], [b * n * math.prod(rest) for n in lengths])
    return torch.cat([part.view(b, n, *rest) for part, n in zip(found, lengths, strict=True)], dim=1)


def _to_tokens(exchange: StateExchange, x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The inverse of ``_to_heads``."""
    b, _, *rest = x.shape
    n = lengths[exchange.rank]
    sent = [part.flatten() for part in x.split(list(lengths), dim=1)]
    found = _all_to_all(exchange, sent, [b * n * math.prod(rest)] * exchange.size)
    return torch.cat([part.view(b, n, *rest) for part in found], dim=2)


def _all_to_all(exchange: StateExchange, sent: list[Tensor], sizes: list[int]) -> tuple[Tensor, ...]:
    packed = torch.cat(sent)
    found = packed.new_empty(sum(sizes))
    dist.all_to_all_single(found, packed, sizes, [part.numel() for part in sent], group=exchange.group)
    exchange.count(packed)
    return found.split(sizes)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: StateExchange, lengths: Sequence[int], wait: Wait) -> Tensor:
        ctx.exchange, ctx.lengths = exchange, lengths
        found: Tensor = wait()
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Beside the computation too, though nothing is left to compute: so all collectives keep one order.
        return ctx.exchange.submit(_to_tokens, ctx.exchange, grad, ctx.lengths)(), None, None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: StateExchange, lengths: Sequence[int]) -> Tensor:
        ctx.exchange, ctx.lengths = exchange, lengths
        found: Tensor = exchange.submit(_to_tokens, exchange, x, lengths)()
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.submit(_to_heads, ctx.exchange, grad, ctx.lengths)(), None, None

"""All keys and values on every rank: the payload grows with the length of the sequence, and so does what a rank holds.

Later ranks attend to more keys, and the last decides the time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightscale.kernels.attention import HeadMaxima, largest_logits
from lightscale.parallel.sequence.attention import AttentionExchange, Finish, SplitAttention
from lightscale.parallel.sequence.exchange import StateExchange


class KeyGather(AttentionExchange):
    """One all-gather of keys and values, while queries are projected."""

    def begin(
        self, k: Tensor, v: Tensor, attention: SplitAttention, sinks: Tensor | None, maxima: HeadMaxima | None = None
    ) -> Finish:
        """See ``AttentionExchange``."""
        own = attention.own
        wait = begin_gather(torch.stack([k, v], dim=2), self.exchange, attention.lengths)
        seen = own.before + own.length if own.is_causal else None

        def finish(q: Tensor) -> Tensor:
            keys, values = wait()[:, :seen].unbind(dim=2)
            if maxima is not None:
                maxima.take_in(largest_logits(q, keys, own.ranges))
            return own(q, keys, values, sinks)

        return finish


def begin_gather(x: Tensor, exchange: StateExchange, lengths: Sequence[int] | None = None) -> Callable[[], Tensor]:
    """Start gathering x (B, T, …) along the sequence; the returned function gives (B, T of all ranks, …).

    Args:
        lengths: T of every rank where they differ; None when they are equal.
    """
    sizes = [x.size(1)] * exchange.size if lengths is None else list(lengths)
    # No replay as states have: kept, the keys and values of the whole sequence would stay for every layer, memory that
    # grows with the number of ranks. A recomputed layer gathers again, in one order on every rank.
    wait = exchange.submit(_all_gather, exchange, x.detach(), sizes)
    return lambda: _Gathered.apply(x, exchange, sizes, wait)


def _padded(x: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(x, [0, 0] * (x.dim() - 2) + [0, length - x.size(1)])


def _all_gather(exchange: StateExchange, x: Tensor, sizes: Sequence[int]) -> Tensor:
    # All-gathers want equal shapes: the longest segment's. The padding is cut off again, never attended to.
    own = _padded(x, max(sizes)).contiguous()
    gathered = own.new_empty(exchange.size, *own.shape)
    dist.all_gather_into_tensor(gathered.flatten(0, 1), own, group=exchange.group)
    exchange.count(own)
    return torch.cat([part[:, :size] for part, size in zip(gathered, sizes, strict=True)], dim=1)


# Written out, because the backward pass of ``torch.distributed.nn.all_gather`` crashed on subgroups and gave wrong
# gradients (pytorch issues 120213, 120386), and because the wait has to be apart from the start.
class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: StateExchange, sizes: Sequence[int], wait: Callable[[], Any]) -> Tensor:
        ctx.exchange, ctx.sizes = exchange, sizes
        gathered: Tensor = wait()
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # Every rank reads all tokens, so each has a part of every token's cotangent.
        exchange, sizes = ctx.exchange, ctx.sizes
        parts = torch.cat([_padded(part, max(sizes)) for part in grad.split(sizes, dim=1)])
        # Beside the computation too, though nothing is left to compute: so all collectives keep one order.
        own: Tensor = exchange.submit(_reduce_scatter, exchange, parts)()
        return own[:, : sizes[exchange.rank]], None, None, None


def _reduce_scatter(exchange: StateExchange, parts: Tensor) -> Tensor:
    # Summed in the dtype of the keys, as autograd sums the gradients of activations; states alone are fp32 at least.
    own = parts.new_empty(parts.size(0) // exchange.size, *parts.shape[1:])
    dist.reduce_scatter_tensor(own, parts, group=exchange.group)
    exchange.count(parts)
    return own

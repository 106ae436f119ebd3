"""Sequence parallelism: every rank holds a stretch of each sequence, and only states travel between ranks.

A segment of a row acts on the state that enters it as ``S -> D * S + S_loc`` (diagonal algebra). Ranks gather the
summaries (D, S_loc) of all segments once per layer and direction, in fp32, and fold those before them; the backward
pass gathers the cotangents U of the incoming states and folds those after. The payload does not depend on the
length of the sequence. (LASP, arXiv 2404.02882; LASP-2, arXiv 2502.07563; both without document boundaries.)

``D = 0`` where a document boundary cuts the row, so that nothing passes it and no routing is needed. A state that
must not pass is replaced, not multiplied by zero, so that an overflow elsewhere cannot arrive as NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.kernels.lightning.chunked import grad_bwd, out_fwd, state_bwd, state_fwd


@dataclass(frozen=True)
class DiagonalSummary:
    """What a segment does to a state: ``S -> decay * S + state``.

    decay: (B, H), in [0, 1]. state: (B, H, K, V).
    """

    decay: Tensor
    state: Tensor

    def apply(self, incoming: Tensor) -> Tensor:
        """The state that leaves the segment when ``incoming`` (B, H, K, V) enters it."""
        decay = self.decay[..., None, None]
        return torch.where(decay == 0, self.state, decay * incoming + self.state)

    def adjoint(self, outgoing: Tensor, own: Tensor) -> Tensor:
        """The cotangent of the incoming state, from that of the outgoing one and the segment's ``own`` use of it."""
        decay = self.decay[..., None, None]
        return torch.where(decay == 0, own, decay * outgoing + own)


class StateExchange:
    """Gathers one summary per rank of ``group``, in rank order, and counts what it moves.

    Every rank must issue the same exchanges in the same order. ``num_calls`` and ``payload_bytes`` (what this rank
    contributes) let tests hold the cost to its formula.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.num_calls = 0
        self.payload_bytes = 0

    def gather(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """The ``tensors`` (equal shapes and one dtype on all ranks) of every rank, packed into one collective."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        gathered = flat.new_empty(self.size * flat.numel())
        dist.all_gather_into_tensor(gathered, flat, group=self.group)
        self.num_calls += 1
        self.payload_bytes += flat.numel() * flat.element_size()
        sizes = [tensor.numel() for tensor in tensors]
        return [
            tuple(part.view(tensor.shape) for part, tensor in zip(row.split(sizes), tensors, strict=True))
            for row in gathered.view(self.size, -1)
        ]


def fold_before(summaries: Sequence[DiagonalSummary], rank: int) -> Tensor:
    """The state that enters segment ``rank`` when nothing enters the first: (B, H, K, V)."""
    state = torch.zeros_like(summaries[0].state)
    for summary in summaries[:rank]:
        state = summary.apply(state)
    return state


def fold_after(summaries: Sequence[DiagonalSummary], cotangents: Sequence[Tensor], rank: int) -> Tensor:
    """The cotangent of the state that leaves segment ``rank``, from every rank's own use of its incoming state."""
    outgoing = torch.zeros_like(cotangents[0])
    for summary, own in zip(reversed(summaries[rank + 1 :]), reversed(cotangents[rank + 1 :]), strict=True):
        outgoing = summary.adjoint(outgoing, own)
    return outgoing


class _SequenceParallelLightning(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        continues: Tensor,
        cu_seqlens: Tensor | None,
        exchange: StateExchange,
    ) -> Tensor:
        own, decay = state_fwd(k, v, log_decay, cu_seqlens)
        decay = torch.where(continues[:, None], decay, 0).to(own.dtype)
        gathered = exchange.gather(own, decay)
        summaries = [DiagonalSummary(decay=decay_r, state=state_r) for state_r, decay_r in gathered]
        incoming = torch.where(continues[:, None, None, None], fold_before(summaries, exchange.rank), 0)
        o, _ = out_fwd(q, k, v, log_decay, incoming, cu_seqlens)
        # The gathered states are W times the payload: never kept. The decays of later segments are all backward needs.
        decays = torch.stack([summary.decay for summary in summaries])
        ctx.save_for_backward(q, k, v, log_decay, continues, cu_seqlens, incoming, decays)
        ctx.exchange = exchange
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, continues, cu_seqlens, incoming, decays = ctx.saved_tensors
        own = torch.where(continues[:, None, None, None], state_bwd(q, do, log_decay, cu_seqlens), 0)
        cotangents = [own_r for (own_r,) in ctx.exchange.gather(own)]
        # `adjoint` reads only the decays; the states of other ranks are not needed again.
        summaries = [DiagonalSummary(decay=decay, state=own) for decay in decays]
        outgoing = fold_after(summaries, cotangents, ctx.exchange.rank)
        dq, dk, dv, dlog_decay = grad_bwd(
            q, k, v, log_decay, do, incoming, outgoing, cu_seqlens, with_decay=ctx.needs_input_grad[3]
        )
        return dq, dk, dv, dlog_decay, None, None, None


def sequence_parallel_lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    continues: Tensor,
    cu_seqlens: Tensor | None,
    exchange: StateExchange,
) -> Tensor:
    """Lightning attention over rows that are split along the sequence over the ranks of ``exchange``.

    Args:
        q, k: (B, T, H, K), this rank's stretch of each row; T may differ between ranks, and be 0.
        v: (B, T, H, V).
        log_decay: (H,) or None.
        continues: (B,) bool, whether the row's first token continues the document of the rank before.
        cu_seqlens: (N + 1,) boundaries over the flattened B·T tokens, every row start included; None for no boundary
            inside any row.
        exchange: the ranks, in the order of the sequence.

    Returns:
        o: (B, T, H, V). One exchange of 4·B·H·(K·V + 1) bytes forward, one of 4·B·H·K·V bytes backward.
    """
    return _SequenceParallelLightning.apply(q, k, v, log_decay, continues, cu_seqlens, exchange)

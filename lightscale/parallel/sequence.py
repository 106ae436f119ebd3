"""Sequence parallelism: every rank holds a stretch of each sequence, and only states travel between ranks.

What a segment of a row does to the state that enters it is summed up in a small summary. Ranks gather the summaries of
all segments once per layer, in fp32, and fold those before them; the backward pass gathers the cotangents of the
incoming states and folds those after. The payload does not depend on the length of the sequence. (LASP, arXiv
2404.02882; LASP-2, arXiv 2502.07563; both without document boundaries.)

There are two algebras. Diagonal: ``S -> D * S + S_loc`` (lightning attention, gated linear attention, TPE).
Log-sum-exp: the states of additive decay merge as averages with weights exp(z) (LightNet). Where a document boundary cuts the row,
``D = 0``, so that nothing passes it and no routing is needed. A state that must not pass is replaced, not multiplied by
zero, so that an overflow elsewhere cannot arrive as NaN.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.kernels.gla import chunked as gla
from lightscale.kernels.lightnet import LightNetState, StateCotangent, merge, merge_adjoint
from lightscale.kernels.lightnet import chunked as lightnet
from lightscale.kernels.lightning import chunked as lightning
from lightscale.kernels.tpe import chunked as tpe

Tensors = tuple[Tensor, ...]
Inputs = tuple[Any, ...]
"""Tensors, some of them optional; each scan says which."""


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

    def gather(self, *tensors: Tensor) -> list[Tensors]:
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


@dataclass(frozen=True, kw_only=True)
class Scan(ABC):
    """An operator as sequence parallelism needs it: in the pieces before and after an exchange.

    continues: (B,) bool, whether a row's first token continues the document of the rank before. cu_seqlens: (N + 1,)
    document boundaries over the flattened tokens of this rank, every row start included; None for none.
    """

    continues: Tensor
    cu_seqlens: Tensor | None

    @abstractmethod
    def summarize(self, inputs: Inputs) -> Tensors:
        """What this rank's segment does to a state, to be gathered: tensors of one dtype."""

    @abstractmethod
    def enter(self, summaries: Sequence[Tensors], rank: int) -> tuple[Tensors, Tensors]:
        """The state that enters segment ``rank``, and what ``leave`` will need of the summaries."""

    @abstractmethod
    def outputs(self, inputs: Inputs, state: Tensors) -> Tensor:
        """The outputs of this rank's tokens."""

    @abstractmethod
    def reads(self, inputs: Inputs, do: Tensor, state: Tensors) -> Tensors:
        """The cotangent of the incoming state that comes from this rank's own outputs, to be gathered."""

    @abstractmethod
    def leave(self, cotangents: Sequence[Tensors], kept: Tensors, rank: int) -> Tensors:
        """The cotangent of the state that leaves segment ``rank``."""

    @abstractmethod
    def gradients(self, inputs: Inputs, do: Tensor, state: Tensors, cotangent: Tensors) -> Inputs:
        """The gradients of ``inputs``, in their order."""

    def where_continues(self, state: Tensor, otherwise: float = 0.0) -> Tensor:
        """``state`` (B, …) for the rows that go on with a document, ``otherwise`` for those that begin one."""
        return torch.where(self.continues.view(-1, *[1] * (state.dim() - 1)), state, otherwise)


@dataclass(frozen=True, kw_only=True)
class DiagonalScan(Scan):
    """A segment acts as ``S -> D * S + S_loc``, with D between 0 and 1 broadcast to the state's shape."""

    @abstractmethod
    def pieces(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """S_loc, and D broadcastable to it, whatever comes before the row."""

    @abstractmethod
    def own_reads(self, inputs: Inputs, do: Tensor) -> Tensor:
        """The cotangent of the incoming state, of S_loc's shape."""

    def summarize(self, inputs: Inputs) -> Tensors:
        state, decay = self.pieces(inputs)
        return state, self.where_continues(decay).to(state.dtype)

    def enter(self, summaries: Sequence[Tensors], rank: int) -> tuple[Tensors, Tensors]:
        state = torch.zeros_like(summaries[0][0])
        for own, decay in summaries[:rank]:
            state = torch.where(decay == 0, own, decay * state + own)
        # The gathered states are as many times the payload as there are ranks: only the decays are kept.
        return (self.where_continues(state),), (torch.stack([decay for _, decay in summaries]),)

    def reads(self, inputs: Inputs, do: Tensor, state: Tensors) -> Tensors:
        return (self.where_continues(self.own_reads(inputs, do)),)

    def leave(self, cotangents: Sequence[Tensors], kept: Tensors, rank: int) -> Tensors:
        (decays,) = kept
        outgoing = torch.zeros_like(cotangents[0][0])
        for later in range(len(cotangents) - 1, rank, -1):
            (own,) = cotangents[later]
            outgoing = torch.where(decays[later] == 0, own, decays[later] * outgoing + own)
        return (outgoing,)


@dataclass(frozen=True, kw_only=True)
class LightningScan(DiagonalScan):
    """Lightning attention. Inputs: q, k (B, T, H, K), v (B, T, H, V), log_decay (H,) or None."""

    def pieces(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        _, k, v, log_decay = inputs
        state, decay = lightning.state_fwd(k, v, log_decay, self.cu_seqlens)
        return state, decay[..., None, None]

    def outputs(self, inputs: Inputs, state: Tensors) -> Tensor:
        q, k, v, log_decay = inputs
        return lightning.out_fwd(q, k, v, log_decay, state[0], self.cu_seqlens)[0]

    def own_reads(self, inputs: Inputs, do: Tensor) -> Tensor:
        return lightning.state_bwd(inputs[0], do, inputs[3], self.cu_seqlens)

    def gradients(self, inputs: Inputs, do: Tensor, state: Tensors, cotangent: Tensors) -> Inputs:
        q, k, v, log_decay = inputs
        learned = log_decay is not None and log_decay.requires_grad
        return lightning.grad_bwd(q, k, v, log_decay, do, state[0], cotangent[0], self.cu_seqlens, with_decay=learned)


@dataclass(frozen=True, kw_only=True)
class GatedScan(DiagonalScan):
    """Gated linear attention. Inputs: q, k (B, T, H, K), v (B, T, H, V), log_decay (B, T, H, K)."""

    def pieces(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        _, k, v, log_decay = inputs
        state, decay = gla.state_fwd(k, v, log_decay, self.cu_seqlens)
        return state, decay[..., None]

    def outputs(self, inputs: Inputs, state: Tensors) -> Tensor:
        q, k, v, log_decay = inputs
        return gla.out_fwd(q, k, v, log_decay, state[0], self.cu_seqlens)[0]

    def own_reads(self, inputs: Inputs, do: Tensor) -> Tensor:
        return gla.state_bwd(inputs[0], do, inputs[3], self.cu_seqlens)

    def gradients(self, inputs: Inputs, do: Tensor, state: Tensors, cotangent: Tensors) -> Inputs:
        q, k, v, log_decay = inputs
        return gla.grad_bwd(q, k, v, log_decay, do, state[0], cotangent[0], self.cu_seqlens)


@dataclass(frozen=True, kw_only=True)
class TPEScan(DiagonalScan):
    """Toeplitz positional encoding. Inputs: x (B, T, D), log_decay (E,), gamma (D, E)."""

    def pieces(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        state, decay = tpe.state_fwd(inputs[0], inputs[1], self.cu_seqlens)
        return state, decay[:, None]

    def outputs(self, inputs: Inputs, state: Tensors) -> Tensor:
        x, log_decay, gamma = inputs
        return tpe.out_fwd(x, log_decay, gamma, state[0], self.cu_seqlens)[0]

    def own_reads(self, inputs: Inputs, do: Tensor) -> Tensor:
        return tpe.state_bwd(do, inputs[1], inputs[2], self.cu_seqlens)

    def gradients(self, inputs: Inputs, do: Tensor, state: Tensors, cotangent: Tensors) -> Inputs:
        x, log_decay, gamma = inputs
        return tpe.grad_bwd(x, log_decay, gamma, do, state[0], cotangent[0], self.cu_seqlens)


@dataclass(frozen=True, kw_only=True)
class LightNetScan(Scan):
    """Additive decay. Inputs: q, k (B, T, H, K), v (B, T, H, V), cos, sin (B, T, H, K), which are fixed.

    One exchange forward: z and S travel together, and the queries are rescaled behind it.
    """

    def summarize(self, inputs: Inputs) -> Tensors:
        _, k, v, cos, sin = inputs
        state, through = lightnet.state_fwd(k, v, (cos, sin), self.cu_seqlens)
        return state.z, state.S, self.where_continues(through)

    def enter(self, summaries: Sequence[Tensors], rank: int) -> tuple[Tensors, Tensors]:
        state = LightNetState(torch.full_like(summaries[0][0], -torch.inf), torch.zeros_like(summaries[0][1]))
        mine, before = state, []
        for number, (z, S, through) in enumerate(summaries):
            before.append(state.z)
            mine = state if number == rank else mine
            state = merge(state, LightNetState(z, S), through)
        # The adjoint of a merge reads the z of both states only.
        kept = torch.stack(before), torch.stack([z for z, _, _ in summaries]), torch.stack([t for *_, t in summaries])
        return (self.where_continues(mine.z, -torch.inf), self.where_continues(mine.S)), kept

    def outputs(self, inputs: Inputs, state: Tensors) -> Tensor:
        q, k, v, cos, sin = inputs
        return lightnet.out_fwd(q, k, v, (cos, sin), LightNetState(*state), self.cu_seqlens)[0]

    def reads(self, inputs: Inputs, do: Tensor, state: Tensors) -> Tensors:
        q, k, v, cos, sin = inputs
        own = lightnet.state_bwd(q, k, v, (cos, sin), do, LightNetState(*state), self.cu_seqlens)
        return self.where_continues(own.U), self.where_continues(own.R)

    def leave(self, cotangents: Sequence[Tensors], kept: Tensors, rank: int) -> Tensors:
        before, local, through = kept
        outgoing = StateCotangent(*(torch.zeros_like(tensor) for tensor in cotangents[0]))
        for later in range(len(cotangents) - 1, rank, -1):
            first, second = (LightNetState(z[later], z[later]) for z in (before, local))
            passed, _ = merge_adjoint(first, second, outgoing, through[later])
            own_U, own_R = cotangents[later]
            outgoing = StateCotangent(passed.U + own_U, passed.R + own_R)
        return tuple(outgoing)

    def gradients(self, inputs: Inputs, do: Tensor, state: Tensors, cotangent: Tensors) -> Inputs:
        q, k, v, cos, sin = inputs
        dq, dk, dv = lightnet.grad_bwd(
            q, k, v, (cos, sin), do, LightNetState(*state), StateCotangent(*cotangent), self.cu_seqlens
        )
        return dq, dk, dv, None, None


class _SequenceParallelScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scan: Scan, exchange: StateExchange, *inputs: Tensor | None) -> Tensor:
        state, kept = scan.enter(exchange.gather(*scan.summarize(inputs)), exchange.rank)
        ctx.scan, ctx.exchange, ctx.num_inputs, ctx.num_state = scan, exchange, len(inputs), len(state)
        ctx.save_for_backward(*inputs, *state, *kept)
        return scan.outputs(inputs, state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        saved, first, second = ctx.saved_tensors, ctx.num_inputs, ctx.num_inputs + ctx.num_state
        inputs, state, kept = saved[:first], saved[first:second], saved[second:]
        cotangents = ctx.exchange.gather(*ctx.scan.reads(inputs, do, state))
        outgoing = ctx.scan.leave(cotangents, kept, ctx.exchange.rank)
        return None, None, *ctx.scan.gradients(inputs, do, state, outgoing)


def sequence_parallel(scan: Scan, exchange: StateExchange, *inputs: Tensor | None) -> Tensor:
    """``scan`` over rows that are split along the sequence over the ranks of ``exchange``, in rank order.

    Stretches may differ in length from rank to rank, and be empty. One exchange forward and one backward.
    """
    output: Tensor = _SequenceParallelScan.apply(scan, exchange, *inputs)
    return output


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: StateExchange) -> Tensor:
        ctx.exchange = exchange
        return torch.cat([part for (part,) in exchange.gather(x)], dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Every rank reads all tokens, so each has a part of every token's cotangent.
        exchange = ctx.exchange
        parts = torch.cat(grad.chunk(exchange.size, dim=1))
        own = parts.new_empty(grad.size(0), *parts.shape[1:])
        dist.reduce_scatter_tensor(own, parts, group=exchange.group)
        return own, None


def gather_sequence(x: Tensor, exchange: StateExchange) -> Tensor:
    """(B, T, …), equal T on all ranks -> (B, T * ranks, …): for softmax attention, whose state is all tokens."""
    gathered: Tensor = _GatherSequence.apply(x, exchange)
    return gathered

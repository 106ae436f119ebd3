"""A short causal convolution along the tokens, separate for each channel, followed by SiLU.

    y_t[c] = silu(Σ_j w[c, W - 1 - j] x_{t-j}[c]),  j = 0 … W - 1 back to the document's first token

(Mamba-2, arXiv 2405.21060, figure 6, which has it before queries, keys and values.) Weights stand in the order of
PyTorch's ``Conv1d``, the token's own last. Before a segment of a row it reads W - 1 tokens: of other sequence ranks
(``parallel.sequence.begin_tail``), or of a state.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.kernels.common.states import state_dtype
from lightscale.models.layers.context import SequenceContext
from lightscale.models.layers.head_parameter import HeadParameter
from lightscale.models.layers.states import incoming_state
from lightscale.parallel.megatron import TransformerConfig


class ShortConvolution(HeadParameter):
    """``weight``: (channels / tensor, W), drawn evenly from ± W^-½ as PyTorch draws a convolution of one channel."""

    def __init__(self, config: TransformerConfig, channels: int, width: int, group: dist.ProcessGroup) -> None:
        def draw(weight: Tensor, generator: torch.Generator) -> None:
            weight.uniform_(-(width**-0.5), width**-0.5, generator=generator)

        super().__init__(config, "weight", (channels, width), draw, group)

    def convolve(self, before: Tensor, x: Tensor, positions: Tensor) -> Tensor:
        """before (W - 1, b, c), x (n, b, c), positions (b, n) in documents -> (n, b, c)."""
        return short_convolution(before, x, self.weight, positions)


class ConvolutionTail:
    """The last tokens before a rank's own that short convolutions read: they travel from its making until ``arrive``.

    They come from the sequence ranks before, or from the layer's state, beside its ``S``: ``tail`` (b, W - 1, c).

    Args:
        inputs: (n, b, c) each, this rank's inputs of the convolutions.
        width: W.
        context: of the pass.
        state_name: of the layer.
        state: shape of a row's ``S``.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        width: int,
        context: SequenceContext,
        state_name: str,
        state: tuple[int, ...],
    ) -> None:
        self._widths = [x.size(-1) for x in inputs]
        self._context, self._name, self._shape = context, state_name, state
        n, size = inputs[0].size(0), min(width - 1, inputs[0].size(0))
        self._own = torch.cat([x[n - size :] for x in inputs], dim=-1)
        self._before = self._own.new_zeros(width - 1, *self._own.shape[1:])
        self._wait = None
        if context.exchange is not None:
            self._wait = context.begin_tail(self._own, width - 1, layer=state_name)
        self._within = context

    def arrive(self) -> tuple[SequenceContext, tuple[Tensor, ...]]:
        """A context whose states are ``S`` alone, and the tokens before each of the inputs (W - 1, b, c)."""
        if self._wait is not None:
            self._before = self._wait()
        elif self._context.states is not None:
            size, b, width = self._before.shape
            shapes = {"S": (b, *self._shape), "tail": (b, size, width)}
            state = incoming_state(self._context, self._name, shapes, state_dtype(self._before.dtype))
            self._within = replace(self._context, states={})
            if state is not None:
                # Tails are kept in the states' dtype, in which every number of the activations' is itself.
                self._before = state["tail"].to(self._before.dtype).transpose(0, 1)
                self._within = replace(self._context, states={self._name: {"S": state["S"]}})
        return self._within, self._before.split(self._widths, dim=-1)

    def leave(self) -> None:
        """Store the tail for the next call beside the ``S`` that the operator has left."""
        if self._context.states is None or self._within.states is None:
            return
        left = self._within.states[self._name]
        seen = torch.cat([self._before, self._own])[self._own.size(0) :].transpose(0, 1)
        self._context.states[self._name] = {**left, "tail": seen.to(left["S"].dtype, copy=True).contiguous()}


def short_convolution(before: Tensor, x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """The module's formula, fp32 at least inside and rounded once; only its inputs are kept for the backward pass.

    Args:
        before: (W - 1, b, c), the tokens before those of x; read by tokens whose document reaches so far back.
        x: (n, b, c).
        weight: (c, W).
        positions: (b, n) int64, tokens since the document's start.
    """
    y: Tensor = _ShortConvolution.apply(before, x, weight, positions)
    return y


def _summed(together: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Σ_j as above (n, b, c), of the tokens (W - 1 + n, b, c); ``positions`` (n, b, 1)."""
    n, width = positions.size(0), weight.size(1)
    y = together[width - 1 :] * weight[:, -1]
    for back in range(1, width):
        # Selected, not multiplied by 0: what overflowed in another document must not give NaN.
        earlier = together[width - 1 - back : width - 1 - back + n]
        y += torch.where(positions >= back, earlier * weight[:, width - 1 - back], 0.0)
    return y


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, before: Tensor, x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(before, x, weight, positions)
        together, wide, places = _widened(before, x, weight, positions)
        return F.silu(_summed(together, wide, places)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        before, x, weight, positions = ctx.saved_tensors
        together, wide, places = _widened(before, x, weight, positions)
        n, width = places.size(0), wide.size(1)
        y = _summed(together, wide, places)
        sigmoid = torch.sigmoid(y)
        dy = gradient.to(wide.dtype) * (sigmoid * (1 + y * (1 - sigmoid)))
        dtogether, dweight = torch.zeros_like(together), torch.zeros_like(wide)
        for back in range(width):
            first, column = width - 1 - back, width - 1 - back
            reached = torch.where(places >= back, dy, 0.0)
            dtogether[first : first + n] += reached * wide[:, column]
            # Where nothing is reached, what is there may be infinite.
            read = torch.where(places >= back, together[first : first + n], 0.0)
            dweight[:, column] = (reached * read).sum((0, 1))
        dbefore, dx = dtogether.to(x.dtype).split([width - 1, n])
        return dbefore, dx, dweight.to(weight.dtype), None


def _widened(before: Tensor, x: Tensor, weight: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.cat([before, x]).to(dtype), weight.to(dtype), positions.transpose(0, 1)[..., None]

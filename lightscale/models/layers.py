"""Layers that every architecture shares: norms, linear layers of Megatron, the residual sum."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from lightscale.parallel.initialization import normal, set_initializer


def ones(weight: Tensor, generator: torch.Generator) -> None:
    """Draws nothing: every element is 1."""
    weight.fill_(1.0)


class SRMSNorm(nn.Module):
    """Simple RMS norm, x / sqrt(mean(x²) + eps), without weight (TransNormerLLM, arXiv 2307.14995, eq. 7)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., d) -> (..., d), computed in fp32 for half precision."""
        return F.rms_norm(x, (self.hidden_size,), eps=self.eps)


class RMSNorm(nn.Module):
    """RMS norm with a weight (arXiv 1910.07467)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.empty(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # Tensor ranks hold other tokens each: the engine sums the gradient over them.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        set_initializer(self.weight, ones)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., d) -> (..., d), computed in fp32 for half precision."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def srmsnorm_split(x: Tensor, *, width: int, eps: float, group: dist.ProcessGroup) -> Tensor:
    """SRMSNorm over the full ``width`` of x: (..., width / tensor), which is split over the tensor ranks.

    One all-reduce of a number per token; without tensor parallelism none.
    """
    if group.size() == 1:
        return F.rms_norm(x, (width,), eps=eps)
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    mean = _sum_over_tensor_ranks(wide.square().sum(dim=-1, keepdim=True), group) / width
    return (wide * torch.rsqrt(mean + eps)).to(x.dtype)


class _SumBothWays(torch.autograd.Function):
    # Every rank scales its own channels by the sum, so the sum's cotangents differ by rank and must be summed too.
    # (Megatron's reduce passes them through, which is right only where what follows is the same on every rank.)
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _sum_over_tensor_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _SumBothWays.apply(x, group)


def leave_unset(weight: Tensor) -> Tensor:
    """An initializer for Megatron that does nothing: its own depend on the layout; weights are drawn by name."""
    return weight


def column_parallel(
    config: TransformerConfig, width_in: int, width_out: int, *, std: float, group: dist.ProcessGroup
) -> ColumnParallelLinear:
    """(n / tensor, b, width_in) -> (n, b, width_out / tensor): the rows of the weight are split. No bias."""
    layer = ColumnParallelLinear(
        width_in, width_out, config=config, init_method=leave_unset, bias=False, gather_output=False, tp_group=group
    )
    set_initializer(layer.weight, normal(std))
    return layer


def row_parallel(
    config: TransformerConfig, width_in: int, width_out: int, *, std: float, group: dist.ProcessGroup
) -> RowParallelLinear:
    """(n, b, width_in / tensor) -> (n / tensor, b, width_out): the columns of the weight are split. No bias."""
    layer = RowParallelLinear(
        width_in,
        width_out,
        config=config,
        init_method=leave_unset,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
        tp_group=group,
    )
    set_initializer(layer.weight, normal(std))
    return layer


class ReplicatedLinear(nn.Module):
    """A linear layer that every tensor rank holds whole and applies to its own tokens."""

    def __init__(self, config: TransformerConfig, width_in: int, width_out: int, *, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(width_out, width_in, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # Each rank's gradient is that of its own tokens: the engine sums it over the tensor ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        set_initializer(self.weight, normal(std))

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., width_in) -> (..., width_out)."""
        return F.linear(x, self.weight)


def residual_sum(training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """Megatron's hook between a sublayer and the residual stream: a plain sum (no bias, no dropout)."""

    def add(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        return residual + output[0]

    return add

"""Norms: simple RMS norm, RMS norm with a weight, LayerNorm, norms of heads, and over channels of all tensor ranks.

Norms of blocks are called with a residual stream too: (x, added) -> x + added, and its norm (``layers/blocks.py``).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.config.model import ModelConfig
from lightscale.kernels.norm import norm, sum_and_norm
from lightscale.models.layers.head_parameter import HeadParameter
from lightscale.parallel.initialization import ones, set_initializer, zeros
from lightscale.parallel.megatron import TransformerConfig, copy_to_tensor_model_parallel_region


class SRMSNorm(nn.Module):
    """Simple RMS norm, x / sqrt(mean(x²) + eps), without weight (TransNormerLLM, arXiv 2307.14995, eq. 7)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps

    def forward(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x, added: (..., d) -> x + added (..., d) and its norm, computed in fp32 for half precision."""
        return sum_and_norm(x, added, eps=self.eps)


class RMSNorm(nn.Module):
    """RMS norm with a weight (arXiv 1910.07467), or with 1 + weight (``layernorm_zero_centered_gamma``)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(
            torch.empty(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # Tensor ranks hold other tokens each: the engine sums the gradient over them.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        set_initializer(self.weight, zeros if self.zero_centered else ones)

    def forward(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x, added: (..., d) -> x + added (..., d) and its norm, computed in fp32 for half precision."""
        return sum_and_norm(x, added, _factor(self.weight, self.zero_centered), eps=self.eps)


class LayerNorm(SRMSNorm):
    """LayerNorm, (x - mean(x)) / sqrt(var(x) + eps), without weight (arXiv 1607.06450; CausalRN's)."""

    def forward(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x, added: (..., d) -> x + added (..., d) and its norm, computed in fp32 for half precision."""
        total = x if added is None else x + added
        wide = total.to(torch.promote_types(x.dtype, torch.float32))
        return total, layer_norm_split(wide, width=self.hidden_size, eps=self.eps).to(x.dtype)


class AffineLayerNorm(nn.Module):
    """LayerNorm with a weight and a bias (arXiv 1607.06450), as in ViT and BERT."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        for name, draw in (("weight", ones), ("bias", zeros)):
            made = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()))
            # Tensor ranks hold other tokens each: the engine sums the gradient over them.
            made.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            set_initializer(made, draw)
            self.register_parameter(name, made)

    def forward(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x, added: (..., d) -> x + added (..., d) and its norm, computed in fp32 for half precision."""
        total = x if added is None else x + added
        return total, F.layer_norm(total, total.shape[-1:], self.weight, self.bias, self.eps)


def norm_class(model: ModelConfig) -> Callable[[TransformerConfig, int, float], nn.Module]:
    """The norm of a model's blocks and of its end."""
    if model.norm_elementwise_affine:
        return AffineLayerNorm
    return {"srmsnorm": SRMSNorm, "rmsnorm": RMSNorm, "layernorm": LayerNorm}[model.norm]


class PostNorm(nn.Module):
    """The norm of a sublayer's output, before it joins the residual stream.

    Args:
        norm: class of the norm; config, hidden_size, eps: its arguments.
    """

    def __init__(self, norm: Callable[..., nn.Module], config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.layernorm = norm(config, hidden_size, eps)

    def forward(self, output: Tensor) -> Tensor:
        """output: (n / tensor, b, d) -> (n / tensor, b, d)."""
        normed: Tensor = self.layernorm(output)[1]
        return normed


class HeadNorm(nn.Module):
    """RMS norm of each head, with a weight that all heads share.

    Args:
        config: Megatron's.
        width: channels of a head.
        eps: added to the mean square.
        group: the tensor ranks, which hold other heads each.
        wide: the weight is fp32 in half-precision models.
        zero_centered: heads are multiplied by 1 + weight, as in Qwen3-Next and Gemma.
    """

    def __init__(
        self,
        config: TransformerConfig,
        width: int,
        eps: float,
        group: dist.ProcessGroup,
        *,
        wide: bool = False,
        zero_centered: bool = False,
    ) -> None:
        super().__init__()
        self.eps, self.group, self.zero_centered = eps, group, zero_centered
        dtype = torch.promote_types(config.params_dtype, torch.float32) if wide else config.params_dtype
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=torch.cuda.current_device()))
        # Tensor ranks hold other heads each. With Megatron's sequence parallelism the engine sums the gradient over
        # them, of all layers at once; Megatron core sums nothing without it.
        self.is_summed_by_engine = bool(config.sequence_parallel) or group.size() == 1
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        set_initializer(self.weight, zeros if zero_centered else ones)

    def forward(self, x: Tensor, gate: Tensor | None = None, activation: str = "none") -> Tensor:
        """x, gate: (..., h, k) -> (..., h, k), times the activated gate."""
        weight = self.weight
        if not self.is_summed_by_engine:
            weight = copy_to_tensor_model_parallel_region(weight, group=self.group)
        return norm(x, _factor(weight, self.zero_centered), gate=gate, gate_activation=activation, eps=self.eps)


class AllHeadsNorm(HeadParameter):
    """RMS norm over the channels of all heads together, those of other tensor ranks too, with a weight per channel.

    Args:
        config: Megatron's.
        width: channels of all heads.
        eps: added to the mean square.
        group: the tensor ranks, which hold other heads each, and their part of the weight.
        zero_centered: as in ``HeadNorm``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        width: int,
        eps: float,
        group: dist.ProcessGroup,
        *,
        zero_centered: bool = False,
    ) -> None:
        super().__init__(config, "weight", (width,), zeros if zero_centered else ones, group)
        self.width, self.eps, self.zero_centered = width, eps, zero_centered

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x: (b, n, h / tensor, k) -> (b, n, h / tensor, k)."""
        weight = _factor(super().forward(), self.zero_centered)
        reduce = partial(dist.all_reduce, group=self.tp_group) if self.tp_group.size() > 1 else None
        return norm(x.flatten(2), weight, eps=self.eps, width=self.width, reduce=reduce).view(x.shape)


def _factor(weight: Tensor, zero_centered: bool) -> Tensor:
    # Not rounded to bf16, whose neighbours of 1 are 1/128 apart.
    return 1 + weight.to(torch.promote_types(weight.dtype, torch.float32)) if zero_centered else weight


class _Centered(torch.autograd.Function):
    """x (..., width / tensor) without the mean over all tensor ranks' channels: a projection, its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int, group: dist.ProcessGroup | None) -> Tensor:
        ctx.width, ctx.group = width, group
        total = x.sum(-1, keepdim=True)
        if group is not None and group.size() > 1:
            dist.all_reduce(total, group=group)
        return x - total / width

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        centered: Tensor = _Centered.apply(grad, ctx.width, ctx.group)
        return centered, None, None


def layer_norm_split(x: Tensor, *, width: int, eps: float, group: dist.ProcessGroup | None = None) -> Tensor:
    """LayerNorm without weights over the full ``width`` of x: (..., width / tensor), split over ``group`` if any.

    Two all-reduces of a number per token each way; without tensor parallelism none.
    """
    centered: Tensor = _Centered.apply(x, width, group)
    if group is None or group.size() == 1:
        return norm(centered, eps=eps)
    return gated_norm_split(centered, None, width=width, eps=eps, group=group)


def gated_norm_split(x: Tensor, gate: Tensor | None, *, width: int, eps: float, group: dist.ProcessGroup) -> Tensor:
    """SRMSNorm over the full ``width`` of x: (..., width / tensor), split over the tensor ranks, times sigmoid(gate).

    One all-reduce of a number per token each way; without tensor parallelism none.
    """
    # The mean square is over all heads, and each tensor rank has some of them: their sums are added up.
    reduce = partial(dist.all_reduce, group=group) if group.size() > 1 else None
    activation = "none" if gate is None else "sigmoid"
    return norm(x, gate=gate, gate_activation=activation, eps=eps, width=width, reduce=reduce)

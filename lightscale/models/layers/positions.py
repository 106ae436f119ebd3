"""Positions in queries and keys, by rotations: LRPE with learnable angles, RoPE with fixed ones."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightscale.kernels.common.angles import Angles
from lightscale.models.specs.options import RopeScalingOptions
from lightscale.parallel.initialization import set_initializer
from lightscale.parallel.megatron import (
    MegatronModule,
    TransformerConfig,
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)


def lrpe_angles(num_heads: int, head_dim: int) -> Tensor:
    """(h, k) fp64: 10000^(-2j/d) with j counted over heads and channels, d = h k."""
    # Over all heads, as TransNormerLLM counts: heads differ in their wavelengths. cosFormer2 counts within a head.
    width = num_heads * head_dim
    j = torch.arange(width, dtype=torch.float64)
    return torch.pow(10000.0, -2 * j / width).view(num_heads, head_dim)


class LRPE(MegatronModule):
    """Learnable angles of a layer's heads, for queries and keys.

    theta: (h / tensor, k), split by head over the tensor ranks. Kept in fp32 in half-precision models, because it is
    multiplied by positions.
    """

    def __init__(self, config: TransformerConfig, angles: Tensor, group: dist.ProcessGroup) -> None:
        """angles: (all heads, k), the initial values."""
        super().__init__(config)
        self.tp_group = group
        wide = torch.promote_types(config.params_dtype, torch.float32)
        heads, width = angles.size(0) // group.size(), angles.size(1)
        self.theta = nn.Parameter(torch.empty(heads, width, dtype=wide, device=torch.cuda.current_device()))
        self.theta.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.theta.partition_dim, self.theta.partition_stride = 0, 1  # type: ignore[attr-defined]
        # At 0 an angle says nothing about positions: decay is not what should take it there.
        self.theta.no_weight_decay = True  # type: ignore[attr-defined]
        set_initializer(self.theta, lambda weight, generator: weight.copy_(angles))

    def forward(self, positions: Tensor) -> Angles:
        """positions: (b, n) int64 -> the angles of this rank's heads, which the operator applies."""
        return Angles(self.theta, positions)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description for checkpoints: theta is split along dim 0."""
        return make_sharded_tensors_for_checkpoint(
            {"theta": self.theta},
            prefix,
            {"theta": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


def rotary_angles(head_dim: int, base: float = 10000.0, scaling: RopeScalingOptions | None = None) -> Tensor:
    """(k / 2,) fp64: base^(-2i/k), i = 0 … k/2 - 1 (RoPE, arXiv 2104.09864), with ``scaling`` as Llama 3.1 has it.

    Scaled, a wave that turns ``low_freq_factor`` times or fewer in the first length turns ``factor`` times slower, one
    that turns ``high_freq_factor`` times or more is as it was, and between them the angles are mixed linearly.
    """
    theta = torch.pow(base, -2 * torch.arange(head_dim // 2, dtype=torch.float64) / head_dim)
    if scaling is None:
        return theta
    turns = scaling.original_max_position_embeddings * theta / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(theta / scaling.factor, theta, kept.clamp(0, 1))


def rope(x: Tensor, phases: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (x_i, x_{i + k/2}) of x (b, n, h, k) by phases (b, n, 1, k/2)."""
    # Rounded only here. A bf16 angle of a thousand radians would be off by up to two, its cosine is off by 1/512.
    cos, sin = (phase.to(x.dtype) for phase in phases)
    rotated: Tensor = _Rotation.apply(x, cos, sin)
    return rotated


class _Rotation(torch.autograd.Function):
    """Three passes over x each way, where autograd's operators take seven. The phases get no gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(x, torch.cat([cos, cos], dim=-1), out=rotated)
    (first, second), (of_first, of_second) = x.chunk(2, dim=-1), rotated.chunk(2, dim=-1)
    of_first.addcmul_(second, sin, value=-1)
    of_second.addcmul_(first, sin)
    return rotated

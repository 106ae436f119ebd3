"""Positions in queries and keys, by rotations: LRPE with learnable angles, RoPE with fixed ones."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightscale.kernels.common.angles import Angles, Phases, axis_angles, phases_of
from lightscale.kernels.heads import Heads, split_heads
from lightscale.models.specs.options import RopeScalingOptions
from lightscale.parallel.initialization import set_initializer
from lightscale.parallel.megatron import (
    MegatronModule,
    TransformerConfig,
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)


def lrpe_angles(num_heads: int, head_dim: int, axes: int = 1) -> Tensor:
    """(h, k) fp64: 10000^(-2j/d) with j counted over heads and channels, d = h k; for each axis anew, d = h k / axes.

    LightNet's equation 14 counts j over all axes. Taken literally, channels of later axes would hardly turn.
    """
    # Over all heads, as TransNormerLLM counts: heads differ in their wavelengths. cosFormer2 counts within a head.
    width = num_heads * head_dim // axes
    j = torch.arange(width, dtype=torch.float64)
    return torch.pow(10000.0, -2 * j / width).view(num_heads, -1).repeat(1, axes)


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
        """positions: (b, n), or (b, n, axes), int64 -> the angles of this rank's heads, which the operator applies."""
        return axis_angles(self.theta, positions)

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


def rotary_angles(width: int, base: float = 10000.0, scaling: RopeScalingOptions | None = None) -> Tensor:
    """(k / 2,) fp64: base^(-2i/k), i = 0 … k/2 - 1 (RoPE, arXiv 2104.09864), for k = ``width`` channels, scaled.

    linear   every wave turns ``factor`` times slower
    llama3   a wave that turns ``low_freq_factor`` times or fewer in the first length turns ``factor`` times slower, one
             that turns ``high_freq_factor`` times or more is as it was, and between them the angles are mixed linearly
    yarn     the same for ``beta_slow`` and ``beta_fast`` turns, mixed linearly in i (arXiv 2309.00071, section 3.2, as
             in transformers)
    """
    theta = torch.pow(base, -2 * torch.arange(width // 2, dtype=torch.float64) / width)
    if scaling is None:
        return theta
    if scaling.rope_type == "linear":
        return theta / scaling.factor
    length = scaling.original_max_position_embeddings
    assert length is not None
    if scaling.rope_type == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        assert low is not None and high is not None
        kept = (length * theta / (2 * math.pi) - low) / (high - low)
    else:
        # The channels, in fractions, whose waves turn so often.
        first, last = (
            width * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base))
            for turns in (scaling.beta_fast or 32.0, scaling.beta_slow or 1.0)
        )
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        kept = 1 - (torch.arange(width // 2, dtype=torch.float64) - first) / (last - first or 0.001)
    return torch.lerp(theta / scaling.factor, theta, kept.clamp(0, 1))


def rotary_factor(scaling: RopeScalingOptions | None) -> float:
    """Factor of rotated queries and keys: yarn's, by which scores grow for longer sequences; else 1."""
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    return scaling.attention_factor or max(1.0, 0.1 * math.log(scaling.factor) + 1)


class RotaryPositions(nn.Module):
    """Phases of rotary positions, computed once in a pass for all layers with the same ``key``.

    Args:
        config: Megatron's.
        width: channels of a head that are rotated.
        base: see ``rotary_angles``.
        scaling: for longer sequences; None: none.
        device: of the positions.
    """

    theta: Tensor

    def __init__(
        self,
        config: TransformerConfig,
        width: int,
        *,
        base: float,
        scaling: RopeScalingOptions | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.key = width, base, None if scaling is None else scaling.model_dump_json()
        self.dtype = config.params_dtype
        self.factor = rotary_factor(scaling)
        # Kept on the device: a copy in each pass would make the host wait.
        wide = torch.promote_types(config.params_dtype, torch.float32)
        theta = rotary_angles(width, base, scaling)[None].to(device, wide)
        self.register_buffer("theta", theta, persistent=False)

    def forward(self, positions: Tensor) -> Phases:
        """positions: (b, n) -> what ``rope`` takes."""
        cos, sin = phases_of(Angles(self.theta, positions), self.theta.dtype)
        return rope_phases((cos, sin) if self.factor == 1 else (self.factor * cos, self.factor * sin), self.dtype)


def rope_phases(phases: Phases, dtype: torch.dtype) -> Phases:
    """What ``rope`` takes of phases (b, n, 1, r/2) for activations of ``dtype``: [cos, cos] (b, n, 1, r) and sin."""
    # Rounded only here. A bf16 angle of a thousand radians would be off by up to two, its cosine is off by 1/512.
    cos, sin = (phase.to(dtype) for phase in phases)
    return torch.cat([cos, cos], dim=-1), sin


def rope(x: Tensor, phases: Phases) -> Tensor:
    """Rotate the pairs (x_i, x_{i + r/2}) of the first r channels of x (b, n, h, k) by ``rope_phases`` of its dtype."""
    columns = x.transpose(0, 1).flatten(2)
    (rotated,) = split_heads(columns, [Heads(x.shape[2], x.shape[3], ("rotate",))], phases)
    return rotated.transpose(0, 1)

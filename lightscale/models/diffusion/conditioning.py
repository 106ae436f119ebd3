"""Timestep and class of an image as a vector, and what blocks make of it (DiT, arXiv 2212.09748, section 3.2).

c = W_2 silu(W_1 [cos(t f); sin(t f)] + b_1) + b_2 + y_class,    f_j = 10000^(-2 j / w),  j = 0 … w / 2 - 1
modulations of a block or of the output: W silu(c) + b, cut into vectors of d
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.config.model import ModelConfig
from lightscale.models.layers.context import SequenceContext
from lightscale.models.layers.shared_parts import StagePart
from lightscale.models.specs.diffusion import ConditioningSpec, diffusion_of
from lightscale.parallel.initialization import DrawWeights, normal, set_initializer, zeros
from lightscale.parallel.megatron import ProcessGroupCollection, TransformerConfig


def timestep_features(timesteps: Tensor, width: int) -> Tensor:
    """(b,) -> (b, width) fp64: cosines, then sines."""
    half = width // 2
    frequencies = torch.exp(-math.log(10_000) / half * torch.arange(half, device=timesteps.device, dtype=torch.float64))
    angles = timesteps.double()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class Conditioning(StagePart):
    """silu(c), (b, d), of each row's one image, for the blocks and the output layer of every stage."""

    spec = ConditioningSpec

    time_in: nn.Parameter
    time_in_bias: nn.Parameter
    time_out: nn.Parameter
    time_out_bias: nn.Parameter
    labels: nn.Parameter

    def __init__(
        self, config: TransformerConfig, model: ModelConfig, groups: ProcessGroupCollection, *, stage: int
    ) -> None:
        super().__init__(config, model, groups, stage=stage)
        self.width = diffusion_of(model).timestep_width

    @staticmethod
    def initial_values(model: ModelConfig) -> dict[str, DrawWeights]:
        """N(0, 0.02), as DiT has them; biases begin at 0."""
        draw = normal(0.02)
        return {"time_in": draw, "time_in_bias": zeros, "time_out": draw, "time_out_bias": zeros, "labels": draw}

    def forward(self, context: SequenceContext) -> Tensor:
        """See the class; the context has ``conditions``."""
        assert context.conditions is not None, "images to be drawn come with timestep and class"
        timesteps, classes = context.conditions.long().unbind(dim=1)
        features = timestep_features(timesteps, self.width).to(self.time_in.dtype)
        of_time = F.linear(F.silu(F.linear(features, self.time_in, self.time_in_bias)), self.time_out)
        return F.silu(of_time + self.time_out_bias + F.embedding(classes, self.labels))


class Modulation(nn.Module):
    """``number`` vectors of d from silu(c): adaLN-Zero, which begins at 0. Every tensor rank holds it whole."""

    def __init__(self, config: TransformerConfig, width: int, number: int) -> None:
        super().__init__()
        self.number = number
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(number * width, width, dtype=config.params_dtype, device=device))
        self.bias = nn.Parameter(torch.empty(number * width, dtype=config.params_dtype, device=device))
        for parameter in (self.weight, self.bias):
            # Tensor ranks modulate other tokens each: the engine sums the gradient over them.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            set_initializer(parameter, zeros)

    def forward(self, context: SequenceContext) -> tuple[Tensor, ...]:
        """``number`` of (b, d)."""
        conditioning = context.shared[ConditioningSpec.name]
        return F.linear(conditioning, self.weight, self.bias).chunk(self.number, dim=-1)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x (n, b, d) -> x (1 + scale) + shift, (b, d) each."""
    return x * (1 + scale) + shift

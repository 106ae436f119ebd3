"""Timestep and class of an image as a vector, and what blocks make of it (DiT, arXiv 2212.09748, section 3.2)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConditionEmbedding(nn.Module):
    """silu(W_2 silu(W_1 [cos(t f); sin(t f)] + b_1) + b_2 + y), f_j = 10000^(-2 j / w), y the vector of the class.

    Args:
        hidden_size: d.
        timestep_width: w, of the sines and cosines; even.
        num_labels: of classes; the number behind theirs stands for no class.
    """

    def __init__(self, hidden_size: int, timestep_width: int, num_labels: int) -> None:
        super().__init__()
        self.timestep_width = timestep_width
        self.time_in = nn.Linear(timestep_width, hidden_size)
        self.time_out = nn.Linear(hidden_size, hidden_size)
        self.labels = nn.Embedding(num_labels + 1, hidden_size)

    def forward(self, timesteps: Tensor, classes: Tensor) -> Tensor:
        """Timesteps and classes (b,) int64 -> (b, d)"""
        half = self.timestep_width // 2
        steps = torch.arange(half, device=timesteps.device, dtype=torch.float64)
        angles = timesteps.double()[:, None] * torch.exp(-math.log(10_000) / half * steps)
        features = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.time_in.weight.dtype)
        return F.silu(self.time_out(F.silu(self.time_in(features))) + self.labels(classes))


class ModulationMap(nn.Linear):
    """``number`` vectors of d from the conditioning: shifts, scales and gates (adaLN-Zero)."""

    def __init__(self, hidden_size: int, number: int) -> None:
        super().__init__(hidden_size, number * hidden_size)
        self.number = number

    def vectors(self, conditioning: Tensor) -> tuple[Tensor, ...]:
        """conditioning: (b, d) -> ``number`` of (b, 1, d), for all tokens of an image."""
        return self(conditioning)[:, None].chunk(self.number, dim=-1)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x (b, n, d) -> x (1 + scale) + shift"""
    return x * (1 + scale) + shift

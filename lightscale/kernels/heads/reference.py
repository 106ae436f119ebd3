"""Heads out of a projection's columns, written out; differentiated by autograd."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightscale.kernels.common.angles import Phases

if TYPE_CHECKING:
    from lightscale.kernels.heads.layout import HeadsPart


def rotate(x: Tensor, phases: Phases) -> Tensor:
    """The pairs (x_i, x_{i + r/2}) of the first r channels of x (n, b, h, k), turned by phases of r and r / 2."""
    cos, sin = (phase.transpose(0, 1) for phase in phases)
    half = sin.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos = cos[..., :half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def heads_reference(x: Tensor, parts: Sequence["HeadsPart"], phases: Phases | None) -> list[Tensor]:
    """Each part (n, b, heads, width) of x (n, b, columns)."""
    found = []
    for part in parts:
        columns = torch.arange(part.heads)[:, None] * part.stride + torch.arange(part.width) + part.start
        taken = x[..., columns.to(x.device)]
        if part.activation == "silu":
            taken = taken * torch.sigmoid(taken)
        elif part.activation == "rotate":
            assert phases is not None
            taken = rotate(taken, phases)
        found.append(taken)
    return found

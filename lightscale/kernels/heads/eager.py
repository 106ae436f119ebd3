"""Heads of a projection in PyTorch's own operators, with their backward pass by hand."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.kernels.common.angles import Phases
from lightscale.kernels.heads.layout import HeadsPart


@torch.no_grad()
def heads_fwd(x: Tensor, parts: Sequence[HeadsPart], phases: Phases | None) -> list[Tensor]:
    """The parts (n, b, heads, width) of x (n, b, columns) that have an activation."""
    found = []
    for part in parts:
        if part.activation == "silu":
            found.append(F.silu(part.of(x)))
        elif part.activation == "copy":
            found.append(part.of(x).clone(memory_format=torch.contiguous_format))
        elif part.activation == "rotate":
            assert phases is not None
            found.append(_rotated(part.of(x), phases, 1))
    return found


@torch.no_grad()
def heads_bwd(
    x: Tensor, parts: Sequence[HeadsPart], phases: Phases | None, gradients: Sequence[Tensor | None]
) -> Tensor:
    """The gradient (n, b, columns) of x, from those of all parts; None: 0."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for part, gradient in zip(parts, gradients, strict=True):
        into = part.of(dx)
        if gradient is None:
            into.zero_()
        elif part.activation == "silu":
            into.copy_(torch.ops.aten.silu_backward(gradient, part.of(x)))
        elif part.activation == "rotate":
            assert phases is not None
            into.copy_(_rotated(gradient, phases, -1))
        else:
            into.copy_(gradient)
    return dx


def _rotated(x: Tensor, phases: Phases, direction: int) -> Tensor:
    return rotated(x.transpose(0, 1), phases, direction).transpose(0, 1)


def rotated(x: Tensor, phases: Phases, direction: int) -> Tensor:
    """x (b, n, h, k), turned by the phases' angles times ``direction``, 1 or -1: three passes over x."""
    cos, sin = phases
    made = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = cos.size(-1)
    if width < x.size(-1):
        made[..., width:] = x[..., width:]
    x, into = x[..., :width], made[..., :width]
    torch.mul(x, cos, out=into)
    (first, second), (of_first, of_second) = x.chunk(2, dim=-1), into.chunk(2, dim=-1)
    of_first.addcmul_(second, sin, value=-direction)
    of_second.addcmul_(first, sin, value=direction)
    return made

"""Heads of a projection in PyTorch's own operators, with their backward pass by hand."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightscale.kernels.common.angles import Phases
from lightscale.kernels.glu.activations import activate
from lightscale.kernels.heads.layout import HeadsPart


@torch.no_grad()
def heads_fwd(x: Tensor, parts: Sequence[HeadsPart], phases: Phases | None) -> list[Tensor]:
    """The parts (n, b, heads, width) of x (n, b, columns) that have an activation."""
    found = []
    for part in parts:
        if part.activation == "silu":
            found.append(activate(part.of(x), "silu"))
        elif part.activation == "copy":
            found.append(part.of(x).clone(memory_format=torch.contiguous_format))
        elif part.activation == "rotate":
            assert phases is not None
            heads = part.of(x).transpose(0, 1)
            made = torch.empty_like(heads, memory_format=torch.contiguous_format)
            found.append(rotate_into(made, heads, phases, 1).transpose(0, 1))
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
            torch.ops.aten.silu_backward(gradient, part.of(x), grad_input=into)
        elif part.activation == "rotate":
            assert phases is not None
            rotate_into(into.transpose(0, 1), gradient.transpose(0, 1), phases, -1)
        else:
            into.copy_(gradient)
    return dx


def rotate_into(made: Tensor, x: Tensor, phases: Phases, direction: int) -> Tensor:
    """Write x (b, n, h, k), turned by the phases' angles times ``direction``, 1 or -1, to ``made``, in three passes."""
    cos, sin = phases
    width = cos.size(-1)
    if width < x.size(-1):
        made[..., width:] = x[..., width:]
    x, into = x[..., :width], made[..., :width]
    torch.mul(x, cos, out=into)
    (first, second), (of_first, of_second) = x.chunk(2, dim=-1), into.chunk(2, dim=-1)
    of_first.addcmul_(second, sin, value=-direction)
    of_second.addcmul_(first, sin, value=direction)
    return made

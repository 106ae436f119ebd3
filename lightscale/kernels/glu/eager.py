"""The gated linear unit in PyTorch's own operators, with its backward by hand."""

import torch
from torch import Tensor

from lightscale.kernels.common.states import state_dtype
from lightscale.kernels.glu.activations import activate, activate_bwd


@torch.no_grad()
def glu_fwd(x: Tensor, activation: str) -> Tensor:
    """activation(gate) ⊙ up (..., F) of x (..., 2 F) = [gate; up], rounded once to x's dtype."""
    gate, up = x.to(state_dtype(x.dtype)).chunk(2, dim=-1)
    return (activate(gate, activation) * up).to(x.dtype)


@torch.no_grad()
def glu_bwd(x: Tensor, dout: Tensor, activation: str) -> Tensor:
    """The gradient (..., 2 F) of x from the cotangent ``dout`` (..., F); both halves are written in place."""
    wide = state_dtype(x.dtype)
    gate, up = x.to(wide).chunk(2, dim=-1)
    dout = dout.to(wide)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dgate, dup = dx.chunk(2, dim=-1)
    if activation == "none":
        torch.mul(dout, up, out=dgate)
        torch.mul(dout, gate, out=dup)
        return dx
    value, gradient = activate_bwd(gate, dout * up, activation)
    dgate.copy_(gradient)
    torch.mul(dout, value, out=dup)
    return dx

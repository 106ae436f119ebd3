"""The gated linear unit in PyTorch's own operators, with its backward by hand."""

import torch
from torch import Tensor

from lightscale.kernels.common.states import state_dtype
from lightscale.kernels.glu.activations import activate, activate_bwd_


@torch.no_grad()
def glu_fwd(x: Tensor, activation: str) -> Tensor:
    """activation(gate) ⊙ up (..., F) of x (..., 2 F) = [gate; up], rounded once to x's dtype."""
    gate, up = x.to(state_dtype(x.dtype)).chunk(2, dim=-1)
    out = gate * up if activation == "none" else activate(gate, activation).mul_(up)
    return out.to(x.dtype)


@torch.no_grad()
def glu_bwd(x: Tensor, dout: Tensor, activation: str) -> Tensor:
    """The gradient (..., 2 F) of x from the cotangent ``dout`` (..., F); all is computed in its two halves."""
    wide = x.to(state_dtype(x.dtype))
    gate, up = wide.chunk(2, dim=-1)
    dout = dout.to(wide.dtype)
    dx = torch.empty_like(wide, memory_format=torch.contiguous_format)
    dgate, dup = dx.chunk(2, dim=-1)
    torch.mul(dout, up, out=dgate)
    if activation == "none":
        torch.mul(dout, gate, out=dup)
    else:
        value = activate(gate, activation, out=dup)
        activate_bwd_(gate, value, dgate, activation)
        dup.mul_(dout)
    return dx.to(x.dtype)

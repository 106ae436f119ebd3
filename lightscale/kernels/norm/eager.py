"""The norm in PyTorch's own operators, with its backward by hand.

With r = 1 / sqrt(mean(x²) + eps), h = r x and a = activation(gate), y = h ⊙ weight ⊙ a. A caller whose channels are
split over ranks passes the sums over all channels; else these functions sum.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightscale.kernels.common.states import state_dtype
from lightscale.kernels.glu.activations import activate, activate_bwd_

WIDEST = 4096
"""Channels that a Triton program holds without spilling registers."""


class NormInputs(NamedTuple):
    """The input of the norm, and its factors."""

    x: Tensor  # (..., D)
    weight: Tensor | None  # (D,)
    gate: Tensor | None  # (..., D)
    gate_activation: str


class NormGradients(NamedTuple):
    """Gradients of x, weight and gate in their dtypes; None for an absent input."""

    x: Tensor
    weight: Tensor | None
    gate: Tensor | None


@torch.no_grad()
def square_sums(x: Tensor) -> Tensor:
    """Σ x² (...,) over the last dimension of x (..., D), in the dtype of the arithmetic."""
    return x.to(state_dtype(x.dtype)).square().sum(dim=-1)


@torch.no_grad()
def norm_fwd(inputs: NormInputs, width: int, eps: float, sums: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The output (..., D) in x's dtype, and r (...,).

    Args:
        inputs: x and its factors.
        width: channels of the mean; D unless ranks split the channels.
        eps: added to the mean square.
        sums: Σ x² (...,) over all ``width`` channels; None to sum those of x.
    """
    x, weight, gate, gate_activation = inputs
    wide = x.to(state_dtype(x.dtype))
    if sums is None:
        sums = wide.square().sum(dim=-1)
    rstd = torch.rsqrt(sums / width + eps)
    y = wide * rstd.unsqueeze(-1)
    if weight is not None:
        y *= weight
    if gate is not None:
        y *= activate(gate.to(wide.dtype), gate_activation)
    return y.to(x.dtype).contiguous(), rstd


@torch.no_grad()
def cotangent_sums(inputs: NormInputs, rstd: Tensor, dy: Tensor) -> Tensor:
    """Σ c ⊙ h (...,) over the last dimension, c = dy ⊙ weight ⊙ a the cotangent of h."""
    h = inputs.x.to(rstd.dtype) * rstd.unsqueeze(-1)
    return (_cotangent(inputs, dy.to(rstd.dtype)) * h).sum(dim=-1)


@torch.no_grad()
def norm_bwd(inputs: NormInputs, rstd: Tensor, dy: Tensor, width: int, sums: Tensor | None = None) -> NormGradients:
    """Every gradient from the cotangent dy (..., D) of the output.

    Args:
        inputs: those of ``norm_fwd``.
        rstd: r (...,) of ``norm_fwd``.
        dy: (..., D).
        width: channels of the mean.
        sums: Σ c ⊙ h (...,) over all ``width`` channels; None to sum those of x.
    """
    x, weight, gate, gate_activation = inputs
    dy = dy.to(rstd.dtype)
    h = x.to(rstd.dtype) * rstd.unsqueeze(-1)
    dgate = dweight = None
    if gate is not None:
        dvalue = dy * h if weight is None else (dy * h).mul_(weight)
        wide_gate = gate.to(rstd.dtype)
        value = activate(wide_gate, gate_activation)
        dgate = activate_bwd_(wide_gate, value, dvalue, gate_activation).to(gate.dtype)
        dy = dy * value
    if weight is not None:
        dweight = (dy * h).reshape(-1, x.shape[-1]).sum(dim=0).to(weight.dtype)
        dy = dy * weight
    if sums is None:
        sums = (dy * h).sum(dim=-1)
    dx = torch.addcmul(dy, h, (sums / width).unsqueeze(-1), value=-1).mul_(rstd.unsqueeze(-1))
    return NormGradients(dx.to(x.dtype), dweight, dgate)


@torch.no_grad()
def sum_norm_fwd(x: Tensor, added: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of s = x + added (..., D), r (...,), and s in x's dtype; s is x itself where nothing is added."""
    total = x if added is None else x + added
    return *norm_fwd(NormInputs(total, weight, None, "none"), x.shape[-1], eps), total


@torch.no_grad()
def sum_norm_bwd(
    total: Tensor, weight: Tensor | None, rstd: Tensor, dy: Tensor, dtotal: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The gradients of s, which x and added share, and of the weight, from the cotangents of the norm and of s."""
    found = norm_bwd(NormInputs(total, weight, None, "none"), rstd, dy, total.shape[-1])
    return found.x if dtotal is None else found.x.add_(dtotal), found.weight


def _cotangent(inputs: NormInputs, dy: Tensor) -> Tensor:
    _, weight, gate, gate_activation = inputs
    if weight is not None:
        dy = dy * weight
    return dy if gate is None else dy * activate(gate.to(dy.dtype), gate_activation)

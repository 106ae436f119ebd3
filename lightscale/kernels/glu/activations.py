"""Activations of gates, with their derivatives, for norms with a gate and for gated linear units."""

import torch
from torch import Tensor

from lightscale.errors import UserError

ACTIVATIONS = ("none", "sigmoid", "silu", "gelu", "gelu_tanh")

_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}
"""PyTorch's names of the forms of GELU."""


def check_activation(name: str, activation: str) -> None:
    """Refuse an ``activation``, the value of argument ``name``, that is not in ACTIVATIONS."""
    if activation not in ACTIVATIONS:
        raise UserError(f"{name} must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")


def activate(x: Tensor, activation: str, out: Tensor | None = None) -> Tensor:
    """The activation of x: x itself, 1 / (1 + e^-x), x / (1 + e^-x), or GELU (arXiv 1606.08415), by erf or tanh.

    Args:
        x: any shape.
        activation: one of ``ACTIVATIONS``.
        out: receives the values; None for a new tensor, or x itself where nothing is computed.
    """
    if activation == "none":
        return x if out is None else out.copy_(x)
    # Contiguous: of half a projection PyTorch's own result is written more slowly.
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if activation in _APPROXIMATE:
        return torch.ops.aten.gelu(x, approximate=_APPROXIMATE[activation], out=out)
    return torch.sigmoid(x, out=out) if activation == "sigmoid" else torch.ops.aten.silu(x, out=out)


def activate_bwd_(x: Tensor, value: Tensor, dvalue: Tensor, activation: str) -> Tensor:
    """Overwrite the cotangent ``dvalue`` of ``value`` = activation(x) with the gradient of x."""
    # PyTorch's own backward passes: one pass over memory each.
    if activation == "sigmoid":
        torch.ops.aten.sigmoid_backward(dvalue, value, grad_input=dvalue)
    elif activation in _APPROXIMATE:
        torch.ops.aten.gelu_backward(dvalue, x, approximate=_APPROXIMATE[activation], grad_input=dvalue)
    elif activation == "silu":
        torch.ops.aten.silu_backward(dvalue, x, grad_input=dvalue)
    return dvalue

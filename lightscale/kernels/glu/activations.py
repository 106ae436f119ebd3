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


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation of x: x itself, 1 / (1 + e^-x), x / (1 + e^-x), or GELU (arXiv 1606.08415), by erf or tanh."""
    if activation == "none":
        return x
    if activation in _APPROXIMATE:
        return torch.nn.functional.gelu(x, approximate=_APPROXIMATE[activation])
    return torch.sigmoid(x) if activation == "sigmoid" else torch.nn.functional.silu(x)


def activate_bwd(x: Tensor, dvalue: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The activation of x (any shape), and dx from the activation's cotangent ``dvalue``, of x's dtype."""
    value = activate(x, activation)
    if activation == "none":
        return value, dvalue
    # PyTorch's own backward passes: one pass over memory each.
    if activation == "sigmoid":
        return value, torch.ops.aten.sigmoid_backward(dvalue, value)
    if activation in _APPROXIMATE:
        return value, torch.ops.aten.gelu_backward(dvalue, x, approximate=_APPROXIMATE[activation])
    return value, torch.ops.aten.silu_backward(dvalue, x)

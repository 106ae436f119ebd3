"""Activations of gates, with their derivatives: what norms with a gate and gated linear units share."""

import torch
from torch import Tensor

from lightscale.errors import UserError

ACTIVATIONS = ("none", "sigmoid", "silu")


def check_activation(name: str, activation: str) -> None:
    """Refuse an ``activation``, the value of argument ``name``, that is not in ACTIVATIONS."""
    if activation not in ACTIVATIONS:
        raise UserError(f"{name} must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation of x: x itself, 1 / (1 + e^-x), or x / (1 + e^-x)."""
    if activation == "none":
        return x
    s = torch.sigmoid(x)
    return s if activation == "sigmoid" else x * s


def activate_and_slope(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The activation of x and its derivative there."""
    if activation == "none":
        return x, torch.ones_like(x)
    s = torch.sigmoid(x)
    if activation == "sigmoid":
        return s, s * (1 - s)
    return x * s, s * (1 + x * (1 - s))

"""The activations of relation networks and their derivatives, in place where this saves memory."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.errors import UserError


class Activation(NamedTuple):
    """ψ(s), for autograd; ψ(s) in the memory of s; and ψ'(s), in new memory."""

    plain: Callable[[Tensor], Tensor]
    in_place: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _silu_slope(s: Tensor) -> Tensor:
    gate = torch.sigmoid(s)
    return gate * (1 + s * (1 - gate))


ACTIVATIONS = {
    "exp": Activation(torch.exp, torch.exp_, torch.exp),
    "relu": Activation(torch.relu, torch.relu_, lambda s: (s > 0).to(s.dtype)),
    "elu": Activation(F.elu, lambda s: F.elu(s, inplace=True), lambda s: s.clamp(max=0).exp_()),
    "silu": Activation(F.silu, lambda s: F.silu(s, inplace=True), _silu_slope),
}


def activation_of(name: str) -> Activation:
    """Raise UserError for a name that is not in ``ACTIVATIONS``."""
    if name not in ACTIVATIONS:
        raise UserError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]

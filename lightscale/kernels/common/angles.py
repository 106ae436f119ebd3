"""Linearized relative positional encoding (LRPE): x becomes [x cos pθ, x sin pθ], twice as wide (arXiv 2307.09270).

Applied to queries and keys, LRPE makes their product depend on cos((p - p') θ). Operators take the angles θ and the
positions p beside x. They apply both where they read x, so no tensor of twice x's width is written to memory.

Tokens of a grid have a coordinate per axis (MD-LRPE, arXiv 2405.21022, equation 14). Scores are sums over channels, so
the channels of each axis are a group of heads of their own; ``by_axis`` makes these groups, ``over_axes`` adds them up.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels.common.checks import check_device
from lightscale.kernels.common.once import once
from lightscale.kernels.common.states import state_dtype


class Angles(NamedTuple):
    """The angle of each token and channel is its product positions · theta."""

    theta: Tensor
    """(H, K) fp32 or fp64: the angle per token of each head and channel; (A, H / A, K): per step along an axis."""
    positions: Tensor
    """(B, T) int64: tokens since the document's start; (B, T, A): coordinates along the axes of the groups of heads."""

    def of(self, tokens: slice) -> "Angles":
        """The angles of ``tokens`` of each row."""
        return Angles(self.theta, self.positions[:, tokens])


def angles_of(theta: Tensor | None, positions: Tensor | None) -> Angles | None:
    """The angles of theta (H, K) and positions (B, T), or None: autograd and torch's operators take single tensors."""
    return None if theta is None or positions is None else Angles(theta, positions)


def parts_of(angles: Angles | None) -> tuple[Tensor | None, Tensor | None]:
    """The inverse of ``angles_of``."""
    return (None, None) if angles is None else (angles.theta, angles.positions)


def wide_angles(angles: Angles | None, q: Tensor) -> Angles | None:
    """``angles`` with theta in the dtype of the states of q (B, T, H, K)."""
    return None if angles is None else Angles(angles.theta.to(state_dtype(q.dtype)), angles.positions)


def axes_of(angles: Angles | None) -> int:
    """Groups of heads that have positions of their own."""
    return 1 if angles is None or angles.theta.dim() == 2 else angles.theta.shape[0]


def axis_angles(theta: Tensor, positions: Tensor) -> Angles:
    """The angles of heads (h, k), whose channels have positions (B, T), or by ``by_axis`` coordinates (B, T, A)."""
    if positions.dim() == 2:
        return Angles(theta, positions)
    return Angles(theta.unflatten(-1, (positions.shape[-1], -1)).movedim(-2, 0), positions)


def by_axis(x: Tensor, axes: int) -> Tensor:
    """(…, h, k) -> (…, A h, k / A): the a-th of A equal groups of each head's channels is a head of the a-th group."""
    return x if axes == 1 else x.unflatten(-1, (axes, -1)).transpose(-3, -2).flatten(-3, -2)


def for_axes(x: Tensor, axes: int, dim: int = -2) -> Tensor:
    """``x`` with its heads, dim ``dim``, once for each group: values, and decays of heads."""
    return x if axes == 1 else torch.cat([x] * axes, dim=dim)


def over_axes(o: Tensor, axes: int) -> Tensor:
    """Outputs (…, A h, v) -> (…, h, v), the sum over the axes."""
    return o if axes == 1 else o.unflatten(-2, (axes, -1)).sum(-3)


Phases = tuple[Tensor, Tensor]
"""cos and sin of angles, (B, T, H, K) each."""


def check_angles(angles: Angles | None, q: Tensor) -> None:
    """Refuse angles that do not fit q (B, T, H, K)."""
    if angles is None:
        return
    theta, positions = angles
    fits = theta.dim() in (2, 3) and theta.flatten(0, -2).shape == q.shape[2:]
    if not fits or theta.dtype not in (torch.float32, torch.float64):
        raise UserError(
            f"angles.theta must be (H, K) = {tuple(q.shape[2:])} in fp32 or fp64, "
            f"got shape {tuple(theta.shape)}, {theta.dtype}; of axes it is (A, H / A, K)"
        )
    form, expected = ("(B, T)", ()) if theta.dim() == 2 else ("(B, T, A)", (theta.shape[0],))
    if positions.shape != (*q.shape[:2], *expected) or positions.dtype != torch.int64:
        raise UserError(
            f"angles.positions must be {form} = {(*q.shape[:2], *expected)} in int64, "
            f"got shape {tuple(positions.shape)}, {positions.dtype}"
        )
    check_device("angles.theta", theta, q)
    check_device("angles.positions", positions, q)


def phases_of(angles: Angles, dtype: torch.dtype) -> Phases:
    """cos and sin of each angle, (tokens, H, K), in ``dtype``; differentiable in theta.

    fp64 removes whole turns: in fp32 the product is off by 0.03 rad at one million tokens.
    """
    theta, positions = angles
    # Tokens have any number of dims; those of theta tell whether axes follow them.
    tokens = positions.dim() + 2 - theta.dim()
    cos, sin = phases_at(positions[..., None, None], theta, dtype)
    return cos.flatten(tokens, -2), sin.flatten(tokens, -2)


def phases_at(positions: Tensor, theta: Tensor, dtype: torch.dtype) -> Phases:
    """``phases_of`` for positions and theta whose product broadcasts to the shape of the phases."""
    if dtype == torch.float64:
        angle = positions.double() * theta.double()
    else:
        turns = positions.double() * (theta.double() / (2 * math.pi))
        angle = (turns - turns.detach().round()).to(dtype) * (2 * math.pi)
    return angle.cos(), angle.sin()


def turns_of(theta: Tensor) -> Tensor:
    """theta in 2^-64 of a turn, int64, contiguous: the overflow of its product with a position drops turns.

    Computed once of angles that are not learned.
    """
    return once(theta, "turns", lambda: _turns_of(theta))


def _turns_of(theta: Tensor) -> Tensor:
    turns = theta.detach().double() / (2 * math.pi)
    return ((turns - turns.round()) * 2.0**64).long().contiguous()


def features(x: Tensor, phases: Phases | None) -> Tensor:
    """[x cos, x sin] (…, 2K) of x (…, K); x itself without phases."""
    if phases is None:
        return x
    cos, sin = phases
    return torch.cat([x * cos, x * sin], dim=-1)


def features_bwd(x: Tensor, dfeatures: Tensor, angles: Angles, phases: Phases) -> tuple[Tensor, Tensor]:
    """The gradients of x (…, T, H, K) and of theta, fp64, from those (…, T, H, 2K) of the features."""
    cos, sin = phases
    of_cos, of_sin = dfeatures.chunk(2, dim=-1)
    return of_cos * cos + of_sin * sin, theta_gradient(angles, x * (of_sin * cos - of_cos * sin))


def theta_gradient(angles: Angles, of_angles: Tensor) -> Tensor:
    """The gradient of theta, fp64, from those (…, T, H, K) of the angles, which are products with theta."""
    theta, positions = angles
    if theta.dim() == 3:
        groups = of_angles.unflatten(-2, theta.shape[:2]).unbind(-3)
        each = zip(theta.unbind(0), positions.unbind(-1), groups, strict=True)
        return torch.stack([theta_gradient(Angles(*along), of_group) for *along, of_group in each])
    return torch.einsum("t,thk->hk", positions.flatten().double(), of_angles.flatten(0, -3).double())


def feature_width(x: Tensor, angles: Angles | None) -> int:
    """The width of the features of x (…, K): K, or 2K with angles."""
    return x.shape[-1] * (1 if angles is None else 2)

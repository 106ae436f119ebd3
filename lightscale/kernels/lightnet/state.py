"""The state of LightNet's operator, a log-sum-exp pair, and its algebra: merged states, and the share of each.

A state is the average of the writes, weighted by the exponentials of the keys; z is the log of the weights' sum: z =
log Σ_i e^{k_i} per channel, S = Σ_i e^{k_i - z} φ_i v_iᵀ. Names of shapes: B rows, H heads, K key width, V value width,
R rows of S: K, or 2K when LRPE doubles them (both halves share z).
"""

from typing import NamedTuple

import torch
from torch import Tensor


class LightNetState(NamedTuple):
    """z (B, H, K) and S (B, H, R, V), fp32 (fp64 for fp64 inputs); z is -inf before the first write."""

    z: Tensor
    S: Tensor


class StateCotangent(NamedTuple):
    """The cotangent of a state in the form that ranks exchange: U (B, H, R, V) and R (B, H, K).

    U is the cotangent of S. R = Σ_V (S ⊙ U) - dz, summed over both halves of S, is minus the cotangent of z with a
    fixed sum e^z S instead of a fixed average S. The way back through a document scales both.
    """

    U: Tensor
    R: Tensor


def empty_state(
    num_rows: int,
    num_heads: int,
    key_width: int,
    state_rows: int,
    value_width: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> LightNetState:
    """The state before a document's first token, the identity of ``merge``."""
    return LightNetState(
        z=torch.full((num_rows, num_heads, key_width), -torch.inf, dtype=dtype, device=device),
        S=torch.zeros(num_rows, num_heads, state_rows, value_width, dtype=dtype, device=device),
    )


def by_row(weights: Tensor, state_rows: int) -> Tensor:
    """Weights (..., K) of channels as (..., R, 1), to scale the rows of a state."""
    if weights.shape[-1] != state_rows:
        weights = torch.cat([weights, weights], dim=-1)
    return weights.unsqueeze(-1)


def by_channel(rows: Tensor, key_width: int) -> Tensor:
    """Sums (..., R) over the rows of a state as (..., K): both halves of LRPE share a channel."""
    return rows if rows.shape[-1] == key_width else rows.unflatten(-1, (2, key_width)).sum(-2)


def _shares(z_1: Tensor, z_2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """e^{z_1 - z}, e^{z_2 - z} and z = logaddexp(z_1, z_2); zeros and -inf where both are -inf, gradients too."""
    reference = torch.maximum(z_1, z_2).detach()
    reference = reference.masked_fill(reference == -torch.inf, 0.0)
    e_1, e_2 = (z_1 - reference).exp(), (z_2 - reference).exp()
    total = e_1 + e_2
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    return e_1 / total, e_2 / total, (reference + total.log()).masked_fill(empty, -torch.inf)


def merge(earlier: LightNetState, later: LightNetState, through: Tensor | None = None) -> LightNetState:
    """The state after two neighbouring runs of tokens, from the state of each run alone.

    Associative, with ``empty_state`` as its identity, and differentiable.

    Args:
        earlier: the state of all tokens before.
        later: the state of the tokens behind them, from an empty state.
        through: (B,), 0 for the rows in which a document begins in the later run: the earlier state ends there. None:
            no such row.
    """
    z = earlier.z if through is None else earlier.z.masked_fill((through == 0)[:, None, None], -torch.inf)
    weight_1, weight_2, merged = _shares(z, later.z)
    rows = later.S.shape[2]
    # Selected, not multiplied by 0: a state of weight 0 may hold any value.
    S_1 = earlier.S.masked_fill(by_row(z == -torch.inf, rows), 0.0)
    S_2 = later.S.masked_fill(by_row(later.z == -torch.inf, rows), 0.0)
    return LightNetState(merged, by_row(weight_1, rows) * S_1 + by_row(weight_2, rows) * S_2)


def passed_share(z_earlier: Tensor, z_later: Tensor, through: Tensor | None = None) -> Tensor:
    """The share of the earlier state in the result of ``merge``, e^{z_1 - z} (B, H, K), from the z of its arguments.

    Backward, this share times the cotangent (U, R) of the result is the earlier state's. A rank that folds backward
    adds its own (U, R) of ``state_bwd``.
    """
    z = z_earlier if through is None else z_earlier.masked_fill((through == 0)[:, None, None], -torch.inf)
    return _shares(z, z_later)[0]


def exchanged_cotangent(state: LightNetState, dz: Tensor, dS: Tensor) -> StateCotangent:
    """The exchanged form (U, R), from the plain cotangents dz (B, H, K) and dS (B, H, R, V) of a state."""
    return StateCotangent(U=dS, R=_overlap(state, dS) - dz)


def plain_cotangent(state: LightNetState, cotangent: StateCotangent) -> tuple[Tensor, Tensor]:
    """dz and dS of a state, zero where it is empty; the inverse of ``exchanged_cotangent``."""
    empty = state.z == -torch.inf
    dz = (_overlap(state, cotangent.U) - cotangent.R).masked_fill(empty, 0.0)
    return dz, cotangent.U.masked_fill(by_row(empty, state.S.shape[2]), 0.0)


def _overlap(state: LightNetState, dS: Tensor) -> Tensor:
    """Σ_V S ⊙ dS per channel (B, H, K)."""
    return by_channel((state.S * dS).sum(-1), state.z.shape[2])

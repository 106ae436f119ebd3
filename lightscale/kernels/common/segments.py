"""Fold of states that only decay over neighbouring segments of a row, for ranks that exchange summaries."""

from importlib import import_module

import torch
from torch import Tensor

from lightscale.kernels.common.backends import launches_triton

# Imported at the first use: Triton is optional, and chooses between compiler and interpreter at its import.
_TRITON = "lightscale.kernels.common.triton.segments"


def decayed(decay: Tensor, state: Tensor) -> Tensor:
    """decay ⊙ state, and 0 where the decay is 0: 0 · ∞ is NaN, and an overflow in one document would reach the next."""
    return torch.where(decay == 0, 0.0, decay * state)


@torch.no_grad()
def fold(x: Tensor, decays: Tensor, state: Tensor | None = None, *, reverse: bool = False) -> Tensor:
    """The state behind N segments, each of which makes decays[n] ⊙ S + x[n] of a state S.

    Args:
        x: (N, …), fp32 or fp64.
        decays: (N, …), broadcast to x.
        state: the state that enters the first segment; zero when None.
        reverse: fold from the last segment to the first.
    """
    if launches_triton(x):
        found: Tensor = import_module(_TRITON).fold(x, decays, state, reverse=reverse)
        return found
    state = torch.zeros_like(x[:0].sum(0)) if state is None else state
    for number in reversed(range(x.size(0))) if reverse else range(x.size(0)):
        state = x[number] + decayed(decays[number], state)
    return state

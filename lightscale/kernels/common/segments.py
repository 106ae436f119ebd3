"""States that only decay, folded over neighbouring segments of a row: what ranks that pass states do with summaries."""

from importlib import import_module

import torch
from torch import Tensor

from lightscale.kernels.common.backends import launches_triton

# Imported when it is first used: Triton is optional, and decides then whether it interprets.
_TRITON = "lightscale.kernels.common.triton.segments"


def decayed(decay: Tensor, state: Tensor) -> Tensor:
    """decay ⊙ state, and 0 where the decay is: 0 · ∞ is NaN, and an overflow in one document would reach the next."""
    return torch.where(decay == 0, 0.0, decay * state)


@torch.no_grad()
def fold(x: Tensor, decays: Tensor, state: Tensor | None = None, *, reverse: bool = False) -> Tensor:
    """The state behind all of some segments, each of which makes decays[n] ⊙ S + x[n] of a state S.

    Args:
        x: (N, …), fp32 or fp64.
        decays: (N, …), broadcast to x.
        state: what enters the first segment; zero when None.
        reverse: from the last segment to the first.
    """
    if launches_triton(x):
        found: Tensor = import_module(_TRITON).fold(x, decays, state, reverse=reverse)
        return found
    state = torch.zeros_like(x[:0].sum(0)) if state is None else state
    for number in reversed(range(x.size(0))) if reverse else range(x.size(0)):
        state = x[number] + decayed(decays[number], state)
    return state

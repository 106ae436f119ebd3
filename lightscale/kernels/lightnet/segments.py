"""Fold of LightNet's states over neighbouring segments of a row, for ranks that exchange summaries."""

from importlib import import_module

import torch
from torch import Tensor

from lightscale.kernels.common.backends import launches_triton
from lightscale.kernels.lightnet.state import LightNetState, empty_state, merge, passed_share

# Imported at the first use: Triton is optional, and chooses between compiler and interpreter at its import.
_TRITON = "lightscale.kernels.lightnet.triton.segments"


@torch.no_grad()
def fold(
    segments: LightNetState, through: Tensor, state: LightNetState | None = None, *, end: int
) -> tuple[LightNetState, Tensor]:
    """The state behind the first ``end`` of N segments, and the share of its entering state that each segment leaves.

    Args:
        segments: z (N, B, H, K) and S (N, B, H, R, V) of each segment alone.
        through: (N, B), 0 where a document begins in the segment.
        state: the state that enters the first segment; empty when None.

    Returns:
        The state, and ``passed_share`` (N, B, H, K) of each segment.
    """
    if launches_triton(segments.S):
        by_triton: tuple[LightNetState, Tensor] = import_module(_TRITON).fold(segments, through, state, end=end)
        return by_triton
    if state is None:
        _, rows, heads, width = segments.z.shape
        sizes = segments.S.shape[3:]
        state = empty_state(rows, heads, width, *sizes, dtype=segments.S.dtype, device=segments.S.device)
    found, z, shares = state, state.z, []
    for number, (z_n, S_n, through_n) in enumerate(zip(*segments, through, strict=True)):
        shares.append(passed_share(z, z_n, through_n))
        after = merge(LightNetState(z, found.S), LightNetState(z_n, S_n), through_n)
        z, found = after.z, after if number < end else found
    return found, torch.stack(shares)

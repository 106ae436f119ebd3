"""Decays in LION's Triton kernels, from the sums of lightning attention's: through each token, or before it."""

import triton
import triton.language as tl

from lightscale.kernels.lightning.triton.decays import load_sums


@triton.jit
def load_tokens(of_chunk, T, i, mask, EXCLUSIVE: tl.constexpr):
    """Both parts of a chunk's sums through its tokens i, or when EXCLUSIVE before them; 0 outside."""
    if EXCLUSIVE:
        return load_sums(of_chunk, T, i - 1, mask & (i > 0))
    else:
        return load_sums(of_chunk, T, i, mask)


@triton.jit
def between(i, j, i_forward, i_forward_low, i_back, i_back_low, j_forward, j_forward_low, j_back, j_back_low):
    """The decay between tokens i, a column, and j, a row: by the forward sums for earlier j, else by the others."""
    forward = (i_forward[:, None] - j_forward[None, :]) + (i_forward_low[:, None] - j_forward_low[None, :])
    back = (j_back[None, :] - i_back[:, None]) + (j_back_low[None, :] - i_back_low[:, None])
    return tl.exp(tl.minimum(tl.where(i[:, None] >= j[None, :], forward, back), 0.0))


@triton.jit
def crossing(pairs, before, i, j, dtype: tl.constexpr, EXCLUSIVE: tl.constexpr, PRECISION: tl.constexpr):
    """Σ of the reads of tokens i across the gate of each token j: of all ``before`` these partners, and by ``pairs``.

    A pair (i, s) crosses the gate when s <= j < i, where forward sums are EXCLUSIVE, else when s < j <= i. Each pair is
    added once: no terms cancel.
    """
    if EXCLUSIVE:
        passed = (j[:, None] <= j[None, :]).to(dtype)
        crossed = j[None, :] < i[:, None]
    else:
        passed = (j[:, None] < j[None, :]).to(dtype)
        crossed = j[None, :] <= i[:, None]
    found = tl.zeros([i.shape[0], j.shape[0]], dtype=tl.float32) + before[:, None]
    found = tl.dot(pairs.to(dtype), passed, found, input_precision=PRECISION)
    return tl.sum(tl.where(crossed, found, 0.0), 0)

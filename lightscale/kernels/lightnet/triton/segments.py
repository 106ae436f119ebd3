"""Fold of LightNet's state over neighbouring segments of a row, in one launch for any number of segments."""

# Triton evaluates the hints of its kernels: their arguments cannot have any but tl.constexpr.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightscale.kernels.common.triton.kernels import exists
from lightscale.kernels.common.triton.launch import LAUNCH, on_device_of
from lightscale.kernels.lightnet.state import LightNetState
from lightscale.kernels.lightnet.triton.kernels import EMPTY, finite, share_of
from lightscale.kernels.lightnet.triton.tiling import fold_constants


@triton.jit
def _merged(top, mass, z, passes):
    """The sum of the weights ``mass`` e^top and e^z, as a new top and mass; and the scale of each part."""
    top = tl.where(passes, top, EMPTY)
    highest = tl.maximum(top, z)
    kept, added = share_of(top, finite(highest)), share_of(z, finite(highest))
    return highest, mass * kept + added, kept, added


@triton.jit
def _mean(mass):
    return tl.where(mass > 0.0, 1.0 / tl.maximum(mass, 1e-30), 0.0)


@triton.jit(do_not_specialize=["num_segments", "end"])
def fold_segments(
    z,  # (N, B, H, K) fp32, contiguous except the first dimension, as the next
    S,  # (N, B, H, R, V) fp32
    through,  # (N, B) fp32: 0 where a document begins
    z_in,  # (B, H, K) fp32, or None for an empty state
    S_in,  # (B, H, R, V) fp32, or None
    z_out,  # (B, H, K) fp32: of the state behind the first ``end`` segments
    S_out,  # (B, H, R, V) fp32
    shares,  # (N, B, H, K) fp32: the share of its entering state that each segment leaves
    H,
    num_row_heads,  # B H
    num_segments,
    end,
    stride_z,
    stride_S,
    stride_through,
    K: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Fold segment by segment; a program computes a tile of one half of a head's state.

    Sums of weights and weighted sums are relative to the largest z so far, as in ``fold_states``.
    """
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    program = tl.program_id(0).to(tl.int64)
    tile_v = program % V_TILES
    tile_k = program // V_TILES % K_TILES
    half = program // (V_TILES * K_TILES) % (R // K)
    row_head = program // (V_TILES * K_TILES * (R // K))
    cols_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    cols_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    has_k = exists(cols_k, K, BLOCK_K)
    in_tile = has_k[:, None] & exists(cols_v, V, BLOCK_V)[None, :]
    of_z = row_head * K + cols_k
    of_state = row_head * R * V + (half * K + cols_k)[:, None] * V + cols_v[None, :]
    of_row = through + row_head // H
    is_first = (tile_v == 0) & (half == 0)

    top = tl.full([BLOCK_K], EMPTY, tl.float32)
    state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    if z_in is not None:
        top = tl.load(z_in + of_z, mask=has_k, other=EMPTY)
        state = tl.load(S_in + of_state, mask=in_tile & (top > EMPTY)[:, None], other=0.0)
    mass = tl.where(top > EMPTY, 1.0, 0.0)
    for step in range(end):
        number = row_head * 0 + step
        z_n = tl.load(z + number * stride_z + of_z, mask=has_k, other=EMPTY)
        passes = tl.load(of_row + number * stride_through) != 0.0
        before = mass
        top, mass, kept, added = _merged(top, mass, z_n, passes)
        # Selected, and not loaded where their weight is 0: such states may hold any value.
        written = in_tile & (z_n > EMPTY)[:, None]
        own = tl.load(S + number * stride_S + of_state, mask=written, other=0.0)
        state = tl.where((kept > 0.0)[:, None], state * kept[:, None], 0.0) + own * added[:, None]
        if is_first:
            tl.store(shares + number * num_row_heads * K + of_z, before * kept * _mean(mass), mask=has_k)
    tl.store(S_out + of_state, state * _mean(mass)[:, None], mask=in_tile)
    if is_first:
        tl.store(z_out + of_z, top + tl.log(tl.maximum(mass, 1e-30)), mask=has_k)
        # Segments behind ``end``: only their shares.
        for step in range(end, num_segments):
            number = row_head * 0 + step
            z_n = tl.load(z + number * stride_z + of_z, mask=has_k, other=EMPTY)
            passes = tl.load(of_row + number * stride_through) != 0.0
            before = mass
            top, mass, kept, added = _merged(top, mass, z_n, passes)
            tl.store(shares + number * num_row_heads * K + of_z, before * kept * _mean(mass), mask=has_k)


def fold(
    segments: LightNetState, through: Tensor, state: LightNetState | None, *, end: int
) -> tuple[LightNetState, Tensor]:
    """See ``lightnet.segments.fold``; fp32."""
    z, S = (x if x[0].is_contiguous() else x.contiguous() for x in segments)
    num_segments, num_rows, num_heads, K = z.shape
    R, V = S.shape[3:]
    found = LightNetState(*(torch.empty(x.shape[1:], dtype=x.dtype, device=x.device) for x in (z, S)))
    shares = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    constants = fold_constants(K, R, V)
    tiles = triton.cdiv(K, constants["BLOCK_K"]) * triton.cdiv(V, constants["BLOCK_V"])
    with on_device_of(z):
        fold_segments[(num_rows * num_heads * (R // K) * tiles,)](
            z,
            S,
            through,
            *((None, None) if state is None else (x.contiguous() for x in state)),
            *found,
            shares,
            num_heads,
            num_rows * num_heads,
            num_segments,
            end,
            z.stride(0),
            S.stride(0),
            through.stride(0),
            **constants,
            **LAUNCH,
        )
    return found, shares

"""The Triton kernels of LightNet's operator: shared functions, and the kernel of one step.

``states.py`` and ``cotangents.py`` scan a row, ``queries.py`` and ``keys.py`` compute the tokens of a chunk.

A row is cut into chunks of CHUNK tokens, and these into tiles of BLOCK_T tokens. A split is some whole chunks that one
program scans in order. Names of shapes: B rows, T tokens, H heads, N chunks, S splits, K key width, V value width, R
rows of a state: K, or 2K with angles, whose halves share z. All exponents are differences of keys and z inside a chunk,
in fp32. docs/reference/operators/lightnet.md has the mathematics, the tiling and the counts.

``starts`` (B, T) int32 is the position in the row at which the token's document begins, -1 for the row's first one.
``edges`` (B, H, N, 3, K) fp32 has three numbers for each chunk and channel: its base (the largest key, or the entering
z), and z of the states that enter and leave the chunk, less the base. ``depths`` (B, T, H, K) fp32 is z of each token,
less the base. ``turns`` (H, K) int64 and ``positions`` (B, T) int64, both or neither, are the angles of LRPE: cos and
sin are computed where they are multiplied (``wave``).
"""

import triton
import triton.language as tl

from lightscale.kernels.common.triton.kernels import exists, step_program, tile_program

# Only e^(reference - z) can exceed 1. Up to e^60 times a query no product overflows, and terms that underflow are below
# e^-27 of any result. Tokens whose z lies deeper below the reference get a reference of their own.
RISE: tl.constexpr = tl.constexpr(60.0)
LEAST: tl.constexpr = tl.constexpr(8.7565e-27)
EMPTY: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def share_of(above, below):
    """e^(above - below), at most 1; 0 where above is -inf, for any below."""
    return tl.where(above > EMPTY, tl.exp(tl.minimum(above - below, 0.0)), 0.0)


@triton.jit
def finite(x):
    """x, or 0 where x is -inf: a reference that can be subtracted."""
    return tl.where(x > EMPTY, x, 0.0)


@triton.jit
def origin_of(reference):
    """A reference as a finite number: a reference of -inf has no tokens and becomes a number below all z."""
    return tl.where(reference > EMPTY, reference, -1e30)


@triton.jit
def reads(depth, at):
    """e^(at - z) of the tokens whose z lies at most RISE below ``at``, and not above ``at``; 0 for the others."""
    held = (depth >= at - RISE) & (depth <= at)
    return tl.where(held, tl.exp(tl.minimum(at - depth, RISE)), 0.0)


@triton.jit
def half_program(K: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Row and head (one number) of a program for a tile of one half of a head's state, and the place of the tile.

    The place is: channels and their mask, elements within the state and their mask, and whether the tile is the first
    of its channels. The first tile also computes results per channel.
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
    within = (half * K + cols_k)[:, None] * V + cols_v[None, :]
    return row_head, cols_k, has_k, within, in_tile, (tile_v == 0) & (half == 0)


@triton.jit
def token_program(T, H, num_token_tiles, COLUMN_TILES: tl.constexpr, BLOCK_T: tl.constexpr, CHUNK: tl.constexpr):
    """Row, head, numbers of the tiles of tokens and of columns, and the chunk of a program for a tile of tokens.

    The chunk is: its number, its first token, its length, and the positions of the tile's tokens in it.
    """
    row, head, tile_t, tile = tile_program(H, num_token_tiles, COLUMN_TILES)
    chunk = tile_t * BLOCK_T // CHUNK
    begin = chunk * CHUNK
    length = tl.minimum(CHUNK, T - begin).to(tl.int32)
    # Positions in the chunk are counted from its first token.
    first = (tile_t * BLOCK_T - begin).to(tl.int32)
    return row, head, tile_t, tile, chunk, begin, length, first


@triton.jit
def recurrent(
    q,  # (B, H, K), contiguous
    k,  # (B, H, K), contiguous
    v,  # (B, H, V), contiguous
    cos,  # (B, H, K), contiguous, or None
    sin,  # (B, H, K), contiguous, or None
    z_before,  # (B, H, K) fp32
    before,  # (B, H, R, V) fp32
    out,  # (B, H, V)
    z_after,  # (B, H, K) fp32
    after,  # (B, H, R, V) fp32
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One token: the state's mean includes φ vᵀ, weighted by e^k; a program computes some columns of a head's state."""
    R: tl.constexpr = K if cos is None else 2 * K
    row_head, tile, rows, cols, has_row, has_col = step_program(K, V, BLOCK_K, BLOCK_V)
    inside = has_row[:, None] & has_col[None, :]

    z = tl.load(z_before + row_head * K + rows, mask=has_row, other=EMPTY)
    key = tl.load(k + row_head * K + rows, mask=has_row, other=EMPTY).to(tl.float32)
    top = finite(tl.maximum(z, key))
    old, new = share_of(z, top), share_of(key, top)
    total = old + new
    share = tl.where(total > 0.0, 1.0 / tl.maximum(total, 1e-30), 0.0)
    z_next = tl.where(total > 0.0, top + tl.log(tl.maximum(total, 1e-30)), EMPTY)
    if tile == 0:
        tl.store(z_after + row_head * K + rows, z_next, mask=has_row)
    old *= share
    new *= share
    value = tl.load(v + row_head * V + cols, mask=has_col, other=0.0).to(tl.float32)
    query = tl.load(q + row_head * K + rows, mask=has_row, other=0.0).to(tl.float32)
    read = tl.zeros([BLOCK_V], dtype=tl.float32)
    for half in tl.static_range(R // K):
        phase = tl.full([BLOCK_K], 1.0, tl.float32)
        if cos is not None:
            if half == 0:
                phase = tl.load(cos + row_head * K + rows, mask=has_row, other=0.0)
            else:
                phase = tl.load(sin + row_head * K + rows, mask=has_row, other=0.0)
        at = row_head * R * V + (half * K + rows)[:, None] * V + cols[None, :]
        # An empty state may hold any value.
        state = tl.load(before + at, mask=inside & (z > EMPTY)[:, None], other=0.0)
        state = state * old[:, None] + (new * phase)[:, None] * value[None, :]
        tl.store(after + at, state, mask=inside)
        read += tl.sum((query * phase)[:, None] * state, 0)
    tl.store(out + row_head * V + cols, read.to(out.dtype.element_ty), mask=has_col)

"""The Triton kernel of LION's outputs and gradients, with independent programs for the tiles of tokens.

A row is cut into chunks of CHUNK tokens, and these into tiles of BLOCK_T tokens. Names of shapes: B rows, T tokens, H
heads, N chunks, S splits, W = V + 1 with the normaliser's column. x and y are the factors of a pair's score, y and z
the factors of states. All arithmetic is fp32; tensor cores take half-precision operands unconverted.
docs/reference/operators/lion.md has the mathematics, lightning.md the tiling.

``starts`` (B, T) int32 is the position in the row at which the token's document begins, -1 for the row's first one.
``sums`` (B or 1, H, 2, T) are the sums of log decays from each chunk's start, in two parts; see
``lightning/triton/decays.py``.
"""

import triton
import triton.language as tl

from lightscale.kernels.common.triton.kernels import exists, last_start, own_starts, tile_program
from lightscale.kernels.lightning.triton.decays import decay_between, load_sum
from lightscale.kernels.lightning.triton.kernels import pair_scores, read_state
from lightscale.kernels.lion.triton.decays import between, crossing, load_tokens


@triton.jit
def read_column(x_rows, x_first, column, inside, X: tl.constexpr, BLOCK_X: tl.constexpr):
    """x times a state's last column, for some rows whose first tile of columns is ``x_first``."""
    acc = tl.zeros([x_first.shape[0]], dtype=tl.float32)
    x_tile = x_first
    for tile in tl.static_range((X + BLOCK_X - 1) // BLOCK_X):
        cols = tile * BLOCK_X + tl.arange(0, BLOCK_X)
        has_x = exists(cols, X, BLOCK_X)
        if tile > 0:
            x_tile = tl.load(x_rows + cols[None, :], mask=inside & has_x[None, :], other=0.0)
        part = tl.load(column + cols, mask=has_x, other=0.0)
        acc += tl.sum(x_tile.to(tl.float32) * part[None, :], 1)
    return acc


# Not specialised on lengths: a batch of another length must not compile the kernel again.
@triton.jit(do_not_specialize=["T", "num_chunks", "num_token_tiles"])
def attend(
    x,  # (B, T, H, X): the tokens that the program computes
    y,  # (B, T, H, X): their partners
    z,  # (B, T, H, Z): their partners
    x_last,  # (B, T, H) fp32: one more column of x, whose partner in y is 1; or None
    y_last,  # (B, T, H) fp32: one more column of y, whose partner in x is 1; or None
    prefix,  # (B, H, N, X, Z), or (B, H, N, Z, X) when TRANSPOSED: the state that enters each chunk on the left
    suffix,  # on the right
    prefix_column,  # (B, H, N, Z) fp32 with x_last or y_last, (B, H, N, X) with normalizer, else None
    suffix_column,
    sums,
    starts,
    out,  # (B, T, H, Z), contiguous
    normalizer,  # (B, T, H) fp32: the divisor of `out`, written; or None
    own,  # (B, T, H, Z): the tensor whose gradient `out` is, or None
    crossing_parts,  # (B, token tiles, H, Z tiles, C) fp32: part of dlog_decay by pairs and the state from the left
    right_parts,  # (B, token tiles, H, Z tiles, BLOCK_T) fp32: each token's own · out by the state from the right
    T,
    H,
    num_chunks,
    num_token_tiles,
    eps,
    stride_sums,
    stride_xb,
    stride_xt,
    stride_xh,
    stride_yb,
    stride_yt,
    stride_yh,
    stride_zb,
    stride_zt,
    stride_zh,
    stride_ob,
    stride_ot,
    stride_oh,
    X: tl.constexpr,
    Z: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = (x yᵀ ⊙ M) z + weights x S of both sides, for a tile of tokens, over one full square of pairs.

    M_ij is the decay between i and j. With EXCLUSIVE it uses sums before the tokens from the left and through them from
    the right; else the other way round, which is the transpose. x, y, z = q, k, v give o; dY, v, k give dq; transposed,
    v, dY, q give dk, and k, q, dY give dv.
    """
    Z_TILES: tl.constexpr = (Z + BLOCK_Z - 1) // BLOCK_Z
    program = tl.program_id(0).to(tl.int64)
    row, head, tile_t, tile_z = tile_program(H, num_token_tiles, Z_TILES)

    chunk = tile_t * BLOCK_T // CHUNK
    begin = chunk * CHUNK
    length = tl.minimum(CHUNK, T - begin).to(tl.int32)
    # Positions in the chunk are counted from its first token.
    i = (tile_t * BLOCK_T - begin).to(tl.int32) + tl.arange(0, BLOCK_T)
    inside = (i < length)[:, None]
    cols_z = tile_z * BLOCK_Z + tl.arange(0, BLOCK_Z)
    has_z = exists(cols_z, Z, BLOCK_Z)
    cols_x = tl.arange(0, BLOCK_X)
    x_rows = x + row * stride_xb + head * stride_xh + (begin + i)[:, None] * stride_xt
    y_chunk = y + row * stride_yb + head * stride_yh + begin * stride_yt
    z_chunk = z + row * stride_zb + head * stride_zh + begin * stride_zt
    of_tokens = (row * T + begin) * H + head
    own_start = own_starts(starts, row * T, begin, i, length)
    if sums is not None:
        chunk_sums = sums + row * stride_sums + head * 2 * T + begin
        i_high, i_low = load_tokens(chunk_sums, T, i, i < length, EXCLUSIVE)
        i_back_high, i_back_low = load_tokens(chunk_sums, T, i, i < length, not EXCLUSIVE)
    if x_last is not None:
        own_last = tl.load(x_last + of_tokens + i.to(tl.int64) * H, mask=i < length, other=0.0)

    # The states' part comes first: its rows are weighted, and the pairs, added afterwards, are not.
    x_first = tl.load(x_rows + cols_x[None, :], mask=inside & exists(cols_x, X, BLOCK_X)[None, :], other=0.0)
    of_chunk = (row * H + head) * num_chunks + chunk
    stride_row: tl.constexpr = 1 if TRANSPOSED else Z
    columns = of_chunk * X * Z + cols_z[None, :] * (X if TRANSPOSED else 1)
    left = read_state(x_rows, x_first, prefix + columns, inside, has_z, stride_row, X, BLOCK_X, PRECISION)
    right = read_state(x_rows, x_first, suffix + columns, inside, has_z, stride_row, X, BLOCK_X, PRECISION)
    if x_last is not None or y_last is not None:
        left_column = tl.load(prefix_column + of_chunk * Z + cols_z, mask=has_z, other=0.0)[None, :]
        right_column = tl.load(suffix_column + of_chunk * Z + cols_z, mask=has_z, other=0.0)[None, :]
        if x_last is not None:
            left += own_last[:, None] * left_column
            right += own_last[:, None] * right_column
        else:
            left += left_column
            right += right_column
    below = tl.zeros([BLOCK_T], dtype=tl.float32)
    below_right = tl.zeros([BLOCK_T], dtype=tl.float32)
    if normalizer is not None:
        below = read_column(x_rows, x_first, prefix_column + of_chunk * X, inside, X, BLOCK_X)
        below_right = read_column(x_rows, x_first, suffix_column + of_chunk * X, inside, X, BLOCK_X)
    if sums is not None:
        end_high, end_low = load_sum(chunk_sums, T, length - 1)
        from_left = decay_between(i_high, i_low, 0.0, 0.0)
        from_right = decay_between(end_high, end_low, i_back_high, i_back_low)
        left *= from_left[:, None]
        right *= from_right[:, None]
        below *= from_left
        below_right *= from_right
    # Selected, not multiplied by 0: states of other documents may have overflowed. Tokens beyond the row read no state.
    reads_left = i < length
    reads_right = i < length
    if starts is not None:
        reads_left = reads_left & (own_start < 0)
        reads_right = reads_right & (i >= last_start(starts, row * T, begin, length))
    left = tl.where(reads_left[:, None], left, 0.0)
    right = tl.where(reads_right[:, None], right, 0.0)
    below = tl.where(reads_left, below, 0.0) + tl.where(reads_right, below_right, 0.0)
    before = tl.zeros([BLOCK_T], dtype=tl.float32)
    if own is not None:
        own_rows = own + row * stride_ob + head * stride_oh + (begin + i)[:, None] * stride_ot
        own_tile = tl.load(own_rows + cols_z[None, :], mask=inside & has_z[None, :], other=0.0)
        before = tl.sum(own_tile.to(tl.float32) * left, 1)
        of_right = tl.sum(own_tile.to(tl.float32) * right, 1)
        tl.store(right_parts + program * BLOCK_T + tl.arange(0, BLOCK_T), of_right)
    acc = left + right

    # The tokens of the chunk, on both sides.
    for partner in range(0, length, BLOCK_T):
        j = partner + tl.arange(0, BLOCK_T)
        has_partner = j < length
        y_columns = y_chunk + j.to(tl.int64)[None, :] * stride_yt
        scores = pair_scores(x_rows, x_first, y_columns, inside, has_partner, X, BLOCK_X, PRECISION)
        if x_last is not None:
            scores += own_last[:, None]
        if y_last is not None:
            scores += tl.load(y_last + of_tokens + j.to(tl.int64) * H, mask=has_partner, other=0.0)[None, :]
        if sums is not None:
            high, low = load_tokens(chunk_sums, T, j, has_partner, EXCLUSIVE)
            back_high, back_low = load_tokens(chunk_sums, T, j, has_partner, not EXCLUSIVE)
            scores *= between(i, j, i_high, i_low, i_back_high, i_back_low, high, low, back_high, back_low)
        pairs = has_partner[None, :] & inside
        if starts is not None:
            pairs = pairs & (own_start[:, None] == own_starts(starts, row * T, begin, j, length)[None, :])
        scores = tl.where(pairs, scores, 0.0)
        if normalizer is not None:
            below += tl.sum(scores, 1)
        z_rows = z_chunk + j.to(tl.int64)[:, None] * stride_zt + cols_z[None, :]
        z_tile = tl.load(z_rows, mask=has_partner[:, None] & has_z[None, :], other=0.0)
        acc = tl.dot(scores.to(z_tile.dtype), z_tile, acc, input_precision=PRECISION)
        if own is not None:
            z_columns = z_chunk + j.to(tl.int64)[None, :] * stride_zt + cols_z[:, None]
            z_tile = tl.load(z_columns, mask=has_partner[None, :] & has_z[:, None], other=0.0)
            products = tl.dot(own_tile, z_tile, input_precision=PRECISION)
            products = tl.where(pairs, scores * products, 0.0)
            part = crossing(products, before, i, j, prefix.dtype.element_ty, EXCLUSIVE, PRECISION)
            tl.store(crossing_parts + program * CHUNK + j, part, mask=has_partner)
            before += tl.sum(products, 1)

    tokens = of_tokens + i.to(tl.int64) * H
    if normalizer is not None:
        below += eps
        # The sum is 0 without writes, as in a row of padding.
        acc = tl.where(below[:, None] == 0.0, 0.0, acc / tl.where(below == 0.0, 1.0, below)[:, None])
        if tile_z == 0:
            tl.store(normalizer + tokens, below, mask=i < length)
    at = tokens[:, None] * Z + cols_z[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside & has_z[None, :])

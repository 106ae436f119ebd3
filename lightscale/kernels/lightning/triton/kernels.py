"""The Triton kernel of lightning attention's outputs and gradients, with independent programs for the tiles of tokens.

A row is cut into chunks of CHUNK tokens, and these into tiles of BLOCK_T tokens. A split is some whole chunks that one
program of ``states.py`` scans in order. Names of shapes: B rows, T tokens, H heads, N chunks, S splits. x and y are the
factors of a pair's score, y and z the factors of a state. All arithmetic is fp32; tensor cores take half-precision
operands unconverted. docs/reference/operators/lightning.md has the mathematics, the tiling and the counts.

``starts`` (B, T) int32 is the position in the row at which the token's document begins, -1 for the row's first one. A
key j is in query i's document when j >= starts[i]. A query reads the state that enters a chunk when its document starts
before the chunk.

``turns`` (H, K) int64 and ``positions`` (B, T) int64, both or neither, are the angles of LRPE. With them, queries and
keys are spread where they are loaded, [x cos, x sin], and states have two halves of K rows: F is 2K, else K.

A width of a power of two plus one has an EDGE, its last column: a normaliser's, for which a tile of its own would be
nearly empty. It is computed beside the tiles as a vector, in fp32, without dots.

Decays are one per head, ``log_decay`` (H,), or one per head and token, ``sums`` (B, H, 2, T) of ``decays.py``; or both
are None.
"""

import triton
import triton.language as tl

from lightscale.kernels.common.triton.kernels import exists, last_start, own_starts, positions_at, tile_program, wave
from lightscale.kernels.lightning.triton.decays import crossing, decay_between, load_sum, load_sums, power


@triton.jit
def spread(x_tile, token_positions, turns, half):
    """Half of the features of a tile of x, by its tokens' positions and its channels' ``turns``, shaped to fit."""
    return (x_tile.to(tl.float32) * wave(token_positions, turns, half)).to(x_tile.dtype)


@triton.jit
def read_state(
    x_rows,
    x_first,
    state_columns,
    inside,
    has_z,
    stride_row,
    X: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x S for some rows of x, whose first tile of columns is ``x_first``, and some columns of a chunk's state."""
    acc = tl.zeros([x_first.shape[0], has_z.shape[0]], dtype=tl.float32)
    x_tile = x_first
    for tile in tl.static_range((X + BLOCK_X - 1) // BLOCK_X):
        cols = tile * BLOCK_X + tl.arange(0, BLOCK_X)
        has_x = exists(cols, X, BLOCK_X)
        if tile > 0:
            x_tile = tl.load(x_rows + cols[None, :], mask=inside & has_x[None, :], other=0.0)
        at = state_columns + cols[:, None] * stride_row
        part = tl.load(at, mask=has_x[:, None] & has_z[None, :], other=0.0)
        acc = tl.dot(x_tile.to(part.dtype), part, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _read_spread(
    x_rows,
    token_positions,
    turns,
    state_columns,
    inside,
    has_z,
    stride_row,
    X: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``read_state`` of both halves of x; not unrolled, because the phases of all tiles would fill registers."""
    X_TILES: tl.constexpr = (X + BLOCK_X - 1) // BLOCK_X
    acc = tl.zeros([token_positions.shape[0], has_z.shape[0]], dtype=tl.float32)
    for tile in range(2 * X_TILES):
        half = tile // X_TILES
        cols = tile % X_TILES * BLOCK_X + tl.arange(0, BLOCK_X)
        has_x = exists(cols, X, BLOCK_X)
        x_tile = tl.load(x_rows + cols[None, :], mask=inside & has_x[None, :], other=0.0)
        turns_x = tl.load(turns + cols, mask=has_x, other=0)
        x_tile = spread(x_tile, token_positions[:, None], turns_x[None, :], half)
        at = state_columns + (half * X + cols)[:, None] * stride_row
        part = tl.load(at, mask=has_x[:, None] & has_z[None, :], other=0.0)
        acc = tl.dot(x_tile.to(part.dtype), part, acc, input_precision=PRECISION)
    return acc


@triton.jit
def pair_scores(
    x_rows,
    x_first,
    y_columns,
    inside,
    has_partner,
    X: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x yᵀ of some rows, whose first tile of columns is ``x_first``, and as many partners."""
    X_TILES: tl.constexpr = (X + BLOCK_X - 1) // BLOCK_X
    x_tile = x_first
    scores = tl.zeros([x_first.shape[0], x_first.shape[0]], dtype=tl.float32)
    for tile in tl.static_range(X_TILES):
        cols = tile * BLOCK_X + tl.arange(0, BLOCK_X)
        has_x = exists(cols, X, BLOCK_X)
        # With several tiles, x is loaded again for each tile of partners, to save registers.
        if X_TILES > 1:
            x_tile = tl.load(x_rows + cols[None, :], mask=inside & has_x[None, :], other=0.0)
        y_tile = tl.load(y_columns + cols[:, None], mask=has_partner[None, :] & has_x[:, None], other=0.0)
        scores = tl.dot(x_tile, y_tile, scores, input_precision=PRECISION)
    return scores


@triton.jit
def _scores_spread(
    x_rows,
    x_positions,
    y_columns,
    y_positions,
    turns,
    inside,
    has_partner,
    X: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``pair_scores`` of both halves of x and y; not unrolled, as in ``_read_spread``."""
    X_TILES: tl.constexpr = (X + BLOCK_X - 1) // BLOCK_X
    scores = tl.zeros([x_positions.shape[0], y_positions.shape[0]], dtype=tl.float32)
    for tile in range(2 * X_TILES):
        half = tile // X_TILES
        cols = tile % X_TILES * BLOCK_X + tl.arange(0, BLOCK_X)
        has_x = exists(cols, X, BLOCK_X)
        turns_x = tl.load(turns + cols, mask=has_x, other=0)
        x_tile = tl.load(x_rows + cols[None, :], mask=inside & has_x[None, :], other=0.0)
        x_tile = spread(x_tile, x_positions[:, None], turns_x[None, :], half)
        y_tile = tl.load(y_columns + cols[:, None], mask=has_partner[None, :] & has_x[:, None], other=0.0)
        y_tile = spread(y_tile, y_positions[None, :], turns_x[:, None], half)
        scores = tl.dot(x_tile, y_tile, scores, input_precision=PRECISION)
    return scores


@triton.jit
def read_edge(
    x_rows,
    x_positions,
    turns,
    state_column,
    inside,
    X: tl.constexpr,
    stride_row: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """x S of some rows and one column of a chunk's state, whose rows are ``stride_row`` apart; x is spread by turns."""
    HALVES: tl.constexpr = 1 if turns is None else 2
    X_TILES: tl.constexpr = (X + BLOCK_X - 1) // BLOCK_X
    found = tl.zeros([inside.shape[0]], dtype=tl.float32)
    for tile in range(HALVES * X_TILES):
        half = tile // X_TILES
        cols = tile % X_TILES * BLOCK_X + tl.arange(0, BLOCK_X)
        has_x = exists(cols, X, BLOCK_X)
        x_tile = tl.load(x_rows + cols[None, :], mask=inside & has_x[None, :], other=0.0)
        if turns is not None:
            turns_x = tl.load(turns + cols, mask=has_x, other=0)
            x_tile = spread(x_tile, x_positions[:, None], turns_x[None, :], half)
        part = tl.load(state_column + (half * X + cols) * stride_row, mask=has_x, other=0.0)
        found += tl.sum(x_tile.to(tl.float32) * part.to(tl.float32)[None, :], 1)
    return found


# Not specialised on lengths: a batch of another length must not compile the kernel again.
@triton.jit(do_not_specialize=["T", "num_chunks", "num_token_tiles"])
def attend(
    x,  # (B, T, H, X): the tokens that the program computes; spread unless TRANSPOSED
    y,  # (B, T, H, X): their partners; spread unless TRANSPOSED
    z,  # (B, T, H, Z): their partners; spread when TRANSPOSED
    turns,
    positions,
    states,  # (B, H, N, X, Z), or (B, H, N, Z, X) when TRANSPOSED; the spread width has two halves
    log_decay,  # (H,) fp32, or None
    sums,  # (B, H, 2, T) fp32, or None
    starts,  # (B, T), or None
    out,  # (B, T, H, Z), contiguous
    own,  # (B, T, H, Z): the tensor whose gradient `out` is, or None
    decay_parts,  # (B, token tiles, H, Z tiles) fp32: part of dlog_decay by these tokens, or None; with ``sums`` (…, C)
    angle_parts,  # (B, token tiles, H, F) fp32: these tokens' part of dtheta, or None
    T,
    H,
    num_chunks,
    num_token_tiles,
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
    EDGE: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    REVERSE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    AXES: tl.constexpr,
):
    """out = (x yᵀ ⊙ M) z + weight x S for a tile of tokens.

    Forward, tokens are queries and M_ij = λ^(i-j) for i >= j; in reverse they are keys and M is transposed. Forward, x,
    y, z = q, k, v give o, and do, v, k give dq. In reverse, v, do, q give dk, and k, q, do give dv.

    If z is spread, a tile of its columns has two halves of the same CHANNELS, whose gradients are combined at the end.
    With EDGE the values have one column more than their tiles: in z, or in x and y when TRANSPOSED.
    """
    X_EDGE: tl.constexpr = EDGE and TRANSPOSED
    Z_EDGE: tl.constexpr = EDGE and not TRANSPOSED
    X_TILED: tl.constexpr = X - 1 if X_EDGE else X
    Z_TILED: tl.constexpr = Z - 1 if Z_EDGE else Z
    X_HALVES: tl.constexpr = 1 if turns is None or TRANSPOSED else 2
    Z_HALVES: tl.constexpr = 1 if turns is None or not TRANSPOSED else 2
    CHANNELS: tl.constexpr = BLOCK_Z // Z_HALVES
    Z_TILES: tl.constexpr = (Z_TILED + CHANNELS - 1) // CHANNELS
    program = tl.program_id(0).to(tl.int64)
    row, head, tile_t, tile_z = tile_program(H, num_token_tiles, Z_TILES)

    chunk = tile_t * BLOCK_T // CHUNK
    begin = chunk * CHUNK
    length = tl.minimum(CHUNK, T - begin).to(tl.int32)
    # Positions in the chunk are counted from its first token.
    first = (tile_t * BLOCK_T - begin).to(tl.int32)
    i = first + tl.arange(0, BLOCK_T)
    inside = (i < length)[:, None]
    half_z = tl.arange(0, BLOCK_Z) // CHANNELS
    cols_z = tile_z * CHANNELS + tl.arange(0, BLOCK_Z) % CHANNELS
    has_z = exists(cols_z, Z_TILED, CHANNELS)
    cols_x = tl.arange(0, BLOCK_X)
    x_rows = x + row * stride_xb + head * stride_xh + (begin + i)[:, None] * stride_xt
    y_chunk = y + row * stride_yb + head * stride_yh + begin * stride_yt
    z_chunk = z + row * stride_zb + head * stride_zh + begin * stride_zt
    own_start = own_starts(starts, row * T, begin, i, length)
    if turns is not None:
        token_positions = positions_at(positions, row * T + begin + i, i < length, head, H, AXES)
        head_turns = turns + head * (X if X_HALVES == 2 else Z)
    if Z_HALVES == 2:
        turns_z = tl.load(head_turns + cols_z, mask=has_z, other=0)[None, :]
    rate = 0.0
    if log_decay is not None:
        rate = tl.load(log_decay + head)
    if sums is not None:
        chunk_sums = sums + (row * H + head) * 2 * T + begin
        own_high, own_low = load_sums(chunk_sums, T, i, i < length)

    # The state's part comes first: its rows are weighted, and the pairs, added afterwards, are not.
    # In reverse the state is the cotangent of the state that leaves the chunk.
    x_first = tl.load(x_rows + cols_x[None, :], mask=inside & exists(cols_x, X_TILED, BLOCK_X)[None, :], other=0.0)
    state = states + ((row * H + head) * num_chunks + chunk) * X_HALVES * X * Z_HALVES * Z
    state_columns = state + (half_z * Z + cols_z)[None, :] * (X if TRANSPOSED else 1)
    stride_row: tl.constexpr = 1 if TRANSPOSED else Z
    if X_HALVES == 1:
        acc = read_state(x_rows, x_first, state_columns, inside, has_z, stride_row, X_TILED, BLOCK_X, PRECISION)
        if X_EDGE:
            x_edge = tl.load(x_rows + X_TILED, mask=inside, other=0.0).to(tl.float32)
            of_edge = tl.load(state_columns + X_TILED * stride_row, mask=has_z[None, :], other=0.0)
            acc += x_edge * of_edge.to(tl.float32)
    else:
        acc = _read_spread(
            x_rows, token_positions, head_turns, state_columns, inside, has_z, stride_row, X, BLOCK_X, PRECISION
        )
    if Z_EDGE:
        # The program of the last tile computes the column beside it.
        state_edge = states + ((row * H + head) * num_chunks + chunk) * X_HALVES * X * Z + Z_TILED
        if turns is None:
            edge = read_edge(x_rows, None, None, state_edge, inside, X, Z, BLOCK_X)
        else:
            edge = read_edge(x_rows, token_positions, head_turns, state_edge, inside, X, Z, BLOCK_X)
    steps = i + 1
    if REVERSE:
        steps = length - 1 - i
    if log_decay is not None:
        weight = power(rate, steps)
        acc *= weight[:, None]
        if Z_EDGE:
            edge *= weight
    if sums is not None:
        if REVERSE:
            end_high, end_low = load_sum(chunk_sums, T, length - 1)
            weight = decay_between(end_high, end_low, own_high, own_low)
        else:
            weight = decay_between(own_high, own_low, 0.0, 0.0)
        acc *= weight[:, None]
        if Z_EDGE:
            edge *= weight
    if starts is not None:
        kept = own_start < 0
        if REVERSE:
            kept = i >= last_start(starts, row * T, begin, length)
        acc = tl.where(kept[:, None], acc, 0.0)
        if Z_EDGE:
            edge = tl.where(kept, edge, 0.0)
    decay_part = tl.zeros([BLOCK_T], dtype=tl.float32)
    if own is not None:
        own_rows = own + row * stride_ob + head * stride_oh + (begin + i)[:, None] * stride_ot
        own_tile = tl.load(own_rows + cols_z[None, :], mask=inside & has_z[None, :], other=0.0)
    if decay_parts is not None:
        if Z_HALVES == 2:
            own_tile = spread(own_tile, token_positions[:, None], turns_z, half_z[None, :])
        decay_part = tl.sum(own_tile.to(tl.float32) * acc, 1)
        if sums is None:
            decay_part *= steps.to(tl.float32)

    # The tokens of the chunk.
    # Tiles whose partners are all later (in reverse: earlier) are skipped; the tile on the diagonal is masked.
    lowest, highest = 0, first + 1
    if REVERSE:
        lowest, highest = first, length
    for partner in range(lowest, highest, BLOCK_T):
        j = partner + tl.arange(0, BLOCK_T)
        has_partner = j < length
        y_columns = y_chunk + j.to(tl.int64)[None, :] * stride_yt
        if turns is not None:
            partner_positions = positions_at(positions, row * T + begin + j, has_partner, head, H, AXES)
        if X_HALVES == 1:
            scores = pair_scores(x_rows, x_first, y_columns, inside, has_partner, X_TILED, BLOCK_X, PRECISION)
            if X_EDGE:
                y_edge = tl.load(y_columns + X_TILED, mask=has_partner[None, :], other=0.0)
                scores += x_edge * y_edge.to(tl.float32)
        else:
            scores = _scores_spread(
                x_rows,
                token_positions,
                y_columns,
                partner_positions,
                head_turns,
                inside,
                has_partner,
                X,
                BLOCK_X,
                PRECISION,
            )
        distance = i[:, None] - j[None, :]
        if REVERSE:
            distance = j[None, :] - i[:, None]
        pairs = (distance >= 0) & has_partner[None, :]
        if starts is not None:
            if REVERSE:
                pairs = pairs & (own_starts(starts, row * T, begin, j, length)[None, :] <= i[:, None])
            else:
                pairs = pairs & (own_start[:, None] <= j[None, :])
        if log_decay is not None:
            scores *= power(rate, distance)
        if sums is not None:
            high, low = load_sums(chunk_sums, T, j, has_partner)
            if REVERSE:
                scores *= decay_between(high[None, :], low[None, :], own_high[:, None], own_low[:, None])
            else:
                scores *= decay_between(own_high[:, None], own_low[:, None], high[None, :], low[None, :])
        scores = tl.where(pairs, scores, 0.0)
        z_rows = z_chunk + j.to(tl.int64)[:, None] * stride_zt + cols_z[None, :]
        z_tile = tl.load(z_rows, mask=has_partner[:, None] & has_z[None, :], other=0.0)
        if Z_HALVES == 2:
            z_tile = spread(z_tile, partner_positions[:, None], turns_z, half_z[None, :])
        acc = tl.dot(scores.to(z_tile.dtype), z_tile, acc, input_precision=PRECISION)
        if Z_EDGE:
            z_edge = tl.load(z_chunk + j.to(tl.int64) * stride_zt + Z_TILED, mask=has_partner, other=0.0)
            edge += tl.sum(scores * z_edge.to(tl.float32)[None, :], 1)
        if decay_parts is not None and not REVERSE:
            # Each pair once, times its distance: a difference of sums over tokens would nearly cancel.
            z_columns = z_chunk + j.to(tl.int64)[None, :] * stride_zt + cols_z[:, None]
            z_tile = tl.load(z_columns, mask=has_partner[None, :] & has_z[:, None], other=0.0)
            if Z_HALVES == 2:
                turns_column = tl.load(head_turns + cols_z, mask=has_z, other=0)[:, None]
                z_tile = spread(z_tile, partner_positions[None, :], turns_column, half_z[:, None])
            products = tl.dot(own_tile, z_tile, input_precision=PRECISION)
            if sums is None:
                decay_part += tl.sum(tl.where(pairs, scores * products * distance.to(tl.float32), 0.0), 1)
            else:
                products = tl.where(pairs, scores * products, 0.0)
                part = crossing(products, decay_part, i, j, own_start, states.dtype.element_ty, PRECISION)
                tl.store(decay_parts + program * CHUNK + j, part, mask=has_partner)
                decay_part += tl.sum(products, 1)
        if decay_parts is not None and REVERSE and sums is not None:
            # The writes of these keys to the leaving state cross the tokens behind them.
            part = tl.sum(tl.where(i[:, None] < j[None, :], decay_part[:, None], 0.0), 0)
            tl.store(decay_parts + program * CHUNK + j, part, mask=has_partner)

    if angle_parts is not None:
        # The derivative of half h is half h - 1.
        own_tile = tl.load(own_rows + cols_z[None, :], mask=inside & has_z[None, :], other=0.0).to(tl.float32)
        turning = own_tile * acc * wave(token_positions[:, None], turns_z, half_z[None, :] - 1)
        of_tile = angle_parts + (program - tile_z) // Z_TILES * 2 * Z + half_z * Z + cols_z
        tl.store(of_tile, tl.sum(turning * token_positions.to(tl.float32)[:, None], 0), mask=has_z)
    if Z_HALVES == 2:
        acc *= wave(token_positions[:, None], turns_z, half_z[None, :])
        acc = tl.sum(tl.reshape(acc, [BLOCK_T, 2, CHANNELS]), 1)
    channels = tile_z * CHANNELS + tl.arange(0, CHANNELS)
    at = ((row * T + begin + i[:, None]) * H + head) * Z + channels[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside & exists(channels, Z_TILED, CHANNELS)[None, :])
    if Z_EDGE:
        at_edge = ((row * T + begin + i) * H + head) * Z + Z_TILED
        tl.store(out + at_edge, edge.to(out.dtype.element_ty), mask=(i < length) & (tile_z + 0 * i == Z_TILES - 1))
    if decay_parts is not None and sums is None:
        tl.store(decay_parts + program, tl.sum(tl.where(i < length, decay_part, 0.0), 0))

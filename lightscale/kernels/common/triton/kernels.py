"""Triton functions that several operators share, and the kernel of one token of linear attention."""

import triton
import triton.language as tl


@triton.jit
def exists(cols, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Mask of the columns of a tile that exist; a constant, without work, where tiles of BLOCK fill the width."""
    if WIDTH % BLOCK == 0:
        return tl.full(cols.shape, 1, tl.int1)
    else:
        return cols < WIDTH


@triton.jit
def own_starts(starts, row_start, begin, i, length):
    """Starts of the documents of a chunk's tokens i, as positions in the chunk; negative before the chunk.

    ``starts`` (B, T) is the result of ``document_starts``, or None; ``row_start`` is the row's first element in it. The
    chunk is ``length`` tokens from ``begin``.
    """
    begins = tl.full(i.shape, -1, tl.int32)
    if starts is not None:
        begins = (tl.load(starts + row_start + begin + i, mask=i < length, other=-1) - begin).to(tl.int32)
    return begins


@triton.jit
def last_start(starts, row_start, begin, length):
    """``own_starts`` of the chunk's last token."""
    start = tl.full([], -1, tl.int32)
    if starts is not None:
        start = (tl.load(starts + row_start + begin + length - 1) - begin).to(tl.int32)
    return start


@triton.jit
def scan_program(H, num_splits, K_TILES: tl.constexpr, V_TILES: tl.constexpr):
    """Row, head, split, and tile of the state (of K, of V) of a program that scans states; the tile changes first."""
    program = tl.program_id(0).to(tl.int64)
    tile_v = program % V_TILES
    tile_k = program // V_TILES % K_TILES
    head = program // (V_TILES * K_TILES) % H
    split = program // (V_TILES * K_TILES * H) % num_splits
    row = program // (V_TILES * K_TILES * H * num_splits)
    return row, head, split, tile_k, tile_v


@triton.jit
def tile_program(H, num_tiles, COLUMN_TILES: tl.constexpr):
    """Row, head, number in its row, and tile of columns of a program for a tile of tokens, or for a chunk.

    The tile of columns changes first: neighbouring programs read the same tokens from the cache.
    """
    # 64 bits: a million tokens of 16 heads of 256 channels exceed 2^31 elements.
    program = tl.program_id(0).to(tl.int64)
    row = program // (COLUMN_TILES * H * num_tiles)
    head = program // COLUMN_TILES % H
    return row, head, program // (COLUMN_TILES * H) % num_tiles, program % COLUMN_TILES


@triton.jit
def chunk_tokens(chunk, T, CHUNK: tl.constexpr):
    """First token of a chunk of a row of T tokens, its length, its places, and the mask of the existing places."""
    begin = chunk * CHUNK
    length = tl.minimum(CHUNK, T - begin).to(tl.int32)
    i = tl.arange(0, CHUNK)
    return begin, length, i, i < length


@triton.jit
def step_program(K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Row, head, tile, rows, columns and their mask, for a program with some columns of a state (K, V)."""
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0).to(tl.int64)
    tile = program % V_TILES
    rows, cols = tl.arange(0, BLOCK_K), tile * BLOCK_V + tl.arange(0, BLOCK_V)
    return program // V_TILES, tile, rows, cols, exists(rows, K, BLOCK_K), exists(cols, V, BLOCK_V)


@triton.jit
def positions_at(positions, tokens, mask, head, H, AXES: tl.constexpr):
    """Positions (tokens, AXES) of some tokens along the axis of ``head``: equal groups of heads have an axis each."""
    return tl.load(positions + tokens * AXES + head * AXES // H, mask=mask, other=0)


@triton.jit
def wave(positions, turns, half):
    """cos (half 0) or sin (half 1) of positions · θ, with ``turns`` = θ in 2^-64 of a turn, int64 (``turns_of``).

    The overflow of the integer product drops whole turns, and the product is exact at any position. The rest, less a
    quarter for the sine, is folded into the quarters around 0 of a sine. One odd polynomial computes it to fp32's
    rounding.
    """
    # The product of integers wraps around at whole turns; its upper half is the angle in 2^-32 of a turn.
    turn = ((positions.to(tl.int64) * turns) >> 32).to(tl.int32)
    turn = turn - half * 1073741824
    u = (1073741824 - tl.abs(turn)).to(tl.float32) * 9.313225746154785e-10
    square = u * u
    series = 1.50820564e-04 * square - 4.67222792e-03
    series = series * square + 7.96884805e-02
    series = series * square - 6.45963360e-01
    return u * (series * square + 1.57079629)


@triton.jit
def recurrent(
    q,  # (B, H, K), contiguous
    k,  # (B, H, K), contiguous
    v,  # (B, H, V), contiguous
    log_decay,  # (B, H, K) fp32, or None
    before,  # (B, H, K, V) fp32
    out,  # (B, H, V)
    after,  # (B, H, K, V) fp32
    H,
    stride_gb,
    stride_gh,
    stride_gk,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One token: S <- f ⊙ S + k vᵀ and o = Sᵀ q; a program computes some columns of a head's state."""
    row_head, _, rows, cols, has_row, has_col = step_program(K, V, BLOCK_K, BLOCK_V)
    at = row_head * K * V + rows[:, None] * V + cols[None, :]
    inside = has_row[:, None] & has_col[None, :]
    state = tl.load(before + at, mask=inside, other=0.0)
    if log_decay is not None:
        of_head = log_decay + row_head // H * stride_gb + row_head % H * stride_gh
        state *= tl.exp(tl.load(of_head + rows * stride_gk, mask=has_row, other=0.0))[:, None]
    key = tl.load(k + row_head * K + rows, mask=has_row, other=0.0).to(tl.float32)
    value = tl.load(v + row_head * V + cols, mask=has_col, other=0.0).to(tl.float32)
    state += key[:, None] * value[None, :]
    query = tl.load(q + row_head * K + rows, mask=has_row, other=0.0).to(tl.float32)
    tl.store(after + at, state, mask=inside)
    read = tl.sum(query[:, None] * state, 0)
    tl.store(out + row_head * V + cols, read.to(out.dtype.element_ty), mask=has_col)

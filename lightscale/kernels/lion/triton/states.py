"""The Triton kernel of LION's scan along a row: the states at the borders of chunks, from either end.

Names of shapes and arguments are those of ``kernels.py``.
"""

import triton
import triton.language as tl

from lightscale.kernels.common.triton.kernels import exists, last_start, own_starts, scan_program
from lightscale.kernels.lightning.triton.decays import decay_between, load_sum
from lightscale.kernels.lion.triton.decays import load_tokens


@triton.jit(do_not_specialize=["T", "num_chunks", "num_splits", "split_chunks"])
def scan_states(
    x,  # (B, T, H, K): keys, or queries
    y,  # (B, T, H, V): values, or cotangents of the sums
    last,  # (B, T, H) fp32: the normaliser's column of y; None for ones
    sums,  # (B or 1, H, 2, T) fp32, or None
    starts,  # (B, T), or None
    entering,  # (B, H, S, K, W) fp32: the state that enters each split, or None for zero
    leaving,  # (B, H, S, K, W) fp32: the state that leaves each split, or None
    split_through,  # (B, H, S) fp32: the decay through each split, or None
    chunk_states,  # (B, H, N, K, V): the state that enters each chunk, or None
    chunk_columns,  # (B, H, N, K) fp32: its last column, or None
    other_states,  # (B, H, N, K, V): the states whose cotangents are scanned, or None
    other_columns,  # (B, H, N, K) fp32, or None
    decay_parts,  # (B, H, N, K tiles, V tiles) fp32: part of dlog_decay through the chunks, or None
    T,
    H,
    num_chunks,
    num_splits,
    split_chunks,
    stride_sums,
    stride_xb,
    stride_xt,
    stride_xh,
    stride_yb,
    stride_yt,
    stride_yh,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    REVERSE: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scan a split's chunks with a tile of the state: S <- e^total S + Σ weight x [y, last]ᵀ.

    From left to right weights are e^(total - sum), in reverse e^sum, by sums through each token or, when EXCLUSIVE,
    before it. Every program keeps the last column beside its tile; the programs of the first tile of V store it.
    """
    W: tl.constexpr = V + 1 if NORMALIZE else V
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    row, head, split, tile_k, tile_v = scan_program(H, num_splits, K_TILES, V_TILES)
    cols_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    cols_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    has_k, has_v = exists(cols_k, K, BLOCK_K), exists(cols_v, V, BLOCK_V)
    in_tile = has_k[:, None] & has_v[None, :]
    of_split = ((row * H + head) * num_splits + split) * K * W
    within = cols_k[:, None] * W + cols_v[None, :]
    x_head = x + row * stride_xb + head * stride_xh
    y_head = y + row * stride_yb + head * stride_yh
    if sums is not None:
        head_sums = sums + row * stride_sums + head * 2 * T
    passed = 1.0

    state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    column = tl.zeros([BLOCK_K], dtype=tl.float32)
    if entering is not None:
        state = tl.load(entering + of_split + within, mask=in_tile, other=0.0)
        if NORMALIZE:
            column = tl.load(entering + of_split + cols_k * W + V, mask=has_k, other=0.0)
    first_chunk = split * split_chunks
    split_end = tl.minimum(first_chunk + split_chunks, num_chunks)
    for step in range(split_end - first_chunk):
        chunk = first_chunk + step
        if REVERSE:
            chunk = split_end - 1 - step
        begin = chunk * CHUNK
        length = tl.minimum(CHUNK, T - begin).to(tl.int32)
        of_chunk = (row * H + head) * num_chunks + chunk
        at_chunk = of_chunk * K * V + cols_k[:, None] * V + cols_v[None, :]
        if chunk_states is not None:
            # Only the stored copy is rounded; the state stays in fp32.
            tl.store(chunk_states + at_chunk, state.to(chunk_states.dtype.element_ty), mask=in_tile)
            if NORMALIZE and tile_v == 0:
                tl.store(chunk_columns + of_chunk * K + cols_k, column, mask=has_k)

        # The part through the whole chunk. Positions in the chunk are counted from its first token.
        last_begin = last_start(starts, row * T, begin, length)
        if sums is not None:
            end_high, end_low = load_sum(head_sums, T, begin + length - 1)
            share = tl.exp(end_high + end_low)
            state *= share
            column *= share
            passed *= share
        if starts is not None:
            # Selected, not multiplied by 0: an overflow in another document must give no NaN.
            state = tl.where(last_begin < 0, state, 0.0)
            column = tl.where(last_begin < 0, column, 0.0)
        if other_states is not None:
            other = tl.load(other_states + at_chunk, mask=in_tile, other=0.0).to(tl.float32)
            product = tl.sum(tl.sum(state * other, 1), 0)
            if NORMALIZE and tile_v == 0:
                other_column = tl.load(other_columns + of_chunk * K + cols_k, mask=has_k, other=0.0)
                product += tl.sum(column * other_column, 0)
            part = (of_chunk * K_TILES + tile_k) * V_TILES + tile_v
            # The other state may also have overflowed in another document.
            tl.store(decay_parts + part, tl.where(last_begin < 0, product, 0.0))

        for tile_t in tl.static_range(CHUNK // BLOCK_T):
            i = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
            t = begin + i
            kept = i < length
            if starts is not None:
                if REVERSE:
                    kept = kept & (own_starts(starts, row * T, begin, i, length) < 0)
                else:
                    kept = kept & (i >= last_begin)
            x_tile = tl.load(
                x_head + t[None, :] * stride_xt + cols_k[:, None], mask=kept[None, :] & has_k[:, None], other=0.0
            )
            y_rows = y_head + t[:, None] * stride_yt + cols_v[None, :]
            y_tile = tl.load(y_rows, mask=kept[:, None] & has_v[None, :], other=0.0)
            weights = tl.full([BLOCK_T], 1.0, tl.float32)
            if sums is not None:
                high, low = load_tokens(head_sums + begin, T, i, i < length, EXCLUSIVE)
                if REVERSE:
                    weights = decay_between(high, low, 0.0, 0.0)
                else:
                    weights = decay_between(end_high, end_low, high, low)
                y_tile = (y_tile.to(tl.float32) * weights[:, None]).to(y_tile.dtype)
            state = tl.dot(x_tile, y_tile, state, input_precision=PRECISION)
            if NORMALIZE:
                if last is not None:
                    weights *= tl.load(last + (row * T + t) * H + head, mask=kept, other=0.0)
                column += tl.sum(x_tile.to(tl.float32) * weights[None, :], 1)

    if leaving is not None:
        tl.store(leaving + of_split + within, state, mask=in_tile)
        if NORMALIZE and tile_v == 0:
            tl.store(leaving + of_split + cols_k * W + V, column, mask=has_k)
    if split_through is not None and tile_k + tile_v == 0:
        tl.store(split_through + (row * H + head) * num_splits + split, passed)

"""The Triton kernels of lightning attention that scan a row: states at chunk starts, and their fold over splits.

Names of shapes and arguments are those of ``kernels.py``.
"""

import triton
import triton.language as tl

from lightscale.kernels.common.triton.kernels import exists, last_start, own_starts, positions_at, scan_program
from lightscale.kernels.lightning.triton.decays import decay_between, load_sum, load_sums, power
from lightscale.kernels.lightning.triton.kernels import spread


@triton.jit(do_not_specialize=["T", "num_chunks", "num_splits", "split_chunks"])
def scan_states(
    x,  # (B, T, H, K): keys; queries in reverse
    y,  # (B, T, H, V): values; cotangents of the outputs in reverse
    turns,
    positions,
    log_decay,  # (H,) fp32, or None
    sums,  # (B, H, 2, T) fp32, or None
    starts,  # (B, T), or None
    entering,  # (B, H, S, F, V) fp32: the state that enters each split, or None for zero
    leaving,  # (B, H, S, F, V) fp32: the state that leaves each split, or None
    split_through,  # (B, H, S) fp32: the decay through each split by ``sums``, or None
    chunk_states,  # (B, H, N, F, V): the state that enters each chunk, or None
    other_states,  # (B, H, N, F, V): the states of the forward scan, or None
    decay_parts,  # (B, H, S, F tiles, V tiles) fp32: part of dlog_decay through the splits; with ``sums`` N, not S
    T,
    H,
    num_chunks,
    num_splits,
    split_chunks,
    stride_xb,
    stride_xt,
    stride_xh,
    stride_yb,
    stride_yt,
    stride_yh,
    K: tl.constexpr,
    V: tl.constexpr,
    EDGE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
    AXES: tl.constexpr,
):
    """Scan a split's chunks with a tile of the state: S <- λ^L S + Σ weight x yᵀ.

    In reverse the state is the cotangent of the state that leaves a chunk, and "enters" means from behind. With EDGE y
    has one column more than its tiles; the program of the last tile computes it.
    """
    TILED: tl.constexpr = V - 1 if EDGE else V
    V_TILES: tl.constexpr = (TILED + BLOCK_V - 1) // BLOCK_V
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    F: tl.constexpr = K if turns is None else 2 * K
    F_TILES: tl.constexpr = F // K * K_TILES
    row, head, split, tile_f, tile_v = scan_program(H, num_splits, F_TILES, V_TILES)

    half = tile_f // K_TILES
    cols_k = tile_f % K_TILES * BLOCK_K + tl.arange(0, BLOCK_K)
    cols_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    has_k, has_v = exists(cols_k, K, BLOCK_K), exists(cols_v, TILED, BLOCK_V)
    in_tile = has_k[:, None] & has_v[None, :]
    within = (half * K + cols_k)[:, None] * V + cols_v[None, :]
    of_split = ((row * H + head) * num_splits + split) * F * V
    x_head = x + row * stride_xb + head * stride_xh
    y_head = y + row * stride_yb + head * stride_yh
    if turns is not None:
        turns_k = tl.load(turns + head * K + cols_k, mask=has_k, other=0)[:, None]
    rate = 0.0
    if log_decay is not None:
        rate = tl.load(log_decay + head)
    if sums is not None:
        head_sums = sums + (row * H + head) * 2 * T
    passed = 1.0

    state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    if entering is not None:
        state = tl.load(entering + of_split + within, mask=in_tile, other=0.0)
    if EDGE:
        # A vector, because masks are vectors; true in the last tile's program.
        is_last = tile_v + tl.zeros([BLOCK_K], dtype=tl.int64) == V_TILES - 1
        has_edge = has_k & is_last
        at_edge = (half * K + cols_k) * V + TILED
        edge = tl.zeros([BLOCK_K], dtype=tl.float32)
        if entering is not None:
            edge = tl.load(entering + of_split + at_edge, mask=has_edge, other=0.0)
    decay_part = 0.0
    first_chunk = split * split_chunks
    split_end = tl.minimum(first_chunk + split_chunks, num_chunks)
    for step in range(split_end - first_chunk):
        chunk = first_chunk + step
        if REVERSE:
            chunk = split_end - 1 - step
        begin = chunk * CHUNK
        length = tl.minimum(CHUNK, T - begin).to(tl.int32)
        of_chunk = ((row * H + head) * num_chunks + chunk) * F * V
        if chunk_states is not None:
            # Only the stored copy is rounded; the state stays in fp32.
            rounded = state.to(chunk_states.dtype.element_ty)
            tl.store(chunk_states + of_chunk + within, rounded, mask=in_tile)
            if EDGE:
                rounded = edge.to(chunk_states.dtype.element_ty)
                tl.store(chunk_states + of_chunk + at_edge, rounded, mask=has_edge)

        # The part through the whole chunk. Positions in the chunk are counted from its first token.
        last = last_start(starts, row * T, begin, length)
        if log_decay is not None:
            through = power(rate, length)
            state *= through
            if EDGE:
                edge *= through
        if sums is not None:
            end_high, end_low = load_sum(head_sums, T, begin + length - 1)
            share = tl.exp(end_high + end_low)
            state *= share
            if EDGE:
                edge *= share
            passed *= share
        if starts is not None:
            # Selected, not multiplied by 0: an overflow in another document must give no NaN.
            state = tl.where(last < 0, state, 0.0)
            if EDGE:
                edge = tl.where(last < 0, edge, 0.0)
        if other_states is not None:
            other = tl.load(other_states + of_chunk + within, mask=in_tile, other=0.0).to(tl.float32)
            product = tl.sum(tl.sum(state * other, 1), 0)
            if EDGE:
                other_edge = tl.load(other_states + of_chunk + at_edge, mask=has_edge, other=0.0).to(tl.float32)
                product += tl.sum(edge * other_edge, 0)
            if sums is None:
                decay_part += product * length.to(tl.float32)
            else:
                # Selected: the other state may have overflowed in another document.
                part = ((row * H + head) * num_chunks + chunk) * F_TILES * V_TILES + tile_f * V_TILES + tile_v
                tl.store(decay_parts + part, tl.where(last < 0, product, 0.0))

        for tile_t in tl.static_range(CHUNK // BLOCK_T):
            i = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
            t = begin + i
            kept = i < length
            if starts is not None:
                if REVERSE:
                    kept = kept & (own_starts(starts, row * T, begin, i, length) < 0)
                else:
                    kept = kept & (i >= last)
            x_columns = x_head + t[None, :] * stride_xt + cols_k[:, None]
            x_tile = tl.load(x_columns, mask=kept[None, :] & has_k[:, None], other=0.0)
            if turns is not None:
                token_positions = positions_at(positions, row * T + t, kept, head, H, AXES)[None, :]
                x_tile = spread(x_tile, token_positions, turns_k, half.to(tl.int32))
            y_rows = y_head + t[:, None] * stride_yt + cols_v[None, :]
            y_tile = tl.load(y_rows, mask=kept[:, None] & has_v[None, :], other=0.0)
            if EDGE:
                y_edge = tl.load(y_head + t * stride_yt + TILED, mask=kept & (tile_v + 0 * t == V_TILES - 1), other=0.0)
                y_edge = y_edge.to(tl.float32)
            if log_decay is not None:
                steps = length - 1 - i
                if REVERSE:
                    steps = i + 1
                weights = power(rate, steps)
                y_tile = (y_tile.to(tl.float32) * weights[:, None]).to(y_tile.dtype)
                if EDGE:
                    y_edge *= weights
            if sums is not None:
                high, low = load_sums(head_sums, T, t, i < length)
                if REVERSE:
                    weights = decay_between(high, low, 0.0, 0.0)
                else:
                    weights = decay_between(end_high, end_low, high, low)
                y_tile = (y_tile.to(tl.float32) * weights[:, None]).to(y_tile.dtype)
                if EDGE:
                    y_edge *= weights
            if EDGE:
                edge += tl.sum(x_tile.to(tl.float32) * y_edge[None, :], 1)
            state = tl.dot(x_tile, y_tile, state, input_precision=PRECISION)

    if leaving is not None:
        tl.store(leaving + of_split + within, state, mask=in_tile)
        if EDGE:
            tl.store(leaving + of_split + at_edge, edge, mask=has_edge)
    if split_through is not None and tile_f + tile_v == 0:
        tl.store(split_through + (row * H + head) * num_splits + split, passed)
    if other_states is not None and sums is None:
        part = ((row * H + head) * num_splits + split) * F_TILES * V_TILES + tile_f * V_TILES + tile_v
        tl.store(decay_parts + part, decay_part)


@triton.jit(do_not_specialize=["T", "num_splits", "split_tokens"])
def fold_splits(
    local,  # (B, H, S, F V) fp32: the state that leaves each split when nothing enters it
    initial,  # (B, H, F V) fp32, or None for zero
    log_decay,  # (H,) fp32, or None
    split_through,  # (B, H, S) fp32: the decay through each split by decays of tokens, or None
    starts,  # (B, T), or None
    entering,  # (B, H, S, F V) fp32: the state that enters each split, or None
    final,  # (B, H, F V) fp32: the state that leaves the last split
    T,
    H,
    num_splits,
    split_tokens,
    num_elements,  # F V
    ELEMENTS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """The states between splits, one after the other; a program computes some elements of a head's state."""
    num_tiles = tl.cdiv(num_elements, ELEMENTS)
    program = tl.program_id(0).to(tl.int64)
    row_head = program // num_tiles
    row, head = row_head // H, row_head % H
    i = program % num_tiles * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = i < num_elements
    rate = 0.0
    if log_decay is not None:
        rate = tl.load(log_decay + head)
    state = tl.zeros([ELEMENTS], dtype=tl.float32)
    if initial is not None:
        state = tl.load(initial + row_head * num_elements + i, mask=inside, other=0.0)
    for step in range(num_splits):
        split = step
        if REVERSE:
            split = num_splits - 1 - step
        begin = split * split_tokens
        end = tl.minimum(begin + split_tokens, T)
        at = (row_head * num_splits + split) * num_elements + i
        if entering is not None:
            tl.store(entering + at, state, mask=inside)
        if log_decay is not None:
            state *= power(rate, end - begin)
        if split_through is not None:
            state *= tl.load(split_through + row_head * num_splits + split)
        if starts is not None:
            state = tl.where(tl.load(starts + row * T + end - 1) < begin, state, 0.0)
        state += tl.load(local + at, mask=inside, other=0.0)
    tl.store(final + row_head * num_elements + i, state, mask=inside)

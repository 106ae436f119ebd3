"""The Triton kernels of gated linear attention that scan rows: states at chunk starts, and outputs.

``decays.py`` has the decays inside chunks, ``gradients.py`` the gradients of a chunk.

A row is cut into chunks of CHUNK tokens; a split is some whole chunks that one program scans in order. Names of shapes:
B rows, T tokens, H heads, N chunks, S splits, C tokens of a chunk. All arithmetic is fp32; tensor cores take
half-precision operands unconverted. docs/reference/operators/gla.md has the mathematics, the tiling and the counts.

``starts`` (B, T) int32 is the position in the row at which the token's document begins, -1 for the row's first one. A
key j is in query i's document when j >= starts[i]. A query reads the state that enters a chunk when its document starts
before the chunk.
"""

import triton
import triton.language as tl

from lightscale.kernels.common.triton.kernels import exists, last_start, own_starts, scan_program, tile_program


@triton.jit(do_not_specialize=["T", "num_chunks", "num_splits", "split_chunks"])
def scan_states(
    x,  # (B, T, H, K), contiguous: k_out of ``prepare``; q_in in reverse
    y,  # (B, T, H, V): values; cotangents of the outputs in reverse
    through,  # (B, H, N, K) fp32
    entering,  # (B, H, S, K, V) fp32: the state that enters each split, or None for zero
    leaving,  # (B, H, S, K, V) fp32: the state that leaves each split, or None
    split_through,  # (B, H, S, K) fp32: the decay through each split, or None
    chunk_states,  # (B, H, N, K, V): the state that enters each chunk, or None
    T,
    H,
    num_chunks,
    num_splits,
    split_chunks,
    stride_yb,
    stride_yt,
    stride_yh,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scan a split's chunks with a tile of the state: S <- through ⊙ S + xᵀ y.

    In reverse the state is the cotangent of the state that leaves a chunk, and "enters" means from behind.
    """
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    # x is 0 for tokens without a part in the state (``prepare``): documents clear the state alone.
    row, head, split, tile_k, tile_v = scan_program(H, num_splits, K_TILES, V_TILES)

    cols_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    cols_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    has_k, has_v = exists(cols_k, K, BLOCK_K), exists(cols_v, V, BLOCK_V)
    in_tile = has_k[:, None] & has_v[None, :]
    within = cols_k[:, None] * V + cols_v[None, :]
    of_split = (row * H + head) * num_splits + split
    x_head = x + (row * T * H + head) * K
    y_head = y + row * stride_yb + head * stride_yh

    state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    if entering is not None:
        state = tl.load(entering + of_split * K * V + within, mask=in_tile, other=0.0)
    passed = tl.full([BLOCK_K], 1.0, tl.float32)
    first_chunk = split * split_chunks
    split_end = tl.minimum(first_chunk + split_chunks, num_chunks)
    for step in range(split_end - first_chunk):
        chunk = first_chunk + step
        if REVERSE:
            chunk = split_end - 1 - step
        of_chunk = (row * H + head) * num_chunks + chunk
        if chunk_states is not None:
            rounded = state.to(chunk_states.dtype.element_ty)
            tl.store(chunk_states + of_chunk * K * V + within, rounded, mask=in_tile)
        decay = tl.load(through + of_chunk * K + cols_k, mask=has_k, other=0.0)
        passed *= decay
        # Selected: the state of another document may be Inf.
        state = tl.where((decay == 0.0)[:, None], 0.0, state * decay[:, None])
        t = chunk * CHUNK + tl.arange(0, CHUNK)
        kept = t < T
        x_tile = tl.load(x_head + t[None, :] * H * K + cols_k[:, None], mask=kept[None, :] & has_k[:, None], other=0.0)
        y_rows = y_head + t[:, None] * stride_yt + cols_v[None, :]
        y_tile = tl.load(y_rows, mask=kept[:, None] & has_v[None, :], other=0.0)
        state = tl.dot(x_tile, y_tile, state, input_precision=PRECISION)

    if leaving is not None:
        tl.store(leaving + of_split * K * V + within, state, mask=in_tile)
    if split_through is not None and tile_v == 0:
        tl.store(split_through + of_split * K + cols_k, passed, mask=has_k)


@triton.jit(do_not_specialize=["num_splits"])
def fold_splits(
    local,  # (B, H, S, K V) fp32: the state that leaves each split when nothing enters it
    through,  # (B, H, S, K) fp32: the decay through each split
    initial,  # (B, H, K V) fp32, or None for zero
    entering,  # (B, H, S, K V) fp32: the state that enters each split, or None
    final,  # (B, H, K V) fp32: the state that leaves the last split
    num_splits,
    K: tl.constexpr,
    V: tl.constexpr,
    ELEMENTS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """The states between splits, one after the other; a program computes some elements of a head's state."""
    NUM_TILES: tl.constexpr = (K * V + ELEMENTS - 1) // ELEMENTS
    program = tl.program_id(0).to(tl.int64)
    row_head = program // NUM_TILES
    i = program % NUM_TILES * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = i < K * V
    state = tl.zeros([ELEMENTS], dtype=tl.float32)
    if initial is not None:
        state = tl.load(initial + row_head * K * V + i, mask=inside, other=0.0)
    for step in range(num_splits):
        split = step
        if REVERSE:
            split = num_splits - 1 - step
        of_split = row_head * num_splits + split
        if entering is not None:
            tl.store(entering + of_split * K * V + i, state, mask=inside)
        decay = tl.load(through + of_split * K + i // V, mask=inside, other=0.0)
        state = tl.where(decay == 0.0, 0.0, state * decay)
        state += tl.load(local + of_split * K * V + i, mask=inside, other=0.0)
    tl.store(final + row_head * K * V + i, state, mask=inside)


@triton.jit(do_not_specialize=["T", "num_chunks"])
def attend(
    x,  # (B, T, H, K), contiguous: q_in of ``prepare``; k_out in reverse
    scores,  # (B, H, N, C, C); read transposed in reverse
    z,  # (B, T, H, V): values; cotangents of the outputs in reverse
    states,  # (B, H, N, K, V): the state that enters each chunk; in reverse, the cotangent of the leaving one
    starts,  # (B, T), or None
    out,  # (B, T, H, V), contiguous
    T,
    H,
    num_chunks,
    stride_zb,
    stride_zt,
    stride_zh,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = scores z + x S for a chunk and some columns: o, or in reverse dv."""
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    row, head, chunk, tile_v = tile_program(H, num_chunks, V_TILES)
    cols_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    begin = chunk * CHUNK
    length = tl.minimum(CHUNK, T - begin).to(tl.int32)
    i = tl.arange(0, CHUNK)
    inside = (i < length)[:, None]
    has_v = exists(cols_v, V, BLOCK_V)[None, :]
    at = (row * T + begin + i.to(tl.int64)) * H + head
    of_chunk = (row * H + head) * num_chunks + chunk

    acc = tl.zeros([CHUNK, BLOCK_V], dtype=tl.float32)
    # The state's part comes first, because documents clear its rows; then the pairs, which ``scores`` has masked.
    for tile in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        cols = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        has_k = exists(cols, K, BLOCK_K)
        x_tile = tl.load(x + at[:, None] * K + cols[None, :], mask=inside & has_k[None, :], other=0.0)
        state_rows = states + of_chunk * K * V + cols[:, None] * V + cols_v[None, :]
        state = tl.load(state_rows, mask=has_k[:, None] & has_v, other=0.0)
        acc = tl.dot(x_tile.to(state.dtype), state, acc, input_precision=PRECISION)
    if starts is not None:
        kept = own_starts(starts, row * T, begin, i, length) < 0
        if REVERSE:
            kept = i >= last_start(starts, row * T, begin, length)
        acc = tl.where(kept[:, None], acc, 0.0)

    if REVERSE:
        pairs = i[None, :] * CHUNK + i[:, None]
    else:
        pairs = i[:, None] * CHUNK + i[None, :]
    scores_tile = tl.load(scores + of_chunk * CHUNK * CHUNK + pairs)
    z_rows = z + row * stride_zb + head * stride_zh + (begin + i)[:, None] * stride_zt + cols_v[None, :]
    acc = tl.dot(scores_tile, tl.load(z_rows, mask=inside & has_v, other=0.0), acc, input_precision=PRECISION)
    tl.store(out + at[:, None] * V + cols_v[None, :], acc.to(out.dtype.element_ty), mask=inside & has_v)

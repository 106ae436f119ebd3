"""The backward scans of LightNet's Triton kernels: the cotangents (U, R) of the states of chunks and splits.

Names of shapes and arguments are those of ``kernels.py``.
"""

# Triton evaluates the hints of its kernels: their arguments cannot have any but tl.constexpr.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from lightscale.kernels.common.triton.kernels import exists, positions_at, scan_program, wave
from lightscale.kernels.lightnet.triton.kernels import EMPTY, finite, half_program, share_of


@triton.jit(do_not_specialize=["T", "num_chunks", "num_splits", "split_chunks"])
def scan_cotangents(
    q,  # (B, T, H, K)
    do,  # (B, T, H, V)
    dq,  # (B, T, H, K), contiguous
    turns,
    positions,
    starts,
    edges,
    depths,
    enter_U,  # (B, H, S, R, V) fp32: the cotangent of the state that leaves each split, or None for zero
    enter_R,  # (B, H, S, K) fp32, or None
    leave_U,  # (B, H, S, R, V) fp32: the cotangent of the state that enters each split, or None
    leave_R,  # (B, H, S, K) fp32, or None
    chunk_U,  # (B, H, N, R, V): the cotangent of the state that leaves each chunk, or None
    chunk_R,  # (B, H, N, K) fp32, or None
    T,
    H,
    num_chunks,
    num_splits,
    split_chunks,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_db,
    stride_dt,
    stride_dh,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    AXES: tl.constexpr,
):
    """Scan a split's chunks backward with a tile of U: U <- e^(z - z') U + Σ φ(q e^(z - z_t)) doᵀ.

    The programs of the first tile of V also compute R. All exponents are at most 0.
    """
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    R: tl.constexpr = K if turns is None else 2 * K
    row, head, split, tile_k, tile_v = scan_program(H, num_splits, K_TILES, V_TILES)
    row_head = row * H + head
    of_split = row_head * num_splits + split

    cols_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    cols_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    has_k, has_v = exists(cols_k, K, BLOCK_K), exists(cols_v, V, BLOCK_V)
    in_tile = has_k[:, None] & has_v[None, :]
    within = cols_k[:, None] * V + cols_v[None, :]

    loss = tl.zeros([BLOCK_K], dtype=tl.float32)
    first = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    second = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    if enter_U is not None:
        loss = tl.load(enter_R + of_split * K + cols_k, mask=has_k, other=0.0)
        first = tl.load(enter_U + of_split * R * V + within, mask=in_tile, other=0.0)
        if turns is not None:
            second = tl.load(enter_U + of_split * R * V + K * V + within, mask=in_tile, other=0.0)

    first_chunk = split * split_chunks
    split_end = tl.minimum(first_chunk + split_chunks, num_chunks)
    for step in range(split_end - first_chunk):
        chunk = split_end - 1 - step
        begin = chunk * CHUNK
        length = tl.minimum(CHUNK, T - begin).to(tl.int32)
        of_chunk = row_head * num_chunks + chunk
        q_chunk = q + row * stride_qb + head * stride_qh + begin * stride_qt
        do_chunk = do + row * stride_db + head * stride_dh + begin * stride_dt
        head_chunk = ((row * T + begin) * H + head) * K
        if chunk_U is not None:
            at_chunk = chunk_U + of_chunk * R * V + within
            tl.store(at_chunk, first.to(chunk_U.dtype.element_ty), mask=in_tile)
            if turns is not None:
                tl.store(at_chunk + K * V, second.to(chunk_U.dtype.element_ty), mask=in_tile)
            if tile_v == 0:
                tl.store(chunk_R + of_chunk * K + cols_k, loss, mask=has_k)

        enter = tl.load(edges + (of_chunk * 3 + 1) * K + cols_k, mask=has_k, other=EMPTY)
        leave = tl.load(edges + (of_chunk * 3 + 2) * K + cols_k, mask=has_k, other=0.0)
        # e^(z - z') of the states at the chunk's two ends, from their differences to one base: at most 1, and exact for
        # large z.
        share = share_of(enter, leave)
        loss *= share
        first *= share[:, None]
        second *= share[:, None]
        if starts is not None:
            through = tl.load(starts + row * T + begin + length - 1) < begin
            loss = tl.where(through, loss, 0.0)
            first = tl.where(through, first, 0.0)
            second = tl.where(through, second, 0.0)
        for tile_t in range(0, CHUNK, BLOCK_T):
            i = tile_t + tl.arange(0, BLOCK_T)
            kept = i < length
            if starts is not None:
                kept = kept & (tl.load(starts + row * T + begin + i, mask=kept, other=0) < begin)
            in_columns = kept[None, :] & has_k[:, None]
            of_head = head_chunk + (i.to(tl.int64) * H * K)[None, :] + cols_k[:, None]
            depth = tl.load(depths + of_head, mask=in_columns, other=0.0)
            q_columns = q_chunk + i.to(tl.int64)[None, :] * stride_qt + cols_k[:, None]
            query = tl.load(q_columns, mask=in_columns, other=0.0)
            query = query.to(tl.float32) * share_of(enter[:, None], depth)
            if tile_v == 0:
                loss += tl.sum(query * tl.load(dq + of_head, mask=in_columns, other=0.0).to(tl.float32), 1)
            do_rows = do_chunk + i.to(tl.int64)[:, None] * stride_dt + cols_v[None, :]
            do_tile = tl.load(do_rows, mask=kept[:, None] & has_v[None, :], other=0.0).to(COMPUTE)
            if turns is None:
                first = tl.dot(query.to(COMPUTE), do_tile, first, input_precision=PRECISION)
            else:
                token_positions = positions_at(positions, row * T + begin + i, kept, head, H, AXES)[None, :]
                turns_k = tl.load(turns + head * K + cols_k, mask=has_k, other=0)[:, None]
                x = wave(token_positions, turns_k, 0)
                first = tl.dot((query * x).to(COMPUTE), do_tile, first, input_precision=PRECISION)
                y = wave(token_positions, turns_k, 1)
                second = tl.dot((query * y).to(COMPUTE), do_tile, second, input_precision=PRECISION)

    if leave_U is not None:
        tl.store(leave_U + of_split * R * V + within, first, mask=in_tile)
        if turns is not None:
            tl.store(leave_U + of_split * R * V + K * V + within, second, mask=in_tile)
        if tile_v == 0:
            tl.store(leave_R + of_split * K + cols_k, loss, mask=has_k)


@triton.jit(do_not_specialize=["T", "num_chunks", "num_splits", "split_chunks"])
def fold_cotangents(
    local_U,  # (B, H, S, R, V) fp32: by each split's own outputs
    local_R,  # (B, H, S, K) fp32
    U_end,  # (B, H, R, V) fp32: of the state that leaves the row, or None for zero
    R_end,  # (B, H, K) fp32, or None
    tops,  # (B, H, N + 1, K) fp32, of scan_states
    logs,  # (B, H, N + 1, K) fp32, of scan_states
    starts,
    enter_U,  # (B, H, S, R, V) fp32: of the state that leaves each split, or None
    enter_R,  # (B, H, S, K) fp32, or None
    U_in,  # (B, H, R, V) fp32: of the state that enters the row
    R_in,  # (B, H, K) fp32
    T,
    H,
    num_chunks,
    num_splits,
    split_chunks,
    K: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The cotangents between splits, from the last one to the first."""
    row_head, cols_k, has_k, within, in_tile, is_first = half_program(K, R, V, BLOCK_K, BLOCK_V)
    row = row_head // H

    loss = tl.zeros([BLOCK_K], dtype=tl.float32)
    state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    if U_end is not None:
        loss = tl.load(R_end + row_head * K + cols_k, mask=has_k, other=0.0)
        state = tl.load(U_end + row_head * R * V + within, mask=in_tile, other=0.0)
    for step in range(num_splits):
        split = num_splits - 1 - step
        at = row_head * num_splits + split
        if enter_U is not None:
            tl.store(enter_U + at * R * V + within, state, mask=in_tile)
            if is_first:
                tl.store(enter_R + at * K + cols_k, loss, mask=has_k)
        begin = split * split_chunks
        end = tl.minimum(begin + split_chunks, num_chunks)
        before = (row_head * (num_chunks + 1) + begin) * K + cols_k
        after = (row_head * (num_chunks + 1) + end) * K + cols_k
        fall = tl.load(tops + before, mask=has_k, other=EMPTY)
        fall -= finite(tl.load(tops + after, mask=has_k, other=EMPTY))
        fall += tl.load(logs + before, mask=has_k, other=0.0) - tl.load(logs + after, mask=has_k, other=0.0)
        share = share_of(fall, 0.0)
        loss *= share
        state *= share[:, None]
        if starts is not None:
            last = tl.minimum(end * CHUNK, T) - 1
            through = tl.load(starts + row * T + last) < begin * CHUNK
            loss = tl.where(through, loss, 0.0)
            state = tl.where(through, state, 0.0)
        state += tl.load(local_U + at * R * V + within, mask=in_tile, other=0.0)
        loss += tl.load(local_R + at * K + cols_k, mask=has_k, other=0.0)
    tl.store(U_in + row_head * R * V + within, state, mask=in_tile)
    if is_first:
        tl.store(R_in + row_head * K + cols_k, loss, mask=has_k)

"""The Triton kernels of LightNet's operator for the keys of a chunk: the gradients of k and v.

References and rounds are those of ``queries.py``, one for each tile of queries behind a tile of keys.
"""

# Triton evaluates the hints of its kernels: their arguments cannot have any but tl.constexpr.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from lightscale.kernels.common.triton.kernels import exists, positions_at, wave
from lightscale.kernels.lightnet.triton.kernels import EMPTY, RISE, origin_of, reads, share_of, token_program


@triton.jit(do_not_specialize=["T", "num_chunks", "num_token_tiles"])
def key_gradients(
    q,  # (B, T, H, K)
    k,  # (B, T, H, K)
    v,  # (B, T, H, V)
    do,  # (B, T, H, V)
    dq,  # (B, T, H, K), contiguous
    turns,
    positions,
    angle_parts,  # (B, H, token tiles, K) fp32: these keys' part of dtheta, or None
    chunk_U,  # (B, H, N, R, V): the cotangent of the state that leaves each chunk
    chunk_R,  # (B, H, N, K) fp32
    starts,
    edges,
    depths,
    dk,  # (B, T, H, K), contiguous
    T,
    H,
    num_chunks,
    num_token_tiles,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_db,
    stride_dt,
    stride_dh,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PARTNERS: tl.constexpr,
    CHUNK: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    AXES: tl.constexpr,
):
    """dk = e^(k - z') (φᵀ(v Uᵀ) - R) + Σ over the chunk's queries, for a tile of keys and some columns of K."""
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    R: tl.constexpr = K if turns is None else 2 * K
    row, head, tile_t, tile_k, chunk, begin, length, first = token_program(
        T, H, num_token_tiles, K_TILES, BLOCK_T, CHUNK
    )
    i = first + tl.arange(0, BLOCK_T)
    inside = i < length
    cols = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    has_k = exists(cols, K, BLOCK_K)
    in_rows = inside[:, None] & has_k[None, :]
    of_chunk = (row * H + head) * num_chunks + chunk
    q_chunk = q + row * stride_qb + head * stride_qh + begin * stride_qt
    k_rows = k + row * stride_kb + head * stride_kh + (begin + i)[:, None] * stride_kt + cols[None, :]
    v_rows = v + row * stride_vb + head * stride_vh + (begin + i)[:, None] * stride_vt
    do_chunk = do + row * stride_db + head * stride_dh + begin * stride_dt
    if turns is not None:
        own_positions = positions_at(positions, row * T + begin + i, i < length, head, H, AXES)[:, None]
        own_turns = tl.load(turns + head * K + cols, mask=has_k, other=0)[None, :]
    of_head = ((row * T + begin) * H + head) * K + cols[None, :]
    own = of_head + i.to(tl.int64)[:, None] * H * K

    grad_x = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.float32)
    grad_y = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.float32)
    for tile in range(V_TILES):
        cols_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        has_v = exists(cols_v, V, BLOCK_V)
        values = tl.load(v_rows + cols_v[None, :], mask=inside[:, None] & has_v[None, :], other=0.0).to(COMPUTE)
        of_state = chunk_U + of_chunk * R * V + cols[None, :] * V + cols_v[:, None]
        state = tl.load(of_state, mask=has_k[None, :] & has_v[:, None], other=0.0)
        grad_x = tl.dot(values, state, grad_x, input_precision=PRECISION)
        if turns is not None:
            state = tl.load(of_state + K * V, mask=has_k[None, :] & has_v[:, None], other=0.0)
            grad_y = tl.dot(values, state, grad_y, input_precision=PRECISION)
    if turns is not None:
        if angle_parts is not None:
            # The derivative of half h is half h - 1.
            turning = grad_x * wave(own_positions, own_turns, -1) + grad_y * wave(own_positions, own_turns, 0)
        grad_x *= wave(own_positions, own_turns, 0)
        grad_x += grad_y * wave(own_positions, own_turns, 1)
    grad_x -= tl.load(chunk_R + of_chunk * K + cols, mask=has_k, other=0.0)[None, :]
    base = tl.load(edges + of_chunk * 3 * K + cols, mask=has_k, other=0.0)
    leave = tl.load(edges + (of_chunk * 3 + 2) * K + cols, mask=has_k, other=0.0)
    keys = tl.load(k_rows, mask=in_rows, other=EMPTY).to(tl.float32) - base[None, :]
    outgoing = keys > EMPTY
    if starts is not None:
        last_start = (tl.load(starts + row * T + begin + length - 1) - begin).to(tl.int32)
        outgoing = outgoing & (i >= last_start)[:, None]
    share = share_of(keys, leave[None, :])
    acc = tl.where(outgoing, grad_x * share, 0.0)
    if angle_parts is not None:
        acc_turning = tl.where(outgoing, turning * share, 0.0)

    for partner in range(first, length, PARTNERS):
        j = partner + tl.arange(0, PARTNERS)
        pairs = (j[None, :] >= i[:, None]) & (j < length)[None, :]
        if starts is not None:
            start = (tl.load(starts + row * T + begin + j, mask=j < length, other=0) - begin).to(tl.int32)
            pairs = pairs & (start[None, :] <= i[:, None])
        dscores = tl.zeros([BLOCK_T, PARTNERS], dtype=tl.float32)
        for tile in range(V_TILES):
            cols_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
            has_v = exists(cols_v, V, BLOCK_V)
            values = tl.load(v_rows + cols_v[None, :], mask=inside[:, None] & has_v[None, :], other=0.0).to(COMPUTE)
            do_columns = do_chunk + j.to(tl.int64)[None, :] * stride_dt + cols_v[:, None]
            do_tile = tl.load(do_columns, mask=(j < length)[None, :] & has_v[:, None], other=0.0).to(COMPUTE)
            dscores = tl.dot(values, do_tile, dscores, input_precision=PRECISION)
        dscores = tl.where(pairs, dscores, 0.0).to(COMPUTE)

        in_partner = (j < length)[:, None] & has_k[None, :]
        at_partner = of_head + j.to(tl.int64)[:, None] * H * K
        reference = tl.max(tl.load(depths + at_partner, mask=in_partner, other=EMPTY), 0)
        more = tl.max(reference, 0) > EMPTY
        while more:
            origin = origin_of(reference)[None, :]
            depth = tl.load(depths + at_partner, mask=in_partner, other=EMPTY)
            q_rows = q_chunk + j.to(tl.int64)[:, None] * stride_qt + cols[None, :]
            query = tl.load(q_rows, mask=in_partner, other=0.0).to(tl.float32) * reads(depth, origin)
            reference = tl.max(tl.where(depth < origin - RISE, depth, EMPTY), 0)
            more = tl.max(reference, 0) > EMPTY
            losses = query * tl.load(dq + at_partner, mask=in_partner, other=0.0).to(tl.float32)
            # Finite, so that a factor of 0 drops another document's values. NaN fails the comparison; some versions of
            # Triton pass it on in a maximum.
            losses = tl.where(losses > -1e37, losses, -1e37)
            losses = tl.where(losses < 1e37, losses, 1e37)
            if turns is None:
                grad_x = tl.dot(dscores, query.to(COMPUTE), input_precision=PRECISION)
            else:
                token_positions = positions_at(positions, row * T + begin + j, j < length, head, H, AXES)[:, None]
                x = wave(token_positions, own_turns, 0)
                grad_x = tl.dot(dscores, (query * x).to(COMPUTE), input_precision=PRECISION)
                if angle_parts is not None:
                    turning = grad_x * wave(own_positions, own_turns, -1)
                grad_x *= wave(own_positions, own_turns, 0)
                y = wave(token_positions, own_turns, 1)
                grad_y = tl.dot(dscores, (query * y).to(COMPUTE), input_precision=PRECISION)
                if angle_parts is not None:
                    turning += grad_y * wave(own_positions, own_turns, 0)
                grad_x += grad_y * wave(own_positions, own_turns, 1)
            grad_x -= tl.dot(pairs.to(COMPUTE), losses.to(COMPUTE), input_precision=PRECISION)
            own_keys = tl.load(k_rows, mask=in_rows, other=EMPTY).to(tl.float32) - base[None, :]
            own_share = tl.exp(tl.minimum(own_keys - origin, 0.0))
            acc += grad_x * own_share
            if angle_parts is not None:
                acc_turning += turning * own_share
    if angle_parts is not None:
        of_tile = angle_parts + ((row * H + head) * num_token_tiles + tile_t) * K + cols
        tl.store(of_tile, tl.sum(acc_turning * own_positions.to(tl.float32), 0), mask=has_k)
    tl.store(dk + own, acc.to(dk.dtype.element_ty), mask=in_rows)


@triton.jit(do_not_specialize=["T", "num_chunks", "num_token_tiles"])
def value_gradients(
    q,  # (B, T, H, K)
    k,  # (B, T, H, K)
    do,  # (B, T, H, V)
    turns,
    positions,
    chunk_U,  # (B, H, N, R, V): the cotangent of the state that leaves each chunk
    starts,
    edges,
    depths,
    dv,  # (B, T, H, V), contiguous
    T,
    H,
    num_chunks,
    num_token_tiles,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_db,
    stride_dt,
    stride_dh,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PARTNERS: tl.constexpr,
    CHUNK: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    AXES: tl.constexpr,
):
    """dv = φ(e^(k - z')) U + Σ over the chunk's queries, for a tile of keys and some columns of V."""
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    R: tl.constexpr = K if turns is None else 2 * K
    row, head, _, tile_v, chunk, begin, length, first = token_program(T, H, num_token_tiles, V_TILES, BLOCK_T, CHUNK)
    i = first + tl.arange(0, BLOCK_T)
    inside = i < length
    cols_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    has_v = exists(cols_v, V, BLOCK_V)[None, :]
    of_chunk = (row * H + head) * num_chunks + chunk
    q_chunk = q + row * stride_qb + head * stride_qh + begin * stride_qt
    k_rows = k + row * stride_kb + head * stride_kh + (begin + i)[:, None] * stride_kt
    do_chunk = do + row * stride_db + head * stride_dh + begin * stride_dt
    depth_chunk = depths + ((row * T + begin) * H + head) * K

    acc = tl.zeros([BLOCK_T, BLOCK_V], dtype=tl.float32)
    for tile in range(K_TILES):
        cols = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        has_k = exists(cols, K, BLOCK_K)
        in_rows = inside[:, None] & has_k[None, :]
        base = tl.load(edges + of_chunk * 3 * K + cols, mask=has_k, other=0.0)
        leave = tl.load(edges + (of_chunk * 3 + 2) * K + cols, mask=has_k, other=0.0)
        keys = tl.load(k_rows + cols[None, :], mask=in_rows, other=EMPTY).to(tl.float32) - base[None, :]
        writes = share_of(keys, leave[None, :])
        of_state = chunk_U + of_chunk * R * V + cols[:, None] * V + cols_v[None, :]
        state = tl.load(of_state, mask=has_k[:, None] & has_v, other=0.0)
        if turns is None:
            acc = tl.dot(writes.to(COMPUTE), state, acc, input_precision=PRECISION)
        else:
            own_positions = positions_at(positions, row * T + begin + i, i < length, head, H, AXES)[:, None]
            own_turns = tl.load(turns + head * K + cols, mask=has_k, other=0)[None, :]
            x = wave(own_positions, own_turns, 0)
            acc = tl.dot((writes * x).to(COMPUTE), state, acc, input_precision=PRECISION)
            y = wave(own_positions, own_turns, 1)
            state = tl.load(of_state + K * V, mask=has_k[:, None] & has_v, other=0.0)
            acc = tl.dot((writes * y).to(COMPUTE), state, acc, input_precision=PRECISION)
    if starts is not None:
        last_start = (tl.load(starts + row * T + begin + length - 1) - begin).to(tl.int32)
        acc = tl.where((i >= last_start)[:, None], acc, 0.0)

    for partner in range(first, length, PARTNERS):
        j = partner + tl.arange(0, PARTNERS)
        pairs = (j[None, :] >= i[:, None]) & (j < length)[None, :]
        if starts is not None:
            start = (tl.load(starts + row * T + begin + j, mask=j < length, other=0) - begin).to(tl.int32)
            pairs = pairs & (start[None, :] <= i[:, None])
        scores = tl.zeros([BLOCK_T, PARTNERS], dtype=tl.float32)
        for tile in range(K_TILES):
            cols = tile * BLOCK_K + tl.arange(0, BLOCK_K)
            has_k = exists(cols, K, BLOCK_K)
            in_rows = inside[:, None] & has_k[None, :]
            in_columns = (j < length)[None, :] & has_k[:, None]
            q_columns = q_chunk + j.to(tl.int64)[None, :] * stride_qt + cols[:, None]
            of_depth = depth_chunk + j.to(tl.int64)[None, :] * H * K + cols[:, None]
            base = tl.load(edges + of_chunk * 3 * K + cols, mask=has_k, other=0.0)
            reference = tl.max(tl.load(of_depth, mask=in_columns, other=EMPTY), 1)
            more = tl.max(reference, 0) > EMPTY
            while more:
                origin = origin_of(reference)
                depth = tl.load(of_depth, mask=in_columns, other=EMPTY)
                query = tl.load(q_columns, mask=in_columns, other=0.0).to(tl.float32)
                query *= reads(depth, origin[:, None])
                reference = tl.max(tl.where(depth < origin[:, None] - RISE, depth, EMPTY), 1)
                more = tl.max(reference, 0) > EMPTY
                keys = tl.load(k_rows + cols[None, :], mask=in_rows, other=EMPTY).to(tl.float32)
                writes = tl.exp(tl.minimum(keys - base[None, :] - origin[None, :], 0.0))
                if turns is None:
                    scores = tl.dot(writes.to(COMPUTE), query.to(COMPUTE), scores, input_precision=PRECISION)
                else:
                    key_positions = positions_at(positions, row * T + begin + i, i < length, head, H, AXES)[:, None]
                    key_turns = tl.load(turns + head * K + cols, mask=has_k, other=0)[None, :]
                    query_positions = positions_at(positions, row * T + begin + j, j < length, head, H, AXES)[None, :]
                    query_turns = tl.load(turns + head * K + cols, mask=has_k, other=0)[:, None]
                    write = (writes * wave(key_positions, key_turns, 0)).to(COMPUTE)
                    read = (query * wave(query_positions, query_turns, 0)).to(COMPUTE)
                    scores = tl.dot(write, read, scores, input_precision=PRECISION)
                    write = (writes * wave(key_positions, key_turns, 1)).to(COMPUTE)
                    read = (query * wave(query_positions, query_turns, 1)).to(COMPUTE)
                    scores = tl.dot(write, read, scores, input_precision=PRECISION)
        scores = tl.where(pairs, scores, 0.0)
        do_rows = do_chunk + j.to(tl.int64)[:, None] * stride_dt + cols_v[None, :]
        do_tile = tl.load(do_rows, mask=(j < length)[:, None] & has_v, other=0.0).to(COMPUTE)
        acc = tl.dot(scores.to(COMPUTE), do_tile, acc, input_precision=PRECISION)

    at = ((row * T + begin + i[:, None]) * H + head) * V + cols_v[None, :]
    tl.store(dv + at, acc.to(dv.dtype.element_ty), mask=inside[:, None] & has_v)

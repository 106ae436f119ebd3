"""The Triton kernels of LightNet's operator for the queries of a chunk: outputs, and the gradient of q.

Each program computes a tile of tokens. A pair's weight e^(k_s - z_t) is e^(k_s - r) e^(r - z_t), with a reference r per
channel for the queries of a tile: their largest z. Queries whose z lies too deep below r are computed in further
rounds, each with their largest z as its reference. Usually one round suffices. Names of shapes, ``starts``, ``edges``
and ``depths`` are those of ``kernels.py``.
"""

# Triton evaluates the hints of its kernels: their arguments cannot have any but tl.constexpr.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from lightscale.kernels.common.triton.kernels import exists, positions_at, wave
from lightscale.kernels.lightnet.triton.kernels import EMPTY, RISE, origin_of, reads, share_of, token_program


@triton.jit(do_not_specialize=["T", "num_chunks", "num_token_tiles"])
def outputs(
    q,  # (B, T, H, K)
    k,  # (B, T, H, K)
    v,  # (B, T, H, V)
    turns,
    positions,
    states,  # (B, H, N, R, V): the state that enters each chunk
    starts,
    edges,
    depths,
    out,  # (B, T, H, V), contiguous
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
    """o = φ(q e^(z_in - z)) S + Σ over the chunk's tokens, for a tile of queries and some columns of V."""
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    R: tl.constexpr = K if turns is None else 2 * K
    row, head, _, tile_v, chunk, begin, length, first = token_program(T, H, num_token_tiles, V_TILES, BLOCK_T, CHUNK)
    i = first + tl.arange(0, BLOCK_T)
    inside = i < length
    cols_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    has_v = exists(cols_v, V, BLOCK_V)[None, :]
    of_chunk = (row * H + head) * num_chunks + chunk
    q_rows = q + row * stride_qb + head * stride_qh + (begin + i)[:, None] * stride_qt
    k_chunk = k + row * stride_kb + head * stride_kh + begin * stride_kt
    v_chunk = v + row * stride_vb + head * stride_vh + begin * stride_vt
    depth_rows = depths + ((row * T + begin + i) * H + head)[:, None] * K
    own_start = tl.full([BLOCK_T], -1, tl.int32)
    if starts is not None:
        own_start = (tl.load(starts + row * T + begin + i, mask=inside, other=-1) - begin).to(tl.int32)

    acc = tl.zeros([BLOCK_T, BLOCK_V], dtype=tl.float32)
    for tile in range(K_TILES):
        cols = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        has_k = exists(cols, K, BLOCK_K)
        in_rows = inside[:, None] & has_k[None, :]
        enter = tl.load(edges + (of_chunk * 3 + 1) * K + cols, mask=has_k, other=EMPTY)
        depth = tl.load(depth_rows + cols[None, :], mask=in_rows, other=0.0)
        query = tl.load(q_rows + cols[None, :], mask=in_rows, other=0.0).to(tl.float32)
        query *= share_of(enter[None, :], depth)
        of_state = states + of_chunk * R * V + cols[:, None] * V + cols_v[None, :]
        state = tl.load(of_state, mask=has_k[:, None] & has_v, other=0.0)
        if turns is None:
            acc = tl.dot(query.to(COMPUTE), state, acc, input_precision=PRECISION)
        else:
            own_positions = positions_at(positions, row * T + begin + i, i < length, head, H, AXES)[:, None]
            own_turns = tl.load(turns + head * K + cols, mask=has_k, other=0)[None, :]
            x = wave(own_positions, own_turns, 0)
            acc = tl.dot((query * x).to(COMPUTE), state, acc, input_precision=PRECISION)
            y = wave(own_positions, own_turns, 1)
            state = tl.load(of_state + K * V, mask=has_k[:, None] & has_v, other=0.0)
            acc = tl.dot((query * y).to(COMPUTE), state, acc, input_precision=PRECISION)
    if starts is not None:
        acc = tl.where((own_start < 0)[:, None], acc, 0.0)

    for partner in range(0, tl.minimum(first + BLOCK_T, length), PARTNERS):
        j = partner + tl.arange(0, PARTNERS)
        scores = tl.zeros([BLOCK_T, PARTNERS], dtype=tl.float32)
        for tile in range(K_TILES):
            cols = tile * BLOCK_K + tl.arange(0, BLOCK_K)
            has_k = exists(cols, K, BLOCK_K)
            in_rows = inside[:, None] & has_k[None, :]
            in_columns = (j < length)[None, :] & has_k[:, None]
            k_columns = k_chunk + j.to(tl.int64)[None, :] * stride_kt + cols[:, None]
            base = tl.load(edges + of_chunk * 3 * K + cols, mask=has_k, other=0.0)
            reference = tl.max(tl.load(depth_rows + cols[None, :], mask=in_rows, other=EMPTY), 0)
            more = tl.max(reference, 0) > EMPTY
            while more:
                origin = origin_of(reference)
                depth = tl.load(depth_rows + cols[None, :], mask=in_rows, other=EMPTY)
                query = tl.load(q_rows + cols[None, :], mask=in_rows, other=0.0).to(tl.float32)
                query *= reads(depth, origin[None, :])
                reference = tl.max(tl.where(depth < origin[None, :] - RISE, depth, EMPTY), 0)
                more = tl.max(reference, 0) > EMPTY
                keys = tl.load(k_columns, mask=in_columns, other=EMPTY).to(tl.float32)
                writes = tl.exp(tl.minimum(keys - base[:, None] - origin[:, None], 0.0))
                if turns is None:
                    scores = tl.dot(query.to(COMPUTE), writes.to(COMPUTE), scores, input_precision=PRECISION)
                else:
                    query_positions = positions_at(positions, row * T + begin + i, i < length, head, H, AXES)[:, None]
                    query_turns = tl.load(turns + head * K + cols, mask=has_k, other=0)[None, :]
                    key_positions = positions_at(positions, row * T + begin + j, j < length, head, H, AXES)[None, :]
                    key_turns = tl.load(turns + head * K + cols, mask=has_k, other=0)[:, None]
                    read = (query * wave(query_positions, query_turns, 0)).to(COMPUTE)
                    write = (writes * wave(key_positions, key_turns, 0)).to(COMPUTE)
                    scores = tl.dot(read, write, scores, input_precision=PRECISION)
                    read = (query * wave(query_positions, query_turns, 1)).to(COMPUTE)
                    write = (writes * wave(key_positions, key_turns, 1)).to(COMPUTE)
                    scores = tl.dot(read, write, scores, input_precision=PRECISION)
        pairs = (i[:, None] >= j[None, :]) & (own_start[:, None] <= j[None, :])
        scores = tl.where(pairs, scores, 0.0)
        v_rows = v_chunk + j.to(tl.int64)[:, None] * stride_vt + cols_v[None, :]
        values = tl.load(v_rows, mask=(j < length)[:, None] & has_v, other=0.0).to(COMPUTE)
        acc = tl.dot(scores.to(COMPUTE), values, acc, input_precision=PRECISION)

    at = ((row * T + begin + i[:, None]) * H + head) * V + cols_v[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside[:, None] & has_v)


@triton.jit(do_not_specialize=["T", "num_chunks", "num_token_tiles"])
def query_gradients(
    k,  # (B, T, H, K)
    v,  # (B, T, H, V)
    do,  # (B, T, H, V)
    turns,
    positions,
    q,  # (B, T, H, K), or None
    angle_parts,  # (B, H, token tiles, K) fp32: these queries' part of dtheta, or None
    states,  # (B, H, N, R, V): the state that enters each chunk
    starts,
    edges,
    depths,
    dq,  # (B, T, H, K), contiguous
    T,
    H,
    num_chunks,
    num_token_tiles,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_db,
    stride_dt,
    stride_dh,
    stride_qb,
    stride_qt,
    stride_qh,
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
    """dq = e^(z_in - z) φᵀ(do Sᵀ) + Σ over the chunk's tokens, for a tile of queries and some columns of K."""
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
    k_chunk = k + row * stride_kb + head * stride_kh + begin * stride_kt
    v_chunk = v + row * stride_vb + head * stride_vh + begin * stride_vt
    do_rows = do + row * stride_db + head * stride_dh + (begin + i)[:, None] * stride_dt
    if turns is not None:
        own_positions = positions_at(positions, row * T + begin + i, i < length, head, H, AXES)[:, None]
        own_turns = tl.load(turns + head * K + cols, mask=has_k, other=0)[None, :]
    own = ((row * T + begin + i) * H + head)[:, None] * K + cols[None, :]
    own_start = tl.full([BLOCK_T], -1, tl.int32)
    if starts is not None:
        own_start = (tl.load(starts + row * T + begin + i, mask=inside, other=-1) - begin).to(tl.int32)

    grad_x = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.float32)
    grad_y = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.float32)
    for tile in range(V_TILES):
        cols_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        has_v = exists(cols_v, V, BLOCK_V)
        do_tile = tl.load(do_rows + cols_v[None, :], mask=inside[:, None] & has_v[None, :], other=0.0).to(COMPUTE)
        of_state = states + of_chunk * R * V + cols[None, :] * V + cols_v[:, None]
        state = tl.load(of_state, mask=has_k[None, :] & has_v[:, None], other=0.0)
        grad_x = tl.dot(do_tile, state, grad_x, input_precision=PRECISION)
        if turns is not None:
            state = tl.load(of_state + K * V, mask=has_k[None, :] & has_v[:, None], other=0.0)
            grad_y = tl.dot(do_tile, state, grad_y, input_precision=PRECISION)
    if turns is not None:
        if angle_parts is not None:
            # The derivative of half h is half h - 1.
            turning = grad_x * wave(own_positions, own_turns, -1) + grad_y * wave(own_positions, own_turns, 0)
        grad_x *= wave(own_positions, own_turns, 0)
        grad_x += grad_y * wave(own_positions, own_turns, 1)
    enter = tl.load(edges + (of_chunk * 3 + 1) * K + cols, mask=has_k, other=EMPTY)
    depth = tl.load(depths + own, mask=in_rows, other=0.0)
    # An empty entering state may hold any value.
    entered = (own_start < 0)[:, None] & (enter > EMPTY)[None, :]
    share = share_of(enter[None, :], depth)
    acc = tl.where(entered, grad_x * share, 0.0)
    if angle_parts is not None:
        acc_turning = tl.where(entered, turning * share, 0.0)

    base = tl.load(edges + of_chunk * 3 * K + cols, mask=has_k, other=0.0)
    reference = tl.max(tl.load(depths + own, mask=in_rows, other=EMPTY), 0)
    more = tl.max(reference, 0) > EMPTY
    while more:
        origin = origin_of(reference)[None, :]
        grad_x = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.float32)
        grad_y = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.float32)
        for partner in range(0, tl.minimum(first + BLOCK_T, length), PARTNERS):
            j = partner + tl.arange(0, PARTNERS)
            dscores = tl.zeros([BLOCK_T, PARTNERS], dtype=tl.float32)
            for tile in range(V_TILES):
                cols_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
                has_v = exists(cols_v, V, BLOCK_V)
                in_do = inside[:, None] & has_v[None, :]
                do_tile = tl.load(do_rows + cols_v[None, :], mask=in_do, other=0.0).to(COMPUTE)
                v_columns = v_chunk + j.to(tl.int64)[None, :] * stride_vt + cols_v[:, None]
                values = tl.load(v_columns, mask=(j < length)[None, :] & has_v[:, None], other=0.0).to(COMPUTE)
                dscores = tl.dot(do_tile, values, dscores, input_precision=PRECISION)
            pairs = (i[:, None] >= j[None, :]) & (own_start[:, None] <= j[None, :])
            dscores = tl.where(pairs, dscores, 0.0).to(COMPUTE)
            in_partner = (j < length)[:, None] & has_k[None, :]
            k_rows = k_chunk + j.to(tl.int64)[:, None] * stride_kt + cols[None, :]
            keys = tl.load(k_rows, mask=in_partner, other=EMPTY).to(tl.float32)
            writes = tl.exp(tl.minimum(keys - base[None, :] - origin, 0.0))
            if turns is None:
                grad_x = tl.dot(dscores, writes.to(COMPUTE), grad_x, input_precision=PRECISION)
            else:
                token_positions = positions_at(positions, row * T + begin + j, j < length, head, H, AXES)[:, None]
                x = wave(token_positions, own_turns, 0)
                grad_x = tl.dot(dscores, (writes * x).to(COMPUTE), grad_x, input_precision=PRECISION)
                y = wave(token_positions, own_turns, 1)
                grad_y = tl.dot(dscores, (writes * y).to(COMPUTE), grad_y, input_precision=PRECISION)
        if turns is not None:
            if angle_parts is not None:
                turning = grad_x * wave(own_positions, own_turns, -1) + grad_y * wave(own_positions, own_turns, 0)
            grad_x *= wave(own_positions, own_turns, 0)
            grad_x += grad_y * wave(own_positions, own_turns, 1)
        depth = tl.load(depths + own, mask=in_rows, other=EMPTY)
        held = reads(depth, origin)
        acc += tl.where(held > 0.0, grad_x * held, 0.0)
        if angle_parts is not None:
            acc_turning += tl.where(held > 0.0, turning * held, 0.0)
        reference = tl.max(tl.where(depth < origin - RISE, depth, EMPTY), 0)
        more = tl.max(reference, 0) > EMPTY
    if angle_parts is not None:
        q_rows = q + row * stride_qb + head * stride_qh + (begin + i)[:, None] * stride_qt
        acc_turning *= tl.load(q_rows + cols[None, :], mask=in_rows, other=0.0).to(tl.float32)
        of_tile = angle_parts + ((row * H + head) * num_token_tiles + tile_t) * K + cols
        tl.store(of_tile, tl.sum(acc_turning * own_positions.to(tl.float32), 0), mask=has_k)
    tl.store(dq + own, acc.to(dq.dtype.element_ty), mask=in_rows)

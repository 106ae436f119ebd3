"""The Triton kernels of the delta rule that scan a row: outputs with the states, and in reverse their cotangents.

A row is cut into chunks of CHUNK tokens; a split is some whole chunks that one program scans in order. The program
holds all rows and some columns of a head's state; columns are independent. S splits; other names are those of
``pairs.py``.

Keys and queries are ``k_in``, ``k_out`` and ``q_in``, times the decay to or from the edge of their chunk. With ``upto``
and ``after`` they are plain, and the decays of a head are factors of tokens.
"""

import triton
import triton.language as tl

from lightscale.kernels.common.triton.kernels import exists, last_start, own_starts, scan_program


@triton.jit
def _passed(state, through, of_chunk, rows, has_k, K: tl.constexpr, OF_HEADS: tl.constexpr):
    """The part of the state that passes through a chunk."""
    if OF_HEADS:
        decay = tl.load(through + of_chunk + 0 * rows)
    else:
        decay = tl.load(through + of_chunk * K + rows, mask=has_k, other=0.0)
    # Selected: the state of another document may be Inf.
    return tl.where((decay == 0.0)[:, None], 0.0, state * decay[:, None])


@triton.jit(do_not_specialize=["T", "num_chunks", "num_splits", "split_chunks"])
def scan_forward(
    q_in,  # (B, T, H, K), or None
    k_in,  # (B, T, H, K)
    k_out,  # (B, T, H, K), strides of k_in
    v,  # (B, T, N, V), or None for zeros and the identity as the state that enters
    beta,  # (B, N, T) fp32
    upto,  # (B, N, T) fp32, or None
    after,  # (B, N, T) fp32, or None
    through,  # (B, N, X) fp32, or (B, N, X, K) without ``upto``
    corrections,  # (B, N, X, C, C)
    scores,  # (B, N, X, C, C), or None
    starts,  # (B, T), or None
    entering,  # (B, N, S, K, V) fp32: the state that enters each split, or None
    leaving,  # (B, N, S, K, V) fp32: the state that leaves each split, or None
    chunk_states,  # (B, N, X, K, V): the state that enters each chunk, or None
    z,  # (B, T, N, V), contiguous: the write before the factor β, or None
    o,  # (B, T, N, V), contiguous, or None
    T,
    N,
    num_chunks,
    num_splits,
    split_chunks,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    GROUPS: tl.constexpr,  # N / H
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    STORED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scan a split's chunks: y = v - k_in S, z = y - H (β y), u = β z; o = q_in S + P u;
    S <- through S + k_outᵀ u."""
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    OF_HEADS: tl.constexpr = upto is not None
    row, head, split, _, tile_v = scan_program(N, num_splits, 1, V_TILES)
    rows, cols = tl.arange(0, BLOCK_K), tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    has_k, has_v = exists(rows, K, BLOCK_K), exists(cols, V, BLOCK_V)
    in_tile = has_k[:, None] & has_v[None, :]
    within = rows[:, None] * V + cols[None, :]
    row_head = row * N + head
    of_split = (row_head * num_splits + split) * K * V
    key_head = row * stride_kb + head // GROUPS * stride_kh
    i = tl.arange(0, CHUNK)

    state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    if v is None:
        state += tl.where(rows[:, None] == cols[None, :], 1.0, 0.0)
    if entering is not None:
        state = tl.load(entering + of_split + within, mask=in_tile, other=0.0)
    first_chunk = split * split_chunks
    num_steps = tl.minimum(first_chunk + split_chunks, num_chunks) - first_chunk
    for step in range(num_steps):
        chunk = first_chunk + step
        begin = chunk * CHUNK
        length = tl.minimum(CHUNK, T - begin).to(tl.int32)
        inside = i < length
        of_chunk = row_head * num_chunks + chunk
        of_tokens = row_head * T + begin + i
        k_chunk = key_head + begin * stride_kt
        in_keys, in_values = inside[:, None] & has_k[None, :], inside[:, None] & has_v[None, :]
        pairs = of_chunk * CHUNK * CHUNK + (i[:, None] * CHUNK + i[None, :])
        values = ((row * T + begin) * N + head) * V + (i[:, None] * (N * V) + cols[None, :])
        sees = (own_starts(starts, row * T, begin, i, length) < 0)[:, None]
        weights = tl.load(beta + of_tokens, mask=inside, other=0.0)[:, None]
        if chunk_states is not None:
            rounded = state.to(chunk_states.dtype.element_ty)
            tl.store(chunk_states + of_chunk * K * V + within, rounded, mask=in_tile)

        # In the dtype that dots read.
        entered = state.to(STORED)
        keys = tl.load(k_in + k_chunk + (i[:, None] * stride_kt + rows[None, :]), mask=in_keys, other=0.0)
        y = -tl.dot(keys.to(STORED), entered, input_precision=PRECISION)
        if o is not None:
            q_chunk = q_in + row * stride_qb + head // GROUPS * stride_qh + begin * stride_qt
            queries = tl.load(q_chunk + (i[:, None] * stride_qt + rows[None, :]), mask=in_keys, other=0.0)
            read = tl.dot(queries.to(STORED), entered, input_precision=PRECISION)
        if OF_HEADS:
            from_start = tl.load(upto + of_tokens, mask=inside, other=0.0)[:, None]
            y *= from_start
            if o is not None:
                read *= from_start
        if starts is not None:
            # Selected: the entering state may have overflowed in another document.
            y = tl.where(sees, y, 0.0)
            if o is not None:
                read = tl.where(sees, read, 0.0)
        if v is not None:
            v_chunk = v + row * stride_vb + head * stride_vh + begin * stride_vt
            y += tl.load(v_chunk + (i[:, None] * stride_vt + cols[None, :]), mask=in_values, other=0.0).to(tl.float32)
        of_pairs = tl.load(corrections + pairs)
        y -= tl.dot(of_pairs, (weights * y).to(of_pairs.dtype), input_precision=PRECISION)
        if z is not None:
            tl.store(z + values, y.to(z.dtype.element_ty), mask=in_values)
        written = weights * y

        if o is not None:
            of_pairs = tl.load(scores + pairs)
            read = tl.dot(of_pairs, written.to(of_pairs.dtype), read, input_precision=PRECISION)
            tl.store(o + values, read.to(o.dtype.element_ty), mask=in_values)

        if OF_HEADS:
            written *= tl.load(after + of_tokens, mask=inside, other=0.0)[:, None]
        if starts is not None:
            written = tl.where((i >= last_start(starts, row * T, begin, length))[:, None], written, 0.0)
        state = _passed(state, through, of_chunk, rows, has_k, K, OF_HEADS)
        columns = k_out + k_chunk + (i[None, :] * stride_kt + rows[:, None])
        keys = tl.load(columns, mask=has_k[:, None] & inside[None, :], other=0.0)
        state = tl.dot(keys, written.to(keys.dtype), state, input_precision=PRECISION)

    if leaving is not None:
        tl.store(leaving + of_split + within, state, mask=in_tile)


@triton.jit(do_not_specialize=["T", "num_chunks", "num_splits", "split_chunks", "num_tokens"])
def scan_back(
    q_in,  # (B, T, H, K)
    k_in,  # (B, T, H, K)
    k_out,  # (B, T, H, K), strides of k_in
    do,  # (B, T, N, V): cotangents of the outputs
    beta,  # (B, N, T) fp32
    upto,  # (B, N, T) fp32, or None
    after,  # (B, N, T) fp32, or None
    through,  # (B, N, X) fp32, or (B, N, X, K) without ``upto``
    corrections,  # (B, N, X, C, C)
    scores,  # (B, N, X, C, C)
    starts,  # (B, T), or None
    z,  # (B, T, N, V), contiguous, of ``scan_forward``; or None
    entering,  # (B, N, S, K, V) fp32: the cotangent of the state that leaves each split, or None for zero
    leaving,  # (B, N, S, K, V) fp32: the cotangent of the state that enters each split, or None
    chunk_states,  # (B, N, X, K, V): the cotangent of the state that leaves each chunk, or None
    dv,  # (B, T, N, V), contiguous, or None
    dbeta,  # (V tiles, B, N, T) fp32: the part of these columns; or None
    T,
    N,
    num_chunks,
    num_splits,
    split_chunks,
    num_tokens,  # B N T
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_ob,
    stride_ot,
    stride_oh,
    GROUPS: tl.constexpr,  # N / H
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    STORED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scan a split's chunks backward: du = Pᵀ do + k_out dS, r = du - Hᵀ (β du), dv = β r, dβ = r · z;
    dS <- through dS + q_inᵀ do - k_inᵀ dv."""
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    OF_HEADS: tl.constexpr = upto is not None
    row, head, split, _, tile_v = scan_program(N, num_splits, 1, V_TILES)
    rows, cols = tl.arange(0, BLOCK_K), tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    has_k, has_v = exists(rows, K, BLOCK_K), exists(cols, V, BLOCK_V)
    in_tile = has_k[:, None] & has_v[None, :]
    within = rows[:, None] * V + cols[None, :]
    row_head = row * N + head
    of_split = (row_head * num_splits + split) * K * V
    key_head = row * stride_kb + head // GROUPS * stride_kh
    i = tl.arange(0, CHUNK)

    dstate = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    if entering is not None:
        dstate = tl.load(entering + of_split + within, mask=in_tile, other=0.0)
    first_chunk = split * split_chunks
    split_end = tl.minimum(first_chunk + split_chunks, num_chunks)
    for step in range(split_end - first_chunk):
        chunk = split_end - 1 - step
        begin = chunk * CHUNK
        length = tl.minimum(CHUNK, T - begin).to(tl.int32)
        inside = i < length
        of_chunk = row_head * num_chunks + chunk
        of_tokens = row_head * T + begin + i
        k_chunk = key_head + begin * stride_kt
        in_values = inside[:, None] & has_v[None, :]
        in_columns = has_k[:, None] & inside[None, :]
        # Transposed where they are loaded: no result of a dot is.
        pairs = of_chunk * CHUNK * CHUNK + (i[None, :] * CHUNK + i[:, None])
        values = ((row * T + begin) * N + head) * V + (i[:, None] * (N * V) + cols[None, :])
        weights = tl.load(beta + of_tokens, mask=inside, other=0.0)[:, None]
        if chunk_states is not None:
            rounded = dstate.to(chunk_states.dtype.element_ty)
            tl.store(chunk_states + of_chunk * K * V + within, rounded, mask=in_tile)

        keys = tl.load(
            k_out + k_chunk + (i[:, None] * stride_kt + rows[None, :]),
            mask=inside[:, None] & has_k[None, :],
            other=0.0,
        )
        found = tl.dot(keys.to(STORED), dstate.to(STORED), input_precision=PRECISION)
        if OF_HEADS:
            found *= tl.load(after + of_tokens, mask=inside, other=0.0)[:, None]
        if starts is not None:
            # Selected: the cotangent may have overflowed in another document.
            found = tl.where((i >= last_start(starts, row * T, begin, length))[:, None], found, 0.0)
        do_chunk = do + row * stride_ob + head * stride_oh + begin * stride_ot
        outputs = tl.load(do_chunk + (i[:, None] * stride_ot + cols[None, :]), mask=in_values, other=0.0)
        found = tl.dot(tl.load(scores + pairs), outputs, found, input_precision=PRECISION)
        of_pairs = tl.load(corrections + pairs)
        found -= tl.dot(of_pairs, (weights * found).to(of_pairs.dtype), input_precision=PRECISION)
        if dbeta is not None:
            z_tile = tl.load(z + values, mask=in_values, other=0.0).to(tl.float32)
            tl.store(dbeta + tile_v * num_tokens + of_tokens, tl.sum(found * z_tile, 1), mask=inside)
        found *= weights
        if dv is not None:
            tl.store(dv + values, found.to(dv.dtype.element_ty), mask=in_values)

        read = outputs.to(tl.float32)
        if OF_HEADS:
            from_start = tl.load(upto + of_tokens, mask=inside, other=0.0)[:, None]
            read, found = read * from_start, found * from_start
        if starts is not None:
            sees = (own_starts(starts, row * T, begin, i, length) < 0)[:, None]
            read, found = tl.where(sees, read, 0.0), tl.where(sees, found, 0.0)
        dstate = _passed(dstate, through, of_chunk, rows, has_k, K, OF_HEADS)
        q_chunk = q_in + row * stride_qb + head // GROUPS * stride_qh + begin * stride_qt
        queries = tl.load(q_chunk + (i[None, :] * stride_qt + rows[:, None]), mask=in_columns, other=0.0)
        dstate = tl.dot(queries, read.to(queries.dtype), dstate, input_precision=PRECISION)
        keys = tl.load(k_in + k_chunk + (i[None, :] * stride_kt + rows[:, None]), mask=in_columns, other=0.0)
        dstate = tl.dot(keys, (-found).to(keys.dtype), dstate, input_precision=PRECISION)

    if leaving is not None:
        tl.store(leaving + of_split + within, dstate, mask=in_tile)

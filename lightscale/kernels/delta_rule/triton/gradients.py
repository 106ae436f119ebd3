"""The Triton kernels of the gradients of a chunk's queries, keys and log decays.

Names of shapes and arguments are those of ``pairs.py`` and ``states.py``. With u = β z and dv of the scans,

    dP_ij = do_i · u_j (j <= i)    dA_ij = -dv_i · u_j (j < i)

reach queries and keys through the decays D between tokens: dq_i = Σ dP_ij D_ij k_j. dk has the part of A's reads, Σ
dA_ij D_ij k_j, and the part of both matrices' writes, Σ dP_ij D_ij q_i + Σ dA_ij D_ij k_i. Pairs are held below the
diagonal as (i, j), and once more above it as (j, i): no result of a dot is transposed.
"""

import triton
import triton.language as tl

from lightscale.kernels.common.triton.kernels import chunk_tokens, exists, last_start, own_starts, tile_program
from lightscale.kernels.delta_rule.triton.pairs import decay_between
from lightscale.kernels.gla.triton.decays import add_to_logs, decay_rows, in_second_half, load_logs, product
from lightscale.kernels.gla.triton.gradients import token_products


@triton.jit
def _pairs(
    x_chunk,
    stride_xt,
    z_chunk,
    stride_zt,
    weights,
    own_start,
    inside,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x_i · β_j z_j (C, C) for pairs j <= i of a document; above the diagonal the same pairs with exchanged indices."""
    i = tl.arange(0, CHUNK)
    line, column = i[:, None], i[None, :]
    below = token_products(x_chunk, stride_xt, z_chunk, stride_zt, inside, V, BLOCK_V, CHUNK, PRECISION)
    below = tl.where(own_start[:, None] <= column, below * weights[None, :], 0.0)
    above = token_products(z_chunk, stride_zt, x_chunk, stride_xt, inside, V, BLOCK_V, CHUNK, PRECISION)
    above = tl.where(own_start[None, :] <= line, above * weights[:, None], 0.0)
    return tl.where(line >= column, below, above)


@triton.jit
def _through_states(
    x_rows,
    state,
    inside,
    cols,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x Sᵀ (C, channels) of a chunk's tokens and some key channels of a state."""
    found = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    has_k = exists(cols, K, BLOCK_K)
    for tile in range((V + BLOCK_V - 1) // BLOCK_V):
        cols_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        has_v = exists(cols_v, V, BLOCK_V)
        in_state = has_v[:, None] & has_k[None, :]
        part = tl.load(state + cols[None, :] * V + cols_v[:, None], mask=in_state, other=0.0)
        x_tile = tl.load(x_rows + cols_v[None, :], mask=inside[:, None] & has_v[None, :], other=0.0)
        found = tl.dot(x_tile.to(part.dtype), part, found, input_precision=PRECISION)
    return found


@triton.jit
def _passing(state, dstate, cols, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Σ_V S ⊙ dS of some key channels."""
    found = tl.zeros([BLOCK_K], dtype=tl.float32)
    has_k = exists(cols, K, BLOCK_K)
    for tile in range((V + BLOCK_V - 1) // BLOCK_V):
        cols_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        mask = has_k[:, None] & exists(cols_v, V, BLOCK_V)[None, :]
        at = cols[:, None] * V + cols_v[None, :]
        part = tl.load(state + at, mask=mask, other=0.0).to(tl.float32)
        found += tl.sum(part * tl.load(dstate + at, mask=mask, other=0.0).to(tl.float32), 1)
    return found


@triton.jit(do_not_specialize=["T", "num_chunks", "num_tokens"])
def gradients_heads(
    q,  # (B, T, H, K)
    k,  # (B, T, H, K)
    log_decay,  # (B, N, T) fp32, or None
    beta,  # (B, N, T) fp32
    upto,  # (B, N, T) fp32
    after,  # (B, N, T) fp32
    through,  # (B, N, X) fp32
    starts,  # (B, T), or None
    do,  # (B, T, N, V)
    dv,  # (B, T, N, V), contiguous
    z,  # (B, T, N, V), contiguous
    states,  # (B, N, X, K, V): the state that enters each chunk
    dstates,  # (B, N, X, K, V): the cotangent of the state that leaves each chunk
    dq,  # (B, T, N, K), contiguous
    dk,  # (B, T, N, K), contiguous
    dlog_decay,  # (K tiles, B, N, T) fp32: the part of these channels; or None
    T,
    N,
    num_chunks,
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
    PRECISION: tl.constexpr,
):
    """dq, dk and dlog_decay of a chunk and some key channels, with a decay of each head or none."""
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    row, head, chunk, tile_k = tile_program(N, num_chunks, K_TILES)
    cols = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    begin, length, i, inside = chunk_tokens(chunk, T, CHUNK)
    line, column = i[:, None], i[None, :]
    of_tokens = (row * N + head) * T + begin + i
    of_chunk = (row * N + head) * num_chunks + chunk
    has_k = exists(cols, K, BLOCK_K)
    mask, mask_columns = inside[:, None] & has_k[None, :], has_k[:, None] & inside[None, :]
    do_chunk = do + row * stride_ob + head * stride_oh + begin * stride_ot
    of_values = ((row * T + begin) * N + head) * V
    stride_vt = N * V
    dv_chunk, z_chunk = dv + of_values, z + of_values
    own_start = own_starts(starts, row * T, begin, i, length)
    weights = tl.load(beta + of_tokens, mask=inside, other=0.0)
    q_chunk = q + row * stride_qb + head // GROUPS * stride_qh + begin * stride_qt
    k_chunk = k + row * stride_kb + head // GROUPS * stride_kh + begin * stride_kt
    dtype: tl.constexpr = q.dtype.element_ty

    of_p = _pairs(do_chunk, stride_ot, z_chunk, stride_vt, weights, own_start, inside, V, BLOCK_V, CHUNK, PRECISION)
    of_a = -_pairs(dv_chunk, stride_vt, z_chunk, stride_vt, weights, own_start, inside, V, BLOCK_V, CHUNK, PRECISION)
    of_a = tl.where(line == column, 0.0, of_a)
    own = tl.sum(tl.where(line == column, of_p, 0.0), 1)[:, None]
    if log_decay is not None:
        between = decay_between(load_logs(log_decay + of_tokens, inside), CHUNK, True)
        of_p *= between
        of_a *= between
    queries = tl.load(q_chunk + i[:, None] * stride_qt + cols[None, :], mask=mask, other=0.0)
    keys = tl.load(k_chunk + i[:, None] * stride_kt + cols[None, :], mask=mask, other=0.0)
    if dlog_decay is not None:
        # All decays between j and i are factors of i's read of j's write: token s gets the pairs j < s <= i.
        columns = tl.load(k_chunk + i[None, :] * stride_kt + cols[:, None], mask=mask_columns, other=0.0)
        separated = of_p * tl.dot(queries, columns, input_precision=PRECISION)
        separated += of_a * tl.dot(keys, columns, input_precision=PRECISION)
        separated = tl.where(line > column, separated, 0.0)
        of_logs = tl.dot(tl.where(line <= column, 1.0, 0.0), separated, input_precision="tf32x3")
        of_logs = tl.sum(tl.where(column < line, of_logs, 0.0), 1)

    below, above = tl.where(line > column, of_p, 0.0), tl.where(line < column, of_p, 0.0)
    of_queries = tl.dot(below.to(dtype), keys, input_precision=PRECISION) + own * keys.to(tl.float32)
    of_keys = tl.dot(above.to(dtype), queries, input_precision=PRECISION) + own * queries.to(tl.float32)
    of_keys = tl.dot(of_a.to(dtype), keys, of_keys, input_precision=PRECISION)

    # The part through the state that enters the chunk and the state that leaves it.
    state, dstate = states + of_chunk * K * V, dstates + of_chunk * K * V
    from_start = tl.load(upto + of_tokens, mask=inside, other=0.0)[:, None]
    to_end = tl.load(after + of_tokens, mask=inside, other=0.0)[:, None]
    sees, reaches = from_start != 0.0, to_end != 0.0
    # Selected: an overflow in another document must give no NaN.
    read = _through_states(
        do_chunk + i[:, None] * stride_ot, state, inside, cols, K, V, BLOCK_K, BLOCK_V, CHUNK, PRECISION
    )
    read = tl.where(sees, read * from_start, 0.0)
    of_queries += read
    at = ((row * T + begin) * N + head) * K + (i[:, None] * (N * K) + cols[None, :])
    tl.store(dq + at, of_queries.to(dq.dtype.element_ty), mask=mask)
    key_read = _through_states(
        dv_chunk + i[:, None] * stride_vt, state, inside, cols, K, V, BLOCK_K, BLOCK_V, CHUNK, PRECISION
    )
    key_read = tl.where(sees, -key_read * from_start, 0.0)
    of_keys += key_read
    written = _through_states(
        z_chunk + i[:, None] * stride_vt, dstate, inside, cols, K, V, BLOCK_K, BLOCK_V, CHUNK, PRECISION
    )
    written = tl.where(reaches, written * (weights[:, None] * to_end), 0.0)
    of_keys += written
    tl.store(dk + at, of_keys.to(dk.dtype.element_ty), mask=mask)
    if dlog_decay is not None:
        reads = tl.sum(queries.to(tl.float32) * read + keys.to(tl.float32) * key_read, 1)
        writes = tl.sum(keys.to(tl.float32) * written, 1)
        of_logs += tl.sum(
            tl.where(column >= line, reads[None, :], 0.0) + tl.where(column < line, writes[None, :], 0.0), 1
        )
        decay = tl.load(through + of_chunk)
        passing = tl.sum(_passing(state, dstate, cols, K, V, BLOCK_K, BLOCK_V), 0)
        of_logs += tl.where(decay == 0.0, 0.0, passing * decay)
        tl.store(dlog_decay + tile_k * num_tokens + of_tokens, of_logs, mask=inside)


@triton.jit(do_not_specialize=["T", "num_chunks"])
def gradients_channels(
    q,  # (B, T, H, K)
    k,  # (B, T, H, K)
    log_decay,  # (B, T, N, K) fp32
    beta,  # (B, N, T) fp32
    paths,  # (LEVELS + 2, C, C)
    through,  # (B, N, X, K) fp32
    starts,  # (B, T), or None
    do,  # (B, T, N, V)
    dv,  # (B, T, N, V), contiguous
    z,  # (B, T, N, V), contiguous
    states,  # (B, N, X, K, V): the state that enters each chunk
    dstates,  # (B, N, X, K, V): the cotangent of the state that leaves each chunk
    dq,  # (B, T, N, K), contiguous
    dk,  # (B, T, N, K), contiguous
    dlog_decay,  # (B, T, N, K) fp32, contiguous
    T,
    N,
    num_chunks,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_ob,
    stride_ot,
    stride_oh,
    GROUPS: tl.constexpr,  # N / H
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,  # log2 CHUNK
    PRECISION: tl.constexpr,
):
    """dq, dk and dlog_decay of a chunk and some key channels, with a decay of each channel."""
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    DOCUMENTS: tl.constexpr = starts is not None
    row, head, chunk, tile_k = tile_program(N, num_chunks, K_TILES)
    cols = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    begin, length, i, inside = chunk_tokens(chunk, T, CHUNK)
    line, column = i[:, None], i[None, :]
    of_chunk = (row * N + head) * num_chunks + chunk
    has_k = exists(cols, K, BLOCK_K)
    mask = inside[:, None] & has_k[None, :]
    do_chunk = do + row * stride_ob + head * stride_oh + begin * stride_ot
    of_values = ((row * T + begin) * N + head) * V
    stride_vt = N * V
    dv_chunk, z_chunk = dv + of_values, z + of_values
    own_start = own_starts(starts, row * T, begin, i, length)
    weights = tl.load(beta + (row * N + head) * T + begin + i, mask=inside, other=0.0)
    dtype: tl.constexpr = q.dtype.element_ty

    of_p = _pairs(do_chunk, stride_ot, z_chunk, stride_vt, weights, own_start, inside, V, BLOCK_V, CHUNK, PRECISION)
    own = tl.sum(tl.where(line == column, of_p, 0.0), 1)[:, None]
    of_p = of_p.to(dtype)
    of_a = -_pairs(dv_chunk, stride_vt, z_chunk, stride_vt, weights, own_start, inside, V, BLOCK_V, CHUNK, PRECISION)
    of_a = of_a.to(dtype)

    # The part of each token through the state that enters the chunk and the state that leaves it.
    state, dstate = states + of_chunk * K * V, dstates + of_chunk * K * V
    q_rows = (
        q + row * stride_qb + head // GROUPS * stride_qh + begin * stride_qt + (i[:, None] * stride_qt + cols[None, :])
    )
    k_rows = (
        k + row * stride_kb + head // GROUPS * stride_kh + begin * stride_kt + (i[:, None] * stride_kt + cols[None, :])
    )
    g_rows = (
        log_decay + row * stride_gb + head * stride_gh + begin * stride_gt + (i[:, None] * stride_gt + cols[None, :])
    )
    logs = load_logs(g_rows, mask)
    queries = tl.load(q_rows, mask=mask, other=0.0)
    keys = tl.load(k_rows, mask=mask, other=0.0)
    decay = tl.load(through + of_chunk * K + cols, mask=has_k, other=0.0)
    passing = tl.where(decay == 0.0, 0.0, _passing(state, dstate, cols, K, V, BLOCK_K, BLOCK_V) * decay)
    of_decays = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32) + passing[None, :]
    written = _through_states(
        z_chunk + i[:, None] * stride_vt, dstate, inside, cols, K, V, BLOCK_K, BLOCK_V, CHUNK, PRECISION
    )
    written *= weights[:, None] * decay_rows(paths, LEVELS, logs, CHUNK, PRECISION)
    written = tl.where((i >= last_start(starts, row * T, begin, length))[:, None], written, 0.0)
    of_decays = add_to_logs(paths, LEVELS, keys * written, of_decays, CHUNK, DOCUMENTS, PRECISION)
    from_start = decay_rows(paths, LEVELS + 1, logs, CHUNK, PRECISION)
    sees = (own_start < 0)[:, None]
    read = _through_states(
        do_chunk + i[:, None] * stride_ot, state, inside, cols, K, V, BLOCK_K, BLOCK_V, CHUNK, PRECISION
    )
    read = tl.where(sees, read * from_start, 0.0)
    key_read = _through_states(
        dv_chunk + i[:, None] * stride_vt, state, inside, cols, K, V, BLOCK_K, BLOCK_V, CHUNK, PRECISION
    )
    key_read = tl.where(sees, -key_read * from_start, 0.0)
    of_decays = add_to_logs(paths, LEVELS + 1, queries * read + keys * key_read, of_decays, CHUNK, DOCUMENTS, PRECISION)
    of_queries = read + own * keys
    of_keys = written + key_read + own * queries

    # The part between two tokens of the chunk. In second halves a token reads, by its query and its key; in first
    # halves its key is read.
    for level in tl.range(0, LEVELS, disable_licm=True):
        second = in_second_half(line, level)
        siblings = line >> level == (column >> level ^ 1)
        decays = decay_rows(paths, level, logs, CHUNK, PRECISION)
        mine = tl.where(second, queries, keys).to(tl.float32)
        found = decays * product(tl.where(siblings, of_p, 0.0), decays * mine, q, PRECISION)
        key_found = decays * product(tl.where(siblings, of_a, 0.0), decays * keys, q, PRECISION)
        of_queries += tl.where(second, found, 0.0)
        of_keys += tl.where(second, 0.0, found) + key_found
        changes = mine * found + keys * key_found
        of_decays = add_to_logs(paths, level, changes, of_decays, CHUNK, DOCUMENTS, PRECISION)

    if DOCUMENTS:
        # An overflow is reported as NaN: ``add_to_logs`` has dropped it to keep it out of other documents.
        finite = tl.abs(of_queries) + tl.abs(of_keys) < float("inf")
        of_decays = tl.where(finite, of_decays, float("nan"))
    at = ((row * T + begin) * N + head) * K + (i[:, None] * (N * K) + cols[None, :])
    tl.store(dq + at, of_queries.to(dq.dtype.element_ty), mask=mask)
    tl.store(dk + at, of_keys.to(dk.dtype.element_ty), mask=mask)
    tl.store(dlog_decay + at, of_decays, mask=mask)

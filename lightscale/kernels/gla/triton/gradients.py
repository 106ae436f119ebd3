"""The Triton kernel of the gradients of a chunk's queries, keys and log decays.

Names of shapes and arguments are those of ``kernels.py``.
"""

import triton
import triton.language as tl

from lightscale.kernels.common.triton.kernels import chunk_tokens, exists, last_start, own_starts, tile_program
from lightscale.kernels.gla.triton.decays import add_to_logs, decay_rows, in_second_half, load_logs, product


@triton.jit
def token_products(
    x_chunk,
    stride_xt,
    y_chunk,
    stride_yt,
    inside,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products x_i · y_j (C, C) of a chunk's tokens."""
    index = tl.arange(0, CHUNK).to(tl.int64)
    products = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for tile in range((V + BLOCK_V - 1) // BLOCK_V):
        cols = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        has = exists(cols, V, BLOCK_V)
        rows = x_chunk + index[:, None] * stride_xt + cols[None, :]
        columns = y_chunk + index[None, :] * stride_yt + cols[:, None]
        x_tile = tl.load(rows, mask=inside[:, None] & has[None, :], other=0.0)
        y_tile = tl.load(columns, mask=has[:, None] & inside[None, :], other=0.0)
        products = tl.dot(x_tile, y_tile, products, input_precision=PRECISION)
    return products


@triton.jit
def _through_states(
    v_rows,
    do_rows,
    state,
    dstate,
    inside,
    cols,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """do Sᵀ and v dSᵀ (C, channels), and Σ_V S ⊙ dS (channels,), of a chunk and some key channels."""
    has_k = exists(cols, K, BLOCK_K)
    read = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    written = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    passing = tl.zeros([BLOCK_K], dtype=tl.float32)
    for tile in range((V + BLOCK_V - 1) // BLOCK_V):
        cols_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        has_v = exists(cols_v, V, BLOCK_V)
        in_rows, in_state = inside[:, None] & has_v[None, :], has_v[:, None] & has_k[None, :]
        at_state = cols[None, :] * V + cols_v[:, None]
        state_tile = tl.load(state + at_state, mask=in_state, other=0.0)
        dstate_tile = tl.load(dstate + at_state, mask=in_state, other=0.0)
        passing += tl.sum(state_tile.to(tl.float32) * dstate_tile.to(tl.float32), 0)
        do_tile = tl.load(do_rows + cols_v[None, :], mask=in_rows, other=0.0)
        read = tl.dot(do_tile.to(state_tile.dtype), state_tile, read, input_precision=PRECISION)
        v_tile = tl.load(v_rows + cols_v[None, :], mask=in_rows, other=0.0)
        written = tl.dot(v_tile.to(dstate_tile.dtype), dstate_tile, written, input_precision=PRECISION)
    return read, written, passing


@triton.jit(do_not_specialize=["T", "num_chunks"])
def gradients(
    q,  # (B, T, H, K)
    k,  # (B, T, H, K)
    v,  # (B, T, H, V)
    log_decay,  # (B, T, H, K) fp32
    paths,  # (LEVELS + 2, C, C)
    do,  # (B, T, H, V)
    states,  # (B, H, N, K, V): the state that enters each chunk
    dstates,  # (B, H, N, K, V): the cotangent of the state that leaves each chunk
    through,  # (B, H, N, K) fp32
    starts,  # (B, T), or None
    dq,  # (B, T, H, K), contiguous
    dk,  # (B, T, H, K), contiguous
    dlog_decay,  # (B, T, H, K) fp32, contiguous
    T,
    H,
    num_chunks,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_ob,
    stride_ot,
    stride_oh,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,  # log2 CHUNK
    PRECISION: tl.constexpr,
):
    """dq, dk and dlog_decay of a chunk and some key channels."""
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    DOCUMENTS: tl.constexpr = starts is not None
    row, head, chunk, tile_k = tile_program(H, num_chunks, K_TILES)
    cols = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    begin, length, i, inside = chunk_tokens(chunk, T, CHUNK)
    line, column = i[:, None], i[None, :]
    has_k = exists(cols, K, BLOCK_K)
    mask = inside[:, None] & has_k[None, :]
    of_chunk = (row * H + head) * num_chunks + chunk
    v_chunk = v + row * stride_vb + head * stride_vh + begin * stride_vt
    do_chunk = do + row * stride_ob + head * stride_oh + begin * stride_ot
    index = i.to(tl.int64)

    # Each pair of tokens: below the diagonal do_i · v_j, above it v_i · do_j.
    own_start = own_starts(starts, row * T, begin, i, length)
    below = token_products(do_chunk, stride_ot, v_chunk, stride_vt, inside, V, BLOCK_V, CHUNK, PRECISION)
    own = tl.sum(tl.where(line == column, below, 0.0), 1)[:, None]
    if DOCUMENTS:
        below = tl.where(own_start[:, None] <= column, below, 0.0)
    below = below.to(q.dtype.element_ty)
    above = token_products(v_chunk, stride_vt, do_chunk, stride_ot, inside, V, BLOCK_V, CHUNK, PRECISION)
    if DOCUMENTS:
        above = tl.where(own_start[None, :] <= line, above, 0.0)
    pairs = tl.where(line > column, below, above.to(q.dtype.element_ty))

    # The part of each token through the state that enters the chunk and the state that leaves it.
    v_rows, do_rows = v_chunk + index[:, None] * stride_vt, do_chunk + index[:, None] * stride_ot
    state, dstate = states + of_chunk * K * V, dstates + of_chunk * K * V
    read, written, passing = _through_states(
        v_rows, do_rows, state, dstate, inside, cols, K, V, BLOCK_K, BLOCK_V, CHUNK, PRECISION
    )

    at_q = q + row * stride_qb + head * stride_qh + (begin + index)[:, None] * stride_qt + cols[None, :]
    at_k = k + row * stride_kb + head * stride_kh + (begin + index)[:, None] * stride_kt + cols[None, :]
    at_g = log_decay + row * stride_gb + head * stride_gh + (begin + index)[:, None] * stride_gt + cols[None, :]
    logs = load_logs(at_g, mask)
    decay = tl.load(through + of_chunk * K + cols, mask=has_k, other=0.0)
    passing = tl.where(decay == 0.0, 0.0, passing * decay)
    of_decays = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32) + passing[None, :]
    written *= decay_rows(paths, LEVELS, logs, CHUNK, PRECISION)
    written = tl.where((i >= last_start(starts, row * T, begin, length))[:, None], written, 0.0)
    keys = tl.load(at_k, mask=mask, other=0.0)
    of_decays = add_to_logs(paths, LEVELS, keys * written, of_decays, CHUNK, DOCUMENTS, PRECISION)
    read *= decay_rows(paths, LEVELS + 1, logs, CHUNK, PRECISION)
    read = tl.where((own_start < 0)[:, None], read, 0.0)
    queries = tl.load(at_q, mask=mask, other=0.0)
    of_decays = add_to_logs(paths, LEVELS + 1, queries * read, of_decays, CHUNK, DOCUMENTS, PRECISION)
    of_queries = read + own * keys
    of_keys = written + own * queries

    # The part between two tokens of the chunk. In second halves a token is a query, in first halves a key. Data that
    # all levels share is reloaded per level, to save registers.
    for level in tl.range(0, LEVELS, disable_licm=True):
        second = in_second_half(line, level)
        decays = decay_rows(paths, level, logs, CHUNK, PRECISION)
        mine = tl.where(second, queries, keys).to(tl.float32)
        siblings = line >> level == (column >> level ^ 1)
        found = decays * product(tl.where(siblings, pairs, 0.0), decays * mine, q, PRECISION)
        of_queries += tl.where(second, found, 0.0)
        of_keys += tl.where(second, 0.0, found)
        of_decays = add_to_logs(paths, level, mine * found, of_decays, CHUNK, DOCUMENTS, PRECISION)

    if DOCUMENTS:
        finite = tl.abs(of_queries) + tl.abs(of_keys) < float("inf")
        # An overflow is reported as NaN: ``add_to_logs`` has dropped it to keep it out of other documents.
        of_decays = tl.where(finite, of_decays, float("nan"))
    at = ((row * T + begin + index[:, None]) * H + head) * K + cols[None, :]
    tl.store(dq + at, of_queries.to(dq.dtype.element_ty), mask=mask)
    tl.store(dk + at, of_keys.to(dk.dtype.element_ty), mask=mask)
    tl.store(dlog_decay + at, of_decays, mask=mask)

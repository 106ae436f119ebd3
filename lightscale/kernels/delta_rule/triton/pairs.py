"""The Triton kernels of a chunk's work that needs no values: scores, the triangular inverse, decays.

Names of shapes: B rows, T tokens, H heads of queries and keys, N heads of values, K and V widths, X chunks, C tokens of
a chunk. All arithmetic is fp32; tensor cores take half-precision operands unconverted.
docs/reference/operators/delta-rule.md has the mathematics. A token's write depends on the tokens before it by (1 + β
A)⁻¹ = 1 - β ⊙ H with H = A (1 + β A)⁻¹, the ``corrections``. Neither rows nor columns of H have a factor β: gradients
of β need no division.

``starts`` (B, T) int32 is the position in the row at which the token's document begins, -1 for the row's first one.
"""

import triton
import triton.language as tl

from lightscale.kernels.common.triton.kernels import chunk_tokens, exists, last_start, own_starts
from lightscale.kernels.gla.triton.decays import decay_columns, decay_rows, in_second_half, load_logs, product


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr, LEVELS: tl.constexpr):
    """(1 + lower)⁻¹ (C, C) of a strictly lower triangular matrix, by blocks of 1, 2, 4, … tokens.

    Let X and Y be the inverses of two neighbouring blocks, with L below the first and left of the second. The inverse
    of both consists of X, Y and - Y L X. Four levels give blocks of 16 × 16; higher levels join them. No power of
    ``lower`` is computed, because its entries grow with β near 2 and repeated keys. Products are fp32's: TF32 has too
    few digits.
    """
    i = tl.arange(0, CHUNK)
    line, column = i[:, None], i[None, :]
    found = tl.where(line == column, 1.0, 0.0)
    for level in range(LEVELS):
        siblings = in_second_half(line, level) & (line >> level == (column >> level) + 1)
        right = tl.dot(tl.where(siblings, lower, 0.0), found, input_precision="tf32x3")
        found -= tl.dot(found, right, input_precision="tf32x3")
    return found


@triton.jit
def _store_corrections(products, weights, corrections, CHUNK: tl.constexpr, LEVELS: tl.constexpr):
    """``corrections`` (C, C) of a chunk from A, strictly lower triangular, and β."""
    i = tl.arange(0, CHUNK)
    found = _inverse(weights[:, None] * products, CHUNK, LEVELS)
    found = tl.dot(products, found, input_precision="tf32x3")
    tl.store(corrections + i[:, None] * CHUNK + i[None, :], found.to(corrections.dtype.element_ty))


@triton.jit
def decay_between(logs, CHUNK: tl.constexpr, BOTH: tl.constexpr):
    """exp(Σ_{j<s<=i} logs_s) (C, C) for j <= i; with BOTH exp(Σ_{i<s<=j}) where j > i, else 1.

    Sums of terms of one sign, by products with 0/1 matrices: differences of sums would lose small terms.
    """
    i = tl.arange(0, CHUNK)
    line, column = i[:, None], i[None, :]
    upto, behind = tl.where(column <= line, 1.0, 0.0), tl.where(line > column, logs[:, None], 0.0)
    sums = tl.dot(upto, behind, input_precision="tf32x3")
    if BOTH:
        behind, upto = tl.where(column > line, logs[None, :], 0.0), tl.where(line <= column, 1.0, 0.0)
        sums = tl.dot(behind, upto, sums, input_precision="tf32x3")
    return tl.exp(sums)


@triton.jit(do_not_specialize=["T", "num_chunks"])
def prepare_heads(
    q,  # (B, T, H, K), or None
    k,  # (B, T, H, K)
    log_decay,  # (B, N, T) fp32, or None
    beta,  # (B, N, T) fp32
    starts,  # (B, T), or None
    upto,  # (B, N, T) fp32: the decay from the chunk's start; 0 where a token does not read the entering state
    after,  # (B, N, T) fp32: the decay to the chunk's end; 0 where a token does not reach the leaving state
    through,  # (B, N, X) fp32: the decay through the chunk; 0 where a document begins in it
    scores,  # (B, N, X, C, C): P, of queries and keys; or None
    corrections,  # (B, N, X, C, C): H
    T,
    N,
    num_chunks,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    GROUPS: tl.constexpr,  # N / H
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,  # log2 CHUNK
    PRECISION: tl.constexpr,
):
    """All work of one chunk and head that needs no values, with a decay per head or none."""
    program = tl.program_id(0).to(tl.int64)
    head, chunk, row = program % N, program // N % num_chunks, program // (N * num_chunks)
    begin, length, i, inside = chunk_tokens(chunk, T, CHUNK)
    line, column = i[:, None], i[None, :]
    of_tokens = (row * N + head) * T + begin + i
    of_chunk = (row * N + head) * num_chunks + chunk
    own_start, last = own_starts(starts, row * T, begin, i, length), last_start(starts, row * T, begin, length)

    k_chunk = k + row * stride_kb + head // GROUPS * stride_kh + begin * stride_kt
    of_keys = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    of_queries = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for tile in range((K + BLOCK_K - 1) // BLOCK_K):
        cols = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        has_k = exists(cols, K, BLOCK_K)
        mask = inside[:, None] & has_k[None, :]
        keys = tl.load(k_chunk + i[:, None] * stride_kt + cols[None, :], mask=mask, other=0.0)
        columns = k_chunk + i[None, :] * stride_kt + cols[:, None]
        keys_columns = tl.load(columns, mask=has_k[:, None] & inside[None, :], other=0.0)
        of_keys = tl.dot(keys, keys_columns, of_keys, input_precision=PRECISION)
        if q is not None:
            q_chunk = q + row * stride_qb + head // GROUPS * stride_qh + begin * stride_qt
            queries = tl.load(q_chunk + i[:, None] * stride_qt + cols[None, :], mask=mask, other=0.0)
            of_queries = tl.dot(queries, keys_columns, of_queries, input_precision=PRECISION)

    from_start = tl.full([CHUNK], 1.0, tl.float32)
    to_end = tl.full([CHUNK], 1.0, tl.float32)
    whole = 1.0
    if log_decay is not None:
        logs = load_logs(log_decay + of_tokens, inside)
        between = decay_between(logs, CHUNK, False)
        of_keys *= between
        of_queries *= between
        from_start = tl.exp(tl.sum(tl.where(column <= line, logs[None, :], 0.0), 1))
        to_end = tl.exp(tl.sum(tl.where(column > line, logs[None, :], 0.0), 1))
        whole = tl.exp(tl.sum(logs, 0))
    if starts is not None:
        from_start = tl.where(own_start < 0, from_start, 0.0)
        to_end = tl.where(i >= last, to_end, 0.0)
        whole = tl.where(last < 0, whole, 0.0)
    tl.store(upto + of_tokens, from_start, mask=inside)
    tl.store(after + of_tokens, to_end, mask=inside)
    tl.store(through + of_chunk, whole)

    within = own_start[:, None] <= column
    if q is not None:
        kept = tl.where((column <= line) & within, of_queries, 0.0)
        tl.store(scores + of_chunk * CHUNK * CHUNK + (line * CHUNK + column), kept.to(scores.dtype.element_ty))
    products = tl.where((column < line) & within, of_keys, 0.0)
    weights = tl.load(beta + of_tokens, mask=inside, other=0.0)
    _store_corrections(products, weights, corrections + of_chunk * CHUNK * CHUNK, CHUNK, LEVELS)


@triton.jit(do_not_specialize=["T", "num_chunks"])
def prepare_channels(
    q,  # (B, T, H, K), or None
    k,  # (B, T, H, K)
    log_decay,  # (B, T, N, K) fp32
    beta,  # (B, N, T) fp32
    paths,  # (LEVELS + 2, C, C), see ``paths_on`` of gated linear attention
    starts,  # (B, T), or None
    q_in,  # (B, T, N, K), contiguous: q decayed from the chunk's start, or None
    k_in,  # (B, T, N, K), contiguous: k decayed from the chunk's start
    k_out,  # (B, T, N, K), contiguous: k decayed to the chunk's end
    through,  # (B, N, X, K) fp32: the decay through the chunk; 0 where a document begins in it
    scores,  # (B, N, X, C, C): P, of queries and keys; or None
    corrections,  # (B, N, X, C, C): H
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
    GROUPS: tl.constexpr,  # N / H
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,  # log2 CHUNK
    PRECISION: tl.constexpr,
):
    """All work of one chunk and head that needs no values, with a decay per channel.

    Decays between tokens are gated linear attention's, by halves: each token has a decay to or from the border of its
    two halves. The product of two of these exponentials, neither above 1, is the decay between the tokens of a pair.
    """
    program = tl.program_id(0).to(tl.int64)
    head, chunk, row = program % N, program // N % num_chunks, program // (N * num_chunks)
    begin, length, i, inside = chunk_tokens(chunk, T, CHUNK)
    line, column = i[:, None], i[None, :]
    of_chunk = (row * N + head) * num_chunks + chunk
    own_start, last = own_starts(starts, row * T, begin, i, length), last_start(starts, row * T, begin, length)
    sees, reaches = (own_start < 0)[:, None], (i >= last)[:, None]

    k_chunk = k + row * stride_kb + head // GROUPS * stride_kh + begin * stride_kt
    g_chunk = log_decay + row * stride_gb + head * stride_gh + begin * stride_gt
    of_keys_chunk = ((row * T + begin) * N + head) * K
    of_keys = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    of_queries = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    own = tl.zeros([CHUNK], dtype=tl.float32)
    for tile in range((K + BLOCK_K - 1) // BLOCK_K):
        cols = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        has_k = exists(cols, K, BLOCK_K)
        mask, mask_columns = inside[:, None] & has_k[None, :], has_k[:, None] & inside[None, :]
        logs = load_logs(g_chunk + i[:, None] * stride_gt + cols[None, :], mask)
        total = tl.exp(tl.sum(logs, 0))
        if starts is not None:
            total = tl.where(last < 0, total, 0.0)
        tl.store(through + of_chunk * K + cols, total, mask=has_k)

        keys = tl.load(k_chunk + i[:, None] * stride_kt + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        at = of_keys_chunk + (i[:, None] * (N * K) + cols[None, :])
        from_start = decay_rows(paths, LEVELS + 1, logs, CHUNK, PRECISION)
        decayed = tl.where(sees, keys * from_start, 0.0)
        tl.store(k_in + at, decayed.to(k_in.dtype.element_ty), mask=mask)
        if q is not None:
            q_chunk = q + row * stride_qb + head // GROUPS * stride_qh + begin * stride_qt
            queries = tl.load(q_chunk + i[:, None] * stride_qt + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            own += tl.sum(queries * keys, 1)
            decayed = tl.where(sees, queries * from_start, 0.0)
            tl.store(q_in + at, decayed.to(q_in.dtype.element_ty), mask=mask)
        decayed = tl.where(reaches, keys * decay_rows(paths, LEVELS, logs, CHUNK, PRECISION), 0.0)
        tl.store(k_out + at, decayed.to(k_out.dtype.element_ty), mask=mask)

        logs_columns = load_logs(g_chunk + i[None, :] * stride_gt + cols[:, None], mask_columns)
        keys_columns = tl.load(k_chunk + i[None, :] * stride_kt + cols[:, None], mask=mask_columns, other=0.0)
        for level in range(LEVELS):
            decays = decay_rows(paths, level, logs, CHUNK, PRECISION)
            right = keys_columns.to(tl.float32) * decay_columns(paths, level, logs_columns, CHUNK, PRECISION)
            pairs = in_second_half(line, level) & (line >> level == (column >> level) + 1)
            of_keys += tl.where(pairs, product(keys * decays, right, corrections, PRECISION), 0.0)
            if q is not None:
                of_queries += tl.where(pairs, product(queries * decays, right, corrections, PRECISION), 0.0)

    within = own_start[:, None] <= column
    if q is not None:
        of_queries = tl.where(within, tl.where(line == column, own[:, None], of_queries), 0.0)
        tl.store(scores + of_chunk * CHUNK * CHUNK + (line * CHUNK + column), of_queries.to(scores.dtype.element_ty))
    weights = tl.load(beta + (row * N + head) * T + begin + i, mask=inside, other=0.0)
    products = tl.where(within, of_keys, 0.0)
    _store_corrections(products, weights, corrections + of_chunk * CHUNK * CHUNK, CHUNK, LEVELS)

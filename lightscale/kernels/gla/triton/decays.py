"""The Triton kernel of a chunk's work that needs decays and no values, and the decays.

Every decay inside a chunk is the exponential of a sum of log decays, over the tokens between a token and a border. All
terms have one sign. The borders are the chunk's start and end. For a pair of tokens j < i the border lies between the
two neighbouring halves (of 1, 2, 4, … tokens) that hold them: P_ij = exp(border to i) exp(j to border). So no exponent
is above 0, and none is a difference. A sum over a path is a product with a 0/1 matrix (``_path``), its gradient a
product with the transposed matrix. Names of shapes and arguments are those of ``kernels.py``.
"""

import triton
import triton.language as tl

from lightscale.kernels.common.triton.kernels import chunk_tokens, exists, last_start, own_starts


@triton.jit
def _path(paths, number, i, s, CHUNK: tl.constexpr):
    """1 where s is on path ``number`` between token i and a border, else 0; a column of i by a row of s."""
    return tl.load(paths + (number * CHUNK + i) * CHUNK + s)


@triton.jit
def load_logs(pointers, mask):
    """Log decays, finite: -1000 replaces -inf, because its exponential is 0 too."""
    return tl.maximum(tl.load(pointers, mask=mask, other=0.0).to(tl.float32), -1000.0)


@triton.jit
def decay_rows(paths, number, logs, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """The decay (C, width) between each token and its border: exp(path @ logs).

    Half precision splits the logs into two parts, which hold 16 bits or more.
    """
    i = tl.arange(0, CHUNK)
    path = _path(paths, number, i[:, None], i[None, :], CHUNK)
    if path.dtype == tl.float32:
        return tl.exp(tl.dot(path, logs, input_precision=PRECISION))
    else:
        high = logs.to(path.dtype)
        sums = tl.dot(path, (logs - high.to(tl.float32)).to(path.dtype))
        return tl.exp(tl.dot(path, high, sums))


@triton.jit
def decay_columns(paths, number, logs, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """The transpose of ``decay_rows``: (width, C), contiguous tokens."""
    i = tl.arange(0, CHUNK)
    path = _path(paths, number, i[None, :], i[:, None], CHUNK)
    if path.dtype == tl.float32:
        return tl.exp(tl.dot(logs, path, input_precision=PRECISION))
    else:
        high = logs.to(path.dtype)
        sums = tl.dot((logs - high.to(tl.float32)).to(path.dtype), path)
        return tl.exp(tl.dot(high, path, sums))


@triton.jit
def add_to_logs(paths, number, z, sums, CHUNK: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr):
    """sums (C, width) and the log decays' part of the gradient by ``decay_rows``, from the tokens' z = x ⊙ dx.

    An overflow in one document must not reach another as 0 · Inf.
    """
    i = tl.arange(0, CHUNK)
    back = _path(paths, number, i[None, :], i[:, None], CHUNK)
    if DOCUMENTS:
        z = tl.where(tl.abs(z) < float("inf"), z, 0.0)
    return tl.dot(back, z.to(back.dtype), sums, input_precision=PRECISION)


@triton.jit
def in_second_half(i, level):
    """Whether token i is in the second of two halves of 2^level tokens: a query there, a key in the first."""
    return (i >> level & 1) == 1


@triton.jit
def product(x, y, like, PRECISION: tl.constexpr):
    """x y, with operands in the dtype of the pointer ``like``."""
    dtype: tl.constexpr = like.dtype.element_ty
    return tl.dot(x.to(dtype), y.to(dtype), input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "num_chunks"])
def prepare(
    q,  # (B, T, H, K), or None
    k,  # (B, T, H, K), or None
    log_decay,  # (B, T, H, K) fp32
    paths,  # (LEVELS + 2, C, C)
    starts,  # (B, T), or None
    q_in,  # (B, T, H, K), contiguous: q decayed from the chunk's start, or None
    k_out,  # (B, T, H, K), contiguous: k decayed to the chunk's end, or None
    through,  # (B, H, N, K) fp32: the decay through the chunk, 0 where a document begins in it
    scores,  # (B, H, N, C, C): q_i · P_ij k_j for j <= i of one document, else 0; or None
    T,
    H,
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
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,  # log2 CHUNK
    PRECISION: tl.constexpr,
):
    """All work of one chunk that needs its decays and no values."""
    program = tl.program_id(0).to(tl.int64)
    head = program % H
    chunk = program // H % num_chunks
    row = program // (H * num_chunks)
    begin, length, i, inside = chunk_tokens(chunk, T, CHUNK)
    line, column = i[:, None], i[None, :]

    own_start, last = own_starts(starts, row * T, begin, i, length), last_start(starts, row * T, begin, length)
    g_chunk = log_decay + row * stride_gb + head * stride_gh + begin * stride_gt
    at = ((row * T + begin + i.to(tl.int64)) * H + head) * K
    of_chunk = (row * H + head) * num_chunks + chunk
    scores_tile = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    own = tl.zeros([CHUNK], dtype=tl.float32)
    for tile in range((K + BLOCK_K - 1) // BLOCK_K):
        cols = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        has_k = exists(cols, K, BLOCK_K)
        mask = inside[:, None] & has_k[None, :]
        logs = load_logs(g_chunk + i.to(tl.int64)[:, None] * stride_gt + cols[None, :], mask)
        total = tl.exp(tl.sum(logs, 0))
        if starts is not None:
            total = tl.where(last < 0, total, 0.0)
        tl.store(through + of_chunk * K + cols, total, mask=has_k)
        if q_in is not None:
            q_rows = q + row * stride_qb + head * stride_qh + (begin + i)[:, None] * stride_qt + cols[None, :]
            queries = tl.load(q_rows, mask=mask, other=0.0).to(tl.float32)
            decayed = queries * decay_rows(paths, LEVELS + 1, logs, CHUNK, PRECISION)
            decayed = tl.where((own_start < 0)[:, None], decayed, 0.0)
            tl.store(q_in + at[:, None] + cols[None, :], decayed.to(q_in.dtype.element_ty), mask=mask)
        if k_out is not None:
            k_chunk = k + row * stride_kb + head * stride_kh + begin * stride_kt
            k_rows = k_chunk + i.to(tl.int64)[:, None] * stride_kt + cols[None, :]
            keys = tl.load(k_rows, mask=mask, other=0.0).to(tl.float32)
            decayed = keys * decay_rows(paths, LEVELS, logs, CHUNK, PRECISION)
            decayed = tl.where((i >= last)[:, None], decayed, 0.0)
            tl.store(k_out + at[:, None] + cols[None, :], decayed.to(k_out.dtype.element_ty), mask=mask)
        if scores is not None:
            own += tl.sum(queries * keys, 1)
            mask_columns = inside[None, :] & has_k[:, None]
            logs_columns = load_logs(g_chunk + i.to(tl.int64)[None, :] * stride_gt + cols[:, None], mask_columns)
            k_columns = k_chunk + i.to(tl.int64)[None, :] * stride_kt + cols[:, None]
            keys_columns = tl.load(k_columns, mask=mask_columns, other=0.0).to(tl.float32)
            for level in range(LEVELS):
                # At each level every token has one decay, to or from the border of its two halves: a product of
                # matrices gives all pairs of the level at once.
                left = queries * decay_rows(paths, level, logs, CHUNK, PRECISION)
                right = keys_columns * decay_columns(paths, level, logs_columns, CHUNK, PRECISION)
                pairs = in_second_half(line, level) & (line >> level == (column >> level) + 1)
                scores_tile += tl.where(pairs, product(left, right, scores, PRECISION), 0.0)
    if scores is not None:
        scores_tile = tl.where(line == column, own[:, None], scores_tile)
        scores_tile = tl.where(own_start[:, None] <= column, scores_tile, 0.0)
        tl.store(scores + (of_chunk * CHUNK + line) * CHUNK + column, scores_tile.to(scores.dtype.element_ty))

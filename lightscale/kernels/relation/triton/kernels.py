"""The kernels: sums over pairs of tokens, some tokens and some channels per program, and the statistics of pairs.

Queries are the tokens that read, keys the tokens that are read. A launch is a band: keys ``key_0`` … of queries
``query_0`` …. The statistics of pairs, r_ij and in the backward pass w_ij, exist for one band, (B, keys, queries), with
contiguous queries. For an unread pair they may hold any value, including NaN: a selection drops it, not a product with
0.

The pairs of one tile are summed first, then the tiles: one sum over all tokens would lose single terms in fp32. Numbers
of tokens, and of the pairs of a band in a row, fit 32 bits; other offsets need 64.
"""

# Triton evaluates the hints of its kernels: their arguments cannot have any but tl.constexpr.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from lightscale.kernels.relation.triton.activations import activate

LENGTHS = ("T", "S", "query_0", "num_queries", "key_0", "num_keys")
"""Arguments that differ from band to band: a multiple of 16, or 1, causes no further compilation."""


@triton.jit
def ranges(first_ptr, end_ptr, of_query, num_queries):
    """The ranges of some queries, and the smallest range that holds all of them without the empty ones."""
    exists = of_query < num_queries
    first = tl.load(first_ptr + of_query, mask=exists, other=0)
    end = tl.load(end_ptr + of_query, mask=exists, other=0)
    begin = tl.min(tl.where(first < end, first, 2147483647), 0)
    stop = tl.max(tl.where(first < end, end, 0), 0)
    return first, end, begin, stop


@triton.jit
def offsets(tokens, stride, channels):
    """Offsets of a tile of some tokens and channels in a row."""
    return tokens.to(tl.int64)[:, None] * stride + channels[None, :]


@triton.jit(do_not_specialize=["num_tokens", "T"])
def center(
    x_ptr,  # (B, T, D)
    out_ptr,  # (B, T, D)
    variance_ptr,  # (B, T) fp32
    num_tokens,  # B T
    T,
    D,
    stride_xb,
    stride_xt,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Channels less their mean, and their variance; some tokens per program."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = token < num_tokens
    channel = tl.arange(0, BLOCK_D)
    x_ptr += (token // T * stride_xb + token % T * stride_xt)[:, None] + channel[None, :]
    out_ptr += token[:, None] * D + channel[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for c in range(0, D, BLOCK_D):
        inside = exists[:, None] & (c + channel < D)[None, :]
        total += tl.load(x_ptr + c, mask=inside, other=0.0).to(tl.float32)
    mean = (tl.sum(total, 1) / D)[:, None]
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for c in range(0, D, BLOCK_D):
        inside = exists[:, None] & (c + channel < D)[None, :]
        x = tl.load(x_ptr + c, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, x - mean, 0.0)
        total += x * x
        tl.store(out_ptr + c, x.to(out_ptr.dtype.element_ty), mask=inside)
    if variance_ptr is not None:
        tl.store(variance_ptr + token, tl.sum(total, 1) / D, mask=exists)


@triton.jit(do_not_specialize=LENGTHS)
def deviations(
    a_ptr,  # (B, T, D) fp32, contiguous, centered
    b_ptr,  # (B, S, D) fp32, contiguous, centered
    variance_a_ptr,  # (B, T) fp32
    variance_b_ptr,  # (B, S) fp32
    first_ptr,  # (B, T) int32
    end_ptr,  # (B, T) int32
    r_ptr,  # (B, keys, queries) fp32
    T,
    S,
    D,
    query_0,
    num_queries,
    key_0,
    num_keys,
    eps,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """r_ij = 1 / sqrt(var a_i + var b_j + 2 a_i·b_j / D + ε); programs (rows, tiles of keys, tiles of queries)."""
    row = tl.program_id(0).to(tl.int64)
    query_tile = (tl.program_id(2).to(tl.int64) * BLOCK_Q).to(tl.int32)
    key_tile = (tl.program_id(1).to(tl.int64) * BLOCK_K).to(tl.int32)
    of_query, of_key = query_tile + tl.arange(0, BLOCK_Q), key_tile + tl.arange(0, BLOCK_K)
    has_query, has_key = of_query < num_queries, of_key < num_keys
    # The row's tokens, from the band's first.
    queries, keys = row * T + query_0, row * S + key_0
    _, _, begin, stop = ranges(first_ptr + queries, end_ptr + queries, of_query, num_queries)
    if (begin < key_0 + key_tile + BLOCK_K) & (stop > key_0 + key_tile):
        channel = tl.arange(0, BLOCK_D)
        own_a = a_ptr + queries * D + offsets(of_query, D, channel)
        own_b = b_ptr + keys * D + of_key.to(tl.int64)[None, :] * D + channel[:, None]
        products = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
        for c in range(0, D, BLOCK_D):
            inside = c + channel < D
            a = tl.load(own_a + c, mask=has_query[:, None] & inside[None, :], other=0.0)
            b = tl.load(own_b + c, mask=has_key[None, :] & inside[:, None], other=0.0)
            products = tl.dot(a, b, products, input_precision="tf32x3")
        variance = tl.load(variance_a_ptr + queries + of_query, mask=has_query, other=0.0)[:, None]
        variance += tl.load(variance_b_ptr + keys + of_key, mask=has_key, other=0.0)[None, :]
        # Where b_j is almost -a_i, rounding could make it negative.
        variance = tl.maximum(variance + products * (2.0 / D), 0.0)
        pairs = r_ptr + row * num_keys * num_queries + (of_key[None, :] * num_queries + of_query[:, None])
        tl.store(pairs, tl.rsqrt(variance + eps), mask=has_query[:, None] & has_key[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def sums(
    a_ptr,  # (B, T, D)
    b_ptr,  # (B, S, D)
    r_ptr,  # (B, keys, queries) fp32; None without a norm
    first_ptr,  # (B, T) int32
    end_ptr,  # (B, T) int32
    o_ptr,  # (B, T, D) fp32, to which is added
    T,
    D,
    query_0,
    num_queries,
    key_0,
    num_keys,
    stride_ab,
    stride_at,
    stride_bb,
    stride_bt,
    ACTIVATION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """o_i += Σ_j ψ((a_i + b_j) r_ij); programs (rows, tiles of queries, channels)."""
    row = tl.program_id(0).to(tl.int64)
    of_query = (tl.program_id(1).to(tl.int64) * BLOCK_Q).to(tl.int32) + tl.arange(0, BLOCK_Q)
    channel = (tl.program_id(2).to(tl.int64) * BLOCK_D).to(tl.int32) + tl.arange(0, BLOCK_D)
    inside = channel < D
    both = (of_query < num_queries)[:, None] & inside[None, :]
    queries = row * T + query_0
    first, end, begin, stop = ranges(first_ptr + queries, end_ptr + queries, of_query, num_queries)
    begin, stop = tl.maximum(begin, key_0), tl.minimum(stop, key_0 + num_keys)
    end = tl.minimum(end, stop)
    a_ptr += row * stride_ab + (row * 0 + query_0) * stride_at
    a = tl.load(a_ptr + offsets(of_query, stride_at, channel), mask=both, other=0.0).to(tl.float32)
    b_ptr += row * stride_bb + channel
    if r_ptr is not None:
        r_ptr += row * num_keys * num_queries
    total = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for tile in range(begin, stop, BLOCK_K):
        part = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
        for group in range(tile, tl.minimum(tile + BLOCK_K, stop), UNROLL):
            for step in tl.static_range(UNROLL):
                j = group + step
                b = tl.load(b_ptr + (row * 0 + tl.minimum(j, stop - 1)) * stride_bt, mask=inside, other=0.0)
                seen = (j >= first) & (j < end)
                s = a + b.to(tl.float32)[None, :]
                if r_ptr is not None:
                    s *= tl.load(r_ptr + ((j - key_0) * num_queries + of_query), mask=seen, other=0.0)[:, None]
                part += tl.where(seen[:, None], activate(s, ACTIVATION), 0.0)
        total += part
    o_ptr += queries * D + offsets(of_query, D, channel)
    if begin < stop:
        tl.store(o_ptr, tl.load(o_ptr, mask=both, other=0.0) + total, mask=both)

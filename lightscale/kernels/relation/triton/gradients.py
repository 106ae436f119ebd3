"""The kernels of the gradients; tiles, bands and unread pairs are those of ``kernels.py``.

With m_ij = mean(ψ'(s_ij) ⊙ do_i ⊙ s_ij) and w_ij = r_ij² m_ij, a pair adds to both gradients

    r_ij ψ'(s_ij) ⊙ do_i - w_ij (a_i + b_j)
"""

# Triton evaluates the hints of its kernels: their arguments cannot have any but tl.constexpr.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from lightscale.kernels.relation.triton.activations import slope
from lightscale.kernels.relation.triton.kernels import LENGTHS, offsets, ranges


@triton.jit(do_not_specialize=LENGTHS)
def shares(
    a_ptr,  # (B, T, D) fp32, contiguous, centered
    b_ptr,  # (B, S, D) fp32, contiguous, centered
    do_ptr,  # (B, T, D)
    r_ptr,  # (B, keys, queries) fp32
    first_ptr,  # (B, T) int32
    end_ptr,  # (B, T) int32
    w_ptr,  # (B, keys, queries) fp32
    T,
    S,
    D,
    query_0,
    num_queries,
    key_0,
    num_keys,
    stride_dob,
    stride_dot,
    ACTIVATION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """w_ij of all channels; programs (rows, tiles of keys, tiles of queries)."""
    row = tl.program_id(0).to(tl.int64)
    query_tile = (tl.program_id(2).to(tl.int64) * BLOCK_Q).to(tl.int32)
    key_tile = (tl.program_id(1).to(tl.int64) * BLOCK_K).to(tl.int32)
    of_query, of_key = query_tile + tl.arange(0, BLOCK_Q), key_tile + tl.arange(0, BLOCK_K)
    has_query, has_key = of_query < num_queries, of_key < num_keys
    queries = row * T + query_0
    _, _, begin, stop = ranges(first_ptr + queries, end_ptr + queries, of_query, num_queries)
    if (begin < key_0 + key_tile + BLOCK_K) & (stop > key_0 + key_tile):
        band = row * num_keys * num_queries
        pairs = of_key[None, :] * num_queries + of_query[:, None]
        exists = has_query[:, None] & has_key[None, :]
        r = tl.load(r_ptr + band + pairs, mask=exists, other=0.0)
        channel = tl.arange(0, BLOCK_D)
        own_a = a_ptr + queries * D + offsets(of_query, D, channel)
        own_b = b_ptr + (row * S + key_0) * D + offsets(of_key, D, channel)
        own_do = do_ptr + row * stride_dob + (row * 0 + query_0) * stride_dot + offsets(of_query, stride_dot, channel)
        total = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
        for c in range(0, D, BLOCK_D):
            inside = (c + channel < D)[None, :]
            a = tl.load(own_a + c, mask=has_query[:, None] & inside, other=0.0)
            b = tl.load(own_b + c, mask=has_key[:, None] & inside, other=0.0)
            do = tl.load(own_do + c, mask=has_query[:, None] & inside, other=0.0).to(tl.float32)
            s = (a[:, None, :] + b[None, :, :]) * r[:, :, None]
            total += tl.sum(slope(s, ACTIVATION) * s * do[:, None, :], 2)
        tl.store(w_ptr + band + pairs, r * r * total / D, mask=exists)


@triton.jit(do_not_specialize=LENGTHS)
def query_gradients(
    a_ptr,  # (B, T, D)
    b_ptr,  # (B, S, D)
    do_ptr,  # (B, T, D)
    r_ptr,  # (B, keys, queries) fp32; None without a norm, as w
    w_ptr,  # (B, keys, queries) fp32
    first_ptr,  # (B, T) int32
    end_ptr,  # (B, T) int32
    da_ptr,  # (B, T, D) fp32, to which is added
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
    stride_dob,
    stride_dot,
    ACTIVATION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """da_i += do_i ⊙ Σ_j r_ij ψ'(s_ij) - Σ_j w_ij (a_i + b_j); programs (tiles of queries of rows, channels)."""
    program = tl.program_id(0).to(tl.int64)
    query_tiles = tl.cdiv(num_queries, BLOCK_Q)
    row = program // query_tiles
    of_query = (program % query_tiles * BLOCK_Q).to(tl.int32) + tl.arange(0, BLOCK_Q)
    channel = (tl.program_id(1).to(tl.int64) * BLOCK_D).to(tl.int32) + tl.arange(0, BLOCK_D)
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
        w_ptr += row * num_keys * num_queries
    slopes = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    shared = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for tile in range(begin, stop, BLOCK_K):
        of_slopes = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
        of_shared = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
        for group in range(tile, tl.minimum(tile + BLOCK_K, stop), UNROLL):
            for step in tl.static_range(UNROLL):
                j = group + step
                b = tl.load(b_ptr + (row * 0 + tl.minimum(j, stop - 1)) * stride_bt, mask=inside, other=0.0)
                seen = (j >= first) & (j < end)
                c = tl.where(seen[:, None], a + b.to(tl.float32)[None, :], 0.0)
                if r_ptr is not None:
                    pairs = (j - key_0) * num_queries + of_query
                    r = tl.load(r_ptr + pairs, mask=seen, other=0.0)[:, None]
                    of_slopes += r * slope(c * r, ACTIVATION)
                    of_shared += tl.load(w_ptr + pairs, mask=seen, other=0.0)[:, None] * c
                else:
                    of_slopes += tl.where(seen[:, None], slope(c, ACTIVATION), 0.0)
        slopes += of_slopes
        shared += of_shared
    do_ptr += row * stride_dob + (row * 0 + query_0) * stride_dot + offsets(of_query, stride_dot, channel)
    da_ptr += queries * D + offsets(of_query, D, channel)
    if begin < stop:
        do = tl.load(do_ptr, mask=both, other=0.0).to(tl.float32)
        tl.store(da_ptr, tl.load(da_ptr, mask=both, other=0.0) + (do * slopes - shared), mask=both)


@triton.jit(do_not_specialize=LENGTHS)
def key_gradients(
    a_ptr,  # (B, T, D)
    b_ptr,  # (B, S, D)
    do_ptr,  # (B, T, D)
    r_ptr,  # (B, keys, queries) fp32; None without a norm, as w
    w_ptr,  # (B, keys, queries) fp32
    first_ptr,  # (B, T) int32
    end_ptr,  # (B, T) int32
    db_ptr,  # (B, S, D) fp32, to which is added
    T,
    S,
    D,
    query_0,
    num_queries,
    key_0,
    num_keys,
    stride_ab,
    stride_at,
    stride_bb,
    stride_bt,
    stride_dob,
    stride_dot,
    ACTIVATION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """db_j += Σ_i r_ij ψ'(s_ij) ⊙ do_i - w_ij (a_i + b_j); programs (rows, tiles of keys, channels)."""
    row = tl.program_id(0).to(tl.int64)
    key_tile = (tl.program_id(1).to(tl.int64) * BLOCK_K).to(tl.int32)
    channel = (tl.program_id(2).to(tl.int64) * BLOCK_D).to(tl.int32) + tl.arange(0, BLOCK_D)
    of_key = key_tile + tl.arange(0, BLOCK_K)
    j, inside = key_0 + of_key, channel < D
    both = (of_key < num_keys)[:, None] & inside[None, :]
    b_ptr += row * stride_bb + (row * 0 + key_0) * stride_bt
    b = tl.load(b_ptr + offsets(of_key, stride_bt, channel), mask=both, other=0.0).to(tl.float32)
    queries = row * T + query_0
    first_ptr += queries
    end_ptr += queries
    a_ptr += row * stride_ab + (row * 0 + query_0) * stride_at + channel
    do_ptr += row * stride_dob + (row * 0 + query_0) * stride_dot + channel
    pairs = of_key * num_queries
    if r_ptr is not None:
        r_ptr += row * num_keys * num_queries
        w_ptr += row * num_keys * num_queries
    total = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    for tile in range(0, num_queries, BLOCK_Q):
        _, _, begin, stop = ranges(first_ptr, end_ptr, tile + tl.arange(0, BLOCK_Q), num_queries)
        if (begin < key_0 + key_tile + BLOCK_K) & (stop > key_0 + key_tile):
            part = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
            for group in range(tile, tl.minimum(tile + BLOCK_Q, num_queries), UNROLL):
                for step in tl.static_range(UNROLL):
                    q = group + step
                    # A query beyond the last one has an empty range.
                    first = tl.load(first_ptr + q, mask=q < num_queries, other=0)
                    end = tl.load(end_ptr + q, mask=q < num_queries, other=0)
                    i = row * 0 + tl.minimum(q, num_queries - 1)
                    a = tl.load(a_ptr + i * stride_at, mask=inside, other=0.0).to(tl.float32)
                    do = tl.load(do_ptr + i * stride_dot, mask=inside, other=0.0).to(tl.float32)
                    seen = (j >= first) & (j < tl.minimum(end, key_0 + num_keys))
                    c = a[None, :] + b
                    if r_ptr is not None:
                        r = tl.load(r_ptr + (pairs + q), mask=seen, other=0.0)[:, None]
                        w = tl.load(w_ptr + (pairs + q), mask=seen, other=0.0)[:, None]
                        added = r * slope(c * r, ACTIVATION) * do[None, :] - w * c
                    else:
                        added = slope(c, ACTIVATION) * do[None, :]
                    part += tl.where(seen[:, None], added, 0.0)
            total += part
    db_ptr += (row * S + key_0) * D + offsets(of_key, D, channel)
    tl.store(db_ptr, tl.load(db_ptr, mask=both, other=0.0) + total, mask=both)

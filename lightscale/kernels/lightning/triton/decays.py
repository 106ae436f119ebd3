"""Decays in the Triton kernels of lightning attention: powers of a head's decay, and decays per head and token.

From one token to a later one the decay is the exponential of a sum of log decays: a difference of sums from the chunk's
start. Strong decays make these sums large, and a small difference of large fp32 numbers is off by more than 1e-5. So
each sum has two fp32 parts, ``sums`` (B, H, 2, T), computed once per call. Names of shapes are those of ``kernels.py``.
"""

import triton
import triton.language as tl


@triton.jit
def power(log_decay, steps):
    """λ^steps; 1 for 0 steps, even if log λ is -inf."""
    return tl.exp(tl.where(steps > 0, steps.to(tl.float32) * log_decay, 0.0))


@triton.jit(do_not_specialize=["T", "num_chunks"])
def sum_decays(
    log_decay,  # (B, T, H) fp32
    sums,  # (B, H, 2, T) fp32
    T,
    H,
    num_chunks,
    stride_b,
    stride_t,
    stride_h,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The sums of some heads' log decays from the chunk's start, in fp64; -1000 replaces -inf, whose exp is 0 too."""
    head_tiles = tl.cdiv(H, HEADS)
    program = tl.program_id(0).to(tl.int64)
    heads = program % head_tiles * HEADS + tl.arange(0, HEADS)[None, :]
    chunk = program // head_tiles % num_chunks
    row = program // (head_tiles * num_chunks)
    t = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
    inside = (t < T) & (heads < H)
    logs = tl.load(log_decay + row * stride_b + t * stride_t + heads * stride_h, mask=inside, other=0.0)
    whole = tl.cumsum(tl.maximum(logs, -1000.0).to(tl.float64), 0)
    high = whole.to(tl.float32)
    at = sums + (row * H + heads) * 2 * T + t
    tl.store(at, high, mask=inside)
    tl.store(at + T, (whole - high.to(tl.float64)).to(tl.float32), mask=inside)


@triton.jit
def load_sums(of_head, T, t, mask):
    """Both parts of the sums through tokens t; 0 outside."""
    return tl.load(of_head + t, mask=mask, other=0.0), tl.load(of_head + T + t, mask=mask, other=0.0)


@triton.jit
def load_sum(of_head, T, t):
    """Both parts of the sum through one existing token."""
    return tl.load(of_head + t), tl.load(of_head + T + t)


@triton.jit
def decay_between(high, low, from_high, from_low):
    """The decay from some sums to later ones. Earlier sums would overflow and give 1 instead, which is unused."""
    return tl.exp(tl.minimum((high - from_high) + (low - from_low), 0.0))


@triton.jit
def crossing(pairs, before, i, j, own_start, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Σ of the reads of queries i across each token j: all reads ``before`` their partners j, and ``pairs``.

    A pair (i, s) crosses j when s < j <= i. Each pair is added once: no terms cancel. The selection drops overflows of
    other documents.
    """
    earlier = (j[:, None] < j[None, :]).to(dtype)
    found = tl.zeros([i.shape[0], j.shape[0]], dtype=tl.float32) + before[:, None]
    found = tl.dot(pairs.to(dtype), earlier, found, input_precision=PRECISION)
    crossed = (j[None, :] <= i[:, None]) & (own_start[:, None] <= j[None, :])
    return tl.sum(tl.where(crossed, found, 0.0), 0)


@triton.jit(do_not_specialize=["T", "num_chunks", "num_token_tiles"])
def gather_decays(
    by_queries,  # (B, token tiles, H, Q tiles, C) fp32: parts of the chunk's tokens through the tile's last one
    by_keys,  # (B, token tiles, H, K tiles, C) fp32: parts of the chunk's tokens from the tile's first one on
    by_states,  # (B, H, N, S tiles) fp32: parts of all tokens of a chunk
    dlog_decay,  # (B, T, H) fp32, contiguous
    T,
    H,
    num_chunks,
    num_token_tiles,
    QUERY_TILES: tl.constexpr,
    KEY_TILES: tl.constexpr,
    STATE_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The gradient of the log decays of a chunk, from its parts."""
    program = tl.program_id(0).to(tl.int64)
    chunk = program % num_chunks
    head = program // num_chunks % H
    row = program // (num_chunks * H)
    begin = chunk * CHUNK
    length = tl.minimum(CHUNK, T - begin).to(tl.int32)
    t = tl.arange(0, CHUNK)
    inside = t < length
    total = tl.zeros([CHUNK], dtype=tl.float32)
    for tile in range(STATE_TILES):
        total += tl.load(by_states + program * STATE_TILES + tile)
    for first in range(0, length, BLOCK_T):
        of_tile = (row * num_token_tiles + (begin + first) // BLOCK_T) * H + head
        for tile in range(QUERY_TILES):
            at = by_queries + (of_tile * QUERY_TILES + tile) * CHUNK + t
            total += tl.load(at, mask=inside & (t < first + BLOCK_T), other=0.0)
        for tile in range(KEY_TILES):
            at = by_keys + (of_tile * KEY_TILES + tile) * CHUNK + t
            total += tl.load(at, mask=inside & (t >= first), other=0.0)
    tl.store(dlog_decay + (row * T + begin + t) * H + head, total, mask=inside)

"""The kernels: running sums of a split forward, and of their cotangents backward, some channels per program.

A program sums the tokens of a chunk, then adds the sum that entered the chunk. One sum over all tokens would lose
single terms in fp32. Inside kernels log 0 is -1e38, so that no difference is NaN.
"""

import triton
import triton.language as tl


@triton.jit
def _log_add(x, y):
    """log(e^x + e^y), with -1e38 for log 0."""
    most = tl.maximum(x, y)
    return most + tl.log(1.0 + tl.exp(tl.minimum(x, y) - most))


@triton.jit(do_not_specialize=["T", "split_tokens", "num_splits"])
def scan(
    b_ptr,  # (B, T, D)
    starts_ptr,  # (B, T), not 0 where a document begins inside the row
    entering_ptr,  # (B, S, D) fp32: the sum that enters each split
    z_ptr,  # (B, T, D) fp32
    last_ptr,  # (B, S, D) fp32: the sum of each split's last document, by the split alone
    T,
    D,
    split_tokens,
    num_splits,
    stride_bb,
    stride_bt,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """z of every token, or the sums that leave the splits; programs (rows, channels, splits)."""
    NOTHING: tl.constexpr = -1e38
    channel = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    inside = channel < D
    first = split * split_tokens
    end = tl.minimum(first + split_tokens, T)
    state = row * num_splits * D + split * D + channel
    carried = tl.full((BLOCK_D,), NOTHING, tl.float32)
    if entering_ptr is not None:
        carried = tl.maximum(tl.load(entering_ptr + state, mask=inside, other=NOTHING), NOTHING)
    z = carried
    # One inner loop per chunk: a single loop over all tokens, with a selection at the edges of chunks, gave wrong sums
    # with Triton 3.6 on an H200.
    for chunk in range(first, end, CHUNK):
        carried = z
        running = tl.full((BLOCK_D,), NOTHING, tl.float32)
        for t in range(chunk, tl.minimum(chunk + CHUNK, end)):
            term = tl.load(b_ptr + row * stride_bb + t * stride_bt + channel, mask=inside, other=NOTHING).to(tl.float32)
            if starts_ptr is not None:
                begins = tl.load(starts_ptr + row * T + t) != 0
                carried = tl.where(begins, NOTHING, carried)
                running = tl.where(begins, NOTHING, running)
            running = _log_add(running, tl.maximum(term, NOTHING))
            z = _log_add(carried, running)
            if z_ptr is not None:
                written = tl.where(z <= NOTHING / 2, float("-inf"), z)
                tl.store(z_ptr + (row * T + t) * D + channel, written, mask=inside)
    if last_ptr is not None:
        tl.store(last_ptr + state, tl.where(z <= NOTHING / 2, float("-inf"), z), mask=inside)


@triton.jit(do_not_specialize=["T", "split_tokens", "num_splits"])
def scan_back(
    b_ptr,  # (B, T, D)
    z_ptr,  # (B, T, D) fp32
    dz_ptr,  # (B, T, D)
    starts_ptr,  # (B, T)
    behind_ptr,  # (B, S, D) fp32: the cotangent of each split's last sum by the tokens behind the split
    db_ptr,  # (B, T, D)
    first_ptr,  # (B, S, D) fp32: the cotangent of each split's first sum by the split alone
    T,
    D,
    split_tokens,
    num_splits,
    stride_bb,
    stride_bt,
    stride_zb,
    stride_zt,
    stride_dzb,
    stride_dzt,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """db of every token, or the cotangents of the splits' first sums; programs (rows, channels, splits)."""
    channel = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    inside = channel < D
    first = split * split_tokens
    end = tl.minimum(first + split_tokens, T)
    state = row * num_splits * D + split * D + channel
    # The term of the chunk behind, times e^{z of this token - z of that chunk's edge}; and the chunk's own term.
    from_behind = tl.zeros((BLOCK_D,), tl.float32)
    if behind_ptr is not None:
        from_behind = tl.load(behind_ptr + state, mask=inside, other=0.0)
    own = tl.zeros((BLOCK_D,), tl.float32)
    z_behind = tl.load(z_ptr + row * stride_zb + (end - 1) * stride_zt + channel, mask=inside, other=0.0)
    for back in range(end - first):
        t = end - 1 - back
        z = tl.load(z_ptr + row * stride_zb + t * stride_zt + channel, mask=inside, other=0.0)
        dz = tl.load(dz_ptr + row * stride_dzb + t * stride_dzt + channel, mask=inside, other=0.0).to(tl.float32)
        # This token's share of the next token's sum; 0 if the sum is log 0.
        share = tl.exp(tl.maximum(z, -1e38) - tl.maximum(z_behind, -1e38))
        share = tl.where(z == float("-inf"), 0.0, share)
        if starts_ptr is not None:
            begins_behind = tl.load(starts_ptr + row * T + t + 1, mask=back > 0, other=0) != 0
            share = tl.where(begins_behind, 0.0, share)
        from_behind *= share
        own *= share
        if back % CHUNK == 0:
            from_behind += own
            own = tl.zeros((BLOCK_D,), tl.float32)
        own += dz
        if db_ptr is not None:
            term = tl.load(b_ptr + row * stride_bb + t * stride_bt + channel, mask=inside, other=0.0).to(tl.float32)
            share = tl.where(z == float("-inf"), 0.0, tl.exp(term - tl.maximum(z, -1e38)))
            db = share * (own + from_behind)
            tl.store(db_ptr + (row * T + t) * D + channel, db.to(db_ptr.dtype.element_ty), mask=inside)
        z_behind = z
    if first_ptr is not None:
        tl.store(first_ptr + state, own + from_behind, mask=inside)

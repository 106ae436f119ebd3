"""The Triton kernels of decay attention: states at chunk starts, their prefix over spans, and outputs.

A row is cut into chunks of CHUNK tokens, and these into blocks of BLOCK; a span is some whole chunks that one program
goes through in turn. Names of shapes: B rows, T tokens, H heads, N chunks, S spans. x and y are what is multiplied
per pair of tokens, y and z what a state is made of. All arithmetic is fp32; half-precision operands go to the tensor
cores as they are. README.md here has the mathematics, the tiling and the counts.

``starts`` (B, T) int32 is the place in the row at which the token's document begins, -1 for the row's first one, so
that a key j is of query i's document when j >= starts[i], and a query reads the state that enters a chunk when its
document starts before the chunk.
"""

import triton
import triton.language as tl

from lightscale.kernels.common.triton_kernels import exists, last_start, own_starts, scan_place


@triton.jit
def _power(log_decay, steps):
    """λ^steps; 1 for no steps also when log λ is -inf."""
    return tl.exp(tl.where(steps > 0, steps.to(tl.float32) * log_decay, 0.0))


@triton.jit(do_not_specialize=["T", "num_chunks", "num_spans", "span_chunks"])
def scan_states(
    x,  # (B, T, H, K): keys; queries in reverse
    y,  # (B, T, H, V): values; cotangents of the outputs in reverse
    log_decay,  # (H,) fp32, or None
    starts,  # (B, T), or None
    entering,  # (B, H, S, K, V) fp32: what enters each span, or None for zero
    leaving,  # (B, H, S, K, V) fp32: what leaves each span, or None
    chunk_states,  # (B, H, N, K, V): what enters each chunk, or None
    other_states,  # (B, H, N, K, V): the states of the forward scan, or None
    decay_parts,  # (B, H, S, K tiles, V tiles) fp32: through other_states' part of dlog_decay
    T,
    H,
    num_chunks,
    num_spans,
    span_chunks,
    stride_xb,
    stride_xt,
    stride_xh,
    stride_yb,
    stride_yt,
    stride_yh,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Go through a span's chunks with a tile of the state: S <- λ^L S + Σ weight x yᵀ.

    In reverse the state is the cotangent of the state that leaves a chunk, and "enters" means from behind.
    """
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    row, head, span, tile_k, tile_v = scan_place(H, num_spans, K_TILES, V_TILES)

    cols_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    cols_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    has_k, has_v = exists(cols_k, K, BLOCK_K), exists(cols_v, V, BLOCK_V)
    in_tile = has_k[:, None] & has_v[None, :]
    within = cols_k[:, None] * V + cols_v[None, :]
    of_span = ((row * H + head) * num_spans + span) * K * V
    x_head = x + row * stride_xb + head * stride_xh
    y_head = y + row * stride_yb + head * stride_yh
    rate = 0.0
    if log_decay is not None:
        rate = tl.load(log_decay + head)

    state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    if entering is not None:
        state = tl.load(entering + of_span + within, mask=in_tile, other=0.0)
    decay_part = 0.0
    first_chunk = span * span_chunks
    span_end = tl.minimum(first_chunk + span_chunks, num_chunks)
    for step in range(span_end - first_chunk):
        chunk = first_chunk + step
        if REVERSE:
            chunk = span_end - 1 - step
        begin = chunk * CHUNK
        length = tl.minimum(CHUNK, T - begin).to(tl.int32)
        of_chunk = ((row * H + head) * num_chunks + chunk) * K * V
        if chunk_states is not None:
            rounded = state.to(chunk_states.dtype.element_ty)
            tl.store(chunk_states + of_chunk + within, rounded, mask=in_tile)

        # What goes through the whole chunk. Places in the chunk are counted from its begin.
        last = last_start(starts, row * T, begin, length)
        if log_decay is not None:
            state *= _power(rate, length)
        if starts is not None:
            state = tl.where(last < 0, state, 0.0)
        if other_states is not None:
            other = tl.load(other_states + of_chunk + within, mask=in_tile, other=0.0).to(tl.float32)
            decay_part += tl.sum(tl.sum(state * other, 1), 0) * length.to(tl.float32)

        for block in tl.static_range(CHUNK // BLOCK):
            i = block * BLOCK + tl.arange(0, BLOCK)
            t = begin + i
            kept = i < length
            if starts is not None:
                if REVERSE:
                    kept = kept & (own_starts(starts, row * T, begin, i, length) < 0)
                else:
                    kept = kept & (i >= last)
            x_columns = x_head + t[None, :] * stride_xt + cols_k[:, None]
            x_tile = tl.load(x_columns, mask=kept[None, :] & has_k[:, None], other=0.0)
            y_rows = y_head + t[:, None] * stride_yt + cols_v[None, :]
            y_tile = tl.load(y_rows, mask=kept[:, None] & has_v[None, :], other=0.0)
            if log_decay is not None:
                steps = length - 1 - i
                if REVERSE:
                    steps = i + 1
                y_tile = (y_tile.to(tl.float32) * _power(rate, steps)[:, None]).to(y_tile.dtype)
            state = tl.dot(x_tile, y_tile, state, input_precision=PRECISION)

    if leaving is not None:
        tl.store(leaving + of_span + within, state, mask=in_tile)
    if other_states is not None:
        part = ((row * H + head) * num_spans + span) * K_TILES * V_TILES + tile_k * V_TILES + tile_v
        tl.store(decay_parts + part, decay_part)


@triton.jit(do_not_specialize=["T", "num_spans", "span_tokens"])
def fold_spans(
    local,  # (B, H, S, K V) fp32: what leaves each span when nothing enters it
    initial,  # (B, H, K V) fp32, or None for zero
    log_decay,  # (H,) fp32, or None
    starts,  # (B, T), or None
    entering,  # (B, H, S, K V) fp32: what enters each span, or None
    final,  # (B, H, K V) fp32: what leaves the last
    T,
    H,
    num_spans,
    span_tokens,
    num_elements,  # K V
    ELEMENTS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """The states between spans, one after the other; a program has some elements of a head's state."""
    num_tiles = tl.cdiv(num_elements, ELEMENTS)
    program = tl.program_id(0).to(tl.int64)
    row_head = program // num_tiles
    row, head = row_head // H, row_head % H
    i = program % num_tiles * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = i < num_elements
    rate = 0.0
    if log_decay is not None:
        rate = tl.load(log_decay + head)
    state = tl.zeros([ELEMENTS], dtype=tl.float32)
    if initial is not None:
        state = tl.load(initial + row_head * num_elements + i, mask=inside, other=0.0)
    for step in range(num_spans):
        span = step
        if REVERSE:
            span = num_spans - 1 - step
        begin = span * span_tokens
        end = tl.minimum(begin + span_tokens, T)
        at = (row_head * num_spans + span) * num_elements + i
        if entering is not None:
            tl.store(entering + at, state, mask=inside)
        if log_decay is not None:
            state *= _power(rate, end - begin)
        if starts is not None:
            state = tl.where(tl.load(starts + row * T + end - 1) < begin, state, 0.0)
        state += tl.load(local + at, mask=inside, other=0.0)
    tl.store(final + row_head * num_elements + i, state, mask=inside)


@triton.jit
def _read(
    x_rows,
    x_first,
    state,
    inside,
    cols_z,
    X: tl.constexpr,
    Z: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x S of some rows, whose first tile of columns is ``x_first``, and some columns of a chunk's state."""
    has_z = exists(cols_z, Z, BLOCK_Z)[None, :]
    x_tile = x_first
    acc = tl.zeros([x_first.shape[0], BLOCK_Z], dtype=tl.float32)
    for tile in tl.static_range((X + BLOCK_X - 1) // BLOCK_X):
        cols = tile * BLOCK_X + tl.arange(0, BLOCK_X)
        has_x = exists(cols, X, BLOCK_X)
        if tile > 0:
            x_tile = tl.load(x_rows + cols[None, :], mask=inside & has_x[None, :], other=0.0)
        at = cols[:, None] * Z + cols_z[None, :]
        if TRANSPOSED:
            at = cols_z[None, :] * X + cols[:, None]
        part = tl.load(state + at, mask=has_x[:, None] & has_z, other=0.0)
        acc = tl.dot(x_tile.to(part.dtype), part, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _scores(
    x_rows,
    x_first,
    y_columns,
    inside,
    has_partner,
    X: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x yᵀ of some rows, whose first tile of columns is ``x_first``, and as many partners."""
    X_TILES: tl.constexpr = (X + BLOCK_X - 1) // BLOCK_X
    x_tile = x_first
    scores = tl.zeros([x_first.shape[0], x_first.shape[0]], dtype=tl.float32)
    for tile in tl.static_range(X_TILES):
        cols = tile * BLOCK_X + tl.arange(0, BLOCK_X)
        has_x = exists(cols, X, BLOCK_X)
        # Several tiles are not kept in registers from one block of partners to the next.
        if X_TILES > 1:
            x_tile = tl.load(x_rows + cols[None, :], mask=inside & has_x[None, :], other=0.0)
        y_tile = tl.load(y_columns + cols[:, None], mask=has_partner[None, :] & has_x[:, None], other=0.0)
        scores = tl.dot(x_tile, y_tile, scores, input_precision=PRECISION)
    return scores


@triton.jit(do_not_specialize=["T", "num_chunks", "num_blocks"])
def attend(
    x,  # (B, T, H, X): of the tokens that the program computes
    y,  # (B, T, H, X): of their partners
    z,  # (B, T, H, Z): of their partners
    states,  # (B, H, N, X, Z), or (B, H, N, Z, X) when TRANSPOSED
    log_decay,  # (H,) fp32, or None
    starts,  # (B, T), or None
    out,  # (B, T, H, Z), contiguous
    own,  # (B, T, H, Z): what `out` is the gradient of, or None
    decay_parts,  # (B, blocks, H, Z tiles) fp32: these tokens' part of dlog_decay
    T,
    H,
    num_chunks,
    num_blocks,
    stride_xb,
    stride_xt,
    stride_xh,
    stride_yb,
    stride_yt,
    stride_yh,
    stride_zb,
    stride_zt,
    stride_zh,
    stride_ob,
    stride_ot,
    stride_oh,
    X: tl.constexpr,
    Z: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    REVERSE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = (x yᵀ ⊙ M) z + weight x S for a block of tokens.

    Forward, tokens are queries and M_ij = λ^(i-j) for i >= j; in reverse they are keys and M is transposed. With
    x, y, z = q, k, v this gives o; do, v, k: dq; in reverse v, do, q: dk; k, q, do: dv.
    """
    Z_TILES: tl.constexpr = (Z + BLOCK_Z - 1) // BLOCK_Z
    program = tl.program_id(0).to(tl.int64)
    tile_z = program % Z_TILES
    head = program // Z_TILES % H
    block = program // (Z_TILES * H) % num_blocks
    row = program // (Z_TILES * H * num_blocks)

    chunk = block * BLOCK // CHUNK
    begin = chunk * CHUNK
    length = tl.minimum(CHUNK, T - begin).to(tl.int32)
    # Places in the chunk are counted from its begin.
    first = (block * BLOCK - begin).to(tl.int32)
    i = first + tl.arange(0, BLOCK)
    inside = (i < length)[:, None]
    cols_z = tile_z * BLOCK_Z + tl.arange(0, BLOCK_Z)
    has_z = exists(cols_z, Z, BLOCK_Z)[None, :]
    cols_x = tl.arange(0, BLOCK_X)
    x_rows = x + row * stride_xb + head * stride_xh + (begin + i)[:, None] * stride_xt
    y_chunk = y + row * stride_yb + head * stride_yh + begin * stride_yt
    z_chunk = z + row * stride_zb + head * stride_zh + begin * stride_zt
    own_start = own_starts(starts, row * T, begin, i, length)
    rate = 0.0
    if log_decay is not None:
        rate = tl.load(log_decay + head)

    # The state that enters the chunk; in reverse, the cotangent of the one that leaves it.
    x_first = tl.load(x_rows + cols_x[None, :], mask=inside & exists(cols_x, X, BLOCK_X)[None, :], other=0.0)
    state = states + ((row * H + head) * num_chunks + chunk) * X * Z
    acc = _read(x_rows, x_first, state, inside, cols_z, X, Z, BLOCK_X, BLOCK_Z, TRANSPOSED, PRECISION)
    steps = i + 1
    if REVERSE:
        steps = length - 1 - i
    if log_decay is not None:
        acc *= _power(rate, steps)[:, None]
    if starts is not None:
        kept = own_start < 0
        if REVERSE:
            kept = i >= last_start(starts, row * T, begin, length)
        acc = tl.where(kept[:, None], acc, 0.0)
    decay_part = tl.zeros([BLOCK], dtype=tl.float32)
    if own is not None:
        own_rows = own + row * stride_ob + head * stride_oh + (begin + i)[:, None] * stride_ot
        own_tile = tl.load(own_rows + cols_z[None, :], mask=inside & has_z, other=0.0)
        decay_part = tl.sum(own_tile.to(tl.float32) * acc, 1) * steps.to(tl.float32)

    # The tokens of the chunk.
    lowest, highest = 0, first + 1
    if REVERSE:
        lowest, highest = first, length
    for partner in range(lowest, highest, BLOCK):
        j = partner + tl.arange(0, BLOCK)
        has_partner = j < length
        y_columns = y_chunk + j.to(tl.int64)[None, :] * stride_yt
        scores = _scores(x_rows, x_first, y_columns, inside, has_partner, X, BLOCK_X, PRECISION)
        distance = i[:, None] - j[None, :]
        if REVERSE:
            distance = j[None, :] - i[:, None]
        pairs = (distance >= 0) & has_partner[None, :]
        if starts is not None:
            if REVERSE:
                pairs = pairs & (own_starts(starts, row * T, begin, j, length)[None, :] <= i[:, None])
            else:
                pairs = pairs & (own_start[:, None] <= j[None, :])
        if log_decay is not None:
            scores *= _power(rate, distance)
        scores = tl.where(pairs, scores, 0.0)
        z_rows = z_chunk + j.to(tl.int64)[:, None] * stride_zt + cols_z[None, :]
        z_tile = tl.load(z_rows, mask=has_partner[:, None] & has_z, other=0.0)
        acc = tl.dot(scores.to(z_tile.dtype), z_tile, acc, input_precision=PRECISION)
        if own is not None and not REVERSE:
            # Each pair once, by its distance: not as a difference of sums over tokens, which would nearly cancel.
            z_columns = z_chunk + j.to(tl.int64)[None, :] * stride_zt + cols_z[:, None]
            has_column = has_partner[None, :] & exists(cols_z, Z, BLOCK_Z)[:, None]
            products = tl.dot(own_tile, tl.load(z_columns, mask=has_column, other=0.0), input_precision=PRECISION)
            decay_part += tl.sum(tl.where(pairs, scores * products * distance.to(tl.float32), 0.0), 1)

    at = ((row * T + begin + i[:, None]) * H + head) * Z + cols_z[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside & has_z)
    if own is not None:
        tl.store(decay_parts + program, tl.sum(tl.where(i < length, decay_part, 0.0), 0))

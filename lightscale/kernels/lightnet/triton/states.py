"""The forward scans of LightNet's Triton kernels: states of chunks and splits, and z of every token.

Names of shapes and arguments are those of ``kernels.py``.
"""

# Triton evaluates the hints of its kernels: their arguments cannot have any but tl.constexpr.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from lightscale.kernels.common.triton.kernels import exists, positions_at, scan_program, wave
from lightscale.kernels.lightnet.triton.kernels import (
    EMPTY,
    LEAST,
    RISE,
    finite,
    half_program,
    origin_of,
    share_of,
    token_program,
)


@triton.jit(do_not_specialize=["T", "num_chunks", "num_splits", "split_chunks"])
def scan_states(
    k,  # (B, T, H, K)
    v,  # (B, T, H, V)
    turns,
    positions,
    starts,
    enter_tops,  # (B, H, S, K) fp32: a reference of the state that enters each split, -inf for empty; or None
    enter_logs,  # (B, H, S, K) fp32: its z less that; None for 0
    enter_states,  # (B, H, S, R, V) fp32, or None
    leave_tops,  # (B, H, S, K) fp32: of the state that leaves each split; its z where leave_logs is None
    leave_logs,  # (B, H, S, K) fp32, or None
    leave_states,  # (B, H, S, R, V) fp32, or None
    states,  # (B, H, N, R, V): the state that enters each chunk, or None
    tops,  # (B, H, N + 1, K) fp32: the largest key before each chunk, and at the end
    logs,  # (B, H, N + 1, K) fp32: z less that
    T,
    H,
    num_chunks,
    num_splits,
    split_chunks,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    AXES: tl.constexpr,
):
    """Scan a split's chunks with a tile of Σ e^(k - top) φ vᵀ, and with Σ e^(k - top) per channel."""
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    R: tl.constexpr = K if turns is None else 2 * K
    row, head, split, tile_k, tile_v = scan_program(H, num_splits, K_TILES, V_TILES)
    row_head = row * H + head
    of_split = row_head * num_splits + split

    cols_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    cols_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    has_k, has_v = exists(cols_k, K, BLOCK_K), exists(cols_v, V, BLOCK_V)
    in_tile = has_k[:, None] & has_v[None, :]
    within = cols_k[:, None] * V + cols_v[None, :]
    k_head = k + row * stride_kb + head * stride_kh
    v_head = v + row * stride_vb + head * stride_vh

    top = tl.full([BLOCK_K], EMPTY, tl.float32)
    mass = tl.zeros([BLOCK_K], dtype=tl.float32)
    if enter_tops is not None:
        top = tl.load(enter_tops + of_split * K + cols_k, mask=has_k, other=EMPTY)
        mass += 1.0
        if enter_logs is not None:
            mass = tl.exp(tl.load(enter_logs + of_split * K + cols_k, mask=has_k, other=0.0))
        mass = tl.where(top > EMPTY, mass, 0.0)
    # The rounding errors of the sum of weights so far: it stays exact over any number of chunks.
    lost = tl.zeros([BLOCK_K], dtype=tl.float32)
    first = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    second = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    if enter_states is not None:
        written = in_tile & (top > EMPTY)[:, None]
        first = tl.load(enter_states + of_split * R * V + within, mask=written, other=0.0) * mass[:, None]
        if turns is not None:
            second = tl.load(enter_states + of_split * R * V + K * V + within, mask=written, other=0.0)
            second *= mass[:, None]

    first_chunk = split * split_chunks
    split_end = tl.minimum(first_chunk + split_chunks, num_chunks)
    for step in range(split_end - first_chunk):
        chunk = first_chunk + step
        begin = chunk * CHUNK
        length = tl.minimum(CHUNK, T - begin).to(tl.int32)
        if states is not None:
            inverse = tl.where(mass > 0.0, 1.0 / tl.maximum(mass, 1e-30), 0.0)[:, None]
            of_chunk = states + (row_head * num_chunks + chunk) * R * V + within
            tl.store(of_chunk, (first * inverse).to(states.dtype.element_ty), mask=in_tile)
            if turns is not None:
                tl.store(of_chunk + K * V, (second * inverse).to(states.dtype.element_ty), mask=in_tile)
            if tile_v == 0:
                of_top = (row_head * (num_chunks + 1) + chunk) * K + cols_k
                tl.store(tops + of_top, top, mask=has_k)
                tl.store(logs + of_top, tl.log(tl.maximum(mass, 1e-30)), mask=has_k)

        # The leaving state holds the chunk's last document only. Positions are positions in the chunk.
        last_start = -1
        if starts is not None:
            last_start = (tl.load(starts + row * T + begin + length - 1) - begin).to(tl.int32)
            top = tl.where(last_start < 0, top, EMPTY)
            mass = tl.where(last_start < 0, mass, 0.0)
            first = tl.where(last_start < 0, first, 0.0)
            second = tl.where(last_start < 0, second, 0.0)
        highest = top
        for tile_t in range(0, CHUNK, BLOCK_T):
            i = tile_t + tl.arange(0, BLOCK_T)
            kept = (i < length) & (i >= last_start)
            k_columns = k_head + (begin + i)[None, :] * stride_kt + cols_k[:, None]
            keys = tl.load(k_columns, mask=kept[None, :] & has_k[:, None], other=EMPTY).to(tl.float32)
            highest = tl.maximum(highest, tl.max(keys, 1))
        share = share_of(top, finite(highest))
        top = highest
        first *= share[:, None]
        second *= share[:, None]
        added = tl.zeros([BLOCK_K], dtype=tl.float32)
        for tile_t in range(0, CHUNK, BLOCK_T):
            i = tile_t + tl.arange(0, BLOCK_T)
            t = begin + i
            kept = (i < length) & (i >= last_start)
            k_columns = k_head + t[None, :] * stride_kt + cols_k[:, None]
            keys = tl.load(k_columns, mask=kept[None, :] & has_k[:, None], other=EMPTY).to(tl.float32)
            writes = tl.exp(keys - finite(top)[:, None])
            added += tl.sum(writes, 1)
            v_rows = v_head + t[:, None] * stride_vt + cols_v[None, :]
            values = tl.load(v_rows, mask=kept[:, None] & has_v[None, :], other=0.0).to(COMPUTE)
            if turns is None:
                first = tl.dot(writes.to(COMPUTE), values, first, input_precision=PRECISION)
            else:
                token_positions = positions_at(positions, row * T + t, kept, head, H, AXES)[None, :]
                turns_k = tl.load(turns + head * K + cols_k, mask=has_k, other=0)[:, None]
                x = wave(token_positions, turns_k, 0)
                first = tl.dot((writes * x).to(COMPUTE), values, first, input_precision=PRECISION)
                y = wave(token_positions, turns_k, 1)
                second = tl.dot((writes * y).to(COMPUTE), values, second, input_precision=PRECISION)
        mass *= share
        added -= lost * share
        total = mass + added
        lost = (total - mass) - added
        mass = total

    log = tl.log(tl.maximum(mass, 1e-30))
    if leave_states is not None:
        inverse = tl.where(mass > 0.0, 1.0 / tl.maximum(mass, 1e-30), 0.0)[:, None]
        tl.store(leave_states + of_split * R * V + within, first * inverse, mask=in_tile)
        if turns is not None:
            tl.store(leave_states + of_split * R * V + K * V + within, second * inverse, mask=in_tile)
        if tile_v == 0:
            if leave_logs is None:
                tl.store(leave_tops + of_split * K + cols_k, top + log, mask=has_k)
            else:
                tl.store(leave_tops + of_split * K + cols_k, top, mask=has_k)
                tl.store(leave_logs + of_split * K + cols_k, log, mask=has_k)
    if tops is not None:  # noqa: SIM102 - one is decided when it is compiled, the other when it runs
        if (tile_v == 0) & (split == num_splits - 1):
            of_top = (row_head * (num_chunks + 1) + num_chunks) * K + cols_k
            tl.store(tops + of_top, top, mask=has_k)
            tl.store(logs + of_top, log, mask=has_k)


@triton.jit(do_not_specialize=["T", "num_splits", "split_tokens"])
def fold_states(
    local_tops,  # (B, H, S, K) fp32: of the state that leaves each split when nothing enters it
    local_logs,  # (B, H, S, K) fp32
    local_states,  # (B, H, S, R, V) fp32
    z_in,  # (B, H, K) fp32, or None for an empty state
    S_in,  # (B, H, R, V) fp32, or None
    starts,
    enter_tops,  # (B, H, S, K) fp32: of the state that enters each split, or None
    enter_logs,  # (B, H, S, K) fp32, or None
    enter_states,  # (B, H, S, R, V) fp32, or None
    z_out,  # (B, H, K) fp32
    S_out,  # (B, H, R, V) fp32
    T,
    H,
    num_splits,
    split_tokens,
    K: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The states between splits, one after the other; a program computes a tile of one half of a head's state."""
    row_head, cols_k, has_k, within, in_tile, is_first = half_program(K, R, V, BLOCK_K, BLOCK_V)
    row = row_head // H

    top = tl.full([BLOCK_K], EMPTY, tl.float32)
    state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    if z_in is not None:
        top = tl.load(z_in + row_head * K + cols_k, mask=has_k, other=EMPTY)
        state = tl.load(S_in + row_head * R * V + within, mask=in_tile & (top > EMPTY)[:, None], other=0.0)
    mass = tl.where(top > EMPTY, 1.0, 0.0)
    for split in range(num_splits):
        at = row_head * num_splits + split
        if enter_tops is not None:
            share = tl.where(mass > 0.0, 1.0 / tl.maximum(mass, 1e-30), 0.0)
            tl.store(enter_states + at * R * V + within, state * share[:, None], mask=in_tile)
            if is_first:
                tl.store(enter_tops + at * K + cols_k, top, mask=has_k)
                tl.store(enter_logs + at * K + cols_k, tl.log(tl.maximum(mass, 1e-30)), mask=has_k)
        if starts is not None:
            begin = split * split_tokens
            end = tl.minimum(begin + split_tokens, T)
            through = tl.load(starts + row * T + end - 1) < begin
            top = tl.where(through, top, EMPTY)
            mass = tl.where(through, mass, 0.0)
            state = tl.where(through, state, 0.0)
        local_top = tl.load(local_tops + at * K + cols_k, mask=has_k, other=EMPTY)
        highest = tl.maximum(top, local_top)
        kept = share_of(top, finite(highest))
        added = share_of(local_top, finite(highest))
        added *= tl.exp(tl.load(local_logs + at * K + cols_k, mask=has_k, other=0.0))
        state = state * kept[:, None]
        state += tl.load(local_states + at * R * V + within, mask=in_tile, other=0.0) * added[:, None]
        mass = mass * kept + added
        top = highest
    share = tl.where(mass > 0.0, 1.0 / tl.maximum(mass, 1e-30), 0.0)
    tl.store(S_out + row_head * R * V + within, state * share[:, None], mask=in_tile)
    if is_first:
        tl.store(z_out + row_head * K + cols_k, top + tl.log(tl.maximum(mass, 1e-30)), mask=has_k)


@triton.jit(do_not_specialize=["T", "num_chunks", "num_token_tiles"])
def weigh(
    k,  # (B, T, H, K)
    starts,
    tops,  # (B, H, N + 1, K) fp32, of scan_states
    logs,  # (B, H, N + 1, K) fp32, of scan_states
    edges,  # (B, H, N, 3, K) fp32
    depths,  # (B, T, H, K) fp32
    T,
    H,
    num_chunks,
    num_token_tiles,
    stride_kb,
    stride_kt,
    stride_kh,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """z of a tile of tokens: sums of e^k by products with the matrix of pairs, then one logarithm.

    Sums too deep below the largest key are lost. They are recomputed relative to the largest key that can be part of
    them, until no lost sum remains.
    """
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    row, head, _, tile_k, chunk, begin, length, first = token_program(T, H, num_token_tiles, K_TILES, BLOCK_T, CHUNK)
    i = first + tl.arange(0, BLOCK_T)
    inside = i < length
    cols = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    has_k = exists(cols, K, BLOCK_K)
    k_chunk = k + row * stride_kb + head * stride_kh + begin * stride_kt + cols[None, :]
    own_start = tl.full([BLOCK_T], -1, tl.int32)
    of_top = ((row * H + head) * (num_chunks + 1) + chunk) * K + cols
    top = tl.load(tops + of_top, mask=has_k, other=EMPTY)
    if starts is not None:
        own_start = (tl.load(starts + row * T + begin + i, mask=inside, other=-1) - begin).to(tl.int32)
        # A state that no token of the chunk reads must not be part of the base.
        top = tl.where(tl.load(starts + row * T + begin) < begin, top, EMPTY)
    incoming = inside & (own_start < 0)

    highest = tl.full([BLOCK_K], EMPTY, tl.float32)
    for partner in range(0, length, BLOCK_T):
        j = partner + tl.arange(0, BLOCK_T)
        k_rows = k_chunk + j.to(tl.int64)[:, None] * stride_kt
        keys = tl.load(k_rows, mask=(j < length)[:, None] & has_k[None, :], other=EMPTY).to(tl.float32)
        highest = tl.maximum(highest, tl.max(keys, 0))
    base = finite(tl.maximum(highest, top))
    enter = top - base + tl.load(logs + of_top, mask=has_k, other=0.0)
    if first == 0:
        leave = tl.load(tops + of_top + K, mask=has_k, other=EMPTY) - base
        leave += tl.load(logs + of_top + K, mask=has_k, other=0.0)
        of_edge = ((row * H + head) * num_chunks + chunk) * 3 * K + cols
        tl.store(edges + of_edge, base, mask=has_k)
        tl.store(edges + of_edge + K, enter, mask=has_k)
        tl.store(edges + of_edge + 2 * K, leave, mask=has_k)

    depth = tl.full([BLOCK_T, BLOCK_K], EMPTY, tl.float32)
    reference = tl.maximum(highest - base, enter)
    more = tl.max(reference, 0) > EMPTY
    while more:
        origin = origin_of(reference)
        sums = tl.where(incoming[:, None], share_of(enter, origin)[None, :], 0.0)
        # The largest key that is deep enough to be part of a lost sum.
        reference = tl.where(enter < origin - (RISE - 1.0), enter, EMPTY)
        for partner in range(0, first + 1, BLOCK_T):
            j = partner + tl.arange(0, BLOCK_T)
            k_rows = k_chunk + j.to(tl.int64)[:, None] * stride_kt
            keys = tl.load(k_rows, mask=(j < length)[:, None] & has_k[None, :], other=EMPTY).to(tl.float32)
            keys -= base[None, :]
            deep = tl.where(keys < origin[None, :] - (RISE - 1.0), keys, EMPTY)
            reference = tl.maximum(reference, tl.max(deep, 0))
            writes = tl.exp(tl.minimum(keys - origin[None, :], 0.0))
            pairs = (i[:, None] >= j[None, :]) & (own_start[:, None] <= j[None, :])
            if k.dtype.element_ty == tl.float32:
                sums = tl.dot(pairs.to(tl.float32), writes, sums, input_precision=PRECISION)
            else:  # the sums in twice the precision of the operands
                high = writes.to(COMPUTE)
                low = (writes - high.to(tl.float32)).to(COMPUTE)
                sums = tl.dot(pairs.to(COMPUTE), high, sums)
                sums = tl.dot(pairs.to(COMPUTE), low, sums)
        found = (depth == EMPTY) & (sums >= LEAST)
        depth = tl.where(found, origin[None, :] + tl.log(tl.maximum(sums, LEAST)), depth)
        pending = tl.max(tl.where((depth == EMPTY) & inside[:, None], 1.0, 0.0), 0) > 0.0
        reference = tl.where(pending, reference, EMPTY)
        more = tl.max(reference, 0) > EMPTY
    own = ((row * T + begin + i[:, None]) * H + head) * K + cols[None, :]
    tl.store(depths + own, depth, mask=inside[:, None] & has_k[None, :])

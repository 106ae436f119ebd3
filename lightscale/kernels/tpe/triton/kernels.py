"""The Triton kernels of the scan: a sweep for outputs or the gradient of x, and one for the parameters.

A sweep reads a row's tokens in order, or in reverse for gradients, in steps of STEP tokens. The states of BLOCK_D
channels stay in registers, in (E, D) tiles, so that no product needs a transposed operand. Rows are cut into splits
that run side by side. Each split first sums the shares of the splits before it, which a sweep without output has
computed. "Before" and "last" refer to the order of the sweep. ``documents`` (B, T) int32 number each row's documents,
in order; only tokens of one document interact.

``powers`` (STEP + 1, E) are λ^0 … λ^STEP, ``kappa`` (STEP, D) is Σ_r γ λ^τ, both computed in fp64 and rounded once.
"""

import triton
import triton.language as tl


@triton.jit
def _document(documents, token):
    """The document of a token (int64); one document for all tokens without boundaries."""
    number = token * 0
    if documents is not None:
        number = tl.load(documents + token).to(tl.int64)
    return number


@triton.jit
def _table(powers, exponents, modes, E: tl.constexpr):
    """λ^exponents, 0 for negative exponents and for modes beyond E; the two index tensors broadcast."""
    kept = (exponents >= 0) & (modes < E)
    return tl.load(powers + exponents * E + modes, mask=kept, other=0.0)


@triton.jit
def _enter(
    entering,
    before,
    slopes_before,
    through,
    documents,
    origin,
    row,
    mine,
    split_tokens,
    num_splits,
    mode,
    column,
    D,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SIGN: tl.constexpr,
):
    """A tile of the state that enters split ``mine``, of its slope (0 without ``slopes_before``) and its document."""
    in_tile = (mode < E)[:, None] & (column < D)[None, :]
    of_split = mode[:, None] * D + column[None, :]
    state = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    slope = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    if entering is not None:
        state = tl.load(entering + row * D * E + column[None, :] * E + mode[:, None], mask=in_tile, other=0.0)
    document = _document(documents, origin)
    if before is not None:
        decay = tl.load(through + mode, mask=mode < E, other=0.0)[:, None]
        for other in range(mine):
            behind = _document(documents, origin + SIGN * ((other + 1) * split_tokens - 1))
            offset = (row * num_splits + other) * E * D + of_split
            if slopes_before is not None:
                slope = tl.where(behind == document, decay * (slope + split_tokens * state), 0.0)
                slope += tl.load(slopes_before + offset, mask=in_tile, other=0.0)
            state = tl.where(behind == document, decay * state, 0.0)
            state += tl.load(before + offset, mask=in_tile, other=0.0)
            document = behind
    elif mine > 0:
        document = _document(documents, origin + SIGN * (mine * split_tokens - 1))
    return state, slope, document


@triton.jit
def _documents(documents, tokens, inside, last):
    """The documents of a step's tokens, -1 outside the split, and the document of its last token."""
    own = tl.where(inside, 0, -1).to(tl.int64)
    behind = last * 0
    if documents is not None:
        own = tl.load(documents + tokens, mask=inside, other=-1).to(tl.int64)
        behind += tl.load(documents + last)
    return own, behind


@triton.jit
def _leave(
    state,
    slope,
    tile,
    powers,
    mode,
    step,
    length,
    own,
    document,
    behind,
    weight,  # factor of a token's share, or None for 1
    E: tl.constexpr,
    READ: tl.constexpr,
    WITH_SLOPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state and its slope behind a step: the entering state, and the step's tokens of its last document."""
    goes_on = own == behind
    exponent = tl.where(goes_on, length - step - READ, -1)[None, :]
    write = _table(powers, exponent, mode[:, None], E)
    kept = tl.where(goes_on[:, None], tile, 0.0)
    decay = tl.load(powers + length * E + mode, mask=mode < E, other=0.0)[:, None]
    if WITH_SLOPE:
        slope = tl.where(behind == document, decay * (slope + length * state), 0.0)
        slope = tl.dot(write * exponent.to(tl.float32), kept, slope, input_precision=PRECISION)
    state = tl.where(behind == document, decay * state, 0.0)
    if weight is None:
        state = tl.dot(write, kept, state, input_precision=PRECISION)
    else:
        state += weight * tl.dot(write, kept, input_precision=PRECISION)
    return state, slope


@triton.jit(do_not_specialize=["T", "split_tokens", "num_splits", "first_split"])
def sweep(
    x,  # (B, T, D): inputs; cotangents of the outputs in reverse
    y,  # (B, T, D): outputs; the gradient of x in reverse; None for states only
    documents,  # (B, T), or None
    powers,
    kappa,
    gamma,  # (D, E)
    entering,  # (B, D, E) fp32: the state before the first token, or None for zero
    before,  # (B, S, E, D) fp32: each split's share in the state, or None to begin from zero
    through,  # (E,) fp32: λ^split_tokens
    leaving,  # (B, S, E, D) fp32: the state behind each split, or None
    slopes_leaving,  # (B, S, E, D) fp32: its derivative by log λ, or None
    last,  # (B, D, E) fp32: the state behind the last split, or None
    T,
    D,
    split_tokens,  # tokens of a split but the last, a multiple of STEP
    num_splits,
    first_split,  # programs take splits from here on
    stride_xb,
    stride_xt,
    stride_yb,
    stride_yt,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STEP: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """u <- λ u + x and y = Σ γ u, token by token; in reverse u <- λ u + γ x behind y = Σ u.

    In reverse the state is the share of the tokens so far in the cotangent of a state, which is read before it decays.
    READ is the number of decays between a state and the token that reads it first.
    """
    READ: tl.constexpr = 0 if REVERSE else 1
    SIGN: tl.constexpr = -1 if REVERSE else 1
    WITH_SLOPE: tl.constexpr = slopes_leaving is not None
    column = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    mine = tl.program_id(2).to(tl.int64) + first_split
    row = tl.program_id(0).to(tl.int64)
    mode = tl.arange(0, BLOCK_E)
    in_tile = (mode < E)[:, None] & (column < D)[None, :]
    of_row = column[None, :] * E + mode[:, None]  # in a (D, E) matrix
    # The only place that maps steps of the sweep to tokens.
    origin = row * 0
    if REVERSE:
        origin += T - 1
    x += row * stride_xb + column[None, :]
    if y is not None:
        y += row * stride_yb + column[None, :]
    if documents is not None:
        documents += row * T

    # Every program sums the splits before its own, at most 15: one launch less than a fold.
    state, slope, document = _enter(
        entering, before, None, through, documents, origin, row, mine, split_tokens, num_splits, mode, column, D, E,
        BLOCK_E, BLOCK_D, SIGN,
    )  # fmt: skip
    weight = tl.load(gamma + of_row, mask=in_tile, other=0.0).to(tl.float32)
    step = tl.arange(0, STEP)
    read = _table(powers, (step + READ)[:, None], mode[None, :], E)
    lag = step[:, None] - step[None, :]
    if y is not None:
        within = (lag >= 0)[:, :, None] & (column < D)[None, None, :]
        kernel = tl.load(kappa + lag[:, :, None] * D + column[None, None, :], mask=within, other=0.0)
    end = tl.minimum((mine + 1) * split_tokens, T)
    for start in range(mine * split_tokens, end, STEP):
        token = origin + SIGN * (start + step)
        inside = start + step < end
        in_row = inside[:, None] & (column < D)[None, :]
        length = tl.minimum(end - start, STEP)
        own, behind = _documents(documents, token, inside, origin + SIGN * (start + length - 1))
        tile = tl.load(x + token[:, None] * stride_xt, mask=in_row, other=0.0).to(tl.float32)
        if y is not None:
            seen = state
            if not REVERSE:
                seen = weight * state
            out = tl.dot(read, seen, input_precision=PRECISION)
            out = tl.where((own == document)[:, None], out, 0.0)
            meet = (own[:, None] == own[None, :]) & (lag >= 0)
            out += tl.sum(tl.where(meet[:, :, None], kernel * tile[None, :, :], 0.0), axis=1)
            tl.store(y + token[:, None] * stride_yt, out, mask=in_row)
        state, slope = _leave(
            state, slope, tile, powers, mode, step, length, own, document, behind, weight if REVERSE else None, E,
            READ, WITH_SLOPE, PRECISION,
        )  # fmt: skip
        document = behind

    of_split = (row * num_splits + mine) * E * D + mode[:, None] * D + column[None, :]
    if leaving is not None:
        tl.store(leaving + of_split, state, mask=in_tile)
    if slopes_leaving is not None:
        tl.store(slopes_leaving + of_split, slope, mask=in_tile)
    if last is not None:  # noqa: SIM102 - decided when it is compiled, the next one when it runs
        if mine == num_splits - 1:
            tl.store(last + row * D * E + of_row, state, mask=in_tile)


@triton.jit(do_not_specialize=["T", "split_tokens", "num_splits"])
def parameter_sums(
    x,  # (B, T, D)
    dy,  # (B, T, D)
    documents,  # (B, T), or None
    powers,
    gamma,  # (D, E)
    entering,  # (B, D, E) fp32, or None
    dlast,  # (B, D, E) fp32: the cotangent of the state behind the last token, or None
    before,  # (B, S, E, D) fp32, or None when there is one split
    slopes_before,  # as before
    through,  # (E,) fp32
    dgamma,  # (B, S, E, D) fp32
    dlog_decay,  # (B, S, E, D) fp32, to be summed over channels too
    T,
    D,
    split_tokens,
    num_splits,
    stride_xb,
    stride_xt,
    stride_dyb,
    stride_dyt,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Σ_t dy_t u_t and γ Σ_t dy_t v_t of each split, with v_t = ∂u_t / ∂log λ, computed beside u_t.

    v_t = λ (v_{t-1} + u_{t-1}): one sweep in order suffices, without a cotangent of the state.
    """
    MODE_TILES: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    tile = tl.program_id(1).to(tl.int64)
    mine = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    mode = tile % MODE_TILES * BLOCK_E + tl.arange(0, BLOCK_E)
    column = tile // MODE_TILES * BLOCK_D + tl.arange(0, BLOCK_D)
    in_tile = (mode < E)[:, None] & (column < D)[None, :]
    of_row = column[None, :] * E + mode[:, None]
    x += row * stride_xb + column[None, :]
    dy += row * stride_dyb + column[None, :]
    if documents is not None:
        documents += row * T

    state, slope, document = _enter(
        entering, before, slopes_before, through, documents, row * 0, row, mine, split_tokens, num_splits, mode, column,
        D, E, BLOCK_E, BLOCK_D, 1,
    )  # fmt: skip
    step = tl.arange(0, STEP)
    read_exponent = step[None, :] + 1
    read = _table(powers, read_exponent, mode[:, None], E)
    by_state = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)  # Σ dy u
    by_slope = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)  # Σ dy v
    pairs = tl.zeros((STEP, STEP, BLOCK_D), tl.float32)  # Σ dy_i x_j over the pairs (i, j) of a step
    lag = step[:, None] - step[None, :]
    end = tl.minimum((mine + 1) * split_tokens, T)
    for start in range(mine * split_tokens, end, STEP):
        token = start + step
        inside = token < end
        in_row = inside[:, None] & (column < D)[None, :]
        length = tl.minimum(end - start, STEP)
        own, behind = _documents(documents, token, inside, start + length - 1)
        x_tile = tl.load(x + token[:, None] * stride_xt, mask=in_row, other=0.0).to(tl.float32)
        dy_tile = tl.load(dy + token[:, None] * stride_dyt, mask=in_row, other=0.0).to(tl.float32)
        meet = (own[:, None] == own[None, :]) & (lag >= 0)
        pairs += tl.where(meet[:, :, None], dy_tile[:, None, :] * x_tile[None, :, :], 0.0)

        # Queries of the document that entered the step; queries of other documents read no earlier token.
        seen = tl.where((own == document)[:, None], dy_tile, 0.0)
        reads = tl.dot(read, seen, input_precision=PRECISION)
        reads_slope = tl.dot(read * read_exponent.to(tl.float32), seen, input_precision=PRECISION)
        by_state += state * reads
        by_slope += slope * reads + state * reads_slope
        state, slope = _leave(
            state, slope, x_tile, powers, mode, step, length, own, document, behind, None, E, 1, True, PRECISION
        )
        document = behind

    # The pairs of each distance.
    distances = tl.zeros((STEP, BLOCK_D), tl.float32)
    for distance in tl.static_range(STEP):
        of_distance = tl.sum(tl.sum(tl.where((lag == distance)[:, :, None], pairs, 0.0), axis=1), axis=0)
        distances += tl.where((step == distance)[:, None], of_distance[None, :], 0.0)
    table = _table(powers, step[None, :], mode[:, None], E)
    by_state = tl.dot(table, distances, by_state, input_precision=PRECISION)
    by_slope = tl.dot(table * step[None, :].to(tl.float32), distances, by_slope, input_precision=PRECISION)
    by_slope *= tl.load(gamma + of_row, mask=in_tile, other=0.0).to(tl.float32)
    if dlast is not None:  # noqa: SIM102 - as above
        if mine == num_splits - 1:
            by_slope += slope * tl.load(dlast + row * D * E + of_row, mask=in_tile, other=0.0)
    offset = (row * num_splits + mine) * E * D + mode[:, None] * D + column[None, :]
    tl.store(dgamma + offset, by_state, mask=in_tile)
    tl.store(dlog_decay + offset, by_slope, mask=in_tile)


@triton.jit
def recurrent(
    x,  # (B, D)
    y,  # (B, D)
    log_decay,  # (E,) fp32
    gamma,  # (D, E)
    state,  # (B, D, E) fp32
    after,  # (B, D, E) fp32
    D,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token: the state is read and written once."""
    column = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.program_id(0).to(tl.int64)
    mode = tl.arange(0, BLOCK_E)
    in_tile = (column < D)[:, None] & (mode < E)[None, :]
    within = column[:, None] * E + mode[None, :]
    decay = tl.exp(tl.load(log_decay + mode, mask=mode < E, other=0.0))
    value = tl.load(x + row * D + column, mask=column < D, other=0.0).to(tl.float32)
    u = tl.load(state + row * D * E + within, mask=in_tile, other=0.0) * decay[None, :] + value[:, None]
    tl.store(after + row * D * E + within, u, mask=in_tile)
    weight = tl.load(gamma + within, mask=in_tile, other=0.0).to(tl.float32)
    tl.store(y + row * D + column, tl.sum(u * weight, axis=1), mask=column < D)

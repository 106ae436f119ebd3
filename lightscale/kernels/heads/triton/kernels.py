"""Kernels of heads: columns of a projection to activated parts, and the parts' gradients to those columns.

A program owns ROWS rows and BLOCK channels of one head of one part. Rows are numbered over two dimensions (I, J),
tokens and rows of the batch, each with a stride.
"""

import triton
import triton.language as tl

from lightscale.kernels.glu.triton.activations import slope


@triton.jit
def _tile_of(unit, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Head and channels (BLOCK,) of a part's tile."""
    tiles: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    return unit // tiles, (unit % tiles) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _turned(
    value,
    pointer,
    at,
    channel,
    inside,
    cos,
    sin,
    of_cos,
    of_sin,
    direction,
    TURNED: tl.constexpr,
):
    """``value`` (ROWS, BLOCK), the ``channel`` of rows that begin ``at``, turned by the phases' angles ± 1."""
    half: tl.constexpr = TURNED // 2
    first = channel < half
    partner = tl.where(first, channel + half, channel - half)
    here = inside & (channel < TURNED)[None, :]
    other = tl.load(pointer + at[:, None] + partner[None, :], mask=here, other=0.0).to(tl.float32)
    c = tl.load(cos + of_cos[:, None] + channel[None, :], mask=here, other=1.0).to(tl.float32)
    s = tl.load(sin + of_sin[:, None] + (channel % half)[None, :], mask=here, other=0.0).to(tl.float32)
    return value * c + tl.where(first, -direction, direction)[None, :] * other * s


@triton.jit
def _forward_part(
    x,
    cos,
    sin,
    out,
    unit,
    row,
    at,
    of_cos,
    of_sin,
    num_rows,
    START: tl.constexpr,
    STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head, channel = _tile_of(unit, WIDTH, BLOCK)
    inside = (row < num_rows)[:, None] & (channel < WIDTH)[None, :]
    at += START + head * STRIDE
    value = tl.load(x + at[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        value *= tl.sigmoid(value)
    elif ACTIVATION == "rotate":
        value = _turned(value, x, at, channel, inside, cos, sin, of_cos, of_sin, 1.0, TURNED)
    tl.store(out + (row * HEADS + head)[:, None] * WIDTH + channel[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["J"])
def forward_kernel(
    x,
    cos,
    sin,
    cos_i,
    cos_j,
    sin_i,
    sin_j,
    part_0,
    part_1,
    part_2,
    part_3,
    num_rows,
    J,
    x_i,
    x_j,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    START_0: tl.constexpr,
    STRIDE_0: tl.constexpr,
    HEADS_0: tl.constexpr,
    WIDTH_0: tl.constexpr,
    ACTIVATION_0: tl.constexpr,
    START_1: tl.constexpr,
    STRIDE_1: tl.constexpr,
    HEADS_1: tl.constexpr,
    WIDTH_1: tl.constexpr,
    ACTIVATION_1: tl.constexpr,
    START_2: tl.constexpr,
    STRIDE_2: tl.constexpr,
    HEADS_2: tl.constexpr,
    WIDTH_2: tl.constexpr,
    ACTIVATION_2: tl.constexpr,
    START_3: tl.constexpr,
    STRIDE_3: tl.constexpr,
    HEADS_3: tl.constexpr,
    WIDTH_3: tl.constexpr,
    ACTIVATION_3: tl.constexpr,
):
    """Each part (I·J, HEADS, WIDTH), with its activation, of x (I, J, columns)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i, j = row // J, row % J
    at, of_cos, of_sin = i * x_i + j * x_j, i * cos_i + j * cos_j, i * sin_i + j * sin_j
    unit = tl.program_id(1).to(tl.int64)
    # fmt: off
    units: tl.constexpr = HEADS_0 * ((WIDTH_0 + BLOCK - 1) // BLOCK)
    if unit < units:
        _forward_part(x, cos, sin, part_0, unit, row, at, of_cos, of_sin, num_rows,
                      START_0, STRIDE_0, HEADS_0, WIDTH_0, ACTIVATION_0, TURNED, BLOCK)
    unit -= units
    if part_1 is not None:
        units_1: tl.constexpr = HEADS_1 * ((WIDTH_1 + BLOCK - 1) // BLOCK)
        if (unit >= 0) & (unit < units_1):
            _forward_part(x, cos, sin, part_1, unit, row, at, of_cos, of_sin, num_rows,
                          START_1, STRIDE_1, HEADS_1, WIDTH_1, ACTIVATION_1, TURNED, BLOCK)
        unit -= units_1
    if part_2 is not None:
        units_2: tl.constexpr = HEADS_2 * ((WIDTH_2 + BLOCK - 1) // BLOCK)
        if (unit >= 0) & (unit < units_2):
            _forward_part(x, cos, sin, part_2, unit, row, at, of_cos, of_sin, num_rows,
                          START_2, STRIDE_2, HEADS_2, WIDTH_2, ACTIVATION_2, TURNED, BLOCK)
        unit -= units_2
    if part_3 is not None:  # noqa: SIM102 - one is of the compiler
        if unit >= 0:
            _forward_part(x, cos, sin, part_3, unit, row, at, of_cos, of_sin, num_rows,
                          START_3, STRIDE_3, HEADS_3, WIDTH_3, ACTIVATION_3, TURNED, BLOCK)
    # fmt: on


@triton.jit
def _backward_part(
    x,
    cos,
    sin,
    gradient,
    dx,
    unit,
    row,
    i,
    j,
    at,
    of_cos,
    of_sin,
    num_rows,
    W,
    g_i,
    g_j,
    g_h,
    START: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head, channel = _tile_of(unit, WIDTH, BLOCK)
    inside = (row < num_rows)[:, None] & (channel < WIDTH)[None, :]
    column = START + head * STRIDE + channel
    if gradient is not None:
        of_head = i * g_i + j * g_j + head * g_h
        value = tl.load(gradient + of_head[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        if ACTIVATION == "silu":
            read = tl.load(x + at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
            value *= slope(read, "silu")
        elif ACTIVATION == "rotate":
            value = _turned(value, gradient, of_head, channel, inside, cos, sin, of_cos, of_sin, -1.0, TURNED)
    else:
        value = tl.zeros([row.shape[0], BLOCK], tl.float32)
    tl.store(dx + row[:, None] * W + column[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["J"])
def backward_kernel(
    x,
    cos,
    sin,
    cos_i,
    cos_j,
    sin_i,
    sin_j,
    part_0,
    part_1,
    part_2,
    part_3,
    dx,
    num_rows,
    J,
    W,
    x_i,
    x_j,
    part_0_i,
    part_0_j,
    part_0_h,
    part_1_i,
    part_1_j,
    part_1_h,
    part_2_i,
    part_2_j,
    part_2_h,
    part_3_i,
    part_3_j,
    part_3_h,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    START_0: tl.constexpr,
    STRIDE_0: tl.constexpr,
    HEADS_0: tl.constexpr,
    WIDTH_0: tl.constexpr,
    ACTIVATION_0: tl.constexpr,
    START_1: tl.constexpr,
    STRIDE_1: tl.constexpr,
    HEADS_1: tl.constexpr,
    WIDTH_1: tl.constexpr,
    ACTIVATION_1: tl.constexpr,
    START_2: tl.constexpr,
    STRIDE_2: tl.constexpr,
    HEADS_2: tl.constexpr,
    WIDTH_2: tl.constexpr,
    ACTIVATION_2: tl.constexpr,
    START_3: tl.constexpr,
    STRIDE_3: tl.constexpr,
    HEADS_3: tl.constexpr,
    WIDTH_3: tl.constexpr,
    ACTIVATION_3: tl.constexpr,
):
    """dx (I·J, W) from the gradient (I, J, HEADS, WIDTH) of each part, of any strides but the last; None: 0."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i, j = row // J, row % J
    at, of_cos, of_sin = i * x_i + j * x_j, i * cos_i + j * cos_j, i * sin_i + j * sin_j
    unit = tl.program_id(1).to(tl.int64)
    # fmt: off
    units: tl.constexpr = HEADS_0 * ((WIDTH_0 + BLOCK - 1) // BLOCK)
    if unit < units:
        _backward_part(x, cos, sin, part_0, dx, unit, row, i, j, at, of_cos, of_sin, num_rows, W,
                       part_0_i, part_0_j, part_0_h, START_0, STRIDE_0, WIDTH_0, ACTIVATION_0, TURNED, BLOCK)
    unit -= units
    units_1: tl.constexpr = HEADS_1 * ((WIDTH_1 + BLOCK - 1) // BLOCK)
    if (unit >= 0) & (unit < units_1):
        _backward_part(x, cos, sin, part_1, dx, unit, row, i, j, at, of_cos, of_sin, num_rows, W,
                       part_1_i, part_1_j, part_1_h, START_1, STRIDE_1, WIDTH_1, ACTIVATION_1, TURNED, BLOCK)
    unit -= units_1
    units_2: tl.constexpr = HEADS_2 * ((WIDTH_2 + BLOCK - 1) // BLOCK)
    if (unit >= 0) & (unit < units_2):
        _backward_part(x, cos, sin, part_2, dx, unit, row, i, j, at, of_cos, of_sin, num_rows, W,
                       part_2_i, part_2_j, part_2_h, START_2, STRIDE_2, WIDTH_2, ACTIVATION_2, TURNED, BLOCK)
    unit -= units_2
    units_3: tl.constexpr = HEADS_3 * ((WIDTH_3 + BLOCK - 1) // BLOCK)
    if (unit >= 0) & (unit < units_3):
        _backward_part(x, cos, sin, part_3, dx, unit, row, i, j, at, of_cos, of_sin, num_rows, W,
                       part_3_i, part_3_j, part_3_h, START_3, STRIDE_3, WIDTH_3, ACTIVATION_3, TURNED, BLOCK)
    # fmt: on

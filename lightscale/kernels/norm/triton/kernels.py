"""Kernels of the norm with weight and gate.

Rows are numbered over two dimensions (I, J), each with a stride: heads in the order (b, n) are read in the order (n, b)
without a copy. A program owns tiles of ROWS rows and the whole width, padded to BLOCK columns.
"""

import triton
import triton.language as tl

from lightscale.kernels.glu.triton.activations import activate, slope


@triton.jit
def _offsets(tile, num_rows, J, stride_i, stride_j, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets (ROWS, BLOCK) of a tile in a tensor (I, J, width)."""
    row = tile * ROWS + tl.arange(0, ROWS)
    at = (row // J) * stride_i + (row % J) * stride_j
    return at[:, None] + tl.arange(0, BLOCK)[None, :]


@triton.jit
def _load(pointer, offsets, inside):
    return tl.load(pointer + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["J"])
def square_sums_kernel(x, sums, num_rows, J, x_i, x_j, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Σ x² of each row: sums (I·J,)."""
    tile = tl.program_id(0).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = (row < num_rows)[:, None] & (tl.arange(0, BLOCK) < D)[None, :]
    value = _load(x, _offsets(tile, num_rows, J, x_i, x_j, ROWS, BLOCK), inside)
    tl.store(sums + row, tl.sum(value * value, axis=1), mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["J"])
def forward_kernel(
    x,
    weight,
    gate,
    sums,
    added,
    total,
    y,
    rstd,
    num_rows,
    J,
    x_i,
    x_j,
    gate_i,
    gate_j,
    added_i,
    added_j,
    width,
    eps,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """y (I·J, D) and r (I·J,). ``sums`` are Σ x² over ``width`` channels, or None to sum here.

    With ``added``, x is replaced by its sum with it, which goes to ``total`` (I·J, D).
    """
    tile = tl.program_id(0).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < D)[None, :]
    value = _load(x, _offsets(tile, num_rows, J, x_i, x_j, ROWS, BLOCK), inside)
    if added is not None:
        value += _load(added, _offsets(tile, num_rows, J, added_i, added_j, ROWS, BLOCK), inside)
        # The norm is that of the sum as it is stored, which the backward pass reads.
        value = value.to(total.dtype.element_ty)
        tl.store(total + row[:, None] * D + column[None, :], value, mask=inside)
        value = value.to(tl.float32)
    if sums is not None:
        squares = tl.load(sums + row, mask=row < num_rows, other=0.0)
    else:
        squares = tl.sum(value * value, axis=1)
    r = tl.rsqrt(squares / width + eps)
    value *= r[:, None]
    if weight is not None:
        value *= tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    if gate is not None:
        value *= activate(_load(gate, _offsets(tile, num_rows, J, gate_i, gate_j, ROWS, BLOCK), inside), ACTIVATION)
    tl.store(y + row[:, None] * D + column[None, :], value, mask=inside)
    tl.store(rstd + row, r, mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["J"])
def cotangent_sums_kernel(
    x,
    weight,
    gate,
    dy,
    rstd,
    sums,
    num_rows,
    J,
    x_i,
    x_j,
    gate_i,
    gate_j,
    dy_i,
    dy_j,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Σ c ⊙ h of each row, c = dy ⊙ weight ⊙ activation(gate) and h = r x: sums (I·J,)."""
    tile = tl.program_id(0).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < D)[None, :]
    product = _load(x, _offsets(tile, num_rows, J, x_i, x_j, ROWS, BLOCK), inside)
    product *= _load(dy, _offsets(tile, num_rows, J, dy_i, dy_j, ROWS, BLOCK), inside)
    if weight is not None:
        product *= tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    if gate is not None:
        product *= activate(_load(gate, _offsets(tile, num_rows, J, gate_i, gate_j, ROWS, BLOCK), inside), ACTIVATION)
    r = tl.load(rstd + row, mask=row < num_rows, other=0.0)
    tl.store(sums + row, tl.sum(product, axis=1) * r, mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["J"])
def backward_kernel(
    x,
    weight,
    gate,
    dy,
    rstd,
    sums,
    dtotal,
    dx,
    dweight,
    dgate,
    num_rows,
    J,
    x_i,
    x_j,
    gate_i,
    gate_j,
    dy_i,
    dy_j,
    dtotal_i,
    dtotal_j,
    dx_i,
    dx_j,
    width,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """dx (strided), dgate (I·J, D), and each program's part of the weight's gradient, (programs, D) fp32.

    ``dtotal``, a cotangent of x from elsewhere, is added to dx; None: there is none.

    ``sums`` are Σ c ⊙ h over ``width`` channels, or None to sum here. Programs take every P-th tile, P their number.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    num_tiles = tl.cdiv(num_rows, ROWS)
    if weight is not None:
        scale = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
        # Kept by row of the tile until the end: one reduction per program, not one per tile.
        total = tl.zeros((ROWS, BLOCK), tl.float32)
    # Every P-th tile: the order of the weight's sum depends on the rows alone.
    for tile in range(program, num_tiles, tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None] & (column < D)[None, :]
        r = tl.load(rstd + row, mask=row < num_rows, other=0.0)[:, None]
        h = _load(x, _offsets(tile, num_rows, J, x_i, x_j, ROWS, BLOCK), inside) * r
        c = _load(dy, _offsets(tile, num_rows, J, dy_i, dy_j, ROWS, BLOCK), inside)
        if gate is not None:
            g = _load(gate, _offsets(tile, num_rows, J, gate_i, gate_j, ROWS, BLOCK), inside)
            of_gate = c * h * slope(g, ACTIVATION)
            if weight is not None:
                of_gate *= scale
            tl.store(dgate + row[:, None] * D + column[None, :], of_gate, mask=inside)
            c *= activate(g, ACTIVATION)
        if weight is not None:
            total += c * h
            c *= scale
        if sums is not None:
            product = tl.load(sums + row, mask=row < num_rows, other=0.0)
        else:
            product = tl.sum(c * h, axis=1)
        gradient = (c - h * (product / width)[:, None]) * r
        if dtotal is not None:
            gradient += _load(dtotal, _offsets(tile, num_rows, J, dtotal_i, dtotal_j, ROWS, BLOCK), inside)
        tl.store(dx + _offsets(tile, num_rows, J, dx_i, dx_j, ROWS, BLOCK), gradient, mask=inside)
    if weight is not None:
        tl.store(dweight + program * D + column, tl.sum(total, axis=0), mask=column < D)

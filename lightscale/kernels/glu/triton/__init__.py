"""The gated linear unit in Triton: one pass forward, one backward.

Every program owns BLOCK columns of one row. The backward pass writes both halves of the projection's gradient, without
a concatenation. It recomputes the activation from the projection, the only saved tensor.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightscale.kernels.common.triton.compile import KernelCase
from lightscale.kernels.common.triton.launch import dense_last, on_device_of
from lightscale.kernels.glu.triton.activations import activate, slope

_BLOCK = 1024


@triton.jit
def _forward(x, out, stride_x, F, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    x += row * stride_x + column
    gate = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + F, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * F + column, activate(gate, ACTIVATION) * up, mask=inside)


@triton.jit
def _backward(x, dout, dx, stride_x, stride_dout, F, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    x += row * stride_x + column
    dx += row * 2 * F + column
    gate = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + F, mask=inside, other=0.0).to(tl.float32)
    cotangent = tl.load(dout + row * stride_dout + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx, cotangent * up * slope(gate, ACTIVATION), mask=inside)
    tl.store(dx + F, cotangent * activate(gate, ACTIVATION), mask=inside)


@torch.library.custom_op("lightscale::glu_fwd", mutates_args=())
def glu_fwd(x: Tensor, activation: str) -> Tensor:
    """activation(gate) ⊙ up (..., F) of x (..., 2 F) = [gate; up], rounded once to x's dtype."""
    rows, F = _rows(x), x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], F)
    if out.numel():
        with on_device_of(x):
            _forward[_grid(rows, F)](rows, out, rows.stride(0), F, activation, _BLOCK, num_warps=4)
    return out


@glu_fwd.register_fake
def _(x: Tensor, activation: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@torch.library.custom_op("lightscale::glu_bwd", mutates_args=())
def glu_bwd(x: Tensor, dout: Tensor, activation: str) -> Tensor:
    """The gradient (..., 2 F) of x from the cotangent ``dout`` (..., F)."""
    rows, cotangents, F = _rows(x), _rows(dout), x.shape[-1] // 2
    dx = x.new_empty(x.shape)
    if dx.numel():
        strides = rows.stride(0), cotangents.stride(0)
        with on_device_of(x):
            _backward[_grid(rows, F)](rows, cotangents, dx, *strides, F, activation, _BLOCK, num_warps=4)
    return dx


@glu_bwd.register_fake
def _(x: Tensor, dout: Tensor, activation: str) -> Tensor:
    return x.new_empty(x.shape)


def _rows(x: Tensor) -> Tensor:
    """x (..., width) as (rows, width) with contiguous columns; a view where the strides of x allow it."""
    return dense_last(x.reshape(-1, x.shape[-1]))


def _grid(rows: Tensor, F: int) -> tuple[int, int]:
    return rows.shape[0], triton.cdiv(F, _BLOCK)


def _cases(activation: str, dtype: str) -> list[KernelCase]:
    constants: dict[str, Any] = {"ACTIVATION": activation, "BLOCK": _BLOCK}
    pointers = {"x": f"*{dtype}", "stride_x": "i32:16", "F": "i32:16"}
    name = f"{activation} {dtype}"
    return [
        KernelCase(
            name=f"glu forward {name}",
            kernel=_forward,
            arguments=pointers | {"out": f"*{dtype}"},
            constants=constants,
            tensor_cores=False,
        ),
        KernelCase(
            name=f"glu backward {name}",
            kernel=_backward,
            arguments=pointers | {"dout": f"*{dtype}", "dx": f"*{dtype}", "stride_dout": "i32:16"},
            constants=constants,
            tensor_cores=False,
        ),
    ]


COMPILE_CASES = [
    case
    for activation, dtype in (
        *(("none", "bf16"), ("silu", "bf16"), ("gelu", "bf16"), ("gelu_tanh", "bf16")),
        *(("sigmoid", "fp16"), ("silu", "fp32")),
    )
    for case in _cases(activation, dtype)
]

"""The norm in Triton: one pass forward, one backward, and one more each way where channels are split over ranks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lightscale.kernels.common.triton.compile import KernelCase
from lightscale.kernels.common.triton.launch import dense_last, on_device_of
from lightscale.kernels.norm.eager import WIDEST, NormGradients, NormInputs
from lightscale.kernels.norm.triton.kernels import (
    backward_kernel,
    cotangent_sums_kernel,
    forward_kernel,
    square_sums_kernel,
)

# Elements of a tile: 32 of each operand per thread.
_TILE = 4096

# Programs that sum the weight's gradient, each over its own rows: four per multiprocessor of an H100. The number is the
# same on any other device, so that the result is the same.
_PARTIAL_SUMS = 528


class _Rows(NamedTuple):
    """A tensor (..., D) as (I, J, D), whose rows are numbered over both dimensions."""

    tensor: Tensor
    strides: tuple[int, int]


class _Launch(NamedTuple):
    """Launch of a kernel over the rows of x."""

    num_rows: int
    J: int
    D: int
    tile: dict[str, Any]  # ROWS, BLOCK and the number of warps

    @property
    def num_tiles(self) -> int:
        return triton.cdiv(self.num_rows, self.tile["ROWS"])


def _rows(x: Tensor) -> _Rows:
    """A view of x where its strides allow a view (always with two leading dimensions); else a copy."""
    width = x.shape[-1]
    three = dense_last(x if x.dim() == 3 else x.reshape(-1, 1, width))
    return _Rows(three, (three.stride(0), three.stride(1)))


def _optional_rows(x: Tensor | None) -> tuple[Tensor | None, tuple[int, int]]:
    return (None, (0, 0)) if x is None else _rows(x)


def _launch(x: Tensor) -> _Launch:
    D = x.shape[-1]
    width = triton.next_power_of_2(D)
    assert D <= WIDEST, "PyTorch operators compute wider rows"
    tile = {"ROWS": max(1, _TILE // width), "BLOCK": width, "num_warps": 4}
    return _Launch(x.numel() // D, x.shape[-2] if x.dim() == 3 else 1, D, tile)


@torch.library.custom_op("lightscale::norm_square_sums", mutates_args=())
def square_sums(x: Tensor) -> Tensor:
    """Σ x² (...,) over the last dimension of x (..., D), in fp32."""
    launch, (rows, strides) = _launch(x), _rows(x)
    sums = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if launch.num_rows:
        with on_device_of(x):
            square_sums_kernel[(launch.num_tiles,)](
                rows, sums, launch.num_rows, launch.J, *strides, launch.D, **launch.tile
            )
    return sums


@square_sums.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("lightscale::norm_fwd", mutates_args=())
def _fwd(
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    gate_activation: str,
    width: int,
    eps: float,
    sums: Tensor | None,
    added: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, r, and x + added, empty where nothing is added."""
    launch, (rows, strides) = _launch(x), _rows(x)
    gates, gate_strides = _optional_rows(gate)
    more, more_strides = _optional_rows(added)
    y, rstd, total = _results(x, added)
    if launch.num_rows:
        with on_device_of(x):
            forward_kernel[(launch.num_tiles,)](
                rows,
                weight,
                gates,
                sums,
                more,
                None if added is None else total,
                y,
                rstd,
                launch.num_rows,
                launch.J,
                *strides,
                *gate_strides,
                *more_strides,
                width,
                eps,
                launch.D,
                ACTIVATION=gate_activation,
                **launch.tile,
            )
    return y, rstd, total


@_fwd.register_fake
def _(x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _results(x, others[-1])


def _results(x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for y, r and the sum."""
    return (
        x.new_empty(x.shape),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
        x.new_empty(0 if added is None else x.shape),
    )


@torch.library.custom_op("lightscale::norm_cotangent_sums", mutates_args=())
def _cotangent_sums(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, gate_activation: str, rstd: Tensor, dy: Tensor
) -> Tensor:
    launch, (rows, strides), (dys, dy_strides) = _launch(x), _rows(x), _rows(dy)
    gates, gate_strides = _optional_rows(gate)
    sums = torch.empty_like(rstd)
    if launch.num_rows:
        with on_device_of(x):
            cotangent_sums_kernel[(launch.num_tiles,)](
                rows,
                weight,
                gates,
                dys,
                rstd,
                sums,
                launch.num_rows,
                launch.J,
                *strides,
                *gate_strides,
                *dy_strides,
                launch.D,
                ACTIVATION=gate_activation,
                **launch.tile,
            )
    return sums


@_cotangent_sums.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("lightscale::norm_bwd", mutates_args=())
def _bwd(
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    gate_activation: str,
    rstd: Tensor,
    dy: Tensor,
    width: int,
    sums: Tensor | None,
    dtotal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    launch, (rows, strides), (dys, dy_strides) = _launch(x), _rows(x), _rows(dy)
    gates, gate_strides = _optional_rows(gate)
    more, more_strides = _optional_rows(dtotal)
    dx, partial_sums, dgate = _gradients(x, weight, gate)
    programs = launch.num_tiles if weight is None else partial_sums.shape[0]
    if launch.num_rows:
        with on_device_of(x):
            backward_kernel[(programs,)](
                rows,
                weight,
                gates,
                dys,
                rstd,
                sums,
                more,
                dx,
                partial_sums,
                dgate,
                launch.num_rows,
                launch.J,
                *strides,
                *gate_strides,
                *dy_strides,
                *more_strides,
                *_rows(dx).strides,
                width,
                launch.D,
                ACTIVATION=gate_activation,
                **launch.tile,
            )
    return dx, partial_sums, dgate


@_bwd.register_fake
def _(x: Tensor, weight: Tensor | None, gate: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(x, weight, gate)


def _gradients(x: Tensor, weight: Tensor | None, gate: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for dx, laid out as x, the weight's partial sums, and dgate; empty tensors for absent inputs."""
    partial_sums = 0 if weight is None else min(_PARTIAL_SUMS, _launch(x).num_tiles)
    return (
        torch.empty_like(x) if x.dim() == 3 else x.new_empty(x.shape),
        x.new_empty(partial_sums, x.shape[-1], dtype=torch.float32),
        x.new_empty(0) if gate is None else gate.new_empty(gate.shape),
    )


def norm_fwd(inputs: NormInputs, width: int, eps: float, sums: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``eager.norm_fwd``, in one pass."""
    y, rstd, _ = _fwd(*inputs, width, eps, sums, None)
    return y, rstd


def cotangent_sums(inputs: NormInputs, rstd: Tensor, dy: Tensor) -> Tensor:
    """``eager.cotangent_sums``, in one pass."""
    return _cotangent_sums(*inputs, rstd, dy)


def norm_bwd(inputs: NormInputs, rstd: Tensor, dy: Tensor, width: int, sums: Tensor | None = None) -> NormGradients:
    """``eager.norm_bwd``, in one pass; the weight's gradient is summed in two stages, without atomics."""
    dx, partial_sums, dgate = _bwd(*inputs, rstd, dy, width, sums, None)
    return NormGradients(dx, _of_weight(partial_sums, inputs.weight), None if inputs.gate is None else dgate)


def sum_norm_fwd(x: Tensor, added: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``eager.sum_norm_fwd``, in one pass."""
    y, rstd, total = _fwd(x, weight, None, "none", x.shape[-1], eps, None, added)
    return y, rstd, x if added is None else total


def sum_norm_bwd(
    total: Tensor, weight: Tensor | None, rstd: Tensor, dy: Tensor, dtotal: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """``eager.sum_norm_bwd``, in one pass."""
    dx, partial_sums, _ = _bwd(total, weight, None, "none", rstd, dy, total.shape[-1], None, dtotal)
    return dx, _of_weight(partial_sums, weight)


def _of_weight(partial_sums: Tensor, weight: Tensor | None) -> Tensor | None:
    return None if weight is None else partial_sums.sum(dim=0).to(weight.dtype)


def _cases(
    D: int, dtype: str, *, weight: bool = False, gate: str | None = None, split: bool = False, added: bool = False
) -> Sequence[KernelCase]:
    """The kernels for rows of width D; ``split``: with sums over ranks; ``added``: of the residual stream."""
    width = triton.next_power_of_2(D)
    rows = max(1, _TILE // width)
    parts = ["weight" * weight, f"{gate} gate" if gate else "", "split" * split, "sum" * added, dtype]
    name = " ".join([str(D), *filter(None, parts)])
    constants: dict[str, Any] = {"D": D, "ROWS": rows, "BLOCK": width}
    activation = {"ACTIVATION": gate or "none"}
    integers = {"num_rows": "i32", "J": "i32"} | {
        f"{t}_{d}": "i32:16" for t in ("x", "gate", "dy", "dx", "added", "dtotal") for d in "ij"
    }
    tensors = ("x", "weight", "gate", "dy", "dx", "dgate", "y", "added", "total", "dtotal")
    types = integers | dict.fromkeys(tensors, f"*{dtype}")
    types |= {"sums": "*fp32", "rstd": "*fp32", "dweight": "*fp32", "width": "i32:16", "eps": "fp32"}
    absent: dict[str, Any] = {}
    if not weight:
        absent["weight"] = None
    if not gate:
        absent |= {"gate": None, "gate_i": 0, "gate_j": 0}
    if not added:
        absent |= {"added": None, "added_i": 0, "added_j": 0, "total": None}
        absent |= {"dtotal": None, "dtotal_i": 0, "dtotal_j": 0}
    kernels = [("forward", forward_kernel), ("backward", backward_kernel)]
    if split:
        kernels += [("squares", square_sums_kernel), ("cotangents", cotangent_sums_kernel)]
    cases = []
    for what, kernel in kernels:
        fixed = constants | activation | absent
        if not split and kernel in (forward_kernel, backward_kernel):
            fixed["sums"] = None
        options = {"tensor_cores": False, "may_spill": dtype == "fp32"}
        cases.append(KernelCase.of(f"norm {what} {name}", kernel, types, fixed, **options))
    return cases


COMPILE_CASES = [
    *_cases(512, "bf16", gate="sigmoid"),
    *_cases(2048, "bf16", weight=True, gate="silu"),
    *_cases(2048, "fp32", gate="sigmoid"),
    *_cases(WIDEST, "bf16"),
    *_cases(WIDEST, "fp16", weight=True, gate="silu"),
    *_cases(1024, "bf16", gate="sigmoid", split=True),
    *_cases(1536, "bf16", added=True),
    *_cases(WIDEST, "bf16", weight=True, added=True),
]

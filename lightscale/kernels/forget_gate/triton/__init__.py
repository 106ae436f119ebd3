"""The bounded forget gate in Triton: one pass forward, one backward.

A tile has ROWS rows of BLOCK columns; a row has the channels of all heads. Rows are numbered over two dimensions (I,
J), so that logits in the order (n, b) are read in the order (b, n) without a copy, and out of a projection that has
other parts of a head beside them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightscale.kernels.common.triton.compile import KernelCase
from lightscale.kernels.common.triton.launch import NUM_WARPS, dense_last, on_device_of

# Elements of a tile: 16 of each operand per thread.
_TILE = 2048
_WIDEST = 128

# Programs that sum β's gradient in each block of columns, each over its own rows: one per multiprocessor of an H100.
# The number is the same on any other device, so that the result is the same.
_PARTIAL_SUMS = 132


@triton.jit
def _offsets(row, column, J, x_i, x_j, x_h, K: tl.constexpr):
    """Offsets (ROWS, BLOCK) in the logits (I, J, H, K)."""
    return ((row // J) * x_i + (row % J) * x_j)[:, None] + ((column // K) * x_h + column % K)[None, :]


@triton.jit
def _sigmoids(x):
    """e^-|x|, sigmoid(x) and sigmoid(-x), the small one of which is not 1 less the large one; nothing overflows."""
    e = tl.exp(-tl.abs(x))
    large = 1.0 / (1.0 + e)
    return e, tl.where(x >= 0.0, large, e * large), tl.where(x >= 0.0, e * large, large)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["J"])
def _forward(
    x,
    bound,
    log_decay,
    key,
    num_rows,
    J,
    x_i,
    x_j,
    x_h,
    D,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < D)[None, :]
    value = tl.load(x + _offsets(row, column, J, x_i, x_j, x_h, K), mask=inside, other=0.0).to(tl.float32)
    lower = tl.load(bound + column, mask=column < D, other=0.0)[None, :]
    e, s, c = _sigmoids(value)
    k = (1.0 - lower) * c
    # The logarithm of the hardware has an absolute error near 1: for f above 3/4 it is -2 artanh(z), z = k / (2 - k),
    # whose series in z <= 1/7 is 2e-8 off, relatively, behind z^7.
    z = k / (2.0 - k)
    square = z * z
    near_one = -2.0 * z * (1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7))))
    # Without a bound f may be below the smallest number: log sigmoid(x) = min(x, 0) - log(1 + e^-|x|).
    bounded = lower > 0.0
    logarithm = tl.log(tl.where(bounded, lower + (1.0 - lower) * s, 1.0 + e))
    others = tl.where(bounded, logarithm, tl.minimum(value, 0.0) - logarithm)
    out = row[:, None] * D + column[None, :]
    tl.store(log_decay + out, tl.where(k < 0.25, near_one, others), mask=inside)
    tl.store(key + out, k, mask=inside)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["J"])
def _backward(
    x,
    bound,
    dlog_decay,
    dkey,
    dx,
    dbound,
    num_rows,
    J,
    x_i,
    x_j,
    x_h,
    D,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx (I·J, D), and each program's part of the bound's gradient, (programs, D) fp32."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lower = tl.load(bound + column, mask=column < D, other=0.0)[None, :]
    bounded = lower > 0.0
    # Kept by row of the tile until the end: one reduction per program, not one per tile.
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    # Every P-th tile, P their number: the order of the sum depends on the rows alone.
    for tile in range(program, tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None] & (column < D)[None, :]
        out = row[:, None] * D + column[None, :]
        value = tl.load(x + _offsets(row, column, J, x_i, x_j, x_h, K), mask=inside, other=0.0).to(tl.float32)
        dlog = tl.load(dlog_decay + out, mask=inside, other=0.0)
        dk = tl.load(dkey + out, mask=inside, other=0.0).to(tl.float32)
        _, s, c = _sigmoids(value)
        forget = tl.where(bounded, lower + (1.0 - lower) * s, 1.0)
        gradient = (1.0 - lower) * c * (dlog * tl.where(bounded, s / forget, 1.0) - dk * s)
        tl.store(dx + out, gradient, mask=inside)
        total += c * (tl.where(bounded, dlog / forget, 0.0) - dk)
    tl.store(dbound + program * D + column, tl.sum(total, axis=0), mask=column < D)


class _Launch(NamedTuple):
    """Launch of a kernel over the rows of logits."""

    logits: Tensor
    """As (I, J, H, K), a view where the strides of the logits allow it (always with two leading dimensions)."""
    words: tuple[int, ...]
    constants: dict[str, int]

    @classmethod
    def of(cls, logits: Tensor) -> "_Launch":
        H, K = logits.shape[-2:]
        four = dense_last(logits if logits.dim() == 4 else logits.reshape(-1, 1, H, K))
        words = (four.shape[0] * four.shape[1], four.shape[1], *four.stride()[:3], H * K)
        return cls(four, words, {"K": K, **_extents(H * K)})

    @property
    def num_tiles(self) -> int:
        return triton.cdiv(self.words[0], self.constants["ROWS"])

    @property
    def num_blocks(self) -> int:
        return triton.cdiv(self.words[-1], self.constants["BLOCK"])


def _extents(D: int) -> dict[str, int]:
    block = min(_WIDEST, triton.next_power_of_2(max(D, 1)))
    return {"ROWS": _TILE // block, "BLOCK": block}


@torch.library.custom_op("lightscale::forget_gate_fwd", mutates_args=())
def forget_gate_fwd(logits: Tensor, bound: Tensor, key_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``eager.forget_gate_fwd``, in one pass."""
    log_decay, key = _results(logits, key_dtype)
    if key.numel():
        launch = _Launch.of(logits)
        with on_device_of(logits):
            _forward[(launch.num_tiles, launch.num_blocks)](
                launch.logits,
                bound.contiguous(),
                log_decay,
                key,
                *launch.words,
                **launch.constants,
                num_warps=NUM_WARPS,
            )
    return log_decay, key


@forget_gate_fwd.register_fake
def _(logits: Tensor, bound: Tensor, key_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _results(logits, key_dtype)


def _results(logits: Tensor, key_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory for log f and k."""
    return logits.new_empty(logits.shape, dtype=torch.float32), logits.new_empty(logits.shape, dtype=key_dtype)


@torch.library.custom_op("lightscale::forget_gate_bwd", mutates_args=())
def _bwd(logits: Tensor, bound: Tensor, dlog_decay: Tensor, dkey: Tensor) -> tuple[Tensor, Tensor]:
    dlogits, partial_sums = _gradients(logits)
    if dlogits.numel():
        launch = _Launch.of(logits)
        with on_device_of(logits):
            _backward[(partial_sums.shape[0], launch.num_blocks)](
                launch.logits,
                bound.contiguous(),
                dlog_decay.contiguous(),
                dkey.contiguous(),
                dlogits,
                partial_sums,
                *launch.words,
                **launch.constants,
                num_warps=NUM_WARPS,
            )
    return dlogits, partial_sums


@_bwd.register_fake
def _(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _gradients(logits)


def _gradients(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for dlogits and the partial sums (programs, D) of the bound's gradient."""
    D = logits.shape[-2] * logits.shape[-1]
    num_tiles = triton.cdiv(logits.numel() // max(D, 1), _extents(D)["ROWS"])
    return (
        logits.new_empty(logits.shape),
        logits.new_empty(min(_PARTIAL_SUMS, num_tiles), D, dtype=torch.float32),
    )


def forget_gate_bwd(logits: Tensor, bound: Tensor, dlog_decay: Tensor, dkey: Tensor) -> tuple[Tensor, Tensor]:
    """``eager.forget_gate_bwd``, in one pass; the bound's gradient is summed in two stages, without atomics."""
    dlogits, partial_sums = _bwd(logits, bound, dlog_decay, dkey)
    return dlogits, partial_sums.sum(dim=0).view(bound.shape)


def _cases(H: int, K: int, dtype: str) -> list[KernelCase]:
    """The kernels for H heads of K channels."""
    constants: dict[str, Any] = {"K": K, **_extents(H * K)}
    types = {"x": f"*{dtype}", "key": f"*{dtype}", "dkey": f"*{dtype}", "dx": f"*{dtype}"}
    types |= {"num_rows": "i32", "J": "i32"} | dict.fromkeys(("x_i", "x_j", "x_h", "D"), "i32:16")
    return [
        KernelCase.of(f"forget_gate {what} {H}x{K} {dtype}", kernel, types, constants, tensor_cores=False)
        for what, kernel in (("forward", _forward), ("backward", _backward))
    ]


COMPILE_CASES = [
    case for H, K, dtype in ((16, 128, "bf16"), (4, 80, "fp16"), (16, 128, "fp32")) for case in _cases(H, K, dtype)
]

"""The softmax over a chunk's logits in Triton: one pass for its statistics, one for the gradient in place."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightscale.kernels.common.triton.compile import KernelCase
from lightscale.kernels.common.triton.launch import on_device_of
from lightscale.kernels.cross_entropy.chunked import Ids, OverRanks, Statistics

_BLOCK = 4096


@triton.jit
def _statistics(logits, labels, largest, total, target, first_id, used, stride, BLOCK: tl.constexpr):
    """One program per token; ``used`` columns count. The sum is rescaled once a tile, not once an element."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    column = tl.arange(0, BLOCK)
    most = -float("inf")
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, used, BLOCK):
        score = tl.load(row + start + column, mask=start + column < used, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(most, tl.max(score, axis=0))
        # No sum before the first finite logit: -inf - (-inf) would be NaN.
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        sums = sums * tl.exp(most - shift) + tl.exp(score - shift)
        most = higher
    label = tl.load(labels + token) - first_id
    here = (label >= 0) & (label < used)
    score = tl.load(row + tl.where(here, label, 0), mask=here, other=0.0).to(tl.float32)
    tl.store(largest + token, most)
    tl.store(total + token, tl.sum(sums, axis=0))
    tl.store(target + token, score)


@triton.jit
def _gradient(
    logits,
    labels,
    largest,
    total,
    dlosses,
    first_id,
    used,
    num_columns,
    stride,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token and BLOCK columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pointers = logits + token * stride + column
    score = tl.load(pointers, mask=column < used, other=-float("inf")).to(tl.float32)
    dloss = tl.load(dlosses + token)
    label = tl.load(labels + token) - first_id
    hit = (column == label) & (column < used)
    most, sums = tl.load(largest + token), tl.load(total + token)
    pull = dloss
    if Z_LOSS != 0:
        pull *= 1 + 2 * Z_LOSS * (tl.log(sums) + most)
    gradient = tl.exp(score - most) * (pull / sums) - tl.where(hit, dloss, 0.0)
    tl.store(pointers, tl.where(column < used, gradient, 0.0), mask=column < num_columns)


@torch.library.custom_op("lightscale::cross_entropy_statistics", mutates_args=())
def _statistics_op(logits: Tensor, labels: Tensor, first_id: int, used: int) -> tuple[Tensor, Tensor, Tensor]:
    results = [logits.new_empty(labels.shape, dtype=torch.float32) for _ in range(3)]
    if len(labels):
        with on_device_of(logits):
            _statistics[(len(labels),)](logits, labels, *results, first_id, used, logits.stride(0), _BLOCK, num_warps=4)
    return results[0], results[1], results[2]


@_statistics_op.register_fake
def _(logits: Tensor, labels: Tensor, first_id: int, used: int) -> tuple[Tensor, Tensor, Tensor]:
    one, two, three = (logits.new_empty(labels.shape, dtype=torch.float32) for _ in range(3))
    return one, two, three


@torch.library.custom_op("lightscale::cross_entropy_gradient", mutates_args=("logits",))
def _gradient_op(
    logits: Tensor,
    labels: Tensor,
    first_id: int,
    used: int,
    largest: Tensor,
    total: Tensor,
    dlosses: Tensor,
    z_loss: float,
) -> None:
    num_columns = logits.shape[1]
    if logits.numel():
        grid = len(labels), triton.cdiv(num_columns, _BLOCK)
        sizes = first_id, used, num_columns, logits.stride(0)
        with on_device_of(logits):
            _gradient[grid](logits, labels, largest, total, dlosses, *sizes, z_loss, _BLOCK, num_warps=4)


@_gradient_op.register_fake
def _(logits: Tensor, *_: Any) -> None:
    return None


def statistics(logits: Tensor, labels: Tensor, ids: Ids) -> Statistics:
    """See ``chunked.Softmax``."""
    return Statistics(*_statistics_op(logits, labels, *ids))


def statistics_and_gradient_(
    logits: Tensor, labels: Tensor, ids: Ids, factors: Tensor, over_ranks: OverRanks, z_loss: float
) -> Statistics:
    """See ``chunked.Softmax``. Exponentials passed between the kernels would take more bytes than the logits."""
    found = over_ranks(statistics(logits, labels, ids))
    gradient_(logits, labels, ids, found, factors, z_loss)
    return found


def gradient_(logits: Tensor, labels: Tensor, ids: Ids, found: Statistics, dlosses: Tensor, z_loss: float) -> None:
    """See ``chunked.Softmax``."""
    _gradient_op(logits, labels, *ids, found.largest, found.total, dlosses, z_loss)


def _cases(dtype: str) -> list[KernelCase]:
    constants: dict[str, Any] = {"BLOCK": _BLOCK}
    pulls = {"": 0.0, " z loss": 1e-4}
    common = {"logits": f"*{dtype}", "labels": "*i64", "first_id": "i32", "used": "i32", "stride": "i32"}
    fp32 = dict.fromkeys(("largest", "total", "target"), "*fp32")
    return [
        KernelCase(
            name=f"cross_entropy statistics {dtype}",
            kernel=_statistics,
            arguments=common | fp32,
            constants=constants,
            tensor_cores=False,
        ),
        *(
            KernelCase(
                name=f"cross_entropy gradient {dtype}{name}",
                kernel=_gradient,
                arguments=common | dict.fromkeys(("largest", "total", "dlosses"), "*fp32") | {"num_columns": "i32"},
                constants=constants | {"Z_LOSS": z_loss},
                tensor_cores=False,
            )
            for name, z_loss in pulls.items()
        ),
    ]


COMPILE_CASES = [case for dtype in ("bf16", "fp32") for case in _cases(dtype)]

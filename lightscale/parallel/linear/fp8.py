"""Linear layers whose products take both inputs in 8 bits: forward e4m3, gradients e5m2 (arXiv 2209.05433, "hybrid").

A tensor is cast with one scale of its own, found when it is cast ("current scaling"): nothing is kept from step to
step. The scale is a power of two: a number gets the same bits under any such scale, unless it is so small beside the
largest that it loses some. Ranks that hold parts of one tensor therefore need not agree on the scale to compute what
one rank computes, and no collective is added.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightscale.parallel.megatron import tensor_parallel_layers

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
# Of the widths that products on GPUs take.
_ALIGNMENT = 16
# Ada and Hopper.
_LEAST_CAPABILITY = (8, 9)
# Of fp32.
_EXPONENT_BITS = 0x7F800000
# Its inverse is a normal number still.
_LARGEST_SCALE = 2.0**126


class Cast(NamedTuple):
    """A tensor in 8 bits: ``values * factor``."""

    values: Tensor
    factor: Tensor
    """() fp32, a power of two."""

    def t(self) -> "Cast":
        """The transposed matrix, (n, m) of (m, n)."""
        return Cast(self.values.t(), self.factor)


def cast(x: Tensor, dtype: torch.dtype) -> Cast:
    """``x`` times the largest power of two up to max(dtype) / amax(x), rounded to ``dtype``.

    Nothing is beyond the largest number of ``dtype``, so nothing is cut off. A tensor with a number that is not finite
    becomes NaN, for the guard to see. Waits for no device.
    """
    # A rank can have no tokens.
    largest = (
        torch.linalg.vector_norm(x.detach(), math.inf).float() if x.numel() else x.new_zeros((), dtype=torch.float)
    )
    ratio = (torch.finfo(dtype).max / largest).clamp(max=_LARGEST_SCALE)
    # Without its mantissa. A ratio of 0 or NaN makes numbers, or their factor, that are none.
    scale = (ratio.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return Cast((x.detach() * scale).to(dtype), scale.reciprocal())


def product(a: Cast, b: Cast, dtype: torch.dtype) -> Tensor:
    """a bᵀ of a (m, k) and b (n, k), summed in fp32 at least -> (m, n) of ``dtype``.

    One product of 8 bits where the GPU has it and the widths are those that it takes. Else the numbers are converted,
    exactly, and multiplied in ``dtype``: the result differs by the order of its sum alone.
    """
    is_aligned = a.values.numel() > 0 and all(width % _ALIGNMENT == 0 for width in b.values.shape)
    if is_aligned and _has_products(a.values.device):
        whole = F.ScalingType.TensorWise
        rows, columns = a.values.contiguous(), b.values.contiguous().t()
        return F.scaled_mm(rows, columns, a.factor, whole, b.factor, whole, output_dtype=dtype)
    return (a.values.to(dtype) @ b.values.to(dtype).t()).mul_(a.factor * b.factor)


def _has_products(device: torch.device) -> bool:
    return device.type == "cuda" and _capability(device) >= _LEAST_CAPABILITY


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def describe_fp8(device: torch.device) -> str:
    """How products are computed on ``device``, for the log."""
    if _has_products(device):
        return f"fp8: products of 8 bits of widths divisible by {_ALIGNMENT}, others simulated"
    return "fp8: simulated (rounded to 8 bits, multiplied in the precision of the activations): no faster"


def fp8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None = None,
    grad_output_buffer: None = None,
    wgrad_deferral_limit: None = None,
) -> Tensor:
    """(..., width_in) -> (..., width_out), under the names and with the collectives of Megatron's function.

    ``linear_with_grad_accumulation_and_async_allreduce``; of a frozen weight ``linear_with_frozen_weight``.
    """
    assert grad_output_buffer is None and wgrad_deferral_limit is None, "of the output layer alone"
    group = tp_group if sequence_parallel or allreduce_dgrad else None
    out: Tensor = _Linear.apply(input, weight, bias, gradient_accumulation_fusion, sequence_parallel, group)
    return out


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b. Keeps this rank's x in 8 bits, and W, which is cast again: it is the same then."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sums_in_products: bool,
        gathers: bool,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        whole = x
        if gathers:
            whole, arrival = _gather(x, group)
            arrival.wait()
        rows = cast(whole.flatten(0, -2), FORWARD)
        out = product(rows, cast(weight, FORWARD), x.dtype).view(*whole.shape[:-1], weight.size(0))
        ctx.sums_in_products, ctx.gathers, ctx.group, ctx.shape = sums_in_products, gathers, group, x.shape
        ctx.total = getattr(weight, "main_grad", None)
        own = None
        if weight.requires_grad:
            # A part of its own, so that the whole is given back.
            own = rows.values.chunk(group.size())[group.rank()].clone() if gathers and group else rows.values
        ctx.save_for_backward(own, rows.factor, weight)
        ctx.has_bias = bias is not None
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own, factor, weight = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        narrow = cast(flat, BACKWARD)
        values, arrival, handle, of_weight, of_bias = own, None, None, None, None
        # In Megatron's order: inputs travel beside the first product, the gradient of the input beside the second.
        if ctx.gathers and weight.requires_grad:
            values, arrival = _gather(own.view(torch.uint8), ctx.group)
        of_input = product(narrow, cast(weight, FORWARD).t(), gradient.dtype)
        if arrival is not None:
            arrival.wait()
        if ctx.gathers:
            of_input, whole = of_input.new_empty(*ctx.shape), of_input.view(*gradient.shape[:-1], -1)
            handle = tensor_parallel_layers.dist_reduce_scatter_func(of_input, whole, group=ctx.group, async_op=True)
        elif ctx.group is not None:
            handle = dist.all_reduce(of_input, group=ctx.group, async_op=True)
        if weight.requires_grad:
            rows = Cast(values.view(own.dtype), factor)
            of_weight = _weight_gradient(narrow, rows, weight, ctx.total, ctx.sums_in_products)
        if ctx.has_bias:
            of_bias = flat.sum(dim=0)
        if handle is not None:
            handle.wait()
        return of_input.view(ctx.shape), of_weight, of_bias, None, None, None


def _gather(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Any]:
    """(n, ...) of each tensor rank -> (n tensor, ...), which is there after ``wait`` of the second result."""
    assert group is not None
    whole = x.new_empty(x.size(0) * group.size(), *x.shape[1:])
    return whole, tensor_parallel_layers.dist_all_gather_func(whole, x.contiguous(), group=group, async_op=True)


def _weight_gradient(
    gradient: Cast, x: Cast, weight: Tensor, total: Tensor | None, sums_in_products: bool
) -> Tensor | None:
    """gradientᵀ x, (width_out, width_in); added to ``total`` where the engine sums gradients in their products."""
    if not sums_in_products:
        return product(gradient.t(), x.t(), weight.dtype)
    assert total is not None, "the engine has wrapped the model"
    total.add_(product(gradient.t(), x.t(), total.dtype))
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    # Megatron's mark: hooks of the weight run, for which a gradient must come, whose numbers nobody reads.
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)

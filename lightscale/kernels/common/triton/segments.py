"""Fold of a state that only decays over neighbouring segments of a row, in one launch for any number of segments."""

# Triton evaluates the hints of its kernels: their arguments cannot have any but tl.constexpr.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightscale.kernels.common.triton.cases import integers, pointers
from lightscale.kernels.common.triton.compile import KernelCase
from lightscale.kernels.common.triton.launch import LAUNCH, NUM_WARPS, on_device_of

# Elements of the state per program. Few, because each element takes the segments one after the other.
_ELEMENTS = 256


@triton.jit(do_not_specialize=["num_segments"])
def fold_segments(
    x,  # (N, A, B, C, D) fp32: each segment's share; contiguous except the first dimension
    decays,  # (N, A, B, C, D) fp32, of any strides
    before,  # (A, B, C, D) fp32: the state that enters, or None for zero
    after,  # (A, B, C, D) fp32
    num_segments,
    num_elements,  # A B C D
    size_b,
    size_c,
    size_d,
    stride_x,
    stride_n,  # of the decays, as those that follow
    stride_a,
    stride_b,
    stride_c,
    stride_d,
    ELEMENTS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """S <- decays ⊙ S + x, segment by segment; a program computes some elements of the state."""
    program = tl.program_id(0).to(tl.int64)
    i = program * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = i < num_elements
    of_decay = i // (size_b * size_c * size_d) * stride_a + i // (size_c * size_d) % size_b * stride_b
    of_decay += i // size_d % size_c * stride_c + i % size_d * stride_d
    state = tl.zeros([ELEMENTS], dtype=tl.float32)
    if before is not None:
        state = tl.load(before + i, mask=inside, other=0.0)
    for step in range(num_segments):
        number = program * 0 + step  # 64 bits, as its factor
        if REVERSE:
            number = num_segments - 1 - number
        decay = tl.load(decays + number * stride_n + of_decay, mask=inside, other=0.0)
        # Selected: the state of another document may be Inf.
        state = tl.where(decay == 0.0, 0.0, decay * state)
        state += tl.load(x + number * stride_x + i, mask=inside, other=0.0)
    tl.store(after + i, state, mask=inside)


def fold(x: Tensor, decays: Tensor, state: Tensor | None, *, reverse: bool) -> Tensor:
    """See ``common.segments.fold``; fp32."""
    after = torch.empty(x.shape[1:], dtype=x.dtype, device=x.device)
    if not x.size(0):
        return after.zero_() if state is None else after.copy_(state)
    if not after.numel():
        return after
    # Four dimensions, the first ones of size 1 where x has fewer: strides express decays of heads, channels or modes.
    shape = (1,) * (4 - after.dim()) + tuple(after.shape)
    of_each = decays.reshape(decays.size(0), *(1,) * (4 - after.dim()), *decays.shape[1:]).expand(-1, *shape)
    with on_device_of(x):
        fold_segments[(triton.cdiv(after.numel(), _ELEMENTS),)](
            x if x[0].is_contiguous() else x.contiguous(),
            of_each,
            None if state is None else state.contiguous(),
            after,
            x.size(0),
            after.numel(),
            *shape[1:],
            x.stride(0) if x[0].is_contiguous() else after.numel(),
            *of_each.stride(),
            ELEMENTS=_ELEMENTS,
            REVERSE=reverse,
            **LAUNCH,
        )
    return after


def segments_case(operator: str) -> KernelCase:
    """The kernel as states of ``operator`` with decays of channels launch it."""
    return KernelCase(
        name=f"{operator} fold of segments",
        kernel=fold_segments,
        arguments={
            **pointers(dict.fromkeys(("x", "decays", "before", "after"), "fp32"))[0],
            **integers("num_segments"),
            **dict.fromkeys(
                ("num_elements", "size_b", "size_c", "size_d", "stride_x", "stride_n", "stride_a", "stride_b"), "i32:16"
            ),
        },
        constants={"stride_c": 1, "stride_d": 0, "ELEMENTS": _ELEMENTS, "REVERSE": False},
        num_warps=NUM_WARPS,
        tensor_cores=False,
        usual=False,
    )

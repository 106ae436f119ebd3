"""Starts of documents for kernels, in one launch for any number of documents."""

# Triton evaluates the hints of its kernels: their arguments cannot have any but tl.constexpr.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightscale.kernels.common.once import once
from lightscale.kernels.common.triton.cases import integers
from lightscale.kernels.common.triton.compile import KernelCase
from lightscale.kernels.common.triton.launch import NUM_WARPS, on_device_of

# Tokens of a program.
_TOKENS = 512


@triton.jit(do_not_specialize=["num_elements", "num_tokens", "num_boundaries", "num_bits", "highest_bit"])
def mark_starts(
    boundaries,  # (N,) int32 or int64, ascending, from 0
    starts,  # (B, T) int32
    num_elements,  # B T
    num_tokens,  # T
    num_boundaries,
    num_bits,  # of N - 1
    highest_bit,  # its value; any where N is 1
    TOKENS: tl.constexpr,
):
    """The last boundary that is not behind each token, by bisection."""
    i = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = i < num_elements
    # The bits of its number, from the highest.
    number = tl.zeros([TOKENS], tl.int64)
    bit = highest_bit
    for _ in range(num_bits):
        further = number | bit
        known = further < num_boundaries
        reached = known & (tl.load(boundaries + further, mask=inside & known, other=0) <= i)
        number = tl.where(reached, further, number)
        bit = bit // 2
    start = tl.load(boundaries + number, mask=inside, other=0) - i // num_tokens * num_tokens
    # A document that begins with its row is not marked: the state that enters the row belongs to its first document.
    tl.store(starts + i, tl.where(start > 0, start, -1), mask=inside)


def document_starts(cu_seqlens: Tensor | None, *, num_rows: int, num_tokens: int) -> Tensor | None:
    """Position in its row at which each token's document begins, (B, T) int32; -1 in a row's first document.

    A row's first document may begin before the row. The result lies on cu_seqlens' device, without a wait, and is
    computed once for all layers that get the same cu_seqlens; None for None.
    """
    if cu_seqlens is None:
        return None
    return once(cu_seqlens, (num_rows, num_tokens), lambda: _document_starts(cu_seqlens, num_rows, num_tokens))


def _document_starts(cu_seqlens: Tensor, num_rows: int, num_tokens: int) -> Tensor:
    starts = torch.empty(num_rows, num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    num_bits = (cu_seqlens.numel() - 1).bit_length()
    if starts.numel():
        with on_device_of(starts):
            mark_starts[(triton.cdiv(starts.numel(), _TOKENS),)](
                cu_seqlens.contiguous(),
                starts,
                starts.numel(),
                num_tokens,
                cu_seqlens.numel(),
                num_bits,
                1 << max(num_bits - 1, 0),
                TOKENS=_TOKENS,
                num_warps=NUM_WARPS,
            )
    return starts


def starts_case(operator: str) -> KernelCase:
    """The kernel as ``operator`` launches it."""
    return KernelCase(
        name=f"{operator} starts of documents",
        kernel=mark_starts,
        arguments={
            "boundaries": "*i64",
            "starts": "*i32",
            **integers("num_elements", "num_tokens", "num_boundaries", "num_bits", "highest_bit"),
        },
        constants={"TOKENS": _TOKENS},
        num_warps=NUM_WARPS,
        tensor_cores=False,
        usual=False,
    )

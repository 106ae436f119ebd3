"""One token of the delta rule, in one launch."""

# Triton evaluates the hints of its kernels: their arguments cannot have any but tl.constexpr.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightscale.kernels.common.triton.kernels import step_program
from lightscale.kernels.common.triton.launch import LAUNCH, on_device_of
from lightscale.kernels.common.triton.recurrent import step_constants


@triton.jit
def step(
    q,  # (B, H, K), contiguous
    k,  # (B, H, K), contiguous
    v,  # (B, N, V), contiguous
    log_decay,  # (B, N, K) fp32, or None
    beta,  # (B, N) fp32
    before,  # (B, N, K, V) fp32
    out,  # (B, N, V)
    after,  # (B, N, K, V) fp32
    N,
    stride_gb,
    stride_gh,
    stride_gk,
    GROUPS: tl.constexpr,  # N / H
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """S <- f ⊙ S, u = β (v - Sᵀ k), S <- S + k uᵀ and o = Sᵀ q; a program computes some columns of a head's state."""
    row_head, _, rows, cols, has_row, has_col = step_program(K, V, BLOCK_K, BLOCK_V)
    at = row_head * K * V + rows[:, None] * V + cols[None, :]
    inside = has_row[:, None] & has_col[None, :]
    state = tl.load(before + at, mask=inside, other=0.0)
    if log_decay is not None:
        of_head = log_decay + row_head // N * stride_gb + row_head % N * stride_gh
        state *= tl.exp(tl.load(of_head + rows * stride_gk, mask=has_row, other=0.0))[:, None]
    key = tl.load(k + row_head // GROUPS * K + rows, mask=has_row, other=0.0).to(tl.float32)
    value = tl.load(v + row_head * V + cols, mask=has_col, other=0.0).to(tl.float32)
    written = tl.load(beta + row_head) * (value - tl.sum(key[:, None] * state, 0))
    state += key[:, None] * written[None, :]
    query = tl.load(q + row_head // GROUPS * K + rows, mask=has_row, other=0.0).to(tl.float32)
    tl.store(after + at, state, mask=inside)
    read = tl.sum(query[:, None] * state, 0)
    tl.store(out + row_head * V + cols, read.to(out.dtype.element_ty), mask=has_col)


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, S: Tensor
) -> tuple[Tensor, Tensor]:
    """o and the next state, see ``chunked.recurrent_step``; it has no gradient."""
    o, after = torch.empty(v.shape, dtype=v.dtype, device=v.device), S.new_empty(S.shape)
    num_rows, num_heads, width = v.shape
    key_width = q.size(2)
    decays = None
    if log_decay is not None:
        # A decay per head: one for all channels, by a stride of 0.
        decays = log_decay.float()
        decays = decays[..., None].expand(*decays.shape, key_width) if decays.dim() == 2 else decays
    constants = step_constants(key_width, width)
    num_programs = num_rows * num_heads * -(-width // constants["BLOCK_V"])
    if num_programs:
        with on_device_of(q):
            step[(num_programs,)](
                q.contiguous(),
                k.contiguous(),
                v.contiguous(),
                decays,
                beta.float().contiguous(),
                S.contiguous(),
                o,
                after,
                num_heads,
                *((0, 0, 0) if decays is None else decays.stride()),
                GROUPS=num_heads // q.size(1),
                **constants,
                **LAUNCH,
            )
    return o, after

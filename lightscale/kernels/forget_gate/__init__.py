"""The forget gate with a lower bound (HGRN2): log decays and keys of one projection, forward and backward.

f = β + (1 - β) sigmoid(logits) and k = 1 - f (Qin et al., HGRN2, arXiv 2404.07904). docs/reference/operators/
forget-gate.md has the mathematics.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.errors import UserError
from lightscale.kernels.common.backends import AUTO, choose_backend, implementation, preload_backends
from lightscale.kernels.common.states import state_dtype
from lightscale.kernels.forget_gate.reference import forget_gate_reference

__all__ = ["forget_gate", "forget_gate_reference"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Backend(Protocol):
    """Functions of a backend; see ``eager``."""

    def forget_gate_fwd(self, logits: Tensor, bound: Tensor, key_dtype: torch.dtype) -> tuple[Tensor, Tensor]: ...

    def forget_gate_bwd(
        self, logits: Tensor, bound: Tensor, dlog_decay: Tensor, dkey: Tensor
    ) -> tuple[Tensor, Tensor]: ...


class _ForgetGate(torch.autograd.Function):
    """The gate with its gradient; saves its inputs alone.

    Autograd would keep seven fp32 tensors of each layer, more than all else in the mixer: at 7B, 32 GiB for 8192
    tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bound: Tensor, key_dtype: torch.dtype, backend: _Backend
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits, bound)
        ctx.backend = backend
        return backend.forget_gate_fwd(logits, bound, key_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlog_decay: Tensor, dkey: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *ctx.backend.forget_gate_bwd(*ctx.saved_tensors, dlog_decay, dkey), None, None


def forget_gate(
    logits: Tensor, bound: Tensor, key_dtype: torch.dtype | None = None, *, backend: str = AUTO
) -> tuple[Tensor, Tensor]:
    """log f and k = 1 - f, with f = β + (1 - β) sigmoid(logits); differentiable in both.

    Both keep their relative accuracy at both ends: log f is log1p(-k) for large f and log(f) for small f. Where β is 0
    it is log sigmoid, whose gradient stays below 1 while f itself and 1 / f leave the range of the dtype. There log f
    does not depend on β.

    Args:
        logits: (…, H, K), fp16, bf16, fp32 or fp64, any strides.
        bound: β (H, K), from 0 to 1, in fp32, or in fp64 for logits of fp64: the dtype of the computation.
        key_dtype: that of k, rounded once; by default that of ``bound``, which log f has.
        backend: "auto", "triton", "chunked" (PyTorch's operators, in no chunks here), "reference" (by autograd).

    Returns:
        log f and k, (…, H, K).

    Raises:
        UserError: a shape, dtype, device or backend does not fit; the message names the argument.
    """
    if logits.dim() < 2:
        raise UserError(f"logits must be (..., H, K), got shape {tuple(logits.shape)}")
    if logits.dtype not in _DTYPES:
        raise UserError(f"logits must be fp16, bf16, fp32 or fp64, got {logits.dtype}")
    if bound.shape != logits.shape[-2:]:
        raise UserError(f"bound must be (H, K) = {tuple(logits.shape[-2:])}, got shape {tuple(bound.shape)}")
    if (wanted := state_dtype(logits.dtype)) != bound.dtype:
        raise UserError(f"bound must be {wanted} for logits of {logits.dtype}, got {bound.dtype}")
    if bound.device != logits.device:
        raise UserError(f"bound must be on {logits.device}, like logits, got {bound.device}")
    key_dtype = key_dtype or bound.dtype
    if key_dtype not in _DTYPES:
        raise UserError(f"key_dtype must be fp16, bf16, fp32 or fp64, got {key_dtype}")
    name = choose_backend("forget_gate", logits, backend)
    if name == "reference":
        log_decay, key = forget_gate_reference(logits.to(bound.dtype), bound)
        return log_decay, key.to(key_dtype)
    found: tuple[Tensor, Tensor] = _ForgetGate.apply(logits, bound, key_dtype, implementation("forget_gate", name))
    return found


preload_backends("forget_gate")

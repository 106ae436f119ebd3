"""The gated linear unit's activation on a fused projection [gate; up], forward and backward in one pass each."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.errors import UserError
from lightscale.kernels.common.backends import AUTO, choose_backend, preload_triton, triton_forms
from lightscale.kernels.common.states import state_dtype
from lightscale.kernels.glu import eager
from lightscale.kernels.glu.activations import check_activation
from lightscale.kernels.glu.reference import glu_reference

__all__ = ["BACKENDS", "backend_of", "glu", "glu_reference"]

BACKENDS = ("chunked", "triton", "reference")


class _Pieces(Protocol):
    """What a backend gives; see ``eager``."""

    def glu_fwd(self, x: Tensor, activation: str) -> Tensor: ...

    def glu_bwd(self, x: Tensor, dout: Tensor, activation: str) -> Tensor: ...


class _GLU(torch.autograd.Function):
    """Saves the projection and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, pieces: _Pieces) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation, ctx.pieces = activation, pieces
        return pieces.glu_fwd(x, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return ctx.pieces.glu_bwd(x, dout, ctx.activation), None, None


def _pieces(name: str) -> _Pieces:
    forms: _Pieces = triton_forms("glu") if name == "triton" else eager
    return forms


def backend_of(x: Tensor, backend: str = AUTO) -> str:
    """Which of BACKENDS computes inputs like ``x`` (dtype, device count), for logs.

    Raises:
        UserError: a backend that is not known or cannot compute x.
    """
    return choose_backend(backend, x, BACKENDS, operator="glu")


def glu(x: Tensor, activation: str = "none", *, backend: str = AUTO) -> Tensor:
    """activation(gate) ⊙ up of a projection x = [gate; up], differentiable.

    Computed in fp32 for half precision and rounded once.

    Args:
        x: (..., 2 F), fp16, bf16, fp32 or fp64: the gate's F columns, then those of what it multiplies.
        activation: "none", "sigmoid" or "silu", of the gate.
        backend: "auto", or one of BACKENDS: "triton", "chunked" (PyTorch's operators, as for every operator),
            "reference" (by autograd).

    Returns:
        (..., F) in x's dtype.

    Raises:
        UserError: a shape, dtype, activation or backend that does not fit; the message names the argument.
    """
    if x.dim() < 1 or x.shape[-1] % 2:
        raise UserError(f"x must be (..., 2 F), a gate and what it multiplies, got shape {tuple(x.shape)}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise UserError(f"x must be fp16, bf16, fp32 or fp64, got {x.dtype}")
    check_activation("activation", activation)
    name = backend_of(x, backend)
    if name == "reference":
        return glu_reference(x.to(state_dtype(x.dtype)), activation).to(x.dtype)
    out: Tensor = _GLU.apply(x, activation, _pieces(name))
    return out


preload_triton("glu")

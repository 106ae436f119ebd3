"""The gated linear unit's activation on a fused projection [gate; up], forward and backward in one pass each."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.errors import UserError
from lightscale.kernels.common.backends import AUTO, choose_backend, implementation, preload_backends
from lightscale.kernels.common.states import state_dtype
from lightscale.kernels.glu.activations import check_activation
from lightscale.kernels.glu.reference import glu_reference

__all__ = ["glu", "glu_reference"]


class _Backend(Protocol):
    """Functions of a backend; see ``eager``."""

    def glu_fwd(self, x: Tensor, activation: str) -> Tensor: ...

    def glu_bwd(self, x: Tensor, dout: Tensor, activation: str) -> Tensor: ...


class _GLU(torch.autograd.Function):
    """The activation with its gradient; saves the projection alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, backend: _Backend) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation, ctx.backend = activation, backend
        return backend.glu_fwd(x, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return ctx.backend.glu_bwd(x, dout, ctx.activation), None, None


def glu(x: Tensor, activation: str = "none", *, backend: str = AUTO) -> Tensor:
    """activation(gate) ⊙ up of a projection x = [gate; up], differentiable.

    Half precision is computed in fp32 and rounded once.

    Args:
        x: (..., 2 F), fp16, bf16, fp32 or fp64: the gate's F columns, then the F columns that the gate multiplies.
        activation: "none", "sigmoid", "silu", "gelu" or "gelu_tanh", of the gate.
        backend: "auto", "triton", "chunked" (PyTorch's operators, in no chunks here), "reference" (by autograd).

    Returns:
        (..., F) in x's dtype.

    Raises:
        UserError: a shape, dtype, activation or backend does not fit; the message names the argument.
    """
    if x.dim() < 1 or x.shape[-1] % 2:
        raise UserError(f"x must be (..., 2 F), a gate and the columns it multiplies, got shape {tuple(x.shape)}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise UserError(f"x must be fp16, bf16, fp32 or fp64, got {x.dtype}")
    check_activation("activation", activation)
    name = choose_backend("glu", x, backend)
    if name == "reference":
        return glu_reference(x.to(state_dtype(x.dtype)), activation).to(x.dtype)
    out: Tensor = _GLU.apply(x, activation, implementation("glu", name))
    return out


preload_backends("glu")

"""RMS norm with an optional weight and an optional gate: y = x / sqrt(mean(x²) + eps) ⊙ weight ⊙ activation(gate).

Without weight this is TransNormerLLM's SRMSNorm (arXiv 2307.14995). The gate is the factor of the normalised output in
gated mixers; here it costs no pass of its own. docs/reference/operators/norm.md has the mathematics.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.errors import UserError
from lightscale.kernels.common.backends import AUTO, choose_backend, implementation, preload_backends
from lightscale.kernels.common.states import state_dtype
from lightscale.kernels.glu.activations import check_activation
from lightscale.kernels.norm.eager import NormGradients, NormInputs
from lightscale.kernels.norm.reference import norm_reference

__all__ = ["norm", "norm_reference", "sum_and_norm"]

Reduce = Callable[[Tensor], None]
"""Sums a tensor over ranks, in place."""


class _Backend(Protocol):
    """Functions of a backend; see ``eager``."""

    def square_sums(self, x: Tensor) -> Tensor: ...

    def norm_fwd(
        self, inputs: NormInputs, width: int, eps: float, sums: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def cotangent_sums(self, inputs: NormInputs, rstd: Tensor, dy: Tensor) -> Tensor: ...

    def norm_bwd(
        self, inputs: NormInputs, rstd: Tensor, dy: Tensor, width: int, sums: Tensor | None = None
    ) -> NormGradients: ...

    def sum_norm_fwd(
        self, x: Tensor, added: Tensor | None, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def sum_norm_bwd(
        self, total: Tensor, weight: Tensor | None, rstd: Tensor, dy: Tensor, dtotal: Tensor | None
    ) -> tuple[Tensor, Tensor | None]: ...


class _Norm(torch.autograd.Function):
    """The norm with its gradients; saves the inputs and one number per row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        gate: Tensor | None,
        gate_activation: str,
        eps: float,
        width: int,
        reduce: Reduce | None,
        backend: _Backend,
    ) -> Tensor:
        sums = None
        if reduce is not None:
            sums = backend.square_sums(x)
            reduce(sums)
        y, rstd = backend.norm_fwd(NormInputs(x, weight, gate, gate_activation), width, eps, sums)
        ctx.save_for_backward(x, weight, gate, rstd)
        ctx.gate_activation, ctx.width, ctx.reduce, ctx.backend = gate_activation, width, reduce, backend
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate, rstd = ctx.saved_tensors
        inputs = NormInputs(x, weight, gate, ctx.gate_activation)
        sums = None
        if ctx.reduce is not None:
            # Every rank scales its own channels by the common mean square, so the ranks' cotangents are summed too.
            sums = ctx.backend.cotangent_sums(inputs, rstd, dy)
            ctx.reduce(sums)
        return (*ctx.backend.norm_bwd(inputs, rstd, dy, ctx.width, sums), None, None, None, None, None)


class _SumAndNorm(torch.autograd.Function):
    """A step of the residual stream; saves the sum and one number per row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor | None, eps: float, backend: _Backend
    ) -> tuple[Tensor, Tensor]:
        y, rstd, total = backend.sum_norm_fwd(x, added, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.is_sum, ctx.backend = added is not None, backend
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, rstd = ctx.saved_tensors
        dx, dweight = dtotal, None
        if dy is not None:
            dx, dweight = ctx.backend.sum_norm_bwd(total, weight, rstd, dy, dtotal)
        return dx, dx if ctx.is_sum else None, dweight, None, None


def sum_and_norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """The residual stream s = x + added and its norm, ``norm(s, weight)``, in one pass each way; differentiable.

    Its gradient is the sum of the two cotangents' in one pass too: without ``added`` that alone is what it is for.

    Args:
        x: (..., D), as in ``norm``.
        added: of x's shape and dtype; None: s is x.
        weight: (D,) or None.
        eps: added to the mean square.
        backend: see ``norm``.

    Returns:
        s, rounded to x's dtype, and the norm of the rounded s.

    Raises:
        UserError: as of ``norm``.
    """
    _check(x, weight, None, None, None)
    if added is not None and (added.shape != x.shape or added.dtype != x.dtype or added.device != x.device):
        raise UserError(
            f"added must be of x's shape {tuple(x.shape)}, dtype {x.dtype} and device {x.device}, "
            f"got {tuple(added.shape)}, {added.dtype}, {added.device}"
        )
    name = choose_backend("norm", x, backend)
    if name == "reference":
        total = x if added is None else x + added
        return total, _reference(total, weight, None, "none", eps, None)
    total, y = _SumAndNorm.apply(x, added, weight, eps, implementation("norm", name))
    return total, y


def norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    gate_activation: str = "none",
    eps: float = 1e-6,
    width: int | None = None,
    reduce: Reduce | None = None,
    backend: str = AUTO,
) -> Tensor:
    """RMS norm over the last dimension, times ``weight`` and the activated ``gate``; differentiable in all three.

    Half precision is computed in fp32 and rounded once, behind the gate.

    Args:
        x: (..., D), fp16, bf16, fp32 or fp64. Two leading dimensions of any strides are read without a copy.
        weight: (D,) or None.
        gate: (..., D), of x's shape and dtype, or None.
        gate_activation: "none", "sigmoid" or "silu", of the gate.
        eps: added to the mean square.
        width: channels of the mean, where x holds this rank's part of the channels; D when None.
        reduce: sums a tensor of one number per row in place over the ranks that hold the other channels. Each pass,
            forward and backward, calls it once. Required if ``width`` is not D.
        backend: "auto", "triton" (D up to 4096), "chunked" (PyTorch's operators, in no chunks here),
            "reference" (by autograd, no ``reduce``).

    Returns:
        (..., D) in x's dtype, contiguous.

    Raises:
        UserError: a shape, dtype, device, activation or backend does not fit; the message names the argument.
    """
    _check(x, weight, gate, width, reduce)
    check_activation("gate_activation", gate_activation)
    width = x.shape[-1] if width is None else width
    name = choose_backend("norm", x, backend)
    if name == "reference":
        return _reference(x, weight, gate, gate_activation, eps, reduce)
    y: Tensor = _Norm.apply(x, weight, gate, gate_activation, eps, width, reduce, implementation("norm", name))
    return y


def _reference(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, gate_activation: str, eps: float, reduce: Reduce | None
) -> Tensor:
    """The oracle in the dtype of the arithmetic, which is fp32 for half-precision inputs."""
    if reduce is not None:
        raise UserError(
            "norm: backend 'reference' has no `reduce`; use 'auto' or 'chunked' for channels that are split"
        )
    wide = state_dtype(x.dtype)
    weight, gate = (None if t is None else t.to(wide) for t in (weight, gate))
    return norm_reference(x.to(wide), weight, gate, gate_activation=gate_activation, eps=eps).to(x.dtype)


def _check(x: Tensor, weight: Tensor | None, gate: Tensor | None, width: int | None, reduce: Reduce | None) -> None:
    if x.dim() < 1 or x.shape[-1] == 0:
        raise UserError(f"x must be (..., D) with D of at least 1, got shape {tuple(x.shape)}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise UserError(f"x must be fp16, bf16, fp32 or fp64, got {x.dtype}")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise UserError(f"weight must be (D,) = ({x.shape[-1]},), got shape {tuple(weight.shape)}")
    if gate is not None and (gate.shape != x.shape or gate.dtype != x.dtype):
        raise UserError(
            f"gate must be of x's shape {tuple(x.shape)} and dtype {x.dtype}, got {tuple(gate.shape)}, {gate.dtype}"
        )
    for name, tensor in (("weight", weight), ("gate", gate)):
        if tensor is not None and tensor.device != x.device:
            raise UserError(f"{name} is on {tensor.device}, but x is on {x.device}")
    if width is not None and width != x.shape[-1] and reduce is None:
        raise UserError(f"width {width} is not x's {x.shape[-1]}: a mean over more channels needs `reduce`")


preload_backends("norm")

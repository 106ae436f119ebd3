"""Queries, keys, values and gates out of one projection, with their activations, in one pass each way.

The backward pass writes the gradient of the whole projection, without concatenations: what was one product forward is
one product backward. docs/reference/operators/heads.md has the mathematics.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.errors import UserError
from lightscale.kernels.common.angles import Phases
from lightscale.kernels.common.backends import AUTO, choose_backend, implementation, preload_backends
from lightscale.kernels.common.states import state_dtype
from lightscale.kernels.heads.layout import ACTIVATIONS, Heads, HeadsPart, parts_of
from lightscale.kernels.heads.reference import heads_reference

__all__ = ["Heads", "heads_reference", "split_heads"]

MOST_PARTS = 4
"""Of a projection."""


class _Backend(Protocol):
    """Functions of a backend; see ``eager``."""

    def heads_fwd(self, x: Tensor, parts: Sequence[HeadsPart], phases: Phases | None) -> list[Tensor]: ...

    def heads_bwd(
        self, x: Tensor, parts: Sequence[HeadsPart], phases: Phases | None, gradients: Sequence[Tensor | None]
    ) -> Tensor: ...


class _Heads(torch.autograd.Function):
    """All parts with their gradient; saves the projection where SiLU's gradient reads it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor | None, sin: Tensor | None, parts: Sequence[HeadsPart], backend: _Backend
    ) -> tuple[Tensor, ...]:
        phases = None if cos is None or sin is None else (cos, sin)
        made = iter(backend.heads_fwd(x, parts, phases))
        ctx.parts, ctx.backend = parts, backend
        # Of other gradients x gives the shape alone: one number in its place.
        is_read = any(part.activation == "silu" for part in parts)
        ctx.save_for_backward(x if is_read else x.new_empty(()).expand(x.shape), cos, sin)
        ctx.set_materialize_grads(False)
        return tuple(part.of(x) if part.activation == "none" else next(made) for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, cos, sin = ctx.saved_tensors
        phases = None if cos is None or sin is None else (cos, sin)
        return ctx.backend.heads_bwd(x, ctx.parts, phases, gradients), None, None, None, None


def split_heads(
    x: Tensor, groups: Sequence[Heads], phases: Phases | None = None, *, backend: str = AUTO
) -> list[Tensor]:
    """The parts of all ``groups`` of columns of a projection, in order, each with its activation; differentiable.

    Half precision is computed in fp32 and rounded once (by PyTorch's operators, rotations after each of their steps).

    Args:
        x: (n, b, columns), fp16, bf16, fp32 or fp64.
        groups: consecutive columns, all of x's; up to four parts.
        phases: of parts that "rotate": cos (b, n, 1, r), both halves equal, and sin (b, n, 1, r / 2), of x's dtype.
            They turn the pairs of channels (i, i + r/2) and get no gradient.
        backend: "auto", "triton", "chunked" (PyTorch's operators, in no chunks here), "reference" (by autograd).

    Returns:
        (n, b, heads, width) for each part; of "none" a view of x, and of "copy" one that is dense.

    Raises:
        UserError: a shape, dtype, activation or backend does not fit; the message names the argument.
    """
    parts = parts_of(groups)
    _check(x, groups, parts, phases)
    if [part.activation for part in parts] in (["none"], ["copy"]):
        return [x.unflatten(-1, groups[0][:2])]
    name = choose_backend("heads", x, backend)
    if name == "reference":
        wide = state_dtype(x.dtype)
        found = heads_reference(x.to(wide), parts, phases and (phases[0].to(wide), phases[1].to(wide)))
        return [one.to(x.dtype) for one in found]
    return list(_Heads.apply(_dense(x), *(phases or (None, None)), parts, implementation("heads", name)))


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(x: Tensor, groups: Sequence[Heads], parts: Sequence[HeadsPart], phases: Phases | None) -> None:
    columns = sum(group.columns for group in groups)
    if x.dim() != 3 or x.shape[-1] != columns:
        raise UserError(f"x must be (n, b, columns) with the {columns} columns of its groups, got {tuple(x.shape)}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise UserError(f"x must be fp16, bf16, fp32 or fp64, got {x.dtype}")
    if len(parts) > MOST_PARTS:
        raise UserError(f"groups have {len(parts)} parts; use at most {MOST_PARTS}")
    for part in parts:
        if part.activation not in ACTIVATIONS:
            raise UserError(f"groups: an activation must be one of {', '.join(ACTIVATIONS)}, got {part.activation!r}")
        if part.activation == "rotate" and phases is None:
            raise UserError("phases are needed where an activation is 'rotate'")
    if phases is not None:
        cos, sin = phases
        turned = cos.shape[-1]
        least = min((part.width for part in parts if part.activation == "rotate"), default=turned)
        fits = turned % 2 == 0 and turned <= least and sin.shape[-1] == turned // 2
        if not fits or any(one.shape[:3] != (x.shape[1], x.shape[0], 1) or one.dtype != x.dtype for one in phases):
            raise UserError(
                f"phases must be (b, n, 1, r) and (b, n, 1, r / 2) of x's dtype {x.dtype} for x {tuple(x.shape)} and r "
                f"of at most {least}, got {tuple(cos.shape)}, {tuple(sin.shape)}, {cos.dtype}"
            )


preload_backends("heads")

"""The pieces of additive decay, each computed by the form that fits its tensors' device and dtype.

Sequence parallelism and generation call these. They have the arguments and results of those in ``chunked.py``, which
documents them; ``common/backends.py`` has the choice and the setting that overrides it.
"""

from typing import Any

import torch
from torch import Tensor

from lightscale.kernels.common.angles import Angles
from lightscale.kernels.common.backends import AUTO, choose_backend, triton_forms
from lightscale.kernels.lightnet import chunked
from lightscale.kernels.lightnet.state import LightNetState, StateCotangent

_FORMS = ("triton", "chunked")


def _forms(x: Tensor) -> Any:
    name = choose_backend(AUTO, x, _FORMS, operator="sequence-parallel lightnet_attention")
    return triton_forms("lightnet") if name == "triton" else chunked


def state_fwd(
    k: Tensor, v: Tensor, angles: Angles | None = None, cu_seqlens: Tensor | None = None
) -> tuple[LightNetState, Tensor]:
    """The state (z_loc, S_loc) that a row leaves from an empty one, and ``through`` (B,): 0 where a document begins."""
    local, through = _forms(k).state_fwd(k, v, angles, cu_seqlens)
    return local, through


def out_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles | None,
    state_in: LightNetState | None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, LightNetState]:
    """The outputs (B, T, H, V) of a row that ``state_in`` enters, and the state that leaves it."""
    o, state = _forms(q).out_fwd(q, k, v, angles, state_in, cu_seqlens)
    return o, state


def state_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles | None,
    do: Tensor,
    state_in: LightNetState | None,
    cu_seqlens: Tensor | None = None,
) -> StateCotangent:
    """The cotangent (U, R) of a row's incoming state that comes from the row's own outputs."""
    own: StateCotangent = _forms(q).state_bwd(q, k, v, angles, do, state_in, cu_seqlens)
    return own


def grad_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles | None,
    do: Tensor,
    state_in: LightNetState | None,
    cotangent: StateCotangent | None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of a row."""
    dq, dk, dv = _forms(q).grad_bwd(q, k, v, angles, do, state_in, cotangent, cu_seqlens)
    return dq, dk, dv


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, state: LightNetState, angles: Angles | None = None
) -> tuple[Tensor, LightNetState]:
    """One token: q, k (B, H, K), v (B, H, V), angles with positions (B,) → o (B, H, V) and the next state.

    Differentiable; in one launch on a GPU when no gradient is asked for.
    """
    name = choose_backend(AUTO, q, (*_FORMS, "reference"), operator="recurrent_step")
    learned = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *state))
    forms = triton_forms("lightnet") if name == "triton" and not learned else chunked
    o, after = forms.recurrent_step(q, k, v, state, angles)
    return o, after

"""The pieces of decay attention, each computed by the form that fits its tensors' device and dtype.

Sequence parallelism and generation call these. They have the arguments and results of those in ``chunked.py``, which
documents them, and log_decay may be per head and token, (B, T, H), where there are no angles; ``common/backends.py``
has the choice and the setting that overrides it.
"""

from typing import Any

import torch
from torch import Tensor

from lightscale.kernels.common.angles import Angles, features, phases_of
from lightscale.kernels.common.backends import AUTO, choose_backend, triton_forms
from lightscale.kernels.lightning import chunked, token_decays
from lightscale.kernels.lightning.chunked import Gradients

_FORMS = ("triton", "chunked")


def _forms(x: Tensor, log_decay: Tensor | None) -> Any:
    name = choose_backend(AUTO, x, _FORMS, operator="sequence-parallel lightning_attention")
    if name == "triton":
        return triton_forms("lightning")
    return token_decays if log_decay is not None and log_decay.dim() == 3 else chunked


def state_fwd(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    angles: Angles | None = None,
) -> tuple[Tensor, Tensor]:
    """S_loc (B, H, F, V) and D (B, H) of a row, by which S_out = D ⊙ S_in + S_loc."""
    local, through = _forms(k, log_decay).state_fwd(k, v, log_decay, cu_seqlens, angles=angles)
    return local, through


def out_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    S_in: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    angles: Angles | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs (B, T, H, V) of a row that S_in (B, H, F, V) enters, and the state that leaves it."""
    o, state = _forms(q, log_decay).out_fwd(q, k, v, log_decay, S_in, cu_seqlens, angles=angles)
    return o, state


def state_bwd(
    q: Tensor,
    do: Tensor,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    angles: Angles | None = None,
) -> Tensor:
    """The cotangent (B, H, F, V) of a row's incoming state that comes from the row's own outputs."""
    own: Tensor = _forms(q, log_decay).state_bwd(q, do, log_decay, cu_seqlens, angles=angles)
    return own


def grad_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    do: Tensor,
    S_in: Tensor | None,
    dS_end: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    angles: Angles | None = None,
    with_decay: bool = False,
    with_theta: bool = False,
) -> Gradients:
    """dq, dk, dv of these rows, and as asked for dlog_decay, of log_decay's shape, and dtheta (H, K)."""
    gradients: Gradients = _forms(q, log_decay).grad_bwd(
        q,
        k,
        v,
        log_decay,
        do,
        S_in,
        dS_end,
        cu_seqlens,
        angles=angles,
        with_decay=with_decay,
        with_theta=with_theta,
    )
    return gradients


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, S: Tensor, *, angles: Angles | None = None
) -> tuple[Tensor, Tensor]:
    """One token: q, k (B, H, K), v (B, H, V), S (B, H, F, V) → o (B, H, V) and the next state.

    ``log_decay`` is (H,), or this token's (B, H), or None; ``angles`` has positions (B,). Differentiable; in one launch
    on a GPU when no gradient is asked for, beside those that spread q and k.
    """
    if angles is not None:
        phases = phases_of(angles, S.dtype)
        q, k = features(q, phases).to(v.dtype), features(k, phases).to(v.dtype)
    name = choose_backend(AUTO, q, (*_FORMS, "reference"), operator="recurrent_step")
    learned = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, log_decay, S))
    forms = triton_forms("lightning") if name == "triton" and not learned else chunked
    o, after = forms.recurrent_step(q, k, v, log_decay, S)
    return o, after

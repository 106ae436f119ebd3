"""The pieces of the scan, each computed by the form that fits its tensors' device and dtype.

Sequence parallelism and generation call these. They have the arguments and results of those in ``chunked.py``, which
documents them; ``common/backends.py`` has the choice and the setting that overrides it.
"""

from typing import Any

import torch
from torch import Tensor

from lightscale.kernels.common.backends import AUTO, choose_backend, triton_forms
from lightscale.kernels.tpe import chunked

_FORMS = ("triton", "chunked")


def _forms(x: Tensor) -> Any:
    name = choose_backend(AUTO, x, _FORMS, operator="sequence-parallel tpe_scan")
    return triton_forms("tpe") if name == "triton" else chunked


def state_fwd(x: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """u_loc (B, D, E) and D (B, E) of a row, by which u_out = D ⊙ u_in + u_loc."""
    local, through = _forms(x).state_fwd(x, log_decay, cu_seqlens)
    return local, through


def out_fwd(
    x: Tensor, log_decay: Tensor, gamma: Tensor, u_in: Tensor | None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The outputs (B, T, D) of a row that u_in (B, D, E) enters, and the state that leaves it."""
    y, state = _forms(x).out_fwd(x, log_decay, gamma, u_in, cu_seqlens)
    return y, state


def state_bwd(dy: Tensor, log_decay: Tensor, gamma: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The cotangent (B, D, E) of a row's incoming state that comes from the row's own outputs."""
    own: Tensor = _forms(dy).state_bwd(dy, log_decay, gamma, cu_seqlens)
    return own


def grad_bwd(
    x: Tensor,
    log_decay: Tensor,
    gamma: Tensor,
    dy: Tensor,
    u_in: Tensor | None,
    du_end: Tensor | None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and dlog_decay (E,) and dgamma (D, E) of these rows in the states' dtype. Ranks add up."""
    dx, dlog_decay, dgamma = _forms(x).grad_bwd(x, log_decay, gamma, dy, u_in, du_end, cu_seqlens)
    return dx, dlog_decay, dgamma


def recurrent_step(x: Tensor, log_decay: Tensor, gamma: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """One token: x (B, D), log_decay (E,), gamma (D, E), u (B, D, E) → y (B, D) and the next state.

    Differentiable; in one launch on a GPU when no gradient is asked for.
    """
    name = choose_backend(AUTO, x, (*_FORMS, "reference"), operator="recurrent_step")
    learned = torch.is_grad_enabled() and any(t.requires_grad for t in (x, log_decay, gamma, u))
    forms = triton_forms("tpe") if name == "triton" and not learned else chunked
    y, after = forms.recurrent_step(x, log_decay, gamma, u)
    return y, after

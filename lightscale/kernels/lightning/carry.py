"""What a state from elsewhere adds to a row's outputs, and the cotangent of the one that leaves to its gradients.

Sequence parallelism computes a row from a zero state while the states travel, and adds these when they have arrived.
Both are products of whole rows with one matrix per head. Names of shapes: B rows, T tokens, H heads, K key width, V
value width, F width of the features of queries and keys: 2K with angles, else K.
"""

import torch
from torch import Tensor

from lightscale.kernels.common.angles import Angles, features, features_bwd, phases_of
from lightscale.kernels.common.fragments import first_fragment, last_fragment, masked, one_fragment
from lightscale.kernels.common.states import without_autocast


@torch.no_grad()
@without_autocast
def read_fwd(
    q: Tensor,
    log_decay: Tensor | None,
    S_in: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    angles: Angles | None = None,
) -> Tensor:
    """λ^(t+1) S_inᵀ q_t: what ``out_fwd`` with S_in gives beyond ``out_fwd`` without it.

    Args:
        q: queries (B, T, H, K).
        log_decay: (H,) or None.
        S_in: the state (B, H, F, V) that enters; only the row's first fragment reads it.
        cu_seqlens: (N+1,) or None.
        angles: those of the queries, or None.

    Returns:
        (B, T, H, V) in q's dtype.
    """
    num_rows, num_tokens = q.shape[:2]
    weights = _powers(log_decay, torch.arange(1, num_tokens + 1, device=q.device), like=S_in)
    kept = first_fragment(cu_seqlens, num_rows=num_rows, num_tokens=num_tokens)
    phases = None if angles is None else phases_of(angles, S_in.dtype)
    weighted = masked(features(q.to(S_in.dtype) * weights, phases), kept)
    return torch.einsum("bthk,bhkv->bthv", weighted, S_in).to(q.dtype)


@torch.no_grad()
@without_autocast
def write_bwd(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    S_in: Tensor,
    dS_end: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    angles: Angles | None = None,
    with_decay: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """What ``grad_bwd`` with dS_end gives beyond ``grad_bwd`` without it.

    Args:
        k: keys (B, T, H, K).
        v: values (B, T, H, V).
        log_decay: (H,) or None.
        S_in: the state (B, H, F, V) that entered the row.
        dS_end: the cotangent (B, H, F, V) of the state that leaves it; only the row's last fragment writes to that.
        cu_seqlens: (N+1,) or None.
        angles: those of the keys, or None.
        with_decay: compute dlog_decay.

    Returns:
        dk, dv, dlog_decay (H,) when asked for, and dtheta (H, K) fp64 with angles.
    """
    num_rows, num_tokens = k.shape[:2]
    steps = torch.arange(num_tokens - 1, -1, -1, device=k.device)
    weights = _powers(log_decay, steps, like=dS_end)
    shape = {"num_rows": num_rows, "num_tokens": num_tokens}
    kept = last_fragment(cu_seqlens, **shape)
    phases = None if angles is None else phases_of(angles, dS_end.dtype)
    keys = features(k.to(dS_end.dtype), phases)
    dk = torch.einsum("bthv,bhkv->bthk", masked(v.to(dS_end.dtype) * weights, kept), dS_end)
    dv = torch.einsum("bthk,bhkv->bthv", masked(keys * weights, kept), dS_end)
    dlog_decay = dtheta = None
    if with_decay:
        # Every exponent is the number of steps that a write, or the incoming state, has gone through.
        dlog_decay = torch.einsum("t,bthk,bthk->h", steps.to(dk.dtype), keys, dk)
        passed = (S_in * dS_end).sum((-1, -2)) * _powers(log_decay, steps.new_tensor([num_tokens]), like=dS_end)[
            0, :, 0
        ]
        whole = one_fragment(cu_seqlens, **shape)
        if whole is not None:
            passed = torch.where(whole[:, None], passed, 0.0)
        dlog_decay += num_tokens * passed.sum(0)
    if angles is not None and phases is not None:
        dk, dtheta = features_bwd(k.to(dk.dtype), dk, angles, phases)
    return dk.to(k.dtype), dv.to(v.dtype), dlog_decay, dtheta


def _powers(log_decay: Tensor | None, steps: Tensor, *, like: Tensor) -> Tensor:
    """λ^steps (T, H, 1), made in fp64 and rounded once; right for λ = 0 too, where 0 · (-inf) would be NaN."""
    if log_decay is None:
        return torch.ones(1, like.shape[1], 1, dtype=like.dtype, device=like.device)
    exponents = steps[:, None].double() * log_decay.detach().double()
    return torch.where(steps[:, None] > 0, exponents, 0.0).exp().to(like.dtype)[..., None]

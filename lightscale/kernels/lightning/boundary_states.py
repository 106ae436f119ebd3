"""What a state from elsewhere adds to a row's outputs, and the cotangent of the one that leaves to its gradients.

Sequence parallelism computes a row from a zero state while the states travel, and adds these when they have arrived.
Both are products of whole rows with one matrix per head. Names of shapes: B rows, T tokens, H heads, K key width, V
value width, F width of the features of queries and keys: 2K with angles, else K.
"""

import torch
from torch import Tensor

from lightscale.kernels.common.angles import Angles, features, features_bwd, phases_of
from lightscale.kernels.common.document_masks import in_first_document, in_last_document, masked, one_document
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
        log_decay: (H,), (B, T, H) or None.
        S_in: the state (B, H, F, V) that enters; only the row's first document reads it.
        cu_seqlens: (N+1,) or None.
        angles: those of the queries, or None.

    Returns:
        (B, T, H, V) in q's dtype.
    """
    num_rows, num_tokens = q.shape[:2]
    # Weighted products over the row, without chunks: there are no pairs of tokens in what a state adds.
    weights = _upto(log_decay, num_tokens, like=S_in)
    kept = in_first_document(cu_seqlens, num_rows=num_rows, num_tokens=num_tokens)
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
        log_decay: (H,), (B, T, H) or None.
        S_in: the state (B, H, F, V) that entered the row.
        dS_end: the cotangent (B, H, F, V) of the state that leaves it; only the row's last document writes to that.
        cu_seqlens: (N+1,) or None.
        angles: those of the keys, or None.
        with_decay: compute dlog_decay.

    Returns:
        dk, dv, dlog_decay of log_decay's shape when asked for, and dtheta (H, K) fp64 with angles.
    """
    num_rows, num_tokens = k.shape[:2]
    weights = _behind(log_decay, num_tokens, like=dS_end)
    shape = {"num_rows": num_rows, "num_tokens": num_tokens}
    kept = in_last_document(cu_seqlens, **shape)
    phases = None if angles is None else phases_of(angles, dS_end.dtype)
    keys = features(k.to(dS_end.dtype), phases)
    dk = torch.einsum("bthv,bhkv->bthk", masked(v.to(dS_end.dtype) * weights, kept), dS_end)
    dv = torch.einsum("bthk,bhkv->bthv", masked(keys * weights, kept), dS_end)
    dlog_decay = dtheta = None
    if with_decay and log_decay is not None:
        passed = (S_in * dS_end).sum((-1, -2)) * _through(log_decay, num_tokens, like=dS_end)
        whole = one_document(cu_seqlens, **shape)
        if whole is not None:
            passed = torch.where(whole[:, None], passed, 0.0)
        dlog_decay = _decay_gradient(log_decay, (keys * dk).sum(-1), passed)
    if angles is not None and phases is not None:
        dk, dtheta = features_bwd(k.to(dk.dtype), dk, angles, phases)
    return dk.to(k.dtype), dv.to(v.dtype), dlog_decay, dtheta


def _decay_gradient(log_decay: Tensor, written: Tensor, passed: Tensor) -> Tensor:
    """Of what each token wrote to the state that leaves (B, T, H), and of what passed from end to end (B, H).

    A decay meets what was written before it, and the state that entered: sums in which nothing cancels.
    """
    num_tokens = written.shape[1]
    if log_decay.dim() == 1:
        # Each has gone through as many steps as there are behind it.
        behind = torch.arange(num_tokens - 1, -1, -1, dtype=written.dtype, device=written.device)
        return torch.einsum("t,bth->h", behind, written) + num_tokens * passed.sum(0)
    before = torch.nn.functional.pad(written, (0, 0, 1, 0))[:, :-1].cumsum(1)
    return (passed[:, None] + before).masked_fill(log_decay == -torch.inf, 0.0).to(log_decay.dtype)


def _upto(log_decay: Tensor | None, num_tokens: int, *, like: Tensor) -> Tensor:
    """The decay (…, T, H, 1) from the row's start through each token."""
    if log_decay is not None and log_decay.dim() == 3:
        return _exp(log_decay.double().cumsum(1), like)[..., None]
    return _powers(log_decay, torch.arange(1, num_tokens + 1, device=like.device), like=like)


def _behind(log_decay: Tensor | None, num_tokens: int, *, like: Tensor) -> Tensor:
    """The decay (…, T, H, 1) from behind each token to the row's end."""
    if log_decay is not None and log_decay.dim() == 3:
        behind = torch.nn.functional.pad(log_decay.double(), (0, 0, 0, 1))[:, 1:]
        return _exp(behind.flip(1).cumsum(1).flip(1), like)[..., None]
    return _powers(log_decay, torch.arange(num_tokens - 1, -1, -1, device=like.device), like=like)


def _through(log_decay: Tensor, num_tokens: int, *, like: Tensor) -> Tensor:
    """The decay (…, H) through the whole row."""
    if log_decay.dim() == 3:
        return _exp(log_decay.sum(1, dtype=torch.float64), like)
    return _powers(log_decay, torch.tensor([num_tokens], device=like.device), like=like)[0, :, 0]


def _exp(sums: Tensor, like: Tensor) -> Tensor:
    return sums.detach().exp().to(like.dtype)


def _powers(log_decay: Tensor | None, steps: Tensor, *, like: Tensor) -> Tensor:
    """λ^steps (T, H, 1), made in fp64 and rounded once; right for λ = 0 too, where 0 · (-inf) would be NaN."""
    if log_decay is None:
        return torch.ones(1, like.shape[1], 1, dtype=like.dtype, device=like.device)
    exponents = steps[:, None].double() * log_decay.detach().double()
    return torch.where(steps[:, None] > 0, exponents, 0.0).exp().to(like.dtype)[..., None]

"""What a state from elsewhere adds to a row's outputs, and the cotangent of the one that leaves to its gradients.

Sequence parallelism computes a row from a zero state while the states travel, and adds these when they have arrived.
Names of shapes: B rows, T tokens, H heads, K key width, V value width; G sums log-decays from the row's start.
"""

import torch
from torch import Tensor

from lightscale.kernels.common.document_masks import in_first_document, in_last_document, masked, one_document
from lightscale.kernels.common.states import without_autocast

# Tokens whose decays are summed at once: in fp64, of which a whole row would take twice the memory of its gates.
_BATCH_TOKENS = 1024


@torch.no_grad()
@without_autocast
def read_fwd(q: Tensor, log_decay: Tensor, S_in: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """S_inᵀ (e^{G_t} q_t): what ``out_fwd`` with S_in gives beyond ``out_fwd`` without it.

    Args:
        q: queries (B, T, H, K).
        log_decay: (B, T, H, K).
        S_in: the state (B, H, K, V) that enters; only the row's first document reads it.
        cu_seqlens: (N+1,) or None.

    Returns:
        (B, T, H, V) in q's dtype.
    """
    num_rows, num_tokens = q.shape[:2]
    kept = in_first_document(cu_seqlens, num_rows=num_rows, num_tokens=num_tokens)
    o = q.new_empty(*q.shape[:3], S_in.shape[3])
    total = torch.zeros(*S_in.shape[:3], dtype=torch.float64, device=q.device)
    for start in range(0, num_tokens, _BATCH_TOKENS):
        tokens = slice(start, start + _BATCH_TOKENS)
        # The sums go on from batch to batch in fp64: in fp32 they would drift over a million tokens.
        sums = total[:, None] + log_decay[:, tokens].cumsum(1, dtype=torch.float64)
        total = sums[:, -1]
        weighted = masked(q[:, tokens] * sums.exp().to(S_in.dtype), None if kept is None else kept[:, tokens])
        o[:, tokens] = torch.einsum("bthk,bhkv->bthv", weighted, S_in).to(q.dtype)
    return o


@torch.no_grad()
@without_autocast
def write_bwd(
    k: Tensor, v: Tensor, log_decay: Tensor, S_in: Tensor, dS_end: Tensor, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``grad_bwd`` with dS_end gives beyond ``grad_bwd`` without it: dk, dv and dlog_decay.

    A decay meets what was written before it, and the state that entered: its gradient is a sum over those, in which
    nothing cancels.

    Args:
        k: keys (B, T, H, K).
        v: values (B, T, H, V).
        log_decay: (B, T, H, K).
        S_in: the state (B, H, K, V) that entered the row.
        dS_end: the cotangent (B, H, K, V) of the state that leaves it; only the row's last document writes to that.
        cu_seqlens: (N+1,) or None.
    """
    num_rows, num_tokens = k.shape[:2]
    shape = {"num_rows": num_rows, "num_tokens": num_tokens}
    kept = in_last_document(cu_seqlens, **shape)
    dk, dv, dlog_decay = k.new_empty(k.shape), v.new_empty(v.shape), log_decay.new_empty(log_decay.shape)
    written = torch.empty(log_decay.shape, dtype=dS_end.dtype, device=k.device)
    total = torch.zeros(*S_in.shape[:3], dtype=torch.float64, device=k.device)
    for start in reversed(range(0, num_tokens, _BATCH_TOKENS)):
        tokens = slice(start, start + _BATCH_TOKENS)
        behind = torch.nn.functional.pad(log_decay[:, tokens][:, 1:], (0, 0, 0, 0, 0, 1)).double()
        sums = total[:, None] + behind.flip(1).cumsum(1).flip(1)
        total = total + log_decay[:, tokens].sum(1, dtype=torch.float64)
        weights = masked(sums.exp().to(dS_end.dtype), None if kept is None else kept[:, tokens])
        dk_s = torch.einsum("bthv,bhkv->bthk", v[:, tokens].to(dS_end.dtype), dS_end) * weights
        keys = k[:, tokens].to(dS_end.dtype)
        dv[:, tokens] = torch.einsum("bthk,bhkv->bthv", keys * weights, dS_end).to(v.dtype)
        written[:, tokens] = keys * dk_s
        dk[:, tokens] = dk_s.to(k.dtype)
    passed = total.exp().to(dS_end.dtype) * (S_in * dS_end).sum(-1)
    whole = one_document(cu_seqlens, **shape)
    if whole is not None:
        passed = torch.where(whole[:, None, None], passed, 0.0)
    before = passed[:, None] + torch.nn.functional.pad(written, (0, 0, 0, 0, 1, 0))[:, :-1].cumsum(1)
    # Earlier documents wrote nothing to the state that leaves; the sums above are zero there already.
    dlog_decay.copy_(before.masked_fill(log_decay == -torch.inf, 0.0))
    return dk, dv, dlog_decay

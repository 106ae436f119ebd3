"""What a state from elsewhere adds to a row's outputs, and the cotangent of the one that leaves to its gradients.

Sequence parallelism computes a row from a zero state while the states travel, and adds these when they have arrived.
Names of shapes: B rows, T tokens, D channels, E modes.
"""

import torch
from torch import Tensor

from lightscale.kernels.common.document_masks import in_first_document, in_last_document, masked, one_document
from lightscale.kernels.tpe.chunk_batches import powers


@torch.no_grad()
def read_fwd(x: Tensor, log_decay: Tensor, gamma: Tensor, u_in: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Σ_r γ_r λ_r^(t+1) u_in,r: what ``out_fwd`` with u_in gives beyond ``out_fwd`` without it.

    Args:
        x: the row (B, T, D), for its shape and dtype.
        log_decay: (E,).
        gamma: (D, E).
        u_in: the state (B, D, E) that enters; only the row's first document reads it.
        cu_seqlens: (N+1,) or None.

    Returns:
        (B, T, D) in x's dtype.
    """
    num_rows, num_tokens = x.shape[:2]
    decays = powers(log_decay.detach(), torch.arange(1, num_tokens + 1, device=x.device), u_in.dtype)
    y = torch.einsum("te,bde->btd", decays, u_in * gamma.to(u_in.dtype))
    return masked(y, in_first_document(cu_seqlens, num_rows=num_rows, num_tokens=num_tokens)).to(x.dtype)


@torch.no_grad()
def write_bwd(
    x: Tensor, log_decay: Tensor, u_in: Tensor, du_end: Tensor, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What ``grad_bwd`` with du_end gives beyond ``grad_bwd`` without it: dx and dlog_decay (E,).

    Args:
        x: the row (B, T, D).
        log_decay: (E,).
        u_in: the state (B, D, E) that entered the row.
        du_end: the cotangent (B, D, E) of the state that leaves it; only the row's last document writes to that.
        cu_seqlens: (N+1,) or None.
    """
    num_rows, num_tokens = x.shape[:2]
    shape = {"num_rows": num_rows, "num_tokens": num_tokens}
    steps = torch.arange(num_tokens - 1, -1, -1, device=x.device)
    decays = powers(log_decay.detach(), steps, du_end.dtype)
    kept = in_last_document(cu_seqlens, **shape)
    dx = masked(torch.einsum("te,bde->btd", decays, du_end), kept)
    inputs = masked(x.to(du_end.dtype), kept)
    dlog_decay = torch.einsum("te,btd,bde->e", decays * steps[:, None], inputs, du_end)
    passed = torch.einsum("bde,bde->be", u_in, du_end)
    passed = passed * powers(log_decay.detach(), steps.new_tensor([num_tokens]), du_end.dtype)
    whole = one_document(cu_seqlens, **shape)
    if whole is not None:
        passed = torch.where(whole[:, None], passed, 0.0)
    return dx.to(x.dtype), dlog_decay + num_tokens * passed.sum(0)

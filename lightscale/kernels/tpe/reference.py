"""The scan of Toeplitz positional encoding, one token at a time: the oracle of every other form."""

import torch
from torch import Tensor


def tpe_scan_reference(
    x: Tensor,
    log_decay: Tensor,
    gamma: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """u_t[c, r] = λ_r u_{t-1}[c, r] + x_t[c] and y_t[c] = Σ_r γ[c, r] u_t[c, r], the recurrence written out.

    Everything is computed in the dtype of the inputs, so fp64 inputs give an fp64 oracle, and autograd
    differentiates it. Nothing here is shared with the chunked form.

    Args:
        x: (B, T, D).
        log_decay: log λ per mode (E,), at most 0.
        gamma: (D, E).
        initial_state: u_0 (B, D, E), zero when None. Only the first document of each row reads it.
        cu_seqlens: (N+1,) document boundaries over the flattened B·T tokens, every row start included.

    Returns:
        y (B, T, D) and each row's last state (B, D, E).
    """
    num_rows, num_tokens, width = x.shape
    u = x.new_zeros(num_rows, width, log_decay.shape[0]) if initial_state is None else initial_state
    decay = log_decay.exp()
    document_starts = set() if cu_seqlens is None else set(cu_seqlens.tolist())

    outputs = []
    # unbind, because the backward of x[:, t] writes a whole zero tensor for every token.
    for t, x_t in enumerate(x.unbind(1)):
        u = decay * u
        restarts = [t > 0 and row * num_tokens + t in document_starts for row in range(num_rows)]
        if any(restarts):
            fresh = torch.tensor(restarts, device=x.device)[:, None, None]
            u = torch.where(fresh, torch.zeros_like(u), u)
        u = u + x_t.unsqueeze(-1)
        outputs.append((gamma * u).sum(-1))
    return torch.stack(outputs, dim=1) if outputs else x.clone(), u

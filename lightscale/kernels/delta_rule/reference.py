"""The gated delta rule, one token at a time: the oracle that every other form is tested against."""

import torch
from torch import Tensor


def delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = (I - β_t k_t k_tᵀ) diag(exp(log_decay_t)) S_{t-1} + β_t k_t v_tᵀ and o_t = S_tᵀ q_t, written out.

    Everything is computed in the dtype of the inputs, so fp64 inputs give an fp64 oracle, and autograd
    differentiates it. Nothing here is shared with the chunked form.

    Args:
        q: queries (B, T, H, K).
        k: keys (B, T, H, K).
        v: values (B, T, N, V), N a multiple of H: head n reads the queries and keys of head n // (N / H).
        log_decay: log α (B, T, N) or (B, T, N, K), at most 0; -inf forgets the channel; None: nothing is forgotten.
        beta: (B, T, N), how much of what the state returns for a key is replaced.
        initial_state: S_0 (B, N, K, V), zero when None. Only the first document of each row reads it.
        cu_seqlens: document boundaries over the flattened B·T tokens, every row start included.

    Returns:
        The outputs (B, T, N, V) and each row's last state (B, N, K, V).
    """
    num_rows, num_tokens, num_heads = v.shape[:3]
    groups = num_heads // q.shape[2]
    q, k = q.repeat_interleave(groups, dim=2), k.repeat_interleave(groups, dim=2)
    if log_decay is None:
        log_decay = torch.zeros_like(beta)
    if log_decay.dim() == 3:
        log_decay = log_decay.unsqueeze(-1)
    state = v.new_zeros(num_rows, num_heads, k.shape[3], v.shape[3]) if initial_state is None else initial_state
    document_starts = set() if cu_seqlens is None else set(cu_seqlens.tolist())

    outputs = []
    # unbind, because the backward of x[:, t] writes a whole zero tensor for every token.
    tokens = zip(*(x.unbind(1) for x in (q, k, v, log_decay.exp(), beta)), strict=True)
    for t, (q_t, k_t, v_t, decay_t, beta_t) in enumerate(tokens):
        restarts = [t > 0 and row * num_tokens + t in document_starts for row in range(num_rows)]
        if any(restarts):
            fresh = torch.tensor(restarts, device=q.device)[:, None, None, None]
            state = torch.where(fresh, torch.zeros_like(state), state)
        # First the decay, then the correction of what the decayed state returns.
        state = decay_t.unsqueeze(-1) * state
        returned = (k_t.unsqueeze(-2) @ state).squeeze(-2)
        written = beta_t.unsqueeze(-1) * (v_t - returned)
        state = state + k_t.unsqueeze(-1) * written.unsqueeze(-2)
        outputs.append((q_t.unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, dim=1) if outputs else v.clone(), state

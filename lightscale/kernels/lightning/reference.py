"""Lightning attention, one token at a time: the oracle that every other form is tested against."""

import torch
from torch import Tensor

from lightscale.kernels.common.angles import Angles


def lightning_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    angles: Angles | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = exp(log_decay) S_{t-1} + k_t v_tᵀ and o_t = S_tᵀ q_t, the recurrence written out.

    Everything is computed in the dtype of the inputs, so fp64 inputs give an fp64 oracle, and autograd
    differentiates it. Nothing here is shared with the chunked form.

    Args:
        q: queries (B, T, H, K).
        k: keys (B, T, H, K).
        v: values (B, T, H, V).
        log_decay: log λ per head (H,), or per head and token (B, T, H), at most 0; None for no decay.
        angles: those by which q and k become [q cos, q sin] and [k cos, k sin], twice as wide (LRPE); or None.
        initial_state: S_0 (B, H, K, V), zero when None. Only the first document of each row reads it.
        cu_seqlens: (N+1,) document boundaries over the flattened B·T tokens, every row start included.

    Returns:
        The outputs (B, T, H, V) and each row's last state (B, H, K, V).
    """
    num_rows, num_tokens = q.shape[:2]
    if angles is not None:
        angle = angles.positions[:, :, None, None] * angles.theta
        q, k = (torch.cat([x * angle.cos(), x * angle.sin()], -1) for x in (q, k))
    state = k.new_zeros(*k.shape[0::2], k.shape[3], v.shape[3]) if initial_state is None else initial_state
    log_decay = k.new_zeros(()) if log_decay is None else log_decay
    decays = log_decay.exp().expand(k.shape[:3])[..., None, None].unbind(1)
    document_starts = set() if cu_seqlens is None else set(cu_seqlens.tolist())

    outputs = []
    # unbind, because the backward of x[:, t] writes a whole zero tensor for every token.
    for t, (q_t, k_t, v_t) in enumerate(zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True)):
        state = decays[t] * state
        restarts = [t > 0 and row * num_tokens + t in document_starts for row in range(num_rows)]
        if any(restarts):
            fresh = torch.tensor(restarts, device=q.device)[:, None, None, None]
            state = torch.where(fresh, torch.zeros_like(state), state)
        state = state + k_t.unsqueeze(-1) * v_t.unsqueeze(-2)
        outputs.append((q_t.unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, dim=1) if outputs else v.clone(), state

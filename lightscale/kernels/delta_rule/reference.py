"""The gated delta rule, one token at a time: the oracle that every other form is tested against."""

import torch
from torch import Tensor

from lightscale.kernels.common.references import beginnings, cleared


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

    Arguments and results are those of ``delta_rule``. All arithmetic has the dtype of the inputs: fp64 inputs give an
    fp64 oracle. Autograd differentiates it. The chunked form shares no code with it.
    """
    num_rows, num_heads = v.shape[0], v.shape[2]
    groups = num_heads // q.shape[2]
    q, k = q.repeat_interleave(groups, dim=2), k.repeat_interleave(groups, dim=2)
    if log_decay is None:
        log_decay = torch.zeros_like(beta)
    if log_decay.dim() == 3:
        log_decay = log_decay.unsqueeze(-1)
    state = v.new_zeros(num_rows, num_heads, k.shape[3], v.shape[3]) if initial_state is None else initial_state

    outputs = []
    # unbind, because the backward of x[:, t] writes a whole zero tensor for every token.
    tokens = (x.unbind(1) for x in (q, k, v, log_decay.exp(), beta))
    for q_t, k_t, v_t, decay_t, beta_t, begins in zip(*tokens, beginnings(cu_seqlens, v), strict=True):
        # First the decay, then the correction by the decayed state's value.
        state = decay_t.unsqueeze(-1) * cleared(state, begins)
        returned = (k_t.unsqueeze(-2) @ state).squeeze(-2)
        written = beta_t.unsqueeze(-1) * (v_t - returned)
        state = state + k_t.unsqueeze(-1) * written.unsqueeze(-2)
        outputs.append((q_t.unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, dim=1) if outputs else v.clone(), state

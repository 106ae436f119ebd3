"""Lightning attention, one token at a time: the oracle that every other form is tested against."""

import torch
from torch import Tensor

from lightscale.kernels.common.angles import Angles
from lightscale.kernels.common.references import beginnings, cleared


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

    Arguments and results are those of ``lightning_attention``. All arithmetic has the dtype of the inputs: fp64 inputs
    give an fp64 oracle. Autograd differentiates it. The chunked form shares no code with it.
    """
    if angles is not None:
        angle = (angles.positions[..., None, None] * angles.theta).flatten(2, -2)
        q, k = (torch.cat([x * angle.cos(), x * angle.sin()], -1) for x in (q, k))
    state = k.new_zeros(*k.shape[0::2], k.shape[3], v.shape[3]) if initial_state is None else initial_state
    log_decay = k.new_zeros(()) if log_decay is None else log_decay
    decays = log_decay.exp().expand(k.shape[:3])[..., None, None]

    outputs = []
    # unbind, because the backward of x[:, t] writes a whole zero tensor for every token.
    tokens = (x.unbind(1) for x in (q, k, v, decays))
    for q_t, k_t, v_t, decay_t, begins in zip(*tokens, beginnings(cu_seqlens, q), strict=True):
        state = cleared(decay_t * state, begins)
        state = state + k_t.unsqueeze(-1) * v_t.unsqueeze(-2)
        outputs.append((q_t.unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, dim=1) if outputs else v.clone(), state

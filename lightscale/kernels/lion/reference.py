"""LION as two recurrences, one token at a time: inference in this form keeps two states alone."""

import torch
from torch import Tensor

from lightscale.kernels.common.references import beginnings, cleared
from lightscale.kernels.lion.state import Gate, LionState


def lion_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    gate: Gate = "leave",
    normalize: bool = True,
    eps: float = 1e-6,
    initial_state: LionState | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, LionState]:
    """The recurrences of LION (Theorem 3.3, equations 20 to 25), with half of the diagonal in each and one division.

    Arguments and results are those of ``lion``; the states are the two that leave the row. All arithmetic has the dtype
    of the inputs: fp64 inputs give an fp64 oracle. Autograd differentiates it. The chunked form shares no code with it.

    With log decays per value channel (B, T, H, V), C.7's vector gate, each channel has a divisor of its own. The states
    then have V columns for the divisors.
    """
    num_rows, _, num_heads = q.shape[:3]
    log_decay = k.new_zeros(()) if log_decay is None else log_decay
    by_channel, width = log_decay.dim() == 4, v.shape[3]
    if normalize:
        v = torch.cat([v, torch.ones_like(v if by_channel else v[..., :1])], -1)
    if by_channel:
        decays = log_decay.exp().repeat(1, 1, 1, v.shape[3] // width)[..., None, :].unbind(1)
    else:
        decays = log_decay.exp().expand(k.shape[:3])[..., None, None].unbind(1)
    empty = k.new_zeros(num_rows, num_heads, k.shape[3], v.shape[3])
    prefix, suffix = initial_state or (empty, empty)
    # unbind, because the backward of x[:, t] writes a whole zero tensor for every token.
    tokens = list(zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True))

    def read(q_t: Tensor, k_t: Tensor, v_t: Tensor, state: Tensor) -> Tensor:
        own = 0.5 * (q_t * k_t).sum(-1, keepdim=True) * v_t
        return (q_t.unsqueeze(-2) @ state).squeeze(-2) + own

    def written(k_t: Tensor, v_t: Tensor) -> Tensor:
        return k_t.unsqueeze(-1) * v_t.unsqueeze(-2)

    begins = [*beginnings(cu_seqlens, q), None]
    outputs: list[Tensor] = []
    for t, (q_t, k_t, v_t) in enumerate(tokens):
        prefix = cleared(prefix, begins[t])
        # "enter": a token's gate decays the state that enters the token; "leave": the state that leaves it.
        reached = decays[t] * prefix
        outputs.append(read(q_t, k_t, v_t, reached if gate == "enter" else prefix))
        prefix = reached + written(k_t, v_t) * (1.0 if gate == "enter" else decays[t])
    for t, (q_t, k_t, v_t) in reversed(list(enumerate(tokens))):
        suffix = cleared(suffix, begins[t + 1])
        reached = decays[t] * suffix
        outputs[t] = outputs[t] + read(q_t, k_t, v_t, reached if gate == "enter" else suffix)
        suffix = reached + written(k_t, v_t) * (1.0 if gate == "enter" else decays[t])
    y = torch.stack(outputs, 1) if outputs else v.clone()
    if normalize:
        normalizer = y[..., width:] + eps
        y = torch.where(normalizer == 0, 0.0, y[..., :width] / torch.where(normalizer == 0, 1.0, normalizer))
    return y, LionState(prefix, suffix)

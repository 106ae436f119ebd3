"""The scan of Toeplitz positional encoding, one token at a time: the oracle of every other form."""

import torch
from torch import Tensor

from lightscale.kernels.common.references import beginnings, cleared


def tpe_scan_reference(
    x: Tensor,
    log_decay: Tensor,
    gamma: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """u_t[c, r] = λ_r u_{t-1}[c, r] + x_t[c] and y_t[c] = Σ_r γ[c, r] u_t[c, r], the recurrence written out.

    Arguments and results are those of ``tpe_scan``. All arithmetic has the dtype of the inputs: fp64 inputs give an
    fp64 oracle. Autograd differentiates it. The chunked form shares no code with it.
    """
    u = x.new_zeros(x.shape[0], x.shape[2], log_decay.shape[0]) if initial_state is None else initial_state
    decay = log_decay.exp()

    outputs = []
    # unbind, because the backward of x[:, t] writes a whole zero tensor for every token.
    for x_t, begins in zip(x.unbind(1), beginnings(cu_seqlens, x), strict=True):
        u = cleared(decay * u, begins) + x_t.unsqueeze(-1)
        outputs.append((gamma * u).sum(-1))
    return torch.stack(outputs, dim=1) if outputs else x.clone(), u

"""The oracle of tests: all pairs of tokens at once."""

import torch
from torch import Tensor

from lightscale.kernels.relation.activations import activation_of


def relation_reference(
    a: Tensor, b: Tensor, first: Tensor, end: Tensor, *, activation: str = "exp", norm: bool = True, eps: float = 0.0
) -> Tensor:
    """o_i = Σ_j ψ(LN(a_i + b_j)), first_i ≤ j < end_i, all pairs at once (CausalRN, equation 8 and section 3.4).

    All arithmetic has the dtype of the inputs. Autograd differentiates it; memory grows with the square of the length.

    Args:
        a: (B, T, D), of the tokens that read.
        b: (B, S, D), of the tokens that are read.
        first, end: (B, T) int64, the range of tokens that each token reads.
        activation: ψ, a name of ``ACTIVATIONS``.
        norm: LayerNorm without weights over D before ψ; False: none.
        eps: added to its variance.
    """
    s = a[:, :, None] + b[:, None]
    if norm:
        s = s - s.mean(-1, keepdim=True)
        s = s / torch.sqrt((s * s).mean(-1, keepdim=True) + eps)
    number = torch.arange(b.shape[1], device=b.device)
    seen = (number >= first[..., None].to(b.device)) & (number < end[..., None].to(b.device))
    return torch.where(seen[..., None], activation_of(activation).plain(s), 0.0).sum(2)

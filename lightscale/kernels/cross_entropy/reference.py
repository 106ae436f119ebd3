"""The loss of a linear output layer, by autograd and with all logits at once: the oracle of every other form."""

import torch
from torch import Tensor


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    num_ids: int,
    loss_mask: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """-log softmax(hidden weightᵀ)[label] of each token, in the dtype of the inputs.

    Args:
        hidden: (..., d).
        weight: (V, d), all rows of the vocabulary.
        labels: (...), int64 ids below ``num_ids``; any value where the mask is 0.
        num_ids: rows of the weight in use; the rows behind have probability 0.
        loss_mask: (...), factor of each loss; None for 1.
        cap: logits s are cap tanh(s / cap); None: they are s.
    """
    logits = hidden @ weight[:num_ids].mT
    scores = torch.log_softmax(logits if cap is None else cap * torch.tanh(logits / cap), dim=-1)
    if loss_mask is None:
        return -scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    labels = labels.where(loss_mask != 0, 0)
    return -scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1) * loss_mask

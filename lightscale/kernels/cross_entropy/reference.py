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
    z_loss: float = 0.0,
) -> Tensor:
    """-log softmax(hidden weightᵀ)[label] + z_loss log² Z of each token, in the dtype of the inputs.

    Args:
        hidden: (..., d).
        weight: (V, d), all rows of the vocabulary.
        labels: (...), int64 ids below ``num_ids``; any value where the mask is 0.
        num_ids: rows of the weight in use; the rows behind have probability 0.
        loss_mask: (...), factor of each loss; None for 1.
        cap: logits s are cap tanh(s / cap); None: they are s.
        z_loss: factor of log² Z, with Z the sum of the exponentials of the logits.
    """
    logits = hidden @ weight[:num_ids].mT
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    if loss_mask is not None:
        labels = labels.where(loss_mask != 0, 0)
    losses = -torch.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if z_loss:
        losses = losses + z_loss * logits.logsumexp(dim=-1).square()
    return losses if loss_mask is None else losses * loss_mask

"""The bounded forget gate by autograd: the oracle of every other form."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def forget_gate_reference(logits: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """log f and 1 - f of logits (…, H, K) and β (H, K), in their dtype, where f = β + (1 - β) sigmoid(logits)."""
    forget = bound + (1 - bound) * torch.sigmoid(logits)
    key = (1 - bound) * torch.sigmoid(-logits)
    large, bounded = forget > 0.5, bound > 0
    # Each branch has a harmless input where the other one counts: its gradient there would be 0 times infinity.
    near_one = torch.log1p(-torch.where(large, key, 0.0))
    near_zero = torch.log(torch.where(large | ~bounded, 1.0, forget))
    return torch.where(bounded, torch.where(large, near_one, near_zero), logsigmoid(logits)), key

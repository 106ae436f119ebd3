import torch
from torch import Tensor


def decayed_sum(x: Tensor, decay: float, positions: Tensor, before: Tensor | None = None) -> Tensor:
    """x (b, n, d) -> y_t = x_t + decay y_{t-1}, from 0 in every document; ``before``: y (b, d) at first."""
    y = torch.zeros_like(x[:, 0]) if before is None else before
    outputs = []
    for t in range(x.size(1)):
        y = x[:, t] + torch.where(positions[:, t, None] == 0, 0.0, decay * y)
        outputs.append(y)
    return torch.stack(outputs, dim=1)

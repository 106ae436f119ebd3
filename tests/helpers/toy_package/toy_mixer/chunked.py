import torch
from torch import Tensor

CHUNK_SIZE = 16


def decayed_sum(x: Tensor, decay: float, positions: Tensor, before: Tensor | None = None) -> Tensor:
    """As the reference: a product with a matrix of decays in each chunk, and what the chunk before left."""
    y = torch.zeros_like(x[:, 0]) if before is None else before
    outputs = []
    for own, position in zip(x.split(CHUNK_SIZE, dim=1), positions.split(CHUNK_SIZE, dim=1), strict=True):
        t = torch.arange(own.size(1))
        distance = t[:, None] - t
        seen = (distance >= 0) & (distance <= position[..., None])
        weights = torch.where(seen, decay ** distance.clamp(min=0).to(x.dtype), 0.0)
        left = torch.where(position > t, decay ** (t + 1.0).to(x.dtype), 0.0)
        outputs.append(weights @ own + left[..., None] * y[:, None])
        y = outputs[-1][:, -1]
    return torch.cat(outputs, dim=1)

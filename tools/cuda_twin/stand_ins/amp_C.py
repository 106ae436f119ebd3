"""Stands in for the compiled kernels of NVIDIA apex; see README.md."""

from collections.abc import Sequence

import torch
from torch import Tensor


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], per_tensor: bool
) -> tuple[Tensor, Tensor]:
    """The norm of all tensors together, and with ``per_tensor`` that of each."""
    norms = torch.stack([torch.linalg.vector_norm(tensor.float()) for tensor in tensor_lists[0]])
    return torch.linalg.vector_norm(norms).view(1), norms if per_tensor else norms.new_empty(0)


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], scale: float
) -> None:
    """The first tensors times ``scale``, to the second ones; ``noop_flag`` says whether any is not finite."""
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)
        if not source.isfinite().all():
            noop_flag.fill_(1)

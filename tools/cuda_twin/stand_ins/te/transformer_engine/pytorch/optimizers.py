"""What Megatron takes for its optimizer: as apex's, from which Transformer Engine has it, with more arguments."""

from collections.abc import Iterable
from typing import Any

import torch
from amp_C import multi_tensor_l2norm, multi_tensor_scale
from apex.multi_tensor_apply import multi_tensor_applier
from apex.optimizers import FusedAdam as _FusedAdam
from apex.optimizers import FusedSGD
from torch import Tensor

__all__ = ["FusedAdam", "FusedSGD", "multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale"]


class FusedAdam(_FusedAdam):
    """Its moments may have other types than fp32, which lightscale does not ask for."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
    ) -> None:
        assert exp_avg_dtype == exp_avg_sq_dtype == torch.float32
        super().__init__(params, lr, bias_correction, betas, eps, adam_w_mode, weight_decay, amsgrad)

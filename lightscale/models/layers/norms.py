"""Norms: simple RMS norm, RMS norm with a weight, and the gated norm over the heads of all tensor ranks."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightscale.kernels.norm import norm
from lightscale.parallel.initialization import ones, set_initializer
from lightscale.parallel.megatron import TransformerConfig


class SRMSNorm(nn.Module):
    """Simple RMS norm, x / sqrt(mean(x²) + eps), without weight (TransNormerLLM, arXiv 2307.14995, eq. 7)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., d) -> (..., d), computed in fp32 for half precision."""
        return norm(x, eps=self.eps)


class RMSNorm(nn.Module):
    """RMS norm with a weight (arXiv 1910.07467)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.empty(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # Tensor ranks hold other tokens each: the engine sums the gradient over them.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        set_initializer(self.weight, ones)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., d) -> (..., d), computed in fp32 for half precision."""
        return norm(x, self.weight, eps=self.eps)


class SRMSNormAndInput(SRMSNorm):
    """For mixers that read both: (..., d) -> the normalised input, and the input itself."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x: (..., d) -> (normalised, x)."""
        return super().forward(x), x


class RMSNormAndInput(RMSNorm):
    """The same with a weight."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x: (..., d) -> (normalised, x)."""
        return super().forward(x), x


def gated_norm_split(x: Tensor, gate: Tensor | None, *, width: int, eps: float, group: dist.ProcessGroup) -> Tensor:
    """SRMSNorm over the full ``width`` of x: (..., width / tensor), split over the tensor ranks, times sigmoid(gate).

    One all-reduce of a number per token each way; without tensor parallelism none.
    """
    # The mean square is over all heads, and each tensor rank has some of them: their sums are added up.
    reduce = partial(dist.all_reduce, group=group) if group.size() > 1 else None
    activation = "none" if gate is None else "sigmoid"
    return norm(x, gate=gate, gate_activation=activation, eps=eps, width=width, reduce=reduce)

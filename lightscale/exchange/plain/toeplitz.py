"""The Toeplitz positional encoding behind the embedding (TPE, and MD-TPE of images): causal convolutions."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.exchange.plain.mixers import State
from lightscale.exchange.plain.operators import toeplitz_scan, wide_dtype
from lightscale.exchange.plain.patches import ImageInputs


@dataclass(frozen=True, kw_only=True)
class ToeplitzForm:
    """The form of the positional encoding behind the embedding."""

    form: str = "residual"
    """residual: x + y, weights learned; printed: y alone, weights of 1."""
    modes: int | None = None
    """Decays; None: hidden_size / num_attention_heads."""


class ToeplitzEncoding(nn.Module):
    """Positions by a causal convolution per channel, a sum of decaying modes: x + y. Stands behind the embedding.

    Args:
        hidden_size: d.
        num_modes: e, the decays that all channels share.
        printed: y alone, whose modes have no weights.
        axes: with two, y is the sum over rows and columns of an image, each with decays and weights of its own; as
            printed, with the same.
    """

    gamma: nn.Parameter | None

    def __init__(self, hidden_size: int, num_modes: int, *, printed: bool = False, axes: int = 1) -> None:
        super().__init__()
        each = () if axes == 1 else (axes,)
        # Time scales from 1 to 4096 tokens.
        scales = torch.logspace(0, math.log10(4096), num_modes, dtype=torch.float64)
        logits = torch.logit(torch.exp(-1 / scales)).float()
        self.decay_logit = nn.Parameter(logits if printed else logits.expand(*each, -1).clone())
        gamma = None if printed else nn.Parameter(torch.empty(hidden_size, *each, num_modes))
        self.register_parameter("gamma", gamma)
        if self.gamma is not None:
            nn.init.normal_(self.gamma, std=0.02 / math.sqrt(num_modes * axes))

    def forward(self, x: Tensor, state: State | None = None, mask: Tensor | None = None) -> tuple[Tensor, State]:
        """x: (b, n, d) -> the same and the state ``u``: (b, d, e)."""
        gamma = x.new_ones(x.size(-1), len(self.decay_logit)) if self.gamma is None else self.gamma
        u = x.new_zeros(x.size(0), *gamma.shape, dtype=wide_dtype(x)) if state is None else state["u"]
        log_decay = F.logsigmoid(self.decay_logit.to(u.dtype))
        y, u = toeplitz_scan(x, log_decay, gamma, u, mask)
        return (y if self.gamma is None else x + y), {"u": u}

    def along_axes(self, x: Tensor, image: ImageInputs) -> Tensor:
        """x: (b, n, d), tokens of images -> the same; along each axis a line of tokens is a row of its own."""
        b, _, d = x.shape
        num_modes = self.decay_logit.size(-1)
        logits = self.decay_logit.to(wide_dtype(x)).view(-1, num_modes).expand(2, -1)
        gamma = x.new_ones(d, 1, num_modes) if self.gamma is None else self.gamma
        # Nothing stands in front of the leading tokens, and nothing is written there.
        rows = F.pad(x, (0, 0, image.first_cell, 0)).unflatten(1, (-1, image.grid[1]))
        total = None if self.gamma is None else x
        for axis, lines in enumerate((rows.transpose(1, 2), rows)):
            u = x.new_zeros(b * lines.size(1), d, num_modes, dtype=logits.dtype)
            weights = gamma.expand(-1, 2, -1)[:, axis]
            y = toeplitz_scan(lines.flatten(0, 1), F.logsigmoid(logits[axis]), weights, u)[0].view(lines.shape)
            y = (y if axis else y.transpose(1, 2)).flatten(1, 2)[:, image.first_cell :]
            total = y if total is None else total + y
        assert total is not None
        return total

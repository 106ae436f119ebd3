"""Fold of log-sums over neighbouring segments of a row, for ranks that exchange summaries."""

import torch
from torch import Tensor

from lightscale.kernels.log_sum.chunked import weight


@torch.no_grad()
def entering_sums(z: Tensor, through: Tensor, state: Tensor | None = None) -> Tensor:
    """The log-sum that enters each of N segments, and the log-sum behind them all: (N + 1, B, D).

    All sums at once, in N² B D numbers and a fixed number of launches: a sum has one number per channel, and N is
    small.

    Args:
        z: (N, B, D), the log-sum of each segment alone.
        through: (N, B), 0 where a document begins in the segment.
        state: (B, D), the log-sum that enters the first segment; log 0 when None.
    """
    first = torch.full_like(z[:1].sum(0), -torch.inf) if state is None else state
    terms = torch.cat([first[None], z])
    # Documents that begin up to each term; a term is part of a later sum unless one begins between.
    begun = torch.cat([torch.zeros_like(through[:1]), through == 0]).cumsum(0)
    number = torch.arange(len(terms), device=z.device)
    kept = (begun[:, None] == begun) & (number[:, None] >= number)[..., None]
    return torch.logsumexp(torch.where(kept[..., None], terms, -torch.inf), dim=1)


def shares(entering: Tensor, through: Tensor) -> Tensor:
    """The share of each of N segments' entering sum in the sum behind it, (N, B, D), from ``entering_sums``."""
    return weight(entering[:-1], entering[1:]).masked_fill((through == 0)[..., None], 0.0)

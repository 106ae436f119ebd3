"""Log-sums folded over neighbouring segments of a row: what ranks that pass states do with summaries."""

import torch
from torch import Tensor

from lightscale.kernels.log_sum.chunked import weight


@torch.no_grad()
def entering_sums(z: Tensor, through: Tensor, state: Tensor | None = None) -> Tensor:
    """The sum that enters each of N segments, and the one behind them all: (N + 1, B, D).

    All at once, in N² B D numbers and as many launches for any N: a sum has one number per channel, and ranks are few.

    Args:
        z: (N, B, D) of each segment by itself.
        through: (N, B), 0 where a document begins in the segment.
        state: (B, D), what enters the first one; nothing when None.
    """
    first = torch.full_like(z[:1].sum(0), -torch.inf) if state is None else state
    terms = torch.cat([first[None], z])
    # Documents that begin up to each term; a term is in a later sum as long as none begins behind it.
    begun = torch.cat([torch.zeros_like(through[:1]), through == 0]).cumsum(0)
    number = torch.arange(len(terms), device=z.device)
    kept = (begun[:, None] == begun) & (number[:, None] >= number)[..., None]
    return torch.logsumexp(torch.where(kept[..., None], terms, -torch.inf), dim=1)


def shares(entering: Tensor, through: Tensor) -> Tensor:
    """How much of what enters each of N segments is in the sum behind it, (N, B, D), of ``entering_sums``."""
    return weight(entering[:-1], entering[1:]).masked_fill((through == 0)[..., None], 0.0)

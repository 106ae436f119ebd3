"""The largest attention logit of each head, q_t·k_j / sqrt(k) over the pairs (t, j) that are read, before any cap.

No kernel of PyTorch returns it: scores are computed once more, by tiles, without a gradient.
"""

import torch
from torch import Tensor

from lightscale.kernels.attention.tiled import HeadTiles, KeyRanges


@torch.no_grad()
def largest_logits(q: Tensor, k: Tensor, ranges: KeyRanges) -> Tensor:
    """(h,) of q (b, n, h, k) and k (b, keys, g, k), g a divisor of h; -inf where no key is read."""
    heads = HeadTiles(q, k, ranges, None)
    found = torch.full((heads.groups, heads.shared), -torch.inf, dtype=heads.dtype, device=q.device)
    for row in range(q.size(0)):
        for block in ranges.blocks(row):
            for tile in block:
                scores = heads.scores(q, k, row, tile)[0]
                found = torch.maximum(found, scores.flatten(1).unflatten(1, (heads.shared, -1)).amax(dim=-1))
    return found.flatten()


class HeadMaxima:
    """The largest logits of one layer's heads on this rank, over what was seen since ``begin``.

    ``layer``: from 0, of the whole model; ``first``, ``heads``: the first of this rank's heads, and their number.
    """

    def __init__(self, layer: int, first: int, heads: int, device: torch.device) -> None:
        self.layer, self.first = layer, first
        self.values = torch.full((heads,), -torch.inf, device=device)
        """(heads,) fp32; -inf before any pair."""
        self._is_measured = False

    def begin(self, *, measure: bool) -> None:
        """Forget what was seen; ``measure``: whether to look from now on."""
        self._is_measured = measure
        self.values.fill_(-torch.inf)

    @property
    def of_pass(self) -> "HeadMaxima | None":
        """What the attention of this pass reports to; None: it is not measured.

        Only passes with gradients are: no validation, and one of the two of a layer that is recomputed.
        """
        return self if self._is_measured and torch.is_grad_enabled() else None

    def take_in(self, largest: Tensor, first: int = 0) -> None:
        """Logits of the heads ``first`` … of this rank."""
        own = self.values[first : first + len(largest)]
        torch.maximum(own, largest.to(own.dtype), out=own)

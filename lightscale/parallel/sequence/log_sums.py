"""States that are only the log of a sum (CausalRN, BiRN): the effect of segments of a row on them.

Sums add up, and a token's share of a sum is known where the sum is: backward only the cotangents of sums travel.
"""

import torch
from torch import Tensor

from lightscale.kernels.common.segments import decayed, fold
from lightscale.kernels.log_sum.segments import entering_sums, shares
from lightscale.parallel.sequence.algebra import Algebra, Tensors, WholeDocuments


def _cut(z: Tensor, through: Tensor) -> Tensor:
    """z (B, D), nothing where a document begins (B, 1)."""
    return z.masked_fill(through == 0, -torch.inf)


class LogSum(Algebra):
    """z ↦ logaddexp(z, z_loc). Summary (z, through), through (B, 1) being 0 where a document begins; states and
    cotangents one tensor (B, D)."""

    def identity(self, summary: Tensors) -> Tensors:
        return *self.empty(summary), torch.ones_like(summary[1])

    def combine(self, earlier: Tensors, later: Tensors) -> Tensors:
        return *self.apply(later, earlier[:1]), earlier[1] * later[1]

    def empty(self, summary: Tensors) -> Tensors:
        return (torch.full_like(summary[0], -torch.inf),)

    def apply(self, summary: Tensors, state: Tensors) -> Tensors:
        z, through = summary
        return (torch.logaddexp(_cut(state[0], through), z),)

    def transition(self, summary: Tensors, state: Tensors) -> Tensor:
        # The share of the sum behind the segment: it depends on what came in, and is kept in the forward pass.
        entering = torch.stack([state[0], *self.apply(summary, state)])
        return shares(entering, summary[1][None, :, 0])[0]

    def adjoint(self, transition: Tensor, reads: Tensors, cotangent: Tensors) -> Tensors:
        return (reads[0] + decayed(transition, cotangent[0]),)

    def fold(self, segments: Tensors, state: Tensors | None, end: int) -> tuple[Tensors, Tensor]:
        z, through = segments[0], segments[1][..., 0]
        entering = entering_sums(z, through, None if state is None else state[0])
        # Copied: a view would keep what enters every segment until the backward pass.
        return (entering[end].clone(),), shares(entering, through)

    def combined(self, segments: Tensors) -> Tensors:
        # Their product: each is 0 or 1.
        return *self.fold(segments, None, segments[0].size(0))[0], segments[1].amin(0)

    def fold_back(
        self, transitions: Tensor, reads: Tensors, cotangent: Tensors | None = None, rank: int | None = None
    ) -> Tensors:
        behind = slice(0 if rank is None else rank + 1, None)
        end = None if cotangent is None else cotangent[0]
        return (fold(reads[0][behind], transitions[behind], end, reverse=True),)


class WholeLogSum(WholeDocuments):
    """The same for documents whose tokens read the whole document: states from both sides add to the segment's own.

    Summary (z of each direction, through), states and cotangents one tensor for each.
    """

    def directions(self, tensors: Tensors) -> list[tuple[Algebra, Tensors, bool]]:
        shared = tensors[len(self.reverse) :]
        return [(WholeLogSum((r,)), (x, *shared), r) for x, r in zip(tensors, self.reverse, strict=False)]

    def combine(self, earlier: Tensors, later: Tensors) -> Tensors:
        found = []
        for before, to, reverse in zip(earlier, later, self.reverse, strict=False):
            if reverse:
                found.append(torch.logaddexp(_cut(to, earlier[-1]), before))
            else:
                found.append(torch.logaddexp(_cut(before, later[-1]), to))
        return *found, earlier[-1] * later[-1]

    def empty(self, summary: Tensors) -> Tensors:
        return tuple(torch.full_like(z, -torch.inf) for z in summary[:-1])

    def apply(self, summary: Tensors, state: Tensors) -> Tensors:
        *own, through = summary
        return tuple(torch.logaddexp(_cut(before, through), z) for z, before in zip(own, state, strict=True))

    def transition(self, summary: Tensors, state: Tensors) -> Tensor:
        # Of a document that goes on all is left: cotangents are of its whole sum.
        return summary[-1]

    def _fold(self, segments: Tensors, state: Tensors | None, ends: tuple[int, int]) -> Tensors:
        """Each direction through its first segments, so many to the right, and to the left."""
        through = segments[-1][..., 0]
        found = []
        for number, (z, reverse) in enumerate(zip(segments, self.reverse, strict=False)):
            # From the last segment on it is the same fold.
            of_all, passed = (x.flip(0) if reverse else x for x in (z, through))
            first = None if state is None else state[number]
            found.append(entering_sums(of_all, passed, first)[ends[reverse]].clone())
        return tuple(found)


LOG_SUM = LogSum()
WHOLE_LOG_SUM = WholeLogSum()

"""How segments of a row act on the state that enters them: the algebra that all mixers and exchanges share.

A segment is summed up by a few tensors, its summary. Summaries can be combined, in order and in any grouping, so that
any exchange may gather, chain or nest them; and they are applied to a state. Backward, what a segment's own outputs
read from the incoming state, and the cotangent of the outgoing one, give the cotangent of the incoming one. That is
diagonal for every kind, with decays that the forward pass knows: the transition of the segment.

Summaries, states and cotangents are tuples of tensors of one dtype, with rows (B) first and heads or channels second.
A document that begins inside a segment cuts it: nothing passes. What must not pass is replaced, not multiplied by zero,
so that an overflow elsewhere cannot arrive as NaN.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lightscale.kernels.common.segments import decayed, fold
from lightscale.kernels.lightnet import LightNetState, merge
from lightscale.kernels.lightnet.segments import fold as fold_averages
from lightscale.kernels.lightnet.state import by_row, passed_share

Tensors = tuple[Tensor, ...]


class Algebra(ABC):
    """A kind of state. The operations are pure, and equal on every rank."""

    @abstractmethod
    def identity(self, summary: Tensors) -> Tensors:
        """The summary of a segment without tokens, in the shapes of ``summary``."""

    @abstractmethod
    def combine(self, earlier: Tensors, later: Tensors) -> Tensors:
        """The summary of two neighbouring segments. Associative, with ``identity``."""

    @abstractmethod
    def empty(self, summary: Tensors) -> Tensors:
        """The state in which nothing was written yet."""

    @abstractmethod
    def apply(self, summary: Tensors, state: Tensors) -> Tensors:
        """The state behind a segment that ``state`` enters."""

    @abstractmethod
    def transition(self, summary: Tensors, state: Tensors) -> Tensor:
        """How much of each channel of ``state`` is left behind the segment, between 0 and 1."""

    @abstractmethod
    def adjoint(self, transition: Tensor, reads: Tensors, cotangent: Tensors) -> Tensors:
        """The cotangent of the state that enters a segment.

        Args:
            transition: of the segment.
            reads: the part that comes from the segment's own outputs.
            cotangent: of the state that leaves the segment.
        """

    @abstractmethod
    def fold(self, segments: Tensors, state: Tensors | None, end: int) -> tuple[Tensors, Tensor]:
        """``apply`` of the first ``end`` of N segments in turn, and ``transition`` of each of all N, for ``fold_back``.

        On GPUs as many launches for any N. The same order on every rank gives the same bits.

        Args:
            segments: their summaries, stacked: (N, …) each.
            state: what enters the first one; ``empty`` when None.

        Returns:
            The state, and the transitions (N, …), which hold nothing else in memory.
        """

    @abstractmethod
    def combined(self, segments: Tensors) -> Tensors:
        """``combine`` of all of some segments, stacked as in ``fold``."""

    @abstractmethod
    def fold_back(self, transitions: Tensor, reads: Tensors, cotangent: Tensors | None = None) -> Tensors:
        """``adjoint`` of some segments, from the last to the first.

        Args:
            transitions: (N, …), of ``fold``.
            reads: stacked likewise.
            cotangent: of the state that leaves the last segment; zero when None.
        """


class Diagonal(Algebra):
    """S ↦ D ⊙ S + S_loc, 0 ≤ D ≤ 1. Summary (S_loc, D), D broadcast to S_loc; state (S,); cotangent (dS,)."""

    def identity(self, summary: Tensors) -> Tensors:
        S, D = summary
        return torch.zeros_like(S), torch.ones_like(D)

    def combine(self, earlier: Tensors, later: Tensors) -> Tensors:
        # The associative product of first-order recurrences (Blelloch, "Prefix sums and their applications", 1990).
        (S,) = self.apply(later, earlier[:1])
        return S, earlier[1] * later[1]

    def empty(self, summary: Tensors) -> Tensors:
        return (torch.zeros_like(summary[0]),)

    def apply(self, summary: Tensors, state: Tensors) -> Tensors:
        # combine calls it too. Exchanges group these sums differently, so their results differ by rounding.
        S, D = summary
        return (S + decayed(D, state[0]),)

    def transition(self, summary: Tensors, state: Tensors) -> Tensor:
        # Whatever state enters: the map is linear in S, so that passing cotangents back takes D and no state.
        return summary[1]

    def adjoint(self, transition: Tensor, reads: Tensors, cotangent: Tensors) -> Tensors:
        # The transposed map of ``apply``: a real diagonal is its own transpose.
        return (reads[0] + decayed(transition, cotangent[0]),)

    def fold(self, segments: Tensors, state: Tensors | None, end: int) -> tuple[Tensors, Tensor]:
        S, D = segments
        # Copied: a view would keep all that was gathered until the backward pass.
        return (fold(S[:end], D[:end], None if state is None else state[0]),), D.clone()

    def combined(self, segments: Tensors) -> Tensors:
        # Not `prod`: CUDA's is compiled when it is first called.
        return fold(*segments), segments[1].cumprod(0)[-1]

    def fold_back(self, transitions: Tensor, reads: Tensors, cotangent: Tensors | None = None) -> Tensors:
        return (fold(reads[0], transitions, None if cotangent is None else cotangent[0], reverse=True),)


class LogSumExp(Algebra):
    """States are averages whose weights sum to e^z; they merge as averages (LightNet).

    Summary (z, S, through), through (B, 1) being 0 where a document begins; state (z, S); cotangent (U, R), see
    ``kernels.lightnet.StateCotangent``.
    """

    def identity(self, summary: Tensors) -> Tensors:
        z, S, through = summary
        return torch.full_like(z, -torch.inf), torch.zeros_like(S), torch.ones_like(through)

    def combine(self, earlier: Tensors, later: Tensors) -> Tensors:
        return *self.apply(later, earlier[:2]), earlier[2] * later[2]

    def empty(self, summary: Tensors) -> Tensors:
        # Weights that sum to e^-inf = 0: merging takes all of the other state.
        return self.identity(summary)[:2]

    def apply(self, summary: Tensors, state: Tensors) -> Tensors:
        z, S, through = summary
        return tuple(merge(LightNetState(*state), LightNetState(z, S), through[:, 0]))

    def transition(self, summary: Tensors, state: Tensors) -> Tensor:
        # The share of the weights that come from before the segment. It depends on the incoming state, not on the
        # segment alone as a decay does, and so it is kept in the forward pass.
        z, _, through = summary
        return passed_share(state[0], z, through[:, 0])

    def adjoint(self, transition: Tensor, reads: Tensors, cotangent: Tensors) -> Tensors:
        # In the unnormalised sums e^z and e^z S merging is addition, whose cotangents pass unchanged. U and -R are
        # those cotangents times the state's own weight e^z, which itself would overflow, so that only the ratio of two
        # weights, at most 1, is applied. The plain cotangent of z would mix with that of S instead.
        U, R = cotangent
        return reads[0] + decayed(by_row(transition, U.shape[2]), U), reads[1] + decayed(transition, R)

    def fold(self, segments: Tensors, state: Tensors | None, end: int) -> tuple[Tensors, Tensor]:
        z, S, through = segments
        entering = None if state is None else LightNetState(*state)
        found, transitions = fold_averages(LightNetState(z, S), through[..., 0], entering, end=end)
        return tuple(found), transitions

    def combined(self, segments: Tensors) -> Tensors:
        # Their product: each is 0 or 1.
        return *self.fold(segments, None, segments[0].size(0))[0], segments[2].amin(0)

    def fold_back(self, transitions: Tensor, reads: Tensors, cotangent: Tensors | None = None) -> Tensors:
        U, R = reads
        K = transitions.size(-1)
        # (N, B H, halves, K, V): both halves of LRPE share a channel's transition.
        halves, of_rows = U.unflatten(3, (-1, K)).flatten(1, 2), transitions.flatten(1, 2)[:, :, None, :, None]
        end_U, end_R = (None, None) if cotangent is None else cotangent
        end_U = None if end_U is None else end_U.unflatten(2, (-1, K)).flatten(0, 1)
        own_U = fold(halves, of_rows, end_U, reverse=True).view(U.shape[1:])
        return own_U, fold(R, transitions, end_R, reverse=True)


DIAGONAL = Diagonal()
LOG_SUM_EXP = LogSumExp()

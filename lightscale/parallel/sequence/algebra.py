"""Effect of a segment of a row on the state that enters it: the algebra that all mixers and exchanges share.

A few tensors describe a segment: its summary. Summaries are combined, in order and in any grouping, so that any
exchange may gather, chain or nest them. They are then applied to a state. The backward pass needs two cotangents: of
the incoming state by the segment's own outputs (its reads), and of the outgoing state. Together they give the cotangent
of the incoming state by the transition of the segment: a decay of each channel, or a matrix (``Affine``).

Summaries, states and cotangents are tuples of tensors of one dtype, with rows (B) first and heads or channels second.
A document that begins inside a segment cuts it: no state passes. Such a state is replaced, not multiplied by zero, so
that an overflow elsewhere cannot arrive as NaN.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

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
        """Effect of the segment on ``state``: the remaining share of each channel, or the matrix that is applied."""

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

        This state enters segment ``end``: a suffix is folded from the last segment down to the one behind it.
        On GPUs as many launches for any N, but for ``Affine``. The same order on every rank gives the same bits.

        Args:
            segments: their summaries, stacked: (N, …) each.
            state: the state that enters the first one; ``empty`` when None.

        Returns:
            The state, and the transitions (N, …), which hold nothing else in memory.
        """

    @abstractmethod
    def combined(self, segments: Tensors) -> Tensors:
        """``combine`` of all of some segments, stacked as in ``fold``."""

    @abstractmethod
    def fold_back(
        self, transitions: Tensor, reads: Tensors, cotangent: Tensors | None = None, rank: int | None = None
    ) -> Tensors:
        """``adjoint`` of some segments, from the last to the first.

        Args:
            transitions: (N, …), of ``fold``.
            reads: (N, …), stacked in the same order.
            cotangent: of the state that leaves the last segment; zero when None.
            rank: give the cotangent of the state that leaves this segment; by default of the one that enters them all.
        """

    def directions(self, tensors: Tensors) -> list[tuple["Algebra", Tensors, bool]]:
        """A summary, or cotangents, by the directions in which states pass: to the right, or reversed to the left.

        Each with the algebra of the tensors that go from rank to rank.
        """
        return [(self, tensors, False)]


class Diagonal(Algebra):
    """S ↦ D ⊙ S + S_loc, 0 ≤ D ≤ 1, in one direction or in both.

    Summary (*S_loc, D), one S_loc for each direction, D broadcast to them; states and cotangents (*S,).

    Args:
        reverse: of each direction, whether the state that enters a segment comes from behind it: (False,) for a prefix,
            (True,) for a suffix, (False, True) for both, which share the decays.
    """

    def __init__(self, reverse: tuple[bool, ...] = (False,)) -> None:
        self.reverse = reverse

    def directions(self, tensors: Tensors) -> list[tuple[Algebra, Tensors, bool]]:
        # The decays of a summary; cotangents have none.
        shared = tensors[len(self.reverse) :]
        return [(Diagonal((r,)), (x, *shared), r) for x, r in zip(tensors, self.reverse, strict=False)]

    def identity(self, summary: Tensors) -> Tensors:
        *S, D = summary
        return *map(torch.zeros_like, S), torch.ones_like(D)

    def combine(self, earlier: Tensors, later: Tensors) -> Tensors:
        # The associative product of first-order recurrences (Blelloch, "Prefix sums and their applications", 1990).
        passed = [(earlier, later) if not reverse else (later, earlier) for reverse in self.reverse]
        S = (to[i] + decayed(to[-1], before[i]) for i, (before, to) in enumerate(passed))
        return *S, earlier[-1] * later[-1]

    def empty(self, summary: Tensors) -> Tensors:
        return tuple(torch.zeros_like(S) for S in summary[:-1])

    def apply(self, summary: Tensors, state: Tensors) -> Tensors:
        # combine calls it too. Exchanges group these sums differently, so their results differ by rounding.
        *local, D = summary
        return tuple(S + decayed(D, before) for S, before in zip(local, state, strict=True))

    def transition(self, summary: Tensors, state: Tensors) -> Tensor:
        # Whatever state enters: the map is linear in S, so that passing cotangents back takes D and no state.
        return summary[-1]

    def adjoint(self, transition: Tensor, reads: Tensors, cotangent: Tensors) -> Tensors:
        # The transposed map of ``apply``: a real diagonal is its own transpose.
        return self.apply((*reads, transition), cotangent)

    def fold(self, segments: Tensors, state: Tensors | None, end: int) -> tuple[Tensors, Tensor]:
        *S, D = segments
        entering = self._fold(S, D, state, end, end + 1, back=False)
        # Copied: a view would keep all that was gathered until the backward pass.
        return entering, D.clone()

    def combined(self, segments: Tensors) -> Tensors:
        *S, D = segments
        # Not `prod`: CUDA's is compiled when it is first called.
        return *self._fold(S, D, None, D.size(0), 0, back=False), D.cumprod(0)[-1]

    def fold_back(
        self, transitions: Tensor, reads: Tensors, cotangent: Tensors | None = None, rank: int | None = None
    ) -> Tensors:
        first, last = (0, transitions.size(0)) if rank is None else (rank + 1, rank)
        return self._fold(reads, transitions, cotangent, last, first, back=True)

    def _fold(
        self, S: Sequence[Tensor], D: Tensor, state: Tensors | None, end: int, begin: int, *, back: bool
    ) -> Tensors:
        """Each direction through its segments: the first ``end`` of them from left to right, or from right to left
        those from ``begin`` on. Cotangents go ``back``, against their direction."""
        found = []
        for number, (x, reverse) in enumerate(zip(S, self.reverse, strict=True)):
            to_the_left = reverse != back
            passed = slice(begin, None) if to_the_left else slice(end)
            found.append(fold(x[passed], D[passed], None if state is None else state[number], reverse=to_the_left))
        return tuple(found)


class Affine(Algebra):
    """S ↦ M S + S_loc with a matrix M (K, K) of each head (the delta rule).

    Summary (S_loc, M), states and cotangents (S,), (B, H, K, V). M is 0 where a document begins.
    """

    def identity(self, summary: Tensors) -> Tensors:
        S, M = summary
        return torch.zeros_like(S), torch.eye(M.size(-1), dtype=M.dtype, device=M.device).expand_as(M).clone()

    def combine(self, earlier: Tensors, later: Tensors) -> Tensors:
        S, M = later
        return S + _product(M, earlier[0]), _product(M, earlier[1])

    def empty(self, summary: Tensors) -> Tensors:
        return (torch.zeros_like(summary[0]),)

    def apply(self, summary: Tensors, state: Tensors) -> Tensors:
        S, M = summary
        return (S + _product(M, state[0]),)

    def transition(self, summary: Tensors, state: Tensors) -> Tensor:
        # Linear in S, so that the matrix is all that passing cotangents back takes.
        return summary[1]

    def adjoint(self, transition: Tensor, reads: Tensors, cotangent: Tensors) -> Tensors:
        return self.apply((*reads, transition.mT), cotangent)

    def fold(self, segments: Tensors, state: Tensors | None, end: int) -> tuple[Tensors, Tensor]:
        S, M = segments
        entering = torch.zeros_like(S[:0].sum(0)) if state is None else state[0]
        for number in range(end):
            (entering,) = self.apply((S[number], M[number]), (entering,))
        # Copied: a view would keep all that was gathered until the backward pass.
        return (entering,), M.clone()

    def combined(self, segments: Tensors) -> Tensors:
        S, M = segments
        found: Tensors = (S[0], M[0])
        for number in range(1, S.size(0)):
            found = self.combine(found, (S[number], M[number]))
        return found

    def fold_back(
        self, transitions: Tensor, reads: Tensors, cotangent: Tensors | None = None, rank: int | None = None
    ) -> Tensors:
        last = -1 if rank is None else rank
        found = torch.zeros_like(reads[0][:0].sum(0)) if cotangent is None else cotangent[0]
        for number in reversed(range(last + 1, transitions.size(0))):
            (found,) = self.adjoint(transitions[number], (reads[0][number],), (found,))
        return (found,)


def _product(M: Tensor, state: Tensor) -> Tensor:
    """M S, and 0 where M is: 0 · ∞ is NaN, and an overflow in one document would reach the next."""
    is_cut = (M == 0).flatten(-2).all(-1)[..., None, None]
    return (M @ state).masked_fill(is_cut, 0.0)


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

    def fold_back(
        self, transitions: Tensor, reads: Tensors, cotangent: Tensors | None = None, rank: int | None = None
    ) -> Tensors:
        behind = slice(0 if rank is None else rank + 1, None)
        transitions, (U, R) = transitions[behind], (x[behind] for x in reads)
        K = transitions.size(-1)
        # (N, B H, halves, K, V): both halves of LRPE share a channel's transition.
        halves, of_rows = U.unflatten(3, (-1, K)).flatten(1, 2), transitions.flatten(1, 2)[:, :, None, :, None]
        end_U, end_R = (None, None) if cotangent is None else cotangent
        end_U = None if end_U is None else end_U.unflatten(2, (-1, K)).flatten(0, 1)
        own_U = fold(halves, of_rows, end_U, reverse=True).view(U.shape[1:])
        return own_U, fold(R, transitions, end_R, reverse=True)


class WholeDocuments(Algebra):
    """States of documents whose tokens read the whole document: states from both sides are added to the segment's own.

    The last tensor of a summary is 0 where a document begins. Cotangents travel as sums. The tensors that a ring passes
    on have one direction.

    Args:
        reverse: of each direction, whether the state that enters a segment comes from behind it.
    """

    def __init__(self, reverse: tuple[bool, ...] = (False, True)) -> None:
        self.reverse, self._sums = reverse, Diagonal(reverse)

    def identity(self, summary: Tensors) -> Tensors:
        return *self.empty(summary), torch.ones_like(summary[-1])

    def adjoint(self, transition: Tensor, reads: Tensors, cotangent: Tensors) -> Tensors:
        return self._sums.adjoint(transition, reads, cotangent)

    def fold(self, segments: Tensors, state: Tensors | None, end: int) -> tuple[Tensors, Tensor]:
        ends = end, segments[-1].size(0) - 1 - end
        # Copied: a view would keep all that was gathered until the backward pass.
        return self._fold(segments, state, ends), self.transition((segments[-1].clone(),), ())

    def combined(self, segments: Tensors) -> Tensors:
        number = segments[-1].size(0)
        return *self._fold(segments, None, (number, number)), segments[-1].amin(0)

    def fold_back(
        self, transitions: Tensor, reads: Tensors, cotangent: Tensors | None = None, rank: int | None = None
    ) -> Tensors:
        return self._sums.fold_back(transitions, reads, cotangent, rank)

    @abstractmethod
    def _fold(self, segments: Tensors, state: Tensors | None, ends: tuple[int, int]) -> Tensors:
        """Each direction through its first segments, so many to the right, and to the left."""


class WholeLogSumExp(WholeDocuments):
    """Averages as those of ``LogSumExp``, of documents whose tokens read the whole document.

    States from both sides are merged with the segment's own. Cotangents travel as sums, because the weight of each
    token is relative to the whole document.

    Summary (z, S of each direction, through), states (z, S of each), cotangents (U of each), those of S.
    """

    def directions(self, tensors: Tensors) -> list[tuple[Algebra, Tensors, bool]]:
        number = len(self.reverse)
        # Cotangents are one tensor for each direction; of a summary the last one is shared.
        width = len(tensors) // number
        shared = tensors[width * number :]
        found = [(*tensors[width * i : width * (i + 1)], *shared) for i in range(number)]
        return [(WholeLogSumExp((r,)), part, r) for part, r in zip(found, self.reverse, strict=True)]

    def combine(self, earlier: Tensors, later: Tensors) -> Tensors:
        found: list[Tensor] = []
        for (z, S), (other_z, other_S), reverse in zip(_pairs(earlier), _pairs(later), self.reverse, strict=True):
            before, to, through = (z, S), (other_z, other_S), later[-1]
            if reverse:
                before, to, through = to, before, earlier[-1]
            found += LOG_SUM_EXP.apply((*to, through), before)
        return *found, earlier[-1] * later[-1]

    def empty(self, summary: Tensors) -> Tensors:
        return tuple(x for pair in _pairs(summary) for x in LOG_SUM_EXP.empty((*pair, summary[-1])))

    def apply(self, summary: Tensors, state: Tensors) -> Tensors:
        pairs = zip(_pairs(summary), _pairs(state), strict=True)
        return tuple(x for own, entering in pairs for x in LOG_SUM_EXP.apply((*own, summary[-1]), entering))

    def transition(self, summary: Tensors, state: Tensors) -> Tensor:
        # Of a document that goes on all is left: states and cotangents are of its whole sums.
        return summary[-1][..., None, None]

    def _fold(self, segments: Tensors, state: Tensors | None, ends: tuple[int, int]) -> Tensors:
        """Each direction through its first segments, so many to the right, and to the left."""
        entering = None if state is None else _pairs(state)
        through = segments[-1][..., 0]
        found: list[Tensor] = []
        for number, ((z, S), reverse) in enumerate(zip(_pairs(segments), self.reverse, strict=True)):
            # From the last segment on it is the same fold.
            ordered = [x.flip(0) if reverse else x for x in (z, S, through)]
            first = None if entering is None else LightNetState(*entering[number])
            found += fold_averages(LightNetState(*ordered[:2]), ordered[2], first, end=ends[reverse])[0]
        return tuple(found)


def _pairs(tensors: Tensors) -> list[tuple[Tensor, Tensor]]:
    """(z, S) of each direction, of a summary or a state."""
    return list(zip(tensors[::2], tensors[1::2], strict=False))


DIAGONAL = Diagonal()
SUFFIX = Diagonal((True,))
BOTH = Diagonal((False, True))
AFFINE = Affine()
LOG_SUM_EXP = LogSumExp()
WHOLE_LOG_SUM_EXP = WholeLogSumExp()

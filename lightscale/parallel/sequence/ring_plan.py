"""Which rank needs which block of keys, and the messages that bring it there: arithmetic that all ranks do alike.

A block is the keys and values of one rank's segment. At step s rank i computes with block i - s, modulo the ranks. It
gets the block from rank i - 1, which had it at the step before; or from the block's owner, where rank i - 1 had no use
for it. Gradients of a block follow it, from reader to reader, and from the last of a chain to the owner.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

_LEAST_GAIN = 0.1
"""Share of the pairs of the busiest rank that it must be spared, for queries to be worth a move."""


class HalfReads(NamedTuple):
    """What the queries of a half of a segment read, all rows together."""

    first: int
    """The first key."""
    end: int
    """The end of the keys."""
    pairs: int
    """Pairs of a query and a key; 0: nothing is read."""


class Messages(NamedTuple):
    """Of one rank at one step."""

    sources: tuple[int, ...]
    """Ranks it receives from, in order; there is at most one of a block."""
    held_to: int | None
    """The rank that gets what it has computed with at the step before."""
    own_to: int | None
    """The rank that gets its own block; of gradients None."""


def first_half(length: int) -> int:
    """Tokens of the first half of a segment."""
    return length - length // 2


@dataclass(frozen=True)
class RingPlan:
    """The ring of ranks that hold ``lengths`` tokens each.

    Where it spares the busiest rank a share of its pairs, pairs of ranks trade the second halves of their queries for
    the operator: the first rank with the last, the second with the last but one. A causal mask is balanced by that
    (the zig-zag of chunks r and 2 W - 1 - r, for queries alone). Keys, and all that is linear in the tokens, stay in
    contiguous segments.
    """

    lengths: tuple[int, ...]
    halves: tuple[tuple[HalfReads, HalfReads], ...]
    """Of each rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.lengths)

    def partner(self, rank: int) -> int:
        """The rank that queries are traded with."""
        return self.size - 1 - rank

    @cached_property
    def pairs(self) -> tuple[int, ...]:
        """Pairs of each rank if every rank keeps its queries."""
        return tuple(first.pairs + second.pairs for first, second in self.halves)

    @cached_property
    def traded_pairs(self) -> tuple[int, ...]:
        """Pairs of each rank if second halves are traded."""
        second = [self.halves[self.partner(rank)][1].pairs for rank in range(self.size)]
        return tuple(first.pairs + pairs for (first, _), pairs in zip(self.halves, second, strict=True))

    @cached_property
    def trades(self) -> bool:
        """Whether second halves are traded."""
        return max(self.traded_pairs) < (1 - _LEAST_GAIN) * max(self.pairs)

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """The first token of each rank, and the end."""
        return (0, *accumulate(self.lengths))

    @cached_property
    def readers(self) -> tuple[tuple[bool, ...], ...]:
        """``[rank][block]``: whether the rank's queries, after the trade, read the block."""
        return tuple(tuple(self._reads(rank, block) for block in range(self.size)) for rank in range(self.size))

    def _reads(self, rank: int, block: int) -> bool:
        start, end = self.edges[block : block + 2]
        second = self.halves[self.partner(rank) if self.trades else rank][1]
        return any(half.pairs and half.first < end and start < half.end for half in (self.halves[rank][0], second))

    def block(self, rank: int, step: int) -> int:
        """The block of ``rank`` at ``step``."""
        return (rank - step) % self.size

    def computes(self, rank: int, step: int) -> bool:
        """Whether ``rank`` computes with its block of ``step``."""
        return 0 <= step < self.size and self.readers[rank][self.block(rank, step)]

    def holds(self, rank: int, step: int) -> bool:
        """Whether ``rank`` has its block of ``step``: every rank its own."""
        return step == 0 or self.computes(rank, step)

    @cached_property
    def num_steps(self) -> int:
        """Steps until the last rank has computed with its last block."""
        steps = [step for step in range(self.size) for rank in range(self.size) if self.holds(rank, step)]
        return 1 + max(steps)

    def keys(self, rank: int, step: int) -> Messages:
        """Messages by which blocks arrive that are computed with at ``step`` ≥ 1."""
        before, behind = (rank - 1) % self.size, (rank + 1) % self.size
        sources: tuple[int, ...] = ()
        if self.computes(rank, step):
            sources = (before if self.holds(before, step - 1) else self.block(rank, step),)
        held_to = behind if self.holds(rank, step - 1) and self.computes(behind, step) else None
        # To a rank whose neighbour has not had it.
        far = (rank + step) % self.size
        own = step > 1 and self.computes(far, step) and not self.holds((far - 1) % self.size, step - 1)
        return Messages(sources, held_to, far if own else None)

    def gradients(self, rank: int, step: int) -> Messages:
        """Messages of gradients of the blocks of step ``step`` - 1, at step ``step`` ≥ 2.

        They go to the rank that computes with the block at ``step``, or to the owner. Of two sources the first brings
        what the rank adds to, and the second what returns to it as the owner.
        """
        before, behind = (rank - 1) % self.size, (rank + 1) % self.size
        sources = [before] * self.adds(rank, step) + [(rank + step - 1) % self.size] * self.returns(rank, step)
        held_to = None
        if self.computes(rank, step - 1):
            held_to = behind if self.computes(behind, step) else self.block(rank, step - 1)
        return Messages(tuple(sources), held_to, None)

    def adds(self, rank: int, step: int) -> bool:
        """Whether gradients of the block of ``step`` arrive, to which ``rank`` adds its own."""
        return step > 1 and self.computes(rank, step) and self.computes((rank - 1) % self.size, step - 1)

    def returns(self, rank: int, step: int) -> bool:
        """Whether gradients of the own block come back at ``step``: their last reader's neighbour does not read it."""
        last = (rank + step - 1) % self.size
        return last != rank and self.computes(last, step - 1) and not self.computes((last + 1) % self.size, step)

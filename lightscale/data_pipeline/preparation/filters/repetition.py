"""Share of repetition in a text: the most frequent n-gram, and repeated n-grams.

n-grams of units (words, or characters) are compared by 64-bit hashes of the units' ids; n goes up in one chain, each
step from the hashes of the one before. Sorting dominates the cost, so bounds come first: most texts pass after one sort
of the shortest n-grams of each of the two rules.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

_MULTIPLIER = np.uint64(0xD1342543DE82EF95)


class Ngrams:
    """The n-grams of a text, for growing n."""

    def __init__(self, ids: NDArray[np.uint64], characters: NDArray[np.int64] | None) -> None:
        """``ids``: (units,), equal for equal units. ``characters``: (units,) the length of each; none: 1 each."""
        self.num_units = len(ids)
        self.num_characters = len(ids) if characters is None else int(characters.sum())
        self._ids = ids
        self._lengths = characters
        self._ends: NDArray[np.int64] | None = None
        self.hashes = ids
        """(units - n + 1,)."""
        self.n = 1

    def grow(self, n: int) -> bool:
        """Go on to ``n``-grams; false where the text has not two of them."""
        while self.n < min(n, len(self._ids)):
            self.hashes = self.hashes[:-1] * _MULTIPLIER
            self.hashes += self._ids[self.n :]
            self.n += 1
        return len(self._ids) > n

    def equal_runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(units - n + 1,) indices of the n-grams, equal ones together; (different,) where each run of them begins."""
        order = np.argsort(self.hashes)
        ordered = self.hashes[order]
        return order, np.concatenate([[0], (ordered[1:] != ordered[:-1]).nonzero()[0] + 1])

    def characters(self, indices: NDArray[np.int64] | slice = slice(None)) -> NDArray[np.int64]:
        """(indices,) characters of the n-grams there; without ``indices``, of all."""
        if self._ends is None:
            lengths = np.ones(len(self._ids), dtype=np.int64) if self._lengths is None else self._lengths
            self._ends = np.concatenate([[0], np.cumsum(lengths)])
        return self._ends[self.n :][indices] - self._ends[: -self.n][indices]

    def longest(self) -> int:
        """Characters of the longest n-gram."""
        return self.n if self._lengths is None else int(self.characters().max())

    def characters_within(self, starts: NDArray[np.bool_]) -> int:
        """Characters of the units that the n-grams beginning at ``starts`` cover, each counted once."""
        changes = np.zeros(len(self._ids) + 1, dtype=np.int64)
        changes[: len(starts)] = starts
        changes[self.n : self.n + len(starts)] -= starts
        covered = changes[:-1].cumsum() > 0
        return int(np.count_nonzero(covered) if self._lengths is None else self._lengths[covered].sum())


def top_ngram_exceeds(ngrams: Ngrams, limits: Mapping[int, float]) -> bool:
    """Whether for some n the most frequent n-gram's occurrences hold more than ``limits[n]`` of the characters.

    Occurrences are counted also where they overlap; of equally frequent n-grams the longest counts; an n-gram that
    occurs once is no repetition.
    """
    most = 0
    for n, limit in sorted(limits.items()):
        if not ngrams.grow(n):
            return False
        allowed = limit * ngrams.num_characters
        # No n-gram is more frequent than the shorter ones within it.
        if most and most * ngrams.longest() <= allowed:
            continue
        order, starts = ngrams.equal_runs()
        if len(starts) == len(order):
            return False
        counts = np.append(starts[1:], len(order)) - starts
        most = int(counts.max())
        if most * int(ngrams.characters(order[starts[counts == most]]).max()) > allowed:
            return True
    return False


def repeated_ngrams_exceed(ngrams: Ngrams, limits: Mapping[int, float]) -> bool:
    """Whether for some n more than ``limits[n]`` of the characters are in n-grams that came before in the text.

    Characters in several such n-grams count once, and first occurrences do not count.
    """
    for n, limit in sorted(limits.items()):
        if not ngrams.grow(n):
            return False
        # A longer repeated n-gram is covered by repeated shorter ones: below the lowest limit nothing can follow.
        lowest = min(other for size, other in limits.items() if size >= n) * ngrams.num_characters
        order, starts = ngrams.equal_runs()
        if (len(order) - len(starts)) * ngrams.longest() <= lowest:
            return False
        repeated = np.ones(len(order), dtype=bool)
        repeated[np.minimum.reduceat(order, starts)] = False
        repeated_characters = ngrams.characters_within(repeated)
        if repeated_characters > limit * ngrams.num_characters:
            return True
        if repeated_characters <= lowest:
            return False
    return False


def top_ngram_share(ngrams: Ngrams, n: int, num_characters: int) -> float:
    """Of ``num_characters`` those of the most frequent n-gram with its spaces, all occurrences; of equals the first.

    0 for a text without an n-gram; an n-gram that occurs once counts too.
    """
    if ngrams.num_units < n:
        return 0.0
    ngrams.grow(n)
    order, starts = ngrams.equal_runs()
    counts = np.append(starts[1:], len(order)) - starts
    most = int(counts.max())
    first = int(np.minimum.reduceat(order, starts)[counts == most].min())
    return most * (int(ngrams.characters(slice(first, first + 1))[0]) + n - 1) / num_characters


def passed_ngrams_share(ngrams: Ngrams, n: int, num_characters: int, limit: float) -> float:
    """Of ``num_characters`` those of repeated n-grams, found going through the text; below ``limit`` an upper bound.

    A repeated n-gram counts, and the scan continues behind it; a new one is stored.
    """
    if ngrams.num_units <= n:
        return 0.0
    ngrams.grow(n)
    order, starts = ngrams.equal_runs()
    repeated = np.ones(len(order), dtype=bool)
    repeated[np.minimum.reduceat(order, starts)] = False
    # What is counted is repeated, each character once: most texts need no walk.
    bound = ngrams.characters_within(repeated)
    if bound <= limit * num_characters:
        return bound / num_characters
    hashes: list[int] = ngrams.hashes.tolist()
    lengths: list[int] = ngrams.characters().tolist()
    met: set[int] = set()
    place = characters = 0
    while place < len(hashes):
        if hashes[place] in met:
            characters += lengths[place]
            place += n
        else:
            met.add(hashes[place])
            place += 1
    return characters / num_characters

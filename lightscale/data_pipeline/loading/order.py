"""Order of windows: a pure function of (seed, epoch, source, sample index).

The order needs neither a shuffle in memory nor a file: a source may have 10^8 windows, a run resumes at any sample, and
every rank must find the same order without communication. All parts therefore map any indices, without a history. They
take many indices at once, because that costs hardly more than one:

- ``Permutation`` gives the windows of a source another order in every epoch.
- ``Mixture`` maps a sample to its source, and to its index among the samples of that source.
- ``SampleOrder`` joins the two: sample index to source, epoch and window.
- ``PartOrder`` is the order while a curriculum reads windows in parts.

They use integers and BLAKE2b only, no floating point and no library's random generator. The order is the same on every
machine and in every version of numpy.
"""

import functools
import hashlib
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.splitmix import mixed
from lightscale.errors import UserError

# Four rounds already give a pseudorandom permutation (Luby and Rackoff 1988) for strong round functions; two more are
# cheap and make up for a fast one.
NUM_ROUNDS = 6
# Weights become multiples of 1 / 25,200 = 1 / (2^4 3^2 5^2 7): whole per cent, thirds, sevenths … are exact. Where
# that misses one by more than the tolerance, of a fortieth of it: that table takes a second to make, and 16 MB.
RESOLUTIONS = (25_200, 1_008_000)
WEIGHT_TOLERANCE = 1e-6
_HALF = np.uint64(32)


class Permutation:
    """A shuffle of 0 … n - 1 that maps any indices, in time and memory of these indices alone.

    A Feistel network over pairs (left, right) of digits in base b = ceil(sqrt(n)): each of 6 rounds maps
    (l, r) to (r, l + F(r) mod b), F being a 64-bit mix keyed by BLAKE2b of (seed, epoch, source). Every round
    can be undone, so the network permutes b² numbers. An image of n or more is sent through again until it
    falls below n (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), which
    keeps it a permutation of 0 … n - 1. As b² - n < 2b, that is rare.
    """

    def __init__(self, n: int, *, seed: int, epoch: int, source: str) -> None:
        if n < 1:
            raise ValueError(f"cannot permute {n} windows; use at least 1")
        self.n = n
        # ceil(sqrt(n)) in integers: a float's square root is off by one for large n.
        self._base = np.uint64(math.isqrt(n - 1) + 1)
        digest = hashlib.blake2b(f"{seed}/{epoch}/{source}".encode(), digest_size=8 * NUM_ROUNDS).digest()
        self._keys = list(np.frombuffer(digest, dtype="<u8").astype(np.uint64))

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """(k,) windows at (k,) ``indices`` of the shuffled order; all are 0 … n - 1."""
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.n:
            raise IndexError(f"indices {indices.min()} to {indices.max()} are not all in 0 … {self.n - 1}")
        images = self._network(indices.astype(np.uint64))
        # Cycle walking: an index and its image are on one cycle of the network, so following the cycle from two
        # different indices never ends in the same window, and it always comes back below n.
        while len(outside := np.flatnonzero(images >= self.n)):
            images[outside] = self._network(images[outside])
        return images.astype(np.int64)

    def _network(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        # right passes unchanged, so a round is undone by subtracting the same F(right): no round loses anything.
        left, right = np.divmod(numbers, self._base)
        for key in self._keys:
            # 32 bits of the mix, so that left + F fits into 64: wrapped around before "mod b" it could not be undone.
            left, right = right, (left + (mixed(right ^ key) >> _HALF)) % self._base
        return left * self._base + right


class Mixture:
    """Weighted mixing of K sources: for every i, each has given floor(w i) or ceil(w i) of the first i
    samples.

    Weights are rounded to w = p / P with whole p ≥ 1. The period P is about 25,200 samples, or 1,008,000 if the shorter
    one misses a share by more than 1e-6. Within a period the m-th sample of a source may not come before slot
    floor((m - 1) P / p) and must come before slot ceil(m P / p). Of the possible samples, the one with the earliest
    deadline comes first (ties: the earlier name). As the shares sum to one, no deadline is missed (Baruah et al.,
    "Proportionate progress", 1996), which gives the bound above. One period is a table, and all periods are equal: one
    division and one look-up find sample i.
    """

    def __init__(self, weights: Mapping[str, float], *, resolutions: Sequence[int] = RESOLUTIONS) -> None:
        """``weights``: source name to weight > 0, in any unit. Their order does not matter.

        ``resolutions``: lengths of a period, of which the first that is fine enough is taken, or the last.
        """
        if not weights:
            raise UserError("no source to read from; at least one is needed")
        for name, weight in weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise UserError(f"source {name}: the weight is {weight}; it must be a finite number above 0")
        self.names = tuple(sorted(weights))
        self.parts = _whole_parts([weights[name] for name in self.names], resolutions)
        self.period = sum(self.parts)
        self._source_at, self._rank_at = _one_period(tuple(self.parts))

    def __call__(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of (k,) ``samples`` ≥ 0: (k,) number in ``names`` of each one's source, (k,) samples that it gave before."""
        # A period has the same order always, so a sample's source is found without going through those before.
        periods, slots = np.divmod(samples, self.period)
        sources = self._source_at[slots]
        return sources, periods * np.array(self.parts)[sources] + self._rank_at[slots]

    def counts(self, num_samples: int) -> dict[str, int]:
        """Number of the first ``num_samples`` samples that come from each source."""
        periods, slots = divmod(num_samples, self.period)
        rest = np.bincount(self._source_at[:slots], minlength=len(self.names))
        return {name: periods * self.parts[k] + int(rest[k]) for k, name in enumerate(self.names)}


class Location(NamedTuple):
    """Where a sample comes from."""

    source: str
    epoch: int
    """How often the source was read through before."""
    window: int


class Locations(NamedTuple):
    """Where samples come from."""

    sources: NDArray[np.int64]
    """(k,): numbers in the names of the mixture."""
    epochs: NDArray[np.int64]
    """(k,)."""
    windows: NDArray[np.int64]
    """(k,)."""

    def each(self, names: Sequence[str]) -> list[Location]:
        """One by one, with the ``names`` of their sources."""
        columns = ([names[source] for source in self.sources.tolist()], self.epochs.tolist(), self.windows.tolist())
        return list(map(Location, *columns))


Order = Callable[[NDArray[np.int64]], Locations]
"""(k,) sample indices ≥ 0 to their windows."""


class SampleOrder:
    """Windows of several sources, mixed by weight; each source has its own order in every epoch."""

    def __init__(self, mixture: Mixture, num_windows: Mapping[str, int], *, seed: int) -> None:
        self._mixture = mixture
        self._num_windows = np.array([num_windows[name] for name in mixture.names])
        self._seed = seed
        # Two epochs of a source at a time, where one ends and the next begins. Cached, because keys cost a hash.
        self._shuffle = functools.lru_cache(maxsize=2 * len(num_windows))(self._permutation)

    def __call__(self, samples: NDArray[np.int64]) -> Locations:
        """See ``Order``."""
        sources, counts = self._mixture(samples)
        epochs, indices = np.divmod(counts, self._num_windows[sources])
        windows = np.empty_like(indices)
        for source, epoch in set(zip(sources.tolist(), epochs.tolist(), strict=True)):
            chosen = (sources == source) & (epochs == epoch)
            windows[chosen] = self._shuffle(source, epoch)(indices[chosen])
        return Locations(sources, epochs, windows)

    def _permutation(self, source: int, epoch: int) -> Permutation:
        name = self._mixture.names[source]
        return Permutation(int(self._num_windows[source]), seed=self._seed, epoch=epoch, source=name)


class PartOrder:
    """The windows ``first`` … ``first`` + ``num_windows`` - 1 of another order, cut into ``num_parts`` parts
    each and shuffled together: part p of window w becomes window w ``num_parts`` + p.

    A curriculum stage of short sequences therefore reads exactly the tokens that the same part of the run would read in
    long ones. No token comes twice before all have come once, and neighbours in the text do not meet in a batch.
    """

    def __init__(self, order: Order, *, first: int, num_windows: int, num_parts: int, seed: int) -> None:
        self._order = order
        self._first = first
        self._num_parts = num_parts
        # The name cannot be a source's: those begin with a letter or digit.
        self._shuffle = Permutation(num_windows * num_parts, seed=seed, epoch=0, source=f"/{first}/{num_parts}")

    def __call__(self, samples: NDArray[np.int64]) -> Locations:
        """See ``Order``; ``IndexError`` for a sample beyond the last part."""
        windows, parts = np.divmod(self._shuffle(samples), self._num_parts)
        whole = self._order(self._first + windows)
        return whole._replace(windows=whole.windows * self._num_parts + parts)


def _whole_parts(weights: list[float], resolutions: Sequence[int]) -> list[int]:
    """Whole parts in proportion to ``weights``, each at least 1, without a common divisor."""
    total = math.fsum(weights)
    parts: list[int] = []
    for resolution in resolutions:
        # At least one part: a source of tiny weight that rounded to nothing would never be read, without a word.
        parts = [max(1, round(weight / total * resolution)) for weight in weights]
        errors = (part / sum(parts) - weight / total for part, weight in zip(parts, weights, strict=True))
        if all(abs(error) <= WEIGHT_TOLERANCE for error in errors):
            break
    divisor = math.gcd(*parts)
    return [part // divisor for part in parts]


# Training and validation mix alike.
@functools.lru_cache(maxsize=2)
def _one_period(parts: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(P,) source of every slot of a period, and (P,) how many slots it had before in the period."""
    period = sum(parts)
    # Both heaps compare tuples, so that ties go to the lower number, that is the earlier name, on every machine.
    source_at = np.empty(period, dtype=np.int64)
    rank_at = np.empty(period, dtype=np.int64)
    waiting = [(0, source, 0) for source in range(len(parts))]  # (first slot allowed, source, rank): heaps
    ready: list[tuple[int, int, int]] = []  # (slot that must not pass, source, rank)
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            _, source, rank = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(rank + 1) * period // parts[source]), source, rank))
        deadline, source, rank = heapq.heappop(ready)
        assert slot < deadline, "earliest deadline first missed a deadline"
        source_at[slot], rank_at[slot] = source, rank
        if rank + 1 < parts[source]:
            heapq.heappush(waiting, ((rank + 1) * period // parts[source], source, rank + 1))
    return source_at, rank_at

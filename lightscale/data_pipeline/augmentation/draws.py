"""Random numbers by arithmetic: a function of a key, the same in every process, on every layout and after a resume."""

import math

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.splitmix import mixed

_GAMMA = np.uint64(0x9E37_79B9_7F4A_7C15)
# Most images take fewer.
_AT_ONCE = 32


class Draws:
    """The sequence of random numbers of ``key``, whole numbers from 0 on: SplitMix64, begun at a hash of them."""

    def __init__(self, *key: int) -> None:
        state = np.zeros(1, dtype=np.uint64)
        for part in key:
            state = mixed(state + np.uint64(part) + _GAMMA)
        self._state, self._drawn = state, 0
        self._ahead: list[float] = []

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """In [low, high)."""
        if not self._ahead:
            self._ahead = self._next(_AT_ONCE)[::-1].tolist()
        return low + (high - low) * self._ahead.pop()

    def below(self, count: int) -> int:
        """A whole number in [0, count)."""
        # Rounding must not reach the end.
        return min(int(self.uniform() * count), count - 1)

    def log_uniform(self, low: float, high: float) -> float:
        """In [low, high], as often in each factor."""
        return math.exp(self.uniform(math.log(low), math.log(high)))

    def beta(self, alpha: float) -> float:
        """Beta(alpha, alpha), by Jöhnk's rejection (1964), in logarithms: powers of small alpha underflow."""
        while True:
            # In (0, 1]: 0 has no logarithm.
            x, y = (math.log(1 - self.uniform()) / alpha for _ in range(2))
            total = max(x, y) + math.log1p(math.exp(-abs(x - y)))
            if total <= 0:
                return math.exp(x - total)

    def normal(self, *shape: int) -> NDArray[np.float64]:
        """Standard normal numbers of ``shape``, by Box and Muller (1958)."""
        count = math.prod(shape)
        radius, angle = self._next(2 * count).reshape(2, count)
        found = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)
        return found.reshape(shape)

    def _next(self, count: int) -> NDArray[np.float64]:
        steps = np.arange(self._drawn + 1, self._drawn + count + 1, dtype=np.uint64)
        self._drawn += count
        bits: NDArray[np.uint64] = mixed(self._state + steps * _GAMMA) >> np.uint64(11)
        return bits.astype(np.float64) * 2.0**-53

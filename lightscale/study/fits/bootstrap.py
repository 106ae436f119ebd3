"""Bootstrap intervals of fitted values: fits to samples of the runs, drawn with replacement."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
DRAWS = 1000
LEAST_SHARE = 0.5
"""Least share of draws with a fit; below it there are no intervals."""


@dataclass(frozen=True, kw_only=True)
class FittedNumber:
    """A fitted number and its 95 % interval."""

    value: float
    low: float
    """NaN, like `high`, if too few draws gave a fit."""
    high: float

    def covers(self, value: float) -> bool:
        """Whether the interval contains `value`."""
        return self.low <= value <= self.high

    def to_json(self) -> dict[str, float | None]:
        """Entry for reports; the ends of a missing interval are null."""
        low, high = (None if np.isnan(end) else end for end in (self.low, self.high))
        return {"value": self.value, "low": low, "high": high}


def clusters(labels: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Indices (n',) of a draw: as many labels as there are, with replacement, each with all its points."""
    different = np.unique(labels)
    members = [np.flatnonzero(labels == label) for label in different]
    return np.concatenate([members[choice] for choice in rng.integers(len(different), size=len(different))])


def intervals(
    values: dict[str, float],
    draw: Callable[[np.random.Generator], dict[str, float] | None],
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> dict[str, FittedNumber]:
    """`values` with the percentiles of the results of `draw`, which returns None for a draw without a fit."""
    fitted = list(_fits(draw, draws, seed))
    edge = 100 * (1 - LEVEL) / 2
    estimates = {}
    for name, value in values.items():
        low = high = float("nan")
        if len(fitted) >= max(LEAST_SHARE * draws, 2):
            low, high = np.percentile([one[name] for one in fitted], [edge, 100 - edge]).tolist()
        estimates[name] = FittedNumber(value=value, low=low, high=high)
    return estimates


def _fits(
    draw: Callable[[np.random.Generator], dict[str, float] | None], draws: int, seed: int
) -> Iterator[dict[str, float]]:
    rng = np.random.default_rng(seed)
    for _ in range(draws):
        if (found := draw(rng)) is not None and all(map(np.isfinite, found.values())):
            yield found

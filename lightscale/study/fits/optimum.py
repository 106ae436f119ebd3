"""The value with the least loss, such as a learning rate, by a parabola over its logarithm, with an interval.

The losses of a value are those of its seeds. Each seed has a level of its own and all share the parabola: an amount
that a seed adds to all of its losses moves no lowest point. The interval is Fieller's (J. R. Stat. Soc. B 16, 1954,
175-185) for the ratio -b / 2a of two coefficients with normal errors, by the residuals of the fit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as students_t

NEAR = 2
"""Values on either side of the best one that the parabola is fitted to, at least."""
FACTOR = 4.0
"""It is fitted to all values within this factor of the best one too: further away a loss is no parabola."""
_LEAST_VALUES = 3
_SHARE = 0.95


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The lowest point."""

    value: float
    loss: float
    """Of the parabola, the mean over seeds."""
    interval: tuple[float, float] | None
    """95 % of the value; None: no residual is left, or the curvature may be 0."""
    values: tuple[float, ...]
    """The values that the parabola is fitted to, ascending."""
    curvature: float
    """Coefficient of the squared logarithm, nats."""

    def text(self) -> str:
        """For tables."""
        around = "" if self.interval is None else " ({:.3g} to {:.3g})".format(*self.interval)
        return f"{self.value:.3g}{around}"

    def at(self, value: NDArray[np.float64]) -> NDArray[np.float64]:
        """Losses of the parabola at `value`."""
        return self.loss + self.curvature * np.log(value / self.value) ** 2


def optimum(losses: Mapping[float, Sequence[float]]) -> Optimum | str:
    """The lowest point of a parabola of loss over log value, through the values around the best one; a text: why none.

    Args:
        losses: of each value those of all seeds, in one order. A value with one that is not finite does not count.
    """
    values = sorted(value for value in losses if value > 0 and all(map(math.isfinite, losses[value])))
    if len(values) < _LEAST_VALUES:
        return f"a parabola needs the losses of {_LEAST_VALUES} values; there are {len(values)}"
    means = [math.fsum(losses[value]) / len(losses[value]) for value in values]
    best = means.index(min(means))
    if best in (0, len(values) - 1):
        side = "least" if best == 0 else "greatest"
        return f"the best value, {values[best]:.3g}, is the {side} one; add values beyond it"
    near = [
        place
        for place, value in enumerate(values)
        if abs(place - best) <= NEAR or 1 / FACTOR <= value / values[best] <= FACTOR
    ]
    centre = math.log(values[best])
    seeds = len(losses[values[best]])
    x = np.repeat([math.log(values[place]) - centre for place in near], seeds)
    y = np.array([loss for place in near for loss in losses[values[place]]])
    levels = np.tile(np.eye(seeds), (len(near), 1))
    matrix = np.column_stack([x**2, x, levels])
    constants = np.linalg.lstsq(matrix, y, rcond=None)[0]
    curve, slope, level = float(constants[0]), float(constants[1]), float(constants[2:].mean())
    if curve <= 0:
        return f"the losses around the best value, {values[best]:.3g}, do not rise on both sides: no positive curvature"
    place_x = -slope / (2 * curve)
    if not x[0] <= place_x <= x[-1]:
        return f"the lowest point, {math.exp(centre + place_x):.3g}, is outside the values of the fit; add values there"
    interval = _interval(matrix, y, constants)
    return Optimum(
        value=math.exp(centre + place_x),
        loss=level + slope * place_x + curve * place_x**2,
        interval=None if interval is None else (math.exp(centre + interval[0]), math.exp(centre + interval[1])),
        values=tuple(values[place] for place in near),
        curvature=curve,
    )


def _interval(
    matrix: NDArray[np.float64], y: NDArray[np.float64], constants: NDArray[np.float64]
) -> tuple[float, float] | None:
    """All x whose derivative b + 2 a x may be 0, within Student's quantile of its error; None: they have no ends."""
    freedom = len(y) - matrix.shape[1]
    if freedom < 1:
        return None
    variance = float(np.square(y - matrix @ constants).sum()) / freedom
    errors = np.linalg.inv(matrix.T @ matrix)[:2, :2] * variance * float(students_t.ppf((1 + _SHARE) / 2, freedom)) ** 2
    curve, slope = float(constants[0]), float(constants[1])
    # (b + 2 a x)² <= t² (var b + 4 x cov + 4 x² var a), a quadratic inequality in x.
    second = 4 * (curve**2 - errors[0, 0])
    first = 4 * (curve * slope - errors[0, 1])
    if second <= 0:
        return None
    root = math.sqrt(max(0.0, first**2 - 4 * second * (slope**2 - errors[1, 1])))
    # Wider than all numbers where the parabola is as good as flat.
    low, high = (-first - root) / (2 * second), (-first + root) / (2 * second)
    return max(low, -300.0), min(high, 300.0)

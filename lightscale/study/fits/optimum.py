"""The value with the least loss, such as a learning rate, by a parabola over its logarithm, with an interval."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as students_t

NEAR = 2
"""Values on either side of the best one that the parabola is fitted to: further away a loss is none."""
_PARAMETERS = 3
_SHARE = 0.95


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The lowest point."""

    value: float
    loss: float
    interval: tuple[float, float] | None
    """95 % of the value, by the residuals of the fit; None: as few losses as the parabola has constants."""

    def text(self) -> str:
        """For tables."""
        around = "" if self.interval is None else " ({:.3g} to {:.3g})".format(*self.interval)
        return f"{self.value:.3g}{around}"


def optimum(losses: Mapping[float, float]) -> Optimum | None:
    """The lowest point of the parabola of loss over log value, through the values around the best one.

    None where the best value is the first or last one, or the parabola opens downwards: the lowest point is elsewhere.
    """
    values = sorted(value for value in losses if value > 0 and math.isfinite(losses[value]))
    if len(values) < _PARAMETERS:
        return None
    best = min(range(len(values)), key=lambda place: losses[values[place]])
    if best in (0, len(values) - 1):
        return None
    near = values[max(0, best - NEAR) : best + NEAR + 1]
    centre = math.log(values[best])
    x = np.array([math.log(value) - centre for value in near])
    y = np.array([losses[value] for value in near])
    matrix = np.stack([x**2, x, np.ones_like(x)], axis=1)
    curve, slope, level = constants = np.linalg.lstsq(matrix, y, rcond=None)[0]
    if curve <= 0:
        return None
    place = -slope / (2 * curve)
    if not x[0] <= place <= x[-1]:
        return None
    return Optimum(
        value=math.exp(centre + place),
        loss=float(level + slope * place + curve * place**2),
        interval=_interval(matrix, y, constants, centre),
    )


def _interval(
    matrix: NDArray[np.float64], y: NDArray[np.float64], constants: NDArray[np.float64], centre: float
) -> tuple[float, float] | None:
    """By the error of -b / 2a to first order, with Student's quantile for the losses beyond three."""
    freedom = len(y) - _PARAMETERS
    if freedom < 1:
        return None
    curve, slope, _ = constants
    variance = float(np.square(y - matrix @ constants).sum()) / freedom
    slopes = np.array([slope / (2 * curve**2), -1 / (2 * curve), 0.0])
    error = math.sqrt(float(slopes @ np.linalg.inv(matrix.T @ matrix) @ slopes) * variance)
    half = float(students_t.ppf((1 + _SHARE) / 2, freedom)) * error
    place = centre - slope / (2 * curve)
    # Wider than all numbers where the parabola is as good as flat.
    return math.exp(max(place - half, -700.0)), math.exp(min(place + half, 700.0))

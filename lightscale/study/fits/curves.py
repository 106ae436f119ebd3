"""Data for fits of laws: the loss of runs by parameters N, tokens D and compute C.

N excludes embeddings, C is in PFLOP-days (8.64e19 FLOPs), losses are in nats per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightscale.errors import UserError

PFLOP_DAY = 8.64e19
"""FLOPs of one PFLOP-day: 1e15 FLOP/s for 86,400 seconds."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The loss of one run during training; a run with a known end alone has one point."""

    name: str
    parameters: float
    """N."""
    tokens: NDArray[np.float64]
    """D: (k,), ascending."""
    compute: NDArray[np.float64]
    """C: (k,), ascending."""
    loss: NDArray[np.float64]
    """(k,), smoothed."""

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.compute.shape == self.loss.shape, "one token count and compute for each loss"
        assert len(self.loss), "a curve has a point"

    def loss_at(self, compute: NDArray[np.float64]) -> NDArray[np.float64]:
        """Loss at `compute`, interpolated in logarithms; NaN outside its range."""
        logs = np.interp(
            np.log(compute), np.log(self.compute), np.log(self.loss), left=float("nan"), right=float("nan")
        )
        return np.exp(logs)

    def tokens_at(self, compute: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens at `compute`; NaN outside its range."""
        logs = np.interp(
            np.log(compute), np.log(self.compute), np.log(self.tokens), left=float("nan"), right=float("nan")
        )
        return np.exp(logs)


@dataclass(frozen=True, kw_only=True)
class Points:
    """Points of runs as columns."""

    parameters: NDArray[np.float64]
    """N: (n,)."""
    tokens: NDArray[np.float64]
    """D: (n,)."""
    loss: NDArray[np.float64]
    """(n,)."""
    runs: NDArray[np.int64]
    """(n,): index of each point's run; a bootstrap draws the points of a run together."""

    def __len__(self) -> int:
        return len(self.loss)

    def take(self, indices: NDArray[np.int64]) -> "Points":
        """The points at `indices`."""
        return Points(
            parameters=self.parameters[indices],
            tokens=self.tokens[indices],
            loss=self.loss[indices],
            runs=self.runs[indices],
        )


def thinned(curves: Sequence[Curve], *, per_curve: int, skip: float = 0.0) -> Points:
    """At most `per_curve` points of each curve, evenly spaced in log D, without the first share `skip` of tokens.

    With a constant learning rate, every point of a curve is the end of a shorter run. Neighbours are nearly equal, so
    that few points are enough; the first ones belong to the warm-up.
    """
    parameters, tokens, losses, runs = [], [], [], []
    for number, curve in enumerate(curves):
        first = int(np.searchsorted(curve.tokens, skip * curve.tokens[-1]))
        wanted = np.geomspace(curve.tokens[first], curve.tokens[-1], num=per_curve)
        chosen = np.unique(np.searchsorted(curve.tokens, wanted * (1 - 1e-12)))
        parameters.append(np.full(len(chosen), curve.parameters))
        tokens.append(curve.tokens[chosen])
        losses.append(curve.loss[chosen])
        runs.append(np.full(len(chosen), number))
    return Points(
        parameters=np.concatenate(parameters),
        tokens=np.concatenate(tokens),
        loss=np.concatenate(losses),
        runs=np.concatenate(runs),
    )


def sizes_of(curves: Sequence[Curve]) -> list[float]:
    """The different N, ascending."""
    return sorted({curve.parameters for curve in curves})


def require_sizes(curves: Sequence[Curve], least: int, what: str) -> None:
    """Raise `UserError` if the curves have fewer than `least` sizes of models."""
    if len(sizes := sizes_of(curves)) < least:
        found = ", ".join(f"{size:,.0f}" for size in sizes) or "none"
        raise UserError(f"{what} needs runs of at least {least} sizes; there are {len(sizes)} (N = {found}): add sizes")

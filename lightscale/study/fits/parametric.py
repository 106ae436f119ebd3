"""L(N, D) = E + A / N^α + B / D^β: Hoffmann et al., "Training Compute-Optimal Large Language Models", approach 3.

It minimises the Huber loss of log L, as in the paper. The search starts on a grid of exponents; for each, E, A and B
solve a linear problem. Least squares continue from the best, so that no start is far from a minimum.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from lightscale.errors import UserError
from lightscale.study.fits import bootstrap
from lightscale.study.fits.bootstrap import FittedNumber
from lightscale.study.fits.curves import Points

HUBER_DELTA = 1e-3
CONSTANTS = ("E", "A", "B", "alpha", "beta")
_EXPONENTS = np.linspace(0.05, 1.5, 12)
_STARTS = 6
_LEAST_DIFFERENT = 3
_LEAST_POINTS = 8
# Bounds of (log E, log A, log B, α, β) with A and B at the middle of the points: a constant that the points do not show
# goes to its bound instead of minus infinity.
_LOW, _HIGH = (-20.0, -20.0, -20.0, 1e-3, 1e-3), (5.0, 10.0, 10.0, 5.0, 5.0)


@dataclass(frozen=True, kw_only=True)
class LossSurface:
    """The five constants of the surface."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def __call__(self, parameters: NDArray[np.float64], tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """L at N and D."""
        return np.asarray(self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta)

    def constants(self) -> dict[str, float]:
        """By name."""
        return {name: getattr(self, name) for name in CONSTANTS}

    def optimal_exponents(self) -> tuple[float, float]:
        """(a, b) of N_opt ∝ C^a and D_opt ∝ C^b for C ∝ N·D: β/(α + β) and α/(α + β)."""
        total = self.alpha + self.beta
        return self.beta / total, self.alpha / total


@dataclass(frozen=True, kw_only=True)
class SurfaceEstimate:
    """The surface with intervals and residual."""

    surface: LossSurface
    constants: dict[str, FittedNumber]
    """E, A, B, alpha, beta; and a and b, the exponents of N_opt and D_opt."""
    residual: float
    """RMS of log L minus its fit."""
    num_points: int
    num_runs: int

    def to_json(self) -> dict[str, Any]:
        """Entry for reports: each constant with its interval, and the residual."""
        return {
            **{name: constant.to_json() for name, constant in self.constants.items()},
            "residual": self.residual,
            "num_points": self.num_points,
            "num_runs": self.num_runs,
        }


def fit_surface(points: Points) -> LossSurface:
    """Fit at least eight points with three different N and D each; raises `UserError` with the missing ones."""
    _require(points)
    best = min((_descend(points, start) for start in _starts(points)), key=lambda found: found[0])
    return best[1]


def estimate_surface(points: Points, *, draws: int = bootstrap.DRAWS, seed: int = 0) -> SurfaceEstimate:
    """`fit_surface` with intervals: the bootstrap draws whole runs, since errors within a run are correlated."""
    surface = fit_surface(points)
    a, b = surface.optimal_exponents()

    def draw(rng: np.random.Generator) -> dict[str, float] | None:
        sample = points.take(bootstrap.clusters(points.runs, rng))
        if _missing(sample) is not None:
            return None
        # From what all points gave: a draw's minimum is near it, and where it is not, the nearest says what it must.
        _, found = _descend(sample, _start_of(surface, sample))
        found_a, found_b = found.optimal_exponents()
        return {**found.constants(), "a": found_a, "b": found_b}

    logs = np.log(points.loss) - np.log(surface(points.parameters, points.tokens))
    return SurfaceEstimate(
        surface=surface,
        constants=bootstrap.intervals({**surface.constants(), "a": a, "b": b}, draw, draws=draws, seed=seed),
        residual=float(np.sqrt((logs**2).mean())),
        num_points=len(points),
        num_runs=len(np.unique(points.runs)),
    )


def _missing(points: Points) -> str | None:
    for name, values in (("N", points.parameters), ("D", points.tokens)):
        if (found := len(np.unique(values))) < _LEAST_DIFFERENT:
            return f"{_LEAST_DIFFERENT} different {name}, and there are {found}"
    if len(points) < _LEAST_POINTS:
        return f"{_LEAST_POINTS} points, and there are {len(points)}"
    return None


def _require(points: Points) -> None:
    if missing := _missing(points):
        raise UserError(f"E + A/N^α + B/D^β has five constants and needs {missing}")


def _centres(points: Points) -> tuple[float, float]:
    return float(np.log(points.parameters).mean()), float(np.log(points.tokens).mean())


def _starts(points: Points) -> list[NDArray[np.float64]]:
    """The best of a grid of exponents, each with the E, A, B ≥ 0 that minimise the relative error."""
    n, d = (np.log(values) - centre for values, centre in zip(_inputs(points), _centres(points), strict=True))
    scored = []
    for alpha in _EXPONENTS:
        for beta in _EXPONENTS:
            terms = np.stack([np.ones_like(n), np.exp(-alpha * n), np.exp(-beta * d)], axis=1)
            solution, error = nnls(terms / points.loss[:, None], np.ones_like(n))
            logs = np.log(np.maximum(solution, np.exp(_LOW[:3])))
            scored.append((error, np.array([*logs, alpha, beta])))
    scored.sort(key=lambda one: one[0])
    return [start for _, start in scored[:_STARTS]]


def _inputs(points: Points) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return points.parameters, points.tokens


def _start_of(surface: LossSurface, points: Points) -> NDArray[np.float64]:
    n, d = _centres(points)
    logs = np.log([surface.E, surface.A, surface.B]) - np.array([0.0, surface.alpha * n, surface.beta * d])
    return np.array([*logs, surface.alpha, surface.beta])


def _descend(points: Points, start: NDArray[np.float64]) -> tuple[float, LossSurface]:
    """(the Huber loss, the surface) of the minimum that is reached from `start`."""
    centre_n, centre_d = _centres(points)
    n, d, log_loss = np.log(points.parameters) - centre_n, np.log(points.tokens) - centre_d, np.log(points.loss)

    def terms(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        log_e, log_a, log_b, alpha, beta = theta
        return np.stack([np.full_like(n, log_e), log_a - alpha * n, log_b - beta * d])

    def residuals(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.logaddexp.reduce(terms(theta), axis=0) - log_loss)

    def jacobian(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        logs = terms(theta)
        shares = np.exp(logs - np.logaddexp.reduce(logs, axis=0))
        return np.stack([*shares, -n * shares[1], -d * shares[2]], axis=1)

    low, high = np.array(_LOW), np.array(_HIGH)
    found = least_squares(
        residuals,
        np.clip(start, low + 1e-9, high - 1e-9),
        jacobian,
        bounds=(low, high),
        loss="huber",
        f_scale=HUBER_DELTA,
        x_scale="jac",
        xtol=1e-10,
        ftol=1e-10,
        gtol=1e-12,
        max_nfev=2000,
    )
    log_e, log_a, log_b, alpha, beta = found.x.tolist()
    surface = LossSurface(
        E=float(np.exp(log_e)),
        A=float(np.exp(log_a + alpha * centre_n)),
        B=float(np.exp(log_b + beta * centre_d)),
        alpha=alpha,
        beta=beta,
    )
    return float(found.cost), surface

"""The compute-optimal frontier, from any method, and its three laws: L(C), N_opt(C), D_opt(C)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightscale.errors import UserError
from lightscale.study.fits import bootstrap
from lightscale.study.fits.curves import Curve, sizes_of
from lightscale.study.fits.power_law import PowerLaw, PowerLawEstimate, fit_power_law

LAWS = ("loss", "parameters", "tokens")
_LEAST_POINTS = 2


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Arrays (n,): the least loss at each compute, and its N and D; compute ascends."""

    compute: NDArray[np.float64]
    loss: NDArray[np.float64]
    parameters: NDArray[np.float64]
    tokens: NDArray[np.float64]

    def within(self, low: float, high: float) -> "Frontier":
        """The part from `low` to `high` PFLOP-days."""
        return self.where((self.compute >= low) & (self.compute <= high))

    def where(self, kept: NDArray[np.bool_]) -> "Frontier":
        """The points selected by `kept`."""
        return Frontier(
            compute=self.compute[kept],
            loss=self.loss[kept],
            parameters=self.parameters[kept],
            tokens=self.tokens[kept],
        )

    def has_laws(self) -> bool:
        """Whether two points differ in compute."""
        return len(self.compute) >= _LEAST_POINTS and self.compute[0] < self.compute[-1]

    def laws(self) -> dict[str, PowerLaw]:
        """Power laws by the names in `LAWS`."""
        return {name: fit_power_law(self.compute, getattr(self, name)) for name in LAWS}


@dataclass(frozen=True, kw_only=True)
class FrontierEstimate:
    """The laws of a frontier, with intervals."""

    frontier: Frontier
    laws: dict[str, PowerLawEstimate]
    window: tuple[float, float]
    """PFLOP-days of the first and last point."""
    utilisation_exponent: float
    """c of C/(N·D) ∝ C^c along it; 0 where C is 6·N·D."""
    num_runs: int

    @property
    def identity_residual(self) -> float:
        """a + b + c - 1 of N_opt ∝ C^a and D_opt ∝ C^b.

        C is the product of N, D and C/(N·D), all fitted at the same compute, so that any value but 0 shows a mistake.
        """
        a, b = self.laws["parameters"].exponent.value, self.laws["tokens"].exponent.value
        return a + b + self.utilisation_exponent - 1

    def to_json(self) -> dict[str, object]:
        """Entry for reports: the laws and their data."""
        return {
            **{name: law.to_json() for name, law in self.laws.items()},
            "window_pflop_days": list(self.window),
            "num_points": len(self.frontier.compute),
            "num_runs": self.num_runs,
            "utilisation_exponent": self.utilisation_exponent,
            "identity_residual": self.identity_residual,
        }


def estimate_laws(
    frontier: Frontier,
    curves: Sequence[Curve],
    again: Callable[[Sequence[Curve]], Frontier],
    *,
    draws: int,
    seed: int,
) -> FrontierEstimate:
    """Fit the laws of the `frontier` of `curves`; intervals come from `again` on bootstrap draws of the runs.

    A draw takes as many runs of each size as there are, with replacement, so that the intervals show the effect of
    the seeds. With one run per size that effect is unknown, and they are NaN. A draw counts if `again` raises no
    UserError.
    """

    def draw(rng: np.random.Generator) -> dict[str, float] | None:
        try:
            found = again(_drawn(curves, rng))
        except UserError:
            return None
        return _values(found.laws()) if found.has_laws() else None

    laws = frontier.laws()
    repeated = len(sizes_of(curves)) < len(curves)
    estimates = bootstrap.intervals(_values(laws), draw, draws=draws if repeated else 0, seed=seed)
    return FrontierEstimate(
        frontier=frontier,
        laws={
            name: PowerLawEstimate(
                coefficient=estimates[f"{name} coefficient"],
                exponent=estimates[f"{name} exponent"],
                residual=law.residual,
            )
            for name, law in laws.items()
        },
        window=(float(frontier.compute[0]), float(frontier.compute[-1])),
        utilisation_exponent=fit_power_law(
            frontier.compute, frontier.compute / (frontier.parameters * frontier.tokens)
        ).exponent,
        num_runs=len(curves),
    )


def _values(laws: dict[str, PowerLaw]) -> dict[str, float]:
    return {f"{name} {part}": getattr(law, part) for name, law in laws.items() for part in ("coefficient", "exponent")}


def _drawn(curves: Sequence[Curve], rng: np.random.Generator) -> list[Curve]:
    by_size = [[curve for curve in curves if curve.parameters == size] for size in sizes_of(curves)]
    return [same[choice] for same in by_size for choice in rng.integers(len(same), size=len(same))]

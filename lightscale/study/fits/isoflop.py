"""IsoFLOP parabolas: at fixed compute the loss over log N is nearly a parabola, with its minimum at N_opt.

Approach 2 of Hoffmann et al. A parabola is fitted to the sizes that reached a budget, interpolated along their curves.
It counts if its minimum lies between the sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightscale.errors import UserError
from lightscale.study.fits import bootstrap
from lightscale.study.fits.curves import Curve, require_sizes, sizes_of
from lightscale.study.fits.frontier import Frontier, FrontierEstimate, estimate_laws

NUM_BUDGETS = 12
_LEAST_SIZES = 4
_LEAST_BUDGETS = 3


@dataclass(frozen=True, kw_only=True)
class Parabola:
    """The losses at one budget and their parabola."""

    compute: float
    """PFLOP-days."""
    sizes: NDArray[np.float64]
    """(k,): N of the models that reached the budget."""
    losses: NDArray[np.float64]
    """(k,): mean loss of the runs of each size."""
    coefficients: tuple[float, float, float]
    """Coefficients of x², x and 1, with x = log N - `centre`."""
    centre: float
    parameters: float
    """N at the minimum."""
    tokens: float
    """D at the minimum, from the budget, interpolated between the sizes."""
    loss: float


@dataclass(frozen=True, kw_only=True)
class IsoflopEstimate:
    """The parabolas and the laws through their minima."""

    parabolas: list[Parabola]
    skipped: dict[float, str]
    """Budgets without a minimum, each with the reason."""
    laws: FrontierEstimate


def budgets_of(curves: Sequence[Curve], num_budgets: int = NUM_BUDGETS) -> NDArray[np.float64]:
    """Budgets evenly spaced in log C over the range that at least four sizes reached."""
    require_sizes(curves, _LEAST_SIZES, "a parabola at equal compute")
    sizes = sizes_of(curves)
    begins = sorted(min(curve.compute[0] for curve in curves if curve.parameters == size) for size in sizes)
    ends = sorted(max(curve.compute[-1] for curve in curves if curve.parameters == size) for size in sizes)
    low, high = begins[_LEAST_SIZES - 1], ends[-_LEAST_SIZES]
    if low >= high:
        raise UserError(
            f"no compute has data of {_LEAST_SIZES} sizes: the fourth begins at {low:.3g} PFLOP-days, after the end of "
            f"another at {high:.3g}; train the smaller models for longer"
        )
    return np.clip(np.geomspace(low, high, num=num_budgets), low, high)


def parabola_at(curves: Sequence[Curve], compute: float) -> Parabola | str:
    """The parabola at `compute`, or the reason for its absence."""
    sizes, losses, tokens = [], [], []
    for size in sizes_of(curves):
        same = [curve for curve in curves if curve.parameters == size]
        reached = [curve for curve in same if curve.compute[0] <= compute <= curve.compute[-1]]
        if reached:
            at = np.array([compute])
            sizes.append(size)
            losses.append(float(np.mean([curve.loss_at(at)[0] for curve in reached])))
            tokens.append(float(np.mean([curve.tokens_at(at)[0] for curve in reached])))
    if len(sizes) < _LEAST_SIZES:
        return f"{len(sizes)} sizes reached it; a parabola needs {_LEAST_SIZES}"
    logs = np.log(sizes)
    centre = float(logs.mean())
    second, first, zeroth = np.polyfit(logs - centre, losses, 2).tolist()
    if second <= 0:
        return "the losses over log N are not convex"
    lowest = -first / (2 * second) + centre
    if not logs[0] < lowest < logs[-1]:
        return f"its minimum is at N = {np.exp(lowest):,.0f}, outside {sizes[0]:,.0f} to {sizes[-1]:,.0f}"
    return Parabola(
        compute=compute,
        sizes=np.array(sizes),
        losses=np.array(losses),
        coefficients=(second, first, zeroth),
        centre=centre,
        parameters=float(np.exp(lowest)),
        tokens=float(np.exp(np.interp(lowest, logs, np.log(tokens)))),
        loss=zeroth - first**2 / (4 * second),
    )


def estimate_isoflop(curves: Sequence[Curve], *, draws: int = bootstrap.DRAWS, seed: int = 0) -> IsoflopEstimate:
    """Fit parabolas at twelve budgets and the laws through their minima, with intervals.

    Raises `UserError` if fewer than three budgets have a minimum, with the reason for each.
    """
    budgets = budgets_of(curves)
    found = {float(compute): parabola_at(curves, float(compute)) for compute in budgets}
    parabolas = [one for one in found.values() if isinstance(one, Parabola)]
    skipped = {compute: one for compute, one in found.items() if isinstance(one, str)}
    if len(parabolas) < _LEAST_BUDGETS:
        reasons = "\n".join(f"{compute:.3g} PFLOP-days: {reason}" for compute, reason in skipped.items())
        raise UserError(
            f"{len(parabolas)} of {len(budgets)} budgets have their best size between the trained sizes; "
            f"laws need {_LEAST_BUDGETS}. Add sizes, or train for longer:\n{reasons}"
        )
    computes = [one.compute for one in parabolas]

    def again(drawn: Sequence[Curve]) -> Frontier:
        found_again = (parabola_at(drawn, compute) for compute in computes)
        return _frontier([one for one in found_again if isinstance(one, Parabola)])

    laws = estimate_laws(_frontier(parabolas), curves, again, draws=draws, seed=seed)
    return IsoflopEstimate(parabolas=parabolas, skipped=skipped, laws=laws)


def _frontier(parabolas: Sequence[Parabola]) -> Frontier:
    return Frontier(
        compute=np.array([one.compute for one in parabolas]),
        loss=np.array([one.loss for one in parabolas]),
        parameters=np.array([one.parameters for one in parabolas]),
        tokens=np.array([one.tokens for one in parabolas]),
    )

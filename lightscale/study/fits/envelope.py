"""The envelope: the least loss of any run at each compute C, with its N and D; Figure 1 of arXiv 2406.16690.

The envelope of a few sizes is a staircase: one run owns it at each C. If the next smaller or larger model has no data
at that C, the owner is best only for lack of a rival: at both ends of the range, and where small models ended.
"""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from lightscale.errors import UserError
from lightscale.study.fits import bootstrap
from lightscale.study.fits.curves import Curve, require_sizes, sizes_of
from lightscale.study.fits.frontier import Frontier, FrontierEstimate, estimate_laws

NUM_BUDGETS = 1500
_LEAST_SIZES = 3
_LEAST_OWNERS = 2


def envelope(
    curves: Sequence[Curve],
    *,
    num_budgets: int = NUM_BUDGETS,
    bracketed: bool = True,
    without: Collection[float] = (),
) -> Frontier:
    """The envelope of `curves` of at least three sizes, at budgets evenly spaced in log C.

    `bracketed`: only where runs of the next smaller and the next larger size reached that compute and were worse.
    `without`: except where a model of one of these sizes is best. Raises `UserError` with the missing runs.
    """
    require_sizes(curves, _LEAST_SIZES, "an envelope")
    low, high = min(curve.compute[0] for curve in curves), max(curve.compute[-1] for curve in curves)
    # Rounding must not put the ends outside of the curves that they are of.
    budgets = np.clip(np.geomspace(low, high, num=num_budgets), low, high)
    losses = np.stack([curve.loss_at(budgets) for curve in curves])
    losses[np.isnan(losses)] = np.inf
    seen = np.isfinite(losses).any(axis=0)
    budgets, losses = budgets[seen], losses[:, seen]
    owners = losses.argmin(axis=0)
    tokens = np.stack([curve.tokens_at(budgets) for curve in curves])
    at = np.arange(len(budgets))
    found = Frontier(
        compute=budgets,
        loss=losses[owners, at],
        parameters=np.array([curve.parameters for curve in curves])[owners],
        tokens=tokens[owners, at],
    )
    kept = found.where(_is_bracketed(curves, found)) if bracketed else found
    kept = kept.where(~np.isin(kept.parameters, list(without)))
    if len(np.unique(kept.parameters)) < _LEAST_OWNERS:
        raise UserError(_not_crossing(curves, kept.parameters, bracketed=bracketed))
    return kept


def estimate_envelope(
    curves: Sequence[Curve],
    *,
    bracketed: bool = True,
    without: Collection[float] = (),
    window: tuple[float, float] | None = None,
    draws: int = bootstrap.DRAWS,
    seed: int = 0,
) -> FrontierEstimate:
    """Fit the laws of the envelope within `window` (PFLOP-days; default: all), with intervals."""
    whole = envelope(curves, bracketed=bracketed, without=without)
    low, high = window or (float(whole.compute[0]), float(whole.compute[-1]))
    fitted = whole.within(low, high)
    if not fitted.has_laws():
        raise UserError(
            f"fewer than two points of the envelope between {low:.3g} and {high:.3g} PFLOP-days; it reaches from "
            f"{whole.compute[0]:.3g} to {whole.compute[-1]:.3g}"
        )

    def again(drawn: Sequence[Curve]) -> Frontier:
        found = envelope(drawn, num_budgets=NUM_BUDGETS // 5, bracketed=bracketed, without=without)
        return found.within(low, high)

    return estimate_laws(fitted, curves, again, draws=draws, seed=seed)


def _is_bracketed(curves: Sequence[Curve], found: Frontier) -> NDArray[np.bool_]:
    sizes = sizes_of(curves)
    was_seen = np.stack(
        [
            np.any([~np.isnan(curve.loss_at(found.compute)) for curve in curves if curve.parameters == size], axis=0)
            for size in sizes
        ]
    )
    owners = np.searchsorted(sizes, found.parameters)
    at = np.arange(len(owners))
    is_between = (owners > 0) & (owners < len(sizes) - 1)
    below, above = np.maximum(owners - 1, 0), np.minimum(owners + 1, len(sizes) - 1)
    return np.asarray(is_between & was_seen[below, at] & was_seen[above, at])


def _not_crossing(curves: Sequence[Curve], owners: NDArray[np.float64], *, bracketed: bool) -> str:
    owned = ", ".join(f"{size:,.0f}" for size in np.unique(owners)) or "none"
    lines = []
    for size in sizes_of(curves):
        same = [curve for curve in curves if curve.parameters == size]
        low, high = min(curve.compute[0] for curve in same), max(curve.compute[-1] for curve in same)
        lines.append(f"N = {size:,.0f}: {low:.3g} to {high:.3g} PFLOP-days")
    between = " between a smaller and a larger one with data at the same compute" if bracketed else ""
    return "\n".join(
        [
            f"the curves do not cross enough: an envelope needs two sizes that are best somewhere{between}; "
            f"found N = {owned}. Train the smaller models for longer, or add sizes. Data so far:",
            *lines,
        ]
    )

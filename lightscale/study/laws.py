"""The laws of a study: for each architecture and each count of C, the result of every method or its refusal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lightscale.errors import UserError
from lightscale.study.cells import Cell
from lightscale.study.fits.curves import PFLOP_DAY, Curve, sizes_of, thinned
from lightscale.study.fits.envelope import estimate_envelope
from lightscale.study.fits.frontier import FrontierEstimate
from lightscale.study.fits.isoflop import IsoflopEstimate, estimate_isoflop
from lightscale.study.fits.parametric import SurfaceEstimate, estimate_surface
from lightscale.study.history import RunCurve
from lightscale.study.study import Study

Counting = Literal["ours", "paper"]
COUNTINGS: dict[Counting, str] = {
    "ours": "C: all matrix products of training, including logits; N: all parameters without the embedding",
    "paper": "C and N by the formulas of arXiv 2406.16690: no logits, no norms",
}
BETWEEN = "between"
WINDOWS = {
    BETWEEN: "where the next smaller and the next larger model have data",
    "all": "the complete envelope",
    "without smallest": "except where the smallest model is best",
    "without largest": "except where the largest model is best",
    "without both": "except where the smallest or the largest model is best",
    "lower half": "the lower half of log C of `between`",
    "upper half": "the upper half of log C of `between`",
}
_POINTS_PER_CURVE = 20
_LEAST_RANGE = 1.5
"""Least ratio of largest to smallest N of one architecture; below it, other differences look like those of size."""


@dataclass(frozen=True, kw_only=True)
class ArchitectureLaws:
    """The laws of one architecture; a text in place of a law gives the reason for its absence."""

    architecture: str
    counting: Counting
    curves: list[Curve]
    windows: dict[str, FrontierEstimate | str]
    """Laws of the envelope, by the names in `WINDOWS`."""
    isoflop: IsoflopEstimate | str
    surface: SurfaceEstimate | str

    @property
    def frontier(self) -> FrontierEstimate | None:
        """The law of the envelope: within `between`, or else of the complete envelope."""
        found = (self.windows[name] for name in (BETWEEN, "all"))
        return next((one for one in found if isinstance(one, FrontierEstimate)), None)

    @property
    def has_any(self) -> bool:
        """Whether any law was fitted."""
        every = (*self.windows.values(), self.isoflop, self.surface)
        return not all(isinstance(one, str) for one in every)

    def to_json(self) -> dict[str, Any]:
        """The entry for fit.json; a missing law is {"refused": reason}."""
        isoflop = self.isoflop if isinstance(self.isoflop, str) else self.isoflop.laws
        return {
            "architecture": self.architecture,
            "counting": self.counting,
            "num_runs": len(self.curves),
            "sizes": sizes_of(self.curves),
            "envelope": {name: _json(one) for name, one in self.windows.items()},
            "isoflop": _json(isoflop),
            "surface": _json(self.surface),
        }


def study_laws(study: Study, curves: dict[str, RunCurve], *, draws: int, seed: int) -> list[ArchitectureLaws]:
    """Fit the laws of all architectures of the study's cells in `curves`, without the sweep's cells.

    Raises UserError if the cells learn several tasks: their losses are not comparable.
    """
    cells = [cell for cell in study.cells() if cell.part == "main" and cell.name in curves]
    tasks = dict.fromkeys(cell.config.task.name for cell in cells)
    if len(tasks) > 1:
        raise UserError(
            f"{study.definition.path}: task.name is {' and '.join(tasks)} in its cells, and their losses are not "
            "comparable; use one study per task"
        )
    found = []
    for architecture in dict.fromkeys(cell.architecture for cell in cells):
        same = [cell for cell in cells if cell.architecture == architecture]
        for counting in COUNTINGS:
            fitted = [
                one for cell in same if (one := _curve(study, cell, curves[cell.name], counting=counting)) is not None
            ]
            if fitted:
                found.append(_architecture_laws(architecture, counting, fitted, draws=draws, seed=seed))
    return found


def _architecture_laws(
    architecture: str, counting: Counting, curves: list[Curve], *, draws: int, seed: int
) -> ArchitectureLaws:
    def isoflop() -> IsoflopEstimate:
        return estimate_isoflop(curves, draws=draws, seed=seed)

    def surface() -> SurfaceEstimate:
        return estimate_surface(thinned(curves, per_curve=_POINTS_PER_CURVE), draws=draws, seed=seed)

    alike = _sizes_alike(curves)
    return ArchitectureLaws(
        architecture=architecture,
        counting=counting,
        curves=curves,
        windows=dict.fromkeys(WINDOWS, alike) if alike else _windows(curves, draws=draws, seed=seed),
        isoflop=alike or _or_refusal(isoflop),
        surface=alike or _or_refusal(surface),
    )


def _sizes_alike(curves: Sequence[Curve]) -> str | None:
    """Why sizes are too near each other for a law of N; None: they are not, or there is one."""
    smallest, *others = sizes_of(curves)
    if not others or others[-1] >= _LEAST_RANGE * smallest:
        return None
    return (
        f"a law of N needs models of different sizes: from N = {smallest:,.0f} to {others[-1]:,.0f} it grows by a "
        f"factor of {others[-1] / smallest:.2f}; add sizes up to a factor of at least {_LEAST_RANGE:g}"
    )


def _windows(curves: Sequence[Curve], *, draws: int, seed: int) -> dict[str, FrontierEstimate | str]:
    sizes = sizes_of(curves)
    owners = {
        "all": (),
        "without smallest": sizes[:1],
        "without largest": sizes[-1:],
        "without both": {*sizes[:1], *sizes[-1:]},
    }

    def estimate(**how: Any) -> FrontierEstimate | str:
        return _or_refusal(lambda: estimate_envelope(curves, draws=draws, seed=seed, **how))

    found: dict[str, FrontierEstimate | str] = {BETWEEN: estimate()}
    found |= {name: estimate(bracketed=False, without=without) for name, without in owners.items()}
    between = found[BETWEEN]
    for name, half in (("lower half", 0), ("upper half", 1)):
        if isinstance(between, str):
            found[name] = between
        else:
            low, high = between.window
            middle = float(np.sqrt(low * high))
            found[name] = estimate(window=((low, middle), (middle, high))[half])
    return {name: found[name] for name in WINDOWS}


def _curve(study: Study, cell: Cell, curve: RunCurve, *, counting: Counting) -> Curve | None:
    """As laws are fitted to it: without its beginning; None where it is not longer, or cannot be counted so."""
    counts = study.counts(cell)
    parameters, flops = counts.parameters, curve.flops
    if counting == "paper":
        if counts.paper_parameters is None or counts.paper_flops_per_token is None:
            return None
        parameters, flops = counts.paper_parameters, curve.paper_flops
    warmup_tokens = cell.config.step_tokens.after(cell.config.optimizer.warmup_steps)
    used = curve.tokens > max(study.definition.fit.skip * counts.tokens, warmup_tokens)
    if not used.any():
        return None
    return Curve(
        name=cell.name,
        parameters=float(parameters),
        tokens=curve.tokens[used],
        compute=flops[used] / PFLOP_DAY,
        loss=curve.smoothed[used],
    )


def _or_refusal(make: Any) -> Any:
    try:
        return make()
    except UserError as error:
        return str(error)


def _json(found: Any) -> Any:
    if isinstance(found, str):
        return {"refused": found}
    return found.to_json()

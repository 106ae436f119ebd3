"""The result of a search: trials by loss, the best of each group, and the lowest point over the learning rate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightscale.study.cells import TRIAL, Cell
from lightscale.study.fits.optimum import Optimum, optimum
from lightscale.study.search.halving import TrialGroup
from lightscale.study.search.section import Value
from lightscale.study.study import Study

LEARNING_RATE = "optimizer.lr"


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """One trial of a group."""

    name: str
    values: dict[str, Value]
    losses: dict[int, tuple[float, ...]]
    """By rung that all seeds have reached: the loss of each seed, in order; infinite: diverged."""
    state: str
    """finished, or why it stopped, or what it does next."""
    is_over: bool
    """Whether it trains no more."""

    @property
    def step(self) -> int:
        """The last rung that it reached; 0: none."""
        return max(self.losses, default=0)

    @property
    def loss(self) -> float:
        """Mean loss over the seeds at `step`; infinite before the first rung."""
        found = self.losses.get(self.step, (math.inf,))
        return math.fsum(found) / len(found)

    @property
    def has_diverged(self) -> bool:
        """Whether a seed of it diverged."""
        return bool(self.losses) and not math.isfinite(self.loss)


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """Trials that are compared."""

    name: str
    rungs: tuple[int, ...]
    trials: list[TrialResult]
    """The farthest first, then by loss."""
    key: str | None
    """The parameter of the fits: optimizer.lr, or the only one; None: there is no such parameter."""
    optima: dict[int, Optimum | str]
    """By rung: the lowest point over `key`, or the reason for its absence."""

    @property
    def best(self) -> TrialResult | None:
        """The trial with the least loss at the end; None: none has reached it."""
        first = self.trials[0]
        return first if first.step == self.rungs[-1] and math.isfinite(first.loss) else None

    @property
    def farthest(self) -> tuple[int, Optimum] | None:
        """Step and lowest point of the last rung that has one."""
        found = [(step, one) for step, one in self.optima.items() if isinstance(one, Optimum)]
        return found[-1] if found else None

    def record(self) -> dict[str, Any]:
        """For JSON; losses that are not finite are null."""
        trials = [
            {
                "trial": one.name,
                "values": one.values,
                "losses": {str(step): list(map(_finite, losses)) for step, losses in one.losses.items()},
                "state": one.state,
            }
            for one in self.trials
        ]
        best = None if self.best is None else self.best.name
        optima = [{"step": step, **_optimum_record(one)} for step, one in self.optima.items()]
        return {"group": self.name, "trials": trials, "best": best, "key": self.key, "optima": optima}


def search_results(study: Study) -> list[GroupResult]:
    """The results so far of the search of `study`, by group."""
    assert study.halving is not None and study.definition.search is not None
    cells = {cell.name: cell for cell in study.cells()}
    parameters = study.definition.search.parameters
    key = LEARNING_RATE if LEARNING_RATE in parameters else next(iter(parameters))
    has_key = key == LEARNING_RATE or len(parameters) == 1
    return [_group(study, group, cells, key if has_key else None) for group in study.halving.groups]


def _group(study: Study, group: TrialGroup, cells: dict[str, Cell], key: str | None) -> GroupResult:
    trials = [_trial(study, group, [cells[name] for name in names]) for names in group.cells.values()]
    trials.sort(key=lambda one: (-one.step, one.loss))
    if key is not None and not all(_is_positive(one.values[key]) for one in trials):
        key = None
    return GroupResult(
        name=group.name,
        rungs=group.rungs,
        trials=trials,
        key=key,
        optima={} if key is None else {step: _optimum(trials, key, step) for step in group.rungs},
    )


def _trial(study: Study, group: TrialGroup, cells: Sequence[Cell]) -> TrialResult:
    assert study.halving is not None and cells[0].trial is not None
    scores, losses = study.halving.records.scores, {}
    for step in group.rungs:
        found = [scores[cell.name, step].loss for cell in cells if (cell.name, step) in scores]
        if len(found) == len(cells):
            losses[step] = tuple(found)
    is_finished = group.rungs[-1] in losses
    reasons = [cell.stopped for cell in cells if cell.stopped is not None]
    if reasons:
        state = reasons[0]
    elif is_finished:
        state = "finished"
    else:
        waits = all(cell.is_pending for cell in cells)
        state = f"waits at step {cells[0].until}" if waits else f"trains to step {cells[0].until}"
    return TrialResult(
        name=cells[0].values[TRIAL],
        values=cells[0].trial.values,
        losses=losses,
        state=state,
        is_over=is_finished or bool(reasons),
    )


def _optimum(trials: Sequence[TrialResult], key: str, step: int) -> Optimum | str:
    """The lowest point over `key`; of several trials at one value the best, whatever their other values are."""
    found: dict[float, tuple[float, ...]] = {}
    for one in trials:
        value = float(one.values[key])
        if step in one.losses and (value not in found or math.fsum(one.losses[step]) < math.fsum(found[value])):
            found[value] = one.losses[step]
    return optimum(found)


def _is_positive(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _optimum_record(found: Optimum | str) -> dict[str, Any]:
    if isinstance(found, str):
        return {"reason": found}
    low, high = found.interval or (None, None)
    return {"value": found.value, "low": low, "high": high, "loss": found.loss, "values": list(found.values)}


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None

"""Successive halving (arXiv 1502.07943): at each rung the best share of the trials goes on, from its own checkpoints.

A search without rungs is one whose trials all go to their end.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightscale.study.search.records import Decision, RungScore, SearchRecords


@dataclass(frozen=True, kw_only=True)
class TrialGroup:
    """Trials that are compared: those of one combination of the axes, each with its seeds."""

    name: str
    cells: Mapping[str, Sequence[str]]
    """Names of the cells of each trial, one for each seed, by the trial's name and in the order of trials."""
    rungs: tuple[int, ...]
    """Steps of comparisons, ascending; the last one is the end of the runs."""


@dataclass(frozen=True, kw_only=True)
class Next:
    """What a cell does next."""

    until: int
    """The step that it trains to, or the last one that it reached or reaches."""
    waits: bool = False
    """It has reached the rung, and others of its group have not."""
    stopped: str | None = None
    """Why it trains no more, unless it is at its end; None: it goes on."""


class Halving:
    """The state of all groups by the records, and the decisions that can be made.

    Args:
        factor: of so many trials at a rung one goes on.
    """

    def __init__(self, groups: Sequence[TrialGroup], factor: int, records: SearchRecords) -> None:
        self.groups, self._factor, self.records = groups, factor, records

    def num_kept(self, compared: int) -> int:
        """How many of `compared` trials go on."""
        return max(1, compared // self._factor)

    def losses(self, group: TrialGroup, step: int, trials: Sequence[str]) -> dict[str, float]:
        """Mean loss over the seeds of each of `trials` with all its scores at `step`; infinite where one diverged."""
        found = {}
        for trial in trials:
            scores = [self.records.scores.get((cell, step)) for cell in group.cells[trial]]
            there = [score.loss for score in scores if score is not None]
            if len(there) == len(scores):
                found[trial] = math.fsum(there) / len(there)
        return found

    def decide(self) -> Iterator[Decision]:
        """Make, record and yield every decision that the scores allow."""
        for group in self.groups:
            competing = list(group.cells)
            for step in group.rungs[:-1]:
                if not competing:
                    break
                decision = self.records.decisions.get((group.name, step))
                if decision is None or not decision.losses.keys() >= set(competing):
                    losses = self.losses(group, step, competing)
                    if len(losses) < len(competing):
                        break
                    decision = self._decision(group, step, losses, () if decision is None else decision.kept)
                    self.records.add_decision(decision)
                    yield decision
                competing = [trial for trial in group.cells if trial in decision.kept]

    def next_of_cells(self) -> dict[str, Next]:
        """What each cell does next, by its name."""
        return {cell: found for group in self.groups for cell, found in self._next(group)}

    def _decision(self, group: TrialGroup, step: int, losses: dict[str, float], before: tuple[str, ...]) -> Decision:
        # Equal losses in the order of the trials: sorting keeps it.
        ranked = sorted((trial for trial in losses if math.isfinite(losses[trial])), key=lambda trial: losses[trial])
        kept = ranked[: self.num_kept(len(losses))]
        # What went on before there were more trials is trained already.
        chosen = {*kept, *before}
        return Decision(
            group=group.name, step=step, kept=tuple(trial for trial in ranked if trial in chosen), losses=losses
        )

    def _next(self, group: TrialGroup) -> Iterator[tuple[str, Next]]:
        competing = list(group.cells)
        for step in group.rungs:
            decision = self.records.decisions.get((group.name, step))
            on: list[str] = []
            for trial in competing:
                scores = {cell: self.records.scores.get((cell, step)) for cell in group.cells[trial]}
                if decision is not None and trial in decision.kept:
                    on.append(trial)
                    continue
                lost = None if decision is None else _lost(decision, trial)
                for cell, score in scores.items():
                    yield cell, _next_of(score, step, lost=lost, is_end=step == group.rungs[-1])
            competing = on


def _next_of(score: RungScore | None, step: int, *, lost: str | None, is_end: bool) -> Next:
    if score is not None and not math.isfinite(score.loss):
        return Next(until=step, stopped=score.text())
    if lost is not None:
        return Next(until=step, stopped=lost)
    return Next(until=step, waits=score is not None and not is_end)


def _lost(decision: Decision, trial: str) -> str | None:
    """Why `trial` stopped at the rung; None: it was not compared yet."""
    if trial not in decision.losses:
        return None
    loss = decision.losses[trial]
    if not math.isfinite(loss):
        return f"stopped at step {decision.step}: another seed of the trial diverged"
    place = 1 + sum(other < loss for other in decision.losses.values())
    return f"stopped at step {decision.step}: loss {loss:.4f}, place {place} of {len(decision.losses)}"

"""Event-by-event simulation of runs with failures, independent of the closed forms of `failures`, which it checks."""

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from lightscale.planning.failures import Regime, Shares

# Saves that are simulated in all, unless the number of runs is given: some seconds of computing.
_BUDGET_SAVES = 2_000_000
_FEWEST_RUNS, _MOST_RUNS = 20, 2000


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Result of simulated runs with one interval."""

    interval_s: float
    shares: Shares
    """Mean shares of all runs."""
    goodputs: tuple[float, ...]
    """Goodput of each run."""

    @property
    def error(self) -> float:
        """Standard error of the mean goodput."""
        return _standard_error(self.goodputs)

    @property
    def low(self) -> float:
        """The goodput that one run in ten does not reach."""
        return sorted(self.goodputs)[len(self.goodputs) // 10]


def simulate(
    regime: Regime, intervals_s: Sequence[float], *, duration_s: float, seed: int, runs: int | None = None
) -> list[Estimate]:
    """Simulate `runs` runs of `duration_s` of wall time for each interval; None: as many as take a few seconds.

    All intervals meet the same failures, so that their differences are more precise than their values.
    """
    if runs is None:
        saves = sum(duration_s / (interval_s + regime.stall_s) for interval_s in intervals_s)
        runs = min(max(int(_BUDGET_SAVES / max(saves, 1.0)), _FEWEST_RUNS), _MOST_RUNS)
    # A generator for each run, seeded by its number: what one interval draws does not shift the failures of another.
    histories = [_failures(regime, duration_s, random.Random(f"{seed}/{run}")) for run in range(runs)]
    estimates = []
    for interval_s in intervals_s:
        runs_shares = [simulate_run(regime, interval_s, duration_s=duration_s, failures=one) for one in histories]
        estimates.append(_estimate(interval_s, runs_shares))
    return estimates


def as_good_as_best(estimates: Sequence[Estimate]) -> list[Estimate]:
    """The estimate with the highest goodput, and those within two standard errors of it, run by run."""
    best = max(estimates, key=lambda one: one.shares.progress)

    def is_close(one: Estimate) -> bool:
        behind = [high - low for high, low in zip(best.goodputs, one.goodputs, strict=True)]
        return statistics.fmean(behind) <= 2 * _standard_error(behind)

    return [one for one in estimates if is_close(one)]


def simulate_run(regime: Regime, interval_s: float, *, duration_s: float, failures: Iterable[float]) -> Shares:
    """Simulate one run of `duration_s` with failures at the given ascending times.

    The run starts with a step, and its work at the end counts as saved.
    """
    coming = iter(failures)
    failure = next(coming, math.inf)
    job_s = regime.stop_every_s if regime.stops_announced and regime.stop_every_s else math.inf
    leave_at = job_s - regime.save_s
    now, restart_s, is_after_stop = 0.0, 0.0, False
    progress = stalls = lost = restarts = stops = 0.0
    while now < duration_s:
        attempt = _run_attempt(
            regime, interval_s, began=now, restart_s=restart_s, leave_at=leave_at, end=min(failure, duration_s)
        )
        kept = attempt.worked if attempt.ended >= duration_s else attempt.saved
        progress, lost, stalls = progress + kept, lost + attempt.worked - kept, stalls + attempt.stalled
        stops += attempt.leaving + (attempt.restarting if is_after_stop else 0.0)
        restarts += 0.0 if is_after_stop else attempt.restarting
        now, restart_s, is_after_stop = attempt.ended, regime.restart_s, attempt.has_left
        if attempt.has_left:
            leave_at = now + job_s - regime.save_s
        else:
            failure = next(coming, math.inf)
    parts = {"progress": progress, "stalls": stalls, "lost": lost, "restarts": restarts, "stops": stops}
    return Shares(**{name: seconds / duration_s for name, seconds in parts.items()})


class _Attempt(NamedTuple):
    """From one start to what ended it; seconds."""

    ended: float
    restarting: float
    worked: float = 0.0
    saved: float = 0.0
    """Part of the work in a complete checkpoint."""
    stalled: float = 0.0
    leaving: float = 0.0
    has_left: bool = False
    """Whether it left at a stop, with everything saved."""


def _run_attempt(
    regime: Regime, interval_s: float, *, began: float, restart_s: float, leave_at: float, end: float
) -> _Attempt:
    """From checkpoint to checkpoint, until `end` ends it, or it leaves by itself at `leave_at`."""
    now = began + restart_s
    if now >= end:
        return _Attempt(ended=end, restarting=end - began)
    stall_s, save_s, stop_at = regime.stall_s, regime.save_s, min(leave_at, end)
    worked = saved = stalled = 0.0
    # When the newest save is written, and the work that is in it.
    written_at, written, due = -math.inf, 0.0, now + interval_s
    while True:
        # A save that is due waits until the one before is written; training continues meanwhile.
        begins = due if due > written_at else written_at
        until = begins if begins < stop_at else max(now, stop_at)
        worked += until - now
        now = until
        if written_at <= now:
            saved = written
        if now >= stop_at:
            break
        written_at, written = now + save_s, worked
        now += stall_s
        if now >= end:
            stalled += stall_s - (now - end)
            now = end
            break
        stalled += stall_s
        due = now + interval_s
    if now >= end:
        return _Attempt(ended=now, restarting=restart_s, worked=worked, saved=saved, stalled=stalled)
    # The last save before an announced stop: nothing is left to train beside it, so that all of it is waited for.
    left = min(now + save_s, end)
    has_left = left < end
    return _Attempt(
        ended=left,
        restarting=restart_s,
        worked=worked,
        saved=worked if has_left else saved,
        stalled=stalled,
        leaving=left - now,
        has_left=has_left,
    )


def _failures(regime: Regime, duration_s: float, generator: random.Random) -> list[float]:
    times: list[float] = []
    now = 0.0
    while regime.losses_per_s and (now := now + generator.expovariate(regime.losses_per_s)) < duration_s:
        times.append(now)
    return times


def _estimate(interval_s: float, runs: Sequence[Shares]) -> Estimate:
    mean = {field.name: statistics.fmean(getattr(one, field.name) for one in runs) for field in fields(Shares)}
    return Estimate(interval_s=interval_s, shares=Shares(**mean), goodputs=tuple(one.progress for one in runs))


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf

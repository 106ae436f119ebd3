"""Closed forms for the goodput of a run with failures, by checkpoint interval.

A save stalls training for `stall_s` and is written in the background until `save_s` after its start. Only then it
counts, and the next one may start. A failure loses the work since the newest complete checkpoint. Failures are random
and independent (Poisson), also during restarts.
"""

import math
from dataclasses import dataclass

DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class Regime:
    """Interruptions of a run, and the cost of saves and restarts."""

    failures_per_s: float
    """Failures of the whole run."""
    stall_s: float
    save_s: float
    """Seconds until a save is complete, at least `stall_s`."""
    restart_s: float
    """Seconds from a failure, or the end of the last job, to the first new step."""
    stop_every_s: float | None = None
    """Time of a job, including its start and last save; None: no stops. Unannounced: the mean of a random time."""
    stops_announced: bool = True
    """Whether jobs save before a stop; if not, a stop is a failure."""

    @property
    def losses_per_s(self) -> float:
        """Rate of all interruptions that lose work."""
        is_loss = self.stop_every_s is not None and not self.stops_announced
        return self.failures_per_s + (1 / self.stop_every_s if is_loss and self.stop_every_s else 0.0)

    @property
    def mtbf_s(self) -> float:
        """Mean time between interruptions that lose work; infinite if there are none."""
        return 1 / self.losses_per_s if self.losses_per_s else math.inf

    @property
    def shortest_interval_s(self) -> float:
        """Least training time between saves: a save waits until the previous one is written."""
        return self.save_s - self.stall_s


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the wall time; their sum is 1."""

    progress: float
    """The goodput: work that was saved, or done at the end."""
    stalls: float
    lost: float
    """Repeated work."""
    restarts: float
    """After failures."""
    stops: float
    """Announced stops: the last save and the restart."""


def expected_shares(regime: Regime, interval_s: float) -> Shares:
    """Shares of a long run with `interval_s` of training between saves.

    Exact without announced stops. Between a start and the next loss, at the rate r, a run is up for an exponentially
    distributed time. It keeps a period of work if it is up until the save at the period's end is written: on average
    1 / (e^(r period) - 1) later periods for each first one. With failures during restarts, that time and the restarts
    together take e^(r restart) / r, as in Daly (2006), whose complete model this is for saves that only block.

    Announced stops take their share of the time once and leave the rest unchanged.
    """
    rate, stall_s = regime.losses_per_s, regime.stall_s
    # All means are per loss, that is per 1/rate of wall time; multiplied by the rate they are shares of it.
    # After a start the first save is due by the interval; the others may have to wait for the one before.
    first_s = interval_s + stall_s
    period_s = max(first_s, regime.save_s)
    if rate == 0:
        up, progress, stalls = 1.0, 1 - stall_s / period_s, stall_s / period_s
    else:
        up = math.exp(-rate * regime.restart_s)
        later = 1 / _expm1(rate * period_s)
        kept_s = math.exp(-rate * (interval_s + regime.save_s)) * (interval_s + (period_s - stall_s) * later)
        progress = up * rate * kept_s
        stalls = up * math.exp(-rate * first_s) * _expm1(rate * stall_s) * (1 + later)
    stops = 0.0
    if regime.stop_every_s is not None and regime.stops_announced:
        stops = (regime.restart_s + regime.save_s) / regime.stop_every_s
    rest = 1 - stops
    return Shares(
        progress=rest * progress,
        stalls=rest * stalls,
        lost=rest * (up - progress - stalls),
        restarts=rest * (1 - up),
        stops=stops,
    )


def daly_interval_s(stall_s: float, mtbf_s: float) -> float:
    """The optimal interval of training between saves, by Daly (2006, doi 10.1016/j.future.2004.11.016).

    The first term is Young's (1974); the others matter if a save takes more than a few hundredths of the MTBF.
    """
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    share = math.sqrt(stall_s / (2 * mtbf_s))
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + share / 3 + share**2 / 9) - stall_s


def _expm1(x: float) -> float:
    # Beyond, e^x is no floating-point number.
    return math.expm1(min(x, 700.0))

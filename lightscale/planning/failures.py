"""What share of its time a run spends on progress when it fails now and then: closed forms, by checkpoint interval.

A save stalls training for `stall_s` and is written in the background until `save_s` after it began; only then does it
count, and only then may the next one begin. A failure throws away the work since the newest whole checkpoint.
Failures come at random, independent of one another (Poisson), also while the run is being restarted.
"""

import math
from dataclasses import dataclass

DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class Regime:
    """What interrupts a run, and what saves and restarts take."""

    failures_per_s: float
    """Of the whole run."""
    stall_s: float
    save_s: float
    """At least `stall_s`."""
    restart_s: float
    """From a failure, or the end of the last job, to the first new step."""
    stop_every_s: float | None = None
    """Time of a job, its start and last save included; None: no such stops. Unannounced: the mean of a random time."""
    stops_announced: bool = True
    """A job knows when it must end, and saves before; otherwise a stop is one more kind of failure."""

    @property
    def losses_per_s(self) -> float:
        """Of everything that throws work away."""
        is_loss = self.stop_every_s is not None and not self.stops_announced
        return self.failures_per_s + (1 / self.stop_every_s if is_loss and self.stop_every_s else 0.0)

    @property
    def mtbf_s(self) -> float:
        """Mean time between the interruptions that throw work away; infinite if there are none."""
        return 1 / self.losses_per_s if self.losses_per_s else math.inf

    @property
    def shortest_interval_s(self) -> float:
        """Of training between saves: the next one waits until the one before is written."""
        return self.save_s - self.stall_s


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Of the wall time; together 1."""

    progress: float
    """The goodput: work that was saved, or done when the time was over."""
    stalls: float
    lost: float
    """Work that was done again."""
    restarts: float
    """After failures."""
    stops: float
    """Announced stops: the last save, and the restart."""


def expected_shares(regime: Regime, interval_s: float) -> Shares:
    """Of a long run with `interval_s` of training between saves.

    Exact without announced stops. From one start to the next loss, at the rate r, a run is up for an exponentially
    distributed time. It keeps a period of work if it is up until the save at the period's end is written: of later
    ones a mean of 1 / (e^(r period) - 1) for each first one. Restarts that are hit themselves make that time and the
    way back e^(r restart) / r together, as in Daly (2006), whose complete model this is for saves that only block.

    Announced stops take their share of the time once, and leave the rest as it is.
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
    """The interval of training between saves that costs least, by Daly (2006, doi 10.1016/j.future.2004.11.016).

    The first term is Young's (1974); the others matter where a save takes more than some hundredths of the MTBF.
    """
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    share = math.sqrt(stall_s / (2 * mtbf_s))
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + share / 3 + share**2 / 9) - stall_s


def _expm1(x: float) -> float:
    # Beyond, e^x is no floating-point number.
    return math.expm1(min(x, 700.0))

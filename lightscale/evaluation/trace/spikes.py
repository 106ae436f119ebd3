"""The loss spikes that a run's records show."""

import math
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from lightscale.config.schema import GuardConfig
from lightscale.runs.run_directory import RunDirectory, read_metrics

_FEWEST = 8


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A step whose loss stands out."""

    step: int
    loss: float | None
    """As recorded; None where it was no finite number."""
    usual: float | None
    """The median loss of at most ``guard.window`` steps before that were no spikes; None where there are too few."""
    skipped: str | None
    """Why the run skipped the step; None: it did not."""


def find_spikes(run: RunDirectory, guard: GuardConfig) -> Iterator[Spike]:
    """In the order of steps: skipped ones, and steps as far above the median as [guard] would skip.

    The guard waits for a whole window; here a median of ``_FEWEST`` steps is enough, because nothing is lost by a step
    that is listed. Where ``guard.max_loss_rise`` is off, its default counts.
    """
    default = GuardConfig.model_fields["max_loss_rise"].default
    rise: float = guard.max_loss_rise if guard.max_loss_rise is not None else default
    usual: deque[float] = deque(maxlen=guard.window)
    for line in read_metrics(run.metrics):
        if "loss" not in line:
            continue
        step, value, skipped = line["step"], line["loss"], line.get("skipped")
        loss = float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
        median = statistics.median(usual) if len(usual) >= min(_FEWEST, guard.window) else None
        if skipped or loss is None or (median is not None and loss >= median + rise):
            yield Spike(step=step, loss=loss, usual=median, skipped=skipped or None)
        else:
            usual.append(loss)

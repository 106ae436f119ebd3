"""A learning rate range test: the loss over a learning rate that grows, and the rates at which it falls and rises.

arXiv 1506.01186, section 3.3, with one factor a step in place of one summand. One short run stands for many: the loss
at a rate also depends on the steps before it. The result is where a search begins, not where it ends.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightscale.errors import UserError
from lightscale.output.plot import DOTS_PER_INCH, new_figure
from lightscale.runs.run_directory import RunDirectory, read_lines
from lightscale.study.history import kept_lines

_SHARE_SMOOTHED = 0.05
"""Share of all steps, on either side, of which the median is taken; a centred one does not lag behind."""
_MARGIN = 10.0
"""Between the rate with the least loss, near the rates that diverge, and the one that is suggested."""
_LEAST_GAIN = 0.02
"""Nats; the loss of a step differs by as much from batch to batch."""
_LEAST_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class RangeCurve:
    """Arrays (k,) by ascending step, up to the last step before a loss that is not finite."""

    rates: NDArray[np.float64]
    losses: NDArray[np.float64]
    """Loss of the step, nats per token."""
    smoothed: NDArray[np.float64]
    """Median of the losses around the step: one that leaps would move a mean."""
    has_diverged: bool
    """Whether the next loss is NaN or infinite."""

    @property
    def lowest(self) -> float:
        """The rate with the least smoothed loss."""
        return float(self.rates[self.smoothed.argmin()])

    @property
    def steepest(self) -> float:
        """The rate, up to ``lowest``, at which the smoothed loss falls fastest over log rate."""
        last = int(self.smoothed.argmin()) + 1
        if last < 2:
            return self.lowest
        slopes = np.gradient(self.smoothed[:last], np.log(self.rates[:last]))
        return float(self.rates[slopes.argmin()])

    @property
    def fault(self) -> str | None:
        """Why no rate can be suggested; None: one can."""
        least = self.smoothed.min()
        if self.smoothed[0] - least < _LEAST_GAIN:
            return "the loss never falls; choose a lower --from, or more --steps"
        if self.smoothed[-1] - least < _LEAST_GAIN and not self.has_diverged:
            return "the loss does not rise before the last rate; choose a higher --to"
        return None

    @property
    def suggested(self) -> float | None:
        """A tenth of ``lowest``; None where the range does not show it (``fault``)."""
        return None if self.fault else self.lowest / _MARGIN


def read_range_test(run: RunDirectory) -> RangeCurve:
    """The steps of a run with ``optimizer.schedule = "range_test"``. UserError where fewer than 3 have a loss."""
    lines = [
        line
        for line in kept_lines(read_lines(run.events), read_lines(run.metrics))
        # A step without a label has no loss.
        if "lr" in line and "skipped" not in line
    ]
    # A loss that is not finite has no number in the record.
    losses = np.array([np.nan if line.get("loss") is None else line["loss"] for line in lines], dtype=np.float64)
    finite = np.isfinite(losses)
    last = len(losses) if finite.all() else int(finite.argmin())
    if last < _LEAST_STEPS:
        raise UserError(
            f"{run.path}: {last} steps with a finite loss are too few; choose a lower --from or more --steps"
        )
    width = max(1, round(_SHARE_SMOOTHED * len(losses)))
    around = [slice(max(0, step - width), min(last, step + width + 1)) for step in range(last)]
    return RangeCurve(
        rates=np.array([line["lr"] for line in lines[:last]]),
        losses=losses[:last],
        smoothed=np.array([np.median(losses[one]) for one in around]),
        has_diverged=last < len(losses),
    )


def draw(test: RangeCurve, path: Path, title: str) -> None:
    """Write a picture of losses over rates to ``path``, behind ``check_plot_path``."""
    figure = new_figure(7.5, 4.5)
    axes = figure.subplots()
    axes.plot(test.rates, test.losses, ".", color="#1f77b4", alpha=0.35, markersize=4, label="step")
    axes.plot(test.rates, test.smoothed, color="#1f77b4", label="median of the steps around it")
    marks = {"steepest": (test.steepest, "#2ca02c"), "lowest": (test.lowest, "#d62728")}
    if test.suggested is not None:
        marks["suggested"] = test.suggested, "black"
    for name, (rate, color) in marks.items():
        axes.axvline(rate, color=color, linestyle="--", linewidth=1, label=f"{name}: {rate:.2g}")
    # What diverges would leave no room for the rest.
    low, first = test.smoothed.min(), test.smoothed[0]
    margin = 0.1 * max(first - low, _LEAST_GAIN)
    axes.set_ylim(low - 2 * margin, first + 3 * margin)
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=DOTS_PER_INCH)

"""A search in a report: its trials, the best of each group, and the loss over the learning rate."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightscale.output.html import Html
from lightscale.study.report.pictures import svg_text
from lightscale.study.search.section import SearchSection, Value
from lightscale.study.search_results import GroupResult, TrialResult

INTERVALS = (
    "In brackets: 95 % intervals by the residuals of the parabola (Fieller). Of several trials at one value the best "
    "counts."
)
_COLUMNS = 3
_MARKS = "vsDP<>"
"""Of rungs."""
_BLUE, _GREY, _RED = "#1f77b4", "#9a9a9a", "#d62728"


def add_search(html: Html, search: SearchSection, groups: list[GroupResult]) -> None:
    """Add pictures and tables."""
    html.heading(f"Search: {search.method}")
    drawn = [group for group in groups if group.key is not None and any(one.losses for one in group.trials)]
    if drawn:
        html.picture(
            svg_text(search_figure(drawn, search.metric)), "Loss of each trial at the last rung that it reached."
        )
    for group in groups:
        html.heading(group.name, 3)
        html.table(("trial", *search.parameters, "step", "loss", ""), [trial_row(one) for one in group.trials])
        html.lines("\n".join(optimum_lines(group)))
    html.paragraph(INTERVALS, note=True)


def trial_row(one: TrialResult) -> list[str]:
    """Name, values, step, loss and state."""
    loss = f"{one.loss:.4f}" if math.isfinite(one.loss) else "—"
    return [one.name, *map(value_text, one.values.values()), f"{one.step:,}" if one.step else "—", loss, one.state]


def value_text(value: Value) -> str:
    """A value in a table."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def optimum_lines(group: GroupResult) -> list[str]:
    """The best trial and the lowest point at each rung, in words."""
    lines = []
    if group.best is not None:
        values = ", ".join(f"{key} = {value_text(value)}" for key, value in group.best.values.items())
        lines.append(f"best trial: {group.best.name}, {values}, loss {group.best.loss:.4f}")
    if group.key is None:
        lines.append("no fit: it needs optimizer.lr, or one parameter alone, with values above 0")
    for step, found in group.optima.items():
        text = f"no optimum: {found}" if isinstance(found, str) else f"optimum {found.text()}, loss {found.loss:.4f}"
        lines.append(f"{group.key} at step {step:,}: {text}")
    return lines


def search_figure(groups: list[GroupResult], metric: str) -> Figure:
    """A panel for each group with a key: loss over its value, with the parabola of the last rung that has one."""
    columns = min(_COLUMNS, len(groups))
    rows = -(-len(groups) // columns)
    figure = Figure(figsize=(max(7.0, 4.6 * columns), 5.0 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, group in zip(panels, groups, strict=False):
        _draw(axes, group)
        axes.set_ylabel(f"{metric} loss, nats")
    for axes in list(panels)[len(groups) :]:
        axes.set_visible(False)
    return figure


def _draw(axes: Axes, group: GroupResult) -> None:
    assert group.key is not None
    end, farthest = group.rungs[-1], group.farthest
    if farthest is not None:
        step, lowest = farthest
        if lowest.interval is not None:
            # An interval may be far wider than the values, and would stretch the axis.
            tried = [float(one.values[group.key]) for one in group.trials]
            axes.axvspan(*np.clip(lowest.interval, min(tried), max(tried)), color=_BLUE, alpha=0.12, linewidth=0)
        x = np.geomspace(lowest.values[0], lowest.values[-1], 100)
        axes.plot(x, lowest.at(x), color="black", linewidth=1, label=f"parabola of step {step:,}")
        axes.plot(lowest.value, lowest.loss, "*", color="black", ms=11, zorder=5, label=f"optimum {lowest.text()}")
        if step < end:
            _dots(axes, group, group.trials, step, mark="o", color="black", fill="none", label=f"at step {step:,}")
    for place, rung in enumerate(group.rungs):
        there = [one for one in group.trials if one.step == rung and not one.has_diverged]
        over, others = [one for one in there if one.is_over], [one for one in there if not one.is_over]
        mark = _MARKS[place % len(_MARKS)]
        if rung == end:
            _dots(axes, group, over, rung, mark="o", color=_BLUE, label=f"finished, step {rung:,}")
        else:
            _dots(axes, group, over, rung, mark=mark, color=_GREY, label=f"stopped at step {rung:,}")
            _dots(axes, group, others, rung, mark=mark, color=_BLUE, fill="none", label=f"goes on from step {rung:,}")
    if diverged := [float(one.values[group.key]) for one in group.trials if one.has_diverged]:
        # At the top edge: they have no loss.
        top = np.full(len(diverged), 0.97)
        axes.plot(diverged, top, "x", color=_RED, ms=7, transform=axes.get_xaxis_transform(), label="diverged")
    axes.set_xscale("log")
    axes.set_xlabel(group.key)
    axes.set_title(group.name, fontsize=10)
    axes.grid(alpha=0.3, linewidth=0.4)
    if axes.get_legend_handles_labels()[0]:
        # Below: within the axes it may cover trials.
        axes.legend(fontsize=7, ncol=2, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False)


def _dots(
    axes: Axes,
    group: GroupResult,
    trials: list[TrialResult],
    step: int,
    *,
    mark: str,
    color: str,
    label: str,
    fill: str = "full",
) -> None:
    points = [
        (float(one.values[group.key or ""]), loss)
        for one in trials
        for loss in one.losses.get(step, ())
        if math.isfinite(loss)
    ]
    if points:
        face = "none" if fill == "none" else color
        axes.plot(*zip(*points, strict=True), mark, color=color, markerfacecolor=face, ms=5, label=label)

"""Pictures of curves and laws, as SVG for HTML."""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter
from numpy.typing import NDArray

from lightscale.study.fits.curves import Curve, sizes_of
from lightscale.study.fits.frontier import FrontierEstimate
from lightscale.study.fits.isoflop import IsoflopEstimate

_WIDE, _HIGH = 9.0, 4.6
_MOST_POINTS = 300
# Each is an element of its own.
_MOST_MARKS = 100
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#e377c2")
_numbered = iter(range(10**9))


@dataclass(frozen=True, kw_only=True)
class Line:
    """Data of one drawn line."""

    label: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, kw_only=True)
class Dots:
    """Data of one row of dots."""

    label: str
    x: NDArray[np.float64]


def curves_picture(curves: Sequence[Curve], frontier: FrontierEstimate | None, title: str) -> str:
    """Picture of loss over C of all runs, by size, with the envelope and its law."""
    figure, axes = _new("C, PFLOP-days", "loss, nats per token", title)
    sizes = sizes_of(curves)
    colours = matplotlib.colormaps["viridis"](np.linspace(0.05, 0.9, len(sizes)))
    drawn = set()
    for curve in curves:
        label = None if curve.parameters in drawn else f"N = {curve.parameters:,.0f}"
        drawn.add(curve.parameters)
        at = _thin(len(curve.loss))
        colour = colours[sizes.index(curve.parameters)]
        axes.plot(curve.compute[at], curve.loss[at], color=colour, linewidth=1, label=label)
    if frontier is not None:
        _draw_law(axes, frontier, "black", "envelope")
    axes.legend(fontsize=7, ncol=2)
    return svg_text(figure)


def laws_picture(frontiers: Mapping[str, FrontierEstimate]) -> str:
    """Picture of L(C), N_opt(C) and D_opt(C) of all architectures."""
    figure = Figure(figsize=(_WIDE, _HIGH * 0.85), layout="constrained")
    names = (("loss", "L, nats per token"), ("parameters", "N_opt"), ("tokens", "D_opt"))
    for axes, (name, label) in zip(figure.subplots(1, 3), names, strict=True):
        _prepare(axes, "C, PFLOP-days", label, "")
        _space_out(axes.xaxis)
        for colour, (architecture, frontier) in zip(_COLOURS * 9, frontiers.items(), strict=False):
            at = _thin(len(frontier.frontier.compute), _MOST_MARKS)
            compute, values = frontier.frontier.compute, getattr(frontier.frontier, name)
            axes.plot(compute[at], values[at], ".", color=colour, markersize=2)
            law = frontier.laws[name]
            ends = np.array(frontier.window)
            exponent = law.exponent.value
            axes.plot(
                ends,
                law.coefficient.value * ends**exponent,
                color=colour,
                linewidth=1.3,
                label=f"{architecture}: C^{exponent:.3f}",
            )
        axes.legend(fontsize=6.5)
    return svg_text(figure)


def isoflop_picture(estimate: IsoflopEstimate, title: str) -> str:
    """Picture of loss over N at equal compute, with the parabolas."""
    figure, axes = _new("N, parameters without the embedding", "loss, nats per token", title)
    axes.set_yscale("linear")
    colours = matplotlib.colormaps["plasma"](np.linspace(0.05, 0.85, len(estimate.parabolas)))
    for colour, one in zip(colours, estimate.parabolas, strict=True):
        axes.plot(one.sizes, one.losses, "o", color=colour, markersize=3, label=f"{one.compute:.2g} PFLOP-days")
        logs = np.linspace(np.log(one.sizes[0]), np.log(one.sizes[-1]), 50)
        axes.plot(np.exp(logs), np.polyval(one.coefficients, logs - one.centre), color=colour, linewidth=0.8)
        axes.plot([one.parameters], [one.loss], "x", color=colour, markersize=6)
    axes.legend(fontsize=6.5, ncol=2)
    return svg_text(figure)


def lines_picture(lines: Sequence[Line], *, x: str, y: str, title: str = "", marked: bool = False) -> str:
    """Picture of lines on logarithmic axes; `marked`: with a mark at each point."""
    figure, axes = _new(x, y, title)
    for colour, line in zip(_COLOURS * (1 + len(lines) // len(_COLOURS)), lines, strict=False):
        at = _thin(len(line.x))
        axes.plot(
            line.x[at], line.y[at], color=colour, linewidth=1.1, marker="o" if marked else "", ms=3, label=line.label
        )
    if lines:
        axes.legend(fontsize=7)
    return svg_text(figure)


def dots_picture(rows: Sequence[Dots], *, x: str) -> str:
    """Picture of rows of dots from top to bottom, with a bar at each row's mean."""
    figure = Figure(figsize=(_WIDE, 1.0 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        colour = _COLOURS[place % len(_COLOURS)]
        axes.plot(row.x, np.full(len(row.x), place), "o", color=colour, ms=5, alpha=0.7)
        axes.plot([row.x.mean()], [place], "|", color=colour, ms=16, mew=1.6)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(x)
    axes.grid(alpha=0.3, linewidth=0.4)
    return svg_text(figure)


def _draw_law(axes: Axes, found: FrontierEstimate, colour: str, label: str) -> None:
    at = _thin(len(found.frontier.compute), _MOST_MARKS)
    axes.plot(found.frontier.compute[at], found.frontier.loss[at], ".", color=colour, markersize=3, label=label)
    law = found.laws["loss"]
    ends = np.array(found.window)
    text = f"L = {law.coefficient.value:.4g} C^{law.exponent.value:.4f}"
    axes.plot(ends, law.coefficient.value * ends**law.exponent.value, "--", color="red", linewidth=1.3, label=text)


def _new(x: str, y: str, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDE, _HIGH), layout="constrained")
    axes = figure.subplots()
    _prepare(axes, x, y, title)
    return figure, axes


def _prepare(axes: Axes, x: str, y: str, title: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, which="both", linewidth=0.4)
    if "loss" in y or y.startswith("L,"):
        # A loss spans less than a decade: plain numbers.
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:.3g}")
        axes.tick_params(axis="y", which="minor", labelsize=7)


def _space_out(axis: Axis) -> None:
    """Labels of a short logarithmic axis at 1 and 3 of each decade: at all its minor ticks they would overlap."""
    axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axis.set_major_formatter(LogFormatterSciNotation(labelOnlyBase=False, minor_thresholds=(np.inf, np.inf)))
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(labelsize=7)


def _thin(count: int, most: int = _MOST_POINTS) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, count - 1, num=min(count, most)).astype(np.int64))


def svg_text(figure: Figure) -> str:
    """The picture as SVG for HTML."""
    stream = io.StringIO()
    # Pictures share one HTML file: the names of their parts must differ. Text stays text.
    with matplotlib.rc_context({"svg.hashsalt": f"picture-{next(_numbered)}", "svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    # Metadata names a vocabulary by its address; nothing is loaded from there, and nothing is lost without it.
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL).strip()
    # Places to a hundredth of a point, 0.004 mm: most of the file is digits behind that.
    return re.sub(r'(?<= )(d|x|y)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), text)

"""Cells that differ only in the seed: their losses side by side, mean and spread."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightscale.output.html import Html
from lightscale.study.cells import Cell
from lightscale.study.history import RunCurve
from lightscale.study.report.pictures import Dots, Line, dots_picture, lines_picture
from lightscale.study.study import Study

_MOST_DRAWN = 40
"""Most names beside one picture; the table has all."""


@dataclass(frozen=True, kw_only=True)
class _Alike:
    """Cells that differ in nothing but the seed."""

    name: str
    parameters: int
    curves: list[RunCurve]

    @property
    def losses(self) -> NDArray[np.float64]:
        """(seeds,): the last smoothed loss of each seed."""
        return np.array([curve.smoothed[-1] for curve in self.curves])

    @property
    def mean_curve(self) -> Line:
        """The mean of the seeds at steps where all have a point."""
        common = sorted(set.intersection(*(set(curve.step.tolist()) for curve in self.curves)))
        at = [np.isin(curve.step, common) for curve in self.curves]
        smoothed = [curve.smoothed[chosen] for curve, chosen in zip(self.curves, at, strict=True)]
        return Line(label=self.name, x=self.curves[0].tokens[at[0]], y=np.mean(smoothed, axis=0))


def add_seeds(html: Html, study: Study, cells: Sequence[Cell], curves: Mapping[str, RunCurve]) -> None:
    """Add a table, dots and curves of the finished cells; nothing if no two differ only in the seed."""
    groups = list(_groups(study, cells, curves))
    if not any(len(group.curves) > 1 for group in groups):
        return
    html.heading("Cells with several seeds")
    rows = []
    for group in groups:
        losses = group.losses
        each = ", ".join(f"{loss:.3f}" for loss in losses)
        rows.append([group.name, f"{group.parameters:,}", each, f"{losses.mean():.3f}", f"{np.ptp(losses):.3f}"])
    html.table(("cells", "N", "loss of each seed", "mean", "spread"), rows)
    html.paragraph(
        "Smoothed training loss at the end of each finished run. Spread: highest minus lowest loss of the seeds; "
        "smaller differences between cells are not significant.",
        note=True,
    )
    if len(groups) > _MOST_DRAWN:
        return
    dots = [Dots(label=group.name, x=group.losses) for group in groups]
    html.picture(dots_picture(dots, x="loss, nats per token"), "Points: seeds. Bars: their means.")
    lines = [line for group in groups if len(line := group.mean_curve)]
    svg = lines_picture(lines, x="tokens", y="loss, nats per token", title="mean of the seeds")
    html.picture(svg, "Smoothed training loss.")


def _groups(study: Study, cells: Sequence[Cell], curves: Mapping[str, RunCurve]) -> Iterator[_Alike]:
    seeds = {axis.name for axis in study.definition.axes if axis.is_of_seeds}
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.part == "main" and cell.name in curves and study.finished_record(cell) is not None:
            varying = (axis for axis in study.definition.axes if axis.name not in seeds and len(axis.values) > 1)
            groups.setdefault(" ".join(cell.values[axis.name] for axis in varying) or "all", []).append(cell)
    for name, alike in groups.items():
        found = [curves[cell.name] for cell in alike]
        yield _Alike(name=name, parameters=study.counts(alike[0]).parameters, curves=found)

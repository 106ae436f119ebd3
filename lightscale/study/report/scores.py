"""Evaluations in a report: against size, and beside the published Tables 5 and 6."""

from collections.abc import Sequence

import numpy as np

from lightscale.output.html import Html
from lightscale.study.cells import Cell
from lightscale.study.history import RunCurve
from lightscale.study.published import SCORES, TABLE_5, TABLE_6, PublishedScores
from lightscale.study.report.pictures import Line, lines_picture
from lightscale.study.scores import Scores
from lightscale.study.study import Study


def add_scores(html: Html, study: Study, cells: Sequence[Cell], curves: dict[str, RunCurve]) -> None:
    """Add the scores of finished cells, if there is anything to compare."""
    finished = [cell for cell in cells if cell.part == "main" and study.finished_record(cell) is not None]
    scores = {cell.name: _scores(study, cell) for cell in finished}
    models = [cell.config.model for cell in finished]
    lengths = {cell.config.data.sequence_length for cell in finished}
    if len({model.hidden_size / model.num_layers for model in models}) > 1:
        html.heading("Table 5: aspect ratio, this study and the published numbers")
        shown = [cell for cell in finished if cell.config.data.sequence_length == max(lengths)]
        _beside(html, shown, scores, curves, TABLE_5)
    if len(lengths) > 1:
        html.heading("Table 6: length of training sequences, this study and the published numbers")
        _beside(html, finished, scores, curves, TABLE_6)
    _against_size(html, study, finished, scores)


def _scores(study: Study, cell: Cell) -> Scores:
    record = study.finished_record(cell)
    assert record is not None
    scores: Scores = record.get("scores", {})
    return scores


def _beside(
    html: Html,
    cells: Sequence[Cell],
    scores: dict[str, Scores],
    curves: dict[str, RunCurve],
    published: Sequence[PublishedScores],
) -> None:
    names = sorted({(task, name) for one in scores.values() for task, values in one.items() for name in values})
    headings = ["architecture", "width", "layers", "length", "loss", *(f"{task} {name}" for task, name in names)]
    rows = []
    for cell in cells:
        model = cell.config.model
        shape = [str(model.hidden_size), str(model.num_layers), f"{cell.config.data.sequence_length:,}"]
        own = scores[cell.name]
        values = [own.get(task, {}).get(name) for task, name in names]
        texts = ["—" if value is None else f"{value:.4g}" for value in values]
        rows.append([cell.architecture, *shape, f"{curves[cell.name].smoothed[-1]:.4f}", *texts])
    html.table(headings, rows)
    html.paragraph("Published, arXiv 2406.16690, models of 1B and 300B tokens:", note=True)
    there = {cell.architecture for cell in cells}
    beside = [one for one in published if one.architecture in there]
    html.table(
        ("architecture", "width", "layers", "length", *SCORES),
        [
            [
                one.architecture,
                str(one.hidden_size),
                str(one.num_layers),
                f"{one.sequence_length:,}",
                *(f"{getattr(one, name):g}" for name in SCORES.values()),
            ]
            for one in beside
        ],
        published=range(len(beside)),
    )


def _against_size(html: Html, study: Study, cells: Sequence[Cell], scores: dict[str, Scores]) -> None:
    names = sorted({(task, name) for one in scores.values() for task, values in one.items() for name in values})
    if not names:
        return
    html.heading("Evaluation against size")
    for task, name in names:
        lines = []
        for architecture in dict.fromkeys(cell.architecture for cell in cells):
            points = sorted(
                (study.counts(cell).parameters, value)
                for cell in cells
                if cell.architecture == architecture
                and (value := scores[cell.name].get(task, {}).get(name)) is not None
                and value > 0
            )
            if points:
                x, y = np.array(points, dtype=np.float64).T
                lines.append(Line(label=architecture, x=x, y=y))
        if lines:
            title = f"{task}: {name}"
            svg = lines_picture(lines, x="N, parameters without the embedding", y=name, title=title, marked=True)
            html.picture(svg, "The newest evaluation of each finished cell.")

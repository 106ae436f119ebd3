"""Several runs on one page: losses over tokens, FLOPs and time, configuration differences, evaluations."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from lightscale.config.fields import shown_value
from lightscale.config.files import flat, load
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.output.html import Html
from lightscale.runs.run_directory import RunDirectory
from lightscale.study.counts import CellCounts, count
from lightscale.study.history import RunCurve, run_curve
from lightscale.study.report.pictures import Line, lines_picture
from lightscale.study.scores import Scores, newest_scores

_AXES = (("tokens", "tokens"), ("flops", "training FLOPs, including logits"), ("seconds", "seconds in kept steps"))
_LOSS = "loss, nats per token"


def make_comparison(paths: Sequence[Path], *, smoothing: float, now: datetime.datetime) -> str:
    """Make the page as HTML. Raises `UserError` if no run has a step yet."""
    names = _names(paths)
    runs = {name: RunDirectory(path) for name, path in zip(names, paths, strict=True)}
    configs = {name: load(run.config) for name, run in runs.items()}
    counts = {name: count(config) for name, config in configs.items()}
    curves = {
        name: curve
        for name, run in runs.items()
        if (curve := run_curve(run, counts[name], configs[name].step_tokens, smoothing=smoothing)) is not None
    }
    if not curves:
        raise UserError(f"{', '.join(map(str, paths))}: no run has a recorded step yet, so there is nothing to compare")
    html = Html(f"{len(runs)} runs")
    html.paragraph(
        f"Created by `lightscale compare` on {now:%Y-%m-%d}. Losses: measured. FLOPs, parameters: counted. The loss "
        f"at D tokens is read from a line through log loss over log D, fitted to the steps from D/{smoothing:g} to "
        f"{smoothing:g}·D. Steps repeated after a failure count once.",
        note=True,
    )
    _add_runs(html, counts, curves)
    for name, config in configs.items():
        if config.train.branch_from is not None:
            html.paragraph(f"{name} is a branch of {config.train.branch_from}: its curve begins there.")
    html.heading("Losses")
    for field, label in _AXES:
        lines = [
            Line(label=name, x=getattr(curve, field)[seen], y=curve.smoothed[seen])
            for name, curve in curves.items()
            if (seen := getattr(curve, field) > 0).any()
        ]
        html.picture(lines_picture(lines, x=label, y=_LOSS), f"Loss over {label}.")
    _add_differences(html, configs)
    _add_scores(html, {name: newest_scores(run) for name, run in runs.items()})
    return html.text()


def _names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as long as they are different; else the whole paths."""
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _add_runs(html: Html, counts: dict[str, CellCounts], curves: dict[str, RunCurve]) -> None:
    rows = []
    for name, counted in counts.items():
        row = [name, f"{counted.parameters:,}", f"{counted.embedding:,}"]
        if (curve := curves.get(name)) is None:
            rows.append([*row, "0", "—", "—", "—", "—"])
        else:
            step = f"{curve.step[-1]:,}/{counted.steps:,}"
            amounts = f"{curve.tokens[-1]:.4g}", f"{curve.flops[-1]:.4g}", f"{curve.seconds[-1]:,.0f}"
            rows.append([*row, step, *amounts, f"{curve.smoothed[-1]:.4f}"])
    html.table(("run", "N", "embedding", "step", "tokens", "FLOPs", "seconds", "loss"), rows)


def _add_differences(html: Html, configs: dict[str, RunConfig]) -> None:
    html.heading("Configuration differences")
    values = {name: flat(config) for name, config in configs.items()}
    keys = dict.fromkeys(key for one in values.values() for key in one)
    rows = []
    for key in keys:
        shown = [shown_value(one[key]) if key in one else "—" for one in values.values()]
        if len(set(shown)) > 1:
            rows.append([key, *shown])
    if rows:
        html.table(("key", *values), rows)
    else:
        html.paragraph("None.")


def _add_scores(html: Html, scores: dict[str, Scores]) -> None:
    names = sorted({(task, name) for one in scores.values() for task, values in one.items() for name in values})
    if not names:
        return
    html.heading("Evaluation")
    rows = []
    for task, name in names:
        values = [one.get(task, {}).get(name) for one in scores.values()]
        rows.append([f"{task}: {name}", *("—" if value is None else f"{value:.4g}" for value in values)])
    html.table(("score", *scores), rows)
    html.paragraph("Latest result of each task.", note=True)

#!/usr/bin/env python
"""The last validation of a study's cells, architectures beside validation sets: ``python tools/study_table.py STUDY``.

STUDY is the directory of a study with an axis ``architecture``. A cell counts when it has finished. The table is
printed as Markdown, with mean and range of the cells of an architecture and set (its seeds). STUDY/validation.json has
every value, also of cells whose runs are no longer there, and STUDY/validation.svg a panel for each set.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightscale.errors import UserError
from lightscale.runs.run_directory import RunDirectory, read_metrics, write_atomically
from plot_kernels import check_matplotlib

Losses = dict[str, dict[str, dict[str, float]]]
"""Validation set -> architecture -> cell -> nats per label."""
VALUES = "validation.json"
_PANELS_PER_ROW, _GREY, _COLOUR = 4, "#7f7f7f", "#2a7de1"


def collect(study: Path) -> Losses:
    """What the finished cells have measured last."""
    found: Losses = {}
    kept: Losses = json.loads(values.read_text("utf-8")) if (values := study / VALUES).exists() else {}
    for path in sorted((study / "cells").glob("*.json")):
        cell = json.loads(path.read_text(encoding="utf-8"))
        if "architecture" not in cell["values"]:
            raise UserError(f"{study}: the study has no axis architecture; use `lightscale study report`")
        architecture, run = cell["values"]["architecture"], RunDirectory(study / "runs" / cell["cell"])
        measured = [line["validation"] for line in read_metrics(run.metrics) if "validation" in line]
        losses = {name: scores["loss"] for name, scores in measured[-1].items()} if measured else {}
        if not run.path.exists():
            of_cell = {name: of_set.get(architecture, {}).get(cell["cell"]) for name, of_set in kept.items()}
            losses = {name: loss for name, loss in of_cell.items() if loss is not None}
        if not losses:
            raise UserError(f"{run.path}: no validation; set data.validation in the study")
        for name, loss in losses.items():
            found.setdefault(name, {}).setdefault(architecture, {})[cell["cell"]] = loss
    if not found:
        raise UserError(f"{study}: no cell has finished; use `lightscale study run`")
    return found


def table(found: Losses) -> str:
    """Rows of architectures, columns of sets; the best mean of each set is bold."""
    architectures = list(dict.fromkeys(name for of_set in found.values() for name in of_set))
    best = {name: min(map(_mean, of_set.values())) for name, of_set in found.items()}
    lines = [f"| | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for architecture in architectures:
        shown = []
        for name, of_set in found.items():
            losses = of_set.get(architecture, {})
            mean = f"{_mean(losses):.3f}" if losses else ""
            bold = f"**{mean}**" if losses and _mean(losses) == best[name] else mean
            spread = f" ({min(losses.values()):.3f} to {max(losses.values()):.3f})" if len(losses) > 1 else ""
            shown.append(bold + spread)
        lines.append(f"| {architecture.replace('_', '-')} | {' | '.join(shown)} |")
    return "\n".join(lines)


def draw(found: Losses, path: Path) -> None:
    """A panel for each set: every cell a point, their mean a line across."""
    # Optional, and slow to import. Figure instead of pyplot: there may be no display.
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    # Grey reads on light and dark pages.
    style: dict[Any, Any] = {
        "text.color": _GREY,
        "axes.labelcolor": _GREY,
        "axes.edgecolor": _GREY,
        "svg.hashsalt": "study",
    }
    with mpl.rc_context({**style, "xtick.color": _GREY, "ytick.color": _GREY}):
        columns = min(_PANELS_PER_ROW, len(found))
        rows = -(-len(found) // columns)
        figure = Figure(figsize=(3.0 * columns, 2.8 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
        for panel in panels[len(found) :]:
            panel.set_visible(False)
        architectures = list(dict.fromkeys(name for of_set in found.values() for name in of_set))
        for panel, (name, of_set) in zip(panels, found.items(), strict=False):
            for place, architecture in enumerate(architectures):
                losses = list(of_set.get(architecture, {}).values())
                panel.plot(losses, [place] * len(losses), ".", color=_COLOUR)
                if losses:
                    panel.plot([_mean(of_set[architecture])], [place], "|", color=_COLOUR, markersize=14)
            panel.set_title(name, fontsize=10)
            panel.set_yticks(range(len(architectures)), [name.replace("_", "-") for name in architectures])
            panel.grid(alpha=0.3)
            panel.patch.set_alpha(0)
        panels[0].invert_yaxis()
        figure.supxlabel("validation loss, nats per label", fontsize=10)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def _mean(losses: dict[str, float]) -> float:
    return statistics.mean(losses.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="study_table.py", description="Compare a study's last validation losses.")
    parser.add_argument("study", type=Path, metavar="STUDY", help="directory of the study")
    args = parser.parse_args(arguments)
    try:
        check_matplotlib()
        found = collect(args.study)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return UserError.EXIT_CODE
    write_atomically(args.study / VALUES, json.dumps(found, indent=1) + "\n")
    draw(found, args.study / "validation.svg")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Pathfinder by LION-S: whether a path joins two marks, in 32 x 32 pixels.

The images are those of `lightscale data pathfinder`, the runs are those of `lightscale train`. The first run learns
where a path leads from its only mark, of paths of several lengths. The second begins with its weights, and half of its
images have two marks. Judged are held-out images with two marks alone, of each length. That of Long Range Arena's hard
setting is 14, with 4 distractors.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.command import run_lightscale
from benchmarks.turns import positive
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.models.accounting import parameter_shapes
from lightscale.runs.run_directory import RunDirectory, read_metrics

RUN = "lion-s-pathfinder"
LENGTHS = (5, 8, 14)
HELD_OUT = 2000


def train(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Accuracies of the held-out images over the steps. UserError: a command failed; it has said why."""
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True, parents=True)
        stack.enter_context(contextlib.chdir(folder))
        for length in LENGTHS:
            _make(f"ends-{length}", length, args.documents, 0, ["--traced", "1", "--seed", "1"])
            _make(f"traced-{length}", length, args.documents, 0, ["--traced", "0.5"])
            _make(f"held-out-{length}", length, 1, args.held_out, ["--seed", "2"])
        held = [f"data.validation.length-{length}.sequences={args.held_out}" for length in LENGTHS]
        # What it validates has two marks, which it has not seen.
        first = [f"train.steps={args.first_steps}", f"optimizer.decay_steps={max(1, args.first_steps // 10)}"]
        first += [
            "train.validate_every=0",
            *(f"data.stores.traced-{length}.path=data/ends-{length}" for length in LENGTHS),
        ]
        _train("ends", [*held, *args.overrides, *first])
        _train("run", [*held, *args.overrides, f"train.init_from=ends@{args.first_steps}"])
        yield figures_of(Path("run"))


def _train(run: str, overrides: list[str]) -> None:
    """A run that is finished is not trained again, and one that was interrupted goes on."""
    run_lightscale("train", RUN, "--run", run, "--processes", "1", *overrides)


def _make(name: str, length: int, documents: int, validation: int, options: list[str]) -> None:
    """A store that is there stays."""
    if Path(f"data/{name}").exists():
        return
    counts = ["--documents", str(documents), "--validation", str(validation)]
    words = ["--images", "--contour-length", str(length), *counts, *options]
    run_lightscale("data", "pathfinder", *words, "--out", f"data/{name}")


def figures_of(path: Path) -> dict[str, Any]:
    """Of a run, also of one that is not finished: parameters, images read, accuracies at each validation."""
    config = load(path / "config.toml")
    lines = [line for line in read_metrics(RunDirectory(path).metrics) if "validation" in line]
    if not lines:
        raise UserError(f"{path}: no step has been validated; train on")
    curve = [
        {"step": line["step"], **{name: found["accuracy"] for name, found in line["validation"].items()}}
        for line in lines
    ]
    return {
        "parameters": sum(prod(shape) for shape in parameter_shapes(config.model).values()),
        "images_per_step": config.train.global_batch_size,
        "curve": curve,
    }


def table(figures: dict[str, Any]) -> Table:
    """For people."""
    curve = figures["curve"]
    made = Table(caption=f"top-1 accuracy on held-out images; {figures['parameters']:,} parameters")
    for name in curve[-1]:
        made.add_column(name, justify="right")
    for one in curve:
        made.add_row(f"{one['step']:,}", *(f"{value:.1%}" for name, value in one.items() if name != "step"))
    return made


def draw(figures: dict[str, Any], path: Path) -> None:
    """Accuracies over the steps."""
    # Optional, and slow to import. Figure instead of pyplot: there may be no display.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes, curve = figure.subplots(), figures["curve"]
    for name in curve[-1]:
        if name != "step":
            axes.plot([one["step"] for one in curve], [one[name] for one in curve], label=name)
    axes.axhline(0.5, color="gray", linewidth=0.8)
    axes.set_xlabel(f"steps of {figures['images_per_step']} images")
    axes.set_ylabel("accuracy, held-out images")
    axes.legend(fontsize=8)
    figure.suptitle(f"Pathfinder, 32 x 32 pixels, LION-S, {figures['machine']['date']}", fontsize=10)
    figure.savefig(path, dpi=120)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``bench.py pathfinder``."""
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help=f"of {RUN}, such as train.steps=4000")
    add("--first-steps", type=positive, default=900, metavar="N", help="steps of the first run (900)")
    add("--documents", type=positive, default=50_000, metavar="N", help="training images of each length (50000)")
    add("--held-out", type=positive, default=HELD_OUT, metavar="N", help=f"held-out images of each length ({HELD_OUT})")
    kept = "where its stores and its run are kept; the same folder goes on (default: none are)"
    add("--folder", type=Path, help=kept)

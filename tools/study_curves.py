#!/usr/bin/env python
"""Validation of a study's runs, loss and accuracy: ``python tools/study_curves.py STUDY``.

STUDY is the directory of a study whose cells are named by a seed and an architecture (``seed0-lion_s``). What the runs
have recorded of validation is put side by side; of masked models the last weights are also measured on rows that are
longer than those of training. There every row holds the same text, and the same tokens of it are hidden: masks are
those of rows of the training length, beside one another. STUDY/validation.json and STUDY/validation.png are written.
Runs that have not finished are skipped; what was measured of a run is not measured again.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightscale.config.tasks import task_class
from lightscale.data_pipeline.loading.loader import LoaderLayout, validation_batches
from lightscale.data_pipeline.loading.targets import Predicted, Targets, WholeRows
from lightscale.data_pipeline.store.several_stores import open_stores
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import ChosenRun, choose_run
from lightscale.evaluation.model import mesh_of
from lightscale.runs.run_directory import RunDirectory, read_metrics, write_atomically
from lightscale.tasks.masked import Masked
from lightscale.training.build import build_engine
from lightscale.training.checkpoints.restore import Checkpoints
from plot_kernels import check_matplotlib

TIMES_LONGER = (1, 2, 4, 8)
"""Rows that are measured, in lengths of training."""
_ROWS_AT_ONCE_TOKENS = 2048
_SCORES = ("loss", "accuracy")
Found = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class MasksOfParts:
    """``Targets`` whose rows are several of ``length`` tokens in a row, as what is hidden in them goes."""

    targets: Targets
    length: int

    def __call__(self, rows: WholeRows) -> Predicted:
        """See ``Targets``."""
        tokens, counted, places, documents = rows
        shape = tokens.shape
        of_parts = (places[:, None] + np.arange(0, shape[1], self.length)).ravel()
        parts = (tokens.reshape(-1, self.length), counted.reshape(-1, self.length))
        of_each = self.targets(WholeRows(*parts, of_parts, documents))
        inputs, labels, counted = of_each
        return Predicted(inputs.reshape(shape), labels.reshape(shape), counted.reshape(shape))

    def description(self) -> str:
        """See ``Targets``."""
        return f"{self.targets.description()} by {self.length}"


def at_lengths(chosen: ChosenRun) -> dict[str, dict[str, float]]:
    """Loss and accuracy by the length of the rows, of the last weights of a masked model."""
    config = chosen.config
    if getattr(config.task, "whole_word_mask", False):
        raise UserError(f"{chosen.directory.path}: task.whole_word_mask = true: words can cross the edges of parts")
    length = config.data.sequence_length
    ((_, validation),) = config.data.validation.items()
    store = TokenStore(validation.store) if validation.store else open_stores(config.data)
    task = Masked(config.task)  # type: ignore[arg-type]
    masks = MasksOfParts(targets=task.targets(store, validation=True), length=length)
    found = {}
    with mesh_of(config) as mesh:
        engine = build_engine(config, mesh, vocab_size=chosen.tokenizer.vocab_size, trainable=False)
        Checkpoints(chosen.directory.checkpoints, mesh, parts=["data"]).restore(engine, weights_only=True)
        for tokens in (times * length for times in TIMES_LONGER):
            batches = validation_batches(
                store.source(validation.source),
                sequence_length=tokens,
                num_sequences=validation.sequences * length // tokens,
                micro_batch_size=max(1, _ROWS_AT_ONCE_TOKENS // tokens),
                layout=LoaderLayout(),
                targets=masks,
            )
            sums = engine.forward_only([batch.to(mesh.device) for batch in batches], top=(1,))
            (accuracy,) = sums.accuracies
            found[str(tokens)] = {"loss": sums.mean, "accuracy": accuracy, "predicted": sums.tokens}
    return found


def collect(study: Path, found: Found) -> Found:
    """What is known of every run that has finished; ``found`` is what was known before."""
    finished = sorted(path.stem for path in (study / "cells").glob("*.json"))
    if not finished:
        raise UserError(f"{study}: no cell has finished; use `lightscale study run`")
    for name in [name for name in finished if name not in found]:
        seed, _, architecture = name.partition("-")
        run = RunDirectory(study / "runs" / name)
        chosen = choose_run(run.path, any_task=True)
        measured = [line for line in read_metrics(run.metrics) if "validation" in line]
        ((_, last),) = measured[-1]["validation"].items()
        if not last.keys() >= set(_SCORES):
            raise UserError(f"{run.path}: task {chosen.config.task.name!r} has no accuracy; use `lightscale compare`")
        curve = [{"step": x["step"], "tokens": x["tokens"]} | only(x["validation"]) for x in measured]
        found[name] = {"seed": seed, "architecture": architecture, "task": chosen.config.task.name, "curve": curve}
        if task_class(chosen.config.task.name) is Masked:
            found[name]["by_length"] = at_lengths(chosen)
        print(f"{name}: " + ", ".join(f"{score} {last[score]:.4f}" for score in _SCORES), file=sys.stderr, flush=True)
    return found


def only(sets: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The scores of the one validation set."""
    ((_, scores),) = sets.items()
    return {score: scores[score] for score in _SCORES}


def draw(found: Found, path: Path) -> None:
    """Loss and accuracy over tokens, and over the length of rows where measured: mean and range of the seeds."""
    # Optional, and slow to import. Figure instead of pyplot: there may be no display.
    from matplotlib.figure import Figure  # noqa: PLC0415

    columns = {"tokens": "million training tokens"}
    if any("by_length" in one for one in found.values()):
        columns["length"] = "tokens of a row in validation"
    figure = Figure(figsize=(4.8 * len(columns), 6.5), layout="constrained")
    panels = figure.subplots(len(_SCORES), len(columns), squeeze=False, sharey="row")
    architectures = dict.fromkeys(one["architecture"] for one in found.values())
    for row, score in zip(panels, _SCORES, strict=True):
        for axes, column in zip(row, columns, strict=True):
            for number, architecture in enumerate(architectures):
                curves = [points(one, column, score) for one in found.values() if one["architecture"] == architecture]
                # Where all seeds have a point.
                xs = sorted(set.intersection(*(set(curve) for curve in curves)))
                values = [[curve[x] for curve in curves] for x in xs]
                label, color = f"{architecture.replace('_', '-')}, {len(curves)} seeds", f"C{number}"
                shown = [x / 1e6 for x in xs] if column == "tokens" else xs
                axes.plot(shown, [statistics.mean(x) for x in values], marker=".", color=color, label=label)
                axes.fill_between(shown, [min(x) for x in values], [max(x) for x in values], color=color, alpha=0.2)
            axes.grid(alpha=0.3)
            if column == "length":
                axes.set_xscale("log", base=2)
                axes.set_xticks(xs, [str(x) for x in xs])
        row[0].set_ylabel(f"validation {score}{', nats per prediction' if score == 'loss' else ''}")
    for axes, label in zip(panels[-1], columns.values(), strict=True):
        axes.set_xlabel(label)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)


def points(one: dict[str, Any], column: str, score: str) -> dict[int, float]:
    """A score of a run over training tokens, or over the length of rows."""
    if column == "tokens":
        return {x["tokens"]: x[score] for x in one["curve"]}
    return {int(length): x[score] for length, x in one.get("by_length", {}).items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="study_curves.py", description=("Compare the validation curves of a study's runs.")
    )
    parser.add_argument("study", type=Path, metavar="STUDY", help="directory of the study")
    args = parser.parse_args(arguments)
    path = args.study / "validation.json"
    try:
        check_matplotlib()
        found = collect(args.study, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return UserError.EXIT_CODE
    write_atomically(path, json.dumps(found, indent=1) + "\n")
    draw(found, path.with_suffix(".png"))
    print(f"written: {path}, {path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

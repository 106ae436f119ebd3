"""``lightscale data trace``: the documents of a loss spike, checked and printed without torch."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lightscale.config.arguments import require_run
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import ChosenRun, choose_run
from lightscale.evaluation.trace.lines import find_lines
from lightscale.evaluation.trace.spikes import Spike, find_spikes
from lightscale.output.terminal import plain_console
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.checkpoints.directories import list_checkpoints, steps_of

_PIPE_WIDTH = 500


def run(args: argparse.Namespace) -> int:
    """Print the spikes of a run, or the documents of one; ``UserError`` for a step that the run does not have."""
    require_run(args.run)
    if args.spike is None:
        return _list(args)
    chosen, refused = _before(args.run, args.spike)
    print("loading PyTorch and Megatron …", file=sys.stderr, flush=True)
    losses = importlib.import_module("lightscale.evaluation.trace.losses")
    found = losses.step_losses(chosen, args.spike)
    documents = losses.worst_first(found.documents)
    shown = documents if args.top is None else documents[: args.top]
    origins = [one.part.origin for one in shown if one.part.origin is not None]
    lines = find_lines(origins, args.files)
    rows = [_row(one, lines) for one in shown]
    if args.json:
        result = {
            "run": str(args.run),
            "step": args.spike,
            "checkpoint_step": chosen.step,
            "loss": found.loss,
            "recorded": _recorded(args.run, args.spike),
            "documents": rows,
        }
        print(json.dumps(result))
        return 0
    console = plain_console(soft_wrap=True)
    if not console.is_terminal:  # a program reads it: a row is a line
        console.width = _PIPE_WIDTH
    console.print(
        f"step {args.spike}: {len(found.documents):,} documents in {len(found.content.samples):,} sequences; mean loss "
        f"{found.loss:.4f} with the weights after step {chosen.step}{refused}; {_said(_recorded(args.run, args.spike))}"
    )
    console.print(_table(rows))
    if any(one.part.origin is None for one in shown):
        console.print("documents without a file are from a store without origins (images, or format 1)")
    elif any(row["line"] is None and row["first_byte"] is not None for row in rows):
        console.print(f"line numbers need the files below --files DIR (now {args.files}); bytes are shown for all")
    return 0


def _before(run: Path, step: int) -> tuple[ChosenRun, str]:
    """The newest checkpoint before the step, or else the oldest; and what is to be said of it."""
    chosen = choose_run(run, overrides=["train.device=auto"], any_task=True)
    if not 1 <= step <= chosen.config.total_steps:
        raise UserError(f"--spike {step}: {run} has steps 1 to {chosen.config.total_steps}")
    names = list_checkpoints(chosen.directory.checkpoints)
    before = [name.step for name in names if name.step < step]
    nearest = max(before) if before else names[0].step
    note = "" if nearest == step - 1 else f", the nearest stored checkpoint (steps {steps_of(names)})"
    return choose_run(run, step=nearest, overrides=["train.device=auto"], any_task=True), note


def _list(args: argparse.Namespace) -> int:
    directory = RunDirectory(args.run)
    config = load(directory.config)
    spikes = list(find_spikes(directory, config.guard))
    if args.json:
        print(json.dumps({"run": str(args.run), "spikes": [asdict(spike) for spike in spikes]}))
        return 0
    console = plain_console(soft_wrap=True)
    if not spikes:
        console.print(f"{args.run}: no skipped step, and no loss far above the median of earlier steps")
        return 0
    table = Table("step", "loss", "median before", "skipped, because")
    for spike in spikes:
        table.add_row(str(spike.step), _number(spike.loss), _number(spike.usual), Text(spike.skipped or "no"))
    console.print(table)
    console.print(f"lightscale data trace {args.run} --spike {spikes[0].step} lists the documents of one")
    return 0


def _recorded(run: Path, step: int) -> dict[str, Any] | None:
    """What the run's records say of the step, if it is a spike."""
    directory = RunDirectory(run)
    config = load(directory.config)
    found: list[Spike] = [spike for spike in find_spikes(directory, config.guard) if spike.step == step]
    return asdict(found[0]) if found else None


def _said(recorded: dict[str, Any] | None) -> str:
    if recorded is None:
        return "the records show no spike at this step"
    return f"recorded loss {_number(recorded['loss'])}" + (
        f", skipped: {recorded['skipped']}" if recorded["skipped"] else ""
    )


def _row(one: Any, lines: dict[tuple[str, int], int]) -> dict[str, Any]:
    origin = one.part.origin
    return {
        "loss": one.loss,
        "labels": one.labels,
        "sample": one.sample,
        "source": one.source,
        "document": one.part.document,
        "start": one.part.start,
        "stop": one.part.stop,
        "file": None if origin is None else origin.file,
        "line": None if origin is None else lines.get((origin.file, origin.first_byte)),
        "first_byte": None if origin is None else origin.first_byte,
        "num_bytes": None if origin is None else origin.num_bytes,
        "row": None if origin is None else origin.row,
        "id": None if origin is None else origin.id,
    }


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("loss", "labels", "sample", "source", "document", "tokens of the document", "file", "line", "place")
    for column in table.columns[:-3]:
        column.no_wrap = True
    for row in rows:
        table.add_row(
            _number(row["loss"]),
            f"{row['labels']}",
            f"{row['sample']}",
            row["source"],
            f"{row['document']}",
            f"{row['start']} to {row['stop']}",
            Text(row["file"] or "not known"),
            "" if row["line"] is None else f"{row['line']}",
            Text(_place(row)),
        )
    return table


def _place(row: dict[str, Any]) -> str:
    if row["file"] is None:
        return ""
    place = (
        f"row {row['row']}"
        if row["first_byte"] is None
        else f"bytes {row['first_byte']} to {row['first_byte'] + row['num_bytes']}"
    )
    return f"{place} ({row['id']})" if row["id"] else place


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"

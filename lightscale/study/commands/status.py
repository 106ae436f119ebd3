"""``lightscale study status``: show the progress of a study's cells."""

import argparse
import json
import math
import time
from collections import Counter
from dataclasses import asdict, dataclass

from rich.console import Group
from rich.text import Text

from lightscale.errors import UserError
from lightscale.launch.commands.runs import RunReader
from lightscale.output.terminal import plain_console, plain_table, watch
from lightscale.runs.goodput import duration
from lightscale.study.cells import Cell
from lightscale.study.commands.arguments import add_study, the_study
from lightscale.study.runner import recorded_failures
from lightscale.study.study import Study

_LEAST_WATCH_S = 0.2


@dataclass(frozen=True, kw_only=True)
class CellStatus:
    """A line of the table."""

    name: str
    state: str
    """finished, running, stopped (a new start continues it), failed, lost (stopped by the search), waits for others
    (at a rung), waits for the sweep, or new."""
    step: int
    steps: int
    loss: float | None
    tokens_per_s: float | None
    left_s: float | None
    """Remaining time of a running cell, at its present speed."""
    note: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    add_study(parser)
    parser.add_argument(
        "--watch", type=float, nargs="?", const=2.0, metavar="S", help="refresh every S seconds (default: 2)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.epilog = (
        "States: new; running; finished; stopped: a new start continues it; failed; waits for the sweep, or for others "
        "at a rung; lost: another trial went on from this rung."
    )


def run(args: argparse.Namespace) -> int:
    """Print the table once, or until Ctrl-C."""
    if args.watch is not None and not args.watch >= _LEAST_WATCH_S:
        raise UserError(f"--watch {args.watch}: must be at least {_LEAST_WATCH_S} s")
    study = the_study(args)
    study.require()
    view = _View(study)
    if args.json:
        print(json.dumps({"study": str(study.path), "cells": [asdict(one) for one in view.statuses()]}))
        return 0
    console = plain_console(least_width=100)
    if args.watch is None:
        console.print(_shown(study, view.statuses()))
    else:
        watch(lambda: _shown(study, view.statuses()), args.watch, console)
    return 0


class _View:
    """The cells, looked at again and again."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._readers: dict[str, RunReader] = {}

    def statuses(self) -> list[CellStatus]:
        failures = recorded_failures(self._study)
        return [self._status(cell, failures.get(cell.name, "")) for cell in self._study.cells()]

    def _status(self, cell: Cell, failure: str) -> CellStatus:
        steps, run = cell.config.total_steps, self._study.run(cell)
        record = self._study.finished_record(cell)
        if record is not None:
            return _line(cell, "finished", step=record["step"], loss=record["smoothed"])
        if (score := self._study.score(cell)) is not None and (cell.stopped is not None or cell.is_pending):
            loss = score.loss if math.isfinite(score.loss) else None
            state = "waits for others" if cell.stopped is None else "lost"
            return _line(cell, state, step=score.step, loss=loss, note=cell.stopped or "")
        if not run.config.exists():
            state = "waits for the sweep" if cell.is_pending else "failed" if failure else "new"
            return _line(cell, state, note=failure)
        reader = self._readers.setdefault(cell.name, RunReader(run))
        summary = reader.summary(time.time())
        states = {"running": "running", "finished": "finished", "stopped": "failed", "damaged": "failed"}
        state = states.get(summary.state, "failed" if failure and not summary.step else "stopped")
        if state == "finished" and cell.trial is not None:
            # It has ended at an earlier rung.
            state = "stopped"
        left_s = None
        if state == "running" and summary.tokens_per_s:
            left_s = (cell.config.total_tokens - cell.config.step_tokens.after(summary.step)) / summary.tokens_per_s
        return CellStatus(
            name=cell.name,
            state=state,
            step=summary.step,
            steps=steps,
            loss=summary.smoothed_loss,
            tokens_per_s=summary.tokens_per_s,
            left_s=left_s,
            note="" if state in ("running", "finished") else summary.note or failure,
        )


def _line(cell: Cell, state: str, *, step: int = 0, loss: float | None = None, note: str = "") -> CellStatus:
    return CellStatus(
        name=cell.name,
        state=state,
        step=step,
        steps=cell.config.total_steps,
        loss=loss,
        tokens_per_s=None,
        left_s=None,
        note=note,
    )


def _shown(study: Study, statuses: list[CellStatus]) -> Group:
    table = plain_table(("cell", "state"), ("step", "loss", "tokens/s", "left"))
    for one in statuses:
        table.add_row(
            one.name,
            one.state,
            f"{one.step:,}/{one.steps:,}",
            "—" if one.loss is None else f"{one.loss:.4f}",
            "—" if one.tokens_per_s is None else f"{one.tokens_per_s:,.0f}",
            "—" if one.left_s is None else duration(max(0.0, one.left_s)),
        )
    counted = Counter(one.state for one in statuses)
    lines = [Text(f"{one.name}: {one.note}") for one in statuses if one.note]
    sums = ", ".join(f"{count} {state}" for state, count in counted.items())
    return Group(table, *lines, Text(f"{study.path}: {len(statuses)} cells: {sums}"))

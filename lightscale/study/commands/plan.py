"""``lightscale study plan``: size and cost of a study's cells."""

import argparse
import dataclasses
import json
from typing import Any

from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.files import size_text
from lightscale.output.terminal import plain_console, plain_table
from lightscale.planning.hardware import H100
from lightscale.planning.search import MOST_NODES, Fixed, best_layouts, run_seconds
from lightscale.study.cells import Cell
from lightscale.study.commands.arguments import add_study, the_study
from lightscale.study.counts import CellCounts
from lightscale.study.study import Study

_CHANGE_NO_HOURS = {"optimizer": {"lr"}, "train": {"seed"}}
"""Keys without effect on predictions, which are then reused; a search of layouts takes a second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    add_study(parser)
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="predict the hours of each cell on N nodes of 8 H100 in its best layout"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print a line per cell, and the sums."""
    if args.nodes is not None and not 1 <= args.nodes <= MOST_NODES:
        raise UserError(f"--nodes {args.nodes}: must be 1 to {MOST_NODES}")
    study = the_study(args)
    cells = study.cells()
    hours = _all_hours(cells, args.nodes) if args.nodes else {}
    records = [_record(study, cell, hours.get(cell.name)) for cell in cells]
    if args.json:
        totals = {
            "cells": len(cells),
            "tokens": sum(one["tokens"] for one in records),
            "flops": sum(one["flops"] for one in records),
            "kept_bytes": sum(one["kept_bytes"] for one in records),
        }
        if hours and all(value is not None for value in hours.values()):
            totals["hours"] = sum(value for value in hours.values() if value is not None)
        if (halved := _with_stops(study)) is not None:
            totals |= {"tokens_with_stops": halved[0], "flops_with_stops": halved[1]}
        print(json.dumps({"study": study.definition.name, "nodes": args.nodes, "cells": records, "total": totals}))
    else:
        _show(study, cells, hours, args.nodes)
    return 0


def _with_stops(study: Study) -> tuple[int, float] | None:
    """Tokens and FLOPs of a search where its rungs stop trials; None: they stop none."""
    search, halving = study.definition.search, study.halving
    if search is None or halving is None or search.method != "successive_halving":
        return None
    cells = {cell.name: cell for cell in study.cells()}
    tokens, flops = 0.0, 0.0
    for group in halving.groups:
        every = [cells[name] for names in group.cells.values() for name in names]
        competing, before = len(group.cells), 0
        for step in group.rungs:
            # Which trials go on is not known: the mean of all.
            share = competing / len(group.cells)
            for cell in every:
                of_cell = cell.config.step_tokens.after(step) - cell.config.step_tokens.after(before)
                tokens += share * of_cell
                flops += share * of_cell * study.counts(cell).flops_per_token
            competing, before = halving.num_kept(competing), step
    return round(tokens), flops


def _all_hours(cells: list[Cell], nodes: int) -> dict[str, float | None]:
    known: dict[str, float | None] = {}
    hours = {}
    for cell in cells:
        relevant = cell.config.model_dump_json(exclude=_CHANGE_NO_HOURS)
        if relevant not in known:
            known[relevant] = _hours(cell.config, nodes)
        hours[cell.name] = known[relevant]
    return hours


def _hours(config: RunConfig, nodes: int) -> float | None:
    """Predicted for the whole run; None: no layout of it fits."""
    found = best_layouts(config, nodes=nodes, sequence_length=config.data.sequence_length, hardware=H100, fixed=Fixed())
    if not found or not found[0].fits:
        return None
    return run_seconds(config, found[0], H100) / 3600


def _record(study: Study, cell: Cell, hours: float | None) -> dict[str, Any]:
    counts = study.counts(cell)
    return {
        "name": cell.name,
        "part": cell.part,
        "values": dict(cell.values),
        "waits_for_sweep": cell.waits_for_sweep,
        **dataclasses.asdict(counts),
        "flops": counts.flops,
        "pflop_days": counts.compute,
        "paper_pflop_days": counts.paper_compute,
        "hours": hours,
    }


def _show(study: Study, cells: list[Cell], hours: dict[str, float | None], nodes: int | None) -> None:
    headings = ["N", "embedding", "steps", "tokens", "FLOPs", "PFLOP-days", "by the paper", "kept"]
    table = plain_table(["cell"], [*headings, *(["hours"] if nodes else [])])
    for cell in cells:
        more = [_hours_text(hours[cell.name])] if nodes else []
        table.add_row(cell.name, *_cells(study.counts(cell)), *more)
    console = plain_console(least_width=130)
    console.print(table)
    every = [study.counts(cell) for cell in cells]
    sweep, pending = study.definition.sweep, sum(cell.waits_for_sweep for cell in cells)
    console.print(
        f"{len(cells):,} cells, {sum(one.tokens for one in every):.3g} tokens, {sum(one.flops for one in every):.3g} "
        f"FLOPs, {size_text(sum(one.kept_bytes for one in every))} kept"
    )
    if (halved := _with_stops(study)) is not None:
        console.print(
            f"With the stops of successive halving: {halved[0]:.3g} tokens, {halved[1]:.3g} FLOPs; "
            f"{'hours and ' if nodes else ''}kept bytes are those of all trials at their end"
        )
    if nodes:
        known = [value for value in hours.values() if value is not None]
        rest = f"; {len(hours) - len(known)} do not fit in any layout" if len(known) < len(hours) else ""
        console.print(
            f"{sum(known):,.0f} h on {nodes} node{'s' * (nodes > 1)} of 8 H100, one cell after the other, predicted by "
            f"a cost model{rest}"
        )
    if sweep is not None and pending:
        console.print(f"{pending:,} cells wait for the sweep of {sweep.key}")
    console.print(
        "N: parameters without the embedding. FLOPs: all matrix products of training, including logits. By the paper: "
        "PFLOP-days as counted in arXiv 2406.16690, without logits. Kept: checkpoints at the end."
    )


def _cells(counts: CellCounts) -> list[str]:
    return [
        f"{counts.parameters:,}",
        f"{counts.embedding:,}",
        f"{counts.steps:,}",
        f"{counts.tokens:.3g}",
        f"{counts.flops:.3g}",
        f"{counts.compute:.3g}",
        "—" if counts.paper_compute is None else f"{counts.paper_compute:.3g}",
        size_text(counts.kept_bytes),
    ]


def _hours_text(hours: float | None) -> str:
    return "does not fit" if hours is None else f"{hours:,.1f}"

"""``lightscale plan``: predictions for a run without building its model; the study's table of sizes.

``--nodes`` predicts speed (`scaling`), ``--failures`` predicts goodput (`failures`), ``--trace`` records (`trace`).
"""

import argparse
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.padding import Padding
from rich.table import Table

from lightscale.config import shipped
from lightscale.config.arguments import add_config, add_overrides
from lightscale.config.files import load
from lightscale.config.model import ModelConfig
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError, counted
from lightscale.output.terminal import plain_console, plain_table
from lightscale.planning.commands import failures, scaling, trace
from lightscale.planning.memory import assumptions
from lightscale.planning.plan import Parameters, RunPlan, StateExchangeSize, plan
from lightscale.planning.published import TABLE_1, Comparison, StudyRow, study_table

EXIT_DISAGREES = 1
_STUDY = "the study (arXiv 2406.16690)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale plan``."""
    add_config(parser, "; with --study: a folder of runs", nargs="?")
    add_overrides(parser)
    parser.add_argument(
        "--processes", type=int, metavar="N", help="number of ranks (default: the least of the configured layout)"
    )
    parser.add_argument(
        "--study",
        action="store_true",
        help="compare sizes and architectures with Table 7 of the scaling-law study (default: the shipped ones)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    scaling.add_arguments(parser)
    failures.add_arguments(parser)
    trace.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan, the study's table, or a prediction.

    Returns 1 if the table disagrees with the published one, or if no layout fits on any number of nodes.
    """
    kinds = {
        "--study": args.study,
        "--nodes": args.nodes is not None,
        "--failures": args.failures,
        "--trace": args.trace,
    }
    if sum(kinds.values()) > 1:
        raise UserError(f"{' and '.join(kind for kind, is_given in kinds.items() if is_given)}: use only one of them")
    if args.nodes is None:
        scaling.refuse_without_nodes(args)
    if not args.failures:
        failures.refuse_without_failures(args)
    if not args.trace:
        trace.refuse_without_trace(args)
    if args.study:
        return _study(args)
    if args.config is None:
        raise UserError("no CONFIG given; name a TOML file or a shipped run, or use --study for the study's table")
    if args.nodes is not None:
        return scaling.run(args)
    if args.failures:
        return failures.run(args)
    if args.processes is not None and args.processes < 1:
        raise UserError(f"--processes {args.processes}: must be at least 1")
    if args.trace:
        return trace.run(args)
    config = load(args.config, args.overrides)
    planned = plan(config, args.processes)
    if args.json:
        print(json.dumps({"config": str(args.config), **_record(config, planned)}, indent=2))
    else:
        _show(args.config, config, planned)
    return 0


def _record(config: RunConfig, planned: RunPlan) -> dict[str, Any]:
    parameters, memory = planned.parameters, planned.memory
    return {
        "layout": {**dataclasses.asdict(planned.layout), "processes": planned.layout.world_size},
        "parameters": {**dataclasses.asdict(parameters), "rest": parameters.rest, "total": parameters.total},
        "training_flops_per_step": {"study": planned.study_flops, "mfu": planned.mfu_flops},
        "run": {
            "tokens_per_step": planned.tokens_per_step,
            "steps": planned.steps,
            "tokens": planned.tokens,
            "equal_steps": [{"steps": steps, "tokens_per_step": tokens} for steps, tokens in planned.equal_steps],
        },
        "memory": {
            **dataclasses.asdict(memory),
            "total_bytes": memory.total_bytes,
            "assumptions": assumptions(config),
        },
        "state_exchange": [dataclasses.asdict(exchange) for exchange in planned.exchanges],
    }


def _show(path: Path, config: RunConfig, planned: RunPlan) -> None:
    # Wider than a pipe's 80 columns, so that no line of numbers is broken.
    console = plain_console(least_width=110)
    layout = planned.layout
    axes = ", ".join(f"{axis} {getattr(layout, axis)}" for axis in ("tensor", "pipeline", "sequence", "data"))
    console.print(f"{path} on {counted(layout.world_size, 'process', 'processes')}: {axes}\n")
    console.print(_table(("parameters", "", ""), _parameter_lines(planned.parameters, config.model)))
    console.print(_table(("training FLOPs per step", "", ""), _flops_lines(planned)))
    lines = [("tokens per step", planned.tokens_per_step), ("steps", planned.steps), ("tokens", planned.tokens)]
    if len(planned.equal_steps) > 1:
        lines += [(f"steps of {tokens:,} tokens", steps) for steps, tokens in planned.equal_steps]
    console.print(_table(("run", "", ""), [(name, f"{count:,}", "") for name, count in lines]))
    stages = f", stage {planned.memory.stage + 1} of {layout.pipeline}" if layout.pipeline > 1 else ""
    console.print(_table((f"memory per rank{stages}", "GiB", ""), _memory_lines(planned)))
    exchange = ("state exchange of a rank", "bytes", "per layer and micro-batch: forward / backward pass")
    console.print(_table(exchange, _exchange_lines(planned)))
    console.print("Memory is an estimate. Assumptions:")
    for sentence in assumptions(config):
        console.print(Padding(sentence, (0, 0, 0, 2), expand=False))


def _parameter_lines(parameters: Parameters, model: ModelConfig) -> Iterable[tuple[str, str, str]]:
    output = "shared with the output layer" if model.tie_word_embeddings else "and output layer"
    yield "embedding", f"{parameters.embedding:,}", output if model.head is None else ""
    for name, count in parameters.terms.items():
        yield name, f"{count:,}", f"not counted by {_STUDY}" if name in parameters.only_exact else ""
    yield "outside the embedding", f"{parameters.rest:,}", "all parameters of the built model"
    study = "—" if parameters.study is None else f"{parameters.study:,}"
    yield "", study, f"as counted in {_STUDY}" if parameters.study is not None else f"{_STUDY} has no such model"
    yield "total", f"{parameters.total:,}", ""


def _flops_lines(planned: RunPlan) -> Iterable[tuple[str, str, str]]:
    mfu = "all matrix products of the model, including logits"
    yield "for MFU", f"{planned.mfu_flops:.4g}", mfu
    if planned.study_flops is None:
        yield "of the study", "—", f"{_STUDY} has no such model"
    else:
        yield "of the study", f"{planned.study_flops:.4g}", f"as counted in {_STUDY}, without logits"


def _memory_lines(planned: RunPlan) -> Iterable[tuple[str, str, str]]:
    memory = planned.memory
    yield "weights", _gib(memory.weights_bytes), f"{memory.parameters:,} parameters on this rank"
    trained = "" if memory.trained == memory.parameters else f"of {memory.trained:,} parameters of adapters"
    yield "gradients", _gib(memory.gradients_bytes), trained
    yield "optimizer", _gib(memory.optimizer_bytes), ""
    tokens = planned.layout.micro_batch_size * planned.layout.rank_sequence_tokens
    yield "activations", _gib(memory.activations_bytes), f"{tokens:,} tokens at a time"
    if memory.exchange_bytes:
        yield "exchange of states", _gib(memory.exchange_bytes), ""
    if memory.teacher_bytes:
        yield "teacher", _gib(memory.teacher_bytes), "frozen: weights and answers"
    yield "logits", _gib(memory.logits_bytes), "during the loss"
    yield "backward pass of a block", _gib(memory.block_bytes), "after the loss: the larger of the two counts"
    yield "total", _gib(memory.total_bytes), ""


def _exchange_lines(planned: RunPlan) -> Iterable[tuple[str, str, str]]:
    for exchange in planned.exchanges:
        where = _layers_of(exchange)
        if exchange.forward_bytes is None:
            yield where, "—", "no state of constant size: grows with the sequence"
        else:
            both = f"{exchange.forward_bytes:,} / {exchange.backward_bytes:,}"
            yield where, both, "" if planned.layout.sequence > 1 else "if parallel.sequence > 1"


def _layers_of(exchange: StateExchangeSize) -> str:
    if exchange.layers is None:
        return f"{exchange.mixer}, once"
    first, last = exchange.layers
    return f"{exchange.mixer}, layer {first}" if first == last else f"{exchange.mixer}, layers {first} to {last}"


def _table(headings: tuple[str, str, str], lines: Iterable[tuple[str, str, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(headings[0], no_wrap=True, min_width=26)
    table.add_column(headings[1], no_wrap=True, justify="right", min_width=20)
    table.add_column(headings[2])
    for line in lines:
        table.add_row(*line)
    return table


def _study(args: argparse.Namespace) -> int:
    if args.overrides or args.processes is not None:
        raise UserError("--study takes no overrides and no --processes; remove them")
    rows = study_table(args.config or shipped.FOLDER)
    if args.json:
        print(json.dumps([_study_record(row) for row in rows], indent=2))
    else:
        _show_study(rows)
    return 0 if all(row.agrees for row in rows) else EXIT_DISAGREES


def _study_record(row: StudyRow) -> dict[str, Any]:
    return {
        "architecture": row.architecture,
        "size": row.size,
        "num_layers": row.model.num_layers,
        "hidden_size": row.model.hidden_size,
        "num_heads": row.model.num_heads,
        "intermediate_size": row.model.intermediate_size,
        "parameters_millions": _comparison_record(row.parameters_millions),
        "step_petaflops": _comparison_record(row.step_petaflops),
        "closed_form": {
            "parameters_millions": row.closed_parameters_millions,
            "step_petaflops": row.closed_step_petaflops,
        },
        "agrees": row.agrees,
    }


def _comparison_record(comparison: Comparison) -> dict[str, Any]:
    return {
        **dataclasses.asdict(comparison),
        "difference": comparison.difference,
        "agrees": comparison.agrees,
    }


def _show_study(rows: list[StudyRow]) -> None:
    shape = ("layers", "hidden", "heads", "interm.")
    counted = ("paper", "diff", "within", "Table 1")
    table = plain_table(
        ("size", "architecture"),
        (*shape, "params", *counted, "PFLOPs", *counted, ""),
        title="Table 7 of arXiv 2406.16690: millions of parameters outside the embedding, petaFLOPs of a training step",
    )
    for row in rows:
        table.add_row(*_study_cells(row), end_section=row.architecture == rows[-1].architecture)
    console = plain_console(least_width=155)
    console.print(table)
    console.print("Its Table 1, closed forms for g = 8/3 d (columns Table 1): N without the embedding, FLOPs of a step")
    forms = Table(box=None, pad_edge=False, show_header=False)
    for name, form in TABLE_1.items():
        forms.add_row(name, f"N = {form.parameters}", f"C = {form.training_flops}")
    console.print(forms)
    outside = [f"{row.architecture}-{row.size}" for row in rows if not row.agrees]
    console.print(f"outside the tolerances: {', '.join(outside)}" if outside else f"all {len(rows)} agree")


def _study_cells(row: StudyRow) -> list[str]:
    model, parameters, flops = row.model, row.parameters_millions, row.step_petaflops
    shape = (model.num_layers, model.hidden_size, model.num_heads, model.intermediate_size)
    return [
        row.size,
        row.architecture,
        *map(str, shape),
        f"{parameters.computed:.2f}",
        f"{parameters.published:.1f}",
        f"{parameters.difference:+.2f}",
        f"{parameters.tolerance:.2f}",
        f"{row.closed_parameters_millions:.1f}",
        f"{flops.computed:.2f}",
        f"{flops.published:.1f}",
        f"{flops.difference:+.2f}",
        f"{flops.tolerance:.2f}",
        f"{row.closed_step_petaflops:.1f}",
        "" if row.agrees else "NO",
    ]


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3f}"

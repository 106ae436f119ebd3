"""``lightscale evaluate``: evaluate trained models."""

import argparse
import functools
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from lightscale.config.arguments import OVERRIDE, path_argument, run_path
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import ChosenRun, choose_run
from lightscale.evaluation.harness.csr import csr_table
from lightscale.evaluation.registry import find_tasks, named_tasks
from lightscale.evaluation.results import Result, as_csv, as_table, check_writable
from lightscale.evaluation.task import Task
from lightscale.launch.commands.checks import num_processes
from lightscale.launch.commands.model_ranks import check_ranks, join, join_or_start, overrides_among, start_ranks
from lightscale.launch.environment import RankEnvironment
from lightscale.output.terminal import plain_console
from lightscale.runs.run_directory import split_step

NAME = "evaluate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale evaluate``."""
    parser.description = (
        "Evaluates one or several runs and stores the results in RUN/evaluation. A task with a result is not "
        "repeated; an interrupted task continues where it stopped."
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN[@STEP]", help="directory of a run, or NAME for runs/NAME; "
        "step of a checkpoint (default: the newest)")  # fmt: skip
    layout = "layout of one model over ranks, such as parallel.tensor=2 (default: a complete model on each rank)"
    add("overrides", nargs="*", default=[], metavar=OVERRIDE, help=layout)
    tasks = f"tasks, separated by commas: {', '.join(named_tasks())}, or task files FILE.toml"
    add("--tasks", required=True, metavar="NAME,…", help=tasks)
    add("--data", type=path_argument, default=Path("data/evaluation"), metavar="DIR",
        help="folder with the data of named tasks (default: %(default)s)")  # fmt: skip
    add("--processes", type=int, metavar="N", help="ranks on this machine (default: one per GPU, or one)")
    add("--limit", type=int, metavar="N", help="use only the first N documents or questions of each task")
    add("--context", type=int, metavar="N", help="longest prompt, in tokens (default: no limit for linear mixers; the "
        "longest training sequence for models with softmax attention)")  # fmt: skip
    add("--row-tokens", type=int, default=8192, metavar="N",
        help="tokens per forward pass of the model (default: %(default)s)")  # fmt: skip
    add("--no-sharing", action="store_true", help="recompute shared prefixes for every prompt")
    add("--follow", action="store_true", help="evaluate every new checkpoint of a training run until it is "
        "finished; the run keeps each checkpoint until then")  # fmt: skip
    add("--store", type=path_argument, metavar="PATH", help="token store with the tokenizer (default: the run's)")
    add("--again", action="store_true", help="repeat tasks that have a result")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print the results as JSON")
    output.add_argument("--csv", action="store_true", help="print one CSV line per score")


def run(args: argparse.Namespace) -> int:
    """Evaluate. A rank (started by torchrun, srun or mpirun) joins the others; any other process starts the ranks."""
    return join_or_start(functools.partial(_evaluate, args), functools.partial(_start, args))


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is to be done, found and checked without torch."""

    runs: list[ChosenRun]
    tasks: list[Task]

    @property
    def config(self) -> RunConfig:
        """Configuration of the first run with the layout of all."""
        return self.runs[0].config


def _plan(args: argparse.Namespace) -> _Plan:
    words = [*args.runs, *args.overrides]
    overrides = overrides_among(words)
    for name, value, least in (
        ("limit", args.limit, 1),
        ("context", args.context, 1),
        ("row-tokens", args.row_tokens, 64),
    ):
        if value is not None and value < least:
            raise UserError(f"--{name} {value}: must be at least {least}")
    # Tasks first: they are the same for all runs.
    tasks = find_tasks([name for name in args.tasks.split(",") if name], args.data, limit=args.limit)
    runs = []
    for word in words:
        if word not in overrides:
            directory, step = split_step(word)
            if args.follow and step is not None:
                raise UserError(f"{word}: --follow evaluates every checkpoint; remove the step")
            path = run_path(directory)
            chosen = choose_run(path, step=step, store=args.store, overrides=overrides, may_wait=args.follow)
            check_writable(chosen.directory)
            for task in tasks:
                task.check(chosen.tokenizer)
            runs.append(chosen)
    if not runs:
        raise UserError("no run named; use a run's directory, or NAME for runs/NAME")
    if args.follow and len(runs) > 1:
        raise UserError(f"--follow takes one run, not {len(runs)}; start one command per run")
    return _Plan(runs=runs, tasks=tasks)


def _start(args: argparse.Namespace) -> int:
    plan = _plan(args)
    processes = num_processes(plan.config, args.processes)
    for chosen in plan.runs:
        check_ranks(chosen.config, processes)
    print("loading PyTorch and Megatron …", file=sys.stderr, flush=True)
    if processes == 1:
        return _report(args, plan)
    return start_ranks(sys.modules[__name__], _words(args), config=plan.config, processes=processes)


def _words(args: argparse.Namespace) -> list[str]:
    """The arguments of a rank."""
    words = [*args.runs, *args.overrides, "--tasks", args.tasks, "--data", str(args.data)]
    for name in ("limit", "context", "row_tokens", "store"):
        if (value := getattr(args, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    switches = ("no_sharing", "again", "follow", "json", "csv")
    return [*words, *(f"--{name.replace('_', '-')}" for name in switches if getattr(args, name))]


def _evaluate(args: argparse.Namespace, environment: RankEnvironment) -> int:
    """The work of one rank."""
    join(environment)
    plan = _plan(args)
    for chosen in plan.runs:
        check_ranks(chosen.config, environment.world_size)
    return _report(args, plan, is_main=environment.rank == 0)


def _report(args: argparse.Namespace, plan: _Plan, *, is_main: bool = True) -> int:
    evaluation = preload()
    scoring = evaluation.ScoringSettings(row_tokens=args.row_tokens)
    if args.no_sharing:
        scoring = evaluation.ScoringSettings(row_tokens=args.row_tokens, least_shared=None)
    settings = evaluation.EvaluationSettings(scoring=scoring, again=args.again, context=args.context)
    results: list[Result]
    if args.follow:
        results = importlib.import_module("lightscale.evaluation.follow").follow(plan.runs[0], plan.tasks, settings)
    else:
        results = evaluation.evaluate(plan.runs, plan.tasks, settings)
    if not is_main:
        return 0
    if args.json:
        print(json.dumps(results, indent=2))
    elif args.csv:
        print(as_csv(results), end="")
    else:
        # Without line breaks, so that lines can be searched.
        console = plain_console(soft_wrap=True)
        console.print(as_table(results))
        if (table := csr_table(results)) is not None:
            console.print(table)
        for name, meaning in _definitions(results).items():
            console.print(f"{name}: {meaning}")
        for folder in dict.fromkeys(f"{result['run']}/evaluation/step-{result['step']:08d}" for result in results):
            console.print(f"saved in {folder}")
    return 0


def _definitions(results: Sequence[Result]) -> dict[str, str]:
    return {name: meaning for result in results for name, meaning in result.get("definitions", {}).items()}


def preload() -> ModuleType:
    """Import models and engine by name: it takes seconds, and mistakes are reported before."""
    return importlib.import_module("lightscale.evaluation.evaluate")

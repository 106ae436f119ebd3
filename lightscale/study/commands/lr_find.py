"""``lightscale lr-find``: a learning rate range test of a configuration."""

import argparse
import json
import os

from lightscale.config.arguments import RUNS, add_config, add_overrides, add_run_option, path_argument
from lightscale.config.fields import shown_value
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.launch.commands import train
from lightscale.launch.commands.checks import WrongUse, default_directory
from lightscale.launch.environment import RankEnvironment
from lightscale.output.plot import check_plot_path
from lightscale.output.terminal import plain_console, plain_table
from lightscale.runs.run_directory import RunDirectory
from lightscale.study.range_test import draw, read_range_test

_LEAST_STEPS = 10
_ROWS = 12
# Nothing that would end or change the test: no step is skipped, and only the last one is saved.
_FIXED = {
    "optimizer.schedule": "range_test",
    "optimizer.warmup_steps": "0",
    "optimizer.decay_steps": "none",
    "optimizer.decay": "linear",
    "optimizer.decay_power": "1",
    "train.tokens": "none",
    # A rate is that of a batch, and the ramp-up would end behind the test.
    "train.rampup_batch_size": "[]",
    "train.profile_steps": "none",
    "train.stop_step": "none",
    "train.validate_every": "0",
    "checkpoint.keep_every": "none",
    "checkpoint.keep_weights_every": "none",
    "checkpoint.export_every": "none",
    "evaluation.every_steps": "0",
    "guard.enabled": "false",
    "metrics.log_every": "1",
}
# What sets the keys that are chosen.
_BY = {
    "optimizer.lr": " by --to",
    "optimizer.min_lr_ratio": " by --from and --to",
    "train.steps": " by --steps",
    "checkpoint.every": " by --steps",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale lr-find``."""
    add_config(parser)
    add_overrides(parser)
    add_run_option(parser, "run directory of the test; an unfinished one is resumed (default: runs/NAME-lr-find)")
    add = parser.add_argument
    add("--from", dest="lowest", type=float, default=1e-6, metavar="LR", help="first learning rate (default: 1e-6)")
    add("--to", dest="highest", type=float, default=1.0, metavar="LR", help="last learning rate (default: 1)")
    add("--steps", type=int, default=100, metavar="N", help="number of steps (default: 100)")
    add("--processes", "--nproc-per-node", type=int, metavar="N", help="ranks, as for `lightscale train`")
    add("--plot", type=path_argument, metavar="PATH", help="draw the loss over the learning rate (.png, .svg, .pdf)")
    add("--json", action="store_true", help="print JSON: all rates and losses, and the three rates")


def run(args: argparse.Namespace) -> int:
    """Train, and print the loss over the learning rate. An exit code of training that is not 0 is returned."""
    if RankEnvironment.read(os.environ) is not None:
        raise WrongUse("lr-find starts its ranks itself: run it by itself, with --processes N")
    if not 0 < args.lowest < args.highest:
        raise WrongUse(f"--from {args.lowest:g} --to {args.highest:g}: must grow, from above 0")
    if args.steps < _LEAST_STEPS:
        raise WrongUse(f"--steps {args.steps}: must be at least {_LEAST_STEPS}")
    if args.plot is not None:
        check_plot_path(args.plot)
    run = RunDirectory(args.run or RUNS / f"{default_directory(args.config).name}-lr-find")
    if run.config.exists() and load(run.config).optimizer.schedule != "range_test":
        raise WrongUse(f"--run {run.path}: the directory holds another run; use a new one for the test")
    overrides = _overrides(args)
    if run.config.exists() and (refused := run.refused(load(args.config, overrides))):
        values = [f"{key} = {shown_value(before)} there, {shown_value(now)} here" for key, before, now in refused]
        raise WrongUse(
            f"--run {run.path}: the directory holds another test ({'; '.join(values)}); use a new one, or remove it"
        )
    if code := _train(args, run, overrides):
        return code
    test = read_range_test(run)
    if args.plot is not None:
        draw(test, args.plot, f"{args.config}: {args.steps} steps")
    if args.json:
        numbers = {name: getattr(test, name).tolist() for name in ("rates", "losses", "smoothed")}
        named = {name: getattr(test, name) for name in ("lowest", "steepest", "suggested", "fault", "has_diverged")}
        print(json.dumps({"run": str(run.path), **numbers, **named}))
        return 0
    table = plain_table([], ["learning rate", "loss", "smoothed"])
    for step in range(0, len(test.rates), max(1, len(test.rates) // _ROWS)):
        table.add_row(f"{test.rates[step]:.2e}", f"{test.losses[step]:.4f}", f"{test.smoothed[step]:.4f}")
    plain_console().print(table)
    print(f"steepest  {test.steepest:.2e}\nlowest    {test.lowest:.2e}")
    print(f"suggested {test.suggested:.2e}, a tenth of lowest" if test.suggested else f"no suggestion: {test.fault}")
    return 0


def _overrides(args: argparse.Namespace) -> list[str]:
    """Overrides of the configuration: those of the command line, and the test's own. Refuses what the test sets."""
    chosen = {
        "optimizer.lr": f"{args.highest!r}",
        "optimizer.min_lr_ratio": f"{args.lowest / args.highest!r}",
        "train.steps": f"{args.steps}",
        "checkpoint.every": f"{args.steps}",
    }
    for text in args.overrides:
        key = text.partition("=")[0]
        if key in chosen or key in _FIXED:
            raise WrongUse(f"{text}: lr-find sets {key}{_BY.get(key, '')}; remove it")
    if (parent := _parent(args)) is not None:
        raise WrongUse(
            f'train.branch_from = "{parent}": the rates of a test grow from its step 1, and a branch begins behind it; '
            f"test the weights with train.branch_from=none train.init_from={parent}"
        )
    return [*args.overrides, *(f"{key}={value}" for key, value in (_FIXED | chosen).items())]


def _train(args: argparse.Namespace, run: RunDirectory, overrides: list[str]) -> int:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    processes = [] if args.processes is None else ["--processes", str(args.processes)]
    return train.run(parser.parse_args([str(args.config), *overrides, "--run", str(run.path), *processes]))


def _parent(args: argparse.Namespace) -> str | None:
    """``train.branch_from``; None also of a configuration that is none without the keys of the test."""
    try:
        return load(args.config, args.overrides).train.branch_from
    except UserError:
        return None

"""``lightscale average``: create a run from the mean of checkpoints, or from an average that training kept."""

import argparse
import sys
from pathlib import Path

from lightscale.config.arguments import RUNS, run_argument, run_path
from lightscale.evaluation.chosen_run import choose_run
from lightscale.runs.run_directory import split_step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale average``."""
    add = parser.add_argument
    text = "checkpoints of one model; RUN: the newest; the new run has configuration and step of the last"
    add("runs", nargs="+", metavar="RUN[@STEP]", help=text)
    add("--ema", metavar="NAME", help="the average of that name in optimizer.ema, in place of the weights")
    text = "the new run: a directory, or NAME for runs/NAME; it has one checkpoint, of weights alone"
    add("--to", type=run_argument, required=True, metavar="RUN", help=text)


def run(args: argparse.Namespace) -> int:
    """Write the run, and print its checkpoint on stderr."""
    target: Path = args.to if len(args.to.parts) > 1 else RUNS / args.to
    chosen = []
    for word in args.runs:
        name, step = split_step(word)
        chosen.append(choose_run(run_path(name), step=step, any_task=True))
    # Behind the arguments, as it imports torch.
    from lightscale.exchange.average import average  # noqa: PLC0415

    checkpoint = average(chosen, target, ema=args.ema)
    print(f"{checkpoint}; evaluate, generate and export take {target} as any other run", file=sys.stderr)
    return 0

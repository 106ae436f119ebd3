"""``lightscale noise-scale``: the batch of a run beyond which more tokens per step save few steps."""

import argparse
import json
from dataclasses import asdict

from lightscale.config.arguments import add_run, require_run
from lightscale.config.files import load
from lightscale.launch.commands.checks import WrongUse
from lightscale.runs.run_directory import RunDirectory
from lightscale.study.noise_scale import read_noise_scale


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale noise-scale``."""
    add_run(parser)
    parser.add_argument("--last", type=int, metavar="N", help="only the last N measured steps (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the noise scale of the measured steps."""
    if args.last is not None and args.last < 1:
        raise WrongUse(f"--last {args.last}: must be at least 1")
    require_run(args.run)
    found = read_noise_scale(RunDirectory(args.run), last=args.last)
    config = load(args.run / "config.toml")
    first, last = found.steps
    tokens = config.step_tokens.after(last) - config.step_tokens.after(last - 1)
    if args.json:
        print(json.dumps(asdict(found) | {"tokens_per_step": tokens}))
        return 0
    which = "the last" if config.train.rampup_batch_size else "a step"
    print(f"{found.measured} measured steps, {first} to {last}; {which} has {tokens:,} tokens")
    if found.tokens is None or found.interval is None:
        print("gradient noise scale: unknown, the gradient is too small beside its noise; measure more steps")
        return 0
    low, high = found.interval
    sequences = found.tokens / config.data.sequence_length
    interval = f"95 %: {low:,.0f} to {high:,.0f}"
    print(f"gradient noise scale: {found.tokens:,.0f} tokens ({interval}), {sequences:,.1f} sequences")
    return 0

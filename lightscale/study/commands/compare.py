"""``lightscale compare``: compare runs on one page."""

import argparse
import datetime

from lightscale.config.arguments import RUN, path_argument, require_run, run_argument
from lightscale.errors import UserError
from lightscale.runs.run_directory import write_atomically
from lightscale.study.commands.needing import needing

_MOST_RUNS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale compare``."""
    parser.add_argument(
        "runs", nargs="+", type=run_argument, metavar=RUN, help="directories of runs, or NAME for runs/NAME"
    )
    parser.add_argument("--out", required=True, type=path_argument, metavar="PATH", help="HTML file to write")
    parser.add_argument(
        "--smoothing",
        type=float,
        default=1.1,
        metavar="F",
        help="smooth the loss at D with a line fitted from D/F to F·D (default: 1.1)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    if not 1 < args.smoothing <= 10:
        raise UserError(f"--smoothing {args.smoothing}: must be above 1, at most 10")
    paths = list(dict.fromkeys(args.runs))
    if len(paths) > _MOST_RUNS:
        raise UserError(f"{len(paths)} runs: at most {_MOST_RUNS} fit on one page")
    for path in paths:
        require_run(path)
    if not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: no folder {args.out.parent}; create it first")
    comparison = needing("lightscale.study.report.comparison")
    now = datetime.datetime.now(datetime.UTC)
    write_atomically(args.out, comparison.make_comparison(paths, smoothing=args.smoothing, now=now))
    print(args.out)
    return 0

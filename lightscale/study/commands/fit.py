"""``lightscale study fit``: fit the laws of a study, or the loss surface of points in a file."""

import argparse
from pathlib import Path

from lightscale.errors import UserError
from lightscale.study.commands.arguments import add_study, the_study
from lightscale.study.commands.needing import needing

_MOST_DRAWS = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    add_study(parser, nargs="?")
    parser.add_argument(
        "--points",
        type=Path,
        metavar="FILE.csv",
        help="fit E + A/N^alpha + B/D^beta to the points of a CSV file instead; columns: N (parameters), loss (nats "
        "per token), D (tokens) or C (FLOPs), and run if runs have several lines",
    )
    parser.add_argument(
        "--draws",
        type=int,
        metavar="N",
        help="draws of the bootstrap (default: fit.draws of the study; 1000 for --points)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the laws; a study also gets fit.json and curves.parquet."""
    if args.draws is not None and not 2 <= args.draws <= _MOST_DRAWS:
        raise UserError(f"--draws {args.draws}: must be 2 to {_MOST_DRAWS:,}")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed}: must be 0 or more")
    if (args.study is None) == (args.points is None):
        raise UserError("study fit: use either STUDY.toml or --points FILE.csv")
    if args.points is not None:
        if args.dir is not None:
            raise UserError("--dir: use it with STUDY.toml, not with --points")
        needing("lightscale.study.fit_output").fit_points(args)
        return 0
    study = the_study(args)
    if study.definition.search is not None:
        raise UserError(f"{study.definition.path}: a study with [search] has no laws; use `lightscale study search`")
    study.require()
    needing("lightscale.study.fit_output").fit_study(study, args)
    return 0

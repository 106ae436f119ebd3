"""``lightscale study report``: write one HTML file of a study, and its picture of all laws."""

import argparse
import datetime

from lightscale.config.arguments import path_argument
from lightscale.errors import UserError
from lightscale.runs.run_directory import write_atomically
from lightscale.study.commands.arguments import add_study, the_study
from lightscale.study.commands.needing import needing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    add_study(parser)
    parser.add_argument(
        "--out", type=path_argument, metavar="PATH", help="HTML file to write (default: STUDY/report.html)"
    )
    parser.add_argument(
        "--draws", type=int, metavar="N", help="draws of the bootstrap (default: fit.draws of the study)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    if args.draws is not None and args.draws < 2:
        raise UserError(f"--draws {args.draws}: must be at least 2")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed}: must be 0 or more")
    study = the_study(args)
    study.require()
    now = datetime.datetime.now(datetime.UTC)
    report = needing("lightscale.study.report.study_report").make_report(
        study, draws=args.draws, seed=args.seed, now=now
    )
    out = args.out or study.path / "report.html"
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: no folder {out.parent}; create it first")
    write_atomically(out, report.page)
    print(out)
    if report.laws_picture is not None:
        # For a README or a talk.
        write_atomically(study.path / "laws.svg", report.laws_picture)
        print(study.path / "laws.svg")
    return 0

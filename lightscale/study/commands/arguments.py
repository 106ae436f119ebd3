"""What the commands of ``lightscale study`` share."""

import argparse
from pathlib import Path

from lightscale.config.arguments import path_argument
from lightscale.study.study import Study

STUDY = "STUDY.toml"


def add_study(parser: argparse.ArgumentParser, *, nargs: str | None = None) -> None:
    """Declare STUDY.toml and --dir."""
    parser.add_argument(
        "study",
        nargs=nargs,
        type=path_argument,
        metavar=STUDY,
        help="the study's file, or the name of a shipped one",
    )
    parser.add_argument(
        "--dir", type=path_argument, metavar="PATH", help="the study's directory (default: studies/NAME)"
    )


def the_study(args: argparse.Namespace) -> Study:
    """The study that they name."""
    directory: Path | None = args.dir
    return Study(args.study, directory)

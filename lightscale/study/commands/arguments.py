"""Arguments shared by the commands of ``lightscale study``."""

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
        help="TOML file of the study, or the name of a shipped study",
    )
    parser.add_argument(
        "--dir", type=path_argument, metavar="PATH", help="directory of the study (default: studies/NAME)"
    )


def the_study(args: argparse.Namespace) -> Study:
    """The study named by the arguments."""
    directory: Path | None = args.dir
    return Study(args.study, directory)

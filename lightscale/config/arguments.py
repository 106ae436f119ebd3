"""Arguments shared by commands: CONFIG, overrides, and RUN, a run's directory.

Shell completion uses their metavars: see `lightscale/completion`.
"""

import argparse
import difflib
import os
from pathlib import Path

from lightscale.config.text import path_fault
from lightscale.errors import UserError, shortened

CONFIG, OVERRIDE, RUN = "CONFIG", "section.key=value", "RUN"
RUNS = Path("runs")
"""Default folder of runs."""


def add_config(parser: argparse.ArgumentParser, more: str = "", *, nargs: str | None = None) -> None:
    """Declare CONFIG, as `args.config`; `more` is added to its help."""
    text = f"TOML file of the run, or the name of a shipped run (`lightscale configs`){more}"
    parser.add_argument("config", nargs=nargs, type=path_argument, metavar=CONFIG, help=text)


def add_overrides(parser: argparse.ArgumentParser, text: str = "override values of CONFIG") -> None:
    """Declare `args.overrides`."""
    # With a default, argparse does not ask for it where CONFIG is missing.
    parser.add_argument("overrides", nargs="*", default=[], metavar=OVERRIDE, help=text)


def add_run(parser: argparse.ArgumentParser, text: str = "directory of the run, or NAME for runs/NAME") -> None:
    """Declare RUN, as `args.run`."""
    parser.add_argument("run", type=run_argument, metavar=RUN, help=text)


def add_run_option(parser: argparse.ArgumentParser, text: str) -> None:
    """Declare `--run RUN`, as `args.run`; without it None."""
    # torchrun takes the first for one of its own, abbreviated.
    parser.add_argument("--run", "--run-dir", type=run_argument, metavar=RUN, help=text)


def path_argument(given: str) -> Path:
    """argparse `type` of a path; an impossible path is wrong usage."""
    if fault := path_fault(given):
        raise argparse.ArgumentTypeError(f"{shortened(given)!r} {fault}")
    return Path(given)


def run_argument(given: str) -> Path:
    """argparse `type` of RUN, by `run_path`; an impossible path is wrong usage."""
    return run_path(path_argument(given))


def run_path(given: str | Path) -> Path:
    """The directory that RUN names: `given`, or runs/`given` if only that exists."""
    path = Path(given)
    inside = RUNS / path
    is_name = len(path.parts) == 1 and path.name != ".."
    # os.path: False also for what no path can be.
    return inside if is_name and not os.path.exists(path) and os.path.isdir(inside) else path  # noqa: PTH110, PTH112


def require_run(path: Path) -> None:
    """Raise UserError, with the nearest run, when `path` (from `run_path`) is no run."""
    if (path / "config.toml").is_file():
        return
    runs = {one.parent.name: str(one.parent) for one in sorted(RUNS.glob("*/config.toml"))}
    near = [runs[name] for name in difflib.get_close_matches(path.name, runs, n=1)]
    advice = f"did you mean {near[0]}?" if near else "`lightscale runs` lists runs"
    if path.exists():
        raise UserError(f"{path} is not a run directory: it has no config.toml; {advice}")
    # A name by itself was looked for in both places.
    looked = f"neither {path} nor {RUNS / path} exists" if len(path.parts) == 1 else "no such directory"
    raise UserError(f"no run {path}: {looked}; {advice}")

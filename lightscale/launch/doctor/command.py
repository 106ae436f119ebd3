"""``lightscale doctor``: check this machine, or all ranks of a job together, before training, with remedies."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from lightscale.config.arguments import add_config, add_overrides, add_run_option, path_argument
from lightscale.config.files import load
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.launch.commands.checks import default_directory
from lightscale.launch.environment import RankEnvironment
from lightscale.launch.scheduler import adopt_job
from lightscale.output.terminal import PlainConsole
from lightscale.training.health.check_result import Outcome, where

if TYPE_CHECKING:
    from lightscale.launch.doctor.examine import DoctorReport

_STYLES: dict[Outcome, str] = {"ok": "green", "warning": "yellow", "failed": "bold red"}
# Ranks of a large job do not start at the same moment, and each first imports torch, often from a network file system.
_WAIT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale doctor``."""
    parser.description = (
        "Checks this machine or, when started by torchrun, srun or mpirun, all ranks together, with measurements. "
        "With --warm, compiles the kernels of CONFIG into Triton's cache on this machine instead. "
        "Exit code 0: no check failed (warnings are possible); 78: a check or a compilation failed."
    )
    add_config(parser, " to check for (default: RUN's)", nargs="?")
    add_overrides(parser)
    add_run_option(parser, "run directory (default: runs/NAME of CONFIG, or the current directory)")
    parser.add_argument("--full", action="store_true", help="also measure a matrix product on a single machine")
    parser.add_argument(
        "--exclude",
        type=path_argument,
        metavar="FILE",
        help="append failed hosts to FILE, one per line, for a scheduler's --exclude=./FILE",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=_WAIT_S,
        metavar="SECONDS",
        help=f"longest wait for ranks (default: {_WAIT_S:.0f})",
    )
    parser.add_argument(
        "--warm",
        action="store_true",
        help="compile the kernels of CONFIG into this machine's Triton cache, check nothing",
    )
    parser.add_argument(
        "--arch",
        metavar="SM",
        help="with --warm, architecture of the GPUs, such as sm_90 (default: this machine's GPU)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Examine, print on rank 0, and return the exit code, equal on all ranks."""
    if args.wait <= 0:
        raise UserError(f"--wait {args.wait:g}: must be more than 0 seconds")
    if args.warm:
        return _warm(args)
    if args.arch is not None:
        raise UserError(f"--arch {args.arch}: only --warm compiles kernels; add --warm")
    # Before any host is named: `host_name` takes the scheduler's name for it from these variables.
    adopt_job(os.environ)
    config, directory = _target(args)
    environment = RankEnvironment.read(os.environ)
    if environment is None:
        print("loading PyTorch …", file=sys.stderr, flush=True)
    # Behind the arguments, as it imports torch.
    from lightscale.launch.doctor.examine import examine  # noqa: PLC0415

    report = examine(config, directory, environment, full=args.full, wait_s=args.wait)
    if environment is None or environment.rank == 0:
        # On rank 0 only, because FILE usually is on a disk that all ranks share.
        _exclude(args.exclude, report)
        _print(report, as_json=args.json)
    return report.exit_code


def _warm(args: argparse.Namespace) -> int:
    """Fill Triton's cache, print the summary, and return the exit code."""
    config, _ = _target(args)
    if config is None:
        raise UserError("--warm: no configuration; name CONFIG, or a run's directory with --run")
    print("loading PyTorch …", file=sys.stderr, flush=True)
    from lightscale.launch.doctor.warm import architecture, warm  # noqa: PLC0415

    report = warm(config, architecture(args.arch), processes=_num_cores(), quiet=args.json)
    if args.json:
        print(json.dumps(report.record(), indent=2))
        return report.exit_code
    for kernel, error in report.failed.items():
        print(f"{kernel}: {error}")
    print(
        f"{report.arch}: {report.kernels} kernels in {report.variants} variants, {report.compiled} compiled, "
        f"{report.from_cache} from the cache, {len(report.failed)} failed, {report.seconds:.0f} s; cache {report.cache}"
    )
    return report.exit_code


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _target(args: argparse.Namespace) -> tuple[RunConfig | None, Path]:
    """The configuration, if one is known, and where its run is or is to be."""
    if args.config is not None:
        return load(args.config, args.overrides), args.run or default_directory(args.config)
    stored = None if args.run is None else args.run / "config.toml"
    if stored is not None and stored.exists():
        return load(stored), args.run
    return None, args.run or Path()


def _exclude(path: Path | None, report: "DoctorReport") -> None:
    """Add to the file what is not there yet."""
    if path is None:
        return
    # Hosts of earlier checks stay: a job that has excluded them cannot look at them again.
    there = path.read_text(encoding="utf-8").split() if path.exists() else []
    path.write_text("".join(f"{host}\n" for host in dict.fromkeys([*there, *report.exclude])), encoding="utf-8")


def _print(report: "DoctorReport", *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.record(), indent=2))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("check", "result", "found", "expected"):
        table.add_column(heading, no_wrap=heading in ("check", "result"), overflow="fold")
    for result in report.results:
        who = where(result.ranks, report.hosts)
        style = _STYLES[result.result]
        found = f"{who}: {result.found}" if who else result.found
        table.add_row(result.check, f"[{style}]{result.result}[/]", _plain(found), _plain(result.right))
    console = PlainConsole(highlight=False, width=max(PlainConsole().width, 120))
    console.print(table)
    if report.exclude:
        console.print(f"hosts to exclude: {', '.join(report.exclude)}", markup=False)


def _plain(text: str) -> str:
    """Without markup: a path may have brackets."""
    return text.replace("[", "\\[")

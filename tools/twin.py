#!/usr/bin/env python
"""The CUDA path without a GPU: ``python tools/twin.py COMMAND``; see ``tools/cuda_twin/README.md``."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cuda_twin import bare_packages, cases, installation, null_cases
from lightscale.config.arguments import add_config, add_overrides
from lightscale.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Command:
    """One subcommand."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def fetch(args: argparse.Namespace) -> int:
    """The wheel, and the null device for it."""
    installation.fetch()
    twin = installation.installed()
    print(f"CUDA build of PyTorch {installation.torch_version()}: {twin.torch}\nnull device: {twin.device}")
    return 0


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def add_null_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``null``."""
    add_config(parser)
    add_overrides(parser)
    parser.add_argument("--world", type=int, default=1, metavar="N", help="ranks of the run (default: 1)")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="rank to record (default: 0)")
    parser.add_argument(
        "--micro-batches", type=int, default=2, metavar="N", help=("micro-batches per step and rank (default: 2)")
    )
    parser.add_argument("--documents", type=int, default=1, metavar="N", help="documents per sequence (default: 1)")
    parser.add_argument("--compiled", action="store_true", help="compile Triton kernels instead of checking launches")
    parser.add_argument("--json", action="store_true", help="print all records as JSON")


def null(args: argparse.Namespace) -> int:
    """Record one rank's steps."""
    case = {
        "config": str(args.config),
        "overrides": list(args.overrides),
        "world_size": args.world,
        "rank": args.rank,
        "micro_batches": args.micro_batches,
        "documents": args.documents,
        "compiled": args.compiled,
    }
    (found,) = null_cases.record(installation.installed(), [case])
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        console = Console(width=max(Console().width, 110), highlight=False)
        for table in null_cases.tables(found):
            console.print(table)
    return 1 if found["faults"] or found["waits"]["races"] else 0


def add_budget_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``budgets``."""
    _add_only(parser)
    parser.add_argument(
        "--write", action="store_true", help="write what was counted: new budgets, and the tables of the documentation"
    )


def budgets(args: argparse.Namespace) -> int:
    """Count demands of a step of every recorded case, compared with its budget."""
    trained, compared = (_recorded(_chosen(kept(), args.only)) for kept in (cases.all_cases, cases.kernel_cases))
    found = trained | compared
    before = cases.read_budgets() if cases.BUDGETS.exists() else {}
    if args.write:
        cases.write_budgets(found)
        cases.write_table(f"| {null_cases.BUDGET_HEAD} |", null_cases.budget_rows(trained, {}), cases.all_cases())
        cases.write_table(f"| {null_cases.TRAFFIC_HEAD} |", null_cases.traffic_rows(trained), cases.all_cases())
        for one in trained.keys() & {cases.WITH_ALL_AXES}:
            streams = null_cases.stream_rows(trained[one])
            cases.write_table(f"| {null_cases.STREAM_HEAD} |", streams, [row[0] for row in streams])
        cases.write_table(f"| {null_cases.KERNEL_HEAD} |", null_cases.kernel_rows(compared), cases.kernel_cases())
    console = Console(width=120, highlight=False)
    console.print(null_cases.budget_table(null_cases.budget_rows(found, before)))
    console.print(null_cases.kernel_table(null_cases.kernel_rows(compared)))
    lines = [line for name, one in found.items() if name in before for line in cases.exceeded(name, one, before)]
    print("\n".join(lines))
    return int(bool(lines) and not args.write)


def _add_only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", default="", metavar="TEXT", help=("only cases whose names contain this text (default: all)")
    )


def _chosen(kept: dict[str, dict[str, Any]], only: str) -> dict[str, dict[str, Any]]:
    return {name: case for name, case in kept.items() if only in name}


def _recorded(wanted: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = null_cases.record(installation.installed(), list(wanted.values())) if wanted else []
    return dict(zip(wanted, found, strict=True))


def add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``memory``."""
    _add_only(parser)
    parser.add_argument("--write", action="store_true", help="write the table of the documentation")


def memory(args: argparse.Namespace) -> int:
    """The allocator's peak in models of full depth, beside what ``lightscale plan`` says."""
    rows = null_cases.memory_rows(_recorded(_chosen(cases.planned_cases(), args.only)))
    if args.write:
        cases.write_table(f"| {null_cases.MEMORY_HEAD} |", rows, cases.planned_cases())
    Console(width=120, highlight=False).print(null_cases.memory_table(rows))
    return 0


def add_kernel_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``kernels``."""
    add_config(parser)
    add_overrides(parser)
    parser.add_argument("--compiled", action="store_true", help="compile Triton kernels instead of checking launches")


def kernels(args: argparse.Namespace) -> int:
    """What ``lightscale doctor CONFIG`` asks of a GPU to compare its kernels."""
    case = {"config": str(args.config), "overrides": list(args.overrides), "compiled": args.compiled}
    (found,) = null_cases.record(installation.installed(), [{**case, "kernels_only": True}])
    rows = null_cases.kernel_rows({str(args.config): found})
    Console(width=120, highlight=False).print(null_cases.kernel_table(rows))
    included = "compilers" if args.compiled else "checks of launches"
    print(f"CPU time of this host, {included} included: {found['host_s']:.1f} s")
    return int(bool(found["faults"]))


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``gpu-check``."""
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts of the check (default: all)")
    parser.add_argument(
        "--save", type=Path, default=Path(), metavar="FOLDER", help=("folder of the results (default: current folder)")
    )
    parser.add_argument("--gpus", type=int, default=2, metavar="N", help="number of devices of the twin (default: 2)")
    parser.add_argument("--broken", action="store_true", help="kernels compute nothing, in all parts")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="a visit within so many seconds; needs --out")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the visits")
    parser.add_argument("--bare", action="store_true", help="hide packages that `make bundle` does not bring")


def gpu_check(args: argparse.Namespace) -> int:
    """``make gpu-check``'s own code, at small sizes."""
    twin = installation.installed()
    environment = twin.environment(devices=args.gpus, computes=True, everywhere=True)
    if args.bare:
        environment["TWIN_HIDES"] = ",".join(sorted(bare_packages.lacking()))
    visit = [] if args.budget is None else ["--budget", args.budget, "--out", args.out]
    words = ["--save", args.save, *visit, *(["--only", *args.only] if args.only else []), *["--broken"] * args.broken]
    command = [sys.executable, "-m", "cuda_twin.gpu_check_run", *map(str, words)]
    return subprocess.run(command, env=environment, check=False).returncode


COMMANDS = {
    "fetch": Command(
        summary=f"download the CUDA build of PyTorch, {installation.WHEEL_MB} MB",
        add_arguments=_no_arguments,
        run=fetch,
    ),
    "null": Command(
        summary="record the steps of one rank on the null device",
        add_arguments=add_null_arguments,
        run=null,
    ),
    "budgets": Command(
        summary="demands of a step of every recorded case, compared with its budget",
        add_arguments=add_budget_arguments,
        run=budgets,
    ),
    "memory": Command(
        summary="peak of the allocator, compared with the plan",
        add_arguments=add_memory_arguments,
        run=memory,
    ),
    "kernels": Command(
        summary="demands of `lightscale doctor CONFIG` on a GPU when it compares kernels",
        add_arguments=add_kernel_arguments,
        run=kernels,
    ),
    "gpu-check": Command(
        summary="the check of `make gpu-check` at small sizes; no figure is measured on a GPU",
        add_arguments=add_check_arguments,
        run=gpu_check,
    ),
}


def main() -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.summary, description=command.summary))
    args = parser.parse_args()
    try:
        return COMMANDS[args.command].run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())

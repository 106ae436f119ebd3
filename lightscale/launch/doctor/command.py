"""``lightscale doctor``: whether this machine, or all ranks of a job together, can train, and what to change."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from lightscale.config.files import load
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.launch.commands.checks import default_directory
from lightscale.launch.doctor import measure
from lightscale.launch.doctor.peers import AbsentRanks, PeerRanks, meet_peers
from lightscale.launch.environment import RankEnvironment
from lightscale.launch.scheduler import adopt_job
from lightscale.training.health.check_result import CheckResult, Outcome, where
from lightscale.training.health.machine import Machine, host_name
from lightscale.training.preflight import check_machine, check_ranks

_SEVERITY: tuple[Outcome, ...] = ("ok", "warning", "failed")
_STYLES: dict[Outcome, str] = {"ok": "green", "warning": "yellow", "failed": "bold red"}
# Ranks of a large job do not start at the same moment, and each first imports torch, often from a network file system.
_WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """The results of all checks of one machine or of all ranks."""

    hosts: Sequence[str]
    """By rank."""
    results: Sequence[CheckResult]

    @property
    def result(self) -> Outcome:
        """The worst of all."""
        return max((one.result for one in self.results), key=_SEVERITY.index, default="ok")

    @property
    def exit_code(self) -> int:
        """Of the command."""
        # A warning is no reason for a job script that calls the doctor first to give up its nodes.
        return UserError.EXIT_CODE if self.result == "failed" else 0

    @property
    def exclude(self) -> list[str]:
        """Hosts to exclude from the job."""
        blamed = [one for one in self.results if one.result == "failed" and one.blames_host]
        ranks = [rank for one in blamed for rank in one.ranks or range(len(self.hosts))]
        return sorted({self.hosts[rank] for rank in ranks})

    def record(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "result": self.result,
            "exit_code": self.exit_code,
            "hosts": list(self.hosts),
            "exclude": self.exclude,
            "findings": [dataclasses.asdict(one) for one in self.results],
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale doctor``."""
    parser.description = (
        "Checks this machine or, started by torchrun, srun or mpirun, all ranks together, with measurements. "
        "Exit code 0: no check failed, though some may warn; 78: a check failed."
    )
    parser.add_argument(
        "config",
        nargs="?",
        type=Path,
        metavar="CONFIG",
        help="TOML file of the run to check for (default: that of DIR)",
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="values that replace the file's"
    )
    parser.add_argument(
        "--run", "--run-dir", type=Path, metavar="DIR", help="run directory (default: runs/NAME of CONFIG, or here)"
    )
    parser.add_argument("--full", action="store_true", help="also measure a matrix product, on one machine")
    parser.add_argument(
        "--exclude",
        type=Path,
        metavar="FILE",
        help="add hosts that failed to FILE, one per line, the form that a scheduler's --exclude=./FILE reads",
    )
    parser.add_argument(
        "--wait", type=float, default=_WAIT_S, metavar="SECONDS", help=f"for ranks to answer (default: {_WAIT_S:.0f})"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Examine, print, and return the exit code, the same on all ranks; rank 0 prints."""
    if args.wait <= 0:
        raise UserError(f"--wait {args.wait:g}: must be more than 0 seconds")
    # Before any host is named: `host_name` takes the scheduler's name for it from these variables.
    adopt_job(os.environ)
    config, directory = _target(args)
    environment = RankEnvironment.read(os.environ)
    if environment is None:
        report = examine_machine(config, directory, full=args.full)
    else:
        try:
            with meet_peers(environment, args.wait) as ranks:
                report = examine_ranks(config, directory, ranks, environment)
        except AbsentRanks as absent:
            report = DoctorReport(hosts=absent.hosts, results=[_absence(absent)])
        except (dist.DistError, RuntimeError) as error:
            # Rank 0 left because of a rank that did not answer, and reports it.
            reason = str(error).strip().splitlines()[0]
            print(f"rank {environment.rank} on {host_name()} lost the other ranks: {reason}", file=sys.stderr)
            return UserError.EXIT_CODE
    if environment is None or environment.rank == 0:
        # On rank 0 only, because FILE usually is on a disk that all ranks share.
        _exclude(args.exclude, report)
        _print(report, as_json=args.json)
    return report.exit_code


def examine_machine(config: RunConfig | None, directory: Path, *, full: bool) -> DoctorReport:
    """This machine alone."""
    results = check_machine(config, directory)
    if full:
        gpus = range(torch.cuda.device_count())
        devices = [torch.device("cuda", index) for index in gpus] or [torch.device("cpu")]
        alone = [
            measure.Peers(rank=0, size=1, device=device, hosts=[host_name()], group=None, barrier=lambda: None)
            for device in devices
        ]
        products = [measure.measure_product(peers) for peers in alone]
        kinds = [torch.cuda.get_device_name(index) for index in gpus] or [measure.processor()]
        # One after the other, and not ranks: which GPU it is must be said.
        results += [
            dataclasses.replace(one, found=f"GPU {', '.join(map(str, one.ranks))}: {one.found}", ranks=())
            if one.ranks
            else one
            for one in measure.judge_products(products, kinds, devices[0].type)
        ]
    return DoctorReport(hosts=[host_name()], results=results)


def examine_ranks(
    config: RunConfig | None, directory: Path, ranks: PeerRanks, environment: RankEnvironment
) -> DoctorReport:
    """All ranks of a job, with measurements. The same report on every rank."""
    results = check_ranks(config, directory, ranks, environment.local_rank)
    machines = ranks.on_all(lambda: Machine.read(environment.local_rank))
    wanted = "auto" if config is None else config.train.device
    # All ranks on GPUs, or none: NCCL needs one on each, and a CPU among GPUs would only be slow. A rank whose GPU is
    # missing is reported by the checks above.
    if wanted != "cpu" and all(machine.gpus for machine in machines):
        device = torch.device("cuda", environment.local_rank)
        # Before the NCCL group is made below, which takes the current device.
        torch.cuda.set_device(device)
        kinds = [machine.gpus[0].name for machine in machines]
    else:
        device = torch.device("cpu")
        kinds = ranks.on_all(measure.processor)
    peers = measure.Peers(
        rank=ranks.rank,
        size=ranks.size,
        device=device,
        hosts=ranks.hosts,
        group=dist.new_group(backend="nccl") if device.type == "cuda" else dist.group.WORLD,
        barrier=ranks.barrier,
    )
    products = ranks.on_all(lambda: measure.measure_product(peers))
    results += measure.judge_products(products, kinds, device.type)
    if ranks.size > 1:
        results += measure.judge_exchange(ranks.on_all(lambda: measure.measure_exchange(peers)))
        results += measure.judge_all_reduce(ranks.on_all(lambda: measure.measure_all_reduce(peers)))
    return DoctorReport(hosts=ranks.hosts, results=results)


def _target(args: argparse.Namespace) -> tuple[RunConfig | None, Path]:
    """The configuration, if one is known, and where its run is or is to be."""
    if args.config is not None:
        return load(args.config, args.overrides), args.run or default_directory(args.config)
    stored = None if args.run is None else args.run / "config.toml"
    if stored is not None and stored.exists():
        return load(stored), args.run
    return None, args.run or Path()


def _absence(absent: AbsentRanks) -> CheckResult:
    return CheckResult(
        check="ranks",
        result="failed",
        found=str(absent),
        right="ranks that start and answer: look at these hosts, and at a network that lets them through",
        ranks=absent.ranks,
        blames_host=True,
    )


def _exclude(path: Path | None, report: DoctorReport) -> None:
    """Add to the file what is not there yet."""
    if path is None:
        return
    # Hosts of earlier checks stay: a job that has excluded them cannot look at them again.
    there = path.read_text(encoding="utf-8").split() if path.exists() else []
    path.write_text("".join(f"{host}\n" for host in dict.fromkeys([*there, *report.exclude])), encoding="utf-8")


def _print(report: DoctorReport, *, as_json: bool) -> None:
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
    console = Console(highlight=False, width=max(Console().width, 120))
    console.print(table)
    if report.exclude:
        console.print(f"hosts to exclude: {', '.join(report.exclude)}", markup=False)


def _plain(text: str) -> str:
    """Without markup: a path may have brackets."""
    return text.replace("[", "\\[")

"""``lightscale chaos``: test on this machine that a run survives faults, and detects those that it must detect."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from lightscale import __version__
from lightscale.config.arguments import add_config, add_overrides, add_run_option
from lightscale.errors import UserError
from lightscale.launch.chaos.campaign import Campaign, CampaignResult
from lightscale.launch.chaos.faults.kills import KILL
from lightscale.launch.chaos.harness.hosts import MOST_HOSTS, missing_for_hosts
from lightscale.launch.chaos.harness.trial import Injected
from lightscale.launch.chaos.harness.verify import shown
from lightscale.launch.chaos.schedule import SORTS
from lightscale.output.progress import start_progress
from lightscale.output.terminal import plain_console
from lightscale.runs.metrics.pace import time_text
from lightscale.runs.run_directory import write_atomically
from lightscale.training.health.fault_injection import SAVE_POINTS

EXIT_FAILED = 1

# Frequent saves, every step recorded, hangs noticed soon; overrides of the command line come later and win.
OVERRIDES = (
    "checkpoint.every=5",
    "checkpoint.keep=3",
    "metrics.log_every=1",
    'metrics.sinks=["jsonl"]',
    "restart.hang_timeout_s=10",
    "guard.max_rollbacks=1000",
)
# Of several hosts: a rank gives up a silent one soon, and not one that is slow on a busy machine.
_OVERRIDES_OF_HOSTS = ("restart.collective_timeout_s=30",)
# By the rule of three, 300 bit flips without one that is accepted mean a rate below 1 % with 95 % confidence.
_FLIPS = 300
# Of each kind of fault.
_COUNTED = ("faults", "detected", "recovered", "mismatches", "undetected")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale chaos``."""
    add_config(parser, "; the run should take a few minutes")
    add_overrides(parser, f"override values of CONFIG and of this command ({' '.join(OVERRIDES)})")
    for name, sort in SORTS.items():
        when = " with --hosts" if sort.between_hosts else ""
        text = f"{sort.text} (default: {sort.default}{when})"
        # Unset where the default depends on the hosts.
        default = None if sort.between_hosts else sort.default
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.add_argument(
        "--flips",
        type=int,
        default=_FLIPS,
        metavar="N",
        help="bit flips in a copy of a checkpoint; above 0, each of its files is also damaged in other ways "
        f"(default: {_FLIPS})",
    )
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="number of ranks (default: 2)")
    parser.add_argument(
        "--hosts",
        type=int,
        default=1,
        metavar="N",
        help="number of hosts, each a network namespace of this machine with a launcher, its share of the ranks and a "
        f"link (needs root; sets {' '.join(_OVERRIDES_OF_HOSTS)}; default: 1, this machine)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the faults (default: 0)")
    add_run_option(
        parser,
        "directory of the runs; an undisturbed run of the same configuration is reused, the others are removed, unless "
        "the same campaign was ended before it was complete: it goes on "
        "(default: runs/NAME-chaos of CONFIG)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Train undisturbed, then under faults, and compare; returns 0 if nothing was lost, else 1."""
    for name in [*SORTS, "flips", "processes"]:
        number, least = _amount(args, name), int(name == "processes")
        if number < least:
            raise UserError(f"--{name} {number}: must be at least {least}")
    _check_hosts(args)
    directory = args.run or Path("runs") / f"{args.config.stem}-chaos"
    amounts = {name: _amount(args, name) for name in SORTS}
    record: dict[str, Any] = {}

    def keep(result: CampaignResult, *, complete: bool = False) -> None:
        nonlocal record
        command = _command_line(args, directory)
        record = {"command": command, "complete": complete, **summary(result), **_circumstances()}
        write_atomically(directory / "chaos.json", json.dumps(record, indent=1) + "\n")

    with _sigterm_as_ctrl_c(), _progress(sum(amounts.values())) as report:
        campaign = Campaign(
            args.config,
            [*OVERRIDES, *(_OVERRIDES_OF_HOSTS if args.hosts > 1 else ()), *args.overrides],
            directory,
            processes=args.processes,
            hosts=args.hosts,
            seed=args.seed,
            report=report,
            keep=keep,
        )
        keep(campaign.run(amounts, flips=args.flips), complete=True)
    if args.json:
        print(json.dumps(record))
    else:
        _show(record)
    return 0 if record["passed"] else EXIT_FAILED


def summary(result: CampaignResult) -> dict[str, Any]:
    """The result in numbers, with a line of text for each problem."""
    injected = [one for trial in result.trials for one in trial.injected]
    recovered = sum(one.recovered for one in injected)
    kills = [one.fault.kind for one in injected if one.fault.kind.startswith(KILL)]
    given_up = [trial for trial in result.trials if not (trial.finished or trial.interrupted)]
    problems = {
        "mismatches": [text for verdict in result.verdicts for text in verdict.mismatches],
        "undetected": result.detection.undetected + [text for one in result.trials for text in one.undetected],
        "wrong_resumes": [text for verdict in result.verdicts for text in verdict.wrong_resumes],
        "failures": [text for trial in result.trials for text in trial.failures],
        "orphans": [text for trial in result.trials for text in trial.orphans],
        "over_bound": result.over_bound,
    }
    # A run that does not continue counts, whether or not a fault is to blame.
    unrecoverable = max(len(injected) - recovered, len(given_up))
    seconds = sum(trial.seconds for trial in result.trials)
    return {
        "passed": not unrecoverable and not any(problems.values()),
        "faults": len(injected),
        "recovered": recovered,
        "unrecoverable": unrecoverable,
        "kills": len(kills),
        "kills_during_saves": sum(kind.removeprefix(KILL) in SAVE_POINTS for kind in kills),
        "flips": result.detection.flips,
        "other_damage": result.detection.others,
        "runs": len(result.trials),
        "steps_compared": sum(verdict.compared for verdict in result.verdicts),
        **{name: len(texts) for name, texts in problems.items()},
        "lost_steps": sum(verdict.lost_steps for verdict in result.verdicts),
        "max_lost_steps": max((verdict.max_lost_steps for verdict in result.verdicts), default=0),
        "goodput": _goodput(result),
        "seconds": round(seconds, 1),
        "seconds_per_fault": round(seconds / len(injected), 2) if injected else None,
        "kinds": _kinds(result),
        "faults_in_pairs": sum(bool(one.during) for one in injected),
        "pairs": _pairs(injected),
        "slowest_recovery_s": _slowest(injected),
        "findings": {name: shown(texts) for name, texts in problems.items() if texts},
        "unreached": sorted({point for trial in result.trials for point in trial.unreached}),
        "left_out": result.skipped,
    }


def _kinds(result: CampaignResult) -> dict[str, dict[str, int]]:
    """What became of each kind of fault; a step that differs counts for the fault before it."""
    kinds: dict[str, Counter[str]] = {}
    for trial, verdict in zip(result.trials, result.verdicts, strict=True):
        for one in trial.injected:
            found = kinds.setdefault(one.fault.kind, Counter(dict.fromkeys(_COUNTED, 0)))
            found["faults"] += 1
            found["recovered"] += one.recovered
            if one.sign is not None:
                found["undetected" if one.missed is not None else "detected"] += 1
        for number in verdict.mismatched_lines:
            before = [one.fault.kind for one in trial.injected if one.first_line <= number]
            if before:
                kinds[before[-1]]["mismatches"] += 1
    return {kind: dict(found) for kind, found in sorted(kinds.items())}


def _pairs(injected: Sequence[Injected]) -> dict[str, int]:
    """How often a fault came while a condition lasted."""
    found = Counter(f"{one.fault.kind} during {kind}" for one in injected for kind in one.during)
    return dict(sorted(found.items()))


def _slowest(injected: Sequence[Injected]) -> dict[str, dict[str, float]]:
    """By kind, the longest time from a fault's end to the next step, and the bound that the kind states."""
    found: dict[str, dict[str, float]] = {}
    for one in injected:
        if one.recovery_s is not None:
            before = found.get(one.fault.kind, {}).get("seconds", 0.0)
            seconds = round(max(before, one.recovery_s), 1)
            found[one.fault.kind] = {"seconds": seconds, "bound_s": one.fault.bound.seconds}
    return dict(sorted(found.items()))


def _goodput(result: CampaignResult) -> float | None:
    """Time of the undisturbed run over that of the runs under faults."""
    under_faults = sum(result.finished_s)
    return round(result.reference_s * len(result.finished_s) / under_faults, 4) if under_faults else None


def _show(record: dict[str, Any]) -> None:
    console = plain_console()
    table = Table("fault", box=box.SIMPLE)
    for heading in _COUNTED:
        table.add_column(heading, justify="right")
    for kind, numbers in record["kinds"].items():
        table.add_row(kind, *(f"{numbers[column]}" for column in _COUNTED))
    console.print(table)
    console.print(_totals(record))
    for name, texts in record["findings"].items():
        for text in texts:
            console.print(f"{name.replace('_', ' ')}: {text}")
    if record["unreached"]:
        console.print(f"phases never reached (killed at another instant): {', '.join(record['unreached'])}")
    for text in record["left_out"]:
        console.print(f"skipped: {text}")
    console.print("passed" if record["passed"] else "FAILED")


def _totals(record: dict[str, Any]) -> Table:
    table = Table("", "", box=box.SIMPLE, show_header=False)
    goodput = "—" if record["goodput"] is None else f"{record['goodput']:.1%}"
    per_fault = "—" if record["seconds_per_fault"] is None else f"{record['seconds_per_fault']} s per fault"
    for name, value in (
        ("faults", f"{record['faults']}"),
        ("recovered", f"{record['recovered']}"),
        ("unrecoverable", f"{record['unrecoverable']}"),
        ("kills", f"{record['kills']}, {record['kills_during_saves']} of them during saves"),
        ("steps compared", f"{record['steps_compared']:,} in {record['runs']} runs"),
        ("mismatches", f"{record['mismatches']}"),
        ("damaged copies", f"{record['flips']} bit flips, {record['other_damage']} others"),
        ("undetected", f"{record['undetected']}"),
        ("wrong resumes", f"{record['wrong_resumes']}"),
        ("lost steps", f"{record['lost_steps']:,}, at most {record['max_lost_steps']} at once"),
        ("orphans", f"{record['orphans']}"),
        ("faults in pairs", f"{record['faults_in_pairs']} in {len(record['pairs'])} combinations"),
        ("losses above bounds", f"{record['over_bound']}"),
        ("goodput", goodput),
        ("time", f"{record['seconds']:,.0f} s, {per_fault}"),
    ):
        table.add_row(name, value)
    return table


def _check_hosts(args: argparse.Namespace) -> None:
    """Refuse hosts that cannot be made here, and faults that need them without them."""
    hosts, processes = args.hosts, args.processes
    if not 1 <= hosts <= MOST_HOSTS:
        raise UserError(f"--hosts {hosts}: must be from 1 to {MOST_HOSTS}")
    if processes % hosts:
        more = hosts * (processes // hosts + 1)
        raise UserError(f"--processes {processes}: must be a multiple of --hosts {hosts}; use {more}")
    if hosts > 1 and (missing := missing_for_hosts()):
        raise UserError(f"--hosts {hosts}: network namespaces need {', '.join(missing)}; use --hosts 1 without")
    for name, sort in SORTS.items():
        if sort.between_hosts and hosts == 1 and (number := _amount(args, name)):
            raise UserError(f"--{name} {number}: one host has no other; use --hosts 2, or remove it")


def _amount(args: argparse.Namespace, name: str) -> int:
    number: int | None = getattr(args, name.replace("-", "_"))
    if number is None:
        return SORTS[name].default if args.hosts > 1 else 0
    return number


def _command_line(args: argparse.Namespace, directory: Path) -> str:
    amounts = [f"--{name}={_amount(args, name)}" for name in [*SORTS, "flips", "processes", "hosts", "seed"]]
    return shlex.join(["lightscale", "chaos", str(args.config), *args.overrides, *amounts, f"--run={directory}"])


def _circumstances() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"lightscale": __version__, "torch": importlib.metadata.version("torch")},
    }


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """A job script's SIGTERM must leave no process behind either."""
    # As KeyboardInterrupt it passes every `finally` that ends processes or unmounts a disk.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, CampaignResult], None]]:
    """A live line on a terminal, or a line for each fault."""
    progress, began_s = start_progress("faults", total), time.monotonic()

    def report(text: str, result: CampaignResult) -> None:
        done = sum(len(trial.injected) for trial in result.trials)
        progress.show(done, f"{time_text(time.monotonic() - began_s)}  {text}")

    try:
        yield report
    finally:
        progress.close()

"""``lightscale submit``: start or resume a run as scheduler jobs."""

import argparse
import json
import sys
from collections.abc import Sequence

from lightscale.config.arguments import add_config, add_overrides, add_run_option
from lightscale.config.files import load
from lightscale.config.schedulers import SCHEDULERS, default_scheduler
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.launch.commands.anneal import add_anneal_arguments, resolve_anneal
from lightscale.launch.commands.checks import allowed_changes, check_run, default_directory, is_finished
from lightscale.launch.commands.logs import follow
from lightscale.launch.scheduler import JobRequest, get_scheduler, live_jobs, unanswered_jobs
from lightscale.launch.settings import LaunchSettings, load_settings
from lightscale.runs.jobs import JobRecord, record_job, recorded_jobs
from lightscale.runs.lock import RunLock
from lightscale.runs.run_directory import RunDirectory, end_text, write_atomically

_SETTINGS = ("nodes", "time", "partition", "account", "gpus_per_node", "processes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale submit``."""
    add_config(parser)
    add_overrides(parser, "override values of CONFIG; launch.key=value: settings of the job")
    add_run_option(parser, "run directory; an existing one is resumed (default: runs/NAME of CONFIG)")
    add_anneal_arguments(parser)
    parser.add_argument(
        "--scheduler",
        default=default_scheduler(),
        metavar="NAME",
        help=f"scheduler: {', '.join(SCHEDULERS)} (default: {default_scheduler()})",
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes (default: launch.nodes, or 1)")
    parser.add_argument("--time", metavar="TIME", help="time limit of the job, such as 24:00:00 (default: launch.time)")
    parser.add_argument("--partition", metavar="NAME", help="partition of the cluster (default: launch.partition)")
    parser.add_argument("--account", metavar="NAME", help="account to charge (default: launch.account)")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs per node (default: launch.gpus_per_node)")
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="ranks per node (default: launch.processes, or one per GPU, or one)",
    )
    parser.add_argument(
        "--chain",
        type=int,
        metavar="N",
        help="submit a chain of N jobs (default: one job, requeued until the run is finished)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script without submitting it")
    parser.add_argument("--follow", action="store_true", help="after submitting, show the run's output until it ends")
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="resume although KEY differs from the run's; see `lightscale train --help`",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object; with --follow, then the lines of `lightscale logs --json`",
    )
    parser.epilog = (
        "Job settings come from [launch] in ~/.config/lightscale/launch.toml, overridden by [launch] in CONFIG. "
        + "; ".join(f"{name}: {field.description}".rstrip(".") for name, field in LaunchSettings.model_fields.items())
        + "."
    )


def run(args: argparse.Namespace) -> int:
    """Check the run on this machine, submit it, and print the jobs' numbers and the run directory."""
    resolve_anneal(args)
    # Settings of jobs, not of the run: they may differ from job to job, and are no change of its configuration.
    ours = [text for text in args.overrides if text.startswith("launch.")]
    settings = load_settings(args.config, ours, {name: getattr(args, name) for name in _SETTINGS})
    scheduler = get_scheduler(args.scheduler)
    scheduler.check_settings(settings)
    if args.chain is not None and args.chain < 1:
        raise UserError(f"--chain {args.chain}: must be at least 1")
    config = load(args.config, [text for text in args.overrides if text not in ours])
    request = JobRequest(
        run=RunDirectory(args.run or default_directory(args.config)),
        settings=settings,
        is_chain=args.chain is not None,
        allow=allowed_changes(args.allow_change),
    )
    # Before anything asks the scheduler, so that it works on a machine without one.
    path = request.run.path
    if args.dry_run:
        check_run(config, settings.nodes * settings.ranks_per_node, request.run, request.allow)
        script = scheduler.script(request)
        print(_record(args, request, script=script) if args.json else script, end="\n" if args.json else "")
        return 0
    jobs = submit_run(config, request, scheduler=args.scheduler, count=args.chain or 1)
    if args.json:
        print(_record(args, request, jobs, finished=not jobs), flush=True)
    if not jobs:
        print(f"{path} is finished: {end_text(config)}", file=sys.stderr)
        return 0
    if not args.json:
        print(f"{'job' if len(jobs) == 1 else 'jobs'} {', '.join(map(str, jobs))} in {path}")
    if args.follow:
        return follow(request.run, None, as_json=args.json)
    print(f"lightscale logs {path} --follow, lightscale runs, lightscale cancel {path}", file=sys.stderr)
    return 0


def _record(args: argparse.Namespace, request: JobRequest, jobs: Sequence[int] = (), **more: str | bool) -> str:
    """What scripts want to know, in JSON; jobs as `lightscale cancel --json` has them."""
    numbers = [{"number": number} for number in jobs]
    return json.dumps({"run": str(request.run.path), "scheduler": args.scheduler, "jobs": numbers, **more})


def submit_run(config: RunConfig, request: JobRequest, *, scheduler: str | None = None, count: int = 1) -> list[int]:
    """Submit a chain of `count` jobs for the run of `config`; returns their numbers.

    A finished run gets no job. All checks that need no job run before anything is written. Raises UserError for
    mistakes of the user, and for a run that another job holds.

    Args:
        scheduler: name from `SCHEDULERS`; None: the default.
    """
    implementation, run = get_scheduler(scheduler), request.run
    settings, allow = request.settings, frozenset(request.allow)
    implementation.check_settings(settings)
    check_run(config, settings.nodes * settings.ranks_per_node, run, allow)
    script = implementation.script(request)
    implementation.require("submit")
    _refuse_live_jobs(run, scheduler or default_scheduler())
    # Before the run exists: a partition that refuses the job leaves no directory behind.
    implementation.check(request)
    if is_finished(run, config, allow):
        return []
    run.create(config)
    # For a moment: a job that runs has the lock, and would be refused by ours.
    with RunLock(run):
        run.create_or_open(config, allow)
        # Schedulers open a job's output before it starts, and none of them makes its folder.
        run.logs.mkdir(exist_ok=True)
        write_atomically(request.script, script)
    name = None if scheduler == default_scheduler() else scheduler
    jobs: list[int] = []
    for _ in range(count):
        jobs.append(implementation.submit(request, after=jobs[-1] if jobs else None))
        # Each at once: should the next submission fail, `cancel` finds those before.
        record_job(run, JobRecord(number=jobs[-1], scheduler=name))
    return jobs


def _refuse_live_jobs(run: RunDirectory, scheduler: str) -> None:
    records = recorded_jobs(run)
    # Of the scheduler that is to take the job: one that this machine lacks cannot be asked, and the run's lock decides.
    unknown = unanswered_jobs(record for record in records if (record.scheduler or default_scheduler()) == scheduler)
    if unknown:
        numbers = ", ".join(str(state.number) for state in unknown.values())
        raise UserError(
            f"{run.path}: the scheduler does not answer, and job {numbers} of this run may wait or run; try again later"
        )
    live = live_jobs(records)
    if live:
        jobs = ", ".join(map(str, live.values()))
        raise UserError(
            f"{run.path} is in use by job {jobs}; wait for it, cancel it with `lightscale cancel {run.path}`, "
            "or start another run with --run"
        )

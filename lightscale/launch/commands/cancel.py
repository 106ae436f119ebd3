"""``lightscale cancel``: end the jobs of a run."""

import argparse

from lightscale.config.arguments import add_run, require_run
from lightscale.launch.scheduler import JobState, Scheduler, get_scheduler, live_jobs
from lightscale.runs.jobs import recorded_jobs
from lightscale.runs.run_directory import RunDirectory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale cancel``."""
    add_run(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--waiting", action="store_true", help="only the jobs that have not started")
    how.add_argument(
        "--now", action="store_true", help="do not wait for a save: the scheduler kills the job some seconds later"
    )


def run(args: argparse.Namespace) -> int:
    """End the jobs: those that wait at once, one that runs after it has saved."""
    require_run(args.run)
    directory = RunDirectory(args.run)
    records = recorded_jobs(directory)
    # None stands for the default; a run without records may have a job whose script was submitted by hand.
    schedulers = {name: get_scheduler(name) for name in dict.fromkeys([one.scheduler for one in records] or [None])}
    for scheduler in schedulers.values():
        scheduler.require("cancel")
    live = [(schedulers[record.scheduler], state) for record, state in live_jobs(records).items()]
    # From the last one on, so that none begins because the one before it has ended.
    for scheduler, job in reversed(live):
        if job.phase == "waiting":
            # A job that has not started has nothing to save.
            _end(scheduler, job, now=True)
    for scheduler, job in live:
        if job.phase != "waiting" and not args.waiting:
            _end(scheduler, job, now=args.now)
    if not live and not args.waiting:
        print(f"{directory.path} has no job that waits or runs")
    return 0


def _end(scheduler: Scheduler, job: JobState, *, now: bool) -> None:
    """End `job`, and say how."""
    if job.phase == "ending":
        print(f"job {job.number} is ending")
        return
    scheduler.cancel(job, now=now)
    if job.phase == "waiting":
        print(f"job {job.number} cancelled before it started")
    else:
        print(f"job {job.number} {'cancelled' if now else 'saves and exits'}")

"""``lightscale cancel``: end the SLURM jobs of a run."""

import argparse
import contextlib
from pathlib import Path

from lightscale.errors import UserError
from lightscale.launch.slurm.client import ask, require
from lightscale.runs.jobs import Job, live_jobs, recorded_jobs
from lightscale.runs.run_directory import RunDirectory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale cancel``."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--waiting", action="store_true", help="only the jobs that have not started")
    how.add_argument(
        "--now", action="store_true", help="do not wait for a save: SLURM kills the job some seconds later"
    )


def run(args: argparse.Namespace) -> int:
    """End the jobs: those that wait at once, one that runs after it has saved."""
    directory = RunDirectory(args.run)
    if not directory.config.exists():
        raise UserError(f"{directory.path} is no run directory: it has no config.toml; `lightscale runs` lists runs")
    require("scancel", "squeue", "scontrol")
    live = list(live_jobs(recorded_jobs(directory)).values())
    # From the last one on, so that none begins because the one before it has ended.
    for job in reversed([job for job in live if job.is_waiting]):
        # It may have begun, or ended, meanwhile.
        with contextlib.suppress(UserError):
            ask("scancel", "--state=PENDING", str(job.number))
        print(f"job {job.number} cancelled before it started")
    running = [] if args.waiting else [job for job in live if not job.is_waiting]
    for job in running:
        _end(job, now=args.now)
    if not live and not args.waiting:
        print(f"{directory.path} has no job that waits or runs")
    return 0


def _end(job: Job, *, now: bool) -> None:
    if job.state == "COMPLETING":
        print(f"job {job.number} is ending")
        return
    if now:
        ask("scancel", str(job.number))
        print(f"job {job.number} cancelled")
        return
    # Otherwise the script has it queued again after the save.
    ask("scontrol", "update", f"JobId={job.number}", "Requeue=0")
    ask("scancel", "--batch", "--signal=USR1", str(job.number))
    print(f"job {job.number} saves and leaves")

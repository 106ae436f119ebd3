"""``lightscale cancel``: cancel the jobs of a run."""

import argparse
import json
import os
import sys
from typing import Any

from lightscale.config.arguments import add_run, require_run
from lightscale.launch.scheduler import JobState, Scheduler, get_scheduler, job_states
from lightscale.runs.jobs import recorded_jobs
from lightscale.runs.run_directory import RunDirectory

_WORDS = {
    "removed": "cancelled before it started",
    "saving": "saves and exits",
    "killed": "cancelled",
    "ending": "is ending",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale cancel``."""
    add_run(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--waiting", action="store_true", help="cancel only jobs that have not started")
    how.add_argument(
        "--now", action="store_true", help="kill without a save: the scheduler ends the job after a few seconds"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Cancel the jobs: waiting ones at once, a running one after its save.

    Returns 75 if a scheduler does not answer: a job may still wait or run.
    """
    require_run(args.run)
    directory = RunDirectory(args.run)
    records = recorded_jobs(directory)
    # A run without a record of a job has none that could be found, wherever this is asked.
    schedulers = {name: get_scheduler(name) for name in dict.fromkeys(one.scheduler for one in records)}
    for scheduler in schedulers.values():
        scheduler.require("cancel")
    states = job_states(records)
    live = [(schedulers[record.scheduler], state) for record, state in states.items() if state.is_live]
    unknown = [state.number for state in states.values() if state.phase == "unknown"]
    # From the last one on, so that none begins because the one before it has ended. A job that has not started has
    # nothing to save.
    ended = [_end(scheduler, job, now=True) for scheduler, job in reversed(live) if job.phase == "waiting"]
    if not args.waiting:
        ended += [_end(scheduler, job, now=args.now) for scheduler, job in live if job.phase != "waiting"]
    if args.json:
        print(json.dumps({"run": str(directory.path), "jobs": ended, "unknown": unknown}))
    else:
        for one in ended:
            print(f"job {one['number']} {_WORDS[one['outcome']]}")
    if unknown:
        numbers = ", ".join(map(str, unknown))
        print(f"job {numbers}: the scheduler does not answer, and the job may wait or run; try again", file=sys.stderr)
        return os.EX_TEMPFAIL
    if not live and not args.waiting and not args.json:
        print(f"{directory.path} has no waiting or running job")
    return 0


def _end(scheduler: Scheduler, job: JobState, *, now: bool) -> dict[str, Any]:
    """End `job`; its record: number, phase and state before, and what becomes of it, a key of `_WORDS`."""
    if job.phase == "ending":
        outcome = "ending"
    else:
        scheduler.cancel(job, now=now)
        outcome = "removed" if job.phase == "waiting" else "killed" if now else "saving"
    return {"number": job.number, "phase": job.phase, "state": job.text, "outcome": outcome}

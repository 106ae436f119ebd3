"""``lightscale logs``: what a run prints."""

import argparse
import math
import sys
import time
from pathlib import Path

from lightscale.errors import UserError
from lightscale.runs.jobs import live_jobs, recorded_jobs
from lightscale.runs.run_directory import RunDirectory
from lightscale.runs.runs_command import is_running

_POLL_S = 1.0
# How often SLURM is asked whether there still is a job.
_ASK_S = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale logs``."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--rank", type=int, metavar="N", help="what this rank said (default: the job, or rank 0)")
    parser.add_argument("--follow", action="store_true", help="go on until the run ends")


def run(args: argparse.Namespace) -> int:
    """Print the newest output of the run."""
    directory = RunDirectory(args.run)
    if not directory.config.exists():
        raise UserError(f"{directory.path} is no run directory: it has no config.toml; `lightscale runs` lists runs")
    if args.follow:
        return follow(directory, args.rank)
    files = _newest(directory, args.rank)
    if not files:
        whose = "" if args.rank is None else f" of rank {args.rank}"
        raise UserError(f"{directory.logs} has no output{whose} yet")
    for file in files:
        sys.stdout.write(file.read_text(encoding="utf-8", errors="replace"))
    return 0


def follow(directory: RunDirectory, rank: int | None) -> int:
    """Print what the run says as it comes, over restarts and from job to job, until none is left to speak."""
    shown: dict[Path, int] = {}
    asked_s = -math.inf
    while True:
        spoke = False
        for file in _newest(directory, rank):
            spoke |= _show(file, shown)
        sys.stdout.flush()
        if not spoke and time.monotonic() - asked_s > _ASK_S:
            if not is_running(directory) and not live_jobs(recorded_jobs(directory)):
                for file in _newest(directory, rank):
                    _show(file, shown)
                return 0
            asked_s = time.monotonic()
        time.sleep(_POLL_S)


def _show(file: Path, shown: dict[Path, int]) -> bool:
    """Print what was added to `file`; whether there was any."""
    with file.open("rb") as opened:
        opened.seek(shown.get(file, 0))
        data = opened.read()
    # Whole lines, so that no character is cut.
    end = data.rfind(b"\n") + 1
    shown[file] = shown.get(file, 0) + end
    sys.stdout.write(data[:end].decode(encoding="utf-8", errors="replace"))
    return end > 0


def _newest(directory: RunDirectory, rank: int | None) -> list[Path]:
    """The files of the newest job; or of rank `rank` in the newest launch, 0 where there are no jobs."""
    jobs = sorted(directory.logs.glob("slurm-*.out"), key=lambda path: int(path.stem.partition("-")[2]))
    if rank is None and jobs:
        return jobs[-1:]
    launches = sorted(directory.logs.glob("launch-*"))[-1:]
    files = [launch / f"rank-{rank or 0}.{stream}" for launch in launches for stream in ("out", "err")]
    return [file for file in files if file.exists()]

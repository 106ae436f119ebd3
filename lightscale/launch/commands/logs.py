"""``lightscale logs``: show the output of a run."""

import argparse
import json
import math
import sys
import time
from pathlib import Path

from lightscale.config.arguments import add_run, require_run
from lightscale.errors import UserError
from lightscale.launch.commands.runs import is_running
from lightscale.launch.scheduler import live_jobs, newest_job_log
from lightscale.runs.jobs import recorded_jobs
from lightscale.runs.run_directory import RunDirectory

_POLL_S = 1.0
# How often the scheduler is asked whether there still is a job: each time costs its controller something.
_ASK_S = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale logs``."""
    add_run(parser)
    parser.add_argument(
        "--rank", type=int, metavar="N", help="rank whose output to show (default: the job's output, or rank 0)"
    )
    parser.add_argument("--follow", action="store_true", help="show new output until the run ends")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, with file and text")


def run(args: argparse.Namespace) -> int:
    """Print the newest output of the run."""
    require_run(args.run)
    directory = RunDirectory(args.run)
    if args.follow:
        return follow(directory, args.rank, as_json=args.json)
    files = _newest(directory, args.rank)
    if not files:
        whose = "" if args.rank is None else f" of rank {args.rank}"
        raise UserError(f"{directory.logs} has no output{whose} yet")
    for file in files:
        _print(file, file.read_text(encoding="utf-8", errors="replace"), as_json=args.json)
    return 0


def follow(directory: RunDirectory, rank: int | None, *, as_json: bool = False) -> int:
    """Print new output across restarts and jobs, until no part of the run waits or runs."""
    shown: dict[Path, int] = {}
    # The first question follows the first look without anything new: after a run that has ended, the command ends at
    # once.
    asked_s = -math.inf
    while True:
        is_new = False
        for file in _newest(directory, rank):
            is_new |= _show(file, shown, as_json=as_json)
        sys.stdout.flush()
        if not is_new and time.monotonic() - asked_s > _ASK_S:
            if not is_running(directory) and not live_jobs(recorded_jobs(directory)):
                # Once more: lines may have come between the look above and the end of the run.
                for file in _newest(directory, rank):
                    _show(file, shown, as_json=as_json)
                return 0
            asked_s = time.monotonic()
        time.sleep(_POLL_S)


def _show(file: Path, shown: dict[Path, int], *, as_json: bool) -> bool:
    """Print what was added to `file`; whether there was any."""
    with file.open("rb") as opened:
        opened.seek(shown.get(file, 0))
        data = opened.read()
    # Whole lines, so that no character is cut.
    end = data.rfind(b"\n") + 1
    shown[file] = shown.get(file, 0) + end
    _print(file, data[:end].decode(encoding="utf-8", errors="replace"), as_json=as_json)
    return end > 0


def _print(file: Path, text: str, *, as_json: bool) -> None:
    """The text as it is, or an object for each of its lines."""
    if not as_json:
        sys.stdout.write(text)
        return
    # Not splitlines: the output of a program may have other line breaks within a line.
    for line in text.removesuffix("\n").split("\n") if text else ():
        print(json.dumps({"file": str(file), "text": line}))


def _newest(directory: RunDirectory, rank: int | None) -> list[Path]:
    """The files of the newest job; or of rank `rank` in the newest launch, 0 where there are no jobs."""
    if rank is None and (job := newest_job_log(directory)) is not None:
        return [job]
    # Four digits: the order of the names is that of the starts.
    launches = sorted(directory.logs.glob("launch-*"))[-1:]
    files = [launch / f"rank-{rank or 0}.{stream}" for launch in launches for stream in ("out", "err")]
    return [file for file in files if file.exists()]

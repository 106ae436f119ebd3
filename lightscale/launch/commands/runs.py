"""``lightscale runs``: the runs in a folder, their progress, and where their time went."""

import argparse
import dataclasses
import fcntl
import json
import os
import socket
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.launch.scheduler import live_jobs
from lightscale.runs.goodput import Goodput, duration, measure_goodput, record_time_s
from lightscale.runs.jobs import JobRecord, recorded_jobs
from lightscale.runs.run_directory import RunDirectory, read_lines

State = Literal["running", "finished", "resumable", "stopped", "dead", "new", "damaged"]

_STATES = (
    "States: running; finished, resumable (start it again), stopped (needs attention): as the last attempt recorded; "
    "dead: ended without a record; new: never started; damaged: cannot be read."
)
# The speed is the median of this many last lines.
_RECENT_LINES = 20
# A holder of RUN/lock on another machine renews it every few seconds.
# That of `runs/lock.py`: what is called dead here is what the next start takes over.
_LOCK_STALE_S = 60.0
# Without a lock, a run that has written nothing for this long counts as dead: a start or a save may take minutes.
_QUIET_S = 300.0
_QUIET_STEPS = 20
_MOST_COLUMNS = 1000


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run at one moment."""

    run: str
    """Its directory."""
    state: State
    note: str = ""
    """Why it ended, or what is damaged."""
    job: str | None = None
    """Its job that runs or waits: number, and state in the scheduler's terms."""
    step: int = 0
    total_steps: int | None = None
    tokens: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    goodput: Goodput | None = None
    last_event: str | None = None
    last_event_age_s: float | None = None
    active: float = 0.0
    """When it last wrote anything, in seconds since the epoch."""

    def record(self) -> dict[str, Any]:
        """All of it, for JSON."""
        more = {"goodput": self.goodput.record() if self.goodput else None}
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale runs``."""
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="folder of runs, or one run, to show it in detail (default: runs)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = _STATES


def run(args: argparse.Namespace) -> int:
    """Print the runs, the most recently active first."""
    now = time.time()
    folders = [args.directory] if _is_run(args.directory) else _find_runs(args.directory)
    summaries = sorted(_with_jobs(summarize(RunDirectory(path), now) for path in folders), key=lambda one: -one.active)
    if args.json:
        print(json.dumps([one.record() for one in summaries], indent=2))
        return 0
    # As wide as the content and without line breaks, so that names can be copied.
    console = Console(highlight=False, markup=False, soft_wrap=True, width=_MOST_COLUMNS)
    console.print(_runs_table(summaries))
    for one in summaries:
        if one.note:
            console.print(f"{one.run}: {one.note}")
    if args.directory == folders[0] and summaries[0].goodput is not None:
        console.print(_goodput_table(summaries[0].goodput))
    return 0


def summarize(directory: RunDirectory, now: float) -> RunSummary:
    """Summary of a run's files at `now`, in seconds since the epoch; a damaged run is not an error."""
    files = (directory.config, directory.events, directory.metrics, directory.status)
    active = max((path.stat().st_mtime for path in files if path.exists()), default=0.0)
    name = str(directory.path)
    try:
        return _summarize(directory, now, active)
    except (ValueError, OSError) as error:
        return RunSummary(run=name, state="damaged", note=" ".join(str(error).split()), active=active)


def is_running(directory: RunDirectory) -> bool:
    """Whether a process holds the run now."""
    return _is_held(directory, time.time(), otherwise=False)


def _with_jobs(summaries: Iterable[RunSummary]) -> list[RunSummary]:
    """The same with their jobs; each scheduler is asked once for all."""
    summaries = list(summaries)
    records = {one.run: _job_records(RunDirectory(one.run)) for one in summaries}
    live = live_jobs(record for own in records.values() for record in own)
    jobs = {run: next((str(live[one]) for one in own if one in live), None) for run, own in records.items()}
    return [dataclasses.replace(one, job=jobs[one.run]) for one in summaries]


def _job_records(directory: RunDirectory) -> list[JobRecord]:
    try:
        return recorded_jobs(directory)
    except (UserError, KeyError):
        # Damaged: the table is about the run.
        return []


def _summarize(directory: RunDirectory, now: float, active: float) -> RunSummary:
    config, status = load(directory.config), directory.read_status()
    events, lines = read_lines(directory.events), read_lines(directory.metrics)
    goodput = measure_goodput(events, lines)
    recent = [line for line in lines if "step_s" in line][-_RECENT_LINES:]
    newest = recent[-1] if recent else {}
    event = events[-1] if events else {}
    quiet_s = max(_QUIET_S, _QUIET_STEPS * (_median(recent, "step_s") or 0.0))
    # First of all, as status.json may still be that of an attempt before.
    if _is_held(directory, now, otherwise=status is None and bool(events) and now - active < quiet_s):
        state: State = "running"
    elif status is not None:
        state = status.status
    else:
        # Attempts, but neither a holder nor a status: the launcher itself was killed, or its machine failed.
        state = "dead" if goodput is not None else "new"
    event_time_s = record_time_s(event)
    return RunSummary(
        run=str(directory.path),
        state=state,
        note=status.reason if status is not None and state in ("resumable", "stopped") else "",
        step=newest.get("step", 0),
        total_steps=config.total_steps,
        tokens=newest.get("tokens", 0),
        loss=newest.get("loss"),
        tokens_per_s=_median(recent, "tokens_per_s"),
        goodput=goodput,
        last_event=event.get("event"),
        # The clock may have been set back since.
        last_event_age_s=None if event_time_s is None else max(0.0, now - event_time_s),
        active=active,
    )


def _is_held(directory: RunDirectory, now: float, *, otherwise: bool) -> bool:
    """Whether a process holds the run; `otherwise` where there is no lock.

    The newest file of RUN/lock (see `lock.py`) is locked while its process lives, renewed where locks do not reach
    other machines, and empty when it was released.
    """
    locks = sorted((directory.path / "lock").glob("[0-9]*"))
    if not locks:
        return otherwise
    with locks[-1].open("rb") as file:
        try:
            # Shared and for a moment: it blocks no other process, as one that starts the run locks a file of its own.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        # Nobody has it locked. On this machine the holder is dead then; flock of another machine may not be seen here,
        # so that the age of the file decides about those.
        text, renewed = file.read(), os.fstat(file.fileno()).st_mtime
    return bool(text) and not _is_of_this_machine(text) and now - renewed < _LOCK_STALE_S


def _is_of_this_machine(lock: bytes) -> bool:
    try:
        return bool(json.loads(lock)["host"] == socket.gethostname())
    except (ValueError, KeyError, TypeError):
        return False


def _median(lines: Iterable[dict[str, Any]], key: str) -> float | None:
    values = [line[key] for line in lines if line.get(key) is not None]
    return statistics.median(values) if values else None


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.toml", "events.jsonl", "metrics.jsonl"))


def _find_runs(folder: Path) -> list[Path]:
    """Those with a dot are skipped: runs that are being created."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {what}; DIR must be a folder of runs, or one run (default: runs)")
    found = [path for path in folder.iterdir() if not path.name.startswith(".") and _is_run(path)]
    if not found:
        raise UserError(
            f"{folder} has no runs: none of its folders has a config.toml; `lightscale train` creates runs/NAME"
        )
    return found


def _runs_table(summaries: Iterable[RunSummary]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("run", "state", "job"):
        table.add_column(heading, no_wrap=True)
    for heading in ("step", "loss", "tokens/s", "goodput", "lost steps", "restarts", "last event", "ago"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in summaries:
        table.add_row(*_cells(one))
    return table


def _cells(one: RunSummary) -> list[str]:
    goodput = one.goodput
    ratio = None if goodput is None else goodput.effective_time_ratio
    return [
        one.run,
        one.state,
        one.job or "—",
        "—" if one.total_steps is None else f"{one.step:,}/{one.total_steps:,}",
        "—" if one.loss is None else f"{one.loss:.4f}",
        "—" if one.tokens_per_s is None else f"{one.tokens_per_s:,.0f}",
        "—" if ratio is None else f"{ratio:.1%}",
        "—" if goodput is None else f"{goodput.lost_steps:,}",
        "—" if goodput is None else f"{goodput.restarts:,}",
        one.last_event or "—",
        "—" if one.last_event_age_s is None else duration(one.last_event_age_s),
    ]


def _goodput_table(goodput: Goodput) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("where its time went", no_wrap=True)
    for heading in ("time", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for name, seconds, note in _goodput_lines(goodput):
        share = f"{seconds / goodput.running_s:.1%}" if goodput.running_s > 0 else "—"
        table.add_row(name, duration(seconds), share, note)
    if goodput.waiting_s:
        table.add_row("waiting", duration(goodput.waiting_s), "", "between attempts, not counted above")
    return table


def _goodput_lines(goodput: Goodput) -> Iterable[tuple[str, float, str]]:
    mean_s, others = goodput.mean_restart_s, (goodput.failed_saves, goodput.skipped_saves)
    saves = ", ".join(f"{count:,} {what}" for count, what in zip(others, ("failed", "skipped"), strict=True) if count)
    yield "steps that count", goodput.effective_s, f"{goodput.steps:,} steps"
    yield "lost steps", goodput.lost_s, f"{goodput.lost_steps:,} steps"
    yield "skipped steps", goodput.skipped_s, f"{goodput.skipped_steps:,} steps"
    yield "restarts", goodput.restart_s, "" if mean_s is None else f"{duration(mean_s)} on average"
    yield "saves", goodput.checkpoint_stall_s, f"{goodput.saves:,} done{', ' if saves else ''}{saves}"
    yield "other", goodput.other_s, "first start, validation, steps that were not logged"
    yield "total", goodput.running_s, ""

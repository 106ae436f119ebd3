"""``lightscale runs``: show the runs of a folder, their progress and the division of their time."""

import argparse
import contextlib
import dataclasses
import fcntl
import json
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightscale.config.arguments import RUN, RUNS, run_argument
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.evaluation.results import as_table, newest_results
from lightscale.files import NotRegular, open_regular, size_text
from lightscale.launch.scheduler import JobState, job_states
from lightscale.output.terminal import PlainConsole, plain_console, plain_table, watch
from lightscale.records import Records, read_records
from lightscale.runs.goodput import Goodput, duration, measure_goodput, record_time_s
from lightscale.runs.jobs import JobRecord, recorded_jobs
from lightscale.runs.metrics_tail import NUM_STEPS, MetricsTail
from lightscale.runs.run_directory import RunDirectory, damage_text

State = Literal["running", "finished", "resumable", "stopped", "dead", "new", "damaged"]

_EPILOG = (
    "States: running; finished, resumable (start it again) or stopped (needs attention), from the last attempt's "
    "status; dead: ended without a status; new: never started; damaged: unreadable. "
    f"Loss: mean of the last {NUM_STEPS} logged steps without skipped ones. Validation: newest losses. Evaluation: "
    "newest first score of each task (one run: all scores). Speed: median of the last 20 logged steps. "
    "Memory: peak of rank 0's GPU at the newest logged step, on a CPU peak of its process. "
    "Age: time since the first start. --watch reads only new metrics, and recomputes goodput at most once a "
    "minute, because it needs all of them."
)
# The speed is the median of this many last lines.
_RECENT_LINES = 20
# A holder of RUN/lock on another machine renews it every few seconds.
# That of `runs/lock.py`: what is called dead here is what the next start takes over.
_LOCK_STALE_S = 60.0
# Without a lock, a run that has written nothing for this long counts as dead: a start or a save may take minutes.
_MOST_LOCK_BYTES = 1 << 16
_QUIET_S = 300.0
_QUIET_STEPS = 20
_MOST_COLUMNS = 1000
_WATCH_S, _LEAST_WATCH_S = 5.0, 0.1
# Of --watch: goodput reads all records of a run, and a scheduler does not like to be asked often.
_GOODPUT_EVERY_S = 60.0
_JOBS_EVERY_S = 30.0
# On a GPU, and on a CPU.
_OF_A_RESULT = ("run", "task", "step", "requests", "scores")
_MEMORY_KEYS = ("memory_peak_bytes", "memory_rss_bytes")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run at one moment."""

    run: str
    """Its directory."""
    state: State
    parent: str | None = None
    """RUN@STEP that it branched off."""
    note: str = ""
    """Reason of its end, or its damage."""
    damage: tuple[str, ...] = ()
    """Unreadable parts of its records: files, numbers of lines, and the first fault of each."""
    job: str | None = None
    """Its running or waiting job: number, and state in the scheduler's terms."""
    step: int = 0
    total_steps: int | None = None
    tokens: int = 0
    loss: float | None = None
    """Step of the newest metrics line."""
    smoothed_loss: float | None = None
    """Mean loss of the last logged steps."""
    validation: dict[str, float | None] = dataclasses.field(default_factory=dict)
    """Newest loss on each validation set."""
    validation_step: int | None = None
    evaluation: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Newest step and scores of each evaluated task."""
    tokens_per_s: float | None = None
    memory_bytes: int | None = None
    """Peak on rank 0's GPU, or of its process."""
    goodput: Goodput | None = None
    age_s: float | None = None
    """Time since the first start."""
    last_event: str | None = None
    last_event_age_s: float | None = None
    active: float = 0.0
    """Time of its last write, in seconds since the epoch."""

    def record(self) -> dict[str, Any]:
        """All values, for JSON."""
        more = {"goodput": self.goodput.record() if self.goodput else None}
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale runs``."""
    parser.add_argument(
        "directory",
        nargs="?",
        type=run_argument,
        default=RUNS,
        metavar=RUN,
        help="one run, shown in detail, or a folder of runs (default: runs)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch one line per refresh")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_interval,
        const=_WATCH_S,
        metavar="SECONDS",
        help="refresh every SECONDS until Ctrl-C; put RUN before it (default: 5)",
    )
    parser.epilog = _EPILOG


def run(args: argparse.Namespace) -> int:
    """Print the runs, most recently active first; with --watch until interrupted."""
    view = _View(args.directory)
    # As wide as the content and without line breaks, so that names can be copied.
    wide = PlainConsole(highlight=False, markup=False, soft_wrap=True, width=_MOST_COLUMNS)
    terminal = plain_console()
    if args.watch is None:
        _print(view.summaries(time.time()), wide, args)
    elif args.json or not terminal.is_terminal:
        while True:
            _print(view.summaries(time.time()), wide, args)
            sys.stdout.flush()
            time.sleep(args.watch)
    else:
        watch(lambda: _page(view.summaries(time.time()), args), args.watch, terminal)
    return 0


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds; put RUN before --watch") from None
    if not math.isfinite(seconds) or seconds < _LEAST_WATCH_S:
        raise argparse.ArgumentTypeError(f"{text} s: must be at least {_LEAST_WATCH_S} s")
    return seconds


def _print(summaries: Sequence[RunSummary], console: Console, args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps([one.record() for one in summaries], indent=None if args.watch else 2))
    else:
        console.print(_page(summaries, args))


def _page(summaries: Sequence[RunSummary], args: argparse.Namespace) -> RenderableType:
    parts: list[RenderableType] = [_runs_table(summaries)]
    parts += [Text(f"{one.run}: branch of {one.parent}") for one in summaries if one.parent is not None]
    parts += [Text(f"{one.run}: {text}") for one in summaries for text in (one.note, *one.damage) if text]
    if _is_run(args.directory) and summaries[0].evaluation:
        parts.append(as_table(list(summaries[0].evaluation.values())))
    if _is_run(args.directory) and summaries[0].goodput is not None:
        parts.append(_goodput_table(summaries[0].goodput))
    return Group(*parts)


class _View:
    """The runs of a folder, or one run, looked at again and again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._readers: dict[Path, RunReader] = {}
        self._jobs: dict[str, str | None] = {}
        self._asked = -math.inf

    def summaries(self, now: float) -> list[RunSummary]:
        """Summaries of all runs at `now`, most recently active first."""
        folders = [self._directory] if _is_run(self._directory) else _find_runs(self._directory)
        self._readers = {path: self._readers.get(path) or RunReader(RunDirectory(path)) for path in folders}
        found = [reader.summary(now) for reader in self._readers.values()]
        if now - self._asked >= _JOBS_EVERY_S:
            self._jobs, self._asked = _live_jobs(found), now
        found = [dataclasses.replace(one, job=self._jobs.get(one.run)) for one in found]
        return sorted(found, key=lambda one: -one.active)


class RunReader:
    """Repeated summaries of one run."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._tail = MetricsTail(directory.metrics)
        self._goodput: Goodput | None = None
        self._metrics_damage: tuple[str, ...] = ()
        # (when it was computed, when the run had last written then)
        self._measured = (-math.inf, -math.inf)

    def summary(self, now: float) -> RunSummary:
        """Summary of the run's files at `now`, in seconds since the epoch; a damaged run is not an error."""
        directory = self._directory
        files = (directory.config, directory.events, directory.metrics, directory.status)
        active = max((path.stat().st_mtime for path in files if path.exists()), default=0.0)
        try:
            return self._summary(now, active)
        except (ValueError, OSError) as error:
            note = " ".join(str(error).split())
            return RunSummary(run=str(directory.path), state="damaged", note=note, active=active)

    def _summary(self, now: float, active: float) -> RunSummary:
        directory, tail = self._directory, self._tail
        config, status = load(directory.config), directory.read_status()
        records = read_records(directory.events)
        events = records.lines
        goodput = self._measure(events, now, active)
        tail.refresh(has_validation=config.train.validate_every > 0)
        recent = list(islice(reversed(tail.steps), _RECENT_LINES))
        newest = recent[0] if recent else {}
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
        validation = tail.validation or {"validation": {}}
        return RunSummary(
            run=str(directory.path),
            state=state,
            parent=config.train.branch_from,
            note=status.reason if status is not None and state in ("resumable", "stopped") else "",
            damage=(*_damage(records), *self._metrics_damage, *filter(None, [directory.status_fault()])),
            # Averages and imports have no metrics.
            step=newest.get("step", 0 if status is None else status.step),
            total_steps=config.total_steps,
            tokens=newest.get("tokens", 0 if status is None else status.tokens),
            loss=newest.get("loss"),
            smoothed_loss=tail.smoothed_loss(),
            validation={name: one["loss"] for name, one in validation["validation"].items()},
            validation_step=validation.get("step"),
            evaluation={one["task"]: {key: one[key] for key in _OF_A_RESULT} for one in newest_results(directory)},
            tokens_per_s=_median(recent, "tokens_per_s"),
            memory_bytes=tail.newest(*_MEMORY_KEYS),
            goodput=goodput,
            age_s=_age_s(events[0] if events else {}, now),
            last_event=event.get("event"),
            last_event_age_s=_age_s(event, now),
            active=active,
        )

    def _measure(self, events: Sequence[dict[str, Any]], now: float, active: float) -> Goodput | None:
        """The goodput, as it was not long ago."""
        measured, as_of = self._measured
        if active != as_of and now - measured >= _GOODPUT_EVERY_S:
            metrics = read_records(self._directory.metrics)
            self._goodput, self._metrics_damage = measure_goodput(events, metrics.lines), _damage(metrics)
            self._measured = (now, active)
        return self._goodput


def _damage(records: Records) -> tuple[str, ...]:
    """What to say of a record with lines that cannot be read."""
    return () if records.first_damage is None else (damage_text(records.num_damaged, records.first_damage),)


def _age_s(event: dict[str, Any], now: float) -> float | None:
    time_s = record_time_s(event)
    # The clock of the host that wrote it may be ahead of this one's.
    return None if time_s is None else max(0.0, now - time_s)


def summarize(directory: RunDirectory, now: float) -> RunSummary:
    """Summary of a run's files at `now`, in seconds since the epoch; a damaged run is not an error."""
    return RunReader(directory).summary(now)


def is_running(directory: RunDirectory) -> bool:
    """Whether a process holds the run."""
    return _is_held(directory, time.time(), otherwise=False)


def _live_jobs(summaries: Iterable[RunSummary]) -> dict[str, str | None]:
    """The job of each run that runs or waits, by the run's directory; each scheduler is asked once for all."""
    records = {one.run: _job_records(RunDirectory(one.run)) for one in summaries}
    states = job_states(record for own in records.values() for record in own)
    return {run: _job(states[record] for record in own) for run, own in records.items()}


def _job(states: Iterable[JobState]) -> str | None:
    """The first that is known to wait or run, or else one that may: unknown is not none."""
    may_run = sorted((state for state in states if state.phase != "ended"), key=lambda state: not state.is_live)
    return str(may_run[0]) if may_run else None


def _job_records(directory: RunDirectory) -> list[JobRecord]:
    try:
        return recorded_jobs(directory)
    except (UserError, KeyError):
        # Damaged: the table is about the run.
        return []


def _is_held(directory: RunDirectory, now: float, *, otherwise: bool) -> bool:
    """Whether a process holds the run; `otherwise` where there is no lock.

    The newest file of RUN/lock (see `lock.py`) is locked while its process lives, renewed where locks do not reach
    other machines, and empty when it was released.
    """
    locks = sorted((directory.path / "lock").glob("[0-9]*"))
    if not locks:
        return otherwise
    with contextlib.suppress(FileNotFoundError, NotRegular), open_regular(locks[-1], what="a lock of a run") as file:
        try:
            # Shared and for a moment: it blocks no other process, as one that starts the run locks a file of its own.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        # Nobody has it locked. On this machine the holder is dead then; flock of another machine may not be seen here,
        # so that the age of the file decides about those.
        text, renewed = file.read(_MOST_LOCK_BYTES), os.fstat(file.fileno()).st_mtime
        return bool(text) and not _is_of_this_machine(text) and now - renewed < _LOCK_STALE_S
    # Released since it was listed, or no lock at all.
    return False


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
        raise UserError(f"{folder} {what}; use a folder of runs, or one run (default: runs)")
    found = [path for path in folder.iterdir() if not path.name.startswith(".") and _is_run(path)]
    if not found:
        raise UserError(f"{folder} has no runs (no folder with a config.toml); `lightscale train` creates runs/NAME")
    return found


_NUMBERS = (
    "step",
    "loss",
    "validation",
    "evaluation",
    "tokens/s",
    "memory",
    "goodput",
    "lost steps",
    "restarts",
    "age",
    "last event",
    "ago",
)


def _runs_table(summaries: Iterable[RunSummary]) -> Table:
    table = plain_table(("run", "state", "job"), _NUMBERS)
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
        "—" if one.smoothed_loss is None else f"{one.smoothed_loss:.4f}",
        _validation_text(one.validation),
        _evaluation_text(one.evaluation),
        "—" if one.tokens_per_s is None else f"{one.tokens_per_s:,.0f}",
        "—" if one.memory_bytes is None else size_text(one.memory_bytes),
        "—" if ratio is None else f"{ratio:.1%}",
        "—" if goodput is None else f"{goodput.lost_steps:,}",
        "—" if goodput is None else f"{goodput.restarts:,}",
        "—" if one.age_s is None else duration(one.age_s),
        one.last_event or "—",
        "—" if one.last_event_age_s is None else duration(one.last_event_age_s),
    ]


def _validation_text(losses: dict[str, float | None]) -> str:
    """3.1415, or with the names of several sets; the records have null for NaN."""
    texts = {name: "nan" if loss is None else f"{loss:.4f}" for name, loss in losses.items()}
    if len(texts) == 1:
        return next(iter(texts.values()))
    return " ".join(f"{name} {text}" for name, text in texts.items()) or "—"


def _evaluation_text(tasks: dict[str, dict[str, Any]]) -> str:
    """The first score of each task: "lambada 12.3 text 4.56"."""
    first = {task: next(iter(one["scores"].values()), {"value": None}) for task, one in tasks.items()}
    values = {task: "—" if score["value"] is None else f"{score['value']:.4g}" for task, score in first.items()}
    return " ".join(f"{task} {value}" for task, value in values.items()) or "—"


def _goodput_table(goodput: Goodput) -> Table:
    table = plain_table(["division of its time"], ["time", "share"], has_notes=True)
    for name, seconds, note in _goodput_lines(goodput):
        share = f"{seconds / goodput.running_s:.1%}" if goodput.running_s > 0 else "—"
        table.add_row(name, duration(seconds), share, note)
    if goodput.waiting_s:
        table.add_row("waiting", duration(goodput.waiting_s), "", "between attempts, not counted above")
    return table


def _goodput_lines(goodput: Goodput) -> Iterable[tuple[str, float, str]]:
    mean_s, others = goodput.mean_restart_s, (goodput.failed_saves, goodput.skipped_saves)
    saves = ", ".join(f"{count:,} {what}" for count, what in zip(others, ("failed", "skipped"), strict=True) if count)
    yield "kept steps", goodput.effective_s, f"{goodput.steps:,} steps"
    yield "lost steps", goodput.lost_s, f"{goodput.lost_steps:,} steps"
    yield "skipped steps", goodput.skipped_s, f"{goodput.skipped_steps:,} steps"
    yield "restarts", goodput.restart_s, "" if mean_s is None else f"{duration(mean_s)} on average"
    yield "evaluation", goodput.evaluation_s, "between steps"
    yield "saves", goodput.checkpoint_stall_s, f"{goodput.saves:,} done{', ' if saves else ''}{saves}"
    yield "other", goodput.other_s, "first start, validation, steps without a line"
    yield "total", goodput.running_s, ""

"""Goodput, the share of a run's time spent in kept steps: a pure function of its events and metrics.

A step is kept if its result is part of the current model. It is lost if a later attempt, or a rollback, returned to a
checkpoint before it. It is skipped if the guard did not apply its gradients. A line of metrics represents all steps
since the previous line.

    _attempts            events and lines, grouped by attempt
    _History             replays the attempts in order: which steps are kept, which were lost
    _pauses              waiting between attempts, and the duration of each restart
    measure_goodput      the resulting `Goodput`
"""

import dataclasses
import datetime
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lightscale.errors import UserError, counted
from lightscale.runs.run_directory import RunDirectory, read_lines

Record = Mapping[str, Any]

# Events that begin an attempt, and events that show ranks at work.
_BEGINNINGS = frozenset({"start", "rollback"})
_WORK = _BEGINNINGS | {
    "resume",
    "init_from",
    "branch",
    "teacher",
    "checkpoint",
    "weights",
    "checkpoint_failed",
    "step_skipped",
    "evaluation_begun",
    "evaluation",
}
# Events that end an attempt. The launcher may write them some time after the ranks stopped working, so that their time
# does not show when work ended. Events of neither set say nothing about time.
_ENDS = frozenset({"failed", "resumable", "finished", "stopped"})

_UNITS = (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Division of a run's time from its first start to its last record, in seconds of wall-clock time."""

    wall_s: float
    waiting_s: float
    """Time between attempts, while nothing ran: in a queue, or until a manual restart."""
    effective_s: float
    """Time in kept steps."""
    lost_s: float
    """Time in lost steps."""
    skipped_s: float
    """Time in skipped steps."""
    checkpoint_stall_s: float
    """Time in which training waited for saves."""
    evaluation_s: float
    """Time in evaluations between steps."""
    restart_times_s: tuple[float, ...]
    """Time of each restart, from the last work of an attempt to the next new step, without waiting; known ones only."""
    steps: int
    """That count."""
    lost_steps: int
    skipped_steps: int
    restarts: int
    """Number of starts after the first."""
    rollbacks: int
    """Number of returns to an earlier checkpoint without a new start."""
    saves: int
    failed_saves: int
    skipped_saves: int
    """Number of saves skipped because the previous one was still being written."""

    @property
    def running_s(self) -> float:
        """Wall time without waiting."""
        return self.wall_s - self.waiting_s

    @property
    def effective_time_ratio(self) -> float | None:
        """Share of the running time in kept steps; None before any time has passed."""
        return self.effective_s / self.running_s if self.running_s > 0 else None

    @property
    def checkpoint_stall_share(self) -> float | None:
        """Share of the running time in which training waited for saves."""
        return self.checkpoint_stall_s / self.running_s if self.running_s > 0 else None

    @property
    def restart_s(self) -> float:
        """Total time of the restarts with a known time."""
        return sum(self.restart_times_s)

    @property
    def mean_restart_s(self) -> float | None:
        """Mean time of a restart; None: no restart has a known time."""
        return self.restart_s / len(self.restart_times_s) if self.restart_times_s else None

    @property
    def other_s(self) -> float:
        """The rest of the running time: first start, validation, steps without a line of metrics."""
        # Never negative: clocks of several hosts differ, and a line's step time is only that of its last step.
        named = self.effective_s + self.lost_s + self.skipped_s + self.checkpoint_stall_s + self.evaluation_s
        return max(0.0, self.running_s - named - self.restart_s)

    def scalars(self) -> dict[str, float | int | None]:
        """The values logged during a run."""
        return {
            "effective_time_ratio": self.effective_time_ratio,
            "lost_steps": self.lost_steps,
            "restarts": self.restarts,
            "restart_s": self.mean_restart_s,
            "checkpoint_stall_share": self.checkpoint_stall_share,
        }

    def record(self) -> dict[str, Any]:
        """All values, for JSON."""
        more = ("running_s", "other_s", "restart_s", "mean_restart_s", "effective_time_ratio", "checkpoint_stall_share")
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in more}}

    def sentence(self) -> str:
        """One line to print."""
        if self.effective_time_ratio is None or self.checkpoint_stall_share is None:
            return "goodput: no step has run yet"
        mean = "" if self.mean_restart_s is None else f" ({duration(self.mean_restart_s)} on average)"
        back = f", {counted(self.rollbacks, 'rollback')}" if self.rollbacks else ""
        return (
            f"goodput {self.effective_time_ratio:.1%}: {self.steps:,} steps kept, {self.lost_steps:,} lost, "
            f"{self.skipped_steps:,} skipped; {counted(self.restarts, 'restart')}{mean}{back}; "
            f"checkpoints stall {self.checkpoint_stall_share:.2%}"
        )


def duration(seconds: float) -> str:
    """95.2 -> "1 min 35 s", 200000 -> "2 d 7 h"."""
    if seconds < 59.5:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    large, size, small, part = next(units for units in _UNITS if round(seconds) >= units[1])
    count, rest = divmod(round(seconds), size)
    return f"{count} {large} {rest // part} {small}" if rest >= part else f"{count} {large}"


def run_goodput(run: RunDirectory) -> Goodput | None:
    """The goodput of a run; None before its first start."""
    return measure_goodput(read_lines(run.events), read_lines(run.metrics))


def measure_goodput(events: Iterable[Record], lines: Iterable[Record]) -> Goodput | None:
    """The goodput from the records of events.jsonl and metrics.jsonl, in the order written; None before a first start.

    Raises UserError for a damaged record.
    """
    events = list(events)
    attempts = _attempts(events, lines)
    if not attempts or attempts[0].began is None:
        return None
    # Clocks of several hosts: the last record in the file need not have the latest time.
    ended = [attempt.ended for attempt in attempts if attempt.ended is not None]
    waiting_s, restart_times_s = _pauses(attempts)
    # In order, since each attempt overwrites what the ones before it did after its checkpoint.
    history = _History()
    for attempt in attempts:
        attempt.replay(history)
    kinds = Counter(event["event"] for event in events)
    return Goodput(
        wall_s=max(ended) - attempts[0].began,
        waiting_s=waiting_s,
        effective_s=sum(one.effective_s for one in history.kept),
        lost_s=history.lost_s,
        skipped_s=sum(one.skipped * one.step_s for one in history.kept),
        checkpoint_stall_s=sum(attempt.stall_s for attempt in attempts),
        evaluation_s=sum(attempt.evaluation_s() for attempt in attempts),
        restart_times_s=tuple(restart_times_s),
        steps=sum(one.num_steps - one.skipped for one in history.kept),
        lost_steps=history.lost_steps,
        skipped_steps=sum(one.skipped for one in history.kept),
        restarts=sum(not attempt.is_rollback for attempt in attempts) - 1,
        rollbacks=sum(attempt.is_rollback for attempt in attempts),
        saves=kinds["checkpoint"],
        failed_saves=kinds["checkpoint_failed"],
        skipped_saves=kinds["checkpoint_skipped"],
    )


@dataclass(frozen=True, kw_only=True)
class _LoggedSteps:
    """The steps that one line of metrics stands for."""

    first: int
    last: int
    step_s: float
    skips: frozenset[int]
    """All skipped steps of this attempt."""

    @property
    def num_steps(self) -> int:
        return self.last - self.first + 1

    @property
    def skipped(self) -> int:
        return sum(self.first <= step <= self.last for step in self.skips)

    @property
    def effective_s(self) -> float:
        return (self.num_steps - self.skipped) * self.step_s


class _History:
    """The steps that led to the model as it is now, oldest first, and what was lost on the way."""

    def __init__(self) -> None:
        self.kept: list[_LoggedSteps] = []
        self.lost_steps = 0
        self.lost_s = 0.0

    def go_back(self, step: int) -> None:
        """Return to the model after `step`: later steps are lost."""
        # From the newest on: attempts only ever append, so that the kept steps are in order.
        while self.kept and self.kept[-1].last > step:
            newest = self.kept.pop()
            # A line can stand for steps on both sides of the checkpoint: its part up to it is kept.
            if newest.first <= step:
                self.kept.append(dataclasses.replace(newest, last=step))
            lost = newest.last - max(step, newest.first - 1)
            self.lost_steps += lost
            self.lost_s += lost * newest.step_s


@dataclass
class _Attempt:
    """The records from a start of the ranks, or a rollback, to the next."""

    events: list[Record] = field(default_factory=list)
    lines: list[Record] = field(default_factory=list)
    """Lines of steps."""
    other_lines: list[Record] = field(default_factory=list)
    """Lines of validations and saves, without a step time."""
    is_restart: bool = False
    """Whether the previous attempt's launcher started it, without waiting in between."""

    @cached_property
    def began(self) -> float | None:
        return next((record_time_s(event) for event in self.events if event["event"] in _BEGINNINGS), None)

    @cached_property
    def is_rollback(self) -> bool:
        return next((event["event"] == "rollback" for event in self.events if event["event"] in _BEGINNINGS), False)

    @cached_property
    def worked(self) -> float | None:
        """Time of the last record of work."""
        signs = [event for event in self.events if event["event"] in _WORK]
        times = [record_time_s(record) for record in (*signs, *self.lines, *self.other_lines)]
        if self.began is not None and self._first_timed_line is None:
            # Lines of runs by older versions have no time: their steps are added to the beginning instead.
            times.append(self.began + sum(_step_s(line) for line in self.lines))
        return max((time for time in times if time is not None), default=None)

    @property
    def ended(self) -> float | None:
        """Time of the last record, of work or of the end."""
        ends = [record_time_s(event) for event in self.events if event["event"] in _ENDS]
        return max((time for time in (self.worked, *ends) if time is not None), default=None)

    @property
    def resumed(self) -> int | None:
        """Step of the checkpoint that it resumed from; None: there was none, or it ended before loading one."""
        steps = (_whole(event, "step") for event in self.events if event["event"] in ("rollback", "resume"))
        return next(steps, None)

    @property
    def first_step_began(self) -> float | None:
        """Start of its first new step; None: it made none, or the time is unknown."""
        line = self._first_timed_line
        # If earlier lines lack a time, the first timed one is not that of the first step.
        if line is None or line is not self.lines[0]:
            return None
        time = record_time_s(line)
        assert time is not None
        # The line is written at the end of the last of the steps that it stands for.
        return time - (_whole(line, "step") - (self.resumed or 0)) * _step_s(line)

    @property
    def stall_s(self) -> float:
        # Both are incomplete: lines miss steps that were not logged, events miss saves that did not end. The larger sum
        # is closer to the truth; adding them would count most saves twice.
        in_lines = sum(line.get("checkpoint_stall_s") or 0.0 for line in (*self.lines, *self.other_lines))
        return max(in_lines, sum(event.get("stall_s") or 0.0 for event in self.events))

    def evaluation_s(self, *, step: int | None = None) -> float:
        """Time in evaluations, of ``step`` or of all."""
        done = (event for event in self.events if event["event"] == "evaluation")
        return sum(event.get("seconds") or 0.0 for event in done if step is None or event.get("step") == step)

    @cached_property
    def _first_timed_line(self) -> Record | None:
        return next((line for line in self.lines if record_time_s(line) is not None), None)

    def replay(self, history: _History) -> None:
        """Apply this attempt to `history`."""
        skips = frozenset(_whole(event, "step") for event in self.events if event["event"] == "step_skipped")
        if not self.lines:
            # It loaded a checkpoint and logged no step: what came after the checkpoint is lost all the same.
            if self.resumed is not None:
                history.go_back(self.resumed)
            return
        before = self.resumed or 0
        for line in self.lines:
            step = _whole(line, "step")
            # A line that is not after the previous one: why the run went back was not recorded, the lines are right.
            before = min(before, step - 1)
            history.go_back(before)
            history.kept.append(_LoggedSteps(first=before + 1, last=step, step_s=_step_s(line), skips=skips))
            before = step


def _attempts(events: Iterable[Record], lines: Iterable[Record]) -> list[_Attempt]:
    """The attempts that started, in order."""
    by_number: dict[int, _Attempt] = {}
    is_restart = False
    for event in events:
        kind = event.get("event")
        if not isinstance(kind, str):
            raise UserError(f"an event has no name: {dict(event)}; events.jsonl is damaged, remove that line")
        # Recorded by the launcher before it starts the ranks again, still under the number of the failed attempt.
        is_restart |= kind == "restart"
        if kind not in _WORK | _ENDS:
            continue
        attempt = by_number.setdefault(_whole(event, "attempt"), _Attempt())
        attempt.events.append(event)
        if kind == "start":
            attempt.is_restart, is_restart = is_restart, False
    for line in lines:
        attempt = by_number.setdefault(_whole(line, "attempt"), _Attempt())
        (attempt.lines if "step_s" in line else attempt.other_lines).append(line)
    started = (by_number[number] for number in sorted(by_number))
    return [attempt for attempt in started if attempt.began is not None or attempt.lines]


def _pauses(attempts: Sequence[_Attempt]) -> tuple[float, list[float]]:
    """(seconds of waiting, seconds of each restart).

    A restart takes from the last work of the failed attempt to the first new step: detection, start of the ranks, and
    loading, over all attempts in between that made no step. Time between attempts is part of it only where the launcher
    was running to start the ranks again; otherwise it is waiting.
    """
    waiting_s, waited_s = 0.0, 0.0
    restart_times_s: list[float] = []
    # Last work of the newest attempt that made a step; `waited_s` is the waiting since then.
    stopped: float | None = None
    previous: _Attempt | None = None
    for attempt in attempts:
        if previous is not None and not (attempt.is_restart or attempt.is_rollback):
            gap_s = _gap_s(previous.ended, attempt.began)
            waiting_s += gap_s
            waited_s += gap_s
        if stopped is not None and attempt.first_step_began is not None and not attempt.is_rollback:
            # Hosts' clocks differ: a restart on another host could come out negative, and take from the sum of the
            # others.
            # Before the first step it may have ended what was left of an evaluation.
            evaluation_s = attempt.evaluation_s(step=attempt.resumed) if attempt.resumed else 0.0
            restart_times_s.append(max(0.0, attempt.first_step_began - stopped - waited_s - evaluation_s))
        # An attempt without steps does not end the restart: the next one's first step does.
        if attempt.lines:
            stopped, waited_s = attempt.worked, 0.0
        previous = attempt
    return waiting_s, restart_times_s


def _gap_s(ended: float | None, began: float | None) -> float:
    return 0.0 if ended is None or began is None else max(0.0, began - ended)


def record_time_s(record: Record) -> float | None:
    """Time of the record, in seconds since the epoch; None: it has no time."""
    text = record.get("time")
    if text is None:
        return None
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        raise UserError(f"time = {text!r} is not an ISO 8601 time; the record is damaged, remove its line") from None


def _step_s(line: Record) -> float:
    # null where the time was not finite: JSON has no such numbers.
    value = line["step_s"]
    return float(value) if isinstance(value, int | float) else 0.0


def _whole(record: Record, key: str) -> int:
    value = record.get(key)
    if not isinstance(value, int):
        raise UserError(f"{key} = {value!r} is not a whole number in {dict(record)}; remove that line")
    return value

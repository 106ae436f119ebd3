"""One run, from its first step to its last, under the faults of a queue."""

import re
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from lightscale.config.schema import RunConfig
from lightscale.launch.chaos.harness.hosts import Host, NamespaceHost
from lightscale.launch.chaos.harness.training import ORPHAN_S, Training, send, wait_until_gone
from lightscale.launch.chaos.harness.verify import DamagedStep, Lines
from lightscale.launch.chaos.preload.control import Control

POLL_S = 0.01
# Looking through all processes, or reading all events, takes milliseconds.
SLOW_POLL_S = 0.1
# Saves after which a phase that was not reached does not exist in this program, and a fault that was not noticed never
# is.
PATIENCE_SAVES = 8
# Ends without a step in a row, and ends in all, for which no fault is to blame.
_MAX_FAILURES = 3

Sign = Callable[[Lines], str | None]
"""From the events since a fault: evidence that it was not detected; None: it was."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The most that a fault may cost."""

    saves: int
    """Intervals between checkpoints whose steps are taken again."""
    seconds: float
    """From the fault's end to the next step, on a machine that is not overloaded."""


class Fault(Protocol):
    """A fault that happens once."""

    @property
    def kind(self) -> str:
        """What it is, for the table."""

    @property
    def bound(self) -> Bound:
        """The most that it may cost."""

    def inject(self, run: "Runner") -> None:
        """Inject it into `run`, report it by `happened`, and repair as a user would.

        May raise RunEnded before it has happened: it then moves to the next run.
        """


class Condition(Protocol):
    """Something that goes wrong for a while, during which other faults can happen."""

    @property
    def kind(self) -> str:
        """What it is, for the table."""

    @property
    def bound(self) -> Bound:
        """The most that it may cost, beside its own time."""

    @property
    def hinders_starts(self) -> bool:
        """Whether a user would mend it before the command is started by hand."""

    @property
    def stops_the_run(self) -> bool:
        """Whether there may be no step before it ends."""

    def begin(self, run: "Runner") -> None:
        """Let it go wrong."""

    def end(self, run: "Runner") -> None:
        """Mend it; no process has to be there."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Facts about the training that faults need."""

    config: RunConfig
    processes: int
    checkpoint_bytes: int
    """Size of a checkpoint."""
    other_store: Path
    """A store with the same sources and other tokens."""
    control: Control | None = None
    """The surroundings of the run, where they can go wrong."""


@dataclass(kw_only=True)
class Injected:
    """A fault that happened."""

    fault: Fault | Condition
    during: tuple[str, ...] = ()
    """Kinds of the conditions that lasted when it began."""
    sign: Sign | None = None
    """None: no detection is required, as long as the run continues."""
    first_event: int = 0
    """Number of events before it."""
    first_line: int = 0
    """Number of metrics lines before it."""
    last_line: int = 0
    """Number of metrics lines before its end."""
    missed: str | None = None
    """Result of `sign` at the end of the run."""
    recovered: bool = False
    """Whether a step followed it."""
    over_s: float = 0.0
    """Time of a monotonic clock from which it is to recover."""
    recovery_s: float | None = None
    """From its end to the next step."""


@dataclass(kw_only=True)
class Trial:
    """Result of a run, filled as it proceeds."""

    injected: list[Injected] = field(default_factory=list)
    damaged: list[DamagedStep] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    """Processes of ranks that outlived their launcher."""
    failures: list[str] = field(default_factory=list)
    """Ends of the command without a fault, and hangs."""
    unreached: list[str] = field(default_factory=list)
    """Phases that the program never reached."""
    too_late: list[str] = field(default_factory=list)
    """Kinds of faults before which all steps were done."""
    finished: bool = False
    interrupted: bool = False
    """Whether Ctrl-C ended it; faults without recovery by then are not judged."""
    starts: int = 0
    """Number of starts of the command."""
    seconds: float = 0.0

    @property
    def undetected(self) -> list[str]:
        """The faults that were not detected."""
        return [f"{one.fault}: {one.missed}" for one in self.injected if one.missed is not None]


@dataclass(kw_only=True)
class _Lasting:
    condition: Condition
    injected: Injected
    until_s: float


class GivenUp(Exception):
    """The run does not recover."""


class RunEnded(Exception):
    """All steps were done before the fault could happen."""


class Runner:
    """Injects faults from `queue` one at a time, until the run is finished or does not recover.

    Args:
        training: the command, not started.
        subject: facts about the training.
        patience_s: time without a step after which the run counts as hanging.
        report: called with each survived fault.
    """

    def __init__(
        self,
        training: Training,
        queue: deque[Fault],
        subject: Subject,
        *,
        patience_s: float,
        report: Callable[[Trial, Fault], None],
    ) -> None:
        self.training, self.queue, self.subject, self.trial = training, queue, subject, Trial()
        self.every = subject.config.checkpoint.every or 1
        """Steps between checkpoints."""
        self.patience_s, self._report = patience_s, report
        # The lines of metrics before the newest fault had its effect, and before the newest attempt.
        self._old_lines = self._old_attempts_lines = 0
        # The attempt that the newest fault came into.
        self._blamed_attempt = 0
        self._failures_in_row = 0
        self._unexplained = 0
        self._last_change = time.monotonic()
        self._lasting: list[_Lasting] = []

    def run(self) -> Trial:
        """Run to the end; ends all processes in any case."""
        began = time.monotonic()
        self.training.start()
        try:
            while self.queue:
                # Taken out only when it has happened: after RunEnded it is the first of the next round.
                fault = self.queue[0]
                fault.inject(self)
                self.queue.popleft()
                self._report(self.trial, fault)
            self.wait(lambda: False)
        except RunEnded:
            self.trial.finished = True
            # Of a pair, the second one.
            last = getattr(self.queue[0], "second", self.queue[0]) if self.queue else None
            if any(one.fault is last for one in self.trial.injected):
                self.queue.popleft()
        except GivenUp as reason:
            self.trial.failures.append(str(reason))
        except KeyboardInterrupt:
            self.trial.interrupted = True
            raise
        finally:
            self.training.end()
            self.end_conditions()
            # A fault that is left would be met by the next campaign in this directory.
            self.training.disarm()
            self._look_for_signs()
            self.trial.seconds = time.monotonic() - began
            self.trial.starts = self.training.starts
        return self.trial

    def happened(self, fault: Fault | Condition, sign: Sign | None = None) -> Injected:
        """Count `fault`; `sign` is evaluated at the end of the run."""
        self.training.steps.update()
        lines, events = self.training.lines(), self.training.events()
        injected = Injected(
            fault=fault,
            during=tuple(one.condition.kind for one in self._lasting),
            sign=sign,
            first_event=len(events),
            first_line=len(lines),
            last_line=len(lines),
            over_s=time.monotonic(),
        )
        self.trial.injected.append(injected)
        self._old_lines = self.num_steps
        self._blamed_attempt = self.training.attempt
        self._last_change = time.monotonic()
        return injected

    def begin(self, condition: Condition, seconds: float) -> None:
        """Let `condition` begin, which ends after `seconds` whatever else happens."""
        condition.begin(self)
        injected = self.happened(condition)
        self._lasting.append(_Lasting(condition=condition, injected=injected, until_s=time.monotonic() + seconds))

    def end_conditions(self, chosen: Callable[[Condition], bool] = lambda condition: True) -> None:
        """End the conditions that are `chosen`, before their time."""
        for one in [one for one in self._lasting if chosen(one.condition)]:
            self._lasting.remove(one)
            one.condition.end(self)
            # Only what is done without it counts as recovery.
            one.injected.over_s = time.monotonic()
            one.injected.last_line = len(self.training.lines())
            one.injected.recovered, one.injected.recovery_s = False, None
            self.training.steps.update()
            self._old_lines = self.num_steps
            self._blamed_attempt = max(self._blamed_attempt, self.training.attempt)
            self._last_change = time.monotonic()

    def host_of(self, rank: int) -> NamespaceHost:
        """The host of `rank`; the run is on several."""
        host = self.training.hosts[rank * len(self.training.hosts) // self.subject.processes]
        assert isinstance(host, NamespaceHost), "the campaign tries this on several hosts"
        return host

    def link(self, rank: int) -> tuple[NamespaceHost, list[Host]]:
        """The host of `rank`, and the others."""
        own = self.host_of(rank)
        return own, [host for host in self.training.hosts if host is not own]

    def mend_for_start(self) -> None:
        """End what a user would mend before the command is started by hand."""
        self.end_conditions(lambda condition: condition.hinders_starts)

    def wait_until_over(self) -> None:
        """Wait for the end of all conditions, and for a step after it."""
        self.wait(lambda: not self._lasting)
        self.wait_for_steps(1)

    def settle(self) -> None:
        """End the attempt: later lines belong to later attempts."""
        self.training.steps.update()
        self._old_lines = self._old_attempts_lines = self.num_steps
        self._last_change = time.monotonic()

    @property
    def num_steps(self) -> int:
        """Steps taken so far, of all attempts."""
        return self.training.steps.num_lines

    def wait_for_first_step(self) -> None:
        """Wait until an attempt after the newest fault has taken a step."""
        self.wait(lambda: self.num_steps > self._old_attempts_lines)

    def wait_for_steps(self, number: int) -> None:
        """Wait for `number` more steps."""
        first = self.num_steps
        self.wait(lambda: self.num_steps >= first + number)

    def pause(self, seconds: float) -> None:
        """Let the run continue for `seconds`."""
        until = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() > until)

    def wait(self, until: Callable[[], bool], *, poll_s: float = POLL_S) -> None:
        """Wait until `until()`, keeping the command running. Raises RunEnded or GivenUp."""
        while True:
            self._watch()
            if until():
                return
            # As a user or a job script would: the command restarts its ranks itself, but not after its own end.
            if self.training.has_ended:
                self._start_again()
            time.sleep(poll_s)

    def kill_everything(self) -> None:
        """Send SIGKILL to the launcher and all ranks."""
        ranks = self.training.ranks()
        self.training.kill(ranks.values(), launcher=True)
        wait_until_gone(ranks.values(), ORPHAN_S)
        self.settle()

    def bring_down(self, ready: Callable[[], bool]) -> None:
        """Kill everything once `ready()` holds, which still holds afterwards; nothing if the command has ended so."""
        while not (self.training.has_ended and self._is_unfinished() and ready()):
            if self.training.is_finished:
                self._end()
            if self.training.has_ended:
                # Neither a fault nor a failure: the kill came at the wrong moment.
                self.training.start()
            self.wait_for_first_step()
            self.wait(ready, poll_s=SLOW_POLL_S)
            self.kill_everything()

    def refused(self, exit_code: int, *patterns: str, more: Sequence[str] = ()) -> str | None:
        """Start the command with the arguments `more`: it must end as in `ends`, before training."""
        self.mend_for_start()
        said = self.training.num_output_bytes
        self.training.start(*more)
        return self.ends(exit_code, *patterns, first_bytes=said, most_steps=0)

    def ends(self, exit_code: int, *patterns: str, first_bytes: Sequence[int], most_steps: int) -> str | None:
        """Wait until the command ends on every host; returns the fault in its end, or None. It has ended afterwards.

        Args:
            exit_code: required exit code.
            patterns: required matches in its output from `first_bytes` on.
            most_steps: number of further steps allowed.
        """
        first, deadline = self.num_steps, time.monotonic() + self.patience_s
        wrong = None
        while not self.training.has_ended:
            self._end_due()
            self.training.steps.update()
            if self.num_steps > first + most_steps:
                wrong = f"it took {self.num_steps - first} steps"
            elif time.monotonic() > deadline:
                wrong = f"it did not end within {self.patience_s:.0f} s"
            if wrong is not None:
                self.kill_everything()
                return wrong
            time.sleep(POLL_S)
        self.settle()
        outputs = self.training.outputs(first_bytes)
        missing = [one for one in patterns for text in outputs if re.search(one, text, re.MULTILINE) is None]
        if set(self.training.exit_codes) != {exit_code}:
            wrong = f"it ended with {self.training.end_text}, not {exit_code}"
        elif missing:
            wrong = f"it did not print {missing[0]!r}"
        if wrong is not None:
            wrong += f": {' / '.join(line for text in outputs for line in text.splitlines()[-3:])}"
        return wrong

    def kill_what_is_left(self, processes: Sequence[psutil.Process]) -> None:
        """Send SIGKILL to processes that should have ended."""
        for process in processes:
            send(process, signal.SIGKILL)
        wait_until_gone(processes, ORPHAN_S)

    def _is_unfinished(self) -> bool:
        # A kill may come after the last step.
        status = self.training.run.read_status()
        return status is None or status.status != "finished"

    def _look_for_signs(self) -> None:
        events = self.training.events()
        if self.trial.interrupted:
            self.trial.injected = [one for one in self.trial.injected if one.recovered]
        for one in self.trial.injected:
            if one.sign is not None:
                one.missed = one.sign(events[one.first_event :])

    def _end_due(self) -> None:
        due = [one.condition for one in self._lasting if time.monotonic() >= one.until_s]
        self.end_conditions(lambda condition: any(condition is one for one in due))

    def _watch(self) -> None:
        self._end_due()
        before = self.num_steps
        self.training.steps.update()
        if self.num_steps > before:
            self._last_change = time.monotonic()
        if self.num_steps > self._old_lines:
            # A step was taken after the newest fault, so that the run has survived all before it as well.
            self._failures_in_row = 0
            self._have_recovered()
        # Nobody expects steps while nothing can be written or read.
        if not self._lasting and time.monotonic() - self._last_change > self.patience_s:
            raise GivenUp(f"no step for {self.patience_s:.0f} s")

    def _end(self) -> None:
        # A kill during the last save may have left no step to be taken again.
        self.end_conditions()
        self._have_recovered()
        raise RunEnded

    def _have_recovered(self) -> None:
        for injected in self.trial.injected:
            injected.recovered = True
            if injected.recovery_s is None:
                injected.recovery_s = time.monotonic() - injected.over_s

    def _start_again(self) -> None:
        if self.training.is_finished:
            self._end()
        # A fault that nobody has recovered from explains an end of the command, and so does one of this same attempt.
        to_blame = [one for one in self.trial.injected if not one.recovered]
        if not to_blame and not self._lasting and self.training.attempt > self._blamed_attempt:
            self.trial.failures.append(f"the command ended with {self.training.end_text} without a fault")
            self._unexplained += 1
            if self._unexplained >= _MAX_FAILURES:
                raise GivenUp(f"the command ended {self._unexplained} times without a fault")
        # Faults that come close together may cost one end each before there is a step again.
        self._failures_in_row += 1
        if self._failures_in_row > _MAX_FAILURES + len(to_blame):
            raise GivenUp(
                f"the command ended {self._failures_in_row} times without a step, last with {self.training.end_text}"
            )
        self._last_change = time.monotonic()
        # As a user, who reads why it ended.
        self.mend_for_start()
        self.training.start()

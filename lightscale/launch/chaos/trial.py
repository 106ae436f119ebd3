"""One run from its first step to its last under the faults of a queue."""

import contextlib
import random
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lightscale.launch.chaos.damage import checkpoint_directories, damage
from lightscale.launch.chaos.schedule import Damage, DiskFault, Fault, FullDisk, Kill, StopRank
from lightscale.launch.chaos.training import ORPHAN_S, Training, send, wait_until_gone
from lightscale.launch.chaos.verify import DamagedStep
from lightscale.training.health.fault_injection import InjectedFault

_POLL_S = 0.01
# Looking through all processes takes milliseconds.
_SLOW_POLL_S = 0.1
# Saves after which a phase that was not reached does not exist in this program.
_PATIENCE_SAVES = 8
# Ends without a step in a row, and ends in all, for which no fault is to blame.
_MAX_FAILURES = 3


@dataclass(kw_only=True)
class Injected:
    """A fault that happened."""

    fault: Fault
    recovered: bool = False
    """Whether a step was taken after it."""


@dataclass(kw_only=True)
class Trial:
    """How a run went; filled while it goes."""

    injected: list[Injected] = field(default_factory=list)
    damaged: list[DamagedStep] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    """Processes of ranks that lived on after their launcher."""
    failures: list[str] = field(default_factory=list)
    """Ends of the command that no fault explains, and hangs."""
    unreached: list[str] = field(default_factory=list)
    """Phases that this program does not go through."""
    finished: bool = False
    starts: int = 0
    """How often the command was started."""
    seconds: float = 0.0


class GivenUp(Exception):
    """The run does not recover."""


class RunEnded(Exception):
    """All steps are done, before the fault could happen."""


class Runner:
    """Takes faults from `queue`, one at a time, until the run is finished or does not recover.

    Args:
        training: the command, not started.
        every: steps between checkpoints.
        disk_bytes: size of a checkpoint, for full disks.
        patience_s: time without a step after which the run counts as hanging.
        report: called with each fault that was survived.
    """

    def __init__(
        self,
        training: Training,
        queue: deque[Fault],
        *,
        every: int,
        disk_bytes: int,
        patience_s: float,
        report: Callable[[Trial, Fault], None],
    ) -> None:
        self.training, self.queue, self.trial = training, queue, Trial()
        self._every, self._disk_bytes, self._patience_s, self._report = every, disk_bytes, patience_s, report
        # The newest attempt and line of metrics before the newest fault had its effect.
        self._old_attempt = self._old_lines = 0
        # The attempt that the newest fault came into.
        self._blamed_attempt = 0
        self._failures_in_row = 0
        self._unexplained = 0
        self._last_change = time.monotonic()

    def run(self) -> Trial:
        """To the end; no process is left, whatever happens."""
        began = time.monotonic()
        self.training.start()
        try:
            while self.queue:
                # Taken out only when it has happened: after RunEnded it is the first of the next round.
                self._inject(self.queue[0])
                self._report(self.trial, self.queue.popleft())
            self._wait(lambda: False)
        except RunEnded:
            self.trial.finished = True
        except GivenUp as reason:
            self.trial.failures.append(str(reason))
        finally:
            self.training.end()
            # A fault that is left would be met by the next campaign in this directory.
            self.training.disarm()
        self.trial.seconds = time.monotonic() - began
        self.trial.starts = self.training.starts
        return self.trial

    def _inject(self, fault: Fault) -> None:
        match fault:
            case Kill(point=None):
                self._kill_at_an_instant(fault)
            case Kill():
                self._kill_at_a_point(fault)
            case Damage():
                self._damage(fault)
            case StopRank():
                self._stop(fault)
            case DiskFault():
                self._disk_fault(fault)
            case FullDisk():
                self._fill_disk(fault)

    def _kill_at_an_instant(self, kill: Kill) -> None:
        if kill.while_starting:
            self._wait(lambda: len(self.training.ranks()) > max(kill.victims, default=0), poll_s=_SLOW_POLL_S)
        else:
            self._wait_for_first_step()
        self._pause(kill.delay_s)
        there = kill.launcher or set(kill.victims) & set(self.training.ranks())
        # Between two attempts there is nothing to kill; a kill that hits nobody must not count.
        if self.training.has_ended or not there:
            return self._kill_at_an_instant(kill)
        return self._strike(kill)

    def _kill_at_a_point(self, kill: Kill) -> None:
        assert kill.point is not None
        alone = kill.victims == (kill.rank,) and not kill.launcher
        # A rank that dies with others is held where it is until all are killed.
        action = "kill" if alone else "stop"
        self.training.arm(kill.rank, InjectedFault(action=action, point=kill.point, count=kill.count))
        first = self._steps_seen()
        most = (_PATIENCE_SAVES + kill.count) * self._every
        self._wait(lambda: not self.training.is_armed(kill.rank) or self._steps_seen() > first + most)
        if self.training.is_armed(kill.rank):
            self.training.disarm()
            if kill.point not in self.trial.unreached:
                self.trial.unreached.append(kill.point)
        # Also where the point was not reached: the kill then comes at this instant.
        self._strike(kill)

    def _strike(self, kill: Kill) -> None:
        """Kill, and wait for the processes of the attempt to end."""
        ranks = self.training.ranks()
        self.training.kill([ranks[rank] for rank in kill.victims if rank in ranks], launcher=kill.launcher)
        self._happened(kill)
        # Without their launcher ranks are ended by the kernel, at once; with it, by the launcher, once it has noticed.
        left = wait_until_gone(ranks.values(), ORPHAN_S if kill.launcher else self._patience_s)
        if left and kill.launcher:
            self.trial.orphans += [f"rank of process {process.pid} after {kill.kind}" for process in left]
        elif left:
            self.trial.failures.append(f"ranks hung for {self._patience_s:.0f} s after {kill.kind}")
        for process in left:
            send(process, signal.SIGKILL)
        wait_until_gone(left, ORPHAN_S)
        self._settle()

    def _damage(self, fault: Damage) -> None:
        self._wait_for_first_step()
        # The run must have an older one to go back to.
        self._wait(lambda: len(checkpoint_directories(self.training.run.checkpoints)) > 1)
        ranks = self.training.ranks()
        self.training.kill(ranks.values(), launcher=True)
        wait_until_gone(ranks.values(), ORPHAN_S)
        self._settle()
        status, directories = self.training.run.read_status(), checkpoint_directories(self.training.run.checkpoints)
        # The kill may have come while an old checkpoint was removed, or after the last step.
        if len(directories) < 2 or (status is not None and status.status == "finished"):
            return self._damage(fault)
        newest = directories[-1]
        file = damage(newest, fault.how, random.Random(fault.seed))
        step, events = int(newest.name.removeprefix("step-")), len(self.training.events())
        self.trial.damaged.append(DamagedStep(step=step, directory=newest.name, file=file.name, after_events=events))
        self._happened(fault)
        # A process that is killed before it recorded what it refused leaves no record of it.
        return self._wait_for_first_step()

    def _stop(self, fault: StopRank) -> None:
        self._wait_for_first_step()
        # The first steps may take long, and the watchdog allows more time for them.
        first = self._steps_seen()
        self._wait(lambda: self._steps_seen() > first + 2 * self._every)
        self._pause(fault.delay_s)
        ranks = self.training.ranks()
        # It is just being started again: there will be a better moment.
        if fault.rank not in ranks:
            return self._stop(fault)
        send(ranks[fault.rank], signal.SIGSTOP)
        self._happened(fault)
        if left := wait_until_gone(ranks.values(), self._patience_s):
            self.trial.failures.append(
                f"rank {fault.rank} was stopped and not detected within {self._patience_s:.0f} s; all were killed"
            )
            self.training.kill(left, launcher=True)
            wait_until_gone(left, ORPHAN_S)
        return self._settle()

    def _disk_fault(self, fault: DiskFault) -> None:
        action, value = ("raise", fault.error) if fault.error else ("slow", f"{fault.pause_s}")
        self.training.arm(fault.rank, InjectedFault(action=action, value=value, point=fault.point, count=fault.count))
        first = self._steps_seen()
        most = (_PATIENCE_SAVES if fault.error else 3) * self._every
        try:
            self._wait(lambda: not self.training.is_armed(fault.rank) or self._steps_seen() > first + most)
        finally:
            # The file of a slow disk stays where it is, and does not tell whether its point was reached.
            reached = fault.error is None or not self.training.is_armed(fault.rank)
            self.training.disarm()
        if reached:
            self._happened(fault)
        elif fault.point not in self.trial.unreached:
            self.trial.unreached.append(fault.point)

    def _fill_disk(self, fault: FullDisk) -> None:
        self._wait_for_first_step()
        self._pause(fault.delay_s)
        disk = self.training.run.checkpoints
        ballast = disk / "ballast"
        surplus = shutil.disk_usage(disk).free - int(fault.free_share * self._disk_bytes)
        # A save at the same time may leave less than there was.
        with contextlib.suppress(OSError):
            # Written zeros: a sparse file would take no space.
            ballast.write_bytes(bytes(max(0, surplus)))
        first = self._steps_seen()
        try:
            # Two saves; or the first one ends the run, which is then started again with an empty disk.
            self._wait(lambda: self._steps_seen() > first + 2 * self._every or self.training.has_ended)
        finally:
            ballast.unlink(missing_ok=True)
        # Only what is done with space again counts as recovery.
        self._happened(fault)

    def _happened(self, fault: Fault) -> None:
        self.trial.injected.append(Injected(fault=fault))
        self.training.steps.update()
        self._old_lines = self.training.steps.num_lines
        self._blamed_attempt = self.training.run.attempt
        self._last_change = time.monotonic()

    def _settle(self) -> None:
        """The attempt is over: what comes from now on is by a later one."""
        self.training.steps.update()
        self._old_attempt, self._old_lines = self.training.run.attempt, self.training.steps.num_lines
        self._last_change = time.monotonic()

    def _steps_seen(self) -> int:
        return self.training.steps.num_lines

    def _wait_for_first_step(self) -> None:
        """Until an attempt after the newest fault has taken a step."""
        self._wait(lambda: self.training.steps.attempt > self._old_attempt)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._wait(lambda: time.monotonic() > until)

    def _wait(self, until: Callable[[], bool], *, poll_s: float = _POLL_S) -> None:
        """Until `until()`, keeping the command running. Raises RunEnded or GivenUp."""
        while True:
            self._watch()
            if until():
                return
            # As a user or a job script would: the command restarts its ranks itself, but not after its own end.
            if self.training.has_ended:
                self._start_again()
            time.sleep(poll_s)

    def _watch(self) -> None:
        before = self.training.steps.num_lines
        self.training.steps.update()
        if self.training.steps.num_lines > before:
            self._last_change = time.monotonic()
        if self.training.steps.num_lines > self._old_lines:
            # A step was taken after the newest fault, so that the run has survived all before it as well.
            self._failures_in_row = 0
            for injected in self.trial.injected:
                injected.recovered = True
        if time.monotonic() - self._last_change > self._patience_s:
            raise GivenUp(f"no step for {self._patience_s:.0f} s")

    def _start_again(self) -> None:
        if self.training.is_finished:
            # A kill during the last save may have left no step to be taken again.
            for injected in self.trial.injected:
                injected.recovered = True
            raise RunEnded
        # A fault that nobody has recovered from explains an end of the command, and so does one of this same attempt.
        to_blame = [one for one in self.trial.injected if not one.recovered]
        if not to_blame and self.training.run.attempt > self._blamed_attempt:
            self.trial.failures.append(f"the command ended with {self.training.exit_code} without a fault")
            self._unexplained += 1
            if self._unexplained >= _MAX_FAILURES:
                raise GivenUp(f"the command ended {self._unexplained} times without a fault")
        # Faults that come close together may cost one end each before there is a step again.
        self._failures_in_row += 1
        if self._failures_in_row > _MAX_FAILURES + len(to_blame):
            raise GivenUp(
                f"the command ended {self._failures_in_row} times without a step, last with {self.training.exit_code}"
            )
        self._last_change = time.monotonic()
        self.training.start()

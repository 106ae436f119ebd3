"""A rank ten times slower than the others, limits that are met while it runs, and a second job on the same run."""

import contextlib
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import psutil

from lightscale.launch.chaos.harness.training import PORT, Training, send
from lightscale.launch.chaos.harness.trial import Bound, Runner

_PERIOD_S, _SHARE = 0.1, 0.1
LIMITS = ("open files", "file size", "address space")


@dataclass(kw_only=True, eq=False)
class SlowRank:
    """One rank has a tenth of its time: it is stopped and continued by turns."""

    rank: int
    kind: ClassVar[str] = "slow rank"
    bound: ClassVar[Bound] = Bound(saves=2, seconds=120)
    hinders_starts: ClassVar[bool] = False
    stops_the_run: ClassVar[bool] = False
    _is_over: threading.Event = field(default_factory=threading.Event, repr=False)
    _thread: threading.Thread | None = field(default=None, repr=False)

    def begin(self, run: Runner) -> None:
        """Slow it."""
        self._is_over.clear()
        self._thread = threading.Thread(target=self._slow, args=(run,), daemon=True)
        self._thread.start()

    def end(self, run: Runner) -> None:
        """Let it go on."""
        self._is_over.set()
        assert self._thread is not None, "it has begun"
        self._thread.join()

    def _slow(self, run: Runner) -> None:
        process = None
        while not self._is_over.is_set():
            if process is None or not process.is_running():
                # After a restart it is another process.
                process = run.training.ranks().get(self.rank)
            if process is not None:
                send(process, signal.SIGSTOP)
                time.sleep(_PERIOD_S * (1 - _SHARE))
                send(process, signal.SIGCONT)
            time.sleep(_PERIOD_S * _SHARE)


@dataclass(kw_only=True, eq=False)
class Limit:
    """A limit of a running rank falls to hardly more than it uses; its successors have their launcher's."""

    rank: int
    what: str
    """One of `LIMITS`."""
    spare: float
    """From 0 to 1: how much is left."""
    bound: ClassVar[Bound] = Bound(saves=6, seconds=120)
    hinders_starts: ClassVar[bool] = True
    stops_the_run: ClassVar[bool] = True
    _before: tuple[psutil.Process, int, tuple[int, int]] | None = field(default=None, repr=False)

    @property
    def kind(self) -> str:
        """What it is, for the table."""
        return f"limit of {self.what}"

    def begin(self, run: Runner) -> None:
        """Lower the soft limit."""
        process = run.training.ranks().get(self.rank)
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if process is not None:
                number, value = self._limit(process)
                before = resource.prlimit(process.pid, number)
                self._before = process, number, before
                # A process may not have a soft limit above the hard one.
                value = value if before[1] == resource.RLIM_INFINITY else min(value, before[1])
                resource.prlimit(process.pid, number, (value, before[1]))

    def end(self, run: Runner) -> None:
        """Put the limit back."""
        if self._before is not None:
            process, number, limits = self._before
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if process.is_running():
                    resource.prlimit(process.pid, number, limits)
            self._before = None

    def _limit(self, process: psutil.Process) -> tuple[int, int]:
        if self.what == "open files":
            numbers = [int(path.name) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
            # By number, not by count: a new descriptor takes the least free one.
            return resource.RLIMIT_NOFILE, max(numbers) + 1 + round(8 * self.spare)
        if self.what == "file size":
            return resource.RLIMIT_FSIZE, 4096 + round(65536 * self.spare)
        assert self.what == "address space", self.what
        return resource.RLIMIT_AS, process.memory_info().vms + round((64 << 20) * self.spare)


@dataclass(frozen=True, kw_only=True)
class SecondJob:
    """The command is started again while it runs: it must be refused, and change nothing."""

    delay_s: float
    kind: ClassVar[str] = "second job on the run"
    bound: ClassVar[Bound] = Bound(saves=0, seconds=30)

    def inject(self, run: Runner) -> None:
        """Start it, and wait for its end."""
        while True:
            run.wait_for_first_step()
            run.pause(self.delay_s)
            if not run.training.has_ended:
                break
        log = run.training.log.with_suffix(".second.log")
        log.unlink(missing_ok=True)
        second = Training(
            run.training.command,
            run.training.run,
            faults_folder=run.training.faults_folder / "none",
            log=log,
            hosts=run.training.hosts,
            # At that of the first one they would not come as far as the run.
            port=PORT + 1,
        )
        second.start()
        try:
            run.wait(lambda: second.has_ended)
        finally:
            second.end()
        missed = None
        # The first one may have ended meanwhile, for a fault that came before.
        if second.is_finished and not run.training.is_finished:
            missed = "the second one ended with 0 while the first one trained"
        elif not run.training.has_ended and not all("is in use by" in text for text in second.outputs()):
            last = [line for text in second.outputs() for line in text.splitlines()[-3:]]
            missed = f"it ended with {second.end_text}: {' / '.join(last)}"
        run.happened(self, lambda since: missed)
        run.wait_for_steps(1)


def draw_slow_rank(generator: random.Random, processes: int) -> SlowRank:
    """Draw the rank."""
    return SlowRank(rank=generator.randrange(processes))


def draw_limit(generator: random.Random, processes: int) -> Limit:
    """Draw the rank and the limit."""
    return Limit(rank=generator.randrange(processes), what=generator.choice(LIMITS), spare=generator.random())


def draw_second_jobs(generator: random.Random, number: int, processes: int) -> Iterator[SecondJob]:
    """Draw the moments."""
    for _ in range(number):
        yield SecondJob(delay_s=generator.uniform(0, 2.0))

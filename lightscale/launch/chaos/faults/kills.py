"""Kills and stops of processes and whole hosts, at a phase of the run or at any instant."""

import random
import signal
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import psutil

from lightscale.launch.chaos.faults.drawing import LATEST_S, shuffled_cycle
from lightscale.launch.chaos.harness.training import ORPHAN_S, send, wait_until_gone
from lightscale.launch.chaos.harness.trial import PATIENCE_SAVES, SLOW_POLL_S, Bound, Runner
from lightscale.training.health.fault_injection import LOAD_POINTS, SAVE_POINTS, STEP_POINTS, InjectedFault

KILL = "kill at "
"""What the kinds of kills begin with; the phase follows."""
LOSS = "loss of a host at "
"""The same of losses of hosts; some kinds have a word before it."""
# Phases that only the rank goes through that makes the directory a checkpoint.
_ONE_RANK_POINTS = ("save:manifest", "save:rename", "save:retention")
# A start takes several seconds; instants within it are drawn from these.
_LATEST_AFTER_START_S = 6.0


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Sends SIGKILL to some ranks, the launcher, or all of them."""

    victims: tuple[int, ...]
    """Ranks."""
    launcher: bool
    point: str | None = None
    """The phase at whose start it happens; None: at any instant."""
    rank: int = 0
    """The rank that reaches `point`."""
    count: int = 1
    """Number of the visit to the phase."""
    delay_s: float = 0.0
    """Time after the attempt's first step, or after the start of its ranks."""
    while_starting: bool = False
    """Whether `delay_s` counts from the start of the ranks."""
    bound: ClassVar[Bound] = Bound(saves=2, seconds=120)

    @property
    def kind(self) -> str:
        """What it is, for the table."""
        return f"{KILL}{self.point or 'any instant'}"

    @property
    def during_save(self) -> bool:
        """Whether it certainly hits a save."""
        return self.point in SAVE_POINTS

    def inject(self, run: Runner) -> None:
        """Wait for its moment, kill, and wait for the attempt's processes to end."""
        if self.point is None:
            self._await_instant(run)
        else:
            self._await_point(run, self.point)
        self._strike(run)

    def _await_instant(self, run: Runner) -> None:
        while True:
            if self.while_starting:
                run.wait(lambda: len(run.training.ranks()) > max(self.victims, default=0), poll_s=SLOW_POLL_S)
            else:
                run.wait_for_first_step()
            run.pause(self.delay_s)
            # Between two attempts there is nothing to kill; a kill that hits nobody must not count.
            if not run.training.has_ended and self._hits(run, run.training.ranks()):
                return

    def _await_point(self, run: Runner, point: str) -> None:
        alone = self.victims == (self.rank,) and not self.launcher
        # A rank that dies with others is held where it is until all are killed.
        action = "kill" if alone else "stop"
        run.training.arm(self.rank, InjectedFault(action=action, point=point, count=self.count))
        last = run.num_steps + (PATIENCE_SAVES + self.count) * run.every
        run.wait(lambda: not run.training.is_armed(self.rank) or run.num_steps > last)
        if run.training.is_armed(self.rank):
            run.training.disarm()
            # The kill then comes at this instant.
            if point not in run.trial.unreached:
                run.trial.unreached.append(point)

    def _hits(self, run: Runner, ranks: Collection[int]) -> bool:
        """Whether it hits anybody while these `ranks` are there."""
        return self.launcher or bool(set(self.victims) & set(ranks))

    def _hit(self, run: Runner, ranks: Mapping[int, psutil.Process]) -> None:
        run.training.kill([ranks[rank] for rank in self.victims if rank in ranks], launcher=self.launcher)

    def _strike(self, run: Runner) -> None:
        ranks = run.training.ranks()
        self._hit(run, ranks)
        run.happened(self)
        # Without their launcher ranks are ended by the kernel, at once; with it, by the launcher, once it has noticed.
        left = wait_until_gone(ranks.values(), ORPHAN_S if self.launcher else run.patience_s)
        if left and self.launcher:
            run.trial.orphans += [f"rank of process {process.pid} after {self.kind}" for process in left]
        elif left:
            run.trial.failures.append(f"ranks hung for {run.patience_s:.0f} s after {self.kind}")
        run.kill_what_is_left(left)
        run.settle()


@dataclass(frozen=True, kw_only=True)
class LostHost(Kill):
    """Sends SIGKILL to all processes of the host of `rank`; the others have to notice."""

    victims: tuple[int, ...] = ()
    launcher: bool = False
    is_silent: bool
    """Whether its link is down before, so that no connection of the others is closed, as without power."""

    @property
    def kind(self) -> str:
        """What it is, for the table."""
        return f"{'silent ' if self.is_silent else ''}{LOSS}{self.point or 'any instant'}"

    def _hits(self, run: Runner, ranks: Collection[int]) -> bool:
        host = run.host_of(self.rank)
        return any(run.host_of(rank) is host for rank in ranks)

    def _hit(self, run: Runner, ranks: Mapping[int, psutil.Process]) -> None:
        host = run.host_of(self.rank)
        if self.is_silent:
            host.set_link(is_up=False)
        host.kill_processes()

    def _strike(self, run: Runner) -> None:
        try:
            super()._strike(run)
        finally:
            # It is there again before the command is given there again.
            run.host_of(self.rank).set_link(is_up=True)


@dataclass(frozen=True, kw_only=True)
class StopRank:
    """Sends SIGSTOP to a rank, which hangs without ending."""

    rank: int
    delay_s: float
    """Time after the attempt's first saves."""
    kind: str = "rank stopped (SIGSTOP)"
    bound: ClassVar[Bound] = Bound(saves=2, seconds=180)

    def inject(self, run: Runner) -> None:
        """Stop it, and wait for the launcher to detect it."""
        while True:
            run.wait_for_first_step()
            # The first steps may take long, and the watchdog allows more time for them.
            run.wait_for_steps(2 * run.every + 1)
            run.pause(self.delay_s)
            # If it is just being started again, there will be a better moment.
            if self.rank in (ranks := run.training.ranks()):
                break
        send(ranks[self.rank], signal.SIGSTOP)
        run.happened(self)
        if left := wait_until_gone(ranks.values(), run.patience_s):
            run.trial.failures.append(
                f"rank {self.rank} was stopped and not detected within {run.patience_s:.0f} s; all were killed"
            )
            run.training.kill(left, launcher=True)
            wait_until_gone(left, ORPHAN_S)
        run.settle()


def draw_kills(generator: random.Random, number: int, processes: int) -> Iterator[Kill]:
    """Half of them, rounded up, at phases of saves, each equally often; a fifth of the rest each at loads and steps."""
    num_saves = (number + 1) // 2
    num_others = (number - num_saves) // 5
    points: list[str | None] = [
        *shuffled_cycle(generator, SAVE_POINTS, num_saves),
        *shuffled_cycle(generator, LOAD_POINTS, num_others),
        *shuffled_cycle(generator, STEP_POINTS, num_others),
    ]
    for point in points + [None] * (number - len(points)):
        yield _kill(generator, point, processes)


def draw_lost_hosts(generator: random.Random, number: int, processes: int) -> Iterator[LostHost]:
    """Draw half of them, rounded up, at phases of saves, loads and steps, and every second one silent."""
    num_points = (number + 1) // 2
    points: list[str | None] = [*shuffled_cycle(generator, SAVE_POINTS + LOAD_POINTS + STEP_POINTS, num_points)]
    for count, point in enumerate(points + [None] * (number - num_points)):
        rank = 0 if point in _ONE_RANK_POINTS else generator.randrange(processes)
        is_silent = count % 2 == 1
        if point is None:
            starting, delay_s = _instant(generator)
            yield LostHost(rank=rank, is_silent=is_silent, delay_s=delay_s, while_starting=starting)
        else:
            yield LostHost(rank=rank, is_silent=is_silent, point=point, count=_count(generator, point))


def draw_stops(generator: random.Random, number: int, processes: int) -> Iterator[StopRank]:
    """Draw stops of any rank."""
    for _ in range(number):
        yield StopRank(rank=generator.randrange(processes), delay_s=generator.uniform(0, LATEST_S))


def _kill(generator: random.Random, point: str | None, processes: int) -> Kill:
    """A kill of one rank (six of ten), several, the launcher, or everything."""
    first = 0 if point in _ONE_RANK_POINTS else generator.randrange(processes)
    others = [rank for rank in range(processes) if rank != first]
    everyone = (first, *others)
    some = (first, *generator.sample(others, generator.randint(min(1, len(others)), len(others))))
    (victims, launcher), *_ = generator.choices(
        [((first,), False), (some, False), ((), True), (everyone, True)], weights=[6, 2, 1, 1]
    )
    if point is None:
        starting, delay_s = _instant(generator)
        return Kill(victims=victims, launcher=launcher, delay_s=delay_s, while_starting=starting)
    return Kill(victims=victims, launcher=launcher, point=point, rank=first, count=_count(generator, point))


def _instant(generator: random.Random) -> tuple[bool, float]:
    """Whether it is while ranks start, and its delay in seconds."""
    starting = generator.random() < 0.2
    return starting, generator.uniform(0, _LATEST_AFTER_START_S if starting else LATEST_S)


def _count(generator: random.Random, point: str) -> int:
    """Late enough that saves before it succeed: otherwise there is hardly any progress between kills."""
    if point in LOAD_POINTS:
        return 1
    # A save passes save:write once for every block of its file, so that these kills also hit the middle of a file.
    if point in ("save:write", "save:sync"):
        return generator.choice([1, 2, 3, 4, 6])
    return generator.randint(1, 9 if point in STEP_POINTS else 3)

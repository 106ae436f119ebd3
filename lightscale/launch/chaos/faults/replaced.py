"""Files that are replaced or removed: another store at the store's place, a checkpoint that is being read, and what a
power cut takes on a disk that lies."""

import random
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lightscale.errors import UserError
from lightscale.launch.chaos.faults.damaged_checkpoint import checkpoint_directories
from lightscale.launch.chaos.harness.training import send
from lightscale.launch.chaos.harness.trial import Bound, Runner
from lightscale.launch.chaos.harness.verify import DamagedStep
from lightscale.launch.chaos.preload import power
from lightscale.training.health.fault_injection import LOAD_POINTS, InjectedFault


def aside_of(copy: Path) -> Path:
    """Where the store `copy` is while another one has its place."""
    return copy.with_name(f"{copy.name}.aside")


@dataclass(frozen=True, kw_only=True)
class ReplacedStore:
    """Kills everything, and a store with other tokens takes the place of the store: the next start must refuse."""

    kind: ClassVar[str] = "store replaced"
    bound: ClassVar[Bound] = Bound(saves=2, seconds=120)

    def inject(self, run: Runner) -> None:
        """Replace it, start, and put it back."""
        # Before the first checkpoint nothing says which tokens the run began with.
        run.bring_down(lambda: bool(checkpoint_directories(run.training.run.checkpoints)))
        store = run.subject.config.data.store
        assert store is not None, "the campaign tries this on one store"
        aside = aside_of(store)
        store.rename(aside)
        try:
            shutil.copytree(run.subject.other_store, store)
            missed = run.refused(UserError.EXIT_CODE, re.escape(str(store.name)))
        finally:
            shutil.rmtree(store, ignore_errors=True)
            aside.rename(store)
        run.happened(self, lambda since: missed)


@dataclass(frozen=True, kw_only=True)
class RemovedWhileRead:
    """Kills everything, and removes the newest checkpoint while `rank` reads it: an older one must do."""

    rank: int
    point: str
    kind: ClassVar[str] = "checkpoint removed while it is read"
    bound: ClassVar[Bound] = Bound(saves=3, seconds=120)

    def inject(self, run: Runner) -> None:
        """Hold the rank where it reads, remove the checkpoint, and let it go on."""
        checkpoints = run.training.run.checkpoints
        run.bring_down(lambda: len(checkpoint_directories(checkpoints)) > 1)
        newest = checkpoint_directories(checkpoints)[-1]
        run.training.arm(self.rank, InjectedFault(action="stop", point=self.point))
        first = run.num_steps
        run.training.start()
        run.wait(lambda: not run.training.is_armed(self.rank) or run.num_steps > first)
        run.training.disarm()
        ranks = run.training.ranks()
        step = int(newest.name.removeprefix("step-"))
        # Some ranks may have read all of it, or the run may be past it.
        run.trial.damaged.append(
            DamagedStep(step=step, directory=newest.name, file="", after_events=len(run.training.events()))
        )
        shutil.rmtree(newest, ignore_errors=True)
        run.happened(self)
        if self.rank in ranks:
            send(ranks[self.rank], signal.SIGCONT)
        run.wait_for_steps(1)


@dataclass(frozen=True, kw_only=True)
class PowerCut:
    """Everything ends at an instant on a disk that lies: what was not synced is lost, as drawn."""

    seed: int
    delay_s: float
    kind: ClassVar[str] = "power cut on a disk that lies"
    bound: ClassVar[Bound] = Bound(saves=2, seconds=120)

    def inject(self, run: Runner) -> None:
        """Let the disk lie for a while, kill everything, and lose what was not synced."""
        control = run.subject.control
        assert control is not None, "the campaign tries this where the library can be built"
        control.forget()
        control.set("lying", 1.0)
        try:
            run.wait_for_first_step()
            run.pause(self.delay_s)
            run.kill_everything()
        finally:
            control.set("lying", 0.0)
        directory = run.training.run
        # What it takes was right, and will be compared.
        histories = list(run.training.histories.values())
        with histories[0].damaged(), histories[1].damaged():
            power.cut(control.journal, directory.path, random.Random(self.seed))
        control.forget()
        run.training.steps.go_to_end()
        run.settle()
        run.happened(self)


def draw_replaced_stores(generator: random.Random, number: int, processes: int) -> Iterator[ReplacedStore]:
    """Draw so many."""
    for _ in range(number):
        yield ReplacedStore()


def draw_removed_checkpoints(generator: random.Random, number: int, processes: int) -> Iterator[RemovedWhileRead]:
    """Draw rank and phase."""
    for _ in range(number):
        yield RemovedWhileRead(rank=generator.randrange(processes), point=generator.choice(LOAD_POINTS))


def draw_power_cuts(generator: random.Random, number: int, processes: int) -> Iterator[PowerCut]:
    """Draw the instant, and what is lost."""
    for _ in range(number):
        yield PowerCut(seed=generator.randrange(1 << 30), delay_s=generator.uniform(0, 4.0))

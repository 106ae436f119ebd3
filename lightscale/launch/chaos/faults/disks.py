"""Failing, slow and temporarily full disks."""

import contextlib
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from lightscale.launch.chaos.faults.drawing import LATEST_S, shuffled_cycle
from lightscale.launch.chaos.harness.trial import PATIENCE_SAVES, Bound, Runner
from lightscale.training.health.fault_injection import InjectedFault

_PAUSE_S = 0.2


@dataclass(frozen=True, kw_only=True)
class DiskFault:
    """A rank's save gets an error, or a disk that needs `pause_s` for every shard."""

    rank: int
    point: str
    count: int
    error: str | None
    """Name of the error; None: the disk is slow instead."""
    pause_s: float = _PAUSE_S
    bound: ClassVar[Bound] = Bound(saves=10, seconds=120)

    @property
    def kind(self) -> str:
        """What it is, for the table."""
        return f"{self.error} while saving" if self.error else "slow disk"

    def inject(self, run: Runner) -> None:
        """Arm it, and wait for a few saves."""
        action, value = ("raise", self.error) if self.error else ("slow", f"{self.pause_s}")
        run.training.arm(self.rank, InjectedFault(action=action, value=value, point=self.point, count=self.count))
        last = run.num_steps + (PATIENCE_SAVES if self.error else 3) * run.every
        try:
            run.wait(lambda: not run.training.is_armed(self.rank) or run.num_steps > last)
        finally:
            # The file of a slow disk stays where it is, and does not tell whether its point was reached.
            reached = self.error is None or not run.training.is_armed(self.rank)
            run.training.disarm()
        if reached:
            run.happened(self)
        elif self.point not in run.trial.unreached:
            run.trial.unreached.append(self.point)


@dataclass(frozen=True, kw_only=True)
class FullDisk:
    """Fills the file system of the checkpoints for a while. Needs a mountable small file system."""

    free_share: float
    """Free space, as a share of a checkpoint's size."""
    delay_s: float
    """Time after the attempt's first step."""
    kind: str = "full disk"
    bound: ClassVar[Bound] = Bound(saves=6, seconds=120)

    def inject(self, run: Runner) -> None:
        """Fill it, wait for two saves, and free it."""
        run.wait_for_first_step()
        run.pause(self.delay_s)
        disk = run.training.run.checkpoints
        ballast = disk / "ballast"
        surplus = shutil.disk_usage(disk).free - int(self.free_share * run.subject.checkpoint_bytes)
        # A save at the same time may leave less than there was.
        with contextlib.suppress(OSError):
            # Written zeros: a sparse file would take no space.
            ballast.write_bytes(bytes(max(0, surplus)))
        last = run.num_steps + 2 * run.every
        try:
            # Two saves; or the first one ends the run, which is then started again with an empty disk.
            run.wait(lambda: run.num_steps > last or run.training.has_ended)
        finally:
            ballast.unlink(missing_ok=True)
        # Only what is done with space again counts as recovery.
        run.happened(self)


def draw_disk_faults(generator: random.Random, number: int, processes: int) -> Iterator[DiskFault]:
    """Draw errors of two kinds and slow disks, equally often."""
    for error in shuffled_cycle(generator, ("ENOSPC", "EIO", "slow"), number):
        yield DiskFault(
            rank=generator.randrange(processes),
            point="save:write" if error == "slow" else generator.choice(["save:open", "save:write", "save:sync"]),
            count=generator.randint(1, 3),
            error=None if error == "slow" else error,
        )


def draw_full_disks(generator: random.Random, number: int, processes: int) -> Iterator[FullDisk]:
    """Draw disks from one without free space to one with nearly enough."""
    for _ in range(number):
        yield FullDisk(free_share=generator.random(), delay_s=generator.uniform(0, LATEST_S))

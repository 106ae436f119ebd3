"""Which faults a run meets, and when: drawn from a seed, so that the same command meets the same ones."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from lightscale.training.health.fault_injection import LOAD_POINTS, SAVE_POINTS, STEP_POINTS

DAMAGE_KINDS = ("bit flipped", "truncated", "emptied", "removed", "page zeroed", "replaced by another file")

# Phases that only the rank goes through that makes the directory a checkpoint.
_ONE_RANK_POINTS = ("save:manifest", "save:rename", "save:retention")
# A kill at an instant: so long after the attempt's first step. Longer only costs time.
_LATEST_S = 2.0
# A start takes several seconds; instants within it are drawn from these.
_LATEST_AFTER_START_S = 6.0
_PAUSE_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Kill:
    """SIGKILL to some ranks, the launcher, or all of them."""

    victims: tuple[int, ...]
    """Ranks."""
    launcher: bool
    point: str | None = None
    """The phase at whose beginning it comes; None: at any instant."""
    rank: int = 0
    """The rank that reaches `point`."""
    count: int = 1
    """Which time of reaching it."""
    delay_s: float = 0.0
    """Time after the attempt's first step, or after its ranks were started."""
    while_starting: bool = False
    """`delay_s` counts from when the ranks were started."""

    @property
    def kind(self) -> str:
        """What it is, for the table."""
        return f"kill at {self.point}" if self.point else "kill at any instant"

    @property
    def during_save(self) -> bool:
        """Whether it is certain that it hits a save."""
        return self.point in SAVE_POINTS


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Everything is killed, and a file of the newest checkpoint is damaged before the next start."""

    how: str
    """One of `DAMAGE_KINDS`."""
    seed: int

    @property
    def kind(self) -> str:
        """What it is, for the table."""
        return f"newest checkpoint: {self.how}"


@dataclass(frozen=True, kw_only=True)
class StopRank:
    """SIGSTOP to a rank: it hangs, without ending."""

    rank: int
    delay_s: float
    """Time after the attempt's first saves."""
    kind: str = "rank stopped (SIGSTOP)"


@dataclass(frozen=True, kw_only=True)
class DiskFault:
    """A rank's save meets an error, or a disk that takes `pause_s` for every shard."""

    rank: int
    point: str
    count: int
    error: str | None
    """Name of the error; None: the disk is slow instead."""
    pause_s: float = _PAUSE_S

    @property
    def kind(self) -> str:
        """What it is, for the table."""
        return f"{self.error} while saving" if self.error else "slow disk"


@dataclass(frozen=True, kw_only=True)
class FullDisk:
    """The file system of the checkpoints is filled up for a while. Only where one can be made for it."""

    free_share: float
    """Of the size of a checkpoint: what is left free."""
    delay_s: float
    """Time after the attempt's first step."""
    kind: str = "full disk"


Fault = Kill | Damage | StopRank | DiskFault | FullDisk


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """How many faults of each sort."""

    kills: int
    damages: int
    stops: int
    disk_faults: int
    full_disks: int


def schedule(amounts: Amounts, *, processes: int, seed: int) -> list[Fault]:
    """All faults but full disks, in the order in which they come."""
    # Seeds of text do not depend on Python's hash seed: the same in every process.
    generator = random.Random(f"{seed} {processes}")
    faults: list[Fault] = [
        *_kills(generator, amounts.kills, processes),
        *(
            Damage(how=how, seed=generator.randrange(1 << 30))
            for how in _shuffled_cycle(generator, DAMAGE_KINDS, amounts.damages)
        ),
        *(
            StopRank(rank=generator.randrange(processes), delay_s=generator.uniform(0, _LATEST_S))
            for _ in range(amounts.stops)
        ),
        *_disk_faults(generator, amounts.disk_faults, processes),
    ]
    # Mixed, because a recovery may depend on what the fault before has left.
    generator.shuffle(faults)
    return faults


def full_disks(number: int, *, seed: int) -> list[Fault]:
    """Full disks, from one that takes nothing to one that takes nearly all."""
    # One of its own: whether disks can be filled, for which root is needed, does not change the other faults.
    generator = random.Random(f"{seed} disk")
    return [FullDisk(free_share=generator.random(), delay_s=generator.uniform(0, _LATEST_S)) for _ in range(number)]


def _kills(generator: random.Random, number: int, processes: int) -> Iterator[Kill]:
    """Half of them, rounded up, at the phases of saves, each as often; a fifth of the rest each at loads and steps."""
    num_saves = (number + 1) // 2
    num_others = (number - num_saves) // 5
    points: list[str | None] = [
        *_shuffled_cycle(generator, SAVE_POINTS, num_saves),
        *_shuffled_cycle(generator, LOAD_POINTS, num_others),
        *_shuffled_cycle(generator, STEP_POINTS, num_others),
    ]
    for point in points + [None] * (number - len(points)):
        yield _kill(generator, point, processes)


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
        starting = generator.random() < 0.2
        latest = _LATEST_AFTER_START_S if starting else _LATEST_S
        delay_s = generator.uniform(0, latest)
        return Kill(victims=victims, launcher=launcher, delay_s=delay_s, while_starting=starting)
    return Kill(victims=victims, launcher=launcher, point=point, rank=first, count=_count(generator, point))


def _count(generator: random.Random, point: str) -> int:
    """Late enough that saves before it succeed: otherwise there is hardly any progress between kills."""
    if point in LOAD_POINTS:
        return 1
    # A save passes save:write once for every block of its file, so that these kills also hit the middle of a file.
    if point in ("save:write", "save:sync"):
        return generator.choice([1, 2, 3, 4, 6])
    return generator.randint(1, 9 if point in STEP_POINTS else 3)


def _disk_faults(generator: random.Random, number: int, processes: int) -> Iterator[DiskFault]:
    for error in _shuffled_cycle(generator, ("ENOSPC", "EIO", "slow"), number):
        yield DiskFault(
            rank=generator.randrange(processes),
            point="save:write" if error == "slow" else generator.choice(["save:open", "save:write", "save:sync"]),
            count=generator.randint(1, 3),
            error=None if error == "slow" else error,
        )


def _shuffled_cycle(generator: random.Random, values: Sequence[str], number: int) -> list[str]:
    """`number` values, each as often as the others, beginning anywhere."""
    return list(islice(cycle(generator.sample(values, len(values))), number))

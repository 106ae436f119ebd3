"""The faults of a run and their times, drawn from a seed, so that a command repeats them exactly."""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from lightscale.launch.chaos.faults.changed_tokens import draw_changed_tokens
from lightscale.launch.chaos.faults.damaged_checkpoint import draw_damages
from lightscale.launch.chaos.faults.damaged_records import draw_damaged_records
from lightscale.launch.chaos.faults.disagreeing_ranks import draw_disagreeing_ranks
from lightscale.launch.chaos.faults.disks import draw_disk_faults, draw_full_disks
from lightscale.launch.chaos.faults.kills import draw_kills, draw_stops
from lightscale.launch.chaos.faults.lost_checkpoints import draw_lost_checkpoints
from lightscale.launch.chaos.faults.not_finite import draw_nans
from lightscale.launch.chaos.harness.trial import Fault

Where = Literal["ordinary", "small disk", "poisoned"]
"""Kinds of runs for faults: ordinary; with a small file system; with changed data afterwards."""


@dataclass(frozen=True, kw_only=True)
class Sort:
    """Faults of one sort."""

    default: int
    """Default number."""
    text: str
    """Text in the help."""
    draw: Callable[[random.Random, int, int], Iterable[Fault]]
    """Draws a number of faults for a number of ranks."""
    where: Where = "ordinary"


# By the name of the option. By the rule of three, 200 kills without a loss mean a rate of losses below 1.5 % with 95 %
# confidence.
SORTS: dict[str, Sort] = {
    "kills": Sort(default=200, text="SIGKILLs of ranks and launcher, half of them during saves", draw=draw_kills),
    "damages": Sort(default=12, text="damages to the newest checkpoint between two attempts", draw=draw_damages),
    "stops": Sort(default=2, text="ranks stopped (SIGSTOP), for the launcher to detect", draw=draw_stops),
    "disk-faults": Sort(default=6, text="saves with ENOSPC, EIO or a slow disk", draw=draw_disk_faults),
    "full-disks": Sort(
        default=3,
        text="fill-ups of the checkpoints' disk, on a small file system (needs root to mount it)",
        draw=draw_full_disks,
        where="small disk",
    ),
    "changed-tokens": Sort(
        default=4,
        text="changes of tokens in a copy of the store, under the job or between two attempts",
        draw=draw_changed_tokens,
    ),
    "lost-checkpoints": Sort(default=4, text="starts without any of the checkpoints", draw=draw_lost_checkpoints),
    "damaged-records": Sort(
        default=4,
        text="damages to metrics, events, jobs or status between two attempts",
        draw=draw_damaged_records,
    ),
    "disagreements": Sort(
        default=4, text="starts by hand with another value, store or layout on one rank", draw=draw_disagreeing_ranks
    ),
    "nans": Sort(
        default=4, text="NaNs in weights and moments in the memory of a rank", draw=draw_nans, where="poisoned"
    ),
}


def schedule(amounts: Mapping[str, int], *, processes: int, seed: int, where: Where = "ordinary") -> list[Fault]:
    """All faults of the runs `where`, in order; `amounts` by the names in `SORTS`."""
    faults: list[Fault] = []
    for name, sort in SORTS.items():
        if sort.where == where:
            # One for each sort, so that more of one do not change the others. Seeds of text do not depend on Python's
            # hash seed: the same in every process.
            generator = random.Random(f"{seed} {processes} {name}")
            faults += sort.draw(generator, amounts.get(name, 0), processes)
    # Mixed, because a recovery may depend on what the fault before has left.
    random.Random(f"{seed} {processes}").shuffle(faults)
    return faults

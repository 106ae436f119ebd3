"""The faults of a run and their times, drawn from a seed, so that a command repeats them exactly."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from lightscale.launch.chaos.faults.changed_tokens import draw_changed_tokens
from lightscale.launch.chaos.faults.commands import COMMANDS, draw_killed_commands
from lightscale.launch.chaos.faults.conditions import CONDITIONS, Draw, draw_conditions, draw_links, draw_pairs
from lightscale.launch.chaos.faults.damaged_checkpoint import draw_damages
from lightscale.launch.chaos.faults.damaged_records import draw_damaged_records
from lightscale.launch.chaos.faults.disagreeing_ranks import draw_disagreeing_ranks
from lightscale.launch.chaos.faults.disks import draw_disk_faults, draw_full_disks
from lightscale.launch.chaos.faults.flipped_memory import draw_flips
from lightscale.launch.chaos.faults.kills import draw_kills, draw_lost_hosts, draw_stops
from lightscale.launch.chaos.faults.links import LINKS
from lightscale.launch.chaos.faults.lost_checkpoints import draw_lost_checkpoints
from lightscale.launch.chaos.faults.not_finite import draw_nans, draw_rollback_losses
from lightscale.launch.chaos.faults.processes import draw_second_jobs
from lightscale.launch.chaos.faults.replaced import draw_power_cuts, draw_removed_checkpoints, draw_replaced_stores
from lightscale.launch.chaos.faults.wrong_rank import draw_wrong_ranks
from lightscale.launch.chaos.harness.trial import Fault

Where = Literal["ordinary", "small disk", "poisoned", "guarded"]
"""Kinds of runs for faults: ordinary; with a small file system; with changed data afterwards; with compared numbers."""


@dataclass(frozen=True, kw_only=True)
class Sort:
    """Faults of one sort."""

    default: int
    """Default number."""
    text: str
    """Text in the help."""
    draw: Draw
    """Draws a number of faults for a number of ranks."""
    where: Where = "ordinary"
    between_hosts: bool = False
    """Whether it needs several hosts."""


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
    "rollback-losses": Sort(
        default=2, text="losses of ranks while the run rolls back", draw=draw_rollback_losses, where="poisoned"
    ),
    "memory-flips": Sort(
        default=5,
        text="bits flipped in weights, gradients and moments in the memory of a rank",
        draw=draw_flips,
        where="guarded",
    ),
    "wrong-ranks": Sort(
        default=2,
        text="ranks that compute slightly wrong (needs two data ranks)",
        draw=draw_wrong_ranks,
        where="guarded",
    ),
    "conditions": Sort(
        default=8,
        text=f"conditions that last for seconds: {', '.join(CONDITIONS)} (needs gcc)",
        draw=draw_conditions,
    ),
    "power-cuts": Sort(default=4, text="power cuts on a disk that lies (needs gcc)", draw=draw_power_cuts),
    "second-jobs": Sort(default=2, text="second jobs on the same run", draw=draw_second_jobs),
    "replaced-stores": Sort(
        default=2, text="starts with another store at the place of the store", draw=draw_replaced_stores
    ),
    "removed-checkpoints": Sort(
        default=2, text="checkpoints removed while a start reads them", draw=draw_removed_checkpoints
    ),
    "killed-commands": Sort(
        default=5,
        text=f"commands beside the training that are killed and given again: {', '.join(COMMANDS)}",
        draw=draw_killed_commands,
    ),
    "lost-hosts": Sort(
        default=10,
        text="SIGKILLs of all processes of a host, half of them with its link down (silent)",
        draw=draw_lost_hosts,
        between_hosts=True,
    ),
    "links": Sort(
        default=8,
        text=f"conditions of the link of a host that last for up to a minute: {', '.join(LINKS)}",
        draw=draw_links,
        between_hosts=True,
    ),
}
_ORDINARY = [name for name, one in SORTS.items() if one.where == "ordinary" and name not in ("conditions", "links")]


def _pairs(
    default: int, what: str, seconds: Iterable[str], where: Where = "ordinary", *, of_links: bool = False
) -> Sort:
    """Pairs of a condition, or one of a link, with a fault of the sorts `seconds` while it lasts."""
    conditions, others = LINKS if of_links else CONDITIONS, {name: SORTS[name].draw for name in seconds}
    return Sort(
        default=default,
        text=f"pairs of a condition{' of a link' if of_links else ''} with {what}",
        draw=lambda generator, number, processes: draw_pairs(generator, number, processes, others, conditions),
        where=where,
        between_hosts=of_links,
    )


_ANY = "another fault or condition while it lasts (needs gcc)"
_Pairs = tuple[str, Iterable[str], Where]
_ROLLBACK: _Pairs = ("NaNs or losses during rollbacks (needs gcc)", ("nans", "rollback-losses"), "poisoned")
_MEMORY: _Pairs = ("bits flipped in memory (needs gcc)", ("memory-flips",), "guarded")
_WRONG_RANK = "ranks that compute slightly wrong (needs gcc and two data ranks)"
_PAIRS = {
    "pairs": _pairs(20, _ANY, [name for name in _ORDINARY if not SORTS[name].between_hosts]),
    "rollback-pairs": _pairs(2, *_ROLLBACK),
    "memory-pairs": _pairs(2, *_MEMORY),
    "wrong-rank-pairs": _pairs(2, _WRONG_RANK, ["wrong-ranks"], "guarded"),
    "link-pairs": _pairs(10, _ANY, _ORDINARY, of_links=True),
    "link-rollback-pairs": _pairs(2, *_ROLLBACK, of_links=True),
    "link-memory-pairs": _pairs(2, *_MEMORY, of_links=True),
}
SORTS |= _PAIRS
# Sorts that need a second store, the preloaded library, and two data ranks.
WITH_STORES = ("changed-tokens", "disagreements", "replaced-stores", "pairs", "link-pairs")
WITH_LIBRARY = ("conditions", "power-cuts", *_PAIRS)
WITH_DATA_RANKS = ("wrong-ranks", "wrong-rank-pairs")


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

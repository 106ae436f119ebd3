"""Which faults are drawn."""

import dataclasses
from collections import Counter

import pytest

from lightscale.launch.chaos.schedule import DAMAGE_KINDS, Amounts, Damage, DiskFault, Kill, full_disks, schedule
from lightscale.training.health.fault_injection import LOAD_POINTS, POINTS, SAVE_POINTS

FULL = Amounts(kills=200, damages=12, stops=2, disk_faults=6, full_disks=0)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_what_is_drawn(processes: int) -> None:
    faults = schedule(FULL, processes=processes, seed=0)
    kills = [fault for fault in faults if isinstance(fault, Kill)]
    assert (len(faults), len(kills)) == (220, 200)
    points = Counter(kill.point for kill in kills)
    assert set(points) == {*POINTS, None}
    assert sum(kill.during_save for kill in kills) == 100
    assert all(points[point] >= 100 // len(SAVE_POINTS) for point in SAVE_POINTS)
    ranks = set(range(processes))
    for kill in kills:
        assert set(kill.victims) <= ranks and len(set(kill.victims)) == len(kill.victims)
        assert kill.victims or kill.launcher
    victims = Counter((len(kill.victims), kill.launcher) for kill in kills)
    expected = {(1, False), (0, True), (processes, True), (processes, False)}
    assert expected <= set(victims)
    # Phases that only rank 0 goes through are reached there, the others by every rank.
    assert {kill.rank for kill in kills if kill.point == "save:rename"} == {0}
    assert {kill.rank for kill in kills if kill.point in ("save:open", "save:write", "save:sync")} == ranks
    assert all(kill.count == 1 for kill in kills if kill.point in LOAD_POINTS)
    assert {kill.while_starting for kill in kills} == {True, False}
    assert Counter(fault.how for fault in faults if isinstance(fault, Damage)) == dict.fromkeys(DAMAGE_KINDS, 2)
    assert Counter(fault.error for fault in faults if isinstance(fault, DiskFault)) == {"ENOSPC": 2, "EIO": 2, None: 2}


def test_the_seed_decides() -> None:
    first, again, other = (schedule(FULL, processes=2, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert schedule(dataclasses.replace(FULL, kills=0, stops=0, disk_faults=0, damages=0), processes=2, seed=0) == []
    assert full_disks(3, seed=0) == full_disks(3, seed=0) != full_disks(3, seed=1)


def test_few_kills_are_mostly_during_saves() -> None:
    faults = schedule(dataclasses.replace(FULL, kills=3), processes=2, seed=0)
    assert sum(isinstance(fault, Kill) and fault.during_save for fault in faults) == 2

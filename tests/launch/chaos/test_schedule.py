"""Which faults are drawn."""

from collections import Counter
from typing import get_args

import pytest

from lightscale.launch.chaos.faults import changed_tokens, disagreeing_ranks, lost_checkpoints, not_finite
from lightscale.launch.chaos.faults.changed_tokens import ChangedTokens
from lightscale.launch.chaos.faults.conditions import Alone, Pair, is_fault
from lightscale.launch.chaos.faults.damaged_checkpoint import DAMAGE_KINDS, Damage
from lightscale.launch.chaos.faults.damaged_records import RECORDS, WAYS, DamagedRecord
from lightscale.launch.chaos.faults.disagreeing_ranks import DisagreeingRank
from lightscale.launch.chaos.faults.disks import DiskFault
from lightscale.launch.chaos.faults.flipped_memory import Flip
from lightscale.launch.chaos.faults.kills import LOSS, Kill, LostHost
from lightscale.launch.chaos.faults.links import LINKS, LONGEST_S
from lightscale.launch.chaos.faults.lost_checkpoints import MissingCheckpoints
from lightscale.launch.chaos.faults.memory import GRADIENT
from lightscale.launch.chaos.faults.not_finite import NaN
from lightscale.launch.chaos.faults.wrong_rank import WrongRank
from lightscale.launch.chaos.schedule import SORTS, Where, schedule
from lightscale.training.health.fault_injection import LOAD_POINTS, POINTS, SAVE_POINTS

FULL = {"kills": 200, "damages": 12, "stops": 2, "disk-faults": 6}
WHERE = get_args(Where)
TWENTY = dict.fromkeys(("changed-tokens", "lost-checkpoints", "damaged-records", "disagreements", "nans"), 20)


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


def test_twenty_of_each_are_all_sorts_of_it() -> None:
    faults = schedule(TWENTY, processes=4, seed=0)
    assert len(faults) == 80
    tokens = Counter((one.way, one.while_running) for one in faults if isinstance(one, ChangedTokens))
    assert set(tokens) == {(way, running) for way in changed_tokens.WAYS for running in (True, False)}
    records = Counter((one.record, one.way) for one in faults if isinstance(one, DamagedRecord))
    assert records == dict.fromkeys([(record, way) for record in RECORDS for way in WAYS], 1)
    lost = Counter(one.way for one in faults if isinstance(one, MissingCheckpoints))
    assert lost == dict.fromkeys(lost_checkpoints.WAYS, 5)
    ranks = Counter(one.way for one in faults if isinstance(one, DisagreeingRank))
    assert ranks == dict.fromkeys(disagreeing_ranks.WAYS, 5)
    assert {one.rank for one in faults if isinstance(one, DisagreeingRank)} == set(range(4))
    # These change what the run is compared with.
    nans = [one for one in schedule(TWENTY, processes=4, seed=0, where="poisoned") if isinstance(one, NaN)]
    assert Counter(one.place for one in nans) == dict.fromkeys(not_finite.PLACES, 5)
    assert {one.rank for one in nans} == set(range(4))


def test_what_flips_and_who_computes_wrong() -> None:
    faults = schedule({"memory-flips": 20, "wrong-ranks": 20}, processes=4, seed=0, where="guarded")
    flips, wrong = ([one for one in faults if isinstance(one, kind)] for kind in (Flip, WrongRank))
    assert Counter(one.place for one in flips) == dict.fromkeys((*not_finite.PLACES, GRADIENT), 4)
    assert {one.rank for one in flips} == {one.rank for one in wrong} == set(range(4))
    assert all(1e-5 <= abs(one.error) <= 1e-2 for one in wrong) and {one.error > 0 for one in wrong} == {True, False}
    pairs = schedule({"wrong-rank-pairs": 8}, processes=4, seed=0, where="guarded")
    assert all(isinstance(one, Pair) for one in pairs) and len({one.kind for one in pairs}) == 8


def test_what_goes_wrong_between_hosts() -> None:
    amounts = {"lost-hosts": 48, "links": 24, "link-pairs": 200}
    faults = schedule(amounts, processes=4, seed=0)
    hosts = [one for one in faults if isinstance(one, LostHost)]
    assert Counter(one.point is None for one in hosts) == {True: 24, False: 24}
    assert {one.point for one in hosts} == {*POINTS, None} and {one.rank for one in hosts} == set(range(4))
    assert Counter(one.is_silent for one in hosts) == {True: 24, False: 24}
    assert len({(one.point is None, one.is_silent) for one in hosts}) == 4
    links = [one for one in faults if isinstance(one, Alone)]
    assert Counter(one.kind for one in links) == dict.fromkeys(LINKS, 6)
    # Some for longer than ranks wait for each other.
    assert max(one.seconds for one in links) > 30 and all(one.seconds <= LONGEST_S for one in links)
    pairs = [one for one in faults if isinstance(one, Pair)]
    assert Counter(one.first.kind for one in pairs) == dict.fromkeys(LINKS, 50)
    assert len({one.kind for one in pairs}) > 100 and any(isinstance(one.second, LostHost) for one in pairs)
    assert {one.second.kind for one in pairs if not is_fault(one.second)} >= {*LINKS, "clock jump"}
    words = [[str(one) for one in schedule(amounts, processes=4, seed=seed)] for seed in (0, 0, 1)]
    assert words[0] == words[1] != words[2]
    # Without several hosts nothing of it is drawn, also not in pairs.
    alone = schedule({"pairs": 200}, processes=4, seed=0)
    assert not [one for one in alone if isinstance(one, Pair) and (one.first.kind in LINKS or LOSS in one.kind)]


def test_the_seed_decides() -> None:
    first, again, other = (schedule(FULL | TWENTY, processes=2, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert schedule({}, processes=2, seed=0) == []
    kills = [fault for fault in first if isinstance(fault, Kill)]
    assert sorted(map(str, kills)) == sorted(map(str, schedule({"kills": 200}, processes=2, seed=0)))
    disks = [schedule({"full-disks": 3}, processes=2, seed=seed, where="small disk") for seed in (0, 0, 1)]
    assert disks[0] == disks[1] != disks[2]


def test_few_kills_are_mostly_during_saves() -> None:
    faults = schedule({"kills": 3}, processes=2, seed=0)
    assert sum(isinstance(fault, Kill) and fault.during_save for fault in faults) == 2


def test_every_sort_can_be_drawn() -> None:
    everything = dict.fromkeys(SORTS, 2)
    assert sum(len(schedule(everything, processes=1, seed=0, where=where)) for where in WHERE) == 2 * len(SORTS)

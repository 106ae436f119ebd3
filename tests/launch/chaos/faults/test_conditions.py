"""Which conditions and pairs are drawn."""

import random
from collections import Counter

import pytest

from lightscale.launch.chaos.faults import conditions
from lightscale.launch.chaos.faults.conditions import CONDITIONS, EXCLUDED, Pair, is_condition, is_fault
from lightscale.launch.chaos.faults.kills import StopRank
from lightscale.launch.chaos.schedule import SORTS, schedule

NUMBER = 400


@pytest.mark.parametrize("processes", [2, 4])
def test_every_condition_meets_every_sort(processes: int) -> None:
    pairs = [one for one in schedule({"pairs": NUMBER}, processes=processes, seed=0) if isinstance(one, Pair)]
    assert len(pairs) == NUMBER
    firsts = Counter(type(one.first).__name__ + getattr(one.first, "kind", "") for one in pairs)
    assert len(firsts) >= len(CONDITIONS)
    # A condition in a quarter of them, and every other sort equally often; excluded pairs get another condition.
    seconds = [one.second for one in pairs if is_fault(one.second)]
    assert 0.6 * NUMBER < len(seconds) <= 0.75 * NUMBER
    assert all(is_condition(one.second) for one in pairs if not is_fault(one.second))
    left = ("conditions", "pairs")
    ordinary = [name for name, sort in SORTS.items() if sort.where == "ordinary" and name not in left]
    drawn = {fault.kind for name in ordinary for fault in SORTS[name].draw(random.Random(0), 40, processes)}
    assert {one.kind for one in seconds} <= drawn | {one.kind for one in seconds if one.kind.startswith("kill at ")}
    for one in pairs:
        assert 0 <= one.delay_s < one.seconds, "they overlap"
        assert one.bound.saves == one.first.bound.saves + one.second.bound.saves


def test_the_seed_decides() -> None:
    words = [[str(one) for one in schedule({"pairs": 50}, processes=2, seed=seed)] for seed in (0, 0, 1)]
    assert words[0] == words[1] != words[2]


def test_what_undoes_each_other_is_no_pair() -> None:
    names = {(name, StopRank.kind) for name in CONDITIONS} & set(EXCLUDED)
    assert names == {("slow rank", "rank stopped (SIGSTOP)")}
    others = {"stops": SORTS["stops"].draw}
    pairs = list(conditions.draw_pairs(random.Random(0), 100, 2, others))
    together = {(one.first.kind, one.second.kind) for one in pairs}
    assert not together & set(EXCLUDED)
    assert ("slow network", "rank stopped (SIGSTOP)") in together


def test_every_kind_states_its_bound() -> None:
    for name, sort in SORTS.items():
        for fault in sort.draw(random.Random(0), 30, 2):
            assert fault.bound.saves >= 0 and fault.bound.seconds > 0, name
            assert fault.kind


def test_what_a_user_mends_before_a_start() -> None:
    """A start needs the disk and the store, and compares the clocks of its ranks; what is slow lets it go on."""
    drawn = {name: draw(random.Random(0), 2) for name, draw in CONDITIONS.items()}
    mended = {name for name, one in drawn.items() if one.hinders_starts}
    assert mended == {"read-only file system", "stuck data host", "clock jump", "limit"}

import math

import pytest

from lightscale.runs.save_interval import SaveInterval, best_interval_s

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


@pytest.mark.parametrize(
    ("stall_s", "mtbf_s", "minutes"),
    [
        (1.0, 33 * DAY_S, 40),  # 64 GPUs at the rates of Llama 3
        (1.0, 6 * HOUR_S, 3.5),  # preempted every 6 h
    ],
)
def test_published_cases(stall_s: float, mtbf_s: float, minutes: float) -> None:
    assert best_interval_s(stall_s, mtbf_s) / 60 == pytest.approx(minutes, rel=0.03)


@pytest.mark.parametrize(("stall_s", "mtbf_s"), [(1.0, HOUR_S), (30.0, DAY_S)])
def test_no_other_interval_costs_less(stall_s: float, mtbf_s: float) -> None:
    """Cost per second: the stalls, and half an interval at each failure."""
    best = best_interval_s(stall_s, mtbf_s)
    cost = {factor: stall_s / (factor * best) + factor * best / (2 * mtbf_s) for factor in (0.8, 0.95, 1.0, 1.05, 1.2)}
    assert min(cost, key=lambda factor: cost[factor]) == 1.0


def test_the_first_save_is_due_after_ten_minutes() -> None:
    interval = SaveInterval(mtbf_s=DAY_S, now_s=1000.0)
    assert interval.interval_s == 600
    assert not interval.due(1599.9)
    assert interval.due(1600.0)
    assert interval.due(5000.0), "until there is a save"


def test_the_stall_sets_the_interval() -> None:
    interval = SaveInterval(mtbf_s=DAY_S, now_s=0.0)
    interval.saved(605.0, 5.0)
    best_s = math.sqrt(2 * 5.0 * DAY_S)
    assert interval.interval_s == best_s
    assert 900 < best_s < 950
    assert not interval.due(605.0 + best_s - 0.1)
    assert interval.due(605.0 + best_s)


def test_one_slow_save_changes_nothing_and_slower_storage_does() -> None:
    interval = SaveInterval(mtbf_s=DAY_S, now_s=0.0)
    for stall_s in (1.0, 1.0, 1.0, 90.0):
        interval.saved(0.0, stall_s)
    assert interval.interval_s == best_interval_s(1.0, DAY_S)
    for _ in range(3):
        interval.saved(0.0, 4.0)
    assert interval.interval_s == best_interval_s(4.0, DAY_S)


@pytest.mark.parametrize(("stall_s", "expected"), [(0.0, 60), (0.001, 60), (1e4, 3600)])
def test_it_stays_within_a_minute_and_an_hour(stall_s: float, expected: float) -> None:
    interval = SaveInterval(mtbf_s=DAY_S, now_s=0.0)
    interval.saved(0.0, stall_s)
    assert interval.interval_s == expected


def test_what_earlier_attempts_measured_counts() -> None:
    """The newest five: where a run fails every few minutes, no attempt could measure enough by itself."""
    interval = SaveInterval(mtbf_s=DAY_S, now_s=0.0, stalls_s=[500.0] * 9 + [2.0] * 5)
    assert interval.interval_s == best_interval_s(2.0, DAY_S)

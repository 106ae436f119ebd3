"""Closed forms and the simulation of failing runs: against each other, and against numbers worked out by hand."""

import dataclasses
import math
from typing import Any

import pytest

from lightscale.planning.failure_simulation import Estimate, as_good_as_best, simulate, simulate_run
from lightscale.planning.failures import DAY_S, Regime, Shares, daly_interval_s, expected_shares
from lightscale.runs.save_interval import best_interval_s

LLAMA_3 = 4.7e-4 / DAY_S
HOUR_S = 3600.0

# Each with the wall time of a simulated run: some hundred failures.
REGIMES = {
    "64 GPUs": (Regime(failures_per_s=64 * LLAMA_3, stall_s=1, save_s=60, restart_s=300), 1500 * DAY_S),
    "16384 GPUs": (Regime(failures_per_s=16384 * LLAMA_3, stall_s=5, save_s=60, restart_s=600), 30 * DAY_S),
    "preempted": (
        Regime(
            failures_per_s=64 * LLAMA_3,
            stall_s=1,
            save_s=30,
            restart_s=120,
            stop_every_s=6 * HOUR_S,
            stops_announced=False,
        ),
        20 * DAY_S,
    ),
    "time limit": (
        Regime(failures_per_s=1 / DAY_S, stall_s=5, save_s=60, restart_s=300, stop_every_s=12 * HOUR_S),
        150 * DAY_S,
    ),
    "chaos": (Regime(failures_per_s=1 / 600, stall_s=2, save_s=5, restart_s=30), 1.5 * DAY_S),
    "blocking saves": (Regime(failures_per_s=1 / HOUR_S, stall_s=60, save_s=60, restart_s=120), 30 * DAY_S),
    "hopeless": (Regime(failures_per_s=1 / 600, stall_s=120, save_s=120, restart_s=60), 5 * DAY_S),
    "slow storage": (Regime(failures_per_s=1 / HOUR_S, stall_s=1, save_s=400, restart_s=60), 20 * DAY_S),
}


def total(shares: Shares) -> float:
    return sum(dataclasses.astuple(shares))


def best_of(regime: Regime) -> float:
    return max(daly_interval_s(regime.stall_s, regime.mtbf_s), regime.shortest_interval_s)


def simulated(name: str, factors: list[float], runs: int = 10) -> list[Estimate]:
    regime, duration_s = REGIMES[name]
    intervals_s = [factor * best_of(regime) for factor in factors]
    return simulate(regime, intervals_s, duration_s=duration_s, seed=7, runs=runs)


@pytest.mark.parametrize(
    ("failures", "changes", "expected"),
    [
        # Work until 20, 41, 50; saves begin at 20 and 41; work until 80 and 100.
        ([50], {}, Shares(progress=79, stalls=3, lost=8, restarts=10, stops=0)),
        # The second save, of 41, is not written before 44.
        ([43], {}, Shares(progress=65, stalls=4, lost=21, restarts=10, stops=0)),
        ([44.5], {}, Shares(progress=83.5, stalls=4, lost=2.5, restarts=10, stops=0)),
        # During the stall of the first save, and during a restart.
        ([20.5], {}, Shares(progress=66.5, stalls=3.5, lost=20, restarts=10, stops=0)),
        ([50, 55], {}, Shares(progress=74, stalls=3, lost=8, restarts=15, stops=0)),
        # Leaves at 47 and at 97, with saves of 3; a failure during the first of them makes the next job short.
        ([], {"stop_every_s": 50}, Shares(progress=81, stalls=3, lost=0, restarts=0, stops=16)),
        ([48], {"stop_every_s": 50}, Shares(progress=68, stalls=3, lost=5, restarts=10, stops=14)),
        # The second save cannot begin before the first is written, at 50, nor the third before 81.
        ([90], {"save_s": 30}, Shares(progress=49, stalls=3, lost=38, restarts=10, stops=0)),
        ([], {}, Shares(progress=96, stalls=4, lost=0, restarts=0, stops=0)),
    ],
)
def test_a_run_played_by_hand(failures: list[float], changes: dict[str, Any], expected: Shares) -> None:
    """Of 100 s: 20 s of work between saves, which stall 1 s and take 3 s; a restart takes 10 s."""
    regime = Regime(failures_per_s=1.0, stall_s=1, save_s=3, restart_s=10)
    found = simulate_run(dataclasses.replace(regime, **changes), 20, duration_s=100, failures=failures)
    assert total(found) == pytest.approx(1)
    assert dataclasses.asdict(found) == pytest.approx({k: v / 100 for k, v in dataclasses.asdict(expected).items()})


@pytest.mark.parametrize("interval_s", [60.0, 600.0, 6000.0])
def test_saves_that_block_are_the_complete_model_of_daly(interval_s: float) -> None:
    """M e^(R/M) (e^((tau + delta)/M) - 1) of wall time for tau of work, Daly (2006), equation 20."""
    mtbf_s, stall_s, restart_s = 4000.0, 50.0, 200.0
    regime = Regime(failures_per_s=1 / mtbf_s, stall_s=stall_s, save_s=stall_s, restart_s=restart_s)
    wall_s = mtbf_s * math.exp(restart_s / mtbf_s) * (math.exp((interval_s + stall_s) / mtbf_s) - 1)
    assert expected_shares(regime, interval_s).progress == pytest.approx(interval_s / wall_s, rel=1e-9)


def test_rare_failures_cost_what_one_would_say() -> None:
    """Each a restart, the time until the lost save was written, and half a period."""
    regime = Regime(failures_per_s=1e-7, stall_s=2, save_s=30, restart_s=300)
    found = expected_shares(regime, 998)
    assert found.stalls == pytest.approx(2 / 1000, rel=1e-3)
    assert found.restarts == pytest.approx(300e-7, rel=1e-3)
    assert found.lost == pytest.approx(1e-7 * (28 + 500), rel=5e-3)
    assert total(found) == pytest.approx(1)


def test_without_losses_only_saves_and_stops_cost() -> None:
    regime = Regime(failures_per_s=0, stall_s=2, save_s=40, restart_s=60, stop_every_s=1000)
    assert expected_shares(regime, 198) == Shares(
        progress=pytest.approx(0.9 * 0.99),
        stalls=pytest.approx(0.9 * 0.01),
        lost=pytest.approx(0),
        restarts=0,
        stops=0.1,
    )


@pytest.mark.parametrize("name", REGIMES)
@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_simulation_and_closed_forms_agree(name: str, factor: float) -> None:
    """Within four standard errors and 0.2 % of the time: announced stops and the ends of a run are approximated."""
    regime, _ = REGIMES[name]
    (found,) = simulated(name, [factor])
    expected = expected_shares(regime, found.interval_s)
    assert total(expected) == pytest.approx(1)
    assert total(found.shares) == pytest.approx(1)
    assert found.error < 0.01
    assert abs(found.shares.progress - expected.progress) < 4 * found.error + 0.002
    for part in ("stalls", "restarts", "stops"):
        assert getattr(found.shares, part) == pytest.approx(getattr(expected, part), abs=0.01), part


@pytest.mark.parametrize("name", REGIMES)
def test_the_best_simulated_interval_is_dalys(name: str) -> None:
    """To what the simulation can tell; half of it and twice as much are told apart from it."""
    factors = [0.5, 0.71, 0.84, 1.0, 1.19, 1.41, 2.0]
    if name == "slow storage":
        factors = [factor for factor in factors if factor >= 1]  # Saves cannot come more often.
    estimates = simulated(name, factors, runs=40)
    good = [round(one.interval_s / best_of(REGIMES[name][0]), 2) for one in as_good_as_best(estimates)]
    assert 1.0 in good
    assert 0.5 not in good
    assert 2.0 not in good


@pytest.mark.parametrize("name", [name for name in REGIMES if name != "slow storage"])
def test_no_other_interval_is_expected_to_be_better(name: str) -> None:
    regime, _ = REGIMES[name]
    daly_s = daly_interval_s(regime.stall_s, regime.mtbf_s)
    at_daly = expected_shares(regime, daly_s).progress
    others = [expected_shares(regime, daly_s * (0.1 + 0.01 * step)).progress for step in range(500)]
    assert max(others) - at_daly < 1e-4
    assert at_daly >= expected_shares(regime, best_interval_s(regime.stall_s, regime.mtbf_s)).progress - 1e-9


def test_dalys_interval_has_the_limits_of_the_paper() -> None:
    assert daly_interval_s(1e-6, 1.0) == pytest.approx(best_interval_s(1e-6, 1.0), rel=1e-3)
    assert daly_interval_s(2.0, 1.0) == 1.0
    assert daly_interval_s(1.999999, 1.0) == pytest.approx(2 * (1 + 1 / 3 + 1 / 9) - 2, rel=1e-5)


def test_a_seed_gives_the_same_failures_to_all_intervals() -> None:
    regime, duration_s = REGIMES["chaos"]

    def goodputs(seed: int) -> list[tuple[float, ...]]:
        found = simulate(regime, [48.0, 48.0], duration_s=duration_s / 10, seed=seed, runs=3)
        return [one.goodputs for one in found]

    first, again = goodputs(1)
    assert first == again
    assert goodputs(1) == [first, first]
    assert goodputs(2)[0] != first
    assert len(set(first)) == 3


def test_as_many_runs_as_take_some_seconds() -> None:
    regime, duration_s = REGIMES["64 GPUs"]
    (short,) = simulate(regime, [DAY_S], duration_s=2 * DAY_S, seed=0)
    (long,) = simulate(regime, [1000.0], duration_s=duration_s / 10, seed=0)
    assert (len(short.goodputs), 20 <= len(long.goodputs) < 200) == (2000, True)


def test_one_run_in_ten_is_below() -> None:
    goodputs = tuple(number / 100 for number in range(99, -1, -1))
    shares = Shares(progress=0.495, stalls=0, lost=0, restarts=0, stops=0)
    found = Estimate(interval_s=1, shares=shares, goodputs=goodputs)
    assert sum(goodput < found.low for goodput in goodputs) == 10
    assert found.error == pytest.approx(math.sqrt((100**2 - 1) / 12 / 99) / 100, rel=1e-9)

"""The lowest point of a sweep beside curves whose lowest point is known."""

import math

import numpy as np
import pytest

from lightscale.study.fits.optimum import Optimum, optimum

RATES = [1e-4 * 2**power for power in range(9)]


def losses(best: float, noise: np.ndarray | None = None, rates: list[float] = RATES) -> dict[float, list[float]]:
    """A parabola over log rate with its lowest point, 2.5, at ``best``; ``noise``: (rates, seeds)."""
    exact = {rate: 2.5 + 0.03 * math.log(rate / best) ** 2 for rate in rates}
    added = np.zeros((len(rates), 1)) if noise is None else noise
    return {rate: [loss + float(one) for one in row] for (rate, loss), row in zip(exact.items(), added, strict=True)}


def found(table: dict[float, list[float]]) -> Optimum:
    result = optimum(table)
    assert isinstance(result, Optimum), result
    return result


def test_a_parabola_is_found_between_its_values() -> None:
    result = found(losses(1.1e-3))
    assert (result.value, result.loss) == (pytest.approx(1.1e-3), pytest.approx(2.5))
    assert result.interval == pytest.approx((1.1e-3, 1.1e-3)), "no residuals"
    assert result.at(np.array([2.2e-3])) == pytest.approx([2.5 + 0.03 * math.log(2) ** 2])


def test_far_losses_and_infinite_ones_do_not_count() -> None:
    table = losses(1.6e-3) | {RATES[-1]: [math.inf], RATES[0]: [9.0], RATES[1]: [8.0]}
    assert found(table).value == pytest.approx(1.6e-3)


def test_values_within_a_factor_count_however_many_they_are() -> None:
    dense = [1e-4 * 2 ** (power / 4) for power in range(33)]
    result = found(losses(1.6e-3, rates=dense))
    assert len(result.values) == 17
    assert result.values[0] == pytest.approx(4e-4) and result.values[-1] == pytest.approx(6.4e-3)


@pytest.mark.parametrize(("seeds", "scale"), [(1, 0.002), (1, 0.006), (3, 0.002), (3, 0.006)])
def test_the_interval_holds_the_value_in_95_of_100_sweeps(seeds: int, scale: float) -> None:
    """Also where a seed moves all of its losses by ten times as much as the noise."""
    draw, best, inside, shown, fitted, number = np.random.default_rng(0), 1.3e-3, 0, 0, 0, 500
    for _ in range(number):
        noise = draw.normal(scale=scale, size=(len(RATES), seeds)) + draw.normal(scale=10 * scale, size=seeds)
        result = optimum(losses(best, noise))
        if isinstance(result, str):
            continue
        fitted += 1
        # Without ends it is all values.
        inside += result.interval is None or result.interval[0] <= best <= result.interval[1]
        shown += result.interval is not None and result.interval[1] / result.interval[0] < 2
    assert fitted > 0.95 * number
    assert 0.92 < inside / fitted < 0.98
    if seeds > 1 or scale < 0.005:
        assert shown > 0.8 * number, "and it is narrow enough to say something"


def test_three_values_have_no_interval() -> None:
    table = {rate: loss for rate, loss in losses(1.3e-3).items() if 5e-4 < rate < 4e-3}
    assert len(table) == 3
    result = found(table)
    assert (result.value, result.interval) == (pytest.approx(1.3e-3), None)
    assert result.text() == "0.0013"


def test_a_curvature_that_may_be_0_has_no_interval() -> None:
    table = {1e-3: [2.0], 2e-3: [1.9], 4e-3: [1.999], 8e-3: [1.95], 16e-3: [2.0]}
    assert found(table).interval is None


@pytest.mark.parametrize(("best", "side"), [(RATES[0] / 2, "least"), (RATES[-1] * 2, "greatest")])
def test_a_best_value_at_an_end_is_refused(best: float, side: str) -> None:
    assert f"is the {side} one; add values beyond it" in str(optimum(losses(best)))


def test_fewer_than_three_values_and_curves_without_a_valley_are_refused() -> None:
    assert optimum({1e-3: [2.0], 2e-3: [1.0]}) == "a parabola needs the losses of 3 values; there are 2"
    assert "is the least one" in str(optimum({rate: [2.0] for rate in RATES}))
    hill = {1e-3: [2.0], 2e-3: [1.99], 4e-3: [2.5], 8e-3: [2.3], 16e-3: [1.995]}
    assert "no positive curvature" in str(optimum(hill))

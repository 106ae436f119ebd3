"""The lowest point of a sweep beside curves whose lowest point is known."""

import math

import numpy as np
import pytest

from lightscale.study.fits.optimum import optimum

RATES = [1e-4 * 2**power for power in range(9)]


def losses(best: float, noise: np.ndarray | None = None) -> dict[float, float]:
    """A parabola over log rate with its lowest point, 2.5, at ``best``."""
    exact = {rate: 2.5 + 0.03 * math.log(rate / best) ** 2 for rate in RATES}
    if noise is None:
        return exact
    return {rate: loss + float(one) for (rate, loss), one in zip(exact.items(), noise, strict=True)}


def test_a_parabola_is_found_between_its_values() -> None:
    found = optimum(losses(1.1e-3))
    assert found is not None
    assert (found.value, found.loss) == (pytest.approx(1.1e-3), pytest.approx(2.5))
    assert found.interval == pytest.approx((1.1e-3, 1.1e-3)), "no residuals"


def test_far_losses_and_infinite_ones_do_not_count() -> None:
    table = losses(1.6e-3) | {RATES[-1]: math.inf, RATES[0]: 9.0, RATES[1]: 8.0}
    found = optimum(table)
    assert found is not None
    assert found.value == pytest.approx(1.6e-3)


def test_the_interval_holds_the_value_in_95_of_100_sweeps() -> None:
    draw, best, inside, shown = np.random.default_rng(0), 1.3e-3, 0, 0
    for _ in range(500):
        found = optimum(losses(best, draw.normal(scale=0.002, size=len(RATES))))
        assert found is not None
        assert found.interval is not None
        inside += found.interval[0] <= best <= found.interval[1]
        shown += found.interval[1] / found.interval[0] < 2
    assert 0.92 < inside / 500 < 0.98
    assert shown > 400, "and it is narrow enough to say something"


def test_three_values_have_no_interval() -> None:
    table = {rate: loss for rate, loss in losses(1.3e-3).items() if 5e-4 < rate < 4e-3}
    assert len(table) == 3
    found = optimum(table)
    assert found is not None
    assert (found.value, found.interval) == (pytest.approx(1.3e-3), None)
    assert found.text() == "0.0013"


@pytest.mark.parametrize("best", [RATES[0] / 2, RATES[-1] * 2])
def test_a_best_value_at_an_end_is_none(best: float) -> None:
    assert optimum(losses(best)) is None


def test_fewer_than_three_values_and_flat_curves_are_none() -> None:
    assert optimum({1e-3: 2.0, 2e-3: 1.0}) is None
    assert optimum(dict.fromkeys(RATES, 2.0)) is None

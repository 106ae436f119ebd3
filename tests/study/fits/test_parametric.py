"""The five constants of a loss surface are found, and lie in their intervals as often as these say."""

import numpy as np
import pytest

from lightscale.errors import UserError
from lightscale.study.fits.curves import Points, thinned
from lightscale.study.fits.parametric import CONSTANTS, LossSurface, estimate_surface, fit_surface
from tests.study.fits.surfaces import HOFFMANN, curves, points

SURFACES = [
    HOFFMANN,
    LossSurface(E=1.82, A=482.0, B=2085.4, alpha=0.3478, beta=0.3658),  # a second fit of the same points, by Epoch
    LossSurface(E=0.4, A=15.0, B=90.0, alpha=0.2, beta=0.45),
]


@pytest.mark.parametrize("surface", SURFACES)
def test_constants_of_points_without_noise(surface: LossSurface) -> None:
    found = fit_surface(points(surface, np.random.default_rng(0), noise=0.0))
    assert found.constants() == pytest.approx(surface.constants(), rel=1e-4)


def test_constants_of_models_a_million_times_smaller() -> None:
    small = curves(LossSurface(E=2.1, A=60.0, B=160.0, alpha=0.35, beta=0.33), sizes=[1e4, 3e4, 1e5, 3e5], tokens=3e7)
    found = fit_surface(thinned(small, per_curve=15, skip=0.02))
    expected = {"E": 2.1, "A": 60.0, "B": 160.0, "alpha": 0.35, "beta": 0.33}
    assert found.constants() == pytest.approx(expected, rel=1e-3)


def test_a_run_that_went_wrong_hardly_counts() -> None:
    """What the Huber loss is for: least squares would follow it."""
    all_points = points(HOFFMANN, np.random.default_rng(1), noise=1e-4)
    loss = all_points.loss.copy()
    loss[13] *= 1.5
    spoilt = Points(parameters=all_points.parameters, tokens=all_points.tokens, loss=loss, runs=all_points.runs)
    assert fit_surface(spoilt).constants() == pytest.approx(HOFFMANN.constants(), rel=0.03)


def test_the_optimum_is_where_the_surface_is_lowest_at_equal_compute() -> None:
    a, b = HOFFMANN.optimal_exponents()
    assert a + b == pytest.approx(1)
    # By a search over N instead of the formula.
    sizes = np.geomspace(1e7, 1e12, 200_001)
    best = [sizes[HOFFMANN(sizes, compute / (6 * sizes)).argmin()] for compute in (1e20, 1e23)]
    assert np.log(best[1] / best[0]) / np.log(1e3) == pytest.approx(a, rel=1e-3)


@pytest.mark.parametrize(
    ("sizes", "lengths", "missing"),
    [(2, 8, "3 different N, and there are 2"), (8, 2, "3 different D, and there are 2"), (3, 2, "3 different D")],
)
def test_too_few_points_are_refused(sizes: int, lengths: int, missing: str) -> None:
    parameters, tokens = (
        np.repeat(np.geomspace(1e7, 1e9, sizes), lengths),
        np.tile(np.geomspace(1e9, 1e11, lengths), sizes),
    )
    few = Points(
        parameters=parameters, tokens=tokens, loss=HOFFMANN(parameters, tokens), runs=np.arange(len(parameters))
    )
    with pytest.raises(UserError, match=missing):
        fit_surface(few)


def covered(num_studies: int, *, draws: int) -> dict[str, int]:
    """In how many of `num_studies` simulated studies each constant lies in its interval."""
    counts = dict.fromkeys(CONSTANTS, 0)
    for study in range(num_studies):
        rng = np.random.default_rng(study)
        surface = SURFACES[study % len(SURFACES)]
        estimate = estimate_surface(points(surface, rng, noise=0.003), draws=draws, seed=study)
        for name in CONSTANTS:
            counts[name] += estimate.constants[name].covers(getattr(surface, name))
    return counts


def test_intervals_hold_the_constants() -> None:
    counts = covered(10, draws=50)
    assert min(counts.values()) >= 7, counts


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_intervals_hold_the_constants_of_a_hundred_studies() -> None:
    counts = covered(100, draws=400)
    print(f"of 100 studies: {counts}")
    assert min(counts.values()) >= 85, counts


def test_intervals_are_not_wide_for_nothing() -> None:
    """Ten times the noise, about ten times the width: an interval that is always wide would cover everything."""
    widths = []
    for noise in (0.0005, 0.005):
        estimate = estimate_surface(points(HOFFMANN, np.random.default_rng(3), noise=noise), draws=40)
        widths.append(estimate.constants["alpha"].high - estimate.constants["alpha"].low)
    assert 4 < widths[1] / widths[0] < 25
    assert widths[0] < 0.02

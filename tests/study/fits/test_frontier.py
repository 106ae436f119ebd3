"""The envelope and isoFLOP parabolas of simulated studies, whose optimum is known, and what is refused."""

import numpy as np
import pytest

from lightscale.errors import UserError
from lightscale.study.fits.curves import PFLOP_DAY, Curve
from lightscale.study.fits.envelope import envelope, estimate_envelope
from lightscale.study.fits.frontier import FrontierEstimate
from lightscale.study.fits.isoflop import estimate_isoflop, parabola_at
from lightscale.study.fits.power_law import fit_power_law
from tests.study.fits.surfaces import HOFFMANN, curves

MANY_SIZES = tuple(np.geomspace(1e7, 3e10, 24))


def optimal_size(compute: float) -> float:
    """N_opt of the surface at `compute` PFLOP-days, by search."""
    sizes = np.geomspace(1e6, 1e12, 200_001)
    return float(sizes[HOFFMANN(sizes, compute * PFLOP_DAY / (6 * sizes)).argmin()])


def test_a_power_law_is_found() -> None:
    x = np.geomspace(1e-9, 1e-3, 50)
    law = fit_power_law(x, 3.5 * x**-0.07)
    assert (law.coefficient, law.exponent) == pytest.approx((3.5, -0.07), rel=1e-9)
    assert law.residual < 1e-12
    np.testing.assert_allclose(law(x), 3.5 * x**-0.07, rtol=1e-9)
    # Against numpy's own, with noise.
    y = 3.5 * x**-0.07 * np.exp(np.random.default_rng(0).normal(0, 0.1, 50))
    slope, offset = np.polyfit(np.log(x), np.log(y), 1)
    noisy = fit_power_law(x, y)
    assert (noisy.exponent, np.log(noisy.coefficient)) == pytest.approx((slope, offset), rel=1e-9)


def test_the_envelope_is_the_least_loss() -> None:
    runs = curves()
    found = envelope(runs, bracketed=False)
    brute = np.array(
        [min(loss for run in runs if not np.isnan(loss := run.loss_at(np.array([c]))[0])) for c in found.compute]
    )
    np.testing.assert_array_equal(found.loss, brute)
    np.testing.assert_allclose(found.compute * PFLOP_DAY, 6 * found.parameters * found.tokens, rtol=1e-9)


def test_exponents_of_an_envelope_of_many_sizes() -> None:
    estimate = estimate_envelope(curves(sizes=MANY_SIZES), draws=10)
    a, b = HOFFMANN.optimal_exponents()
    assert estimate.laws["parameters"].exponent.value == pytest.approx(a, abs=0.02)
    assert estimate.laws["tokens"].exponent.value == pytest.approx(b, abs=0.02)
    assert_identity(estimate, utilisation=0.0)


def assert_identity(estimate: FrontierEstimate, *, utilisation: float) -> None:
    assert estimate.utilisation_exponent == pytest.approx(utilisation, abs=1e-9)
    assert estimate.identity_residual == pytest.approx(0, abs=1e-9)


def test_the_identity_where_compute_is_not_six_n_d() -> None:
    """LLaMA's attention makes a small model's token dearer: then a + b is not 1."""
    dear = [
        Curve(
            name=run.name,
            parameters=run.parameters,
            tokens=run.tokens,
            compute=run.compute * (run.parameters / 1e9) ** -0.16,
            loss=run.loss,
        )
        for run in curves(sizes=MANY_SIZES)
    ]
    estimate = estimate_envelope(dear, draws=10)
    both = estimate.laws["parameters"].exponent.value + estimate.laws["tokens"].exponent.value
    assert both > 1.03
    assert estimate.identity_residual == pytest.approx(0, abs=1e-9)


def test_points_without_a_rival_move_the_exponents() -> None:
    runs = curves()
    whole, bracketed = (estimate_envelope(runs, bracketed=only, draws=10) for only in (False, True))
    assert whole.window[0] < bracketed.window[0] < bracketed.window[1] < whole.window[1]
    assert set(np.unique(bracketed.frontier.parameters)) <= {run.parameters for run in runs[1:-1]}
    a, _ = HOFFMANN.optimal_exponents()
    errors = [abs(one.laws["parameters"].exponent.value - a) for one in (whole, bracketed)]
    assert errors[1] < errors[0]
    # Above this no smaller run has any tokens left.
    assert bracketed.window[1] <= runs[-2].compute[-1]


def test_a_window() -> None:
    whole = estimate_envelope(curves(), draws=10)
    low, high = np.sqrt(whole.window[0] * whole.window[1]), whole.window[1]
    assert estimate_envelope(curves(), window=(low, high), draws=10).window == pytest.approx((low, high), rel=0.01)
    with pytest.raises(UserError, match="fewer than two points of the envelope between 1e-30 and 1e-29"):
        estimate_envelope(curves(), window=(1e-30, 1e-29))


def test_intervals_are_of_seeds() -> None:
    one = estimate_envelope(curves(), draws=20)
    assert np.isnan(one.laws["loss"].exponent.low)
    assert one.laws["loss"].exponent.to_json()["low"] is None
    two = estimate_envelope(curves(seeds=2, noise=0.003), draws=50)
    exponent = two.laws["loss"].exponent
    assert exponent.low < exponent.value < exponent.high < exponent.low + 0.05


def test_isoflop_parabolas_have_the_surface_s_optimum() -> None:
    estimate = estimate_isoflop(curves(sizes=MANY_SIZES), draws=10)
    middle = estimate.parabolas[len(estimate.parabolas) // 2]
    # A parabola through all sizes is drawn off centre by the steeper side; the field knows it.
    assert middle.parameters == pytest.approx(optimal_size(middle.compute), rel=0.35)
    assert estimate.laws.laws["parameters"].exponent.value == pytest.approx(HOFFMANN.optimal_exponents()[0], abs=0.06)
    assert_identity(estimate.laws, utilisation=0.0)


def test_a_parabola_near_its_lowest_point_is_exact() -> None:
    compute = 1.0
    best = optimal_size(compute)
    found = parabola_at(curves(sizes=tuple(best * np.geomspace(0.5, 2, 5)), tokens=3e12), compute)
    assert not isinstance(found, str)
    assert found.parameters == pytest.approx(best, rel=0.02)
    assert found.tokens == pytest.approx(compute * PFLOP_DAY / (6 * best), rel=0.02)


@pytest.mark.parametrize(
    ("sizes", "tokens", "message"),
    [
        ((1e7, 1e9), 3e11, r"needs runs of at least 3 sizes; there are 2 \(N = 10,000,000, 1,000,000,000\)"),
        ((1e7, 1e8, 1e9), 3e8, "the curves do not cross enough"),
    ],
)
def test_an_envelope_that_cannot_be_is_refused(sizes: tuple[float, ...], tokens: float, message: str) -> None:
    with pytest.raises(UserError, match=message):
        envelope(curves(sizes=sizes, tokens=tokens))


def test_parabolas_that_cannot_be_are_refused_with_each_reason() -> None:
    with pytest.raises(UserError, match="needs runs of at least 4 sizes"):
        estimate_isoflop(curves(sizes=(1e7, 1e8, 1e9)))
    far = curves(sizes=(1e11, 2e11, 4e11, 8e11), tokens=3e9)
    with pytest.raises(UserError, match=r"0 of 12 budgets have their best size .*\n.*outside"):
        estimate_isoflop(far)
    with pytest.raises(UserError, match="no compute has data of 4 sizes"):
        estimate_isoflop(curves(sizes=(1e7, 1e9, 1e11, 1e13)))

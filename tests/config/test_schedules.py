import math
from itertools import pairwise
from typing import Any, get_args

import pytest

from lightscale.config.schedules.decays import DECAYS
from lightscale.config.schedules.registry import SCHEDULES, learning_rate, schedule_of
from lightscale.config.schema import OptimizerConfig


def rates(total_steps: int, **options: Any) -> list[float]:
    optimizer = OptimizerConfig(lr=2e-3, **options)
    return [learning_rate(optimizer, step, total_steps) for step in range(1, total_steps + 1)]


def test_constant() -> None:
    assert rates(5) == [2e-3] * 5


def test_the_warm_up_is_linear_and_reaches_the_peak_at_its_last_step() -> None:
    for options in ({}, {"schedule": "cosine"}, {"schedule": "wsd", "decay_steps": 3}):
        assert rates(10, warmup_steps=4, **options)[:4] == pytest.approx([0.5e-3, 1e-3, 1.5e-3, 2e-3], rel=1e-15)


def test_cosine_ends_at_its_lowest_and_is_half_way_in_the_middle() -> None:
    found = rates(104, schedule="cosine", warmup_steps=4, min_lr_ratio=0.1)
    assert found[3] == 2e-3
    assert found[-1] == pytest.approx(2e-4, rel=1e-12)
    assert found[53] == pytest.approx(1.1e-3, rel=1e-12)
    assert found[28] == pytest.approx(2e-4 + 1.8e-3 * (1 + math.sqrt(0.5)) / 2, rel=1e-12)
    assert all(later < before for before, later in pairwise(found[3:]))


def test_cosine_of_one_step() -> None:
    assert rates(1, schedule="cosine", min_lr_ratio=0.5) == [1e-3]


def test_wsd_stays_and_then_goes_down_in_a_line() -> None:
    found = rates(20, schedule="wsd", warmup_steps=2, decay_steps=10, min_lr_ratio=0.0)
    assert found[1:10] == [2e-3] * 9
    assert found[10:] == pytest.approx([2e-3 * left / 10 for left in range(9, -1, -1)], rel=1e-12)
    assert rates(20, schedule="wsd", decay_steps=10, min_lr_ratio=0.25)[-1] == pytest.approx(5e-4, rel=1e-12)


def test_wsd_may_decay_from_the_end_of_the_warm_up() -> None:
    found = rates(6, schedule="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.0)
    assert found == pytest.approx([1e-3, 2e-3, 1.5e-3, 1e-3, 0.5e-3, 0.0], rel=1e-12)


# Share of the decay that is left after a quarter, a half and three quarters of it, from the papers' formulas.
SHAPES = {
    "linear": (0.75, 0.5, 0.25),
    "cosine": ((1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2),
    "minus_sqrt": (0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)),
    "polynomial": (0.75**3, 0.5**3, 0.25**3),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_decays_alike_behind_a_stable_phase_and_behind_the_warm_up(shape: str) -> None:
    power = {"decay_power": 3.0} if shape == "polynomial" else {}
    stable = rates(30, schedule="wsd", warmup_steps=2, decay=shape, decay_steps=8, min_lr_ratio=0.2, **power)
    whole = rates(10, schedule=shape, warmup_steps=2, min_lr_ratio=0.2, **power)
    assert stable[1:22] == [2e-3] * 21
    assert stable[22:] == whole[2:]
    expected = [2e-3 * (0.2 + 0.8 * left) for left in (*SHAPES[shape], 0.0)]
    assert whole[3::2] == pytest.approx(expected, rel=1e-12)
    assert all(later < before for before, later in pairwise(whole[1:]))


def test_every_name_is_known() -> None:
    names = {key: get_args(OptimizerConfig.model_fields[key].annotation) for key in ("schedule", "decay")}
    assert set(names["schedule"]) == SCHEDULES.keys()
    assert set(names["decay"]) == DECAYS.keys() == SHAPES.keys()


def test_a_range_test_grows_by_one_factor_from_its_least_rate_to_the_peak() -> None:
    found = rates(41, schedule="range_test", min_lr_ratio=1e-4)
    assert found[0] == pytest.approx(2e-7, rel=1e-12)
    assert found[-1] == pytest.approx(2e-3, rel=1e-12)
    factors = [later / before for before, later in pairwise(found)]
    assert factors == pytest.approx([10**0.1] * 40, rel=1e-12)
    assert rates(1, schedule="range_test", min_lr_ratio=1e-4) == pytest.approx([2e-7])


@pytest.mark.parametrize(
    ("options", "wrong"), [({"warmup_steps": 3}, "warmup_steps = 3"), ({"min_lr_ratio": 0.0}, "0.0")]
)
def test_a_range_test_has_no_warm_up_and_no_rate_of_zero(options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match="range_test") as error:
        rates(5, schedule="range_test", **options)
    assert wrong in str(error.value)


LENGTHS = (12, 20, 31)


def options_of(schedule: str) -> dict[str, Any]:
    """What it needs, and a warm-up where it can have one."""
    others = {"wsd": {"decay_steps": 5, "warmup_steps": 3}, "range_test": {}}
    return {"schedule": schedule, **others.get(schedule, {"warmup_steps": 3})}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_are_the_same_in_runs_of_other_lengths_up_to_the_step_that_is_named(schedule: str) -> None:
    options = options_of(schedule)
    found = {length: rates(length, **options) for length in LENGTHS}
    for one in LENGTHS:
        fixed = schedule_of(optimizer := OptimizerConfig(lr=2e-3, **options)).fixed_until(optimizer, one)
        for other in LENGTHS:
            if other > one:
                assert found[other][:fixed] == found[one][:fixed]
                # And no longer: the next step's rate is another.
                assert fixed == one or found[other][fixed] != found[one][fixed]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_of_the_stable_phase_are_the_peak(schedule: str) -> None:
    options = options_of(schedule)
    stable = schedule_of(optimizer := OptimizerConfig(lr=2e-3, **options)).stable_steps(optimizer, 20)
    expected = {"constant": range(3, 21), "wsd": range(3, 16)}
    assert stable == expected.get(schedule)
    if stable is not None:
        assert [rates(20, **options)[step - 1] for step in stable] == [2e-3] * len(stable)


def test_linear_goes_down_in_a_line_to_a_share_of_the_peak() -> None:
    # LION's masked language models: 6 % of warm-up, then a line to 20 % of the peak.
    found = rates(100, schedule="linear", warmup_steps=6, min_lr_ratio=0.2)
    assert found[5] == 2e-3
    assert found[-1] == pytest.approx(4e-4, rel=1e-12)
    assert found[52] == pytest.approx(1.2e-3, rel=1e-12)
    drops = [before - later for before, later in pairwise(found[5:])]
    assert drops == pytest.approx([drops[0]] * len(drops), rel=1e-9)


def test_inverse_square_root_halves_when_steps_are_four_times_the_warm_up() -> None:
    found = rates(64, schedule="inverse_sqrt", warmup_steps=4)
    assert found[:4] == pytest.approx([0.5e-3, 1e-3, 1.5e-3, 2e-3], rel=1e-15)
    assert (found[15], found[63]) == pytest.approx((1e-3, 0.5e-3), rel=1e-12)
    assert found[:30] == rates(30, schedule="inverse_sqrt", warmup_steps=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "inverse_sqrt"}, "it needs optimizer.warmup_steps"),
        ({"schedule": "linear", "decay_steps": 3}, 'no effect with optimizer.schedule = "linear"; .* to "wsd"'),
        ({"schedule": "constant", "decay": "cosine"}, "decay = cosine has no effect"),
        ({"schedule": "wsd", "decay_steps": 3, "decay_power": 2.0}, "is the exponent of the polynomial decay"),
    ],
)
def test_schedules_without_what_they_need_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(lr=1e-3, **options)

import math
from itertools import pairwise
from typing import Any

import pytest

from lightscale.config.schema import OptimizerConfig
from lightscale.training.schedule import learning_rate


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


@pytest.mark.parametrize("schedule", ["constant", "wsd"])
def test_a_longer_run_has_the_same_rates_before_the_decay(schedule: str) -> None:
    options: dict[str, Any] = {"schedule": schedule, "warmup_steps": 3}
    if schedule == "wsd":
        options["decay_steps"] = 5
    assert rates(30, **options)[:15] == rates(20, **options)[:15]


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
        ({"schedule": "linear", "decay_steps": 3}, "no effect with optimizer.schedule"),
    ],
)
def test_schedules_without_what_they_need_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(lr=1e-3, **options)

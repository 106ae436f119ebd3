"""The guard: what it finds bad, and that nothing but the steps it saw decides."""

import json
import math
import random
import statistics

import pytest

from lightscale.config.schema import GuardConfig
from lightscale.training.health.guard import Guard


def test_what_is_not_finite_is_bad_from_the_first_step_on() -> None:
    guard = Guard(GuardConfig())
    assert guard.judge(math.nan, 1.0) == "the loss is nan"
    assert guard.judge(math.inf, 1.0) == "the loss is inf"
    assert guard.judge(3.0, math.nan) == "the gradient norm is nan"
    assert guard.judge(3.0, math.inf) == "the gradient norm is inf"
    assert guard.skips_in_a_row == 4
    assert guard.judge(3.0, 1.0) is None
    assert guard.skips_in_a_row == 0


def test_spikes_are_bad_once_the_window_is_full() -> None:
    guard = Guard(GuardConfig(window=8, max_loss_rise=0.5, max_grad_norm_ratio=10.0))
    for number in range(7):
        assert guard.judge(3.0 - 0.1 * number, 1.0 + number) is None
        assert guard.judge(math.nan, 1.0) is not None, "which does not count for the window"
    assert guard.judge(99.0, 5.0) is None, "seven good steps say nothing yet"
    # Losses 3.0 … 2.4 and 99: median 2.75. Norms 1 … 7 and 5: median 4.5.
    assert guard.judge(3.24, 44.9) is None
    # The first of each left: losses 2.9 … 2.4, 99 and 3.24: median 2.75. Norms 2 … 7, 5, 44.9: median 5.
    assert guard.judge(3.26, 1.0) == "the loss is 3.2600, at least 0.5 above the median 2.7500"
    assert guard.judge(2.0, 50.0) == "the gradient norm is 50, at least 10 times the median 5"
    assert guard.judge(9.0, 1e9) == "the loss is 9.0000, at least 0.5 above the median 2.7500", (
        "medians are of good steps"
    )
    assert guard.skips_in_a_row == 3


def test_limits_can_be_off() -> None:
    guard = Guard(GuardConfig(window=8, max_loss_rise=None, max_grad_norm_ratio=None))
    for _ in range(8):
        assert guard.judge(1.0, 1.0) is None
    assert guard.judge(1e30, 1e30) is None
    assert guard.judge(math.nan, 1.0) is not None


def test_a_guard_can_be_off() -> None:
    guard = Guard(GuardConfig(enabled=False, window=8))
    for loss, norm in [(1.0, 1.0)] * 9 + [(math.nan, 1.0), (1.0, math.inf), (1e30, 1e30)]:
        assert guard.judge(loss, norm) is None
    # Nothing is remembered: a guard switched on later begins with what it sees.
    assert guard.state_dict() == Guard(GuardConfig(window=8)).state_dict()


def test_no_gradients_are_no_measure() -> None:
    guard = Guard(GuardConfig(window=8))
    for _ in range(9):
        assert guard.judge(1.0, 0.0) is None
    assert guard.judge(1.0, 5.0) is None, "a multiple of 0"


@pytest.mark.parametrize("steps_before", [0, 3, 20])
def test_a_restored_guard_judges_as_the_one_before(steps_before: int) -> None:
    config = GuardConfig(window=9, max_loss_rise=1e-3, max_grad_norm_ratio=1.01)
    generator = random.Random(steps_before)
    steps = [(generator.gauss(3, 1e-3), generator.lognormvariate(0, 0.01)) for _ in range(60)]
    guard = Guard(config)
    # The state is taken in the middle of a row of skipped steps.
    for step in [*steps[:steps_before], (math.nan, 1.0), (3.0, math.inf)]:
        guard.judge(*step)
    other = Guard(config)
    other.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert other.skips_in_a_row == guard.skips_in_a_row >= 2
    assert other.state_dict() == guard.state_dict()
    verdicts = [(guard.judge(*step), other.judge(*step)) for step in steps[steps_before:]]
    assert all(one == two for one, two in verdicts)
    assert {one is None for one, _ in verdicts} == {True, False}
    assert other.skips_in_a_row == guard.skips_in_a_row


def test_the_window_holds_the_last_good_steps() -> None:
    config, good = GuardConfig(window=10), []
    guard, generator = Guard(config), random.Random(1)
    for _ in range(100):
        loss, norm = generator.gauss(3, 1), generator.lognormvariate(0, 2)
        usual, common = (statistics.median(values) for values in zip(*good[-10:], strict=True)) if good else (0.0, 0.0)
        bad = len(good) >= 10 and (loss >= usual + 1.0 or norm >= 20.0 * common)
        assert (guard.judge(loss, norm) is not None) == bad
        if not bad:
            good.append((loss, norm))
    assert 10 < len(good) < 100

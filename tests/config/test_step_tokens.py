"""Steps and tokens of runs with a ramp-up of the batch, beside a walk from step to step."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightscale.config.layout import LayoutError, check_layout
from lightscale.config.schedules.step_tokens import StepTokens
from lightscale.config.schema import RunConfig, TrainConfig

Config = Callable[..., RunConfig]
STEPS = 60


@st.composite
def ramps(draw: st.DrawFn) -> StepTokens:
    """Up to five parts, some of them shorter than a step."""
    ends = accumulate(draw(st.lists(st.integers(0, 400), max_size=5)))
    sizes = draw(st.lists(st.integers(1, 9), min_size=6, max_size=6))
    return StepTokens.of(8, sizes[-1], list(zip(ends, sizes, strict=False)))


def walked(step_tokens: StepTokens, start: int = 0) -> list[int]:
    """Tokens consumed after 0, 1, … steps."""
    found = [start]
    for _ in range(STEPS):
        size = next((size for end, size in step_tokens.ramp if found[-1] < end), step_tokens.full)
        found.append(found[-1] + size)
    return found


@given(ramps(), st.integers(0, 50))
@example(StepTokens.of(8, 4), 0)
def test_all_ways_to_count_agree_with_a_walk(step_tokens: StepTokens, sequences: int) -> None:
    consumed = walked(step_tokens)
    assert [step_tokens.after(steps) for steps in range(STEPS + 1)] == consumed
    assert [step_tokens.of_next(tokens) for tokens in consumed[:-1]] == [
        after - before for before, after in pairwise(consumed)
    ]
    for tokens in range(0, consumed[-1] + 1, 8):
        assert step_tokens.steps_to(tokens) == sum(before < tokens for before in consumed)
        assert step_tokens.begins_step(tokens) == (tokens in consumed)
    alike = list(step_tokens.equal_steps(STEPS))
    assert [size for steps, size in alike for _ in range(steps)] == [
        after - before for before, after in pairwise(consumed)
    ]
    # A run whose steps before had other batches goes on from anywhere.
    elsewhere = walked(step_tokens, 8 * sequences)
    assert [step_tokens.after(steps, 8 * sequences) for steps in range(STEPS + 1)] == elsewhere


def train(ramp: list[dict[str, int]], **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({"steps": 10, "global_batch_size": 64, "rampup_batch_size": ramp, **changes})


def test_increments_are_those_of_megatron() -> None:
    """Of N = (batch - start) / increment parts, part i has start + i · increment sequences."""
    ramp = train([{"global_batch_size": 16, "increment": 8, "until_tokens": 1200}]).ramp
    assert [part.sequences for part in ramp] == [16, 24, 32, 40, 48, 56]
    for tokens in range(1200):
        assert next(part.sequences for part in ramp if tokens < part.until_tokens) == 16 + 8 * (tokens // (1200 // 6))
    odd = train([{"global_batch_size": 16, "increment": 8, "until_tokens": 1000}]).ramp
    assert [part.until_tokens for part in odd] == [166, 333, 500, 666, 833, 1000]


def test_stages_with_and_without_increments_follow_one_another() -> None:
    stages: list[dict[str, int]] = [
        {"global_batch_size": 4, "until_tokens": 100},
        {"global_batch_size": 8, "until_tokens": 400, "increment": 4},
        {"global_batch_size": 20, "until_tokens": 500},
    ]
    found = [(part.stage, part.until_tokens, part.sequences, part.is_grown) for part in train(stages).ramp]
    assert found == [
        (0, 100, 4, False),
        (1, 200, 8, False),
        (1, 300, 12, True),
        (1, 400, 16, True),
        (2, 500, 20, False),
    ]


def test_the_length_in_tokens_counts_the_smaller_steps(tiny_config: Config) -> None:
    ramp = "train.rampup_batch_size=[{global_batch_size=1,until_tokens=128},{global_batch_size=2,until_tokens=300}]"
    # Steps of 64, 64, 128, 128, then 256 tokens.
    config = tiny_config(ramp, "train.global_batch_size=4", "train.tokens=800")
    assert (config.total_steps, config.total_tokens) == (6, 896)
    branch = config.model_copy(update={"train": config.train.model_copy(update={"branch_from": "runs/a@3"})})
    assert (branch.own_steps, branch.own_tokens) == (3, 896 - 256)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([(64, 100, None)], "global_batch_size = 64 is followed by 64; use growing batches up to .* = 64"),
        ([(8, 100, None), (4, 200, None)], "global_batch_size = 8 is followed by 4"),
        ([(8, 100, None), (16, 100, None)], "until_tokens = 100 comes after 100"),
        ([(8, 100, 10)], "global_batch_size = 8 does not reach 64 by increment = 10; use 8"),
    ],
)
def test_ramps_that_cannot_be_are_refused(stages: list[tuple[int, int, int | None]], message: str) -> None:
    ramp: Any = [dict(zip(("global_batch_size", "until_tokens", "increment"), one, strict=True)) for one in stages]
    with pytest.raises(ValueError, match=message):
        train(ramp)


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        (
            [],
            4,
            r"rampup_batch_size\[0\].global_batch_size = 6 is not divisible by .* 4 data ranks.*; use 8 sequences",
        ),
        (
            ["train.rampup_batch_size=[{global_batch_size=4,until_tokens=100,increment=2}]"],
            4,
            r"rampup_batch_size\[0\].increment: global_batch_size = 6 is not divisible",
        ),
        (
            ["parallel.pipeline=2", "parallel.virtual_stages=2", "model.num_layers=4", "train.micro_batch_size=2"],
            2,
            r"\[0\].global_batch_size = 6 gives every data rank 3; use 8 sequences",
        ),
        (
            ["metrics.gradient_noise_every=1", "train.micro_batch_size=6", "train.global_batch_size=12"],
            1,
            r"\[0\].global_batch_size = 6 and train.micro_batch_size = 6 give each 1; use .* = 12",
        ),
    ],
)
def test_batches_that_a_layout_does_not_divide_are_refused(
    tiny_config: Config, overrides: list[str], world_size: int, message: str
) -> None:
    ramp = "train.rampup_batch_size=[{global_batch_size=6,until_tokens=100}]"
    config = tiny_config("train.global_batch_size=8", ramp, *overrides)
    with pytest.raises(LayoutError, match=message):
        check_layout(config, world_size)
    fits = config.model_copy(update={"train": config.train.model_copy(update={"rampup_batch_size": []})})
    assert check_layout(fits, world_size)

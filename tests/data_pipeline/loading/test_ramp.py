"""A ramp-up of the batch changes only where the order of the samples is cut into steps."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightscale.config.schedules.step_tokens import StepTokens
from lightscale.config.schema import CurriculumStage
from lightscale.data_pipeline.loading.curriculum import Curriculum, SkippedRanges
from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader
from lightscale.data_pipeline.loading.prefetch import Prefetcher
from lightscale.data_pipeline.loading.samples import step_content
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError

WriteStore = Callable[..., TokenStore]
# Of 64 tokens: three steps of 2 sequences, two of 6, then of 8.
RAMP = [(384, 2), (1000, 6)]
SIZES = [2, 2, 2, 6, 6, 8, 8, 8]
# As 1152 tokens are the start of the sixth step.
STAGES = [CurriculumStage(sequence_length=16, until_tokens=1100)]


@pytest.fixture
def store(write_store: WriteStore) -> TokenStore:
    generator = np.random.default_rng(0)
    texts = {
        name: [generator.integers(0, 256, generator.integers(0, 60)).tolist() for _ in range(count)]
        for name, count in (("a", 90), ("b", 40))
    }
    return write_store(texts, shards=1024)


def make_loader(store: TokenStore, **changes: Any) -> TokenLoader:
    arguments: dict[str, Any] = {"sequence_length": 64, "global_batch_size": 8, "micro_batch_size": 1, "seed": 3}
    return TokenLoader(store, **(arguments | {"ramp": RAMP} | changes))


def rows(loader: TokenLoader, steps: int) -> list[list[int]]:
    return [row for _ in range(steps) for batch in loader.next_step() for row in batch.tokens.tolist()]


@pytest.mark.parametrize("curriculum", [(), STAGES], ids=["", "curriculum"])
@pytest.mark.parametrize("packing", ["concat", "joined", "whole"])
def test_samples_are_those_without_a_ramp(store: TokenStore, packing: Any, curriculum: Any) -> None:
    loader = make_loader(store, packing=packing, curriculum=curriculum)
    # Steps of one sequence of 64 tokens, whose boundaries all others have.
    plain = make_loader(store, packing=packing, ramp=(), global_batch_size=1)
    if curriculum:
        plain = make_loader(
            store,
            packing=packing,
            ramp=(),
            global_batch_size=1,
            curriculum=[CurriculumStage(sequence_length=16, until_tokens=1152)],
        )
    with Prefetcher(loader) as ahead:
        for size in SIZES:
            found = [row for batch in ahead.next_step() for row in batch.tokens.tolist()]
            assert found == rows(plain, size)
            assert loader.tokens == plain.tokens
    assert [step_content(loader, step).num_tokens for step in range(1, 9)] == [64 * size for size in SIZES]
    assert step_content(loader, 5).first_token == 64 * sum(SIZES[:4])


@pytest.mark.parametrize("done", range(8))
def test_any_layout_resumes_within_a_ramp(store: TokenStore, done: int) -> None:
    first = make_loader(store, curriculum=STAGES)
    rows(first, done)
    state = first.state_dict()
    expected = rows(first, 2)
    found = []
    for rank in range(2):
        second = make_loader(store, curriculum=STAGES, layout=LoaderLayout(data_rank=rank, data_size=2))
        second.load_state_dict(state)
        found += rows(second, 2)
        assert second.tokens == first.tokens
    assert sorted(found) == sorted(expected)


def test_what_would_not_fit_is_refused(store: TokenStore) -> None:
    with pytest.raises(UserError, match=r"global_batch_size 6 is not a multiple of .* × 4 data ranks \(4\)"):
        make_loader(store, layout=LoaderLayout(data_size=4), ramp=[(100, 4), (200, 6)])
    state = make_loader(store, curriculum=STAGES).state_dict()
    with pytest.raises(UserError, match="64 tokens are no whole number of steps"):
        make_loader(store, curriculum=STAGES).load_state_dict(state | {"tokens": 64, "position": 64})
    # What was left of a curriculum stage behind skipped data is left with these batches alone.
    skipping = make_loader(store, curriculum=STAGES)
    skipping.skip(128, 576)
    rows(skipping, 5)
    assert skipping.skips.ends == ((384, 192),)
    state = skipping.state_dict()
    same = make_loader(store, curriculum=STAGES)
    same.load_state_dict(state)
    assert same.skips == skipping.skips and rows(same, 1) == rows(skipping, 1)
    other = make_loader(store, curriculum=[CurriculumStage(sequence_length=16, until_tokens=1152)], ramp=[(10**6, 2)])
    with pytest.raises(
        UserError, match="1152 tokens end at position 1920 of the data, and at 1792 with the batches of"
    ):
        other.load_state_dict(state)
    # Without a curriculum the batch may change at any sequence.
    other = make_loader(store, ramp=())
    other.load_state_dict(make_loader(store).state_dict() | {"tokens": 64, "position": 64})
    assert other.tokens == 64


# ----- with skipped data ----------------------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> tuple[StepTokens, Curriculum]:
    """A ramp-up and curriculum stages, in sequences of one token."""
    sizes = draw(st.lists(st.integers(1, 7), min_size=3, max_size=3))
    ends = sorted(draw(st.lists(st.integers(1, 40), min_size=2, max_size=2)))
    steps = StepTokens.of(1, sizes[-1], list(zip(ends, sizes, strict=False)))
    edges = sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=3)))
    stages = [CurriculumStage(sequence_length=1, until_tokens=edge) for edge in edges]
    return steps, Curriculum(stages, sequence_length=1, step_tokens=steps, micro_batch_size=1)


def walked(steps: StepTokens, curriculum: Curriculum, skips: SkippedRanges, number: int) -> list[range]:
    """The data of each step, by a walk: a step that would reach into the next curriculum stage begins there."""
    tokens = position = 0
    found = []
    for _ in range(number):
        position += sum(skip for at, skip in skips.records if at == tokens)
        size = steps.of_next(tokens)
        for edge in (stage.stop for stage in curriculum.stages if stage.stop is not None):
            if position < edge < position + size:
                position = edge
        found.append(range(position, position + size))
        tokens, position = tokens + size, position + size
    return found


@given(plans(), st.lists(st.tuples(st.integers(0, 19), st.integers(1, 30)), max_size=3))
def test_no_step_reaches_into_the_next_curriculum_stage(
    plan: tuple[StepTokens, Curriculum], skipped: list[tuple[int, int]]
) -> None:
    steps, curriculum = plan
    skips = curriculum.fit(SkippedRanges.of((steps.after(step), length) for step, length in skipped))
    assert bool(skips.records) or not skips.ends, "without skipped data stages end with whole steps"
    expected = walked(steps, curriculum, skips, 30)
    assert [skips.position(steps.after(step)) for step in range(30)] == [data.start for data in expected]
    for data in expected:
        assert curriculum.number_at(data.start) == curriculum.number_at(data.stop - 1)


@given(plans(), st.lists(st.tuples(st.integers(0, 17), st.integers(1, 12)), min_size=1, max_size=4))
def test_no_rollback_brings_data_back(plan: tuple[StepTokens, Curriculum], rollbacks: list[tuple[int, int]]) -> None:
    """From a step to one before, also over changes of the batch and of the sequence length."""
    steps, curriculum = plan
    skips, end, bad = SkippedRanges(), 30, set[int]()
    for target, length in rollbacks:
        reached = min(target + length, end - 1)
        data = walked(steps, curriculum, skips, end)
        bad |= set(itertools.chain(*data[target:reached]))
        at_tokens = steps.after(target)
        skip = skips.length_back_to(at_tokens, steps.after(reached), steps.after(end))
        skips = curriculum.fit(skips.adding(at_tokens, skip))
        again = walked(steps, curriculum, skips, end)
        assert again[:target] == data[:target], "the steps before are as they were"
        assert not bad & set(itertools.chain(*again[target:]))

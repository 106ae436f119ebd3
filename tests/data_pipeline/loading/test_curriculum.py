from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightscale.config.schedules.step_tokens import StepTokens
from lightscale.config.schema import CurriculumStage, DataConfig
from lightscale.data_pipeline.loading.curriculum import Curriculum, SkippedRanges
from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError

EOT = 256
WriteStore = Callable[..., TokenStore]
STAGES = [CurriculumStage(sequence_length=8, until_tokens=1000), CurriculumStage(sequence_length=16, until_tokens=2500)]


def make_loader(store: TokenStore, **changes: Any) -> TokenLoader:
    """Steps of 4 × 64 tokens: 4 of 8 × 32, 6 of 4 × 64 … of 8, 16 and 64 tokens."""
    arguments: dict[str, Any] = {"sequence_length": 64, "global_batch_size": 4, "micro_batch_size": 2, "seed": 3}
    return TokenLoader(store, curriculum=STAGES, **(arguments | changes))


@pytest.fixture
def store(write_store: WriteStore) -> TokenStore:
    generator = np.random.default_rng(0)
    texts = {
        name: [generator.integers(0, EOT, generator.integers(0, 60)).tolist() for _ in range(count)]
        for name, count in (("a", 90), ("b", 40))
    }
    return write_store(texts, shards=1024)


def test_stages_last_whole_steps_and_keep_the_tokens_of_a_step() -> None:
    stages = Curriculum(STAGES, sequence_length=64, step_tokens=StepTokens(full=256), micro_batch_size=2).stages
    assert [(stage.start, stage.stop, stage.sequence_length) for stage in stages] == [
        (0, 1024, 8),
        (1024, 2560, 16),
        (2560, None, 64),
    ]
    assert [stage.micro_batch_size for stage in stages] == [16, 8, 2]
    large = Curriculum(STAGES, sequence_length=64, step_tokens=StepTokens(full=256_000), micro_batch_size=2).stages
    assert [stage.sequence_length for stage in large] == [8, 64], "no step is left for the second stage"


@pytest.mark.parametrize("packing", ["concat", "whole"])
def test_batches_have_the_shape_of_their_stage(store: TokenStore, packing: Any) -> None:
    loader = make_loader(store, packing=packing, layout=LoaderLayout(data_rank=1, data_size=2, sequence_size=2))
    shapes = []
    for step in range(14):
        stage = loader.stage_after(loader.tokens)
        batches = loader.next_step()
        assert len(batches) == 1
        assert batches[0].tokens.shape == (stage.micro_batch_size, stage.sequence_length // 2)
        shapes.append(stage.sequence_length)
        assert loader.tokens == (step + 1) * 256
    assert shapes == [8] * 4 + [16] * 6 + [64] * 4


def test_all_stages_together_read_every_token_of_an_epoch_once(store: TokenStore) -> None:
    """As inputs, over the stages and an epoch's end; a and b are read in proportion."""
    loader = make_loader(store, sources={"a": 2, "b": 1})
    texts = {name: store.source(name).read(0, store.source(name).num_tokens).tolist() for name in ("a", "b")}
    seen: dict[tuple[str, int], Counter[int]] = {}
    for _ in range(40):
        step = loader.step_after(loader.tokens)
        batches = loader.next_step()
        rows = [(row, batch) for batch in batches for row in range(len(batch.tokens))]
        for location, (row, batch) in zip(step.locations, rows, strict=True):
            n = step.stage.sequence_length
            start = location.window * n
            assert batch.tokens[row].tolist() == texts[location.source][start : start + n]
            assert batch.labels[row].tolist() == texts[location.source][start + 1 : start + n + 1]
            seen.setdefault((location.source, location.epoch), Counter()).update(range(start, start + n))
    assert max(epoch for _, epoch in seen) >= 2
    for (name, epoch), tokens in seen.items():
        assert set(tokens.values()) == {1}
        if (name, epoch + 1) in seen:
            assert len(tokens) == (len(texts[name]) - 1) // 64 * 64
    read = {name: sum(len(tokens) for (source, _), tokens in seen.items() if source == name) for name in ("a", "b")}
    assert abs(read["a"] - 2 * read["b"]) <= 3 * 64


def test_neighbours_of_a_long_sequence_are_spread_over_the_stage(store: TokenStore) -> None:
    first = make_loader(store).step_after(0)
    longest = Counter((location.source, location.window // 8) for location in first.locations)
    assert len(longest) > 8, "32 parts of 8 long sequences would be 4 of them without a shuffle"


@pytest.mark.parametrize("packing", ["concat", "whole"])
@pytest.mark.parametrize("num_steps", [0, 3, 4, 7, 10, 12])
def test_any_layout_resumes_in_any_stage(store: TokenStore, packing: Any, num_steps: int) -> None:
    first = make_loader(store, packing=packing)
    for _ in range(num_steps):
        first.next_step()
    state = first.state_dict()
    wanted = [row for batch in first.next_step() for row in batch.tokens.tolist()]
    got = []
    for rank in range(2):
        second = make_loader(
            store, packing=packing, micro_batch_size=1, layout=LoaderLayout(data_rank=rank, data_size=2)
        )
        second.load_state_dict(state)
        got += [row for batch in second.next_step() for row in batch.tokens.tolist()]
    assert sorted(got) == sorted(wanted)


def test_another_curriculum_or_a_position_inside_a_step_is_refused(store: TokenStore) -> None:
    state = make_loader(store).state_dict()
    plain = TokenLoader(store, sequence_length=64, global_batch_size=4, micro_batch_size=2, seed=3)
    with pytest.raises(UserError, match="curriculum: 8 from 0, 16 from 1024, 64 from 2560 before, None now"):
        plain.load_state_dict(state)
    with pytest.raises(
        UserError, match=r"64 tokens are no whole number of steps .*; keep train\.global_batch_size and"
    ):
        make_loader(store).load_state_dict(state | {"tokens": 64})
    assert plain.tokens == 0


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([(48, 100)], "sequence_length = 48 does not divide data.sequence_length = 64.*; use (32|64)"),
        ([(8, 100), (16, 100)], "until_tokens = 100 comes after 100"),
        ([(128, 100)], "sequence_length = 128 does not divide"),
    ],
)
def test_stages_that_cannot_be_are_refused(stages: list[tuple[int, int]], message: str) -> None:
    entries = [{"sequence_length": length, "until_tokens": until} for length, until in stages]
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate({"store": "store", "sequence_length": 64, "curriculum": entries})


def test_skipped_data_moves_the_position() -> None:
    skips = SkippedRanges().adding(200, 30).adding(100, 10).adding(100, 5)
    assert skips.records == ((100, 5), (100, 10), (200, 30))
    assert [skips.position(tokens) for tokens in (0, 99, 100, 199, 200, 1000)] == [0, 99, 115, 214, 245, 1045]
    assert SkippedRanges.of([[100, 10], [200, 30], [100, 5]]) == skips
    for record in ((-1, 5), (5, 0)):
        with pytest.raises(UserError, match="cannot skip"):
            SkippedRanges.of([record])


def test_no_rollback_brings_skipped_data_back() -> None:
    """Rollbacks to anywhere, also before a skip: of a parent, or whose checkpoint is lost. Steps of one token."""
    generator, moved, steps = np.random.default_rng(0), 0, 40
    for _ in range(300):
        skips, bad = SkippedRanges(), set[int]()
        for _ in range(4):
            start, stop = sorted(generator.choice(steps, 2, replace=False).tolist())
            moved += any(start < at for at, _ in skips.records)
            trained = {skips.position(token) for token in range(start, stop)}
            left_out = set(range(skips.position(steps))) - {skips.position(token) for token in range(steps)}
            bad |= trained | left_out
            skips = skips.adding(start, skips.length_back_to(start, stop, steps))
            again = {skips.position(token) for token in range(start, steps)}
            assert not again & bad, (skips.records, start, stop)
    assert moved > 300
    assert SkippedRanges().adding(30, 5).length_back_to(10, 15, 20) == 5, "a skip behind the end of the run"


@pytest.mark.parametrize("packing", ["concat", "whole"])
def test_a_jump_leaves_out_exactly_the_steps_that_were_skipped(store: TokenStore, packing: Any) -> None:
    plain, jumping = (make_loader(store, packing=packing) for _ in range(2))
    # Over the end of the first stage, and one step later over one step.
    jumping.skip(2 * 256, 3 * 256)
    jumping.skip(3 * 256, 256)
    wanted = [0, 1, 5, 7, 8, 9, 10, 11]
    for step in wanted:
        expected = plain.batches_after(step * 256)
        assert jumping.stage_after(jumping.tokens) == plain.stage_after(step * 256)
        got = jumping.next_step()
        assert all(one.tokens.equal(other.tokens) for one, other in zip(got, expected, strict=True))
    assert jumping.tokens == len(wanted) * 256
    resumed = make_loader(store, packing=packing)
    resumed.load_state_dict(jumping.state_dict())
    assert resumed.next_step()[0].tokens.equal(plain.batches_after(12 * 256)[0].tokens)
    with pytest.raises(UserError, match="100 tokens: only whole sequences of 64 tokens"):
        jumping.skip(100, 256)

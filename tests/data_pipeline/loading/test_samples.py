"""A run that fails, goes back and changes its layout, and what `lightscale data samples` says of it."""

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightscale.config.files import to_toml
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.commands import data
from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader
from lightscale.data_pipeline.loading.samples import (
    SampleContent,
    StepContent,
    recorded_tokens,
    run_loader,
    step_content,
)
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError

EOT = 256
STEP_TOKENS = 256
NUM_STEPS = 44
WriteStore = Callable[..., TokenStore]
MakeRun = Callable[..., tuple[Path, RunConfig]]


def random_documents(count: int, seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, EOT, generator.integers(0, 120)).tolist() for _ in range(count)]


DOCUMENTS = {"a": random_documents(60, 1), "b": random_documents(30, 2)}


@pytest.fixture
def make_run(tmp_path: Path, tiny_config: Callable[..., RunConfig], write_store: WriteStore) -> MakeRun:
    """``make_run("data.packing=whole", …)``: a run's directory with a configuration, and no training."""

    def make(*overrides: str) -> tuple[Path, RunConfig]:
        store = write_store(DOCUMENTS, shards=512)
        config = tiny_config(
            f"data.store={store.path}",
            "data.seed=7",
            f"train.steps={NUM_STEPS}",
            "train.micro_batch_size=2",
            *overrides,
        )
        assert config.tokens_per_step == STEP_TOKENS
        run = tmp_path / "run"
        run.mkdir()
        (run / "config.toml").write_text(to_toml(config))
        return run, config

    return make


class Failing:
    """Trains without a model: keeps, for every step, the rows that its last attempt was given."""

    def __init__(self, config: RunConfig, run: Path) -> None:
        self.config, self.run = config, run
        self.store = TokenStore(config.data.store)
        self.trained: dict[int, list[list[int]]] = {}
        self.states: dict[int, Any] = {}

    def attempt(self, *, last_step: int, data: int, sequence: int, micro_batch_size: int, resume: int | None) -> None:
        """From the state after step ``resume`` until after ``last_step``, on ``data`` × ``sequence`` ranks."""
        train = self.config.train.model_copy(update={"micro_batch_size": micro_batch_size})
        config = self.config.model_copy(update={"train": train})
        ranks = {}
        for data_rank in range(data):
            for sequence_rank in range(sequence):
                layout = LoaderLayout(
                    data_rank=data_rank, data_size=data, sequence_rank=sequence_rank, sequence_size=sequence
                )
                loader = TokenLoader.of(config, self.store, layout=layout, index_dir=self.run / "packing")
                if resume:
                    loader.load_state_dict(json.loads(json.dumps(self.states[resume])))
                ranks[data_rank, sequence_rank] = loader
        for step in range((resume or 0) + 1, last_step + 1):
            batches = {key: loader.next_step() for key, loader in ranks.items()}
            rows = []
            for data_rank in range(data):
                for number, batch in enumerate(batches[data_rank, 0]):
                    for row in range(len(batch.tokens)):
                        parts = [batches[data_rank, rank][number] for rank in range(sequence)]
                        kept = [part.tokens[row][part.loss_mask[row] == 1].tolist() for part in parts]
                        rows.append([token for part in kept for token in part])
            self.trained[step] = rows
            self.states[step] = ranks[0, 0].state_dict()


def text_of(sample: SampleContent) -> list[int]:
    """The tokens that it names, from the documents as they were written."""
    documents = DOCUMENTS[sample.source]
    return [token for one in sample.documents for token in [EOT, *documents[one.document]][one.start : one.stop]]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("data.packing=whole",),
        ("data.curriculum=[{sequence_length=8, until_tokens=1500}, {sequence_length=32, until_tokens=5000}]",),
        ("data.packing=whole", "data.curriculum=[{sequence_length=16, until_tokens=3000}]"),
    ],
    ids=["concat", "whole", "concat-curriculum", "whole-curriculum"],
)
def test_a_run_with_failures_and_other_layouts_is_named_sample_by_sample(
    make_run: MakeRun, overrides: tuple[str, ...]
) -> None:
    run, config = make_run(*overrides)
    failing = Failing(config, run)
    layouts = [(1, 1, 2), (2, 1, 1), (1, 4, 4), (2, 2, 2), (4, 1, 1), (1, 2, 1)]
    generator = random.Random(4)
    reached, resume = 0, None
    while reached < NUM_STEPS:
        data, sequence, micro_batch_size = generator.choice(layouts)
        last = min(NUM_STEPS, (resume or 0) + generator.randint(1, 12))
        failing.attempt(last_step=last, data=data, sequence=sequence, micro_batch_size=micro_batch_size, resume=resume)
        # The next attempt starts from a checkpoint some steps back; what was done since is done again.
        reached = max(reached, last)
        resume = max(1, last - generator.randint(0, 4))
    _, loader = run_loader(run)
    seen: dict[tuple[str, int, int], Counter[tuple[int, int]]] = {}
    for step in range(1, NUM_STEPS + 1):
        content = step_content(loader, step)
        assert (content.step, content.first_token, content.num_tokens) == (step, (step - 1) * STEP_TOKENS, STEP_TOKENS)
        assert len(content.samples) * content.sequence_length == STEP_TOKENS
        assert sorted(map(text_of, content.samples)) == sorted(failing.trained[step])
        # In whole packing every stage goes through epochs of its own.
        stage = content.sequence_length if config.data.packing == "whole" else 0
        for sample in content.samples:
            count = seen.setdefault((sample.source, stage, sample.epoch), Counter())
            for one in sample.documents:
                count.update((one.document, token) for token in range(one.start, one.stop))
            assert (
                sum(one.stop - one.start for one in sample.documents) + sample.padding_tokens == content.sequence_length
            )
    assert max(epoch for _, _, epoch in seen) >= 1
    for (source, stage, epoch), tokens in seen.items():
        assert set(tokens.values()) == {1}, "each token once in an epoch"
        num_tokens = sum(len(ids) + 1 for ids in DOCUMENTS[source])
        if (source, stage, epoch + 1) in seen and not config.data.curriculum:
            whole = config.data.packing == "whole"
            assert len(tokens) == (num_tokens if whole else (num_tokens - 1) // 64 * 64)


def test_data_that_a_recovery_left_out_is_not_named(make_run: MakeRun) -> None:
    run, _ = make_run()
    plain = [step_content(run_loader(run)[1], step).samples for step in range(1, 13)]
    events = [
        {"event": "start", "attempt": 1},
        {"event": "data_skipped", "at_tokens": 3 * STEP_TOKENS, "skip_tokens": 4 * STEP_TOKENS, "attempt": 1},
        {"event": "data_skipped", "at_tokens": 5 * STEP_TOKENS, "skip_tokens": STEP_TOKENS, "attempt": 2},
    ]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (run / "events.jsonl").write_text(lines + '{"event": "data_skipped", "at_to')
    _, loader = run_loader(run)
    jumping = [step_content(loader, step).samples for step in range(1, 8)]
    assert jumping == [plain[step] for step in (0, 1, 2, 7, 8, 10, 11)]


def test_steps_before_a_change_of_the_batch_are_named_as_they_were(make_run: MakeRun) -> None:
    """Four steps of twice the batch, then the configured ones; the run has returned from step 6 to 4 once."""
    run, _ = make_run()
    plain = [step_content(run_loader(run)[1], step).samples for step in range(1, 13)]
    ends = [2 * STEP_TOKENS * step for step in range(1, 7)]
    lines = [{"step": step, "attempt": 1, "tokens": tokens} for step, tokens in enumerate(ends, 1)]
    lines += [{"step": step, "attempt": 2, "tokens": (4 + step) * STEP_TOKENS} for step in range(5, 8)]

    def found(step: int, kept: Callable[[int], bool] = lambda step: True) -> StepContent:
        text = "".join(json.dumps(one) + "\n" for one in lines if kept(one["step"]))
        (run / "metrics.jsonl").write_text(text)
        return step_content(run_loader(run)[1], step, recorded_tokens(run))

    for step in range(1, 5):
        assert found(step).samples == plain[2 * step - 2] + plain[2 * step - 1]
        assert (found(step).first_token, found(step).num_tokens) == ((2 * step - 2) * STEP_TOKENS, 2 * STEP_TOKENS)
    for step in range(5, 9):
        assert found(step).samples == plain[step + 3]
        assert found(step, lambda one: one >= 4).samples == plain[step + 3], "records of every step need not be there"
    with pytest.raises(UserError, match=r"step 2: .* no step between 0 and 4 .*; use step 5 or a later one"):
        found(2, lambda one: one >= 4)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    return parser.parse_args(["samples", *words])


def test_the_command_prints_json_or_a_table(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = make_run("data.packing=whole")
    args = arguments(str(run), "--step", "5", "--json")
    assert args.run_data(args) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["step"], content["first_token"], content["sequence_length"]) == (5, 4 * STEP_TOKENS, 64)
    assert len(content["samples"]) == 4
    args = arguments(str(run), "--step", "5")
    assert args.run_data(args) == 0
    printed = capsys.readouterr().out
    assert "step 5: tokens 1,024 to 1,280 of the run, 4 sequences of 64 tokens" in printed
    for sample in content["samples"]:
        for one in sample["documents"]:
            assert f"{one['document']}" in printed
            assert f"{one['start']} to {one['stop']}" in printed


def test_mistakes(make_run: MakeRun, write_store: WriteStore, tmp_path: Path) -> None:
    run, config = make_run()
    for step in ("0", str(NUM_STEPS + 1)):
        args = arguments(str(run), "--step", step)
        with pytest.raises(UserError, match=f"--step {step}: .* has steps 1 to {NUM_STEPS}"):
            args.run_data(args)
    with pytest.raises(UserError, match=r"no run .*other"):
        run_loader(tmp_path / "other")
    checkpoint = run / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    manifest = checkpoint / "MANIFEST.json"
    manifest.write_text(json.dumps({"store": TokenStore(config.data.store).fingerprint()}))
    run_loader(run)
    manifest.write_text(json.dumps({"store": "another"}))
    with pytest.raises(UserError, match=r"not the training data of .* checkpoints have another"):
        run_loader(run)

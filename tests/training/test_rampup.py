"""Real runs whose batch grows: resumed, branched off, rolled back, and on other layouts."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lightscale.data_pipeline.loading.samples import SKIP_EVENT, run_loader, step_content
from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics
from lightscale.training.health.guard import Guard

commands = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "rank_commands.py"))["commands"]

pytestmark = pytest.mark.timeout(400)

RunRanks = Callable[..., list[Any]]
StepsOf = Callable[[list[dict[str, Any]]], dict[int, tuple[Any, ...]]]
RAMP = "train.rampup_batch_size=[{global_batch_size=2,until_tokens=384},{global_batch_size=6,until_tokens=1000}]"
SIZES = [2, 2, 2, 6, 6, 8, 8, 8]
TOKENS = [64 * sum(SIZES[: step + 1]) for step in range(8)]
WORDS = (
    "run.toml",
    RAMP,
    "train.global_batch_size=8",
    "train.validate_every=0",
    "checkpoint.asynchronous=false",
    "checkpoint.every=2",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=2",
    "metrics.parameter_norms_every=0",
)


def train(run: str, *words: str) -> list[str]:
    return ["train", *WORDS, *words, "--run", f"runs/{run}"]


def check_all(results: list[tuple[int, str]]) -> None:
    assert [code for code, _ in results] == [0] * len(results), results


def test_a_resumed_run_and_a_branch_are_those_of_a_whole_one(
    workplace: Path, run_ranks: RunRanks, steps_of: StepsOf
) -> None:
    """Stopped and branched off within the stage of the second batch."""
    lines = [
        train("ramp", "train.steps=8", "checkpoint.keep_every=2"),
        *(train("ramp-resumed", f"train.steps={steps}") for steps in (4, 8)),
        ["train", "runs/ramp", "--anneal", "2", "--step", "4"],
    ]
    (results,) = run_ranks(commands, 1, str(workplace), lines)
    check_all(results)
    assert "batches grow until 1,000 tokens: 2 → 6 → 8 sequences per step" in results[0][1]
    whole = read_metrics(workplace / "runs/ramp/metrics.jsonl")
    assert [line["tokens"] for line in whole] == TOKENS
    assert [line["global_batch_size"] for line in whole] == SIZES
    assert steps_of(read_metrics(workplace / "runs/ramp-resumed/metrics.jsonl")) == steps_of(whole)
    branch = read_metrics(workplace / "runs/ramp-anneal-4-2/metrics.jsonl")
    assert [line["tokens"] for line in branch] == TOKENS[4:6]
    # Only the update of its first step has another learning rate.
    assert [branch[0][key] for key in ("loss", "grad_norm")] == [whole[4][key] for key in ("loss", "grad_norm")]


def with_bad_steps(rank: int, world_size: int, init_method: str, folder: str, lines: list[list[str]]) -> list[Any]:
    """The third and fourth steps that are judged are bad."""
    judged: list[float] = []

    def reason(self: Guard, loss: float, grad_norm: float) -> str | None:
        judged.append(loss)
        return "made up" if len(judged) in (3, 4) else None

    with mock.patch.object(Guard, "_reason", reason):
        result: list[Any] = commands(rank, world_size, init_method, folder, lines)
    return result


def test_a_rollback_goes_back_over_a_change_of_the_batch(
    workplace: Path, run_ranks: RunRanks, steps_of: StepsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From step 4, with 6 sequences, to step 2, with 2: steps keep their sizes and read the data behind.

    The sequences of 32 tokens end after 1152. Behind the skip step 4 would begin at 896, and reach beyond: it begins
    with the longer ones.
    """
    words = ("guard.max_skips=2", "data.curriculum=[{sequence_length=32,until_tokens=1100}]")
    (first,) = run_ranks(with_bad_steps, 1, str(workplace), [train("ramp-back", *words, "train.steps=8")])
    stopped = [train("ramp-back-twice", *words, f"train.steps={steps}") for steps in (6, 8)]
    (results,) = run_ranks(with_bad_steps, 1, str(workplace), stopped)
    check_all([*first, *results])
    run = RunDirectory(workplace / "runs/ramp-back")
    (skip,) = [event for event in read_lines(run.events) if event["event"] == SKIP_EVENT]
    assert (skip["at_tokens"], skip["skip_tokens"]) == (TOKENS[1], TOKENS[3] - TOKENS[1])
    kept = read_metrics(run.metrics)
    assert [line["tokens"] for line in kept] == TOKENS
    assert steps_of(read_metrics(workplace / "runs/ramp-back-twice/metrics.jsonl")) == steps_of(kept)
    assert [line["sequence_length"] for line in kept] == [32] * 3 + [64] * 5
    monkeypatch.chdir(workplace)
    _, loader = run_loader(run.path)
    starts = [step_content(loader, step).samples[0].sample for step in range(1, 9)]
    assert starts == [0, 4, 24, 18, 24, 30, 38, 46]
    assert [len(step_content(loader, step).samples) for step in range(1, 9)] == [4, 4, 4, 6, 6, 8, 8, 8]


@pytest.mark.long
def test_other_layouts_train_the_same_and_the_guard_is_quiet(workplace: Path, run_ranks: RunRanks) -> None:
    """One process beside two data ranks, then two pipeline stages, then one process, with a curriculum."""
    first = "{global_batch_size=4,until_tokens=2000,increment=4}"
    words = (
        f"train.rampup_batch_size=[{first},{{global_batch_size=16,until_tokens=9000}}]",
        "train.global_batch_size=32",
        "data.curriculum=[{sequence_length=32,until_tokens=1500}]",
        "data.packing=whole",
        "guard.window=8",
        "checkpoint.every=5",
    )
    (results,) = run_ranks(commands, 1, str(workplace), [train("ramp-one", *words, "train.steps=20")])
    check_all(results)
    in_turn = [train("ramp-two", *words, "train.steps=4")]
    in_turn += [train("ramp-two", *words, "parallel.pipeline=2", "train.steps=12")]
    for results in run_ranks(commands, 2, str(workplace), in_turn):
        check_all(results)
    (results,) = run_ranks(commands, 1, str(workplace), [train("ramp-two", *words, "train.steps=20")])
    check_all(results)
    one, two = (RunDirectory(workplace / "runs" / name) for name in ("ramp-one", "ramp-two"))
    whole, other = read_metrics(one.metrics), read_metrics(two.metrics)
    sequences = [line["global_batch_size"] * line["sequence_length"] // 64 for line in whole]
    assert sequences == sorted(sequences) and set(sequences) == {4, 8, 12, 16, 32}
    for first, second in zip(whole, other, strict=True):
        assert first["tokens"] == second["tokens"]
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-4)
    assert not [event for event in read_lines(one.events) if event["event"] == "step_skipped"]

"""A masked language model: trained, resumed on the same and on other ranks, validated; what it is refused."""

import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lightscale
from lightscale.cli import main
from lightscale.errors import UserError
from lightscale.runs.run_directory import RunDirectory, read_metrics
from lightscale.training.checkpoints.directories import directory_name

commands = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "rank_commands.py"))["commands"]
RunRanks = Callable[..., list[Any]]
STEPS = 8
WORDS = [
    "run.toml",
    "model.mixer=llama",
    "model.mixer_options.llama.causal=false",
    "task.name=masked",
    "task.mlm_probability=0.3",
    "task.whole_word_mask=true",
    "model.num_layers=2",
    f"train.steps={STEPS}",
    f"train.validate_every={STEPS // 2}",
    f"checkpoint.every={STEPS // 2}",
    "optimizer.warmup_steps=1",
]


def half_and_resumed(
    rank: int, world_size: int, init_method: str, folder: str, whole: str, resumed: str
) -> list[tuple[int, str]]:
    """Of two runs, the second as a crash leaves it after its first checkpoint, and then resumed."""
    results = commands(rank, world_size, f"{init_method}-whole", folder, [["train", *WORDS, "--run", whole]])
    run = RunDirectory(resumed)
    shutil.copytree(whole, run.path)
    shutil.rmtree(run.checkpoints / directory_name(STEPS))
    run.status.unlink()
    return [
        *results,
        *commands(rank, world_size, f"{init_method}-again", folder, [["train", *WORDS, "--run", resumed]]),
    ]


@pytest.fixture(scope="module")
def trained(workplace: Path, run_ranks: RunRanks) -> tuple[RunDirectory, RunDirectory]:
    whole, resumed = RunDirectory(workplace / "runs/masked"), RunDirectory(workplace / "runs/masked-resumed")
    (results,) = run_ranks(half_and_resumed, 1, str(workplace), str(whole.path), str(resumed.path))
    assert [code for code, _ in results] == [0, 0], results
    return whole, resumed


def test_a_resumed_masked_run_is_bitwise_the_same(
    trained: tuple[RunDirectory, RunDirectory], steps_of: Callable[..., dict[int, tuple[Any, ...]]]
) -> None:
    lines, again = (read_metrics(run.metrics) for run in trained)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["attempt"] for line in again] == [1] * (STEPS // 2) + [2] * (STEPS // 2)
    assert steps_of(again) == steps_of(lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    for one, other in zip(lines, again, strict=True):
        assert one.get("validation") == other.get("validation")
    for found in lines[-1]["validation"].values():
        # Of 300 ids an untrained model gives each as much: 5.70 nats, and a 300th is right.
        assert found["loss"] < 5.45
        assert 0.03 < found["accuracy"] < 1


def on_four(rank: int, world_size: int, init_method: str, folder: str, run: str) -> list[tuple[int, str]]:
    axes = ["parallel.tensor=2", "parallel.sequence=2"]
    return commands(rank, world_size, init_method, folder, [["train", *WORDS, *axes, "--run", run]])


@pytest.mark.long
def test_a_masked_run_goes_on_with_other_ranks(
    workplace: Path, trained: tuple[RunDirectory, RunDirectory], run_ranks: RunRanks
) -> None:
    """The masks of the steps that are left are the same, and so is the validation."""
    run = RunDirectory(workplace / "runs/masked-on-four")
    shutil.copytree(trained[0].path, run.path)
    shutil.rmtree(run.checkpoints / directory_name(STEPS))
    run.status.unlink()
    for ((code, stderr),) in run_ranks(on_four, 4, str(workplace), str(run.path), timeout_s=200):
        assert code == 0, stderr
    lines, again = (read_metrics(one.metrics) for one in (trained[0], run))
    for one, other in zip(lines[STEPS // 2 :], again[STEPS // 2 :], strict=True):
        assert other["attempt"] == 2
        assert abs(one["loss"] - other["loss"]) < 2e-6
    for name, found in lines[-1]["validation"].items():
        assert again[-1]["validation"][name]["accuracy"] == found["accuracy"]


LINEAR = [
    "run.toml",
    'model.mixer=["lion-lit", "lightnet", "lion-s", "lion-retnet"]',
    "model.mixer_options.lightnet.causal=false",
    "model.num_layers=4",
    "task.name=masked",
    "task.mlm_probability=0.3",
    f"train.steps={STEPS}",
    f"train.validate_every={STEPS}",
    "optimizer.warmup_steps=1",
]


def linear_on_two(rank: int, world_size: int, init_method: str, folder: str, run: str) -> list[tuple[int, str]]:
    words = ["train", *LINEAR, "parallel.sequence=2", "train.recompute=full", "--run", run]
    return commands(rank, world_size, init_method, folder, [words])


@pytest.mark.long
def test_linear_mixers_learn_from_both_sides(workplace: Path, run_ranks: RunRanks) -> None:
    run = RunDirectory(workplace / "runs/masked-linear")
    for ((code, stderr),) in run_ranks(linear_on_two, 2, str(workplace), str(run.path)):
        assert code == 0, stderr
    lines = read_metrics(run.metrics)
    assert lines[-1]["loss"] < lines[0]["loss"]
    # Of 300 ids an untrained model gives each as much: 5.70 nats.
    assert max(found["loss"] for found in lines[-1]["validation"].values()) < 5.5


def without_masks(rank: int, world_size: int, init_method: str, folder: str, run: str) -> list[tuple[int, str]]:
    words = [
        "train",
        *WORDS,
        "task.mlm_probability=1e-9",
        "train.steps=2",
        "train.validate_every=2",
        "checkpoint.every=1",
    ]
    return commands(rank, world_size, init_method, folder, [[*words, "--run", run]])


def test_a_step_that_predicts_nothing_is_skipped(workplace: Path, run_ranks: RunRanks) -> None:
    """Its loss of 0 is none, and the optimizer does not move by what it remembers."""
    run = RunDirectory(workplace / "runs/masked-nothing")
    ((code, stderr),) = run_ranks(without_masks, 1, str(workplace), str(run.path))[0]
    assert code == 0, stderr
    lines = read_metrics(run.metrics)
    assert [line["skipped"] for line in lines] == ["its data has no label to predict"] * 2
    assert not any("validation" in line for line in lines)
    assert "validation set held: no label to predict" in stderr


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "runs/masked", "--prompt", "abc"],
        ["evaluate", "runs/masked", "--tasks", "masked-text.toml"],
    ],
    ids=["generate", "evaluate"],
)
def test_what_a_masked_model_cannot_do(
    workplace: Path,
    trained: tuple[RunDirectory, RunDirectory],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(workplace)
    task = 'kind = "perplexity"\npaths = ["words.jsonl"]\n'
    (workplace / "masked-text.toml").write_text(task, encoding="utf-8")
    before = sorted(workplace.iterdir())
    assert main(words) != 0
    message = capsys.readouterr().err
    assert 'runs/masked: its task.name = "masked": only models that predict the next token' in message
    assert "Traceback" not in message
    with pytest.raises(UserError, match="only models that predict the next token"):
        lightscale.load(trained[0].path).generate("abc")
    assert sorted(workplace.iterdir()) == before


def test_a_model_without_a_row_for_the_mask_is_refused(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    assert main(["train", *WORDS, "model.vocab_size=300", "--run", "runs/masked-full"]) == 78
    assert "model.vocab_size = 300 leaves no id for the mask" in capsys.readouterr().err
    assert not Path("runs/masked-full").exists()

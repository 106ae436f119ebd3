"""Pairs of documents matched by commands: prepared, learned, resumed on the same and on other ranks, predicted."""

import json
import random
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.cli import main
from lightscale.runs.run_directory import RunDirectory, read_metrics
from lightscale.training.checkpoints.directories import directory_name

commands = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "rank_commands.py"))["commands"]
RunRanks = Callable[..., list[Any]]
pytestmark = pytest.mark.long
STEPS, SAVED = 150, 140
TOPICS = ("abc", "def", "ghi", "jkl")
PREPARE = [
    *("data", "prepare", "matches.jsonl", "--name", "papers", "--tokenizer", "bytes", "--validation", "0.2"),
    *("--text-field", "one", "--text-pair-field", "two", "--label-field", "same", "--out", "matches"),
]
WORDS = [
    "run.toml",
    "model.mixer=lion-s",
    "model.mixer_options.lion-s.vector_decay=true",
    "model.vocab_size=264",
    "model.num_layers=2",
    "task.name=classify",
    "model.head={num_labels=2, pairs=true, bias=true}",
    "data.store=matches",
    "data.sources={papers=1.0}",
    "data.packing=whole",
    'data.validation={held={source="papers-validation", sequences=100}}',
    "train.global_batch_size=16",
    "train.micro_batch_size=8",
    f"train.steps={STEPS}",
    f"train.validate_every={STEPS}",
    f"checkpoint.every={SAVED}",
    "optimizer.lr=5e-3",
    "optimizer.warmup_steps=5",
    "optimizer.ema={slow=0.9}",
    "guard.max_loss_rise=none",
    "guard.max_grad_norm_ratio=none",
]


def write_matches(folder: Path) -> None:
    """Words of a drawn topic each; the label is whether two topics are the same, of which one text tells nothing."""
    generator = random.Random(0)
    with (folder / "matches.jsonl").open("w", encoding="utf-8") as file:
        for number in range(900):
            topic = generator.randrange(len(TOPICS))
            same = generator.random() < 0.5
            other = topic if same else (topic + generator.randrange(1, len(TOPICS))) % len(TOPICS)
            one, two = (
                " ".join("".join(generator.choices(TOPICS[kind], k=3)) for _ in range(generator.randint(2, 4)))
                for kind in (topic, other)
            )
            file.write(json.dumps({"id": number, "one": one, "two": two, "same": "yes" if same else "no"}) + "\n")


def train_and_resume(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    results = commands(rank, world_size, init_method, folder, [PREPARE, ["train", *WORDS, "--run", "runs/pairs"]])
    for name in ("runs/pairs-again", "runs/pairs-on-four"):
        run = RunDirectory(name)
        shutil.copytree("runs/pairs", run.path)
        shutil.rmtree(run.checkpoints / directory_name(STEPS))
        run.status.unlink()
    again = [["train", *WORDS, "--run", "runs/pairs-again"]]
    return [*results, *commands(rank, world_size, f"{init_method}-again", folder, again)]


def on_four(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    words = ["train", *WORDS, "parallel.sequence=2", "parallel.tensor=2", "--run", "runs/pairs-on-four"]
    return commands(rank, world_size, init_method, folder, [words])


@pytest.fixture(scope="module")
def trained(workplace: Path, run_ranks: RunRanks) -> RunDirectory:
    write_matches(workplace)
    (results,) = run_ranks(train_and_resume, 1, str(workplace), timeout_s=400)
    assert [code for code, _ in results] == [0, 0, 0], results
    return RunDirectory(workplace / "runs/pairs")


def test_whether_two_documents_share_a_topic_is_learned(trained: RunDirectory) -> None:
    found = read_metrics(trained.metrics)[-1]["validation"]["held"]
    assert found["accuracy"] > 0.9, found


def test_a_resumed_run_is_the_same_also_on_other_ranks(
    workplace: Path, trained: RunDirectory, run_ranks: RunRanks, steps_of: Callable[..., dict[int, tuple[Any, ...]]]
) -> None:
    lines, again = read_metrics(trained.metrics), read_metrics(workplace / "runs/pairs-again/metrics.jsonl")
    assert again[-1]["attempt"] == 2
    assert steps_of(again) == steps_of(lines)
    for ((code, stderr),) in run_ranks(on_four, 4, str(workplace), timeout_s=200):
        assert code == 0, stderr
    other = read_metrics(workplace / "runs/pairs-on-four/metrics.jsonl")
    for one, two in zip(lines[SAVED:], other[SAVED:], strict=True):
        assert two["attempt"] == 2
        assert abs(one["loss"] - two["loss"]) < 1e-4
    assert other[-1]["validation"]["held"]["accuracy"] == pytest.approx(
        lines[-1]["validation"]["held"]["accuracy"], abs=0.01
    )


def test_pairs_are_predicted_and_not_exported(
    workplace: Path, trained: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    records = [json.loads(line) for line in Path("matches.jsonl").read_text("utf-8").splitlines()][:60]
    Path("some.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    predict = ["predict", "runs/pairs", "--file", "some.jsonl", "--text-field", "one"]
    assert main([*predict, "--text-pair-field", "two", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["text"], one["text_pair"]) for one in found] == [(one["one"], one["two"]) for one in records]
    assert sum(one["class"] == two["same"] for one, two in zip(found, records, strict=True)) > 50
    assert main(predict) != 0
    assert 'no text in the field "text_pair"; it has' in capsys.readouterr().err
    assert main([*predict, "--embed", "mean", "--text-pair-field", "two"]) != 0
    assert "with --embed one vector per text; remove --text-pair-field" in capsys.readouterr().err
    assert main(["export", "runs/pairs", "--to", "exported"]) != 0
    assert "model.head.pairs = true cannot be loaded or exported; use false" in capsys.readouterr().err
    assert not Path("exported").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.packing=concat"], 'data.packing = "concat" cuts pairs of documents'),
        (["data.sequence_length=16"], "a pair of documents has"),
        (["model.head.pairs=false"], "model.head.pairs = false: source papers of matches holds pairs of documents"),
        (
            [
                "data.store=store",
                "model.vocab_size=320",
                "data.sources={}",
                "data.validation={}",
                "train.validate_every=0",
            ],
            "holds single documents, no pairs",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_run_begins(
    workplace: Path,
    trained: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(workplace)
    assert main(["train", *WORDS, *words, "--run", "runs/pairs-wrong"]) != 0
    assert message in capsys.readouterr().err
    assert not Path("runs/pairs-wrong").exists()


def test_a_plan_counts_the_hidden_layer(
    workplace: Path, trained: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    assert main(["plan", *WORDS, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["parameters"]["terms"]["label head"] == 64 * 4 * 64 + 64 + 2 * 64 + 2

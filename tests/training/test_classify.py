"""Documents classified by commands: from a masked run, resumed on the same and on other ranks; wrong labels."""

import json
import random
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.cli import main
from lightscale.data_pipeline.store.token_store import StoreWriter
from lightscale.data_pipeline.tokenizers import load_tokenizer
from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics
from lightscale.training.checkpoints.directories import directory_name

commands = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "rank_commands.py"))["commands"]
RunRanks = Callable[..., list[Any]]
STEPS, LABELS = 30, 3
SHAPE = ["run.toml", "model.mixer=llama", "model.mixer_options.llama.causal=false", "model.num_layers=2"]
MASKED = [*SHAPE, "task.name=masked", "train.steps=2", "train.validate_every=0", "optimizer.warmup_steps=0"]
WORDS = [
    *SHAPE,
    "task.name=classify",
    f"model.head.num_labels={LABELS}",
    "data.store=labelled",
    "data.packing=whole",
    'data.validation={held={source="held", sequences=16}}',
    "train.init_from=runs/to-classify@2",
    f"train.steps={STEPS}",
    f"train.validate_every={STEPS}",
    f"checkpoint.every={STEPS - 4}",
    "optimizer.lr=3e-3",
    "optimizer.warmup_steps=1",
]


def write_labelled(folder: Path) -> None:
    """A document's label is which letters its words have most of."""
    tokenizer, generator = load_tokenizer(folder / "store"), random.Random(0)
    with StoreWriter(folder / "labelled", tokenizer) as writer:
        for name, split, count in (("words", "train", 300), ("held", "validation", 60)):
            source = writer.source(
                name, "validation" if split == "validation" else "train", documents={"label": "int32"}
            )
            for _ in range(count):
                label = generator.randrange(LABELS)
                letters = ("abc", "def", "ghij")[label]
                words = ["".join(generator.choices(letters, k=4)) for _ in range(generator.randint(3, 8))]
                source.append(tokenizer.encode(" ".join(words)), num_bytes=0, documents={"label": label})
        writer.finish({})


def train_and_resume(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    lines = [["train", *MASKED, "--run", "runs/to-classify"], ["train", *WORDS, "--run", "runs/classify"]]
    results = commands(rank, world_size, init_method, folder, lines)
    for name in ("runs/classify-again", "runs/classify-on-four"):
        run = RunDirectory(name)
        shutil.copytree("runs/classify", run.path)
        shutil.rmtree(run.checkpoints / directory_name(STEPS))
        run.status.unlink()
    again = [["train", *WORDS, "--run", "runs/classify-again"]]
    return [*results, *commands(rank, world_size, f"{init_method}-again", folder, again)]


def on_four(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    words = ["train", *WORDS, "parallel.pipeline=2", "parallel.sequence=2", "--run", "runs/classify-on-four"]
    return commands(rank, world_size, init_method, folder, [words])


@pytest.fixture(scope="module")
def trained(workplace: Path, run_ranks: RunRanks) -> RunDirectory:
    write_labelled(workplace)
    (results,) = run_ranks(train_and_resume, 1, str(workplace), timeout_s=200)
    assert [code for code, _ in results] == [0, 0, 0], results
    return RunDirectory(workplace / "runs/classify")


def test_documents_are_classified_from_a_masked_run(trained: RunDirectory) -> None:
    lines = read_metrics(trained.metrics)
    found = lines[-1]["validation"]["held"]
    assert found["accuracy"] > 0.9, found
    assert found["loss"] < 0.5
    (event,) = [one for one in read_lines(trained.events) if one["event"] == "init_from"]
    drawn = [row["parameter"] for row in event["conversion"] if "from" not in row]
    assert drawn == ["output_layer.weight"], "all else is the masked model's"


def test_a_resumed_classifier_is_the_same_also_on_other_ranks(
    workplace: Path, trained: RunDirectory, run_ranks: RunRanks, steps_of: Callable[..., dict[int, tuple[Any, ...]]]
) -> None:
    lines, again = read_metrics(trained.metrics), read_metrics(workplace / "runs/classify-again/metrics.jsonl")
    assert again[-1]["attempt"] == 2
    assert steps_of(again) == steps_of(lines)
    for ((code, stderr),) in run_ranks(on_four, 4, str(workplace), timeout_s=200):
        assert code == 0, stderr
    other = read_metrics(workplace / "runs/classify-on-four/metrics.jsonl")
    for one, two in zip(lines[STEPS - 4 :], other[STEPS - 4 :], strict=True):
        assert two["attempt"] == 2
        assert abs(one["loss"] - two["loss"]) < 1e-5
    assert other[-1]["validation"]["held"]["accuracy"] == lines[-1]["validation"]["held"]["accuracy"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.head.num_labels=2"], "has the label 2, but model.head.num_labels = 2 allows 0 to 1"),
        (["task.label=topic"], 'task.label = "topic": labelled, source words has no such document array'),
        (["data.store=store", "data.validation={}", "train.validate_every=0"], "has no such document array"),
    ],
    ids=["too many labels", "another array", "no labels"],
)
def test_wrong_labels_are_refused_before_a_run_begins(
    workplace: Path,
    trained: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(workplace)
    assert main(["train", *WORDS, *words, "--run", "runs/classify-wrong"]) == 78
    assert message in capsys.readouterr().err
    assert not Path("runs/classify-wrong").exists()


def test_a_classifier_does_not_write(
    workplace: Path, trained: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    assert main(["generate", "runs/classify", "--prompt", "abc"]) != 0
    assert 'runs/classify: its task.name = "classify"' in capsys.readouterr().err
    capsys.readouterr()
    assert main(["plan", *WORDS, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["parameters"]["terms"]["label head"] == 64 * LABELS

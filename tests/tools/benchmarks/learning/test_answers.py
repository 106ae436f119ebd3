"""The benchmark of answers: right ones are right, held-out questions are new, and both ways begin at the base."""

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightscale.config.files import load
from lightscale.runs.run_directory import RunDirectory


@pytest.fixture(scope="module")
def talks(tools_path: Path) -> ModuleType:
    return importlib.import_module("benchmarks.learning.talks")


@pytest.fixture(scope="module")
def answers(tools_path: Path) -> ModuleType:
    return importlib.import_module("benchmarks.learning.answers")


def is_right(kind: str, question: str, answer: str) -> bool:
    if kind == "sum":
        a, b, found = map(int, re.fullmatch(r"(\d+) \+ (\d+) = (\d+)\.", answer).groups())  # type: ignore[union-attr]
        return f"{a} + {b}?" in question and a + b == found
    if kind == "list":
        word, price = re.fullmatch(r"(\w+) costs (\d+)\.", answer).groups()  # type: ignore[union-attr]
        return question.endswith(f"is {word.lower()}?") and f"{word.lower()} {price}" in question
    first, second = json.loads(answer)
    return f"{first} and {second} " in question


def test_held_out_questions_are_new_and_answers_are_right(talks: ModuleType) -> None:
    pytest.importorskip("tokenizers")
    learned, held = (
        [turn for turns in talks.talks(count, seed=seed, held_out=is_held) for turn in turns]
        for count, seed, is_held in ((2000, 1, False), (200, 2, True))
    )
    assert not {question for _, question, _ in learned} & {question for _, question, _ in held}
    assert all(is_right(*turn) for turn in (*learned, *held))
    assert {kind for kind, _, _ in held} == {kind for kind, _, _ in learned} == set(talks.KINDS)
    # Of every hundred questions about ten are held out, of each kind.
    for kind in talks.KINDS:
        questions = {question for one, question, _ in learned if one == kind} | {
            question for one, question, _ in held if one == kind
        }
        share = sum(map(talks.is_held_out, questions)) / len(questions)
        assert 0.02 < share < 0.3, kind


def test_both_ways_begin_at_the_base(
    answers: ModuleType, bench_in_process: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the training: what is asked of each run, and what is told of it."""
    pytest.importorskip("tokenizers")
    commands: dict[str, list[str]] = {}

    def done(*words: str) -> None:
        if words[0] == "train":
            run = Path(words[words.index("--run") + 1])
            overrides = [word for word in words[2:] if "=" in word]
            commands[run.name] = overrides
            run.parent.mkdir(exist_ok=True)
            RunDirectory(run).create(load(Path(words[1]), overrides))
        else:
            Path(words[words.index("--out") + 1]).mkdir(parents=True)

    def of_run(run: str, args: Any) -> dict[str, Any]:
        asked = dict.fromkeys(answers.KINDS, 4)
        return {"conversations": 5, "all_right": 3, "right": dict.fromkeys(answers.KINDS, 3), "asked": asked}

    monkeypatch.setattr(answers, "run_lightscale", done)
    monkeypatch.setattr(answers, "measured", of_run)
    words = ["answers", "--talks", "30", "--base-steps", "90", "--save", str(tmp_path), "--folder", str(tmp_path / "f")]
    assert bench_in_process.main(words) == 0
    words[2] = "40"
    assert bench_in_process.main(words) == 78, "the stores of 30 conversations"
    (path,) = tmp_path.glob("answers_*.json")
    figures = json.loads(path.read_text())
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert [one["model"] for one in figures["models"]] == ["base", "fine-tuned", "LoRA"]
    assert figures["models"][0]["parameters"] > 1_500_000, "a few million"
    assert all("train.init_from=runs/base@90" in commands[run] for run in ("fine-tuned", "lora"))
    assert "adapter.name=lora" in commands["lora"] and "adapter.name=lora" not in commands["fine-tuned"]
    config = load(tmp_path / "f/base.toml", commands["lora"])
    trained = sum(a * b for a, b in answers.trained_shapes(config).values())
    assert trained < 0.02 * figures["models"][0]["parameters"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_model_is_trained_and_asked(bench_in_process: ModuleType, tmp_path: Path) -> None:
    """The whole way with few steps, which teach nothing."""
    pytest.importorskip("tokenizers")
    words = [f"{key}={value}" for key, value in (("--talks", 1000), ("--held-out", 2), ("--base-steps", 2))]
    words += ["--steps=2", "--lora-steps=2", f"--save={tmp_path}", f"--folder={tmp_path / 'f'}"]
    assert bench_in_process.main(["answers", *words]) == 0
    (path,) = tmp_path.glob("answers_*.json")
    models = json.loads(path.read_text())["models"]
    assert [one["model"] for one in models] == ["base", "fine-tuned", "LoRA"]
    for one in models:
        assert one["conversations"] == 2 and 2 <= sum(one["asked"].values()) <= 6
        assert sum(one["right"].values()) == 0
    assert models[2]["trained"] < 0.02 * models[2]["parameters"]

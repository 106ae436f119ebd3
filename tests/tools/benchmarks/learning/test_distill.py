"""The benchmark of distillation: both ways get the same tokens, and their distance from the teacher is what is said."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightscale.config.files import load


@pytest.fixture(scope="module")
def distill(tools_path: Path) -> ModuleType:
    return importlib.import_module("benchmarks.learning.distill")


@pytest.mark.parametrize(
    ("has_teacher", "tokenizer", "batches"), [(False, "sentencepiece", ("4", "16")), (True, "ascii", ("2", "8"))]
)
def test_both_ways_get_the_same_tokens(
    distill: ModuleType,
    bench_in_process: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_teacher: bool,
    tokenizer: str,
    batches: tuple[str, str],
) -> None:
    """Without the training: each run leaves the losses that its name asks for."""
    commands: dict[str, dict[str, str]] = {}
    losses = {"teacher": 2.5, "conversion": 2.8, "distillation": 2.6}

    def trained(*words: str) -> None:
        run = Path(words[words.index("--run") + 1])
        overrides = [word for word in words[2:] if "=" in word]
        load(Path(words[1]), overrides)
        commands[run.name] = dict(word.split("=", 1) for word in overrides)
        leave(run, losses[run.name.partition("-")[0]], int(commands[run.name]["train.steps"]))

    def leave(run: Path, loss: float, step: int) -> None:
        run.mkdir()
        lines: list[dict[str, Any]] = [
            {"step": step - 1, "attempt": 1, "tokens": 2048 * (step - 1), "loss": 4.0},
            {"step": step, "attempt": 1, "tokens": 2048 * step, "loss": 4.0, "validation": {"stdlib": {"loss": loss}}},
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(distill, "run_lightscale", trained)
    words = ["distill", "--store", str(tmp_path), "--steps", "40", "--shares", "0.05", "0.2", "--save", str(tmp_path)]
    words += ["--tokenizer", tokenizer]
    if has_teacher:
        leave(tmp_path / "earlier", losses["teacher"], 400)
        words += ["--teacher", f"{tmp_path}/earlier@400"]
    assert bench_in_process.main([*words, "--source-steps", "400"]) == 0
    (path,) = tmp_path.glob("distill_*.json")
    figures: dict[str, Any] = json.loads(path.read_text())
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert figures["teacher"] == {"tokens": 400 * 2048, "loss": 2.5}
    # 40 steps of 4 and 16 sequences of 256 tokens, or of 2 and 8 of 512: 5 and 20 per cent of the teacher's.
    found = [(one["way"], one["tokens"], round(one["behind"], 6)) for one in figures["runs"]]
    expected = [("conversion", 0.3), ("distillation", 0.1)]
    assert found == [(way, tokens, behind) for tokens in (40960, 163840) for way, behind in expected]
    assert ("teacher" in commands) != has_teacher
    teacher = f"{tmp_path}/earlier@400" if has_teacher else "teacher@400"
    for number, batch in enumerate(batches):
        alone, first, second = (
            commands[name]
            for name in (f"conversion-{number}", f"distillation-{number}-layers", f"distillation-{number}")
        )
        assert {one["train.global_batch_size"] for one in (alone, first, second)} == {batch}
        assert (alone["train.steps"], first["train.steps"], second["train.steps"]) == ("40", "20", "20")
        assert alone["train.init_from"].endswith(teacher) and first["train.init_from"].endswith(teacher)
        assert second["train.init_from"].endswith(f"distillation-{number}-layers@20")
        assert (first["task.stage"], second["task.name"], "task.name" in alone) == ("layers", "distill", False)

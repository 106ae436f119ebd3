"""The newest lines of a metrics.jsonl: the same as by reading all of it, and little of it is read."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from lightscale.runs.metrics_tail import NUM_STEPS, MetricsTail
from lightscale.runs.run_directory import LineWriter, read_lines, read_metrics


def lines_of(generator: random.Random, num_lines: int) -> list[dict[str, Any]]:
    """Steps with validations, saves, and now and then a return to an earlier step as another attempt."""
    lines: list[dict[str, Any]] = []
    step, attempt = 0, 1
    while len(lines) < num_lines:
        if generator.random() < 0.02 and step > 3:
            step, attempt = step - generator.randrange(1, min(step, 40)), attempt + 1
        step += 1
        base = {"step": step, "attempt": attempt, "tokens": step}
        lines.append({**base, "loss": generator.random(), "step_s": 1.0, "text": "x" * generator.randrange(300)})
        if step % 7 == 0:
            lines.append({**base, "validation": {"set": {"loss": generator.random()}}})
        if generator.random() < 0.1:
            lines.append({**base, "checkpoint_stall_s": 0.1})
    return lines


def expected(path: Path) -> tuple[list[tuple[int, float]], Any]:
    """By reading the whole file, without the steps after the newest, to which the run has not come again."""
    newest = next((line["step"] for line in reversed(read_lines(path)) if "step_s" in line), 0)
    whole = [line for line in read_metrics(path) if line["step"] <= newest]
    steps = [(line["step"], line["loss"]) for line in whole if "step_s" in line]
    validations = [line["validation"] for line in whole if "validation" in line]
    return steps[-NUM_STEPS:], validations[-1] if validations else None


def found(tail: MetricsTail) -> tuple[list[tuple[int, float]], Any]:
    steps = [(line["step"], line["loss"]) for line in tail.steps]
    return steps, tail.validation["validation"] if tail.validation else None


@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_end_of_the_whole_file(tmp_path: Path, seed: int) -> None:
    """However the file grows, also in the middle of a line."""
    generator, path = random.Random(seed), tmp_path / "metrics.jsonl"
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines_of(generator, 900))
    tail, written = MetricsTail(path), 0
    tail.refresh(has_validation=True)
    assert found(tail) == ([], None), "there is no file yet"
    while written < len(data):
        step = generator.choice((1, 60, 700, 30_000))
        path.write_bytes(data[: written + step])
        written += step
        tail.refresh(has_validation=True)
        newest = MetricsTail(path)
        newest.refresh(has_validation=True)
        steps, validation = expected(path)
        assert found(newest) == (steps, validation)
        assert found(tail) == (steps, validation)


def test_only_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    line = {"attempt": 1, "tokens": 1, "loss": 1.0, "step_s": 1.0, "text": "x" * 200}
    first = {"step": 1, "attempt": 1, "tokens": 1, "validation": {"set": {"loss": 9.0}}}
    path.write_text(
        "\n".join(json.dumps(one) for one in (first, *({"step": s, **line} for s in range(1, 20_001)))) + "\n"
    )
    parsed: list[int] = []
    original = MetricsTail._parse
    monkeypatch.setattr(MetricsTail, "_parse", lambda self, text: (parsed.append(len(text)), original(self, text))[1])
    tail = MetricsTail(path)
    tail.refresh(has_validation=False)
    assert (len(parsed), tail.steps[-1]["step"], tail.validation) == (NUM_STEPS, 20_000, None)
    with LineWriter(path) as writer:
        writer.write({"step": 20_001, **line})
    tail.refresh(has_validation=False)
    assert (len(parsed), tail.steps[-1]["step"], len(tail.steps)) == (NUM_STEPS + 1, 20_001, NUM_STEPS)
    # A validation is looked for as far back as it must, without parsing what is in between.
    parsed.clear()
    tail = MetricsTail(path)
    tail.refresh(has_validation=True)
    assert tail.validation is not None and tail.validation["validation"]["set"]["loss"] == 9.0
    assert len(parsed) == NUM_STEPS + 1


def test_the_smoothed_loss_is_of_steps_that_count(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.smoothed_loss() is None
    with LineWriter(path) as writer:
        for step, more in enumerate(
            ({"loss": 4.0}, {"loss": 99.0, "skipped": "a spike"}, {"loss": None}, {"loss": 2.0})
        ):
            writer.write({"step": step + 1, "attempt": 1, "tokens": 1, "step_s": 1.0, **more})
    tail.refresh(has_validation=False)
    assert tail.smoothed_loss() == 3.0
    path.write_text('{"step": 5, "attempt": 1, "loss": 7.0, "step_s": 1}\n{"step"\n\n[1]\n\0\n')
    tail.refresh(has_validation=False)
    assert tail.smoothed_loss() == 7.0, "damaged lines are passed over"
    with path.open("a") as file:
        file.write('\0\n{"step": 6, "attempt": 1, "loss": 1.0, "step_s": 1}\n')
    tail.refresh(has_validation=False)
    assert tail.smoothed_loss() == 4.0

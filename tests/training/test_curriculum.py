"""Real runs whose sequences grow, with documents kept whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.runs.run_directory import RunDirectory, read_metrics

pytestmark = pytest.mark.timeout(400)

# Steps of 4 × 64 tokens: 3 of 16 × 16, 3 of 8 × 32, then of 4 × 64.
WORDS = (
    "data.curriculum=[{sequence_length=16, until_tokens=700}, {sequence_length=32, until_tokens=1500}]",
    "data.packing=whole",
    "train.steps=8",
    "train.validate_every=0",
    "optimizer.schedule=constant",
)


def test_a_run_whose_sequences_grow_is_the_same_on_other_layouts_and_resumed(
    workplace: Path, train: Callable[..., Any]
) -> None:
    """One process, and two that split the sequence, stopped in the second stage and resumed by two pipeline stages.

    The one process computes token by token (train.kernels), the others in chunks.
    """
    one, two = RunDirectory(workplace / "runs/growing"), RunDirectory(workplace / "runs/growing-on-two")
    ended = train("run.toml", *WORDS, "train.kernels=reference", "--run", str(one.path))
    assert ended.code == 0, ended.stderr
    assert "kernels: lightning reference" in ended.stderr
    assert "sequences of 16 tokens until 768 tokens: 16 a step, 8 a micro-batch" in ended.stderr
    for axis, steps in (("sequence", 5), ("pipeline", 8)):
        words = [*WORDS, f"train.steps={steps}", f"parallel.{axis}=2"]
        ended = train("run.toml", *words, "--run", str(two.path), "--processes", "2")
        assert ended.code == 0, ended.stderr
    whole, split = read_metrics(one.metrics), read_metrics(two.metrics)
    for lines in (whole, split):
        assert [line["sequence_length"] for line in lines] == [16] * 3 + [32] * 3 + [64] * 2
        assert [line["tokens"] for line in lines] == [step * 256 for step in range(1, 9)]
    assert (one.path / "packing").is_dir()
    for first, second in zip(whole, split, strict=True):
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
        assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-4)

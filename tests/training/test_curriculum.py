"""Real runs whose sequences grow, with documents kept whole."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.runs.run_directory import RunDirectory, read_metrics

commands = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "rank_commands.py"))["commands"]

pytestmark = pytest.mark.timeout(400)

# Steps of 4 × 64 tokens: 3 of 16 × 16, 3 of 8 × 32, then of 4 × 64.
WORDS = (
    "data.curriculum=[{sequence_length=16, until_tokens=700}, {sequence_length=32, until_tokens=1500}]",
    "data.packing=whole",
    "train.steps=8",
    "train.validate_every=0",
    "optimizer.schedule=constant",
)


@pytest.mark.long
def test_a_run_whose_sequences_grow_is_the_same_on_other_layouts_and_resumed(
    workplace: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    """One process, and two that split the sequence, stopped in the second stage and resumed by two pipeline stages.

    The one process computes token by token (train.kernels), the others in chunks.
    """
    one, two = RunDirectory(workplace / "runs/growing"), RunDirectory(workplace / "runs/growing-on-two")
    words = ["train", "run.toml", *WORDS]
    alone = [*words, "train.kernels=reference", "--run", str(one.path)]
    (((code, text),),) = run_ranks(commands, 1, str(workplace), [alone])
    assert code == 0, text
    assert "kernels: lightning reference" in text
    assert "sequences of 16 tokens until 768 tokens: 16 per step, 8 per micro-batch" in text
    in_turn = [
        [*words, f"train.steps={steps}", f"parallel.{axis}=2", "--run", str(two.path)]
        for axis, steps in (("sequence", 5), ("pipeline", 8))
    ]
    for results in run_ranks(commands, 2, str(workplace), in_turn):
        assert [code for code, _ in results] == [0, 0], results
    whole, split = read_metrics(one.metrics), read_metrics(two.metrics)
    for lines in (whole, split):
        assert [line["sequence_length"] for line in lines] == [16] * 3 + [32] * 3 + [64] * 2
        assert [line["tokens"] for line in lines] == [step * 256 for step in range(1, 9)]
    assert (one.path / "packing").is_dir()
    for first, second in zip(whole, split, strict=True):
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
        assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-4)

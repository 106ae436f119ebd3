"""Checkpoints of stages that drew the copies of a tied embedding apart are refused, by what the manifest says."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.runs.run_directory import RunDirectory
from lightscale.training.checkpoints.directories import directory_name
from lightscale.training.checkpoints.manifest import NAME, read_manifest, write_manifest

commands = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "rank_commands.py"))["commands"]

pytestmark = pytest.mark.timeout(400)

RunRanks = Callable[..., list[Any]]
SETTINGS = ["parallel.pipeline=2", "train.validate_every=0", "optimizer.warmup_steps=0", "checkpoint.every=2"]


def age(run: RunDirectory, step: int) -> None:
    """Have the checkpoint written before copies were drawn alike."""
    path = run.checkpoints / directory_name(step)
    manifest = read_manifest(path)
    facts = dict(manifest.facts)
    assert facts.pop("stage_copies") == "equal"
    (path / NAME).unlink()
    write_manifest(path, manifest.files, facts)


@pytest.mark.long
def test_what_was_trained_as_two_models_is_not_resumed(workplace: Path, run_ranks: RunRanks) -> None:
    runs = {std: RunDirectory(workplace / "runs" / f"tied-{std}") for std in ("0.5", "0.02")}

    def train(steps: int, std: str, *more: str) -> list[str]:
        return [
            "train",
            "run.toml",
            *SETTINGS,
            f"train.steps={steps}",
            f"model.embedding_std={std}",
            "--run",
            str(runs[std].path),
            *more,
        ]

    allow = ("--allow-change", "train.steps")
    begun = run_ranks(commands, 2, str(workplace), [train(2, std) for std in runs], timeout_s=200)
    assert [[code for code, _ in rank] for rank in begun] == [[0, 0]] * 2, begun
    for run in runs.values():
        age(run, 2)
    lines = [
        train(4, "0.5", *allow),
        # The same deviation as that of other weights: the copies were equal.
        train(4, "0.02", *allow),
        train(4, "0.5", *allow, "--allow-change", "model.embedding_std"),
        # What is written now says that it is of one model.
        train(6, "0.5", *allow),
    ]
    resumed = run_ranks(commands, 2, str(workplace), lines, timeout_s=200)
    assert [[code for code, _ in rank] for rank in resumed] == [[78, 0, 0, 0]] * 2, resumed
    text = resumed[0][0][1]
    assert "Traceback" not in text
    assert re.search(
        r"step-00000002 is inconsistent: the copies of the tied embedding \(embedding\.word_embeddings\.weight\) "
        r"on stage 0 and stage 1 differ\. .*Start a new run.*--allow-change model\.embedding_std",
        text,
    )

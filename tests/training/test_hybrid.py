"""A hybrid, seven layers of TNL and one of LLaMA: trained, resumed and generated with by the commands."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightscale.runs.run_directory import RunDirectory, read_metrics
from lightscale.training.checkpoints.directories import directory_name, list_steps

STEPS = 8
WORDS = [
    "run.toml",
    'model.mixer=["tnl*7", "llama"]',
    "model.num_layers=8",
    f"train.steps={STEPS}",
    f"train.validate_every={STEPS}",
    f"checkpoint.every={STEPS // 2}",
    "optimizer.warmup_steps=1",
]


def generate(workplace: Path, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "lightscale", "generate", *words, "--json"],
        cwd=workplace,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_hybrid_trains_resumes_and_generates(
    workplace: Path, train: Callable[..., Any], steps_of: Callable[..., dict[int, tuple[Any, ...]]]
) -> None:
    whole, resumed = RunDirectory(workplace / "runs/hybrid"), RunDirectory(workplace / "runs/hybrid-resumed")
    ended = train(*WORDS, "--run", str(whole.path))
    assert ended.code == 0, ended.stderr
    lines = read_metrics(whole.metrics)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["loss"] < lines[0]["loss"]

    # The same run as a crash leaves it behind its last checkpoint, before it is told how the run ended.
    shutil.copytree(whole.path, resumed.path)
    shutil.rmtree(resumed.checkpoints / directory_name(STEPS))
    resumed.status.unlink()
    ended = train(*WORDS, "--run", str(resumed.path))
    assert ended.code == 0, ended.stderr
    assert list_steps(resumed.checkpoints) == [STEPS // 2, STEPS]
    again = read_metrics(resumed.metrics)
    assert [line["attempt"] for line in again] == [1] * (STEPS // 2) + [2] * (STEPS // 2)
    assert steps_of(again) == steps_of(lines)

    written = generate(workplace, str(resumed.path), "--prompt", "abc", "--tokens", "30")
    assert written["step"] == STEPS
    assert len(written["tokens"]) > 0

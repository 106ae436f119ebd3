"""A hybrid, seven layers of TNL and one of LLaMA: trained, resumed and generated with by the commands."""

import contextlib
import io
import json
import os
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightscale.cli import main
from lightscale.runs.run_directory import RunDirectory, read_metrics
from lightscale.training.checkpoints.directories import directory_name, list_steps

commands = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "rank_commands.py"))["commands"]

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


def train_resume_generate(
    rank: int, world_size: int, init_method: str, folder: str, whole: str, resumed: str
) -> tuple[list[tuple[int, str]], str]:
    """Exit codes and stderr of two runs, the second resumed in the middle, and what ``lightscale generate`` prints."""
    results = commands(rank, world_size, f"{init_method}-whole", folder, [["train", *WORDS, "--run", whole]])
    # The same run as a crash leaves it after its first checkpoint, before it records how the run ended.
    run = RunDirectory(resumed)
    shutil.copytree(whole, run.path)
    shutil.rmtree(run.checkpoints / directory_name(STEPS))
    run.status.unlink()
    results += commands(rank, world_size, f"{init_method}-resumed", folder, [["train", *WORDS, "--run", resumed]])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["generate", resumed, "--prompt", "abc", "--tokens", "30", "--json"]) == 0
    return results, printed.getvalue()


def test_a_hybrid_trains_resumes_and_generates(
    workplace: Path, run_ranks: Callable[..., list[Any]], steps_of: Callable[..., dict[int, tuple[Any, ...]]]
) -> None:
    whole, resumed = RunDirectory(workplace / "runs/hybrid"), RunDirectory(workplace / "runs/hybrid-resumed")
    ((results, printed),) = run_ranks(train_resume_generate, 1, str(workplace), str(whole.path), str(resumed.path))
    assert [code for code, _ in results] == [0, 0], results
    lines = read_metrics(whole.metrics)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert list_steps(resumed.checkpoints) == [STEPS // 2, STEPS]
    again = read_metrics(resumed.metrics)
    assert [line["attempt"] for line in again] == [1] * (STEPS // 2) + [2] * (STEPS // 2)
    assert steps_of(again) == steps_of(lines)

    written = json.loads(printed)
    assert written["step"] == STEPS
    assert len(written["tokens"]) > 0

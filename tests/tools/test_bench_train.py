"""``tools/bench.py train``: what it measures is a whole training step."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightscale.config_files import load
from lightscale.models.flops import training_flops_per_token

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ["configs/tnl-tiny.toml", "--lengths", "64", "256", "--tokens-per-step", "512", "--micro-batch-tokens", "256"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "bench.py"), "train", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=110, check=False)


def test_figures_of_every_length() -> None:
    finished = bench(*SHAPE, "--repeats", "2", "--json")
    assert finished.returncode == 0, finished.stderr
    figures: dict[str, Any] = json.loads(finished.stdout)
    assert figures["settings"] == {"config": "configs/tnl-tiny.toml", "tokens_per_step": 512}
    assert figures["lengths"].keys() == {"64", "256"}
    for length, micro in ((64, 4), (256, 1)):
        found = figures["lengths"][str(length)]
        model = load(ROOT / "configs" / "tnl-tiny.toml", [f"data.sequence_length={length}"]).model
        assert found["micro_batch_size"] == micro
        assert found["flops_per_token"] == training_flops_per_token(model, length)
        assert found["tokens_per_s"] == pytest.approx(512 / found["step_s"])
        assert len(found["samples_s"]) == 2
        assert found["peak_memory_bytes"] > 50 << 20
        assert found["mfu"] is None  # the peak of a CPU is not known
    assert figures["lengths"]["64"]["ratio"] == 1.0


def test_a_length_that_does_not_divide_is_refused() -> None:
    finished = bench("configs/tnl-tiny.toml", "--lengths", "96", "--tokens-per-step", "512")
    assert finished.returncode != 0
    assert "--tokens-per-step 512 is not divisible by the length 96" in finished.stderr

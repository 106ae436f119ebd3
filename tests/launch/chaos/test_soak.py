"""A run that fails at random for minutes on end: the same weights at its end, and hardly more time than must be."""

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightscale.launch.chaos.harness.training import Training
from lightscale.planning.failures import Regime, expected_shares
from lightscale.runs.goodput import run_goodput
from lightscale.runs.run_directory import RunDirectory, read_lines
from lightscale.training.checkpoints.directories import directory_name
from lightscale.training.checkpoints.manifest import read_manifest

ROOT = Path(__file__).resolve().parents[3]

STEPS = 2_500
MTBF_S = 20.0
EVERY = 50
CONFIG = f"""
extends = ["{ROOT}/configs/arch/tnl.toml", "{ROOT}/configs/size/tiny.toml"]

[model]
vocab_size = 64
num_layers = 2
hidden_size = 32

[data]
store = "store"
sequence_length = 32

[optimizer]
lr = 1e-3

[train]
steps = {STEPS}
global_batch_size = 4
micro_batch_size = 2

[parallel]
sequence = 2

[checkpoint]
every = {EVERY}

[restart]
max_cycles = 5

[metrics]
sinks = ["jsonl"]
"""


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_run_that_fails_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_store: Callable[..., None]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_store(tmp_path / "store", 64, text=np.random.default_rng(0).integers(1, 64, 200_000))
    (tmp_path / "soak.toml").write_text(CONFIG, encoding="utf-8")

    def training(name: str) -> Training:
        command = [sys.executable, "-m", "lightscale", "train", "soak.toml", "--run", name, "--processes", "2"]
        return Training(command, RunDirectory(tmp_path / name), faults_folder=tmp_path / "none", log=tmp_path / "log")

    peaceful, disturbed = training("peaceful"), training("disturbed")
    run_to_the_end(peaceful)
    kills = run_to_the_end(disturbed, random.Random(0))

    last = directory_name(STEPS)
    ours, theirs = (read_manifest(one.run.checkpoints / last).files for one in (disturbed, peaceful))
    assert ours == theirs, "weights, moments and random states, bit by bit"
    goodput, before = run_goodput(disturbed.run), run_goodput(peaceful.run)
    assert goodput is not None and before is not None and goodput.mean_restart_s is not None
    saves = [event for event in read_lines(disturbed.run.events) if event["event"] == "checkpoint"]
    step_s = goodput.effective_s / STEPS
    regime = Regime(
        failures_per_s=kills / goodput.wall_s,
        stall_s=goodput.checkpoint_stall_s / len(saves),
        save_s=max(event["write_s"] for event in saves),
        restart_s=goodput.mean_restart_s,
    )
    bound = expected_shares(regime, EVERY * step_s).progress
    print(f"{kills} kills in {goodput.wall_s:.0f} s; {goodput.sentence()}; expected {bound:.1%}")
    assert kills >= 3
    assert goodput.effective_time_ratio is not None
    assert goodput.effective_time_ratio > 0.95 * bound


def run_to_the_end(training: Training, generator: random.Random | None = None) -> int:
    """Start it whenever it has ended, until it is finished. Kill a rank, or everything, at times of ``generator``."""
    kills, next_s = 0, time.monotonic() + (generator.expovariate(1 / MTBF_S) if generator else 1e9)
    deadline = time.monotonic() + 1500
    try:
        while not training.is_finished:
            assert time.monotonic() < deadline, training.log.read_text(encoding="utf-8")[-2000:]
            if training.has_ended:
                training.start()
            if generator is not None and time.monotonic() > next_s:
                ranks = training.ranks()
                everything = generator.random() < 0.3
                chosen = (
                    list(ranks.values()) if everything else [ranks[r] for r in ranks if r == generator.randrange(2)]
                )
                training.kill(chosen, launcher=everything)
                kills += bool(chosen) or everything
                next_s = time.monotonic() + generator.expovariate(1 / MTBF_S)
            time.sleep(0.05)
    finally:
        training.end()
    return kills

"""Several GPUs of a node against one: whole training runs on every axis, by every exchange, and resumed on another
layout. `make gpu-check` runs these where there are at least two GPUs.

On them gradients are reduced and weights gathered beside the computation, which one GPU does not show.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lightscale.runs.run_directory import read_metrics

NUM_GPUS = torch.cuda.device_count()
WORLD = 1 << max(1, min(NUM_GPUS, 8).bit_length() - 1)
ON_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="one GPU at most: run `make gpu-check` on a node with several"),
]
STEPS, CUT = 6, 3
LAYOUTS = {
    "data": (),
    "sequence, gather": (f"parallel.sequence={WORLD}",),
    "sequence, ring": (f"parallel.sequence={WORLD}", "parallel.exchange=ring"),
    "sequence, two_level": (
        f"parallel.sequence={WORLD}",
        "parallel.exchange=two_level",
        f"parallel.ranks_per_node={WORLD // 2}",
    ),
    "tensor": ("parallel.tensor=2",),
    "pipeline": ("parallel.pipeline=2",),
}
SMALL = ("data.sequence_length=64", "model.num_layers=2")
# fp32, so that layouts may be told apart from faults.
LIMIT = 2e-4


def prepare(store: Path) -> Path:
    """A small store of real text."""
    command = ["data", "prepare", "--corpus", "stdlib", "--out", str(store), "--vocab-size", "4096"]
    subprocess.run([sys.executable, "-m", "lightscale", *command], check=True, env=environment())
    return store


def environment() -> dict[str, str]:
    """Of all commands; TF32 would hide what is looked for."""
    return {**os.environ, "PYTHONSAFEPATH": "1", "NVIDIA_TF32_OVERRIDE": "0"}


def losses(
    run: Path,
    store: Path,
    root: Path,
    *,
    config: str,
    processes: int,
    steps: int = STEPS,
    overrides: Sequence[str] = (),
) -> list[float]:
    """The losses of all steps that the run in ``run`` has done when it has done ``steps``."""
    command = [sys.executable, "-m", "lightscale", "train", str(root / "configs" / config), "--run", str(run)]
    command += [f"data.store={store}", f"train.steps={steps}", "train.precision=fp32", "train.global_batch_size=8"]
    command += ["train.micro_batch_size=1", "optimizer.schedule=constant", *overrides, "--processes", str(processes)]
    subprocess.run(command, check=True, env=environment())
    return [line["loss"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line]


def assert_equal(found: Sequence[float], expected: Sequence[float]) -> None:
    assert len(found) == len(expected)
    differences = [abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True)]
    assert max(differences) < LIMIT, differences


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("ranks") / "store")


class TestOnGPUs:
    pytestmark = ON_GPUS

    @pytest.mark.parametrize("mixer", ["tnl", "hgrn2", "lightnet", "llama"])
    @pytest.mark.timeout(1800)
    def test_layouts_equal_one_gpu(self, mixer: str, store: Path, tmp_path: Path, root: Path, small: bool) -> None:
        config, sizes = f"{mixer}-tiny.toml", SMALL if small else ()
        alone = losses(tmp_path / "alone", store, root, config=config, processes=1, overrides=sizes)
        for name, overrides in LAYOUTS.items():
            if mixer == "llama" and "parallel.exchange" in " ".join(overrides):
                continue  # it has no states
            run = tmp_path / name.replace(", ", "-")
            given = [*sizes, *overrides]
            assert_equal(losses(run, store, root, config=config, processes=WORLD, overrides=given), alone)

    @pytest.mark.timeout(900)
    def test_a_run_is_resumed_on_another_layout(self, store: Path, tmp_path: Path, root: Path, small: bool) -> None:
        sizes = SMALL if small else ()
        alone = losses(tmp_path / "alone", store, root, config="tnl-tiny.toml", processes=1, overrides=sizes)
        assert_equal(resumed(tmp_path / "moved", store, root, *sizes), alone)


def resumed(run: Path, store: Path, root: Path, *overrides: str) -> list[float]:
    """Begun along the sequence, continued along data."""
    save = [f"checkpoint.every={CUT}", *overrides]
    along = [*save, "parallel.sequence=2"]
    losses(run, store, root, config="tnl-tiny.toml", processes=2, steps=CUT, overrides=along)
    return losses(run, store, root, config="tnl-tiny.toml", processes=2, overrides=save)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_check_itself_works_on_cpus(tmp_path: Path, root: Path) -> None:
    """So that it is not first tried on a node with GPUs."""
    made, cpu = prepare(tmp_path / "store"), "train.device=cpu"
    alone = losses(tmp_path / "alone", made, root, config="tnl-tiny.toml", processes=1, overrides=[cpu])
    assert_equal(resumed(tmp_path / "moved", made, root, cpu), alone)
    with pytest.raises(AssertionError):
        assert_equal([1.001 * loss for loss in alone], alone)

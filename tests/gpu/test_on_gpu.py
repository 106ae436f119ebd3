"""What only a GPU can show: `make gpu-check` runs these; everywhere else they skip.

Operators have modules of their own. Here are whole models against fp64 on the CPU, bf16 training, and a checkpoint.
Each test runs in a process of its own, because a process is either on its CPU or on its GPU.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.config.mixers import MIXERS
from lightscale.config.model import ModelConfig
from lightscale.models.language_model import LanguageModel, transformer_config
from lightscale.parallel.engine import Engine
from lightscale.parallel.initialization import draw_weights, named_parameters
from lightscale.parallel.mesh import start_mesh
from lightscale.parallel.micro_batch import GivenMicroBatch
from lightscale.runs.run_directory import read_metrics
from lightscale.training.optimizer.adamw import AdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: run `make gpu-check` on a machine that has one"),
]
RunRanks = Callable[..., list[Any]]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.cpu().double() - expected).norm() / expected.norm())


# Layers, width, heads, inner width, ids, tokens of a row.
FULL, SMALL = (2, 256, 8, 384, 512, 512), (2, 64, 2, 96, 128, 64)


def loss_and_gradients(rank: int, world_size: int, init_method: str, mixer: str, on_gpu: bool, small: bool) -> Any:
    """One process, one batch; fp32 on the GPU, fp64 on the CPU."""
    layers, width, heads, inner, ids, n = SMALL if small else FULL
    model = ModelConfig(
        mixer=mixer,
        num_layers=layers,
        hidden_size=width,
        num_heads=heads,
        intermediate_size=inner,
        vocab_size=ids,
        norm="rmsnorm" if mixer == "llama" else "srmsnorm",
    )
    dtype = torch.float32 if on_gpu else torch.float64
    with start_mesh(rank=rank, world_size=world_size, init_method=init_method) as mesh:
        assert (mesh.device.type == "cuda") == on_gpu
        assert ("lightscale.parallel.cpu" in sys.modules) != on_gpu, "the redirection is for CPUs only"
        config = transformer_config(model, mesh, dtype)
        module = LanguageModel(config, model, vocab_size=ids, mesh=mesh)
        draw_weights(module, seed=0, tensor_rank=0, tensor_size=1)
        engine = Engine(module, config, mesh, optimizer=AdamW())
        tokens = torch.randint(0, ids, (2, n + 1), generator=torch.Generator().manual_seed(1))
        positions = torch.arange(n).repeat(2, 1)
        cut = 2 * n // 5
        positions[0, cut:] -= cut
        batch = GivenMicroBatch(
            tokens=tokens[:, :-1].to(mesh.device),
            labels=tokens[:, 1:].to(mesh.device),
            loss_mask=torch.ones(2, n, device=mesh.device),
            positions=positions.to(mesh.device),
        )
        loss = engine.forward_backward([batch]).mean
        names = {id(parameter): name for name, parameter in named_parameters(module)}
        return loss, {names[id(p)]: gradient.double().cpu() for _, p, gradient in engine.gradients()}


@pytest.mark.parametrize("mixer", sorted(MIXERS))
@pytest.mark.timeout(900)
def test_a_model_on_the_gpu_equals_the_cpu(run_ranks: RunRanks, mixer: str, small: bool) -> None:
    # Kernels are interpreted where this process was told so, which ranks are not told.
    asked = {name: os.environ[name] for name in ("TRITON_INTERPRET",) if name in os.environ}
    on_gpu = {"NVIDIA_TF32_OVERRIDE": "0", **asked}
    loss, gradients = run_ranks(loss_and_gradients, 1, mixer, True, small, env=on_gpu, timeout_s=600)[0]
    exact, expected = run_ranks(loss_and_gradients, 1, mixer, False, small, env={"CUDA_VISIBLE_DEVICES": ""})[0]
    assert abs(loss - exact) < 1e-5
    for name, gradient in expected.items():
        assert error(gradients[name], gradient) < 1e-3, name


@pytest.mark.timeout(1800)
def test_bf16_training_learns_saves_and_resumes(tmp_path: Path, root: Path, small: bool) -> None:
    """The quickstart's configuration for 60 steps in bf16, stopped midway by its own length, from one corpus."""
    sizes = ("model.num_layers=1", "data.sequence_length=64", "optimizer.warmup_steps=0") if small else ()
    total = 24 if small else 60
    lightscale = [sys.executable, "-m", "lightscale"]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    store, run = tmp_path / "store", tmp_path / "run"
    prepare = [
        "data",
        "prepare",
        "--corpus",
        "stdlib",
        "--out",
        str(store),
        "--vocab-size",
        "4096",
        "--validation",
        "0.02",
    ]
    subprocess.run([*lightscale, *prepare], check=True, env=environment)
    common = [
        f"data.store={store}",
        "optimizer.schedule=constant",
        f"checkpoint.every={total // 2}",
        "--processes",
        "1",
    ]
    for steps in (total // 2, total):
        train = ["train", str(root / "configs" / "quickstart.toml"), "--run", str(run), f"train.steps={steps}"]
        subprocess.run([*lightscale, *train, *sizes, *common], check=True, env=environment)
    losses = [line["loss"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    assert len(losses) == total
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5

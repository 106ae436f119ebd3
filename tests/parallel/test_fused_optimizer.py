"""The optimizers of GPUs, on the CPU, where they can be compared: PyTorch's, and NVIDIA's by stand-ins."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "tiny_engine.py")))
RunRanks = Callable[..., list[Any]]


def trained(rank: int, world_size: int, init_method: str) -> dict[bool, Any]:
    """Weights after four steps and the counters, without and with it; the counters are set anew in between."""
    found = {}
    for fused in (False, True):
        with tiny.engine_on((1, 1, 1, 1), rank, f"{init_method}-{fused}", mixer="tnl") as engine:
            if fused:
                engine.optimizer.fuse()
            for step in range(4):
                engine.forward_backward(tiny.step_batches(step, engine.mesh))
                engine.step(tiny.LR)
                engine.finish_loading(engine.counters())
            kinds = {
                group["fused"] for part in engine.optimizer.megatron.chained_optimizers for group in part.param_groups
            }
            found[fused] = tiny.weights(engine), engine.counters(), kinds
    return found


def test_fused_steps_are_the_same_to_rounding(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(trained, 1)
    (plain, counters, kinds), (fused, other, other_kinds) = found[False], found[True]
    assert (kinds, other_kinds) == ({None}, {True})
    assert counters == other == {"adam_steps": 4}
    assert any(not torch.equal(plain[name], fused[name]) for name in plain), "not another way of computing it"
    assert all(tiny.error(fused[name], plain[name]) < 1e-6 for name in plain)


STAND_INS = Path(__file__).parents[2] / "tools" / "cuda_twin" / "stand_ins"
# What Megatron takes is decided when it is imported. Megatron's state is made with steps of lr 0 that count as one.
STEPS = """
import runpy, sys
from types import SimpleNamespace
import torch
from lightscale.parallel.device.fused import describe_fused_kernels
tiny = SimpleNamespace(**runpy.run_path(sys.argv[1]))
with tiny.engine_on((1, 1, 1, 1), 0, f"file://{sys.argv[2]}-meeting", mixer="tnl") as engine:
    for step in range(4):
        engine.forward_backward(tiny.step_batches(step, engine.mesh))
        engine.step(tiny.LR)
        engine.finish_loading(engine.counters())
    kinds = [type(part.optimizer).__module__ for part in engine.optimizer.megatron.chained_optimizers]
    torch.save((tiny.weights(engine), engine.counters(), kinds, describe_fused_kernels()), sys.argv[2])
"""


@pytest.mark.long
def test_steps_of_nvidias_packages_are_the_same_to_rounding(tmp_path: Path) -> None:
    """apex's, and Transformer Engine's, which Megatron prefers where both are installed."""
    helper = Path(__file__).parents[1] / "helpers" / "tiny_engine.py"
    paths = {"plain": "", "apex": str(STAND_INS), "both": f"{STAND_INS / 'te'}{os.pathsep}{STAND_INS}"}
    runs = {}
    for name, path in paths.items():
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", STEPS, str(helper), str(tmp_path / name)]
        runs[name] = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    errors = {name: run.communicate()[1] for name, run in runs.items()}
    failed = {name: errors[name] for name, run in runs.items() if run.returncode}
    assert not failed, failed
    found = {name: torch.load(tmp_path / name, weights_only=True) for name in paths}
    plain, counters, kinds, _ = found.pop("plain")
    assert ({*kinds}, counters) == ({"torch.optim.adamw"}, {"adam_steps": 4})
    origins = {name: ({*other_kinds}, says) for name, (_, _, other_kinds, says) in found.items()}
    assert origins == {
        "apex": ({"apex.optimizers"}, "fused kernels: apex"),
        "both": ({"transformer_engine.pytorch.optimizers"}, "fused kernels: apex and Transformer Engine"),
    }
    for name, (weights, other, _, _) in found.items():
        assert other == counters, name
        assert any(not torch.equal(plain[weight], weights[weight]) for weight in plain), "not another way"
        assert all(tiny.error(weights[weight], plain[weight]) < 1e-6 for weight in plain), name

"""The optimizers of GPUs, on the CPU, where they can be compared: PyTorch's fused one, and apex's by a stand-in."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from lightscale.parallel.fused import describe_fused_kernels
tiny = SimpleNamespace(**runpy.run_path(sys.argv[1]))
with tiny.engine_on((1, 1, 1, 1), 0, f"file://{sys.argv[2]}-meeting", mixer="tnl") as engine:
    for step in range(4):
        engine.forward_backward(tiny.step_batches(step, engine.mesh))
        engine.step(tiny.LR)
        engine.finish_loading(engine.counters())
    kinds = [type(part.optimizer).__module__ for part in engine.optimizer.megatron.chained_optimizers]
    torch.save((tiny.weights(engine), engine.counters(), kinds, describe_fused_kernels()), sys.argv[2])
"""


def test_apex_steps_are_the_same_to_rounding(tmp_path: Path) -> None:
    helper = Path(__file__).parents[1] / "helpers" / "tiny_engine.py"
    found = {}
    for name, path in (("plain", ""), ("apex", str(STAND_INS))):
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", STEPS, str(helper), str(tmp_path / name)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found[name] = torch.load(tmp_path / name, weights_only=True)
    (plain, counters, kinds, _), (apex, other, other_kinds, says) = found["plain"], found["apex"]
    assert ({*kinds}, {*other_kinds}, says) == ({"torch.optim.adamw"}, {"apex.optimizers"}, "fused kernels: apex")
    assert counters == other == {"adam_steps": 4}
    assert any(not torch.equal(plain[name], apex[name]) for name in plain), "not another way of computing it"
    assert all(tiny.error(apex[name], plain[name]) < 1e-6 for name in plain)

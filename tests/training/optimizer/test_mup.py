"""Steps with µP beside their equations in fp64, the model that they give, and layouts beside one process."""

import math
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.models.mup import mup_scales
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver

HELPERS = Path(__file__).parents[2] / "helpers"
tiny = SimpleNamespace(**runpy.run_path(str(HELPERS / "tiny_engine.py")))

RunRanks = Callable[..., list[Any]]
SIZE = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 24}
# Twice as wide and twice as deep as the base.
MUP = {"base_hidden_size": 16, "base_num_layers": 1}
BASE = {"base_hidden_size": 32, "base_num_layers": 2}
DECAY = 0.3
EPS = 1e-4
"""So large that it is seen beside the roots."""


def adam(name: str) -> dict[str, Any]:
    return {"name": name, "weight_decay": DECAY, "grad_clip": 0.0} | ({} if name == "lion" else {"eps": EPS})


def steps_of(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    """By optimizer, the weights before each of three steps with the gradients, and those after them."""
    found: dict[str, Any] = {}
    with tiny.mesh_on((1, 1, 1, 1), rank, init_method) as mesh:
        for name in ("adamw", "lion", "ademamix", "muon", "soap"):
            engine = tiny.engine_in(mesh, optimizer=adam(name), mup=MUP, **SIZE)
            steps = []
            for step in range(3):
                before = tiny.main_weights(engine)
                gradients, _, after = tiny.optimizer_step(engine, step)
                steps.append((before, gradients, after))
            found[name] = steps
        plain = tiny.engine_in(mesh, **SIZE)
        at_base = tiny.engine_in(mesh, mup=BASE, **SIZE)
        found["base"] = [tiny.train(engine, 0, 2)[-1][2] for engine in (plain, at_base)]
        found["start"] = [tiny.weights(tiny.engine_in(mesh, mup=mup, **SIZE)) for mup in (None, MUP)]
    return found


@pytest.fixture(scope="module")
def one_process(run_ranks: RunRanks) -> dict[str, Any]:
    (found,) = run_ranks(steps_of, 1)
    return dict(found)


SCALES = mup_scales(ModelConfig.model_validate({**tiny.MODEL, **SIZE, "mup": MUP}))


def decay_of(name: str, lr: float) -> float:
    """The share that a step takes off, which µP does not change."""
    return lr * DECAY if name.endswith(".weight") and "norm" not in name else 0.0


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_steps_are_those_of_the_equations(one_process: dict[str, Any], optimizer: str) -> None:
    moments: dict[str, list[Tensor]] = {}
    for step, (before, gradients, after) in enumerate(one_process[optimizer], start=1):
        for name, weight in before.items():
            g, scale = gradients[name].double(), SCALES[name]
            m, v = moments.setdefault(name, [torch.zeros_like(g), torch.zeros_like(g)])
            if optimizer == "lion":
                direction = torch.sign(0.9 * m + 0.1 * g)
                m.mul_(0.99).add_(g, alpha=0.01)
            else:
                m.mul_(0.9).add_(g, alpha=0.1)
                v.mul_(0.95).add_(g * g, alpha=0.05)
                root = (v / (1 - 0.95**step)).sqrt()
                direction = m / (1 - 0.9**step) / (root + EPS * scale.eps)
            lr = tiny.LR * scale.lr
            expected = -lr * direction - decay_of(name, tiny.LR) * weight.double()
            change = after[name].double() - weight.double()
            # Signs of what is zero but for rounding are any.
            off = (change - expected).abs() > 1e-3 * lr
            assert off.double().mean() < 2e-3, f"{optimizer}, step {step}: {name}"


def test_muons_matrices_take_steps_of_the_spectral_condition(one_process: dict[str, Any]) -> None:
    """The root mean square of a step is 0.2 at the base's width and 0.2 / sqrt(2) at twice it."""
    before, _, after = one_process["muon"][0]
    shapes = {"q_proj.weight": 1 / math.sqrt(2), "gate_down.weight": 1 / 2, "gate_up.weight": 1.0}
    for name, wanted in shapes.items():
        whole = f"decoder.layers.1.self_attention.{name}"
        step = (after[whole] - (1 - decay_of(whole, tiny.LR)) * before[whole]).double()
        # Newton and Schulz's iteration leaves singular values between 0.7 and 1.2.
        share = float(step.square().mean().sqrt()) / (tiny.LR * 0.2)
        assert 0.6 * wanted < share < 1.3 * wanted, f"{name}: {share}"


@pytest.mark.parametrize("optimizer", ["ademamix", "soap"])
def test_others_have_the_rates_of_adamw(one_process: dict[str, Any], optimizer: str) -> None:
    before, _, after = one_process[optimizer][0]
    for name in ("decoder.layers.0.self_attention.q_proj.weight", "decoder.layers.0.mlp.linear_fc2.weight"):
        step = after[name] - (1 - decay_of(name, tiny.LR)) * before[name]
        largest = float(step.abs().max()) / tiny.LR
        assert 0.5 * SCALES[name].lr < largest < 7 * SCALES[name].lr, name


def test_the_base_model_is_the_model_without_it(one_process: dict[str, Any]) -> None:
    plain, at_base = one_process["base"]
    assert all(torch.equal(weight, at_base[name]) for name, weight in plain.items())


def test_drawn_weights_have_their_factors(one_process: dict[str, Any]) -> None:
    plain, scaled = one_process["start"]
    for name, weight in plain.items():
        factor = SCALES[name].std
        if name.endswith(("out_proj.weight", "linear_fc2.weight")):
            # Their deviation is that of the base's depth.
            factor *= math.sqrt(2)
        torch.testing.assert_close(scaled[name], weight * factor)


LAYOUTS = [(2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (2, 1, 1, 1)]


def on_layouts(rank: int, world_size: int, init_method: str, layouts: list[Any], folder: str) -> list[str]:
    return [
        fault
        for number, axes in enumerate(layouts)
        for fault in _faults_on(axes, rank, f"{init_method}-{number}", Path(folder))
    ]


def _faults_on(axes: Any, rank: int, init_method: str, folder: Path) -> Iterator[str]:
    """Three steps beside those of one process, the last one behind its checkpoint."""
    with tiny.mesh_on(axes, rank, init_method) as mesh:
        options: dict[str, Any] = {"optimizer": adam("adamw"), "mup": MUP, **SIZE}
        engine = tiny.engine_in(mesh, **options)
        steps = [weights for _, _, weights in tiny.train(engine, 0, 2)]
        if mesh.world_size == 1:
            Saver(folder / "one", mesh).save(engine, step=2, common={}, facts={})
        else:
            engine = tiny.engine_in(mesh, seed=7, **options)
            assert Checkpoints(folder / "one", mesh).restore(engine) is not None
        ((_, _, last),) = tiny.train(engine, 2, 3)
        found = [*steps, last]
        if mesh.world_size == 1:
            torch.save(found, folder / "one.pt")
            return
        for step, (own, expected) in enumerate(zip(found, torch.load(folder / "one.pt"), strict=True)):
            for key, weight in expected.items():
                off = float(((own[key] - weight).abs() > 0.02 * tiny.LR * SCALES[key].lr).double().mean())
                if off > 0.01:
                    yield f"{axes}, step {step}: {off:.1%} of {key} are apart"


@pytest.mark.long
def test_layouts_train_as_one_process_and_resume_it(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(on_layouts, 1, [(1, 1, 1, 1)], str(tmp_path)) == [[]]
    assert run_ranks(on_layouts, 2, LAYOUTS, str(tmp_path)) == [[], []]

"""Muon: steps beside singular values in fp64 and beside PyTorch's, matrices of fused weights, layouts, refusals."""

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.config.layout import check_layout
from lightscale.config.mixers import MIXERS
from lightscale.config.model import ModelConfig
from lightscale.config.schema import DataConfig, RunConfig, TrainConfig
from lightscale.errors import UserError
from lightscale.models.accounting import parameter_shapes
from lightscale.models.matrices import matrices
from lightscale.planning.hardware import H100
from lightscale.planning.memory import assumptions, rank_memory
from lightscale.planning.step_cost import CostModel
from lightscale.study.counts import count
from lightscale.training.checkpoints.reader import _foreign_state as foreign_state
from lightscale.training.optimizer.muon import Muon
from lightscale.training.optimizer.registry import optimizer_spec

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tiny_engine.py")))
tnl = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tnl_matrices.py")))

RunRanks = Callable[..., list[Any]]
HEADS, WIDTH = 4, 32
MODEL = {"num_layers": 2, "hidden_size": WIDTH, "num_heads": HEADS, "intermediate_size": 24}
STEPS, DECAY, CLIP = 10, 0.3, 0.5
OPTIMIZER = {
    "name": "muon",
    "weight_decay": DECAY,
    "grad_clip": CLIP,
    "newton_schulz_precision": "fp32",
    "adamw": ["*.gate_up.weight"],
    "groups": {
        "slow": {"parameters": ["embedding.*", "*.q_proj.weight"], "lr_factor": 0.25},
        "still": {"parameters": ["*.linear_fc2.weight"], "weight_decay": 0.0},
    },
}


def orthogonal(mean: Tensor, steps: int = 5) -> Tensor:
    """By singular values, to which alone the odd polynomial applies."""
    flat = mean.reshape(-1, mean.size(-1))
    u, s, v = torch.linalg.svd(flat, full_matrices=False)
    s = s / s.norm()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (0.2 * math.sqrt(max(flat.shape)) * (u * s) @ v).view(mean.shape)


def trained(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    found = {}
    for number, precision in enumerate(("fp32", "bf16")):
        with tiny.mesh_on((1, 1, 1, 1), rank, f"{init_method}-{number}") as mesh:
            engine = tiny.engine_in(mesh, optimizer=OPTIMIZER, precision=precision, **MODEL)
            before = tiny.main_weights(engine)
            steps = [tiny.optimizer_step(engine, step) for step in range(STEPS)]
            found[precision] = (before, steps)
    return found


def test_ten_steps_are_those_of_singular_values_in_fp64(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(trained, 1)
    for precision, (start, steps) in found.items():
        means: dict[str, Tensor] = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in start.items()}
        squares = {name: mean.clone() for name, mean in means.items()}
        before, clipped = start, 0
        for step, (gradients, norm, after) in enumerate(steps, start=1):
            share = min(1.0, CLIP / (norm + 1e-6))
            clipped += share < 1
            for name, weight in before.items():
                g = gradients[name].double() * share
                if tnl.is_matrix(name):
                    means[name] = 0.95 * means[name] + 0.05 * g
                    mean = 0.95 * means[name] + 0.05 * g
                    update = torch.empty_like(mean)
                    for target, part in zip(
                        tnl.parts_of(name, HEADS, update), tnl.parts_of(name, HEADS, mean), strict=True
                    ):
                        target.copy_(orthogonal(part))
                else:
                    means[name] = 0.9 * means[name] + 0.1 * g
                    squares[name] = 0.95 * squares[name] + 0.05 * g * g
                    root = (squares[name] / (1 - 0.95**step)).sqrt() + 1e-8
                    update = means[name] / (1 - 0.9**step) / root
                decays = name.endswith(".weight") and "norm" not in name and "linear_fc2" not in name
                lr = tiny.LR * (0.25 if "q_proj" in name or "embedding" in name else 1.0)
                expected = -lr * (update + DECAY * decays * weight.double())
                off = ((after[name].double() - weight.double()) - expected).abs() > 2e-3 * tiny.LR
                assert off.double().mean() < 2e-3, f"{precision}, step {step}: {name}"
            before = after
        assert clipped, "the limit of the norm is reached"


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_step_in_bf16_is_that_of_pytorch(shape: tuple[int, int], nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    spec = Muon(nesterov=nesterov, weight_decay=0.1)
    weight = torch.nn.Parameter(torch.randn(shape, generator=generator))
    own, state = weight.detach().clone(), {"momentum": torch.zeros(shape).flatten()}
    other = torch.optim.Muon([weight], lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        weight.grad = torch.randn(shape, generator=generator)
        mean = spec.matrix_mean(weight.grad.flatten(), state).view(shape).bfloat16()
        direction = spec.matrix_direction(mean, {}, 1).float() * spec.matrix_scale(*shape)
        own.mul_(1 - 0.02 * 0.1).sub_(direction, alpha=0.02)
        other.step()
        assert tiny.error(own, weight.detach()) < 1e-4


def test_a_matrix_without_a_gradient_has_no_direction() -> None:
    assert not Muon().matrix_direction(torch.zeros(4, 6, dtype=torch.bfloat16), {}, 1).any()


def model_of(mixer: str, **options: Any) -> ModelConfig:
    return ModelConfig(**MODEL, mixer=mixer, vocab_size=128, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_row_is_of_one_matrix(mixer: str) -> None:
    model = model_of(mixer)
    shapes, found = parameter_shapes(model), matrices(model)
    for name, parts in found.items():
        rows = [row for part in parts for first, last in part for row in range(first, last)]
        assert sorted(rows) == list(range(shapes[name][0])), name
    for name in shapes.keys() - found.keys():
        # What is left to AdamW, by the words of its name.
        words = ("norm", "embedding", "_conv", "theta", "dt_bias", "table", "logit", ".bias", "decay", "gamma", "a_log")
        assert len(shapes[name]) < 2 or any(word in name for word in words), name


def test_fused_weights_have_their_matrices() -> None:
    found = matrices(model_of("gated-delta-net"))
    shapes = [sum(last - first for first, last in part) for part in found[f"{LAYER}.kv_proj.weight"]]
    assert sorted(shapes) == [HEADS, HEADS, WIDTH, WIDTH], "beta, decay, keys, values"
    assert [len(part) for part in found[f"{LAYER}.q_proj.weight"]] == [HEADS, HEADS], "queries and gates, by head"
    assert found["decoder.layers.0.mlp.linear_fc1.weight"] == (((0, 24),), ((24, 48),))


LAYER = "decoder.layers.0.self_attention"


def on_four(rank: int, world_size: int, init_method: str, axes: Any, mixer: str, adamw: str) -> list[Any]:
    with tiny.mesh_on(axes, rank, init_method) as mesh:
        engine = tiny.engine_in(mesh, optimizer=OPTIMIZER | {"adamw": [adamw]}, mixer=mixer, **MODEL)
        return [weights for _, _, weights in tiny.train(engine, 0, 3)]


@pytest.mark.parametrize(("mixer", "adamw"), [("tnl", "*.gate_up.weight"), ("gated-delta-net", "*.out_proj.weight")])
def test_two_tensor_and_two_data_ranks_train_as_one(run_ranks: RunRanks, mixer: str, adamw: str) -> None:
    """Both cut a matrix; gated DeltaNet's weights hold up to four."""
    (expected,) = run_ranks(on_four, 1, (1, 1, 1, 1), mixer, adamw)
    for found in run_ranks(on_four, 4, (4, 2, 1, 1), mixer, adamw):
        for step, (own, whole) in enumerate(zip(found, expected, strict=True)):
            for name, weight in whole.items():
                off = ((own[name] - weight).abs() > 0.02 * tiny.LR).double().mean()
                assert off < 0.01, f"step {step}: {name}"


def config(**optimizer: Any) -> RunConfig:
    return RunConfig(
        model=model_of("tnl"),
        data=DataConfig(store=Path("store"), sequence_length=48),
        optimizer={"name": "muon", "lr": 1e-3, **optimizer},  # type: ignore[arg-type]
        train=TrainConfig(steps=1, global_batch_size=1, precision="bf16"),
    )


def test_a_plan_counts_state_by_parameter() -> None:
    run = config()
    shapes = parameter_shapes(run.model)
    whole = sum(math.prod(shape) for name, shape in shapes.items() if tnl.is_matrix(name) or "gate_up" in name)
    every = sum(math.prod(shape) for shape in shapes.values())
    assert 0.5 * every < whole < every
    memory = rank_memory(run, check_layout(run, 1), 0)
    assert memory.optimizer_bytes == 4 * every + 4 * whole + 8 * (every - whole)
    assert any("the momentum of matrices" in line for line in assumptions(run))
    assert count(run).kept_bytes == memory.optimizer_bytes
    slower, faster = (
        CostModel(one, 48, H100).predict(check_layout(one, 1)).optimizer_s
        for one in (config(newton_schulz_steps=20), config(newton_schulz_steps=1))
    )
    assert slower > faster


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            {"adamw": ["*.gate"]},
            f'optimizer.adamw: "*.gate" is the name of no matrix of the model; a name is {LAYER}',
        ),
        (
            {"groups": {"quick": {"parameters": ["*.q_proj.weight"], "betas": [0.5, 0.6]}}},
            f"optimizer.groups.quick.betas = [0.5, 0.6]: {LAYER}.q_proj.weight is a matrix, whose step has no betas",
        ),
    ],
)
def test_patterns_and_betas_that_fit_nothing_are_refused(optimizer: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        optimizer_spec(config(**optimizer))
    assert str(error.value).startswith(message)


def test_a_checkpoint_has_all_of_some_state_for_every_weight() -> None:
    weights = {"matrix": (4, 4), "norm": (4,)}
    kinds = {"momentum": {"matrix": (4, 4)}, "exp_avg": {"norm": (4,)}, "exp_avg_sq": {"norm": (4,)}}
    whole = {"model": weights, "ema_slow": weights, **kinds}
    assert all(foreign_state(what, whole, "model") is None for what in whole if what != "model")
    for what, changed, wrong in (
        ("ema_slow", {"matrix": (4, 4)}, "norm"),
        ("ema_slow", {"matrix": (4, 4), "norm": (2,)}, "norm"),
        ("momentum", {}, "matrix"),
        ("momentum", {"matrix": (4, 3)}, "matrix"),
        ("exp_avg", {"norm": (4,), "matrix": (4, 4)}, "matrix"),
        ("exp_avg", {"norm": (4,), "foreign": (1,)}, "foreign"),
    ):
        damaged = {**whole, what: changed}
        found = {foreign_state(one, damaged, "model") for one in damaged if one != "model"}
        assert wrong in found, (what, changed)

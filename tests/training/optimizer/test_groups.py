"""Parameter groups: learning rate, weight decay, betas and clipping of their own, also of copies on two stages."""

import math
import runpy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.config.schema import DataConfig, RunConfig, TrainConfig
from lightscale.errors import UserError
from lightscale.training.build import build_engine
from lightscale.training.checkpoints.directories import directory_name
from lightscale.training.checkpoints.manifest import NAME, read_manifest, write_manifest
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver
from lightscale.training.health.copies import check_copies
from lightscale.training.optimizer.registry import optimizer_spec

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tiny_engine.py")))

RunRanks = Callable[..., list[Any]]
MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 24,
    "norm": "rmsnorm",
    "tie_word_embeddings": True,
}
EMBEDDING = "embedding.word_embeddings.weight"
GROUPS: dict[str, dict[str, Any]] = {
    "embeddings": {"parameters": ["embedding.*"], "lr_factor": 0.25, "weight_decay": 0.0},
    "norms": {"parameters": ["*layernorm.weight"], "weight_decay": 0.5},
    "still": {"parameters": ["*.mlp.linear_fc1.*", "*.mlp.linear_fc2.*"], "lr_factor": 0.0},
    "quick": {"parameters": ["*.q_proj.weight"], "betas": [0.5, 0.6]},
}
DECAY, STEPS = 0.2, 3


def constants(name: str) -> tuple[float, float, tuple[float, float]]:
    """Learning rate, weight decay and betas that the parameter should have."""
    if name == EMBEDDING:
        return 0.25 * tiny.LR, 0.0, (0.9, 0.95)
    if name.endswith("layernorm.weight"):
        return tiny.LR, 0.5, (0.9, 0.95)
    if ".mlp.linear_fc" in name:
        return 0.0, DECAY, (0.9, 0.95)
    if name.endswith("q_proj.weight"):
        return tiny.LR, DECAY, (0.5, 0.6)
    return tiny.LR, DECAY if name.endswith(".weight") and "norm" not in name else 0.0, (0.9, 0.95)


def trained(rank: int, world_size: int, init_method: str, axes: Any) -> dict[str, list[Any]]:
    """Records of steps by optimizer; the copies of the embedding are compared."""
    found = {}
    with tiny.mesh_on(axes, rank, init_method) as mesh:
        for name in ("adamw", "lion"):
            optimizer = {"name": name, "groups": GROUPS, "weight_decay": DECAY, "grad_clip": 0.0, "betas": [0.9, 0.95]}
            engine = tiny.engine_in(mesh, optimizer=optimizer, **MODEL)
            before = tiny.weights(engine)
            found[name] = [(0.0, {}, before), *tiny.train(engine, 0, STEPS)]
            check_copies(engine)
    return found


@pytest.fixture(scope="module")
def on_one(run_ranks: RunRanks) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = run_ranks(trained, 1, (1, 1, 1, 1))[0]
    return found


def directions(optimizer: str, gradients: list[Tensor], betas: tuple[float, float]) -> Tensor:
    """The last step's, of all gradients so far, in fp64."""
    mean = square = torch.zeros_like(gradients[0], dtype=torch.float64)
    for step, gradient in enumerate(gradients, start=1):
        g = gradient.double()
        direction = torch.sign(betas[0] * mean + (1 - betas[0]) * g)
        if optimizer == "lion":
            mean = betas[1] * mean + (1 - betas[1]) * g
            continue
        mean, square = betas[0] * mean + (1 - betas[0]) * g, betas[1] * square + (1 - betas[1]) * g * g
        direction = mean / (1 - betas[0] ** step) / ((square / (1 - betas[1] ** step)).sqrt() + 1e-8)
    return direction


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_every_group_has_its_constants(on_one: dict[str, list[Any]], optimizer: str) -> None:
    records = on_one[optimizer]
    for step in range(1, STEPS + 1):
        for name, weight in records[step][2].items():
            lr, decay, betas = constants(name)
            before = records[step - 1][2][name].double()
            gradients = [gradients[name] for _, gradients, _ in records[1 : step + 1]]
            expected = -lr * (directions(optimizer, gradients, betas) + decay * before)
            off = ((weight.double() - before) - expected).abs() > 1e-2 * tiny.LR
            # Signs of what is zero but for rounding are any.
            assert off.double().mean() < 2e-3, (step, name)


def test_copies_on_two_stages_are_in_one_group(run_ranks: RunRanks, on_one: dict[str, list[Any]]) -> None:
    """``check_copies`` has compared the embedding with the output layer of the last stage, which has another name."""
    for found in run_ranks(trained, 2, (2, 1, 2, 1)):
        for optimizer, expected in on_one.items():
            for (_, _, own), (_, _, weights) in zip(found[optimizer], expected, strict=True):
                off = (own[EMBEDDING] - weights[EMBEDDING]).abs() > 1e-2 * tiny.LR
                assert off.double().mean() < 1e-2, optimizer
            assert not torch.equal(found[optimizer][0][2][EMBEDDING], found[optimizer][-1][2][EMBEDDING])


CLIPPED: dict[str, dict[str, Any]] = {
    "embeddings": {"parameters": ["embedding.*"], "grad_clip": 0.02},
    "norms": {"parameters": ["*layernorm.weight"], "grad_clip": 1e-3, "lr_factor": 0.5},
    "free": {"parameters": ["*.mlp.linear_fc1.*", "*.mlp.linear_fc2.*"], "grad_clip": 0.0},
    "none": {"parameters": ["*.q_proj.weight"], "weight_decay": 0.0},
}
REST, EPS = 0.05, 50.0
LAYOUTS = [(2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (2, 1, 1, 1)]


def limits(name: str) -> tuple[str, float, float]:
    """What is clipped together with the parameter, its limit, and the factor of its learning rate."""
    if name == EMBEDDING:
        return "embeddings", 0.02, 1.0
    if name.endswith("layernorm.weight"):
        return "norms", 1e-3, 0.5
    return ("free", math.inf, 1.0) if ".mlp.linear_fc" in name else ("rest", REST, 1.0)


def clipped(rank: int, world_size: int, init_method: str, layouts: list[Any]) -> list[list[Any]]:
    """Records of two steps on each layout. Without a memory, and with a large eps and rate, steps are gradients."""
    section = {"groups": CLIPPED, "weight_decay": 0.0, "grad_clip": REST, "betas": [0.0, 0.0], "eps": EPS}
    found = []
    for number, axes in enumerate(layouts):
        with tiny.mesh_on(axes, rank, f"{init_method}-{number}") as mesh:
            engine = tiny.engine_in(mesh, optimizer=section, **MODEL)
            records = [(0.0, {}, tiny.weights(engine))]
            for step in range(2):
                engine.forward_backward(tiny.step_batches(step, mesh))
                # Before they are clipped.
                names = {id(parameter): name for name, parameter in tiny.named(engine)}
                gradients = {names[id(one)]: gradient.clone() for _, one, gradient in engine.gradients()}
                records.append((engine.step(EPS), gradients, tiny.weights(engine)))
            found.append(records)
            check_copies(engine)
    return found


def test_a_group_is_clipped_by_its_own_norm_on_all_layouts(run_ranks: RunRanks) -> None:
    ((one,),) = run_ranks(clipped, 1, [(1, 1, 1, 1)])
    for (_, _, before), (norm, gradients, after) in pairwise(one):
        squares = {limits(name)[0]: 0.0 for name in gradients}
        for name, gradient in gradients.items():
            squares[limits(name)[0]] += float(gradient.double().square().sum())
        # The guard and the metrics see all gradients.
        assert norm == pytest.approx(math.sqrt(sum(squares.values())), rel=1e-6)
        for name, gradient in gradients.items():
            together, limit, factor = limits(name)
            share = min(1.0, limit / (math.sqrt(squares[together]) + 1e-6))
            assert (share < 1) == (together != "free"), name
            g = gradient.double() * share
            step = after[name].double() - before[name].double()
            # A step is added to a weight of 1 in fp32.
            torch.testing.assert_close(step, -factor * EPS * g / (g.abs() + EPS), rtol=1e-4, atol=2e-7)
    for of_rank in run_ranks(clipped, 2, LAYOUTS):
        for axes, found in zip(LAYOUTS, of_rank, strict=True):
            for (norm, _, own), (expected_norm, _, expected) in zip(found, one, strict=True):
                assert norm == pytest.approx(expected_norm, rel=1e-5), axes
                for name, weight in expected.items():
                    assert float((own[name] - weight).abs().max()) < 2e-5, (axes, name)


def held(rank: int, world_size: int, init_method: str) -> list[str]:
    """Parameters that a step without gradients changes where the mixer of layer 0 alone is trained."""
    groups = {"all": {"parameters": ["*"], "weight_decay": 0.5}}
    with tiny.mesh_on((1, 1, 1, 1), rank, init_method) as mesh:
        engine = build_engine(config(groups), mesh, vocab_size=120, trainable=True, trained_mixers=[0])
        before = tiny.weights(engine)
        engine.models[0].zero_grad_buffer()
        engine.step(0.1)
        return [name for name, weight in tiny.weights(engine).items() if not torch.equal(weight, before[name])]


def test_weights_that_are_not_trained_have_no_decay_of_a_group(run_ranks: RunRanks) -> None:
    (changed,) = run_ranks(held, 1)
    assert changed and all(name.startswith("decoder.layers.0.self_attention.") for name in changed)


def config(groups: dict[str, dict[str, Any]], **optimizer: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(**MODEL, vocab_size=128),  # type: ignore[arg-type]
        data=DataConfig(store=Path("store"), sequence_length=48),
        optimizer={"lr": 1e-3, "groups": groups, **optimizer},  # type: ignore[arg-type]
        train=TrainConfig(steps=1, global_batch_size=1),
    )


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            {"a": {"parameters": ["embedding.*"]}, "b": {"parameters": ["*word_emb*"]}},
            f"optimizer.groups: {EMBEDDING} is in the groups a and b",
        ),
        (
            {"a": {"parameters": ["embedding.*", "word_embeddings.weight"]}},
            f'optimizer.groups.a.parameters: "word_embeddings.weight" is the name of no parameter of the model; a name '
            f"is {EMBEDDING}",
        ),
    ],
)
def test_patterns_that_name_nothing_or_two_groups_are_refused(groups: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        optimizer_spec(config(groups))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("betas", [[0.9], [0.9, 1.0], [0.9, 0.9, 0.9]])
def test_betas_are_those_of_the_optimizer(betas: list[float]) -> None:
    group = {"a": {"parameters": ["embedding.*"], "betas": betas}}
    with pytest.raises(ValueError, match=r"groups\.a\.betas"):
        config(group)
    if len(betas) == 3:
        assert optimizer_spec(config(group, name="ademamix")).of_group("a").betas == tuple(betas)  # type: ignore[attr-defined]


def mixed(rank: int, world_size: int, init_method: str) -> list[str]:
    """Parameters in bf16 whose fp32 weights, or those of fp32 parameters, are another parameter's."""
    faults = []
    with tiny.mesh_on((world_size, 1, 1, 1), rank, init_method) as mesh:
        for name in ("adamw", "lion"):
            groups = {"all": {"parameters": ["*"], "weight_decay": 0.0}}
            engine = tiny.engine_in(mesh, optimizer={"name": name, "groups": groups}, precision="bf16", **MODEL)
            assert len({parameter.dtype for _, parameter in tiny.named(engine)}) == 2
            for step in range(2):
                engine.forward_backward(tiny.step_batches(step, mesh))
                engine.step(tiny.LR)
            for key, parameter in tiny.named(engine):
                owned: Any = engine.optimizer.owned(parameter)
                if owned is not None:
                    held = parameter.detach().view(-1)[owned.first : owned.last]
                    if owned.weights.shape != held.shape or not owned.weights.to(held.dtype).equal(held):
                        faults.append(f"{name}: {key}")
    return faults


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_has_parameters_in_fp32_and_in_bf16(run_ranks: RunRanks, ranks: int) -> None:
    assert run_ranks(mixed, ranks) == [[]] * ranks


def resumed_as_old(rank: int, world_size: int, init_method: str, folder: str) -> list[str]:
    """How checkpoints are read whose manifest does not say that each parameter had its own weights."""
    found = []
    groups = {"all": {"parameters": ["*"], "weight_decay": 0.0}}
    with tiny.mesh_on((world_size, 1, 1, 1), rank, init_method) as mesh:
        for precision in ("bf16", "fp32"):
            engine = tiny.engine_in(mesh, optimizer={"groups": groups}, precision=precision, **MODEL)
            directory = Path(folder) / f"{world_size}-{precision}"
            Saver(directory, mesh).save(engine, step=1, common={}, facts={"tokens": 1})
            if rank == 0:
                path = directory / directory_name(1)
                manifest = read_manifest(path)
                (path / NAME).unlink()
                facts = {key: fact for key, fact in manifest.facts.items() if key != "numbering"}
                write_manifest(path, manifest.files, facts)
            dist.barrier()
            for allow in ((), ("optimizer.groups",)):
                try:
                    restored = Checkpoints(directory, mesh).restore(engine, allow=allow)
                    found.append(f"step {restored.step}" if restored is not None else "none")
                except UserError as error:
                    found.append(str(error))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_old_checkpoints_of_such_groups_are_refused(run_ranks: RunRanks, tmp_path: Path, ranks: int) -> None:
    for refused, *others in run_ranks(resumed_as_old, ranks, str(tmp_path)):
        assert "step-00000001 may have the weights of one parameter under the name of another" in refused
        assert "--allow-change optimizer.groups" in refused
        assert others == ["step 1"] * 3

"""Moments in bf16 beside their equations in fp64, on all layouts; what is kept, saved, planned and refused."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from lightscale.config.layout import check_layout
from lightscale.config.model import ModelConfig
from lightscale.config.schema import DataConfig, RunConfig, TrainConfig
from lightscale.planning.memory import assumptions, rank_memory
from lightscale.training.checkpoints.differences import differences
from lightscale.training.checkpoints.manifest import read_manifest
from lightscale.training.checkpoints.reader import read_headers
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tiny_engine.py")))

RunRanks = Callable[..., list[Any]]
State = dict[str, Tensor]
MODEL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 24}
STEPS, DECAY, CLIP, MOMENTUM = 10, 0.3, 0.5, 0.95
NAMES = ("adamw", "lion", "muon", "soap")


def optimizer_of(name: str) -> dict[str, Any]:
    own = {"newton_schulz_precision": "fp32"} if name == "muon" else {}
    shared = {"weight_decay": DECAY, "grad_clip": CLIP, "ema": {"slow": 0.9}}
    return {"name": name, "moments_dtype": "bf16", **shared, **own}


def rounded(x: Tensor) -> Tensor:
    """To bf16, of 8 significant bits, to nearest even."""
    return x.float().bfloat16().double()


def adamw(g: Tensor, state: State, step: int) -> Tensor:
    mean = 0.9 * state.get("m", 0 * g) + 0.1 * g
    square = 0.95 * state.get("v", 0 * g) + 0.05 * g * g
    state.update(m=rounded(mean), v=rounded(square))
    return (mean / (1 - 0.9**step)) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)


def lion(g: Tensor, state: State, step: int) -> Tensor:
    mean = state.get("m", 0 * g)
    state["m"] = rounded(0.99 * mean + 0.01 * g)
    return torch.sign(0.9 * mean + 0.1 * g)


def soap(g: Tensor, state: State, step: int) -> Tensor:
    mean = 0.95 * state.get("m", 0 * g) + 0.05 * g
    square = 0.95 * state.get("v", 0 * g) + 0.05 * g * g
    state.update(m=rounded(mean), v=rounded(square))
    return (mean / (1 - 0.95**step)) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)


PLAIN = {"adamw": adamw, "lion": lion, "soap": soap}
"""In fp64 from moments that are rounded between steps. Of Muon and SOAP the rest is compared: embedding and norms."""


def trained(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    found = {}
    for number, precision in enumerate(("fp32", "bf16")):
        with tiny.mesh_on((1, 1, 1, 1), rank, f"{init_method}-{number}") as mesh:
            for name in NAMES:
                engine = tiny.engine_in(mesh, optimizer=optimizer_of(name), precision=precision, **MODEL)
                before = tiny.main_weights(engine)
                steps = [(*tiny.optimizer_step(engine, step), moments(engine)) for step in range(STEPS)]
                states = [engine.optimizer.owned(parameter).state for _, parameter in tiny.named(engine)]
                dtypes = {key: tensor.dtype for state in states for key, tensor in state.items()}
                whole = {shard.box.key.partition(".")[0]: shard.data.dtype for shard in engine.optimizer.whole_shards()}
                dtypes |= {key: dtype for key, dtype in whole.items() if "exp_avg" in key}
                assert {dtype for key, dtype in whole.items() if "exp_avg" not in key} <= {torch.float32}
                found[f"{name} {precision}"] = (before, steps, dtypes)
    return found


def moments(engine: Any) -> dict[str, State]:
    """By the names of parameters; without averages."""
    states = ((name, parameter, engine.optimizer.owned(parameter).state) for name, parameter in tiny.named(engine))
    return {
        name: {key: one.clone().view(parameter.shape) for key, one in state.items() if not key.startswith("ema_")}
        for name, parameter, state in states
    }


def assert_rounded(own: State, expected: State, where: str) -> None:
    """Equal, but where fp32 and fp64 round to two neighbours: truncation would change half of them."""
    assert own.keys() == expected.keys(), where
    for key, one in expected.items():
        assert (own[key].double() == one).double().mean() > 0.95, f"{where}: {key}"


def test_ten_steps_are_those_of_rounded_moments(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(trained, 1)
    for case, (before, steps, dtypes) in found.items():
        name = case.split()[0]
        assert dtypes.pop("ema_slow") == torch.float32
        assert set(dtypes.values()) == {torch.bfloat16}, case
        states: dict[str, State] = {key: {} for key in before}
        for step, (gradients, norm, after, kept) in enumerate(steps, start=1):
            share = min(1.0, CLIP / (norm + 1e-6))
            for key, weight in before.items():
                gradient = gradients[key].double() * share
                if "momentum" in kept[key]:
                    states[key]["m"] = rounded(
                        MOMENTUM * states[key].get("m", 0 * gradient) + (1 - MOMENTUM) * gradient
                    )
                    assert_rounded(kept[key], {"momentum": states[key]["m"]}, f"{case}, step {step}: {key}")
                    continue
                if not kept[key]:
                    continue
                update = PLAIN.get(name, adamw)(gradient, states[key], step)
                plain = {f"exp_avg{'_sq' * (part == 'v')}": one for part, one in states[key].items()}
                assert_rounded(kept[key], plain, f"{case}, step {step}: {key}")
                decays = key.endswith(".weight") and "norm" not in key
                expected = -tiny.LR * (update + DECAY * decays * weight.double())
                # Where fp32 and fp64 round a moment to two neighbours, a step differs by a part in 256.
                off = ((after[key].double() - weight.double()) - expected).abs() > 1e-3 * tiny.LR
                assert off.double().mean() < 1e-2, f"{case}, step {step}: {key}"
            before = after


def on_layouts(rank: int, world_size: int, init_method: str, layouts: list[Any], folder: str) -> list[str]:
    """Faults of steps beside those of one process, whose checkpoint every layout resumes, bit by bit."""
    faults = []
    for number, axes in enumerate(layouts):
        with tiny.mesh_on(axes, rank, f"{init_method}-{number}") as mesh:
            for name in NAMES:
                how: dict[str, Any] = {"optimizer": optimizer_of(name), **MODEL}
                engine = tiny.engine_in(mesh, **how)
                found = [weights for _, _, weights in tiny.train(engine, 0, 2)]
                one = Path(folder) / name
                if mesh.world_size == 1:
                    Saver(one, mesh).save(engine, step=2, common={}, facts={})
                    # The format may change from run to run.
                    wide = tiny.engine_in(
                        mesh, seed=7, optimizer=optimizer_of(name) | {"moments_dtype": "fp32"}, **MODEL
                    )
                    assert Checkpoints(one, mesh).restore(wide) is not None
                    narrow = {shard.box: shard.data for shard in engine.owned_shards()}
                    faults += [
                        f"{name}: {x.box}" for x in wide.owned_shards() if not x.data.equal(narrow[x.box].float())
                    ]
                else:
                    engine = tiny.engine_in(mesh, seed=7, **how)
                    assert Checkpoints(one, mesh).restore(engine) is not None
                    again = Path(folder) / f"{name}-{axes}"
                    Saver(again, mesh).save(engine, step=2, common={}, facts={})
                    pair = [next(path.glob("step-*")) for path in (one, again)]
                    rows = differences(*((path, read_headers(path, read_manifest(path))) for path in pair))
                    faults += [f"{name} on {axes}: {row}" for row in rows]
                found.append(tiny.train(engine, 2, 3)[0][2])
                if mesh.world_size == 1:
                    torch.save(found, one / "found.pt")
                    continue
                for step, (own, expected) in enumerate(zip(found, torch.load(one / "found.pt"), strict=True)):
                    for key, weight in expected.items():
                        # Roundings of gradients, in which layouts differ, may take a moment to its neighbour.
                        off = float(((own[key] - weight).abs() > 0.05 * tiny.LR).double().mean())
                        if off > 0.01:
                            faults.append(f"{name} on {axes}, step {step}: {off:.1%} of {key} are apart")
    return faults


@pytest.mark.long  # in short: the layouts of test_steps.py
def test_layouts_train_as_one_process_and_resume_each_other(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(on_layouts, 1, [(1, 1, 1, 1)], str(tmp_path)) == [[]]
    layouts = [(2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (2, 1, 1, 1)]
    assert run_ranks(on_layouts, 2, layouts, str(tmp_path)) == [[], []]


def config_of(**optimizer: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(**MODEL, vocab_size=128),  # type: ignore[arg-type]
        data=DataConfig(store=Path("store"), sequence_length=48),
        optimizer={"lr": 1e-3, "moments_dtype": "bf16", **optimizer},  # type: ignore[arg-type]
        train=TrainConfig(steps=1, global_batch_size=1, precision="bf16"),
    )


@pytest.mark.parametrize(("name", "state_bytes"), [("adamw", 4), ("lion", 2)])
def test_a_plan_counts_two_bytes_a_moment(name: str, state_bytes: int) -> None:
    config = config_of(name=name)
    memory = rank_memory(config, check_layout(config, 1), 0)
    assert memory.optimizer_bytes == (4 + state_bytes) * memory.parameters
    assert any("(the state in bf16)" in line for line in assumptions(config))
    averaged = config_of(name=name, ema={"slow": 0.9})
    assert rank_memory(averaged, check_layout(averaged, 1), 0).optimizer_bytes == (8 + state_bytes) * memory.parameters


@pytest.mark.parametrize(
    ("optimizer", "key", "rate"),
    [
        ({"betas": [0.9, 0.999]}, "betas", 0.999),
        ({"name": "muon", "momentum": 0.995}, "momentum", 0.995),
        ({"groups": {"all": {"parameters": ["*"], "betas": [0.9, 0.995]}}}, "groups.all.betas", 0.995),
    ],
)
def test_means_that_would_stand_still_are_refused(optimizer: dict[str, Any], key: str, rate: float) -> None:
    with pytest.raises(ValidationError) as error:
        config_of(**optimizer)
    assert (
        f"optimizer.{key}: a mean of rate {rate} changes by less per step than optimizer.moments_dtype = "
        '"bf16" rounds; use rates up to 0.99, or "fp32"'
    ) in str(error.value)


@pytest.mark.parametrize("name", ["adam", "ademamix", "schedulefree"])
def test_optimizers_without_the_key_refuse_it(name: str) -> None:
    with pytest.raises(ValidationError, match="moments_dtype"):
        config_of(name=name)

"""Schedule-free AdamW beside its equations in fp64; which of its weights are trained, read, saved and resumed."""

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from lightscale.cli import main
from lightscale.config.layout import check_layout
from lightscale.config.model import ModelConfig
from lightscale.config.schema import DataConfig, RunConfig, TrainConfig
from lightscale.planning.memory import rank_memory
from lightscale.runs.run_directory import RunDirectory, read_metrics
from lightscale.training.checkpoints.differences import differences
from lightscale.training.checkpoints.manifest import read_manifest
from lightscale.training.checkpoints.reader import read_headers
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver

HELPERS = Path(__file__).parents[2] / "helpers"
tiny = SimpleNamespace(**runpy.run_path(str(HELPERS / "tiny_engine.py")))
commands = runpy.run_path(str(HELPERS / "rank_commands.py"))["commands"]

RunRanks = Callable[..., list[Any]]
MODEL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 24}
DECAY, CLIP = 0.3, 0.5
BETAS, GATE_BETAS = [0.8, 0.98], [0.5, 0.9]
OPTIMIZER = {
    "name": "schedulefree",
    "weight_decay": DECAY,
    "grad_clip": CLIP,
    "betas": BETAS,
    "groups": {
        "gates": {"parameters": ["*.gate_*"], "betas": GATE_BETAS, "lr_factor": 0.5},
        "still": {"parameters": ["*.linear_fc2.*"], "lr_factor": 0.0},
    },
}
RATES = [tiny.LR * share for share in (0.25, 0.5, 0.75, 1, 1, 1, 0.5, 1, 1, 1)]
"""Of ten steps, most of them the peak."""


def of_model(engine: Any) -> dict[str, Tensor]:
    """The weights that the model computes with."""
    return {name: parameter.detach().clone() for name, parameter in tiny.named(engine)}


def trained(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    found = {}
    for number, precision in enumerate(("fp32", "bf16")):
        with tiny.mesh_on((1, 1, 1, 1), rank, f"{init_method}-{number}") as mesh:
            engine = tiny.engine_in(mesh, optimizer=OPTIMIZER, precision=precision, **MODEL)
            start, steps = tiny.main_weights(engine), []
            for step, lr in enumerate(RATES):
                gradients, norm, read = tiny.optimizer_step(engine, step, lr)
                with engine.read_weights():
                    shown = of_model(engine)
                steps.append((gradients, norm, read, of_model(engine), shown))
            found[precision] = (start, steps)
    return found


def test_ten_steps_are_those_of_algorithm_1(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(trained, 1)
    for precision, (start, steps) in found.items():
        x, z, y, squares = ({name: weight.double() for name, weight in start.items()} for _ in range(4))
        squares = {name: torch.zeros_like(weight) for name, weight in squares.items()}
        total, clipped = 0.0, 0
        for step, (lr, (gradients, norm, own, model, shown)) in enumerate(zip(RATES, steps, strict=True), start=1):
            share = min(1.0, CLIP / (norm + 1e-6))
            clipped += share < 1
            total += lr**2
            for name in start:
                g = gradients[name].double() * share
                one, two = GATE_BETAS if ".gate_" in name else BETAS
                rate = lr * (0.5 if ".gate_" in name else 0.0 if "linear_fc2" in name else 1.0)
                decays = name.endswith(".weight") and "norm" not in name
                squares[name] = two * squares[name] + (1 - two) * g * g
                direction = g / ((squares[name] / (1 - two**step)).sqrt() + 1e-8)
                z[name] = z[name] - rate * (direction + DECAY * decays * y[name])
                x[name] = (1 - lr**2 / total) * x[name] + lr**2 / total * z[name]
                y[name] = one * x[name] + (1 - one) * z[name]
                off = (own[name].double() - x[name]).abs() > 1e-3 * tiny.LR
                assert off.double().mean() < 2e-3, f"{precision}, step {step}: x of {name}"
                # In bf16 it is y, rounded.
                near = 1e-3 * tiny.LR if model[name].dtype == torch.float32 else y[name].abs() / 128 + 1e-3 * tiny.LR
                off = (model[name].double() - y[name]).abs() > near
                assert off.double().mean() < 2e-3, f"{precision}, step {step}: y of {name}"
                assert torch.equal(shown[name], own[name].to(shown[name].dtype)), f"{precision}: {name} is not read"
        assert clipped, "the limit of the norm is reached"
        assert max(float((x[name] - y[name]).abs().max()) for name in x) > tiny.LR / 2, "x is not y"


def resumed(rank: int, world_size: int, init_method: str, axes: Any, precision: str, folder: str) -> list[str]:
    """Faults of a checkpoint of two steps in an engine of other weights, of validation between steps, of a reset."""
    faults = []
    how: dict[str, Any] = {"optimizer": OPTIMIZER | {"qk_clip": 0.01}, "precision": precision, **MODEL}
    how["mixer"] = ["tnl", "llama"]
    with tiny.mesh_on(axes, rank, init_method) as mesh:
        engine = tiny.engine_in(mesh, **how)
        begun = {shard.box: shard.data.clone() for shard in engine.owned_shards()}
        tiny.train(engine, 0, 2)
        Saver(Path(folder), mesh).save(engine, step=2, common={}, facts={})
        before = of_model(engine)
        with engine.read_weights():
            loss = engine.forward_only(tiny.step_batches(5, mesh)).mean
        faults += tiny.differing(before, of_model(engine))
        if loss == engine.forward_only(tiny.step_batches(5, mesh)).mean:
            faults.append("y is read")
        tiny.train(engine, 2, 4)
        other = tiny.engine_in(mesh, seed=7, **how)
        assert Checkpoints(Path(folder), mesh).restore(other) is not None
        faults += [f"restored: {one}" for one in tiny.differing(before, of_model(other))]
        with other.read_weights():
            if other.forward_only(tiny.step_batches(5, mesh)).mean != loss:
                faults.append("another loss of the weights that are read")
        tiny.train(other, 2, 4)
        faults += tiny.differing(tiny.own_state(engine), tiny.own_state(other))
        squares = 4 * tiny.LR**2
        if other.counters() != engine.counters() or engine.counters()["schedulefree_lr_squares"] != squares:
            faults.append(f"{engine.counters()} and {other.counters()}")
        # Weights alone: all three are those that were saved.
        third = tiny.engine_in(mesh, seed=7, **how)
        assert Checkpoints(Path(folder), mesh).restore(third, weights_only=True) is not None
        with third.read_weights():
            if third.forward_only(tiny.step_batches(5, mesh)).mean != loss:
                faults.append("another loss of the weights alone")
        if third.forward_only(tiny.step_batches(5, mesh)).mean != loss:
            faults.append("weights alone are not trained from what was read")
        third.reset_optimizer()
        shards = {shard.box: shard.data for shard in third.owned_shards()}
        for box in shards:
            key = box.key.partition(".")[2]
            if box.key.startswith("z.") and not shards[box].equal(
                next(
                    data for other, data in shards.items() if (other.key, other.offset) == (f"model.{key}", box.offset)
                )
            ):
                faults.append(f"reset: {box.key}")
        assert begun.keys() == shards.keys()
    return faults


@pytest.mark.parametrize(
    ("axes", "precision"), [((1, 1, 1, 1), "bf16"), ((2, 1, 1, 1), "fp32"), ((2, 2, 1, 1), "bf16")]
)
def test_a_checkpoint_resumes_bit_for_bit(run_ranks: RunRanks, tmp_path: Path, axes: Any, precision: str) -> None:
    assert run_ranks(resumed, axes[0], axes, precision, str(tmp_path)) == [[]] * axes[0]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            {"schedule": "cosine"},
            'optimizer.schedule = "cosine": optimizer.name = "schedulefree" averages in the place of a decay; use '
            '"constant", with optimizer.warmup_steps',
        ),
        (
            {"ema": {"slow": 0.9}},
            'optimizer.ema: the weights of optimizer.name = "schedulefree" are an average already; remove slow',
        ),
    ],
)
def test_what_it_does_by_itself_is_refused(optimizer: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        config_of(**optimizer)
    assert message in str(error.value)


def config_of(**optimizer: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(**MODEL, vocab_size=128),  # type: ignore[arg-type]
        data=DataConfig(store=Path("store"), sequence_length=48),
        optimizer={"name": "schedulefree", "lr": 1e-3, **optimizer},  # type: ignore[arg-type]
        train=TrainConfig(steps=1, global_batch_size=1, precision="bf16"),
    )


def test_a_plan_counts_the_average() -> None:
    config = config_of()
    memory = rank_memory(config, check_layout(config, 1), 0)
    assert memory.optimizer_bytes == 16 * memory.parameters


@pytest.mark.long
def test_a_run_is_resumed_and_exported(workplace: Path, run_ranks: RunRanks, tmp_path: Path) -> None:
    words = ["train", "run.toml", "optimizer.name=schedulefree", "optimizer.schedule=constant", "train.steps=6"]
    words += ["optimizer.warmup_steps=2", "train.validate_every=2", "checkpoint.every=2", "checkpoint.keep_every=2"]
    words += ["parallel.tensor=2"]
    # The second ends at a checkpoint, and goes on as another length of the same run.
    for name, more in (("free-whole", []), ("free-parts", ["train.steps=4"]), ("free-parts", [])):
        results = run_ranks(commands, 2, str(workplace), [[*words, *more, "--run", name]])
        assert [code for code, _ in results[0]] == [0], results
    runs = [RunDirectory(workplace / name) for name in ("free-whole", "free-parts")]
    last = [max(run.checkpoints.glob("step-*6")) for run in runs]
    assert list(differences(*((path, read_headers(path, read_manifest(path))) for path in last))) == []
    losses = [
        {line["step"]: line["validation"] for line in read_metrics(run.metrics) if "validation" in line} for run in runs
    ]
    assert losses[0] == losses[1]
    assert main(["export", str(runs[0].path), "--to", str(tmp_path / "exported")]) == 0
    assert main(["verify", str(runs[0].path)]) == 0
    # Validation was of the weights that were saved: as first weights of a run that does not change them.
    words = ["train", "run.toml", f"train.init_from={runs[0].path}@6", "train.steps=1", "train.validate_every=1"]
    words += ["optimizer.schedule=constant", "optimizer.lr=1e-30", "optimizer.warmup_steps=0", "--run", "again"]
    ((result,),) = run_ranks(commands, 1, str(workplace), [words])
    assert result[0] == 0, result
    (line,) = read_metrics(RunDirectory(workplace / "again").metrics)
    for kind, one in line["validation"].items():
        assert math.isclose(one["loss"], losses[0][6][kind]["loss"], rel_tol=1e-5), kind

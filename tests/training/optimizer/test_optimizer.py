"""The optimizer's interface: others than AdamW train, are saved, resumed and planned, by one line in the table.

Two are added here: Adam whose weight decay is part of the gradient, which Megatron computes, and momentum, of which
nothing is Megatron's.
"""

import itertools
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Self, get_args
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightscale.config.layout import check_layout
from lightscale.config.model import ModelConfig
from lightscale.config.optimizers import OPTIMIZERS, optimizer_class
from lightscale.config.schema import DataConfig, OptimizerConfig, RunConfig, TrainConfig
from lightscale.parallel.engine import Engine
from lightscale.parallel.optimizer_interface import Optimizer, OwnedState
from lightscale.parallel.optimizer_spec import AveragedSpec, MegatronSpec, OptimizerSpec
from lightscale.planning.memory import assumptions, rank_memory
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver
from lightscale.training.optimizer.adamw import AdamConfig, AdamWConfig
from lightscale.training.optimizer.registry import full_checkpoint_bytes, held_bytes, optimizer_spec

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tiny_engine.py")))

RunRanks = Callable[..., list[Any]]
MODEL = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
RATE, DECAY, BETAS, EPS = 0.9, 0.3, (0.8, 0.98), 1e-7


@dataclass(frozen=True, kw_only=True)
class Adam(MegatronSpec):
    options: ClassVar[type[OptimizerConfig]] = OptimizerConfig
    state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    step_counter: ClassVar[str] = "steps of Adam"
    state_description: ClassVar[str] = "two means"

    @classmethod
    def from_config(cls, config: OptimizerConfig, total_steps: int) -> Self:
        return cls(weight_decay=DECAY, grad_clip=0.0)

    def megatron_options(self) -> Mapping[str, Any]:
        betas = {"adam_beta1": BETAS[0], "adam_beta2": BETAS[1]}
        return {"optimizer": "adam", "decoupled_weight_decay": False, "adam_eps": EPS, **betas}


@dataclass(frozen=True, kw_only=True)
class MomentumSpec(OptimizerSpec):
    options: ClassVar[type[OptimizerConfig]] = OptimizerConfig
    state: ClassVar[tuple[str, ...]] = ("velocity",)
    step_counter: ClassVar[str] = "steps of momentum"
    state_description: ClassVar[str] = "the velocity"
    implementation: ClassVar[str] = "module_of_a_test:Momentum"

    @classmethod
    def from_config(cls, config: OptimizerConfig, total_steps: int) -> Self:
        return cls(weight_decay=0.0, grad_clip=0.0)


class Momentum(Optimizer):
    """Of one rank, in fp32."""

    def __init__(self, spec: OptimizerSpec, models: Sequence[Any], config: Any, *, on_gpu: bool) -> None:
        super().__init__(spec, models, config, on_gpu=on_gpu)
        self.velocity = {p: torch.zeros_like(p) for model in models for p in model.parameters()}
        self.steps = 0

    def zero_grad(self) -> None:
        pass

    def gradient_norm(self) -> float:
        return float(torch.cat([p.main_grad.flatten() for p in self.velocity]).norm())  # type: ignore[attr-defined]

    @torch.no_grad()
    def apply(self, lr: float) -> None:
        for parameter, velocity in self.velocity.items():
            velocity.mul_(RATE).add_(parameter.main_grad)  # type: ignore[attr-defined]
            parameter.sub_(lr * velocity)
        self.steps += 1

    def reset(self) -> None:
        self.steps = 0
        for velocity in self.velocity.values():
            velocity.zero_()

    def copy_from_model(self) -> None:
        pass

    def copy_to_model(self) -> None:
        pass

    def owned(self, parameter: Any) -> OwnedState:
        velocity = self.velocity[parameter].view(-1)
        weights = parameter.detach().view(-1)
        return OwnedState(first=0, last=len(velocity), weights=weights, state={"velocity": velocity})

    def counters(self) -> dict[str, int]:
        return {self.spec.step_counter: self.steps}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        self.steps = counters[self.spec.step_counter]


ADDED = {"coupled": "module_of_a_test:Adam", "momentum": "module_of_a_test:MomentumSpec"}
"""As ``OPTIMIZERS`` has them."""
NAMES = [*ADDED, "lion", "ademamix", "muon", "soap"]
_OF_SOAP = ("exp_avg", "exp_avg_sq", "left", "left_basis", "right", "right_basis")
ROWS = {"soap": {f"whole_{name}" for name in _OF_SOAP}}
"""State of whole matrices."""


def held(engine: Engine) -> dict[str, Tensor]:
    """Weights and state, by the names of a checkpoint."""
    shards = {f"{shard.box.key} {shard.box.offset}": shard.data.clone() for shard in engine.owned_shards()}
    return {**shards, "counters": torch.tensor(list(engine.counters().values()))}


def trained(rank: int, world_size: int, init_method: str, folder: str) -> dict[str, dict[str, Any]]:
    """Two steps, a checkpoint, a third step; and that step again from the checkpoint, in an engine of other weights."""
    module: Any = ModuleType("module_of_a_test")
    module.Momentum, module.MomentumSpec, module.Adam = Momentum, MomentumSpec, Adam
    sys.modules["module_of_a_test"] = module
    found = {}
    for name in NAMES:
        with mock.patch.dict(OPTIMIZERS, ADDED):
            spec = optimizer_class(name)
            options: dict[str, Any] = {"optimizer": {"name": name}, **MODEL}
            with tiny.engine_on((1, 1, 1, 1), rank, f"{init_method}-{name}", **options) as engine:
                before, first = tiny.weights(engine), held(engine)
                steps = tiny.train(engine, 0, 2)
                Saver(Path(folder) / name, engine.mesh).save(engine, step=2, common={}, facts={})
                counters = engine.counters()
                steps += tiny.train(engine, 2, 3)
                last = held(engine)
                engine.reset_optimizer()
                reset = held(engine)
            with tiny.engine_on((1, 1, 1, 1), rank, f"{init_method}-{name}-2", seed=7, **options) as engine:
                assert Checkpoints(Path(folder) / name, engine.mesh).restore(engine) is not None
                tiny.train(engine, 2, 3)
                resumed = tiny.differing(last, held(engine))
        found[name] = {
            "weights": [before, *(weights for _, _, weights in steps)],
            "gradients": [gradients for _, gradients, _ in steps],
            "keys": {key.partition(".")[0] for key in last} - {"counters"}
            == {"model", *spec.state, *ROWS.get(name, ())},
            "counters": counters == {spec.step_counter: 2},
            "resumed": resumed,
            # The state of a first step, and the weights of the last.
            "reset": [key for key in tiny.differing(first, reset) if not key.startswith("model.")],
        }
    return found


@pytest.fixture(scope="module")
def optimized(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    (found,) = run_ranks(trained, 1, str(tmp_path_factory.mktemp("optimizers")))
    result: dict[str, dict[str, Any]] = found
    return result


@pytest.mark.parametrize("name", NAMES)
def test_another_optimizer_is_saved_resumed_and_reset(optimized: dict[str, dict[str, Any]], name: str) -> None:
    found = optimized[name]
    assert found["keys"]
    assert found["counters"]
    assert found["resumed"] == []
    assert found["reset"] == []


def test_another_optimizer_of_megatron_computes_by_its_options(optimized: dict[str, dict[str, Any]]) -> None:
    """Weight decay as a part of the gradient, so that the means contain it."""
    weights, gradients = optimized["coupled"]["weights"], optimized["coupled"]["gradients"]
    for name in weights[0]:
        decay = 0.0 if weights[0][name].dim() == 1 or name.endswith("theta") else DECAY
        mean = square = torch.zeros_like(weights[0][name], dtype=torch.float64)
        for step, gradient in enumerate(gradients, start=1):
            before = weights[step - 1][name].double()
            g = gradient[name].double() + decay * before
            mean = mean.lerp(g, 1 - BETAS[0])
            square = square.lerp(g * g, 1 - BETAS[1])
            root = (square / (1 - BETAS[1] ** step)).sqrt() + EPS
            change = -tiny.LR * mean / (1 - BETAS[0] ** step) / root
            assert tiny.error(weights[step][name].double() - before, change) < 1e-3, (step, name)


@pytest.mark.parametrize(
    ("name", "state_bytes", "words"),
    [
        ("adamw", 8, "Adam's two moments"),
        ("lion", 4, "Lion's mean"),
        ("ademamix", 12, "AdEMAMix's two means and second moment"),
    ],
)
def test_a_plan_counts_the_state_of_the_optimizer(name: str, state_bytes: int, words: str) -> None:
    config = RunConfig(
        model=ModelConfig(**MODEL, vocab_size=128),  # type: ignore[arg-type]
        data=DataConfig(store=Path("store"), sequence_length=48),
        optimizer={"name": name, "lr": 1e-3},  # type: ignore[arg-type]
        train=TrainConfig(steps=1, global_batch_size=1, precision="bf16"),
    )
    memory = rank_memory(config, check_layout(config, 1), 0)
    assert memory.optimizer_bytes == (4 + state_bytes) * memory.parameters
    assert any(f"main weights and {words} in fp32" in line for line in assumptions(config))
    # Main weights and state are read and written, the fp32 gradient is read and the bf16 weight written.
    assert (
        optimizer_spec(config).step_traffic_bytes("embedding.word_embeddings.weight") == 2 * (4 + state_bytes) + 4 + 2
    )


def options_of_bytes() -> Iterator[dict[str, Any]]:
    """Of every optimizer: with averages and without, and moments in every format that it has."""
    for name in OPTIMIZERS:
        fields = optimizer_class(name).options.model_fields
        formats = get_args(fields["moments_dtype"].annotation) if "moments_dtype" in fields else (None,)
        for dtype, ema, precision in itertools.product(formats, ({}, {"slow": 0.9, "fast": 0.5}), ("fp32", "bf16")):
            own = {"name": name, "schedule": "constant"} | ({} if dtype is None else {"moments_dtype": dtype})
            # The weights of one optimizer are an average already.
            if not (ema and issubclass(optimizer_class(name), AveragedSpec)):
                yield {"optimizer": {**own, "ema": ema}, "precision": precision, **MODEL}


def owned_and_counted(rank: int, world_size: int, init_method: str) -> list[tuple[dict[str, Any], Any, Any]]:
    """Bytes that a checkpoint gets and those of the optimizer's tensors in memory; and the counts of both."""
    rows = []
    with tiny.mesh_on((1, 1, 1, 1), rank, init_method) as mesh:
        for options in options_of_bytes():
            engine, config = tiny.engine_in(mesh, **options), tiny.config_in(**options)
            saved = sum(shard.data.nbytes for shard in engine.owned_shards())
            held = sum(one.nbytes for one in engine.owned_state())
            if isinstance(engine.optimizer.spec, AveragedSpec):
                # What is owned is the average, beside the weights that a step changes.
                held += 4 * sum(one.numel() for _, one in tiny.named(engine))
            rows.append((options, (saved, held), (full_checkpoint_bytes(config), held_bytes(config))))
    return rows


def test_the_bytes_of_the_state_are_counted(run_ranks: RunRanks) -> None:
    """A start asks the disk, and the limits of the system, for as many."""
    (rows,) = run_ranks(owned_and_counted, 1)
    assert {options["optimizer"]["name"] for options, *_ in rows} == OPTIMIZERS.keys()
    assert [row for row in rows if row[1] != row[2]] == []


def test_a_model_card_has_the_names_of_the_papers() -> None:
    """It prints the names of the classes."""
    assert {name: optimizer_class(name).__name__.lower() for name in OPTIMIZERS} == {name: name for name in OPTIMIZERS}


def test_a_spec_is_read_without_torch() -> None:
    code = (
        "import sys, lightscale.training.optimizer.registry\n"
        "print({'torch', 'megatron', 'numpy'} & set(sys.modules) or 'neither')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr.strip()) == ("neither", "")


@pytest.mark.parametrize(("kind", "is_decoupled"), [(AdamWConfig, True), (AdamConfig, False)])
def test_the_configuration_names_adam_and_adamw(kind: Any, is_decoupled: bool) -> None:
    """The options are what Megatron computes them by; Adam with its decay in the gradient is trained above."""
    config = kind(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.2)
    spec = optimizer_class(config.name).from_config(config, 1)
    options = spec.megatron_options()
    assert (options["decoupled_weight_decay"], options["adam_beta2"], spec.weight_decay) == (is_decoupled, 0.999, 0.2)
    assert spec.state == ("exp_avg", "exp_avg_sq")

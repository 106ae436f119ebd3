"""What tests of engines and checkpoints share: a tiny model on any layout, its steps, and all that a rank holds of it.

Loaded by path (runpy), by pytest's process and by those of the ranks: tests are no package.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.config.schema import AdapterConfig, DataConfig, RunConfig, TaskConfig, TrainConfig
from lightscale.parallel.engine import Engine
from lightscale.parallel.initialization import named_parameters, unpadded_rows
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.parallel.micro_batch import GivenMicroBatch
from lightscale.training.build import build_engine

MODEL = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "vocab_size": 128}
VOCAB_SIZE = 120
TOKENS = 48
LR = 1e-3
Axes = tuple[int, ...]  # processes, tensor, pipeline, sequence, and virtual stages if any; data is the rest


def step_batches(step: int, mesh: Mesh, *, num_ids: int = VOCAB_SIZE) -> list[GivenMicroBatch]:
    """This rank's share of step ``step``: four sequences, two in a micro-batch."""
    tokens = torch.randint(0, num_ids, (4, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    n = TOKENS // mesh.sequence
    own = slice(mesh.sequence_rank * n, (mesh.sequence_rank + 1) * n)
    positions = torch.arange(TOKENS).repeat(2, 1)
    return [
        GivenMicroBatch(
            tokens=rows[:, :-1][:, own],
            labels=rows[:, 1:][:, own],
            loss_mask=torch.ones(2, n),
            positions=positions[:, own],
        )
        for rows in tokens.split(2)[mesh.data_rank :: mesh.data]
    ]


@contextmanager
def mesh_on(axes: Axes, rank: int, init_method: str) -> Iterator[Mesh]:
    # Megatron collects garbage before every save and load, which takes longer than all else here. Once: what is frozen
    # is never freed, and an engine that is done with keeps its groups, whose threads wake 100 times a second.
    if not gc.get_freeze_count():
        gc.freeze()
    world_size, tensor, pipeline, sequence, *virtual_stages = axes
    with start_mesh(
        tensor=tensor,
        pipeline=pipeline,
        sequence=sequence,
        virtual_stages=virtual_stages[0] if virtual_stages else 1,
        device="cpu",
        rank=rank,
        world_size=world_size,
        init_method=init_method,
        timeout_s=60,
    ) as mesh:
        yield mesh


def config_in(
    *,
    seed: int = 0,
    task: str = "causal",
    precision: Any = "auto",
    optimizer: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    adapter: dict[str, Any] | None = None,
    **model: Any,
) -> RunConfig:
    """``optimizer``: keys of [optimizer] beside the learning rate; ``train``: further ones of [train]."""
    return RunConfig(
        model=ModelConfig(**{**MODEL, **model}),
        data=DataConfig(store=Path("store"), sequence_length=TOKENS),
        optimizer={"lr": LR, **(optimizer or {})},  # type: ignore[arg-type]
        train=TrainConfig(
            steps=6, global_batch_size=4, micro_batch_size=2, seed=seed, precision=precision, **(train or {})
        ),
        task=TaskConfig(name=task),
        adapter=AdapterConfig(**(adapter or {})),
    )


def engine_in(mesh: Mesh, *, num_ids: int = VOCAB_SIZE, dtype: torch.dtype | None = None, **options: Any) -> Engine:
    """Of ``config_in``. ``dtype``: torch.float64 for gradients without an optimizer."""
    config = config_in(**options)
    vocab_size = min(num_ids, config.model.vocab_size)
    return build_engine(config, mesh, vocab_size=vocab_size, trainable=True, dtype=dtype)


@contextmanager
def engine_on(axes: Axes, rank: int, init_method: str, **options: Any) -> Iterator[Engine]:
    """Of ``engine_in``, on a mesh of its own."""
    with mesh_on(axes, rank, init_method) as mesh:
        yield engine_in(mesh, **options)


def train(engine: Engine, first: int, last: int) -> list[tuple[float, dict[str, Tensor], dict[str, Tensor]]]:
    """Loss, gradients and weights after each of the steps; whole tensors of all ranks, by global name."""
    records = []
    for step in range(first, last):
        num_ids: Any = engine.chunks[0].vocab_size
        loss = engine.forward_backward(step_batches(step, engine.mesh, num_ids=num_ids)).mean
        names = {id(parameter): name for name, parameter in named(engine)}
        gradients = gather(engine, {names[id(p)]: (p, gradient) for _, p, gradient in engine.gradients()})
        engine.step(LR)
        records.append((loss, gradients, weights(engine)))
    return records


def main_weights(engine: Engine) -> dict[str, Tensor]:
    """The weights that the optimizer steps, of a rank that owns all of them."""
    optimizer: Any = engine.optimizer
    return {name: optimizer.owned(parameter).weights.clone().view(parameter.shape) for name, parameter in named(engine)}


def optimizer_step(engine: Engine, step: int, lr: float = LR) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    """Gradients of step ``step``, their norm, and the main weights behind it, of a rank that owns all of them."""
    engine.forward_backward(step_batches(step, engine.mesh))
    names = {id(parameter): name for name, parameter in named(engine)}
    gradients = {names[id(p)]: gradient.clone() for _, p, gradient in engine.gradients()}
    return gradients, engine.step(lr), main_weights(engine)


def named(engine: Engine) -> Iterator[tuple[str, Any]]:
    for chunk in engine.chunks:
        yield from named_parameters(chunk)


def weights(engine: Engine) -> dict[str, Tensor]:
    return gather(engine, {name: (weight, weight.detach()) for name, weight in named(engine)})


def gather(engine: Engine, own: dict[str, tuple[Any, Tensor]]) -> dict[str, Tensor]:
    """The unsplit tensors of all stages."""
    mesh = engine.mesh
    of_stage = {name: whole(parameter, tensor, mesh) for name, (parameter, tensor) in own.items()}
    stages: list[Any] = [None] * mesh.pipeline
    dist.all_gather_object(stages, of_stage, group=mesh.groups.pp)
    return {name: tensor for stage in stages for name, tensor in stage.items()}


def whole(parameter: Any, own: Tensor, mesh: Mesh) -> Tensor:
    """The unsplit tensor that the tensor ranks hold parts of, without padding."""
    if mesh.tensor == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return own.clone()
    parts = [torch.empty_like(own) for _ in range(mesh.tensor)]
    dist.all_gather(parts, own.contiguous(), group=mesh.groups.tp)
    stacked = [part.chunk(parameter.partition_stride, dim=parameter.partition_dim) for part in parts]
    found = torch.cat([part for parts in zip(*stacked, strict=True) for part in parts], dim=parameter.partition_dim)
    rows = unpadded_rows(parameter)
    assert rows is None or not found[rows:].any(), "padding of the vocabulary is zeros, and has no gradient"
    return found if rows is None else found[:rows]


def own_state(engine: Engine) -> dict[str, Any]:
    """Everything that this rank holds: weights, the optimizer's fp32 weights, means and counters."""
    optimizer: Any = engine.optimizer
    state: dict[str, Any] = {name: parameter.detach().clone() for name, parameter in named(engine)}
    for number, part in enumerate(optimizer.megatron.chained_optimizers):
        for order, group in enumerate(part.optimizer.param_groups):
            state[f"{number} group {order}"] = {
                # Those two are set before every step from the schedule and the engine's constants.
                key: value
                for key, value in group.items()
                if key not in ("params", "lr", "weight_decay")
            }
            for index, parameter in enumerate(group["params"]):
                state[f"{number} {order} {index}"] = parameter.detach().clone()
                for key, value in part.optimizer.state[parameter].items():
                    state[f"{number} {order} {index} {key}"] = value.clone()
    return state


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Keys under which two states are not bitwise the same."""
    return sorted(a.keys() ^ b.keys()) + [
        f"{key}: {a[key]} and {b[key]}"
        for key in a.keys() & b.keys()
        if not (torch.equal(a[key], b[key]) if isinstance(a[key], Tensor) else a[key] == b[key])
    ]


def error(found: Tensor, expected: Tensor) -> float:
    """RMSE(difference) / RMSE(expected)."""
    difference, size = (found.double() - expected.double()).norm(), expected.double().norm()
    # A gradient that is exactly zero, as that of HGRN2's lower bounds in a first layer, must be zero everywhere.
    return float(difference / size) if size else float(difference)

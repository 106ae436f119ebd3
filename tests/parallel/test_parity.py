"""N ranks equal one rank: the parity rule, for every architecture and a hybrid, on every axis.

(a) Along the one-process run's own trajectory (every layout loads its weights before each step): the loss to 1e-6 and
    every reduced gradient to 1e-5 in fp32, both to 1e-10 in fp64.
(b) Run freely: three optimizer steps to 1e-6 in loss and 1e-5 in weights; from then on the difference is at most ten
    times that of a control, the one-process run with one weight changed by one unit in the last place.

The models have eight heads, because with few of them it is badly conditioned whatever the layout: a document's first
token mixes only with itself, and where its q·k almost cancels in all heads the norm behind the mixer magnifies rounding
(with one head the one-process run itself was up to 8e-3 from fp64 in a gradient; with eight, below 5e-6).

The learning rate is that of configs/quickstart.toml, warm-up included. Errors of tensors are RMSE(difference) /
RMSE(reference). Batches have document boundaries, masked labels that differ by rank, and padding rows in the
vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightscale.config import ModelConfig
from lightscale.config_files import load
from lightscale.models.language_model import LanguageModel, transformer_config
from lightscale.models.registry import MIXERS, mixer_class
from lightscale.parallel.engine import AdamW, Engine
from lightscale.parallel.initialization import draw_weights, named_parameters, shard
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.training.schedule import learning_rate

# Every spawn has its own, shorter limit; a slow machine must not be taken for a hang.
pytestmark = pytest.mark.timeout(900)

MODELS = {
    name: ModelConfig(
        mixer=mixer,
        # With four layers each of two stages has one that HGRN2's table of lower bounds gets a gradient from.
        num_layers=4 if name == "hgrn2" else 2,
        width=64,
        num_heads=8,
        glu_width=96,
        vocab_size=128,
        norm="rmsnorm" if name == "llama" else "srmsnorm",
    )
    for name, mixer in {**{name: name for name in MIXERS}, "hybrid": ["tnl", "llama"]}.items()
}
VOCAB_SIZE = 120  # the last 8 rows are padding
TOKENS = 96
SHIPPED = load(Path(__file__).parents[2] / "configs" / "quickstart.toml")
AXES = tuple[int, int, int]  # tensor, pipeline, sequence; data is the rest
CASE = tuple[str, AXES]  # name of a model, layout
ONE: AXES = (1, 1, 1)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    positions: Tensor


def step_batches(step: int, mesh: Mesh) -> list[MicroBatch]:
    """This rank's share of a global batch of 8 sequences, as micro-batches of 2."""
    generator = torch.Generator().manual_seed(step)
    micro = []
    for _ in range(4):
        tokens = torch.randint(0, VOCAB_SIZE, (2, TOKENS + 1), generator=generator)
        positions = torch.arange(TOKENS).repeat(2, 1)
        # A document boundary anywhere, often at the edges of sequence ranks, in one row only.
        start = int(torch.randint(1, TOKENS, (1,), generator=generator))
        for cut in {start, (TOKENS // 2, TOKENS // 2 - 1, TOKENS // 2 + 1, TOKENS // 4)[step % 4]}:
            positions[0, cut:] = torch.arange(TOKENS - cut)
        mask = (torch.rand(2, TOKENS, generator=generator) > 0.2).float()
        micro.append((tokens, mask, positions))
    n = TOKENS // mesh.sequence
    own = slice(mesh.sequence_rank * n, (mesh.sequence_rank + 1) * n)
    return [
        MicroBatch(
            tokens=tokens[:, :-1][:, own],
            labels=tokens[:, 1:][:, own],
            loss_mask=mask[:, own],
            positions=positions[:, own],
        )
        for tokens, mask, positions in micro[mesh.data_rank :: mesh.data]
    ]


@contextmanager
def engine_on(
    case: CASE, rank: int, world_size: int, init_method: str, dtype: torch.dtype, seed: int = 0
) -> Iterator[Engine]:
    name, (tensor, pipeline, sequence) = case
    model_config = MODELS[name]
    with start_mesh(
        tensor=tensor,
        pipeline=pipeline,
        sequence=sequence,
        device="cpu",
        rank=rank,
        world_size=world_size,
        init_method=init_method,
        timeout_s=60,
    ) as mesh:
        config = transformer_config(model_config, mesh, dtype)
        model = LanguageModel(
            config,
            model_config,
            vocab_size=VOCAB_SIZE,
            mesh=mesh,
            pre_process=mesh.groups.pp.rank() == 0,
            post_process=mesh.is_last_stage,
        )
        draw_weights(model, seed=seed, tensor_rank=mesh.groups.tp.rank(), tensor_size=mesh.tensor)
        yield Engine(model, config, mesh, sequence_length=TOKENS, micro_batch_size=2, adamw=AdamW())


def whole(parameter: Any, own: Tensor, mesh: Mesh) -> Tensor:
    """The unsplit tensor that the tensor ranks hold parts of."""
    if mesh.tensor == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return own.clone()
    parts = [torch.empty_like(own) for _ in range(mesh.tensor)]
    dist.all_gather(parts, own.contiguous(), group=mesh.groups.tp)
    stacked = [part.chunk(parameter.partition_stride, dim=parameter.partition_dim) for part in parts]
    return torch.cat([piece for pieces in zip(*stacked, strict=True) for piece in pieces], dim=parameter.partition_dim)


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: whole(p, p.detach(), engine.mesh) for name, p in named_parameters(engine.module)}


def gradients(engine: Engine) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in named_parameters(engine.module)}
    return {names[id(p)]: whole(p, gradient, engine.mesh) for _, p, gradient in engine.gradients()}


def set_weights(engine: Engine, new: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in named_parameters(engine.module):
            parameter.copy_(shard(new[name], parameter, engine.mesh.groups.tp.rank(), engine.mesh.tensor))
    if engine.optimizer is not None:
        engine.optimizer.reload_model_params()


def error(found: Tensor, expected: Tensor) -> float:
    difference, size = (found.double() - expected.double()).norm(), expected.double().norm()
    # A gradient that is exactly zero, as that of HGRN2's lower bounds in a first layer, must be zero everywhere.
    return float(difference / size) if size else float(difference)


def record(
    rank: int, world_size: int, init_method: str, path: str, dtype: torch.dtype, names: list[str], steps: int
) -> None:
    """The one-process run of each model: weights before, loss and gradients of every step."""
    trajectories = {}
    for name in names:
        with engine_on((name, ONE), rank, world_size, f"{init_method}-{name}", dtype) as engine:
            trajectories[name] = trajectory = []
            for step in range(steps):
                before = weights(engine)
                sums = engine.forward_backward(step_batches(step, engine.mesh))
                trajectory.append((before, sums.mean, gradients(engine)))
                if engine.optimizer is not None:
                    engine.step(learning_rate(SHIPPED.optimizer, step + 1, SHIPPED.total_steps))
    torch.save(trajectories, path)


def along(
    rank: int, world_size: int, init_method: str, path: str, dtype: torch.dtype, cases: list[CASE]
) -> dict[CASE, list[tuple[float, dict[str, float]]]]:
    """Rule (a): for each case and step, the loss's difference and each gradient's error on this rank.

    The gradient norm that the optimizer clips by stands among the gradients, as ``norm``.
    """
    trajectories = torch.load(path)
    found = {}
    for number, case in enumerate(cases):
        with engine_on(case, rank, world_size, f"{init_method}-{number}", dtype, seed=1) as engine:
            found[case] = []
            for step, (before, loss, expected) in enumerate(trajectories[case[0]]):
                set_weights(engine, before)
                sums = engine.forward_backward(step_batches(step, engine.mesh))
                own = {name: error(gradient, expected[name]) for name, gradient in gradients(engine).items()}
                if engine.optimizer is not None:
                    norm = torch.stack([gradient.double().norm() for gradient in expected.values()]).norm()
                    own["norm"] = error(torch.tensor(engine.step(0.0)), norm)
                found[case].append((abs(sums.mean - loss), own))
    return found


def freely(
    rank: int, world_size: int, init_method: str, cases: list[CASE], steps: int, nudged: str | None = None
) -> dict[CASE, tuple[list[float], dict[str, Tensor]]]:
    """Rule (b): the losses of ``steps`` steps, and the weights after three; ``nudged`` names the control's weight."""
    found = {}
    for number, case in enumerate(cases):
        with engine_on(case, rank, world_size, f"{init_method}-{number}", torch.float32) as engine:
            if nudged is not None:
                start = weights(engine)
                flat = start[nudged].view(-1)
                flat[7] = torch.nextafter(flat[7], torch.tensor(torch.inf))
                set_weights(engine, start)
            losses, after_three = [], {}
            for step in range(steps):
                losses.append(engine.forward_backward(step_batches(step, engine.mesh)).mean)
                engine.step(learning_rate(SHIPPED.optimizer, step + 1, SHIPPED.total_steps))
                if step == 2:
                    after_three = weights(engine)
            found[case] = (losses, after_three)
    return found


NUDGED = ("decoder.layers.0.self_attention.in_proj.weight", "decoder.layers.0.mlp.linear_fc1.weight")
RunRanks = Callable[..., list[Any]]
TWO = [(1, 1, 2), (1, 1, 1), (2, 1, 1), (1, 2, 1)]
FOUR = [(1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 1, 2)]
ALL = list(MODELS)


def able(names: list[str], layouts: list[AXES]) -> list[CASE]:
    """The cases that the models do not refuse."""
    return [
        (name, axes)
        for name in names
        for axes in layouts
        if axes[1] == 1 or all("pipeline" in mixer_class(mixer).axes for mixer in MODELS[name].layers)
    ]


def check_along(
    run_ranks: RunRanks, tmp_path: Path, world_size: int, cases: list[CASE], dtype: torch.dtype, steps: int
) -> None:
    path, names = str(tmp_path / "trajectories"), sorted({name for name, _ in cases})
    run_ranks(record, 1, path, dtype, names, steps, timeout_s=240)
    by_rank = run_ranks(along, world_size, path, dtype, cases, timeout_s=300)
    loss_limit, gradient_limit = (1e-10, 1e-10) if dtype == torch.float64 else (1e-6, 1e-5)
    seen: dict[str, set[str]] = {name: set() for name in names}
    for rank, result in enumerate(by_rank):
        assert set(result) == set(cases)
        for case, by_step in result.items():
            assert len(by_step) == steps
            for step, (loss, errors) in enumerate(by_step):
                where = f"rank {rank} of {case}, step {step}"
                assert loss <= loss_limit, f"{where}: loss off by {loss}"
                worst = max(errors, key=lambda name: errors[name])
                assert errors[worst] <= gradient_limit, f"{where}: gradient of {worst} off by {errors[worst]}"
                seen[case[0]] |= set(errors)
    for name, trajectory in torch.load(path).items():
        assert seen[name] - {"norm"} == set(trajectory[0][2]), f"a parameter of {name} was compared on no rank"


def test_two_sequence_ranks_follow_one_for_50_steps(run_ranks: RunRanks, tmp_path: Path) -> None:
    check_along(run_ranks, tmp_path, 2, [("tnl", (1, 1, 2))], torch.float32, steps=50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_ranks_equal_one(run_ranks: RunRanks, tmp_path: Path, dtype: torch.dtype) -> None:
    check_along(run_ranks, tmp_path, 2, able(ALL, TWO), dtype, steps=2)


def test_four_ranks_equal_one_in_fp64(run_ranks: RunRanks, tmp_path: Path) -> None:
    check_along(run_ranks, tmp_path, 4, able(["tnl"], FOUR), torch.float64, steps=2)


@pytest.mark.long
def test_four_ranks_equal_one_for_every_architecture(run_ranks: RunRanks, tmp_path: Path) -> None:
    check_along(run_ranks, tmp_path, 4, able(ALL, FOUR), torch.float64, steps=2)


@pytest.mark.long
def test_two_sequence_ranks_follow_one_for_every_architecture(run_ranks: RunRanks, tmp_path: Path) -> None:
    check_along(run_ranks, tmp_path, 2, able(ALL, [(1, 1, 2)]), torch.float32, steps=20)


def test_three_sequence_ranks_equal_one(run_ranks: RunRanks, tmp_path: Path) -> None:
    check_along(run_ranks, tmp_path, 3, able(ALL, [(1, 1, 3)]), torch.float64, steps=1)


def test_free_runs_stay_within_ten_times_the_control(run_ranks: RunRanks) -> None:
    steps = 25
    one = ("tnl", ONE)
    base, base_weights = run_ranks(freely, 1, [one], steps)[0][one]
    controls = [run_ranks(freely, 1, [one], steps, name)[0][one][0] for name in NUDGED]
    by_rank = run_ranks(freely, 2, able(["tnl"], TWO), steps, timeout_s=240)
    assert all(control != base for control in controls), "a control must differ, or it allows nothing"
    for result in by_rank:
        for case, (losses, after_three) in result.items():
            for step in range(3):
                assert abs(losses[step] - base[step]) <= 1e-6, f"{case}, step {step}"
            for name, tensor in after_three.items():
                assert error(tensor, base_weights[name]) <= 1e-5, f"{case}, {name}"
            allowed = 1e-6
            for step in range(steps):
                allowed = max(allowed, *(10 * abs(control[step] - base[step]) for control in controls))
                assert abs(losses[step] - base[step]) <= allowed, f"{case}, step {step}"


def test_the_harness_notices_a_wrong_gradient(run_ranks: RunRanks, tmp_path: Path) -> None:
    """A trajectory whose gradients are off by one part in a thousand must fail."""
    path = tmp_path / "trajectories"
    run_ranks(record, 1, str(path), torch.float32, ["tnl"], 1)
    trajectories = torch.load(path)
    name = "decoder.layers.1.self_attention.in_proj.weight"
    trajectories["tnl"][0][2][name] *= 1.001
    torch.save(trajectories, path)
    case = ("tnl", ONE)
    result = run_ranks(along, 1, str(path), torch.float32, [case])[0]
    assert result[case][0][1][name] > 1e-5

"""SOAP: steps beside the paper in fp64, layouts beside one process bit by bit, plans, checkpoints, refusals."""

import math
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.config.layout import check_layout
from lightscale.config.model import ModelConfig
from lightscale.config.schema import DataConfig, RunConfig, TrainConfig
from lightscale.errors import UserError
from lightscale.models.accounting import parameter_shapes
from lightscale.models.mup import mup_scales
from lightscale.parallel.matrices.sharing import whole_state_bytes
from lightscale.parallel.model_shards import weight_shards
from lightscale.planning.hardware import H100
from lightscale.planning.memory import assumptions, rank_memory
from lightscale.planning.step_cost import CostModel
from lightscale.study.counts import count
from lightscale.training.checkpoints.differences import differences
from lightscale.training.checkpoints.manifest import read_manifest
from lightscale.training.checkpoints.reader import _foreign_state as foreign_state
from lightscale.training.checkpoints.reader import read_headers
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver
from lightscale.training.optimizer.registry import optimizer_spec
from lightscale.training.optimizer.soap import SOAP

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tiny_engine.py")))
tnl = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tnl_matrices.py")))
drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "drawing.py")))

RunRanks = Callable[..., list[Any]]
HEADS, WIDTH = 4, 32
MODEL = {"num_layers": 2, "hidden_size": WIDTH, "num_heads": HEADS, "intermediate_size": 24}
STEPS, DECAY, CLIP = 10, 0.3, 0.5
LAYER = "decoder.layers.0.self_attention"


def orthogonal(columns: Tensor) -> Tensor:
    """By Gram and Schmidt, twice, column by column; the signs of columns decide nothing."""
    found: list[Tensor] = []
    for column in columns.unbind(1):
        for _ in range(2):
            for other in found:
                column = column - (other @ column) * other
        found.append(column / column.norm())
    return torch.stack(found, dim=1)


class Paper:
    """Algorithm 3 of arXiv 2409.11321 for one matrix; ``sides``: those with a preconditioner."""

    def __init__(
        self, shape: tuple[int, int], *, frequency: int, betas: tuple[float, float], sides: tuple[bool, bool]
    ) -> None:
        self.frequency, self.betas, self.sides = frequency, betas, sides
        self.mean, self.square = torch.zeros(2, *shape, dtype=torch.float64)
        self.factors = [torch.zeros(n, n, dtype=torch.float64) for n in shape]
        self.bases = [torch.eye(n, dtype=torch.float64) for n in shape]

    def update(self, g: Tensor, step: int) -> Tensor:
        first, second = self.betas
        left, right = self.bases
        self.mean = first * self.mean + (1 - first) * g
        self.square = second * self.square + (1 - second) * (left.T @ g @ right) ** 2
        mean, square = (left.T @ self.mean @ right) / (1 - first**step), self.square / (1 - second**step)
        update = left @ (mean / (square.sqrt() + 1e-8)) @ right.T
        for side, product in enumerate((g @ g.T, g.T @ g)):
            self.factors[side] = second * self.factors[side] + (1 - second) * product
            if self.sides[side] and step % self.frequency == 0:
                # The floor keeps the eigenvectors.
                floor = 1e-6 * self.factors[side].trace() * torch.eye(len(product), dtype=torch.float64)
                self.bases[side] = orthogonal((self.factors[side] + floor) @ self.bases[side])
        return update


@pytest.mark.parametrize(
    ("shape", "longest", "frequency"),
    [((6, 9), 10, 1), ((9, 6), 10, 3), ((6, 9), 8, 2), ((9, 6), 8, 1), ((6, 9), 5, 1)],
)
def test_ten_steps_are_those_of_the_paper_in_fp64(shape: tuple[int, int], longest: int, frequency: int) -> None:
    spec = SOAP(precondition_frequency=frequency, max_precond_dim=longest, betas=(0.9, 0.97))
    state = {name: torch.zeros(one, dtype=torch.float64) for name, one in spec.whole_state(*shape).items()}
    sides = shape[0] <= longest, shape[1] <= longest
    assert ("left" in state, "right_basis" in state) == sides
    paper = Paper(shape, frequency=frequency, betas=(0.9, 0.97), sides=sides)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, STEPS + 1):
        # Of unequal sizes in some basis.
        gradient = torch.randn(*shape, generator=generator, dtype=torch.float64)
        gradient = gradient * torch.logspace(0, -1, shape[1], dtype=torch.float64)
        found, expected = spec.matrix_direction(gradient, state, step), paper.update(gradient, step)
        assert tiny.error(found, expected) < 1e-9, step
    for side, basis in zip(("left_basis", "right_basis"), paper.bases, strict=True):
        if side in state:
            assert tiny.error(state[side].abs(), basis.abs()) < 1e-7


def test_the_basis_becomes_that_of_the_eigenvectors() -> None:
    """Of a preconditioner that stays: what it is in the basis becomes diagonal."""
    generator = torch.Generator().manual_seed(0)
    vectors = orthogonal(torch.randn(8, 8, generator=generator, dtype=torch.float64))
    gradient = (vectors * 2.0 ** -torch.arange(8.0, dtype=torch.float64)) @ vectors.T
    spec = SOAP(precondition_frequency=1)
    state = {name: torch.zeros(one, dtype=torch.float64) for name, one in spec.whole_state(8, 8).items()}
    for step in range(1, 40):
        spec.matrix_direction(gradient, state, step)
    basis, factor = state["left_basis"], state["left"]
    turned = basis.T @ factor @ basis
    assert (turned - turned.diag().diag()).norm() < 1e-6 * factor.norm()
    assert tiny.error(basis.T @ basis, torch.eye(8)) < 1e-12


OPTIMIZER = {
    "name": "soap",
    "weight_decay": DECAY,
    "grad_clip": CLIP,
    "precondition_frequency": 3,
    "adamw": ["*.gate_up.weight"],
    "groups": {
        "slow": {"parameters": ["embedding.*", "*.q_proj.weight"], "lr_factor": 0.25, "betas": [0.9, 0.9]},
        "still": {"parameters": ["*.linear_fc2.weight"], "weight_decay": 0.0},
    },
}


def trained(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    found = {}
    for number, precision in enumerate(("fp32", "bf16")):
        with tiny.mesh_on((1, 1, 1, 1), rank, f"{init_method}-{number}") as mesh:
            engine = tiny.engine_in(mesh, optimizer=OPTIMIZER, precision=precision, **MODEL)
            before = tiny.main_weights(engine)
            steps = [tiny.optimizer_step(engine, step) for step in range(STEPS)]
            found[precision] = (before, steps)
    return found


def test_ten_steps_of_an_engine_are_those_of_the_paper(run_ranks: RunRanks) -> None:
    """Which rows are a matrix, groups, decay, clipping. fp32 has few digits of the least eigenvalues: RMS of each."""
    (found,) = run_ranks(trained, 1)
    for precision, (start, steps) in found.items():
        papers: dict[str, list[Paper]] = {}
        means: dict[str, Tensor] = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in start.items()}
        squares = {name: mean.clone() for name, mean in means.items()}
        before, clipped = start, 0
        for step, (gradients, norm, after) in enumerate(steps, start=1):
            share = min(1.0, CLIP / (norm + 1e-6))
            clipped += share < 1
            for name, weight in before.items():
                g = gradients[name].double() * share
                is_slow = "q_proj" in name or "embedding" in name
                betas = (0.9, 0.9) if is_slow else (0.95, 0.95)
                update = torch.empty_like(g)
                if tnl.is_matrix(name):
                    targets, own = tnl.parts_of(name, HEADS, update), tnl.parts_of(name, HEADS, g)
                    flat = [part.reshape(-1, part.size(-1)) for part in own]
                    paper = papers.setdefault(
                        name, [Paper(tuple(one.shape), frequency=3, betas=betas, sides=(True, True)) for one in flat]
                    )
                    for target, one, state in zip(targets, flat, paper, strict=True):
                        target.copy_(state.update(one, step).view(target.shape))
                else:
                    means[name] = betas[0] * means[name] + (1 - betas[0]) * g
                    squares[name] = betas[1] * squares[name] + (1 - betas[1]) * g * g
                    root = (squares[name] / (1 - betas[1] ** step)).sqrt() + 1e-8
                    update = means[name] / (1 - betas[0] ** step) / root
                decays = name.endswith(".weight") and "norm" not in name and "linear_fc2" not in name
                lr = tiny.LR * (0.25 if is_slow else 1.0)
                expected = -lr * (update + DECAY * decays * weight.double())
                off = tiny.error(after[name].double() - weight.double(), expected)
                assert off < 0.03, f"{precision}, step {step}: {name} by {off}"
            before = after
        assert clipped, "the limit of the norm is reached"


LAYOUTS = [(2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (2, 1, 1, 1)]
GIVEN = {"name": "soap", "grad_clip": 0.0, "precondition_frequency": 2, "ema": {"slow": 0.9}}


def give_gradients(engine: Any, step: int) -> None:
    """Gradients that are the same on all layouts, in the place of reduced ones."""
    by_pointer = {parameter.data_ptr(): parameter for _, parameter in tiny.named(engine)}
    starts = sorted(by_pointer)
    for shard in weight_shards(engine.chunks, copies=True):
        start = max(one for one in starts if one <= shard.data.data_ptr())
        parameter = by_pointer[start]
        first = (shard.data.data_ptr() - start) // parameter.element_size()
        generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, shard.box.key)) % 1000)
        whole = torch.randn(shard.box.shape, generator=generator) * torch.logspace(0, -2, shard.box.shape[-1])
        cut = whole[tuple(slice(at, at + size) for at, size in zip(shard.box.offset, shard.box.sizes, strict=True))]
        parameter.main_grad.view(-1)[first : first + cut.numel()] = cut.reshape(-1)


def given_steps(engine: Any, first: int, last: int) -> list[dict[str, Tensor]]:
    found = []
    for step in range(first, last):
        # Buffers, and weights that are gathered in a forward pass.
        engine.forward_backward(tiny.step_batches(step, engine.mesh))
        give_gradients(engine, step)
        engine.step(tiny.LR)
        engine.gather_weights()
        found.append(tiny.weights(engine))
    return found


def on_layouts(
    rank: int, world_size: int, init_method: str, layouts: list[Any], folder: str, mixer: str, dtype: str
) -> list[str]:
    return [
        fault
        for number, axes in enumerate(layouts)
        for fault in _faults_on(axes, rank, f"{init_method}-{number}", Path(folder), mixer, dtype)
    ]


def _faults_on(axes: Any, rank: int, init_method: str, folder: Path, mixer: str, dtype: str) -> Iterator[str]:
    """Of six steps of the same gradients, the last three behind a checkpoint of one process: all bits are compared."""
    with tiny.mesh_on(axes, rank, init_method) as mesh:
        options: dict[str, Any] = {"optimizer": GIVEN | {"moments_dtype": dtype}, "mixer": mixer, **MODEL}
        engine, one = tiny.engine_in(mesh, **options), folder / "one"
        found = given_steps(engine, 0, 3)
        if mesh.world_size == 1:
            Saver(one, mesh).save(engine, step=3, common={}, facts={})
        else:
            engine = tiny.engine_in(mesh, seed=7, **options)
            assert Checkpoints(one, mesh).restore(engine) is not None
            again = folder / f"again-{axes}"
            Saver(again, mesh).save(engine, step=3, common={}, facts={})
            yield from (f"{axes}: {row}" for row in differences(*(_headers(path) for path in (one, again))))
        found += given_steps(engine, 3, 6)
        last = folder / f"last-{axes}"
        Saver(last, mesh).save(engine, step=6, common={}, facts={})
        if mesh.world_size == 1:
            torch.save(found, folder / "one.pt")
            return
        yield from (
            f"{axes} behind: {row}" for row in differences(_headers(folder / "last-(1, 1, 1, 1)"), _headers(last))
        )
        for step, (own, expected) in enumerate(zip(found, torch.load(folder / "one.pt"), strict=True)):
            yield from (
                f"{axes}, step {step}: {key}" for key, weight in expected.items() if not torch.equal(own[key], weight)
            )


def _headers(folder: Path) -> tuple[Path, Any]:
    path = next(folder.glob("step-*"))
    return path, read_headers(path, read_manifest(path))


CASES = [("tnl", "fp32"), pytest.param("gated-delta-net", "bf16", marks=pytest.mark.long)]


@pytest.mark.parametrize(("mixer", "dtype"), CASES)
def test_layouts_take_the_same_steps_from_the_same_gradients(
    run_ranks: RunRanks, tmp_path: Path, mixer: str, dtype: str
) -> None:
    """And resume each other, and write the same state. Rows of one matrix are on two ranks."""
    assert run_ranks(on_layouts, 1, [(1, 1, 1, 1)], str(tmp_path), mixer, dtype) == [[]]
    layouts = drawing.some("layouts of SOAP", LAYOUTS, 2)
    assert run_ranks(on_layouts, 2, layouts, str(tmp_path), mixer, dtype) == [[], []]


@pytest.mark.long  # in short: two ranks
def test_four_ranks_take_the_same_steps(run_ranks: RunRanks, tmp_path: Path) -> None:
    layouts = [(4, 2, 1, 1), (4, 2, 2, 1), (4, 1, 2, 2)]
    assert run_ranks(on_layouts, 1, [(1, 1, 1, 1)], str(tmp_path), "tnl", "fp32") == [[]]
    assert run_ranks(on_layouts, 4, layouts, str(tmp_path), "tnl", "fp32") == [[]] * 4


def without_bases(rank: int, world_size: int, init_method: str, folder: str) -> None:
    """Moments of a basis are not taken for those of elements."""
    with tiny.mesh_on((1, 1, 1, 1), rank, init_method) as mesh:
        optimizer = {"name": "soap", "lr": 1e-3}
        Saver(Path(folder), mesh).save(tiny.engine_in(mesh, optimizer=optimizer), step=1, common={}, facts={})
        other = tiny.engine_in(mesh, optimizer={**optimizer, "max_precond_dim": 1})
        with pytest.raises(UserError, match="has other state of the optimizer: whole_"):
            Checkpoints(Path(folder), mesh).restore(other)


def test_a_checkpoint_with_bases_is_not_resumed_without_any(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(without_bases, 1, str(tmp_path))


def config(**optimizer: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(**MODEL, mixer="tnl", vocab_size=128),  # type: ignore[arg-type]
        data=DataConfig(store=Path("store"), sequence_length=48),
        optimizer={"name": "soap", "lr": 1e-3, **optimizer},  # type: ignore[arg-type]
        train=TrainConfig(steps=1, global_batch_size=4, precision="bf16"),
    )


@pytest.mark.parametrize(("moments_dtype", "moment"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("longest", [10_000, 24])
def test_a_plan_counts_state_of_matrices(moments_dtype: str, moment: int, longest: int) -> None:
    run = config(moments_dtype=moments_dtype, max_precond_dim=longest)
    spec, shapes = optimizer_spec(run), parameter_shapes(run.model)
    bases = 0
    for name, shape in shapes.items():
        if tnl.is_matrix(name) or "gate_up" in name:
            for part in tnl.parts_of(name, HEADS, torch.empty(shape)):
                sides = part.reshape(-1, part.size(-1)).shape
                # The preconditioner and its basis, in fp32.
                bases += sum(8 * n * n for n in sides if n <= longest)
    every = sum(math.prod(shape) for shape in shapes.values())
    memory = rank_memory(run, check_layout(run, 1), 0)
    assert memory.optimizer_bytes == (4 + 2 * moment) * every + bases
    assert any("each matrix on one rank of its stage" in line for line in assumptions(run))
    assert count(run).kept_bytes == memory.optimizer_bytes
    # Of two ranks the one with more is counted.
    halves = whole_state_bytes(spec, shapes, 2)
    assert sum(halves) == whole_state_bytes(spec, shapes, 1)[0] and min(halves) > 0
    elements = sum(math.prod(shapes[name]) for name in shapes.keys() - spec.matrices.keys())  # type: ignore[attr-defined]
    of_two = rank_memory(run, check_layout(run, 2), 0).optimizer_bytes
    assert of_two == -(-(4 * every + 2 * moment * elements) // 2) + max(halves)


def test_a_plan_counts_the_time_of_refreshes() -> None:
    often, rarely = (
        CostModel(one, 48, H100).predict(check_layout(one, 1)).optimizer_s
        for one in (config(precondition_frequency=1), config(precondition_frequency=100))
    )
    assert often > rarely


def test_mup_has_the_rates_of_adam() -> None:
    run = config()
    wide = run.model_copy(
        update={"model": ModelConfig(**MODEL, mixer="tnl", vocab_size=128, mup={"base_hidden_size": 16})}
    )  # type: ignore[arg-type]
    scales, expected = optimizer_spec(wide).scales, mup_scales(wide.model)
    assert {name: (one.lr, one.eps) for name, one in scales.items()} == {
        name: (one.lr, one.eps) for name, one in expected.items()
    }
    assert scales[f"{LAYER}.q_proj.weight"].lr == 0.5


def test_a_pattern_that_names_no_matrix_is_refused() -> None:
    with pytest.raises(UserError) as error:
        optimizer_spec(config(adamw=["*.gate"]))
    assert str(error.value).startswith('optimizer.adamw: "*.gate" is the name of no matrix of the model')


def test_a_checkpoint_has_rows_of_state_for_matrices_alone() -> None:
    weights = {"matrix": (4, 4), "norm": (4,)}
    whole = {"model": weights, "exp_avg": {"norm": (4,)}, "whole_left": {"matrix": (16,)}}
    assert all(foreign_state(what, whole, "model") is None for what in whole if what != "model")
    for what, changed, wrong in (
        ("whole_left", {"matrix": (4, 4)}, "matrix"),
        ("whole_left", {"norm": (16,), "matrix": (16,)}, "norm"),
        ("whole_left", {"foreign": (1,), "matrix": (16,)}, "foreign"),
        ("whole_left", {}, "matrix"),
    ):
        damaged = {**whole, what: changed}
        found = {foreign_state(one, damaged, "model") for one in damaged if one != "model"}
        assert wrong in found, (what, changed)

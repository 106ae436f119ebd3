"""The engine: loss sums, gradients of the mean over valid tokens, and AdamW, against direct computations."""

import runpy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.models.language_model import LanguageModel, transformer_config
from lightscale.parallel.engine import Engine, LossSums
from lightscale.parallel.initialization import draw_weights
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.parallel.micro_batch import GivenMicroBatch
from lightscale.training.optimizer.adamw import AdamW

HELPERS = Path(__file__).parents[1] / "helpers"
tiny, parity = (SimpleNamespace(**runpy.run_path(str(HELPERS / f"{name}.py"))) for name in ("tiny_engine", "parity"))

RunRanks = Callable[..., list[Any]]
MODEL = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, intermediate_size=48, vocab_size=64, norm="rmsnorm")
VOCAB_SIZE, TOKENS, BUCKETS = 60, 22, 4


def build(mesh: Mesh, optimizer: AdamW | None, dtype: torch.dtype = torch.float32) -> Engine:
    config = transformer_config(MODEL, mesh, dtype)
    stage = mesh.groups.pp.rank()
    model = LanguageModel(
        config, MODEL, vocab_size=VOCAB_SIZE, mesh=mesh, pre_process=stage == 0, post_process=mesh.is_last_stage
    )
    draw_weights(model, seed=0, tensor_rank=mesh.groups.tp.rank(), tensor_size=mesh.tensor)
    return Engine(model, config, mesh, optimizer=optimizer, position_buckets=BUCKETS)


def global_batch(step: int) -> Any:
    """Four sequences, of which a different share is masked each; (4, TOKENS)."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB_SIZE, (4, TOKENS + 1), generator=generator)
    mask = (torch.rand(4, TOKENS, generator=generator) < torch.tensor([[0.1], [0.9], [0.5], [0.7]])).float()
    positions = torch.arange(TOKENS).repeat(4, 1)
    positions[1, 7:] = torch.arange(TOKENS - 7)
    return GivenMicroBatch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=mask, positions=positions)


def own_share(batch: Any, mesh: Mesh) -> list[Any]:
    n = TOKENS // mesh.sequence
    columns = slice(mesh.sequence_rank * n, (mesh.sequence_rank + 1) * n)
    rows = [slice(first, first + 2) for first in (0, 2)][mesh.data_rank :: mesh.data]
    fields = ("tokens", "labels", "loss_mask", "positions")
    return [GivenMicroBatch(**{field: getattr(batch, field)[own, columns] for field in fields}) for own in rows]


def direct_losses(model: Any, batch: Any) -> Tensor:
    """(4, TOKENS), from the logits by PyTorch."""
    logits = model(batch.tokens, batch.positions)[..., :VOCAB_SIZE]
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none").view(4, TOKENS)


# ----- losses and gradients ------------------------------------------------------------------------------------------


def direct(rank: int, world_size: int, init_method: str) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
    """What every layout must find: the losses of all tokens, and the gradients of their masked mean. Then what one
    process finds."""
    with start_mesh(device="cpu", init_method=init_method) as mesh:
        model, batch = build(mesh, None, torch.float64).module, global_batch(0)
        losses = direct_losses(model, batch)
        ((losses * batch.loss_mask).sum() / batch.loss_mask.double().sum()).backward()
        gradients: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
        return losses.detach(), gradients, run_engine(mesh)


def on_two(rank: int, world_size: int, init_method: str) -> dict[tuple[int, int, int], dict[str, Any]]:
    found = {}
    for axes in ((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)):
        with start_mesh(
            tensor=axes[0],
            pipeline=axes[1],
            sequence=axes[2],
            device="cpu",
            rank=rank,
            world_size=world_size,
            init_method=f"{init_method}-{axes}",
        ) as mesh:
            found[axes] = run_engine(mesh)
    return found


def run_engine(mesh: Mesh) -> dict[str, Any]:
    engine = build(mesh, AdamW(), torch.float64)
    batches = own_share(global_batch(0), mesh)
    # Masked labels count for nothing.
    changed = [replace(batch, labels=torch.where(batch.loss_mask == 0, 3, batch.labels)) for batch in batches]
    sums = engine.forward_backward(changed)
    names = {id(parameter): name for name, parameter in tiny.named(engine)}
    gradients = tiny.gather(engine, {names[id(p)]: (p, gradient) for _, p, gradient in engine.gradients()})
    return {"backward": sums, "gradients": gradients, "forward": engine.forward_only(batches)}


def expected_sums(losses: Tensor, mask: Tensor) -> LossSums:
    """By plain loops."""
    buckets = [[0.0, 0] for _ in range(BUCKETS)]
    for row in range(4):
        for index in range(TOKENS):
            if mask[row, index]:
                bucket = buckets[index * BUCKETS // TOKENS]
                bucket[0] += float(losses[row, index])
                bucket[1] += 1
    total, count = sum(loss for loss, _ in buckets), sum(number for _, number in buckets)
    return LossSums(loss=total, tokens=int(count), by_bucket=tuple((loss, int(number)) for loss, number in buckets))


def test_losses_and_gradients_are_those_of_the_mean_over_valid_tokens(run_ranks: RunRanks) -> None:
    ((losses, gradients, alone),) = run_ranks(direct, 1)
    wanted = expected_sums(losses, global_batch(0).loss_mask)
    assert len({count for _, count in wanted.by_bucket}) > 1, "buckets of equal counts show less"
    for axes, found in [((1, 1, 1), alone), *(item for result in run_ranks(on_two, 2) for item in result.items())]:
        for sums in (found["backward"], found["forward"]):
            assert sums.tokens == wanted.tokens, axes
            assert sums.loss == pytest.approx(wanted.loss, rel=1e-12), axes
            assert sums.mean == pytest.approx(wanted.loss / wanted.tokens, rel=1e-12), axes
            for (loss, count), (wanted_loss, wanted_count) in zip(sums.by_bucket, wanted.by_bucket, strict=True):
                assert (count, loss) == (wanted_count, pytest.approx(wanted_loss, rel=1e-12)), axes
        assert found["gradients"].keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert tiny.error(found["gradients"][name], gradient) < 1e-10, (axes, name)


def validated(rank: int, world_size: int, init_method: str, layouts: list[str]) -> list[list[tuple[float, int]]]:
    """The mean of 1, 2 and 3 micro-batches, and its labels."""
    found = []
    for _, case, mesh in parity.on_meshes(layouts, rank, world_size, init_method):
        with parity.engine_in(mesh, case, torch.float64) as engine:
            batches = [*parity.step_batches(0, mesh, case), *parity.step_batches(1, mesh, case)]
            advanced = Counter[int]()
            sums = [
                engine.forward_only(batches[:count], advance=partial(advanced.update, [count])) for count in (1, 2, 3)
            ]
            # The launcher hears of every micro-batch.
            assert all(advanced[count] >= count for count in (1, 2, 3))
            found.append([(one.mean, one.tokens) for one in sums])
    return found


def test_any_number_of_micro_batches_is_validated_on_interleaved_stages(run_ranks: RunRanks) -> None:
    """Of Megatron, only what fills groups of as many as there are stages."""
    ((expected,),) = run_ranks(validated, 1, ["tnl"])
    assert len({tokens for _, tokens in expected}) == 3
    for (found,) in run_ranks(validated, 2, ["tnl pipeline=2 virtual_stages=2"]):
        for (mean, tokens), (one, of_one) in zip(found, expected, strict=True):
            assert tokens == of_one and mean == pytest.approx(one, rel=1e-12)


def test_the_mean_of_no_tokens() -> None:
    assert LossSums(loss=0.0, tokens=0).mean == 0.0


# ----- AdamW ---------------------------------------------------------------------------------------------------------

BETAS, EPS, DECAY = (0.8, 0.95), 1e-6, 0.3
# Below every norm, above every norm, and none.
TIGHT, LOOSE = 0.5, 1e3
CLIPS = (TIGHT, LOOSE, 0.0)
RATES = [1e-2, 3e-3, 7e-3]
SPARED = {
    "decoder.final_layernorm.weight",
    "decoder.layers.0.input_layernorm.weight",
    "decoder.layers.0.pre_mlp_layernorm.weight",
    "decoder.layers.0.self_attention.lrpe.theta",
    "decoder.layers.1.input_layernorm.weight",
    "decoder.layers.1.pre_mlp_layernorm.weight",
}


def optimize(rank: int, world_size: int, init_method: str) -> tuple[Any, Any]:
    with start_mesh(device="cpu", init_method=init_method) as mesh:
        return {clip: three_steps(mesh, clip) for clip in CLIPS}, step_without_gradients(mesh)


def three_steps(mesh: Mesh, clip: float) -> tuple[list[dict[str, Tensor]], list[tuple[dict[str, Tensor], float]]]:
    """The weights before, between and after, and what each step found: gradients, and the norm that it reported."""
    engine = build(mesh, AdamW(betas=BETAS, eps=EPS, weight_decay=DECAY, grad_clip=clip))
    weights, records = [copies(engine)], []
    for step, lr in enumerate(RATES):
        engine.forward_backward(own_share(global_batch(step), mesh))
        gradients = {name: gradient.clone() for name, _, gradient in engine.gradients()}
        records.append((gradients, engine.step(lr)))
        weights.append(copies(engine))
    return weights, records


def step_without_gradients(mesh: Mesh) -> list[dict[str, Tensor]]:
    """The weights before and after: only weight decay moves anything."""
    engine = build(mesh, AdamW(weight_decay=DECAY))
    before = copies(engine)
    engine.forward_backward(own_share(global_batch(0), mesh))
    for _, _, gradient in engine.gradients():
        gradient.zero_()
    assert engine.step(0.1) == 0.0
    return [before, copies(engine)]


def copies(engine: Engine) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


@pytest.fixture(scope="module")
def optimized(run_ranks: RunRanks) -> tuple[Any, Any]:
    (found,) = run_ranks(optimize, 1)
    result: tuple[Any, Any] = found
    return result


@pytest.mark.parametrize("clip", CLIPS)
def test_adamw(optimized: tuple[Any, Any], clip: float) -> None:
    weights, records = optimized[0][clip]
    means = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in weights[0].items()}
    squares = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in weights[0].items()}
    for step, ((gradients, norm), lr) in enumerate(zip(records, RATES, strict=True), start=1):
        true_norm = float(torch.cat([g.double().flatten() for g in gradients.values()]).norm())
        assert norm == pytest.approx(true_norm, rel=1e-5), "the norm before clipping, also when it is not clipped"
        scale = min(1.0, clip / (true_norm + 1e-6)) if clip else 1.0
        assert (scale < 1) == (clip == TIGHT), "clipping must have something to do, and leave alone what is small"
        for name, before in weights[step - 1].items():
            g = gradients[name].double() * scale
            means[name].lerp_(g, 1 - BETAS[0])
            squares[name].lerp_(g * g, 1 - BETAS[1])
            mean = means[name] / (1 - BETAS[0] ** step)
            square = squares[name] / (1 - BETAS[1] ** step)
            kept = 1.0 if name in SPARED else 1 - lr * DECAY
            after = before.double() * kept - lr * mean / (square.sqrt() + EPS)
            change = weights[step][name].double() - before.double()
            assert tiny.error(change, after - before.double()) < 2e-4, (step, name)


def test_norms_and_angles_are_not_decayed(optimized: tuple[Any, Any]) -> None:
    before, after = optimized[1]
    for name in before:
        if name in SPARED:
            assert torch.equal(before[name], after[name]), name
        else:
            torch.testing.assert_close(after[name], before[name] * (1 - 0.1 * DECAY), rtol=1e-6, atol=0)
    assert set(before) >= SPARED

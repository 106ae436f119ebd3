"""The engine against models, gradients and AdamW written out plainly in fp64: what layouts agree on could be wrong.

Gradients in fp64 to rounding; and whole trajectories in fp32, whose distance from the plain fp64 one is held against
that of controls, plain fp64 runs that begin at the same weights rounded another way.
"""

import dataclasses
import functools
import itertools
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

HELPERS = Path(__file__).parents[1] / "helpers"
parity = SimpleNamespace(**runpy.run_path(str(HELPERS / "parity.py")))
plain = SimpleNamespace(**runpy.run_path(str(HELPERS / "plain_models.py")))
drawing = SimpleNamespace(**runpy.run_path(str(HELPERS / "drawing.py")))
mixers = SimpleNamespace(**runpy.run_path(str(HELPERS / "plain_mixers.py")))

STEPS = 50
WEIGHT_DECAY = 0.1
Weights = dict[str, Tensor]
RunRanks = Callable[..., list[Any]]


def plain_loss(name: str, weights: Weights, step: int) -> Tensor:
    """Mean loss over the valid tokens of all micro-batches of `step`."""
    model = parity.MODELS[name]
    mix = functools.partial(mixers.MIX[name], model)
    losses, count = [], 0.0
    for tokens, mask, positions in parity.whole_batches(step):
        for row, row_mask, row_positions in zip(tokens, mask, positions, strict=True):
            starts = [*(row_positions == 0).nonzero().flatten().tolist(), parity.TOKENS]
            lengths = [stop - start for start, stop in itertools.pairwise(starts)]
            logits = [
                plain.document_logits(model, weights, ids, mix, mixers.ENCODE.get(name))
                for ids in row[:-1].split(lengths)
            ]
            used = torch.cat(logits)[:, : parity.VOCAB_SIZE]
            own = torch.logsumexp(used, dim=1) - used[torch.arange(parity.TOKENS), row[1:]]
            losses.append((own * row_mask).sum())
            count += float(row_mask.sum())
    return torch.stack(losses).sum() / count


def plain_gradients(name: str, weights: Weights, step: int) -> tuple[float, Weights]:
    leaves = {key: weight.double().clone().requires_grad_() for key, weight in weights.items()}
    loss = plain_loss(name, leaves, step)
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return float(loss.detach()), dict(zip(leaves, found, strict=True))


def rate(step: int) -> float:
    found: float = parity.learning_rate(parity.SHIPPED.optimizer, step + 1, parity.SHIPPED.total_steps)
    return found


def plain_trajectory(name: str, start: Weights) -> tuple[list[tuple[float, float]], Weights]:
    """AdamW (arXiv 1711.05101) with clipping: (loss, norm) of every step, and the weights at the end."""
    beta1, beta2, eps, clip = 0.9, 0.95, 1e-8, 1.0
    weights = {key: weight.double().clone() for key, weight in start.items()}
    mean = {key: torch.zeros_like(weight) for key, weight in weights.items()}
    square = {key: torch.zeros_like(weight) for key, weight in weights.items()}
    steps = []
    for step in range(STEPS):
        loss, gradients = plain_gradients(name, weights, step)
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        # Megatron adds 1e-6 to the norm, as PyTorch's clipping does.
        scale = min(1.0, clip / (norm + 1e-6))
        for key, weight in weights.items():
            gradient = gradients[key] * scale
            mean[key] = beta1 * mean[key] + (1 - beta1) * gradient
            square[key] = beta2 * square[key] + (1 - beta2) * gradient**2
            step_mean = mean[key] / (1 - beta1 ** (step + 1))
            step_square = square[key] / (1 - beta2 ** (step + 1))
            weight -= rate(step) * (step_mean / (step_square.sqrt() + eps) + WEIGHT_DECAY * decays(key) * weight)
        steps.append((loss, norm))
    return steps, weights


def decays(name: str) -> bool:
    """Matrices of projections and the embedding; not norms, angles, Toeplitz modes and lower bounds."""
    return name.endswith(".weight") and "norm" not in name


def engine_gradients(rank: int, world_size: int, init_method: str, cases: list[str]) -> dict[str, Any]:
    found = {}
    for text, case, mesh in parity.on_meshes(cases, rank, world_size, init_method):
        with parity.engine_in(mesh, case, torch.float64) as engine:
            parity.set_weights(engine, parity.disturbed(engine))
            before = parity.weights(engine)
            loss = engine.forward_backward(parity.step_batches(0, engine.mesh, case)).mean
            found[text] = (before, loss, parity.gradients(engine))
    return found


@pytest.mark.timeout(300)
def test_gradients_in_fp64_are_those_of_the_plain_model(run_ranks: RunRanks) -> None:
    names = drawing.some("plain models", list(mixers.MIX), len(mixers.MIX) // 2)
    alone = run_ranks(engine_gradients, 1, names)[0]
    apart = [f"{name} {axis}=2" for name in names for axis in ("tensor", "sequence")]
    cases = {**alone, **run_ranks(engine_gradients, 2, apart)[0]}
    # They begin with the same weights, so that the slow one is computed once.
    plain_ones = {name: plain_gradients(name, weights, 0) for name, (weights, _, _) in alone.items()}
    for case, (weights, loss, gradients) in cases.items():
        name = case.split()[0]
        assert all(torch.equal(weight, weights[key]) for key, weight in alone[name][0].items()), case
        expected_loss, expected = plain_ones[name]
        assert loss == pytest.approx(expected_loss, rel=1e-12), case
        assert gradients.keys() == expected.keys()
        for key, gradient in gradients.items():
            error = float((gradient - expected[key]).norm() / expected[key].norm())
            # A common factor of all gradients shows in no comparison of layouts with each other.
            assert error < 1e-11, f"{case}: {key} is off by {error:.1e}"


def norms(rank: int, world_size: int, init_method: str, cases: list[str]) -> list[tuple[float, float]]:
    """The engine's norm in fp32, and that of the very gradients that it had, in fp64."""
    found = []
    for number, text in enumerate(cases):
        case = parity.Case.of(text)
        with parity.engine_on(case, rank, world_size, f"{init_method}-{number}", torch.float32) as engine:
            engine.forward_backward(parity.step_batches(0, engine.mesh, case))
            norm = engine.gradient_norm()
            squares = sum(float(gradient.double().square().sum()) for gradient in parity.gradients(engine).values())
            found.append((norm, math.sqrt(squares)))
    return found


def test_the_norm_of_the_gradients_is_summed_in_fp64(run_ranks: RunRanks) -> None:
    ranks = run_ranks(norms, 2, ["tnl", "hgrn2 tensor=2", "lightnet sequence=2"])
    for norm, expected in ranks[0]:
        assert norm == pytest.approx(expected, rel=1e-13)
    assert [norm for norm, _ in ranks[0]] == [norm for norm, _ in ranks[1]]


def engine_trajectories(rank: int, world_size: int, init_method: str, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        case = parity.Case(model=name)
        with parity.engine_on(case, rank, world_size, f"{init_method}-{name}", torch.float32) as engine:
            engine.optimizer.spec = dataclasses.replace(engine.optimizer.spec, weight_decay=WEIGHT_DECAY)
            parity.set_weights(engine, parity.disturbed(engine))
            before, steps = parity.weights(engine), []
            for step in range(STEPS):
                loss = engine.forward_backward(parity.step_batches(step, engine.mesh, case)).mean
                steps.append((loss, engine.step(rate(step))))
            found[name] = (before, steps, parity.weights(engine))
    return found


def nudged(weights: Weights) -> Weights:
    """Every weight one unit in the last place of fp32 up, down, or not at all."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: weight.double() * (1 + torch.randint(-1, 2, weight.shape, generator=generator) * 2.0**-23)
        for name, weight in weights.items()
    }


def distance(found: Weights, expected: Weights, start: Weights) -> float:
    """RMSE(difference) / RMSE(what training has changed), over all weights."""
    off = sum(float((found[name].double() - weight).square().sum()) for name, weight in expected.items())
    moved = sum(float((weight - start[name].double()).square().sum()) for name, weight in expected.items())
    return math.sqrt(off / moved)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    # One is enough for the optimizer: gradients are those of the plain model for all.
    "name",
    ["tnl", *(pytest.param(name, marks=pytest.mark.soak) for name in ("lightnet", "cosformer2", "llama"))],
)
def test_a_trajectory_in_fp32_stays_as_near_as_rounding_allows(run_ranks: RunRanks, name: str) -> None:
    (found,) = run_ranks(engine_trajectories, 1, [name], timeout_s=300)
    start, steps, weights = found[name]
    expected_steps, expected = plain_trajectory(name, start)
    for (loss, norm), (expected_loss, expected_norm) in zip(steps[:3], expected_steps[:3], strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-6)
    control = distance(plain_trajectory(name, nudged(start))[1], expected, start)
    off = distance(weights, expected, start)
    print(f"{name}: after {STEPS} steps {off:.1e} from the plain fp64 run, control {control:.1e}")
    # An fp32 run rounds at every operation, the control only once.
    assert off < 10 * control

"""Ten steps of every optimizer beside its equations in fp64, and layouts beside one process."""

import math
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.training.checkpoints.differences import differences
from lightscale.training.checkpoints.manifest import read_manifest
from lightscale.training.checkpoints.reader import read_headers
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver

HELPERS = Path(__file__).parents[2] / "helpers"
tiny = SimpleNamespace(**runpy.run_path(str(HELPERS / "tiny_engine.py")))
drawing = SimpleNamespace(**runpy.run_path(str(HELPERS / "drawing.py")))

RunRanks = Callable[..., list[Any]]
Weights = dict[str, Tensor]
MODEL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 24}
STEPS, DECAY, CLIP = 10, 0.3, 0.5
OPTIONS: dict[str, dict[str, Any]] = {
    "lion": {"betas": [0.9, 0.98]},
    "ademamix": {"betas": [0.9, 0.98, 0.999], "slow_warmup_steps": 6, "alpha": 4.0},
    # Roundings of gradients, which layouts differ in, would decide those of bf16.
    "muon": {"newton_schulz_precision": "fp32"},
    "schedulefree": {},
    # An eigenbasis for the third step.
    "soap": {"precondition_frequency": 2},
}
"""Of each optimizer that lightscale computes itself."""


def optimizer_of(name: str) -> dict[str, Any]:
    # Averages are part of the state that layouts give each other; one optimizer is an average itself.
    ema = {} if name == "schedulefree" else {"slow": 0.9}
    return {"name": name, "weight_decay": DECAY, "grad_clip": CLIP, "ema": ema, **OPTIONS[name]}


def lion(g: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
    """Algorithm 2 of arXiv 2302.06675."""
    mean = state.get("m", torch.zeros_like(g))
    state["m"] = 0.98 * mean + 0.02 * g
    return torch.sign(0.9 * mean + 0.1 * g)


def ademamix(g: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
    """Equations of sections 3 and 3.1 of arXiv 2409.03137; half-lives are linear in the step."""
    begin, end = (math.log(0.5) / math.log(rate) - 1 for rate in (0.9, 0.999))
    done = min(1.0, step / 6)
    slow_rate = 0.5 ** (1 / ((1 - done) * begin + done * end + 1))
    fast = 0.9 * state.get("fast", 0 * g) + (1 - 0.9) * g
    slow = slow_rate * state.get("slow", 0 * g) + (1 - slow_rate) * g
    square = 0.98 * state.get("square", 0 * g) + (1 - 0.98) * g * g
    state.update(fast=fast, slow=slow, square=square)
    return (fast / (1 - 0.9**step) + 4.0 * done * slow) / ((square / (1 - 0.98**step)).sqrt() + 1e-8)


PLAIN = {"lion": lion, "ademamix": ademamix}
"""Of elements alone; matrices are in test_muon.py and test_soap.py, averaged steps in test_schedulefree.py."""


def decays(name: str) -> bool:
    """Matrices of projections and the embedding; not norms, angles and decays."""
    return name.endswith(".weight") and "norm" not in name


def trained(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    """Gradients and main weights of ten steps, in fp32 and in bf16."""
    found = {}
    for number, precision in enumerate(("fp32", "bf16")):
        with tiny.mesh_on((1, 1, 1, 1), rank, f"{init_method}-{number}") as mesh:
            for name in PLAIN:
                engine = tiny.engine_in(mesh, optimizer=optimizer_of(name), precision=precision, **MODEL)
                before = tiny.main_weights(engine)
                steps = [tiny.optimizer_step(engine, step) for step in range(STEPS)]
                rounded = {key: weight.detach().clone() for key, weight in tiny.named(engine)}
                found[f"{name} {precision}"] = (before, steps, rounded)
    return found


def test_ten_steps_are_those_of_the_equations(run_ranks: RunRanks) -> None:
    """The gradients are the engine's; means, roots and weights are computed in fp64."""
    (found,) = run_ranks(trained, 1)
    for case, (start, steps, rounded) in found.items():
        plain = PLAIN[case.split()[0]]
        states: dict[str, dict[str, Tensor]] = {name: {} for name in start}
        clipped = 0
        before = start
        for step, (gradients, norm, after) in enumerate(steps, start=1):
            exact = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
            assert norm == pytest.approx(exact, rel=1e-6)
            share = min(1.0, CLIP / (norm + 1e-6))
            clipped += share < 1
            for name, weight in before.items():
                update = plain(gradients[name].double() * share, states[name], step)
                expected = -tiny.LR * (update + DECAY * decays(name) * weight.double())
                change = after[name].double() - weight.double()
                # Signs of what is zero but for rounding are any.
                off = (change - expected).abs() > 1e-3 * tiny.LR
                assert off.double().mean() < 2e-3, f"{case}, step {step}: {name}"
            before = after
        assert clipped, "the limit of the norm is reached"
        for name, weight in before.items():
            held = rounded[name]
            assert torch.equal(weight.to(held.dtype), held), f"{case}: {name} is not the main weight, rounded"
        assert (torch.bfloat16 in {weight.dtype for weight in rounded.values()}) == case.endswith("bf16")


LAYOUTS = [(2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (2, 1, 1, 1)]


def on_layouts(rank: int, world_size: int, init_method: str, layouts: list[Any], folder: str) -> list[str]:
    """Faults: three steps beside those of one process, whose checkpoint every layout resumes and writes again."""
    return [
        fault
        for number, axes in enumerate(layouts)
        for fault in _faults_on(axes, rank, f"{init_method}-{number}", Path(folder))
    ]


def _faults_on(axes: Any, rank: int, init_method: str, folder: Path) -> Iterator[str]:
    with tiny.mesh_on(axes, rank, init_method) as mesh:
        for name in OPTIONS:
            options: dict[str, Any] = {"optimizer": optimizer_of(name), **MODEL}
            engine = tiny.engine_in(mesh, **options)
            steps = [weights for _, _, weights in tiny.train(engine, 0, 2)]
            one = folder / f"{name}-one"
            if mesh.world_size == 1:
                Saver(one, mesh).save(engine, step=2, common={}, facts={})
                with pytest.raises(UserError, match=rf"its counters are .*{name}_steps.*, .* are adam_steps"):
                    Checkpoints(one, mesh).restore(tiny.engine_in(mesh, **MODEL))
            # Of other weights, which the checkpoint replaces.
            resumed = engine if mesh.world_size == 1 else tiny.engine_in(mesh, seed=7, **options)
            if mesh.world_size > 1:
                assert Checkpoints(one, mesh).restore(resumed) is not None
                again = folder / f"{name}-{axes}"
                Saver(again, mesh).save(resumed, step=2, common={}, facts={})
                pair = [_headers(next(path.glob("step-*"))) for path in (one, again)]
                yield from (f"{name} on {axes}: {row}" for row in differences(*pair))
            ((_, _, last),) = tiny.train(resumed, 2, 3)
            found = [*steps, last]
            if mesh.world_size == 1:
                torch.save(found, folder / f"{name}.pt")
                continue
            for step, (own, expected) in enumerate(zip(found, torch.load(folder / f"{name}.pt"), strict=True)):
                for key, weight in expected.items():
                    # As above: of elements without a gradient, rounding decides the direction.
                    off = float(((own[key] - weight).abs() > 0.02 * tiny.LR).double().mean())
                    if off > 0.01:
                        yield f"{name} on {axes}, step {step}: {off:.1%} of {key} are apart"


def _headers(path: Path) -> tuple[Path, Any]:
    return path, read_headers(path, read_manifest(path))


def test_layouts_train_as_one_process_and_resume_each_other(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(on_layouts, 1, [(1, 1, 1, 1)], str(tmp_path)) == [[]]
    layouts = drawing.some("layouts of optimizers", LAYOUTS, 2)
    assert run_ranks(on_layouts, 2, layouts, str(tmp_path)) == [[], []]

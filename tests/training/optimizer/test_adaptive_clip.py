"""The adaptive limit of gradient norms: its statistics beside plain sums, its steps, layouts and checkpoints."""

import math
import random
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightscale.config.schema import AdaptiveClipConfig
from lightscale.parallel.adaptive_clip import AdaptiveClip
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tiny_engine.py")))

RunRanks = Callable[..., list[Any]]
CONFIG = AdaptiveClipConfig(z_score=2.0, decay=0.8, warmup_steps=6)


def weighted(norms: list[float], config: AdaptiveClipConfig) -> tuple[float, float]:
    """Mean and deviation with the weights written out: those of the beginning share what the later ones leave."""
    later = max(0, len(norms) - config.warmup_steps)
    begun = len(norms) - later
    weights = np.array(
        [config.decay**later / begun] * begun
        + [(1 - config.decay) * config.decay ** (later - 1 - i) for i in range(later)]
    )
    assert weights.sum() == pytest.approx(1)
    mean = float(weights @ norms)
    return mean, math.sqrt(weights @ (np.array(norms) - mean) ** 2)


def test_statistics_are_those_of_plain_sums() -> None:
    generator, clip, remaining, spikes = random.Random(0), AdaptiveClip(CONFIG), [], 0
    for step in range(60):
        norm = generator.uniform(0.8, 1.2) * (0.5 if step > 40 else 1) * ((step % 17 == 16 and 9) or 1)
        found = clip.clipped(norm)
        if step < CONFIG.warmup_steps:
            assert clip.limit == math.inf and found == norm
        else:
            mean, deviation = weighted(remaining, CONFIG)
            assert clip.limit == pytest.approx(mean + 2 * deviation)
            z = (norm - mean) / deviation
            spikes += z > 2
            assert found == pytest.approx(mean + 4 / z * deviation if z > 2 else norm)
        remaining.append(min(norm, clip.limit))
        clip.take_in(norm)
    assert 3 <= spikes < 20


@pytest.mark.parametrize("rise", [1.5, 2.0, 10.0])
def test_norms_that_stay_larger_are_clipped_for_a_while_only(rise: float) -> None:
    """As those of a branch with other data."""
    generator, clip = random.Random(1), AdaptiveClip(AdaptiveClipConfig())
    is_clipped = []
    for step in range(1000):
        norm = generator.gauss(1.0, 0.05) * (rise if step >= 400 else 1)
        is_clipped.append(norm > clip.limit)
        clip.take_in(norm)
    assert sum(is_clipped[400:440]) > 10, "at first the rise is a spike"
    assert sum(is_clipped[800:]) < 20


def test_equal_norms_and_norms_that_are_not_finite_give_no_limit() -> None:
    clip = AdaptiveClip(CONFIG)
    for norm in (math.nan, *[0.0] * 8, math.inf):
        clip.take_in(norm)
    # A group that had no gradients so far is not held at 0.
    assert clip.state() == {"norm_steps": 8, "mean": 0.0, "variance": 0.0} and clip.clipped(3.0) == 3.0
    clip.take_in(3.0)
    assert 0 < clip.clipped(9.0) < 9.0
    other = AdaptiveClip(CONFIG)
    other.load(clip.state())
    assert other.state() == clip.state() and other.limit == clip.limit < math.inf


MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 24,
    "norm": "rmsnorm",
    "tie_word_embeddings": True,
}
# Without a memory, and with a large eps, steps are a tenth of the gradients.
EPS, RATE, STEPS, SAVED, WARMUP, FIXED = 50.0, 5.0, 7, 5, 3, 0.05
SPIKES = {4: 300.0, 6: 100.0}
"""Factors of the gradients of some steps, from 0."""
SECTION = {
    "betas": [0.0, 0.0],
    "eps": EPS,
    "weight_decay": 0.0,
    "grad_clip": 0.0,
    "adaptive_clip": {"warmup_steps": WARMUP, "decay": 0.9},
    "groups": {
        "embeddings": {"parameters": ["embedding.*"], "grad_clip": FIXED},
        "norms": {"parameters": ["*layernorm.weight"], "lr_factor": 0.5},
    },
}


def step(engine: Any, number: int) -> dict[str, Any]:
    """What a step finds and does, of which a skipped one does nothing."""
    engine.forward_backward(tiny.step_batches(number, engine.mesh))
    for model in engine.models:
        for buffer in model.buffers:
            buffer.grad_data.mul_(SPIKES.get(number, 1.0))
    names = {id(parameter): name for name, parameter in tiny.named(engine)}
    gradients = {names[id(p)]: gradient.clone() for _, p, gradient in engine.gradients()}
    before, counters = tiny.weights(engine), engine.counters()
    norm = engine.gradient_norm()
    assert engine.counters() == counters, "statistics change with applied steps alone"
    engine.apply(RATE)
    return {
        "norm": norm,
        "gradients": gradients,
        "changes": {name: weight - before[name] for name, weight in tiny.weights(engine).items()},
        "clippings": dict(engine.optimizer.clippings),
        "counters": engine.counters(),
    }


def on_layouts(rank: int, world_size: int, init_method: str, layouts: list[Any], folder: str) -> list[Any]:
    """Records of the steps of each layout, and of the last ones resumed from the checkpoint of one process."""
    found = []
    for number, axes in enumerate(layouts):
        with tiny.mesh_on(axes, rank, f"{init_method}-{number}") as mesh:
            engine = tiny.engine_in(mesh, optimizer=SECTION, **MODEL)
            records = []
            for i in range(STEPS):
                if i == SAVED and mesh.world_size == 1:
                    Saver(Path(folder), mesh).save(engine, step=SAVED, common={}, facts={})
                records.append(step(engine, i))
            resumed = tiny.engine_in(mesh, seed=7, optimizer=SECTION, **MODEL)
            assert Checkpoints(Path(folder), mesh).restore(resumed) is not None
            found.append((records, resumed.counters(), [step(resumed, i) for i in range(SAVED, STEPS)]))
            resumed.reset_optimizer()
            assert set(resumed.counters().values()) == {0}
            # A run that had no such limit gets one, and one that had it loses it.
            plain = tiny.engine_in(mesh, optimizer={**SECTION, "adaptive_clip": None, "groups": {}}, **MODEL)
            assert Checkpoints(Path(folder), mesh).restore(plain) is not None
            assert plain.counters() == {"adam_steps": SAVED}
    return found


def clip_of(counters: dict[str, float], prefix: str = "grad_clip.") -> dict[str, float]:
    return {key.rpartition(".")[2]: value for key, value in counters.items() if key.rpartition(".")[0] + "." == prefix}


def test_steps_are_clipped_by_the_norms_before_them_on_all_layouts(run_ranks: RunRanks, tmp_path: Path) -> None:
    (((one, kept, resumed),),) = run_ranks(on_layouts, 1, [(1, 1, 1, 1)], str(tmp_path))
    assert kept == one[SAVED - 1]["counters"]
    for own, expected in zip(resumed, one[SAVED:], strict=True):
        assert own["counters"] == expected["counters"] and own["clippings"] == expected["clippings"]
        assert all(torch.equal(own["changes"][name], change) for name, change in expected["changes"].items())
    clips = {None: AdaptiveClip(AdaptiveClipConfig(**SECTION["adaptive_clip"]))}  # type: ignore[arg-type]
    clips["embeddings"] = AdaptiveClip(AdaptiveClipConfig(**SECTION["adaptive_clip"]))  # type: ignore[arg-type]
    for number, record in enumerate(one):
        squares = dict.fromkeys(clips, 0.0)
        for name, gradient in record["gradients"].items():
            group = "embeddings" if name.startswith("embedding.") else None
            squares[group] += float(gradient.double().square().sum())
        assert record["norm"] == pytest.approx(math.sqrt(sum(squares.values())), rel=1e-6)
        for group, square in squares.items():
            clip, norm = clips[group], math.sqrt(square)
            fixed = math.inf if group is None else FIXED
            remaining = min(clip.clipped(norm), fixed)
            assert record["clippings"][group].limit == pytest.approx(min(clip.limit, fixed), rel=1e-5)
            assert record["clippings"][group].is_clipped == (remaining < norm)
            if group is None and number in SPIKES:
                assert remaining < norm, "a spike"
            for name, change in record["changes"].items():
                if name.startswith("embedding.") == (group is not None):
                    g = record["gradients"][name].double() * min(1.0, remaining / norm)
                    factor = 0.5 if name.endswith("layernorm.weight") else 1.0
                    torch.testing.assert_close(
                        change.double(), -factor * RATE * g / (g.abs() + EPS), rtol=2e-4, atol=1e-7
                    )
            clip.take_in(norm)
            prefix = "grad_clip." if group is None else f"grad_clip.{group}."
            assert clip_of(record["counters"], prefix) == pytest.approx(clip.state(), rel=1e-5)
    layouts = [(2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 1)]
    ranks = run_ranks(on_layouts, 2, layouts, str(tmp_path))
    for axes, *of_ranks in zip(layouts, *ranks, strict=True):
        for records, own_kept, own_resumed in of_ranks:
            assert own_kept == kept, axes
            assert len(records) == STEPS and len(own_resumed) == STEPS - SAVED
            for own, first, expected in zip(records, of_ranks[0][0], one, strict=True):
                assert own["counters"] == first["counters"], f"ranks of {axes} differ"
                assert own["counters"] == pytest.approx(expected["counters"], rel=1e-3), axes
                for name, change in expected["changes"].items():
                    # Large steps amplify roundings; another limit would be another factor. The change of a weight near
                    # 1 is a difference of numbers that are 2^-23 apart.
                    distance = (own["changes"][name].double() - change.double()).norm()
                    assert distance < 1e-2 * change.double().norm() + 2**-23 * change.numel() ** 0.5, (axes, name)

"""Weights of one mixer's checkpoint as the start of another's: every pair, hybrids, and any layout."""

import itertools
import runpy
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.models.conversion import conversion
from lightscale.training.build import start_again
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tiny_engine.py")))

pytestmark = pytest.mark.timeout(400)

RunRanks = Callable[..., list[Any]]
Axes = tuple[int, ...]
ONE: Axes = (1, 1, 1, 1)
MODELS: dict[str, dict[str, Any]] = {
    "tnl": {"mixer": "tnl"},
    "hgrn2": {"mixer": "hgrn2"},
    "cosformer2": {"mixer": "cosformer2"},
    "lightnet": {"mixer": "lightnet"},
    "llama": {"mixer": "llama", "norm": "rmsnorm"},
    "hybrid": {"mixer": ["hgrn2", "llama", "tnl", "lightnet"], "norm": "rmsnorm"},
    "narrow": {"mixer": "tnl", "num_heads": 8},
    # More ids, as a mask needs one.
    "larger": {"mixer": "llama", "norm": "rmsnorm", "vocab_size": 192, "tie_word_embeddings": False},
}
PAIRS = [pair for pair in itertools.product(MODELS, MODELS) if pair[0] != pair[1] and pair[0] != "larger"]


def shape(name: str) -> ModelConfig:
    return ModelConfig(**{**tiny.MODEL, **MODELS[name]})


def save(rank: int, world_size: int, init_method: str, folder: str) -> None:
    """A checkpoint of each model after a step, in which every weight has changed."""
    for name, model in MODELS.items():
        with tiny.engine_on(ONE, rank, f"{init_method}-{name}", seed=1, **model) as engine:
            tiny.train(engine, 0, 1)
            Saver(Path(folder) / name, engine.mesh).save(engine, step=1, common={}, facts={}, contents=("weights",))
            torch.save(tiny.weights(engine), f"{folder}/{name}.weights")


def start_from_each(
    rank: int, world_size: int, init_method: str, folder: str, axes: Axes, pairs: Iterable[tuple[str, str]]
) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Of each target the weights that it draws, and those after it was started from each source; on rank 0."""
    found: dict[str, dict[str, dict[str, Tensor]]] = {}
    for target, of_target in itertools.groupby(sorted(pairs, key=lambda pair: pair[1]), key=lambda pair: pair[1]):
        with tiny.engine_on(axes, rank, f"{init_method}-{target}", **MODELS[target]) as engine:
            found[target] = {"drawn": tiny.weights(engine)}
            for source, _ in of_target:
                start_again(engine, 0)
                kept = conversion(shape(source), shape(target))
                checkpoints = Checkpoints(Path(folder) / source, engine.mesh)
                assert checkpoints.restore(engine, weights_only=True, conversion=kept) is not None
                found[target][source] = tiny.weights(engine)
    return found if rank == 0 else {}


@pytest.fixture(scope="module")
def saved(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save, 1, str(folder), timeout_s=200)
    return folder


@pytest.fixture(scope="module")
def on_one(run_ranks: RunRanks, saved: Path) -> dict[str, dict[str, dict[str, Tensor]]]:
    (found,) = run_ranks(start_from_each, 1, str(saved), ONE, PAIRS, timeout_s=300)
    return found


def attention(weights: dict[str, Tensor], layer: int, name: str) -> dict[str, Tensor]:
    """What a layer's mixer has, each matrix by itself: (rows, columns) of all heads."""
    model = shape(name)
    heads, width = model.num_heads, model.head_dim
    prefix = f"decoder.layers.{layer}.self_attention."
    parts = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    for fused, first in (("kv_proj.weight", "k"), ("fv_proj.weight", "f")):
        if fused in parts:
            one, two = parts.pop(fused).view(heads, 2, width, -1).unbind(dim=1)
            parts |= {first: one.reshape(heads * width, -1), "v": two.reshape(heads * width, -1)}
    return parts


def expected_attention(source: dict[str, Tensor], drawn: dict[str, Tensor]) -> dict[str, Tensor]:
    """What has the same name in both, of the same shape, is the source's; the rest is drawn."""
    return {
        key: source[key] if key in source and source[key].shape == value.shape else value
        for key, value in drawn.items()
    }


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_roles_keep_their_weights_and_the_rest_is_drawn(
    source: str, target: str, saved: Path, on_one: dict[str, dict[str, dict[str, Tensor]]]
) -> None:
    given = torch.load(saved / f"{source}.weights")
    drawn, found = on_one[target]["drawn"], on_one[target][source]
    for layer in range(tiny.MODEL["num_layers"]):
        ours, theirs, fresh = (
            attention(weights, layer, name) for weights, name in ((found, target), (given, source), (drawn, target))
        )
        expected = expected_attention(theirs, fresh)
        assert [key for key in expected if not torch.equal(ours[key], expected[key])] == []
        assert torch.equal(ours["q_proj.weight"], theirs["q_proj.weight"])
        assert torch.equal(ours["v"], theirs["v"]), "also where it stood beside other rows"
    embedding = "embedding.word_embeddings.weight"
    given[embedding] = torch.cat([given[embedding], drawn[embedding][len(given[embedding]) :]])
    others = [key for key in found if ".self_attention." not in key]
    assert [key for key in others if not torch.equal(found[key], given.get(key, drawn[key]))] == []
    inner = "decoder.layers.2.mlp.linear_fc1.weight"
    assert not torch.equal(found[inner], drawn[inner])


def start_on_each(
    rank: int, world_size: int, init_method: str, folder: str, layouts: Iterable[Axes], pairs: list[tuple[str, str]]
) -> dict[Axes, dict[str, dict[str, dict[str, Tensor]]]]:
    return {
        axes: start_from_each(rank, world_size, f"{init_method}-{number}", folder, axes, pairs)
        for number, axes in enumerate(layouts)
    }


@pytest.mark.long
def test_every_layout_starts_from_the_same_weights(
    run_ranks: RunRanks, saved: Path, on_one: dict[str, dict[str, dict[str, Tensor]]]
) -> None:
    pairs = [("llama", "tnl"), ("llama", "hgrn2"), ("hgrn2", "hybrid"), ("llama", "narrow"), ("llama", "larger")]
    layouts = [(2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 1)]
    found = run_ranks(start_on_each, 2, str(saved), layouts, pairs, timeout_s=300)[0]
    for axes in layouts:
        for source, target in pairs:
            assert tiny.differing(found[axes][target][source], on_one[target][source]) == [], (axes, source, target)

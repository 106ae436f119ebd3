"""Documents that are grids: LRPE and TPE by axes, in models written out plainly; what does not fit is named."""

import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from lightscale.config.model import GridConfig, ModelConfig
from lightscale.models.layers.grid import coordinates
from lightscale.models.layers.positions import lrpe_angles

plain = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "plain_models.py")))
mixers = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "plain_mixers.py")))

RunRanks = Callable[..., list[Any]]
SHAPE: dict[str, Any] = {"hidden_size": 24, "num_heads": 2, "intermediate_size": 20, "vocab_size": 53}
ROTATED = {
    "decay-attention": {
        "positions": "lrpe",
        "decay": "softplus",
        "scale": False,
        "feature_map": "silu",
        "short_convolution": 2,
    }
}


def stack(grid: GridConfig | None) -> ModelConfig:
    """Every causal mixer with LRPE."""
    mixer = ["tnl", "cosformer2", "lightnet", "decay-attention"]
    return ModelConfig(mixer=mixer, num_layers=4, grid=grid, mixer_options=ROTATED, **SHAPE)


MODELS = {
    # A film.
    "causal": stack(GridConfig(shape=[3, 2, 4])),
    # Images without a token before them.
    "whole": ModelConfig(
        mixer="lightnet",
        num_layers=1,
        grid=GridConfig(shape=[4, 5], leading_tokens=0),
        mixer_options={"lightnet": {"causal": False, "learned_angles": True}},
        **SHAPE,
    ),
    "printed": ModelConfig(
        mixer="lightnet", num_layers=1, grid=GridConfig(shape=[4, 5]), tpe={"form": "printed", "modes": 3}, **SHAPE
    ),
}
MIX = {"tnl": mixers.tnl, "cosformer2": mixers.cosformer2, "decay-attention": mixers.decay_attention}
# Whole grids, and documents that are longer and shorter.
LENGTHS = [[25, 1, 33, 7], [66]]


def measure(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    found = {
        name: plain.initial_and_disturbed(rank, world_size, f"{init_method}-{name}", model, LENGTHS)
        for name, model in MODELS.items()
    }
    for name, grid in (("rows", None), ("one axis", GridConfig(shape=[64]))):
        path = f"{init_method}-{name.replace(' ', '-')}"
        found[name] = plain.initial_and_disturbed(rank, world_size, path, stack(grid), LENGTHS)
    return found


@pytest.fixture(scope="module")
def built(run_ranks: RunRanks) -> dict[str, Any]:
    (found,) = run_ranks(measure, 1)
    return dict(found)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_the_plain_one(built: dict[str, Any], name: str) -> None:
    model = MODELS[name]
    whole = name == "whole"

    def mix(x: Any, weights: Any, layer: int) -> Any:
        of_layer = MIX.get(model.layers[layer], mixers.lightnet_whole if whole else mixers.lightnet)
        return of_layer(model, x, weights, layer)

    rows = plain.batch(model, LENGTHS)
    encode = functools.partial(plain.grid_toeplitz, model)
    plain.assert_equal(built[name], plain.plain_figures(model, built[name]["weights"], rows, mix, encode))


def test_one_axis_is_what_rows_of_tokens_are(built: dict[str, Any]) -> None:
    rows, one = built["rows"], built["one axis"]
    for name in ("logits", "losses"):
        assert torch.equal(rows[name], one[name])
    for kind in ("initial", "weights", "gradients"):
        assert rows[kind].keys() == one[kind].keys()
        assert all(torch.equal(rows[kind][name], one[kind][name]) for name in rows[kind])


def test_every_axis_turns_as_fast_as_the_first() -> None:
    theta = lrpe_angles(2, 12, 3)
    assert all(torch.equal(theta[:, :4], theta[:, 4 * axis : 4 * axis + 4]) for axis in (1, 2))
    torch.testing.assert_close(theta[:, :4].flatten(), 10000.0 ** (-2 * torch.arange(8, dtype=torch.float64) / 8))


def test_leading_tokens_end_the_slice_before_the_grid() -> None:
    grid = GridConfig(shape=[2, 3], leading_tokens=4)
    assert grid.document_tokens == 10
    expected = [[0, 2], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2], [3, 0], [3, 1], [3, 2], [4, 0]]
    assert coordinates(torch.arange(11), grid).tolist() == expected


def test_axes_that_do_not_share_the_channels_are_named() -> None:
    with pytest.raises(ValidationError, match=r"model.grid.shape has 5 axes, which share the 12 channels"):
        ModelConfig(mixer="tnl", num_layers=1, grid=GridConfig(shape=[1, 1, 1, 1, 2]), **SHAPE)

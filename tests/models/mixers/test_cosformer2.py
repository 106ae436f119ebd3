"""cosFormer2 against full matrices of cosines of distances."""

import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.models.layers.context import SequenceContext

plain = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "plain_models.py")))
mixers = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "plain_mixers.py")))

MODEL = ModelConfig(
    mixer="cosformer2",
    num_layers=3,
    hidden_size=27,
    num_heads=3,
    intermediate_size=37,
    vocab_size=101,
    mixer_options={"cosformer2": {"gate_rank": 5}},
)
mix = functools.partial(mixers.cosformer2, MODEL)
RunRanks = Callable[..., list[Any]]


def without_angles(module: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Input, output and weights of the second layer's mixer when all its angles are 0."""
    mixer = module.decoder.layers[1].self_attention
    x = torch.randn(130, 2, MODEL.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        mixer.lrpe.theta.zero_()
        out = mixer.mix(x, SequenceContext.of(torch.arange(130).repeat(2, 1)))
    return x, out, plain.weights_of(module)


def measure(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    with plain.built_model(MODEL, init_method) as module:
        initial = plain.weights_of(module)
        plain.disturb(module)
        figures = plain.figures(module, plain.batch(MODEL, plain.LENGTHS))
        return {"initial": initial, **figures, "without angles": without_angles(module)}


@pytest.fixture(scope="module")
def built(run_ranks: RunRanks) -> dict[str, Any]:
    (found,) = run_ranks(measure, 1)
    return dict(found)


def test_the_model_is_the_plain_one(built: dict[str, Any]) -> None:
    rows = plain.batch(MODEL, plain.LENGTHS)
    plain.assert_equal(built, plain.plain_figures(MODEL, built["weights"], rows, mix, plain.toeplitz))


def test_angles_begin_alike_in_every_layer_and_head(built: dict[str, Any]) -> None:
    angles = [weight for name, weight in built["initial"].items() if name.endswith("lrpe.theta")]
    expected = torch.tensor([10000.0 ** (-2 * i / 9) for i in range(9)], dtype=torch.float64)
    assert len(angles) == MODEL.num_layers
    for theta in angles:
        # Weights are drawn in fp32.
        torch.testing.assert_close(theta, expected.expand(3, 9), rtol=1e-7, atol=0)


def test_without_angles_it_is_plain_linear_attention(built: dict[str, Any]) -> None:
    x, out, weights = built["without angles"]
    layer = "decoder.layers.1.self_attention."
    own = {name.removeprefix(layer): weight for name, weight in weights.items() if name.startswith(layer)}
    for row in range(x.size(1)):
        q, k, v = plain.heads(MODEL, x[:, row], own)
        q, k = plain.silu(q), plain.silu(k)
        sums = torch.einsum("hsc, hsv -> hscv", k, v).cumsum(dim=1)
        expected = plain.gated_output(MODEL, torch.einsum("htc, htcv -> htv", q, sums), x[:, row], own)
        assert plain.error(out[:, row], expected) < 1e-10

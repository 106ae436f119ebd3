"""Attention with a scalar decay against causal LION-S, RetNet's and Mamba-2's recurrences, written out plainly.

``tests/helpers/plain_mixers.py`` has them: LION-S as a masked matrix, the others token by token with complex rotations.
"""

import functools
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightscale.config.files import load
from lightscale.config.layout import check_mixers
from lightscale.config.model import ModelConfig
from lightscale.config.schema import ParallelConfig
from lightscale.errors import UserError
from lightscale.models.layers.short_convolution import short_convolution

ROOT = Path(__file__).resolve().parents[3]
plain = SimpleNamespace(**runpy.run_path(str(ROOT / "tests/helpers/plain_models.py")))
mixers = SimpleNamespace(**runpy.run_path(str(ROOT / "tests/helpers/plain_mixers.py")))
RunRanks = Callable[..., list[Any]]

OPTIONS: dict[str, dict[str, Any]] = {
    "lion-s": {},
    "lion-s with an input gate": {"input_gate": True, "feature_map": "elu", "initial_decay": 0.9, "eps": 0.1},
    "retnet": load(ROOT / "configs/retnet-like-tiny.toml").model.mixer_options["decay-attention"].model_dump(),
    "mamba-2": load(ROOT / "configs/mamba2-like-tiny.toml").model.mixer_options["decay-attention"].model_dump(),
    "learned": {
        "decay": "learned",
        "feature_map": "silu",
        "scale": False,
        "positions": "rope",
        "output": "norm",
        "short_convolution": 2,
    },
    "turned": {
        "decay": "softplus",
        "feature_map": "none",
        "scale": False,
        "positions": "lrpe",
        "output": "gated",
        "gate_rank": 5,
        "short_convolution": 3,
    },
    "linear transformer": {"decay": "none", "feature_map": "elu"},
}
MODELS = {
    name: ModelConfig(
        mixer="decay-attention",
        num_layers=2,
        hidden_size=36,
        num_heads=3,
        intermediate_size=37,
        vocab_size=101,
        norm="rmsnorm",
        mixer_options={"decay-attention": options},
    )
    for name, options in OPTIONS.items()
}


def measure(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    return {
        name: plain.initial_and_disturbed(rank, world_size, f"{init_method}-{number}", model, plain.LENGTHS)
        for number, (name, model) in enumerate(MODELS.items())
    }


@pytest.fixture(scope="module")
def built(run_ranks: RunRanks) -> dict[str, Any]:
    (found,) = run_ranks(measure, 1)
    return dict(found)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_the_plain_one(built: dict[str, Any], name: str) -> None:
    model = MODELS[name]
    mix = functools.partial(mixers.decay_attention, model)
    rows = plain.batch(model, plain.LENGTHS)
    plain.assert_equal(built[name], plain.plain_figures(model, built[name]["weights"], rows, mix))


def test_decays_begin_where_they_should(built: dict[str, Any]) -> None:
    def of(name: str, parameter: str) -> torch.Tensor:
        return built[name]["initial"][f"decoder.layers.1.self_attention.{parameter}"]

    sigmoids = of("lion-s with an input gate", "forget_proj.bias").sigmoid()
    torch.testing.assert_close(sigmoids, torch.full_like(sigmoids, 0.9), rtol=1e-7, atol=1e-7)
    learned = of("learned", "decay.logit").sigmoid()
    torch.testing.assert_close(
        learned, torch.tensor([31 / 32, 63 / 64, 127 / 128], dtype=learned.dtype), rtol=1e-7, atol=0
    )
    steps, rates = (
        torch.nn.functional.softplus(of("mamba-2", "forget_proj.bias")),
        of("mamba-2", "decay.log_rate").exp(),
    )
    assert 0.99e-3 < steps.min() < steps.max() < 0.101
    assert 1 <= rates.min() < rates.max() <= 16


def test_the_convolution_is_pytorchs_and_stays_in_documents() -> None:
    """Of one document that of ``Conv1d``; what overflows in another reaches neither outputs nor gradients."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    before, x, weight = normal(3, 2, 5), normal(11, 2, 5), normal(5, 4)
    together = torch.cat([before, x]).permute(1, 2, 0)
    expected = torch.nn.functional.silu(torch.nn.functional.conv1d(together, weight[:, None], groups=5))
    far = torch.arange(11).repeat(2, 1) + 3
    found = short_convolution(before, x, weight, far)
    torch.testing.assert_close(found, expected.permute(2, 0, 1), rtol=1e-13, atol=1e-13)
    leaves = [y.requires_grad_() for y in (before, x, weight)]
    assert torch.autograd.gradcheck(lambda *y: short_convolution(*y, far), leaves)

    positions = torch.cat([far[:, :6], torch.arange(5).repeat(2, 1)], dim=1)
    spoilt = torch.cat(
        [x.detach()[:3], torch.full((3, 2, 5), torch.inf, dtype=x.dtype), x.detach()[6:]]
    ).requires_grad_()
    y = short_convolution(before.detach(), spoilt, weight, positions)[6:]
    alone = short_convolution(torch.zeros_like(before), x[6:], weight, positions[:, 6:])
    assert torch.equal(y, alone)
    (dx,), (expected,) = torch.autograd.grad(y.sum(), [spoilt]), torch.autograd.grad(alone.sum(), [x])
    assert torch.equal(dx[6:], expected[6:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["feature_map=silu"], r'feature_map = "silu" with scale = true divides by sums that may be 0 or negative'),
        (["positions=rope"], r'positions = "rope" with scale = true divides by sums that may be 0 or negative'),
        (
            ["decay=fixed", "input_gate=true"],
            r'needs a decay from the input, not decay = "fixed"; use decay = "sigmoid"',
        ),
        (["initial_decay=0"], r"a sigmoid is never 0; use 0\.5"),
        (["short_convolution=1"], r"short_convolution = 1 covers only the token itself; use at least 2, or 0"),
        (["gate_rank=8"], r'gate_rank = 8 needs output = "gated", not "plain"'),
        (["decay=scalar"], r'decay = "scalar".*"sigmoid"'),
    ],
    ids=["no features", "rotated", "input gate", "never 0", "width 1", "gate rank", "decay"],
)
def test_what_does_not_fit_is_refused(words: list[str], message: str) -> None:
    keys = [f"model.mixer_options.decay-attention.{word}" for word in words]
    with pytest.raises(UserError, match=message):
        load(ROOT / "configs" / "lion-s-causal-tiny.toml", keys)


def test_rotations_need_pairs() -> None:
    words = ["model.hidden_size=60", "model.num_heads=4"]
    with pytest.raises(UserError, match=r'positions = "rope" rotates channels in pairs, .* give heads of 15; .* = 64'):
        check_mixers(load(ROOT / "configs" / "retnet-like-tiny.toml", words).model, ParallelConfig())
    assert math.isclose(load(ROOT / "configs" / "mamba2-like-tiny.toml", words).model.head_dim, 15)

"""LION's mixers against masked full matrices, whose decays are multiplied up one by one."""

import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightscale.config.files import load
from lightscale.config.model import ModelConfig
from lightscale.errors import UserError
from lightscale.models.mixers.lion import features, retnet_log_decays, s4d_real_logits

ROOT = Path(__file__).resolve().parents[3]
plain = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "plain_models.py")))
mixers = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "plain_mixers.py")))
RunRanks = Callable[..., list[Any]]


def stack(options: dict[str, dict[str, Any]]) -> ModelConfig:
    """A layer of each of LION's mixers, of which one reads what the others have mixed."""
    return ModelConfig(
        mixer=["lion-lit", "lion-s", "lion-retnet"],
        num_layers=3,
        hidden_size=27,
        num_heads=3,
        intermediate_size=37,
        vocab_size=101,
        norm="rmsnorm",
        mixer_options=options,
    )


MODELS = {
    "as they are": stack({}),
    # Every option of each has another value than before, in one of them or the other.
    "other forms": stack(
        {
            "lion-lit": {"feature_map": "none", "scale": False},
            "lion-retnet": {"feature_map": "elu", "eps": 0.1},
            "lion-s": {"gate": "enter", "input_gate": True, "initial_decay": 0.9, "feature_map": "elu"},
        }
    ),
    "vector": stack({"lion-s": {"vector_decay": True}}),
    "vector, other forms": stack(
        {"lion-s": {"vector_decay": True, "gate": "enter", "scale": False, "initial_decay": "s4d-real"}}
    ),
}


def measure(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    found = {}
    for name, model in MODELS.items():
        with plain.built_model(model, f"{init_method}-{name}") as module:
            initial = plain.weights_of(module)
            plain.disturb(module)
            figures = plain.figures(module, plain.batch(model, plain.LENGTHS))
            found[name] = {"initial": initial, **figures}
    return found


@pytest.fixture(scope="module")
def built(run_ranks: RunRanks) -> dict[str, Any]:
    (found,) = run_ranks(measure, 1)
    return dict(found)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_the_plain_one(built: dict[str, Any], name: str) -> None:
    model = MODELS[name]
    rows = plain.batch(model, plain.LENGTHS)
    mix = functools.partial(mixers.lion, model)
    plain.assert_equal(built[name], plain.plain_figures(model, built[name]["weights"], rows, mix))


def test_decays_of_lion_s_begin_where_the_options_say(built: dict[str, Any]) -> None:
    for name, decay in (("as they are", 0.5), ("other forms", 0.9), ("vector", 0.5)):
        bias = built[name]["initial"]["decoder.layers.1.self_attention.forget_proj.bias"]
        # Weights are drawn in fp32.
        torch.testing.assert_close(bias.sigmoid(), torch.full_like(bias, decay), rtol=1e-7, atol=1e-7)


def test_decays_by_channel_begin_as_those_of_s4d(built: dict[str, Any]) -> None:
    name = "decoder.layers.1.self_attention.forget_proj.bias"
    rates = -built["vector, other forms"]["initial"][name].double().sigmoid().log().view(3, -1)
    steps = rates[:, :1]
    torch.testing.assert_close(rates, steps * torch.arange(1, rates.size(1) + 1), rtol=1e-5, atol=0.0)
    drawn = -s4d_real_logits(4000, 1, torch.Generator().manual_seed(0)).double().sigmoid().log()
    for found in (steps, drawn):
        assert 0.001 * 0.999 < found.min() < found.max() < 0.1 * 1.001
    assert len(steps.unique()) == len(steps), "each head has its own"
    # As many below the middle of the logarithms, 0.01, as above.
    assert abs(float((drawn < 0.01).double().mean()) - 0.5) < 0.03


def test_decays_of_lion_retnet_are_retnets() -> None:
    decays = retnet_log_decays(8).exp()
    expected = [31 / 32, 63 / 64, 127 / 128, 255 / 256, 511 / 512, 1023 / 1024, 2047 / 2048, 4095 / 4096]
    torch.testing.assert_close(decays, torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=0)


@pytest.mark.parametrize("kind", ["elu", "silu"])
def test_features_are_rounded_once(kind: str) -> None:
    x = torch.linspace(-12, 12, 96).view(4, 24)
    exact = features(x.double(), kind)
    for dtype, error in ((torch.float32, 2e-7), (torch.bfloat16, 2**-8)):
        found = features(x.to(dtype), kind).double()
        expected = exact if dtype == torch.float32 else features(x.to(dtype).double(), kind)
        assert float(((found - expected) / expected).abs().max()) < error
    assert float(exact.min()) > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task.name=causal"], r"predicts the next token, but layer 0 \(lion-s\) reads it; use a causal mixer: tnl"),
        (
            ["model.mixer_options.lion-s.feature_map=none"],
            r"divides by sums that may be 0 or negative; use scale = fal",
        ),
        (["model.mixer_options.lion-s.initial_decay=0"], r"a sigmoid is never 0; use 0\.5"),
        (["model.mixer_options.lion-s.initial_decay=1"], r"initial_decay = 1: must be a number >= 0 and < 1"),
        (["model.mixer_options.lion-s.initial_decay=s4d-real"], r"decays differ by channel; use vector_decay = true"),
        (
            ["model.mixer_options.lion-s.vector_decay=true", "model.mixer_options.lion-s.input_gate=true"],
            r"keys are multiplied by one number \(equation 135\); use vector_decay = false, or input_gate = false",
        ),
        (["model.mixer_options.lion-s.gate=both"], r'gate = "both".*"leave".*"enter"'),
    ],
    ids=["causal", "no features", "never 0", "never 1", "by channel", "two gates", "gate"],
)
def test_what_does_not_fit_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(ROOT / "configs" / "lion-s-tiny.toml", words)

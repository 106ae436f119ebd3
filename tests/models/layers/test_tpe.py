"""Toeplitz positional encoding against its Toeplitz matrices."""

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.config.mixers import MIXERS
from lightscale.config.model import ModelConfig
from lightscale.models.layers.context import SequenceContext
from lightscale.models.layers.tpe import TPE
from lightscale.models.registry import mixer_spec
from lightscale.models.specs.tpe import TPESpec

plain = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "plain_models.py")))

SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 90, "num_heads": 5, "intermediate_size": 37, "vocab_size": 101}
LENGTHS = [[100, 1, 49], [150]]
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
RunRanks = Callable[..., list[Any]]


def stream() -> Tensor:
    """(n, b, d)"""
    return torch.randn(150, 2, SHAPE["hidden_size"], dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def applied(tpe: Any) -> dict[str, Any]:
    """Output, and its gradients; then the same stream with the state carried over cuts."""
    x = stream().requires_grad_()
    y = tpe(x, SequenceContext.of(POSITIONS))
    cotangent = torch.arange(y.numel(), dtype=y.dtype).sin().view_as(y)
    gradients = torch.autograd.grad(y, [x, tpe.decay_logit, tpe.gamma], cotangent)
    states: dict[str, Any] = {}
    parts = []
    with torch.no_grad():
        for own, positions in zip(x.split([70, 1, 29, 50]), POSITIONS.split([70, 1, 29, 50], dim=1), strict=True):
            parts.append(tpe(own, SequenceContext.of(positions, states=states)))
    return {"y": y.detach(), "gradients": gradients, "in parts": torch.cat(parts), "states": states}


def measure(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    found: dict[str, Any] = {"with": {}}
    for name in (*MIXERS, "hybrid"):
        mixer = ["tnl", "lightnet"] if name == "hybrid" else name
        with plain.built_model(ModelConfig(mixer=mixer, **SHAPE), f"{init_method}-{name}") as module:
            found["with"][name] = [path for path, part in module.named_modules() if isinstance(part, TPE)]
            if name == "cosformer2":
                tpe = module.embedding.tpe
                found["initial"] = plain.weights_of(module)
                with torch.no_grad():
                    # Half of the first decay's scale: it must be read, not assumed.
                    tpe.decay_logit[0] = -3.0
                    tpe.gamma.add_(1.0)
                found |= applied(tpe)
                found["weights"] = plain.weights_of(module)
    with plain.built_model(
        ModelConfig(mixer="cosformer2", **SHAPE), f"{init_method}-half", dtype=torch.bfloat16
    ) as module:
        found["dtypes"] = {name: weight.dtype for name, weight in plain.weights_of(module).items() if ".tpe." in name}
    return found


@pytest.fixture(scope="module")
def built(run_ranks: RunRanks) -> dict[str, Any]:
    (found,) = run_ranks(measure, 1)
    return dict(found)


def by_document(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    rows = [
        torch.cat([plain.toeplitz(document, weights) for document in x[:, row].split(lengths)])
        for row, lengths in enumerate(LENGTHS)
    ]
    return torch.stack(rows, dim=1)


def test_it_is_a_causal_convolution_in_each_document(built: dict[str, Any]) -> None:
    weights = {name: weight.requires_grad_() for name, weight in built["weights"].items()}
    x = stream().requires_grad_()
    y = by_document(x, weights)
    cotangent = torch.arange(y.numel(), dtype=y.dtype).sin().view_as(y)
    leaves = [x, weights["embedding.tpe.decay_logit"], weights["embedding.tpe.gamma"]]
    assert plain.error(built["y"], y) < 1e-10
    for found, expected in zip(built["gradients"], torch.autograd.grad(y, leaves, cotangent), strict=True):
        assert plain.error(found, expected) < 1e-10


def test_the_state_is_what_the_recurrence_leaves(built: dict[str, Any]) -> None:
    assert plain.error(built["in parts"], built["y"]) < 1e-10
    decay = torch.sigmoid(built["weights"]["embedding.tpe.decay_logit"])
    x, expected = stream(), []
    for row, lengths in enumerate(LENGTHS):
        last = x[-lengths[-1] :, row]
        powers = decay ** torch.arange(len(last) - 1, -1, -1)[:, None]
        expected.append(torch.einsum("tr, tc -> cr", powers, last))
    assert list(built["states"]) == ["tpe"]
    assert plain.error(built["states"]["tpe"]["u"], torch.stack(expected)) < 1e-10


def test_time_scales_begin_between_one_token_and_4096(built: dict[str, Any]) -> None:
    decay = torch.sigmoid(built["initial"]["embedding.tpe.decay_logit"])
    scales = -1 / decay.log()
    expected = torch.tensor([4096.0 ** (r / 17) for r in range(18)], dtype=torch.float64)
    # Weights are drawn in fp32.
    torch.testing.assert_close(scales, expected, rtol=1e-5, atol=0)
    assert built["initial"]["embedding.tpe.gamma"].std() == pytest.approx(0.02 / math.sqrt(18), rel=0.1)


def test_a_model_has_it_once_if_a_mixer_asks_for_it(built: dict[str, Any]) -> None:
    asking = {name for name in MIXERS if TPESpec in mixer_spec(name).shared}
    assert asking >= {"cosformer2", "lightnet"}
    assert {name for name, paths in built["with"].items() if paths} == asking | {"hybrid"}
    assert all(paths in ([], ["embedding.tpe"]) for paths in built["with"].values())


def test_decays_stay_wide_in_half_precision(built: dict[str, Any]) -> None:
    assert built["dtypes"] == {"embedding.tpe.decay_logit": torch.float32, "embedding.tpe.gamma": torch.bfloat16}

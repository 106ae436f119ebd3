"""HGRN2 against its recurrence, one token at a time, and at the ends of its forget gates."""

import functools
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.kernels.lightning import lightning_attention_reference
from lightscale.models.layers.context import SequenceContext
from lightscale.models.mixers.hgrn2 import lower_bounds

plain = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "plain_models.py")))
mixers = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "plain_mixers.py")))

MODEL = ModelConfig(mixer="hgrn2", num_layers=3, hidden_size=27, num_heads=3, intermediate_size=37, vocab_size=101)
TABLE = "lower_bounds.table"
OUT_PROJ = "decoder.layers.1.self_attention.out_proj.weight"
EXTREME = 100.0
TOKENS = 130
mix = functools.partial(mixers.hgrn2, MODEL)
RunRanks = Callable[..., list[Any]]


def forget_rows(mixer: Any) -> Tensor:
    """The rows (h, k, d) of the projection that give the forget gates."""
    return mixer.fv_proj.weight.view(MODEL.num_heads, 2, MODEL.head_dim, MODEL.hidden_size)[:, 0]


def with_bounds(module: Any) -> SequenceContext:
    """What the model's layers know of two rows."""
    context = SequenceContext.of(torch.arange(TOKENS).repeat(2, 1))
    return replace(context, shared={"lower_bounds": module.lower_bounds(context)})


def without_forget_projection(module: Any) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
    """Input, output, projections and β of the second layer's mixer with W_f = 0: f is the same at all tokens."""
    mixer = module.decoder.layers[1].self_attention
    x = torch.randn(TOKENS, 2, MODEL.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        # One β for all channels: then it is one decay per head.
        module.lower_bounds.table.copy_(torch.tensor([[0.3], [0.5], [-0.1]]))
        forget_rows(mixer).zero_()
        context = with_bounds(module)
        out = mixer.mix(x, context)
    names = ("fv_proj.weight", "q_proj.weight")
    return (
        x,
        out,
        {name: mixer.get_parameter(name).detach().clone() for name in names},
        torch.stack(context.shared["lower_bounds"]),
    )


def extremes(module: Any) -> dict[str, Any]:
    """Outputs and gradients of all layers' mixers when forget gates are as good as 0 or 1, by channel and token."""
    dtype = module.lower_bounds.table.dtype
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(TOKENS, 2, MODEL.hidden_size, generator=generator).to(dtype)
    # The first channel of the input is the sign of the logits of a token, the weights of the gates are their size.
    x[:, :, 0] = torch.randint(0, 2, (TOKENS, 2), generator=generator) * 2 - 1
    signs = torch.randint(0, 2, (MODEL.num_heads, MODEL.head_dim), generator=generator) * 2 - 1
    x.requires_grad_()
    found: dict[str, Any] = {}
    for layer, block in enumerate(module.decoder.layers):
        mixer = block.self_attention
        with torch.no_grad():
            forget_rows(mixer).zero_()
            forget_rows(mixer)[:, :, 0] = EXTREME * signs
        module.zero_grad()
        x.grad = None
        out = mixer.mix(x, with_bounds(module))
        out.square().sum().backward()
        table, projection = module.lower_bounds.table.grad, mixer.fv_proj.weight.grad
        found[f"layer {layer}"] = {"out": out.detach(), "x": x.grad, "table": table.clone(), "fv_proj": projection}
    return found


def measure(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    with plain.built_model(MODEL, f"{init_method}-1") as module:
        found: dict[str, Any] = {"initial": plain.weights_of(module)}
        plain.disturb(module)
        found |= plain.figures(module, plain.batch(MODEL, plain.LENGTHS))
        found["fixed"] = without_forget_projection(module)
    for number, dtype in enumerate((torch.float32, torch.float64)):
        with plain.built_model(MODEL, f"{init_method}-{dtype}-{number}", dtype) as module:
            found[str(dtype)] = extremes(module)
    return found


@pytest.fixture(scope="module")
def built(run_ranks: RunRanks) -> dict[str, Any]:
    (found,) = run_ranks(measure, 1)
    return dict(found)


def test_the_model_is_the_plain_one(built: dict[str, Any]) -> None:
    plain.assert_equal(built, plain.plain_figures(MODEL, built["weights"], plain.batch(MODEL, plain.LENGTHS), mix))


def test_bounds_begin_in_equal_steps_from_zero(built: dict[str, Any]) -> None:
    table = built["initial"][TABLE]
    assert torch.equal(table, torch.ones(MODEL.num_layers, MODEL.hidden_size, dtype=torch.float64))
    expected = torch.tensor([[0.0], [1 / 3], [2 / 3]], dtype=torch.float64).expand(3, MODEL.hidden_size)
    torch.testing.assert_close(lower_bounds(table), expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_bounds_rise_with_the_layer_and_are_exactly_zero_in_the_first(num_layers: int) -> None:
    table = torch.randn(num_layers, 7, generator=torch.Generator().manual_seed(0)).mul_(3).requires_grad_()
    bounds = lower_bounds(table)
    assert torch.equal(bounds[0], torch.zeros(7))
    assert (bounds.diff(dim=0) > 0).all()
    assert (bounds < 1).all()
    torch.testing.assert_close(bounds.double(), mixers.lower_bounds(table.double()), rtol=1e-5, atol=1e-7)
    # Whatever comes back at the first layer's bound, which is a constant, reaches no row.
    (gradient,) = torch.autograd.grad(bounds[0].sum() * 1e38 * 10, table)
    assert torch.equal(gradient, torch.zeros_like(table))


def test_a_fixed_forget_gate_is_tnl_with_scaled_keys(built: dict[str, Any]) -> None:
    x, out, weights, bounds = built["fixed"]
    decay = float(bounds[1, 0] + (1 - bounds[1, 0]) / 2)
    log_decay = torch.full((MODEL.num_heads,), decay, dtype=torch.float64).log()
    for row in range(x.size(1)):
        q, _, v = (y.transpose(0, 1)[None] for y in plain.heads(MODEL, x[:, row], weights))
        k = torch.full_like(q, 1 - decay)
        o, _ = lightning_attention_reference(plain.silu(q), k, v, log_decay)
        expected = plain.norm(MODEL, o[0].flatten(1)) @ built["weights"][OUT_PROJ].T
        assert plain.error(out[:, row], expected) < 1e-10


def test_extreme_forget_gates_in_a_mixer(built: dict[str, Any]) -> None:
    for layer, expected in built["torch.float64"].items():
        for name, found in built["torch.float32"][layer].items():
            assert found.isfinite().all(), f"{name} of {layer}"
            if name == "table" and layer == "layer 0":
                assert torch.equal(found, torch.zeros_like(found))
            else:
                assert plain.error(found, expected[name]) < 1e-5, f"{name} of {layer}"

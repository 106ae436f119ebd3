"""LLaMA's options in drawn combinations against full matrices in fp64: logits and every gradient, on every way.

On one rank with packed documents; on two tensor ranks, or on two sequence ranks with uneven segments; in pieces that
read on from a state; and as the plain model that is exported.
"""

import itertools
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.config.schema import ParallelConfig
from lightscale.errors import UserError
from lightscale.exchange.files.weights import exported_tensors, shape_of
from lightscale.exchange.imported import model_of
from lightscale.exchange.plain.model import CausalModel
from lightscale.models.registry import check_model
from lightscale.models.specs.options import LLaMAOptions

TESTS = Path(__file__).parents[2]
oracle = SimpleNamespace(**runpy.run_path(str(TESTS / "parallel" / "test_plain_oracle.py")))
drawing = SimpleNamespace(**runpy.run_path(str(TESTS / "helpers" / "drawing.py")))
parity, plain = oracle.parity, oracle.plain
RunRanks = Callable[..., list[Any]]

SCALINGS: list[dict[str, Any]] = [
    {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "truncate": False,
        "attention_factor": 0.8,
    },
]
AXES: dict[str, list[Any]] = {
    "qk_norm": ["none", "head", "all"],
    "zero_centered_norm": [False, True],
    "heads": [{}, {"num_key_value_heads": 2, "head_dim": 12, "softmax_scale": 0.7}],
    "attention_bias": ["none", "all"],
    "positions": ["rope", "none"],
    "rope_fraction": [1.0, 0.5],
    "output_gate": [False, True],
    "window": [None, 1, 5, 33],
    "attention_logit_cap": [None, 3.0],
    "attention_sinks": [False, True],
    "rope_scaling": [None, *SCALINGS],
}
"""Values of each option, or tables of some that go together."""
OF_MODEL: dict[str, list[Any]] = {
    "norm_placement": ["pre", "post", "both", "by_mixer"],
    "zero_centered_norm": [False, True],
    "embedding_multiplier": [1.0, 5.5],
    "final_logit_cap": [None, 2.0],
    "glu_activation": ["silu", "gelu_tanh"],
}
"""The same of the model, beside those of the mixer."""
SHAPE: dict[str, Any] = {
    # A layer of one kind of softmax attention below the one whose options are drawn.
    "mixer": ["llama-local", "llama"],
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 24,
    "vocab_size": 128,
    "norm": "rmsnorm",
    # Of weights that are not small, so that scores are not all alike.
    "init_std": 0.2,
}


OTHER = "gated-delta-net"
"""The mixer of the lower layer where norms differ by mixer."""
LOCAL: dict[str, Any] = {"num_key_value_heads": 2, "qk_norm": "head", "rope_theta": 300.0, "window": 7}
"""Options of the lower layer."""
USUAL = {"qk_norm": "head", "positions": "rope"}
"""What does not exclude other options."""


def valid(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that their other options exclude."""
    if options["qk_norm"] == "none":
        options = {**options, "zero_centered_norm": False}
    if options["positions"] == "none":
        options = {**options, "rope_fraction": 1.0, "rope_scaling": None}
    return options


LAYOUTS = [" tensor=2", " sequence=2 cuts=0,37"]


def drawn() -> dict[str, tuple[ModelConfig, str]]:
    """Models, each with one of the layouts: each value of an option comes on both."""
    found: dict[str, tuple[ModelConfig, str]] = {}
    # In turn: the product of both would be long.
    of_model = itertools.cycle(drawing.covering("llama's model", *OF_MODEL.values()))
    for *values, layout in drawing.covering("llama", *AXES.values(), LAYOUTS):
        options: dict[str, Any] = {}
        for axis, value in zip(AXES, values, strict=True):
            options |= value if axis == "heads" else {axis: value}
        table = {**SHAPE, **dict(zip(OF_MODEL, next(of_model), strict=True))}
        table["mixer_options"] = {"llama": valid(options), "llama-local": LOCAL}
        if table["norm_placement"] == "by_mixer":
            # The lower layer has its norms elsewhere.
            table |= {"mixer": [OTHER, "llama"], "mixer_options": {"llama": valid(options)}}
        model = ModelConfig.model_validate(table)
        if (model, layout) not in found.values():
            found[f"drawn-{len(found)}"] = model, layout
    return found


DRAWN = drawn()
MODELS = {name: model for name, (model, _) in DRAWN.items()}
parity.MODELS.update(MODELS)
for name in MODELS:
    oracle.mixers.MIX[name] = lambda model, x, weights, layer: oracle.mixers.MIX[model.layers[layer]](
        model, x, weights, layer
    )
PIECES = [1, 30, 1, 2, 14]


def on_two_ranks(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    """Loss and gradients by case, and of one rank also logits at once and in pieces."""
    cases = [f"{name}{layout}" for name, (_, own) in DRAWN.items() for layout in ("", own)]
    found = oracle.engine_gradients(rank, world_size, init_method, cases)
    return {"ranks": found, "pieces": in_pieces(f"{init_method}-pieces") if rank == 0 else {}}


@torch.no_grad()
def in_pieces(init_method: str) -> dict[str, Any]:
    """How far logits that pieces of rows give are from those of whole rows, and tokens that states hold."""
    found: dict[str, Any] = {}
    for number, (name, model) in enumerate(MODELS.items()):
        with plain.built_model(model, f"{init_method}-{number}") as module:
            plain.disturb(module)
            rows = plain.batch(model, [[20, 28], [48]])
            tokens, positions, states = rows["tokens"], rows["positions"], dict[str, Any]()
            cut = list(zip(tokens.split(PIECES, dim=1), positions.split(PIECES, dim=1), strict=True))
            parts = [module(ids, own, states=states) for ids, own in cut]
            # The last pieces once more, behind a state that has room for some of their tokens.
            roomy: dict[str, Any] = {}
            for ids, own in cut[:3]:
                module(ids, own, states=roomy)
            module.give_room(roomy, [12, 32], 5)
            again = [module(ids, own, states=roomy) for ids, own in cut[3:]]
            whole = module(tokens, positions)
            errors = plain.error(torch.cat(parts, dim=1), whole), plain.error(torch.cat(again, dim=1), whole[:, 32:])
            found[name] = {"error": max(errors), "tokens": {*map(cached_tokens, (states, roomy))}}
    return found


def cached_tokens(states: dict[str, Any]) -> int:
    tokens: int = states["layer-1"]["k"].untyped_storage().nbytes() // states["layer-1"]["k"][:, 0].numel() // 8
    return tokens


@pytest.fixture(scope="module")
def computed(run_ranks: RunRanks) -> dict[str, Any]:
    return run_ranks(on_two_ranks, 2)[0]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_full_matrices(name: str, computed: dict[str, Any]) -> None:
    """Packed documents on one rank, and on two tensor or sequence ranks."""
    start = computed["ranks"][name][0]
    expected_loss, expected = oracle.plain_gradients(name, start, 0)
    for layout in ("", DRAWN[name][1]):
        weights, loss, gradients = computed["ranks"][f"{name}{layout}"]
        assert all(torch.equal(weight, start[key]) for key, weight in weights.items()), layout
        assert loss == pytest.approx(expected_loss, rel=1e-12), layout
        assert gradients.keys() == expected.keys()
        for key, gradient in gradients.items():
            assert off(gradient, expected[key]) < 1e-10, (layout, key)


@pytest.mark.parametrize("name", MODELS)
def test_states_carry_over_cuts(name: str, computed: dict[str, Any]) -> None:
    """Within a window states keep the tokens that later ones see, and no others."""
    assert computed["pieces"][name]["error"] < 1e-10
    window = MODELS[name].mixer_options["llama"].window  # type: ignore[attr-defined]
    if window is not None:
        assert computed["pieces"][name]["tokens"] == {max(1, window - 1)}


@pytest.mark.parametrize("name", MODELS)
def test_the_plain_model_is_the_trained_one(name: str, computed: dict[str, Any]) -> None:
    """Logits and gradients of one document, at once and in pieces; the shape gives the options back."""
    model, weights = MODELS[name], computed["ranks"][name][0]
    shape = shape_of(model, vocab_size=parity.VOCAB_SIZE)
    read = model_of(shape)
    assert read.mixer_options == model.mixer_options
    assert all(getattr(read, key) == getattr(model, key) for key in OF_MODEL)
    assert shape_of(read, vocab_size=shape.vocab_size) == shape
    module = CausalModel(shape).double()
    taken = exported_tensors(model, vocab_size=shape.vocab_size)
    rows = {own: whole_rows(weights[one.key], one.ranges) for own, one in taken.items()}
    module.load_state_dict(rows)
    leaves = {key: weight.double().clone().requires_grad_() for key, weight in weights.items()}
    tokens = torch.randint(0, shape.vocab_size, (48,), generator=torch.Generator().manual_seed(0))
    mix = oracle.functools.partial(oracle.mixers.MIX[name], model)
    expected = plain.document_logits(model, leaves, tokens, mix)[:, : shape.vocab_size]
    found, states = module(tokens[None])[0][0], None
    assert plain.error(found, expected) < 1e-10
    parts = []
    for part in tokens[None].split(PIECES, dim=1):
        logits, states = module(part, states)
        parts.append(logits[0])
    assert plain.error(torch.cat(parts), expected) < 1e-10
    cotangent = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    (found * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    for own, weight in module.named_parameters():
        gradient = leaves[taken[own].key].grad
        assert weight.grad is not None and gradient is not None
        assert off(weight.grad, whole_rows(gradient, taken[own].ranges)) < 1e-10, own


def off(found: Tensor, expected: Tensor) -> float:
    """As ``plain.error``, of gradients whose rounding is below 1e-12: without positions a bias of keys has none."""
    return float((found - expected).norm() / (expected.norm() + 0.01))


@pytest.mark.parametrize(("fraction", "message"), [(0.7, "of 8 channels is 5, .* use 0.5"), (0.1, "is 0, .* use 0.25")])
def test_channels_are_rotated_in_pairs(fraction: float, message: str) -> None:
    model = ModelConfig.model_validate({**SHAPE, "mixer_options": {"llama": {"rope_fraction": fraction}}})
    with pytest.raises(UserError, match=message):
        check_model(model, ParallelConfig())


def whole_rows(weight: Tensor, ranges: tuple[tuple[int, int], ...] | None) -> Tensor:
    return weight if ranges is None else torch.cat([weight[first:last] for first, last in ranges])


def test_all_values_are_drawn() -> None:
    for axis, values in AXES.items():
        for value in values:
            table = LLaMAOptions.model_validate(value if axis == "heads" else valid({**USUAL, axis: value}))
            some = [model.mixer_options["llama"] for model in MODELS.values()]
            keys = value if axis == "heads" else [axis]
            assert any(all(getattr(one, key) == getattr(table, key) for key in keys) for one in some), (axis, value)
    for key, values in OF_MODEL.items():
        assert {getattr(model, key) for model in MODELS.values()} == {*values}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_centered_norm": True}, r"zero_centered_norm = true with qk_norm = \"none\".* use qk_norm = \"head\""),
        ({"qk_norm": "heads"}, "qk_norm"),
        ({"window": 8, "causal": False}, "window = 8 with causal = false: a window looks back; use causal = true"),
        ({"positions": "none", "rope_fraction": 0.5}, "rope_fraction: nothing is rotated; remove rope_fraction"),
        ({"rope_scaling": {"factor": 8.0}}, 'rope_type = "llama3" needs low_freq_factor; set it'),
        ({"rope_scaling": {**SCALINGS[1], "beta_fast": 8.0}}, 'rope_type = "linear" has no beta_fast; remove it'),
        ({"rope_scaling": {**SCALINGS[2], "beta_slow": 9.0}}, "beta_fast = 8.0 must be above beta_slow = 9.0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate({**SHAPE, "mixer_options": {"llama": options}})

"""The plain models against the training model, and their states and padding against one pass over whole rows."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.exchange.files.weights import exported_tensors, shape_of, tensor_shapes
from lightscale.exchange.plain import operators
from lightscale.exchange.plain.model import CausalModel

ROOT = Path(__file__).resolve().parents[2]
plain = SimpleNamespace(**runpy.run_path(str(ROOT / "tests/helpers/plain_models.py")))
forms = SimpleNamespace(**runpy.run_path(str(ROOT / "tests/helpers/llama_forms.py")))
printed = runpy.run_path(str(ROOT / "tests/models/mixers/test_printed_forms.py"))["CASES"]

LENGTHS = [[149], [149]]
MODELS: dict[str, dict[str, Any]] = {
    "tnl": {"mixer": "tnl"},
    "hgrn2": {"mixer": "hgrn2"},
    "cosformer2": {"mixer": "cosformer2", "mixer_options": {"cosformer2": {"gate_rank": 3}}},
    "lightnet": {"mixer": "lightnet", "glu_activation": "silu"},
    "llama": {"mixer": "llama", "glu_activation": "silu", "norm": "rmsnorm"},
    "grouped": {
        "mixer": "llama",
        "tie_word_embeddings": False,
        "norm": "rmsnorm",
        "norm_eps": 1e-3,
        "mixer_options": {"llama": forms.GROUPED},
    },
    "softmax": {
        "mixer": ["llama", "tnl", "llama"],
        "mixer_options": {"llama": forms.OPTIONS},
    },
    "lion-s": {"mixer": "decay-attention", "norm": "rmsnorm"},
    "retnet": {
        "mixer": "decay-attention",
        "mixer_options": {
            "decay-attention": {
                "decay": "learned",
                "feature_map": "silu",
                "scale": False,
                "positions": "rope",
                "output": "norm",
            }
        },
    },
    "mamba-2": {
        "mixer": "decay-attention",
        "mixer_options": {
            "decay-attention": {
                "decay": "softplus",
                "input_gate": True,
                "feature_map": "none",
                "scale": False,
                "positions": "lrpe",
                "short_convolution": 4,
                "output": "gated",
                "gate_rank": 3,
            }
        },
    },
    "delta-net": {"mixer": "delta-net", "mixer_options": {"delta-net": {"short_convolution": 0}}},
    "gated-delta-net": {
        "mixer": "gated-delta-net",
        "norm": "rmsnorm",
        "mixer_options": {"gated-delta-net": {"num_value_heads": 16, "key_head_dim": 5, "negative_eigenvalues": True}},
    },
    "kimi-delta": {"mixer": ["kimi-delta", "llama", "kimi-delta"], "mixer_options": {"kimi-delta": {"gate_rank": 3}}},
    "causal-rn": {
        "mixer": "causal-rn",
        "norm": "layernorm",
        "intermediate_size": 0,
        "mixer_options": {"causal-rn": {"expansion": 2}},
    },
    "causal-rn mean": {
        "mixer": ["causal-rn", "cosformer2", "causal-rn"],
        "mixer_options": {"causal-rn": {"post_norm": False, "pre_norm": "off", "positions": 150}},
    },
    "causal-rn pairs": {"mixer": "causal-rn", "mixer_options": {"causal-rn": {"form": "quadratic", "eps": 0.1}}},
    "causal-rn mean of pairs": {
        "mixer": "causal-rn",
        "mixer_options": {
            "causal-rn": {"form": "quadratic", "activation": "elu", "pre_norm": "approximate", "post_norm": False}
        },
    },
    **{f"printed {name}": case for name, (case, _, _) in printed.items() if "noncausal" not in name},
    "hybrid": {"mixer": ["cosformer2", "hgrn2", "tnl", "lightnet", "llama"], "norm": "rmsnorm", "num_layers": 5},
}


def model_config(name: str) -> ModelConfig:
    # 12 heads: the slopes of a number that is no power of two.
    sizes = {"hidden_size": 48, "num_heads": 12 if name == "tnl" else 8, "intermediate_size": 40, "vocab_size": 60}
    return ModelConfig.model_validate({"num_layers": 3, **sizes, **MODELS[name]})


def training_figures(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    """Of the training model of each name: weights, logits, losses and gradients, fp64."""
    return {
        name: plain.initial_and_disturbed(rank, world_size, f"{init_method}-{number}", model_config(name), LENGTHS)
        for number, name in enumerate(MODELS)
    }


@pytest.fixture(scope="module")
def trained(run_ranks: Callable[..., list[Any]]) -> dict[str, Any]:
    return run_ranks(training_figures, 1)[0]


def silent(name: str) -> str:
    """What the names of weights that learn nothing begin with: lower bounds up to 1 close the last mixer."""
    return "layers.2.mixer" if name == "printed hgrn2" else "none"


def rows_of(whole: Tensor, ranges: tuple[tuple[int, int], ...] | None) -> Tensor:
    return whole if ranges is None else torch.cat([whole[first:last] for first, last in ranges])


def plain_model(name: str, weights: dict[str, Tensor]) -> CausalModel:
    model = model_config(name)
    shape = shape_of(model, vocab_size=model.vocab_size - plain.PADDING_ROWS)
    module = CausalModel(shape).double()
    taken = exported_tensors(model, vocab_size=shape.vocab_size)
    module.load_state_dict({own: rows_of(weights[rows.key], rows.ranges) for own, rows in taken.items()})
    return module


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_every_gradient_are_those_of_the_training_model(name: str, trained: dict[str, Any]) -> None:
    found, rows = trained[name], plain.batch(model_config(name), LENGTHS)
    module = plain_model(name, found["weights"])
    logits, _ = module(rows["tokens"])
    assert plain.error(logits, found["logits"][..., : logits.size(-1)]) < 1e-10
    losses = F.cross_entropy(logits.transpose(1, 2), rows["labels"], reduction="none")
    assert plain.error(losses, found["losses"]) < 1e-10
    (losses * rows["weight"]).sum().backward()
    taken, used = exported_tensors(model_config(name), vocab_size=module.shape.vocab_size), set()
    for own, weight in module.named_parameters():
        expected = rows_of(found["gradients"][taken[own].key], taken[own].ranges)
        assert weight.grad is not None
        if silent(name) in own:
            assert not weight.grad.any() and not expected.any(), own
            used.add(taken[own].key)
            continue
        assert expected.norm() > 0, own
        assert plain.error(weight.grad, expected) < 1e-10, own
        used.add(taken[own].key)
    assert used == found["weights"].keys()


@pytest.mark.parametrize("name", MODELS)
def test_reading_on_from_a_state_is_reading_at_once(name: str, trained: dict[str, Any]) -> None:
    module = plain_model(name, trained[name]["weights"]).requires_grad_(requires_grad=False)
    tokens = plain.batch(model_config(name), LENGTHS)["tokens"]
    expected, final = module(tokens)
    states, parts, sizes = None, [], []
    for part in tokens.split([1, 70, 1, 1, 9, 64, 3], dim=1):
        logits, states = module(part, states)
        parts.append(logits)
        sizes.append(sum(x.numel() for state in states for x in state.values()))
    assert plain.error(torch.cat(parts, dim=1), expected) < 1e-10
    for found, right in zip(states, final, strict=True):
        assert found.keys() == right.keys()
        assert all(torch.allclose(found[key], right[key], rtol=1e-9, atol=1e-10) for key in right)
    if "llama" not in MODELS[name]["mixer"] and "pairs" not in name:
        assert len(set(sizes)) == 1, "the state grows"


@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_nothing_wherever_it_stands(name: str, trained: dict[str, Any]) -> None:
    """Left, right and in between, also in what continues from a state; outputs, gradients and states."""
    module = plain_model(name, trained[name]["weights"])
    tokens = plain.batch(model_config(name), LENGTHS)["tokens"]
    short = tokens[:1, :90]
    module.zero_grad()
    expected, _ = module(short)
    expected.square().sum().backward()
    gradients = {own: weight.grad.clone() for own, weight in module.named_parameters()}
    generator = torch.Generator().manual_seed(3)
    inside = torch.ones(149, dtype=torch.bool)
    inside[torch.randperm(149, generator=generator)[:59]] = False
    masks = torch.stack([torch.arange(149) >= 59, torch.arange(149) < 90, inside])
    padded = torch.full((3, 149), 7)
    padded[masks] = short.repeat(3, 1).flatten()
    for cuts in ([149], [20, 1, 66, 2, 60]):
        module.zero_grad()
        states, parts = None, []
        for part, mask in zip(padded.split(cuts, dim=1), masks.split(cuts, dim=1), strict=True):
            logits, states = module(part, states, mask)
            parts.append(logits)
        found = torch.cat(parts, dim=1)
        assert found.isfinite().all()
        kept = found[masks].view(3, 90, -1)
        assert plain.error(kept, expected.expand(3, -1, -1)) < 1e-10
        kept.square().sum().backward()
        for own, weight in module.named_parameters():
            if silent(name) in own:
                assert not weight.grad.any(), own
            else:
                assert plain.error(weight.grad, 3 * gradients[own]) < 1e-9, own
        # What follows is right too: states of padded rows are those of the rows alone.
        after, _ = module(tokens[:1, 90:93].repeat(3, 1), states)
        right, _ = module(tokens[:1, :93])
        assert plain.error(after, right[:, 90:].expand(3, -1, -1)) < 1e-10


def test_strong_decays_lose_nothing_of_what_comes_after_them() -> None:
    """In fp32: decays from e^-0 to e^-200 in one chunk, beside the recurrence in fp64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 70, 3, 8, generator=generator) for _ in range(3))
    log_decay = -torch.rand(2, 70, 3, 8, generator=generator)
    log_decay[torch.rand(log_decay.shape, generator=generator) < 0.1] = -200.0
    inputs = [x.requires_grad_() for x in (q, k, v, log_decay)]
    o, final = operators.gated_linear_attention(*inputs, torch.zeros(2, 3, 8, 8))
    wide = [x.detach().double().requires_grad_() for x in inputs]
    S, outputs = torch.zeros(2, 3, 8, 8, dtype=torch.float64), []
    for t in range(70):
        q_t, k_t, v_t, log_t = (x[:, t] for x in wide)
        S = log_t.exp()[..., None] * S + k_t[..., None] * v_t[..., None, :]
        outputs.append(torch.einsum("bhkv, bhk -> bhv", S, q_t))
    expected = torch.stack(outputs, dim=1)
    assert plain.error(o, expected) < 1e-6
    assert plain.error(final, S) < 1e-6
    o.square().sum().backward()
    expected.square().sum().backward()
    for found, right in zip(inputs, wide, strict=True):
        assert plain.error(found.grad, right.grad) < 1e-5


def test_a_running_softmax_stays_exact_over_many_tokens() -> None:
    """Equal keys: after n tokens the logarithm of their number, in fp32 states."""
    _, _, z = operators.softmax_scan(torch.zeros(1, 200_000, 1, 1), torch.full((1, 1, 1), operators.EMPTY))
    assert abs(float(z) - torch.tensor(200_000.0).log()) < 1e-5


def test_gradients_reach_what_a_state_was_made_of(trained: dict[str, Any]) -> None:
    module = plain_model("hybrid", trained["hybrid"]["weights"])
    tokens = plain.batch(model_config("hybrid"), LENGTHS)["tokens"]
    whole, _ = module(tokens)
    whole[:, 100:].square().sum().backward()
    expected = {own: weight.grad.clone() for own, weight in module.named_parameters()}
    module.zero_grad()
    _, states = module(tokens[:, :100])
    later, _ = module(tokens[:, 100:], states)
    later.square().sum().backward()
    for own, weight in module.named_parameters():
        assert plain.error(weight.grad, expected[own]) < 1e-10, own


@pytest.mark.parametrize("name", MODELS)
def test_shapes_without_memory_are_those_of_the_trained_weights(name: str, trained: dict[str, Any]) -> None:
    model, weights = model_config(name), trained[name]["weights"]
    rows = exported_tensors(model, vocab_size=56)
    expected = {own: tuple(rows_of(weights[one.key], one.ranges).shape) for own, one in rows.items()}
    assert tensor_shapes(shape_of(model, vocab_size=56)) == expected

"""Plain models that fill masks or name classes, against the training model; padding, and what such models refuse."""

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
from lightscale.exchange.files.weights import exported_tensors, shape_of
from lightscale.exchange.plain.model import PlainModel, model_of

ROOT = Path(__file__).resolve().parents[2]
plain = SimpleNamespace(**runpy.run_path(str(ROOT / "tests/helpers/plain_models.py")))
printed = runpy.run_path(str(ROOT / "tests/models/mixers/test_printed_forms.py"))["CASES"]

LENGTHS = [[149], [149]]
NUM_IDS = 56
"""Of the tokenizer; the mask is this id."""
LIGHTNET = {"lightnet": {"causal": False, "gate_rank": 3}}
LLAMA = {"llama": {"causal": False, "num_key_value_heads": 2}}
MODELS: dict[str, dict[str, Any]] = {
    "lion-lit": {"mixer": "lion-lit", "head": {"num_labels": 3, "pooling": "first"}},
    "lion-retnet": {"mixer": "lion-retnet", "tie_word_embeddings": False},
    "lion-s": {"mixer": "lion-s", "head": {"num_labels": 5, "pooling": "last"}},
    "lion-s vector": {"mixer": "lion-s", "mixer_options": {"lion-s": {"vector_decay": True}}},
    "lion-s enter": {
        "mixer": "lion-s",
        "mixer_options": {"lion-s": {"gate": "enter", "input_gate": True, "scale": False, "feature_map": "none"}},
    },
    "lightnet": {"mixer": "lightnet", "mixer_options": LIGHTNET, "glu_activation": "silu"},
    "llama": {"mixer": "llama", "mixer_options": LLAMA, "glu_activation": "silu", "norm": "rmsnorm"},
    "bi-rn": {"mixer": "bi-rn", "mixer_options": {"bi-rn": {"positions": 150, "eps": 0.0}}},
    "bi-rn pairs": {
        "mixer": ["bi-rn", "causal-rn"],
        "mixer_options": {"bi-rn": {"form": "quadratic", "activation": "silu", "expansion": 2}},
    },
    **{f"printed {name}": case for name, (case, _, _) in printed.items() if "noncausal" in name},
    "hybrid": {
        "mixer": ["lion-s", "lightnet", "lion-retnet", "llama", "lion-lit"],
        "mixer_options": {**LIGHTNET, **LLAMA, "lion-lit": {"eps": 0.1}},
        "num_layers": 5,
        "norm": "rmsnorm",
        "head": {"num_labels": 4, "pooling": "mean"},
    },
}


def model_config(name: str) -> ModelConfig:
    sizes = {"hidden_size": 48, "num_heads": 8, "intermediate_size": 40, "vocab_size": NUM_IDS + plain.PADDING_ROWS}
    return ModelConfig.model_validate({"num_layers": 2, **sizes, **MODELS[name]})


def batch(name: str) -> dict[str, Tensor]:
    rows = plain.batch(model_config(name), LENGTHS)
    head = model_config(name).head
    if head is None:
        rows["tokens"][:, ::7] = NUM_IDS
    else:
        rows["labels"] %= head.num_labels
    return dict(rows)


def training_figures(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    """Of the training model of each name: logits, or log-probabilities of labels, and the loss's gradients, fp64."""
    found = {}
    for number, name in enumerate(MODELS):
        model, rows = model_config(name), batch(name)
        with plain.built_model(model, f"{init_method}-{number}") as module:
            plain.disturb(module)
            if model.head is None:
                found[name] = plain.figures(module, rows)
                continue
            losses = module(rows["tokens"], rows["positions"], rows["labels"])
            (losses[:, -1] * rows["weight"][:, 0]).sum().backward()
            with torch.no_grad():
                hidden = module(rows["tokens"], rows["positions"], hidden_only=True)
                logits, _ = module.label_log_probability(hidden, rows["positions"])
            gradients = {own: weight.grad for own, weight in plain.named_parameters(module)}
            found[name] = {"logits": logits, "gradients": gradients, "weights": plain.weights_of(module)}
    return found


@pytest.fixture(scope="module")
def trained(run_ranks: Callable[..., list[Any]]) -> dict[str, Any]:
    return run_ranks(training_figures, 1)[0]


def rows_of(whole: Tensor, ranges: tuple[tuple[int, int], ...] | None) -> Tensor:
    return whole if ranges is None else torch.cat([whole[first:last] for first, last in ranges])


def plain_model(name: str, weights: dict[str, Tensor]) -> PlainModel:
    model = model_config(name)
    shape = shape_of(model, vocab_size=NUM_IDS + 1, task="masked")
    module = model_of(shape).double()
    taken = exported_tensors(model, vocab_size=shape.vocab_size)
    module.load_state_dict({own: rows_of(weights[rows.key], rows.ranges) for own, rows in taken.items()})
    return module


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_every_gradient_are_those_of_the_training_model(name: str, trained: dict[str, Any]) -> None:
    found, rows, module = trained[name], batch(name), plain_model(name, trained[name]["weights"])
    logits = module(rows["tokens"])
    if model_config(name).head is None:
        assert plain.error(logits, found["logits"][..., :NUM_IDS]) < 1e-10
        losses = F.cross_entropy(logits.transpose(1, 2), rows["labels"], reduction="none")
        (losses * rows["weight"]).sum().backward()
    else:
        assert plain.error(logits.log_softmax(-1), found["logits"]) < 1e-10
        losses = F.cross_entropy(logits, rows["labels"][:, -1], reduction="none")
        (losses * rows["weight"][:, 0]).sum().backward()
    taken, used = exported_tensors(model_config(name), vocab_size=NUM_IDS + 1), set()
    for own, weight in module.named_parameters():
        expected = rows_of(found["gradients"][taken[own].key], taken[own].ranges)
        assert weight.grad is not None and expected.norm() > 0, own
        assert plain.error(weight.grad, expected) < 1e-10, own
        used.add(taken[own].key)
    assert used == found["weights"].keys()


@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_nothing_wherever_it_stands(name: str, trained: dict[str, Any]) -> None:
    """Left, right and in between, fixed decays included; outputs and gradients. A row of padding alone is numbers."""
    module, is_masked = plain_model(name, trained[name]["weights"]), model_config(name).head is None
    short = batch(name)["tokens"][:1, :90]
    expected = module(short)
    expected.square().sum().backward()
    gradients = {own: weight.grad.clone() for own, weight in module.named_parameters()}
    module.zero_grad()
    inside = torch.ones(149, dtype=torch.bool)
    inside[torch.randperm(149, generator=torch.Generator().manual_seed(3))[:59]] = False
    masks = torch.stack([torch.arange(149) >= 59, torch.arange(149) < 90, inside])
    padded = torch.full((3, 149), 7)
    padded[masks] = short.repeat(3, 1).flatten()
    found = module(padded, masks)
    assert found.isfinite().all()
    kept = found[masks].view(3, 90, -1) if is_masked else found
    assert plain.error(kept, expected.expand_as(kept)) < 1e-10
    kept.square().sum().backward()
    for own, weight in module.named_parameters():
        assert plain.error(weight.grad, 3 * gradients[own]) < 1e-9, own
    module.zero_grad()
    empty = module(padded, torch.zeros_like(masks))
    empty.square().sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in module.parameters())


def test_what_reads_both_ways_takes_no_state(trained: dict[str, Any]) -> None:
    module = plain_model("hybrid", trained["hybrid"]["weights"])
    assert module.shape.reads_both_ways()
    for block in module.model.layers:
        x = torch.zeros(1, 3, 48, dtype=torch.float64)
        assert block.mixer(x)[1] == {}
        with pytest.raises(ValueError, match="reads whole rows in both directions"):
            block.mixer(x, {})

"""CausalRN and BiRN against the printed perceptron of every pair of tokens, summed with its divisor."""

import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.config.files import load
from lightscale.config.model import ModelConfig
from lightscale.errors import UserError
from lightscale.evaluation.inference.documents import Documents
from lightscale.models.accounting import parameter_shapes
from lightscale.models.registry import check_model, layer_operators

ROOT = Path(__file__).resolve().parents[3]
plain = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "plain_models.py")))
RunRanks = Callable[..., list[Any]]
LONGEST = 149


def stack(causal: dict[str, Any], both: dict[str, Any], **more: Any) -> ModelConfig:
    shape = {"num_layers": 2, "hidden_size": 9, "num_heads": 3, "intermediate_size": 8, "vocab_size": 101}
    options = {"causal-rn": causal, "bi-rn": both}
    return ModelConfig(mixer=["causal-rn", "bi-rn"], mixer_options=options, **(shape | {"norm": "rmsnorm"} | more))


QUADRATIC = {"form": "quadratic", "eps": 0.0}
MODELS = {
    "linear": stack({"eps": 0.0, "positions": LONGEST}, {"eps": 0.0, "expansion": 2}),
    # The blocks of the paper have nothing beside the mixer.
    "quadratic": stack(QUADRATIC | {"positions": 160}, QUADRATIC, intermediate_size=0, norm="layernorm"),
    "other activations": stack(
        {"form": "quadratic", "activation": "relu", "eps": 1e-2, "expansion": 2},
        {"form": "quadratic", "activation": "silu", "pre_norm": "off", "eps": 0.1},
    ),
    "sides": stack(
        {"form": "quadratic", "activation": "elu", "pre_norm": "approximate", "post_norm": False},
        {"form": "quadratic", "activation": "elu", "eps": 0.1},
    ),
    "no norms": stack({"pre_norm": "off", "post_norm": False}, {"pre_norm": "off", "eps": 0.0}, norm="layernorm"),
}
# Causal alone: what generates.
CAUSAL: dict[str, Any] = {"num_layers": 2, "hidden_size": 9, "num_heads": 3, "intermediate_size": 0, "vocab_size": 101}
WRITERS = {
    "exp": ModelConfig(mixer="causal-rn", mixer_options={"causal-rn": QUADRATIC | {"positions": 60}}, **CAUSAL),
    "sides": ModelConfig(
        mixer=["causal-rn", "tnl"],
        mixer_options={"causal-rn": QUADRATIC | {"activation": "elu", "pre_norm": "approximate", "post_norm": False}},
        **CAUSAL,
    ),
}
ACTIVATIONS = {
    "exp": torch.exp,
    "relu": torch.relu,
    "elu": lambda s: torch.where(s > 0, s, torch.exp(s.clamp(max=0)) - 1),
    "silu": plain.silu,
}


def layer_norm(x: Tensor, eps: float) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()


def pairs(model: ModelConfig, x: Tensor, weights: dict[str, Tensor], layer: int) -> Tensor:
    """y_t = 1/n Σ_s W_o ψ(W [x_s; x_t] + c) + c_o (equations 4 to 7), with norms as the options say; x (n, d)."""
    causal, options = model.layers[layer] == "causal-rn", model.layer_options(layer)
    form: Any = options
    b, a = x @ weights["b_proj.weight"].T, x @ weights["a_proj.weight"].T + weights["a_proj.bias"]
    exact = form.pre_norm == "exact" or (form.pre_norm == "auto" and form.form == "quadratic")
    if form.pre_norm == "approximate" or (form.pre_norm == "auto" and form.form == "linear"):
        a, b = layer_norm(a, form.eps), layer_norm(b, form.eps)
    s = a[:, None] + b[None]
    hidden = ACTIVATIONS[form.activation](layer_norm(s, form.eps) if exact else s)
    seen = torch.ones(len(x), len(x), dtype=x.dtype)
    seen = seen.tril() if causal else seen
    o = torch.einsum("ts, tsd -> td", seen / seen.sum(1, keepdim=True), hidden)
    if getattr(form, "post_norm", True):
        # ε is relative to the largest channel; for ε = 0 this changes nothing.
        o = layer_norm(o if form.eps == 0 else o / o.detach().abs().amax(-1, keepdim=True), form.eps)
    return o @ weights["out_proj.weight"].T + weights["out_proj.bias"]


def learned(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    table = weights.get("embedding.positions.table")
    return x if table is None else x + table[: len(x)]


def measure(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    found = {}
    for name, model in MODELS.items():
        with plain.built_model(model, f"{init_method}-{name}") as module:
            initial = plain.weights_of(module)
            plain.disturb(module)
            found[name] = {"initial": initial, **plain.figures(module, plain.batch(model, plain.LENGTHS))}
    with plain.built_model(MODELS["quadratic"], f"{init_method}-long") as module:
        long = torch.zeros(1, 161, dtype=torch.int64)
        with pytest.raises(UserError) as caught:
            module(long, torch.arange(161)[None])
        found["refusal"] = str(caught.value)
    for name, model in WRITERS.items():
        with plain.built_model(model, f"{init_method}-{name}") as module:
            plain.disturb(module)
            found[f"writing {name}"] = written(module)
    return found


@torch.inference_mode()
def written(module: Any) -> dict[str, float]:
    """How far logits from the cache are from those of whole texts, by how they were come by."""
    texts = torch.randint(0, 97, (3, 40), generator=torch.Generator().manual_seed(1)).tolist()
    whole = [module(torch.tensor([ids]), torch.arange(40)[None])[0, :, :97] for ids in texts]
    worst = {"a token at a time": 0.0, "parts": 0.0, "unequal texts": 0.0, "one that ends": 0.0}
    worst["a beginning that is shared"] = 0.0

    def compare(how: str, documents: Documents, logits: Tensor, rows: list[int]) -> None:
        for found, row, position in zip(logits, rows, documents.positions, strict=True):
            worst[how] = max(worst[how], float((found - whole[row][position - 1]).abs().max()))

    for how, parts in (("a token at a time", [1] * 40), ("parts", [7, 1, 13, 1, 18])):
        documents, done = Documents(module), 0
        for size in parts:
            ids = [text[done : done + size] for text in texts]
            # Room for three more: it is made again as the texts grow.
            compare(how, documents, documents.feed(ids) if done else documents.begin(ids, room=3), [0, 1, 2])
            done += size
    documents = Documents(module)
    compare("unequal texts", documents, documents.begin([texts[0][:5], texts[1][:23], texts[2][:9]], room=2), [0, 1, 2])
    for _ in range(9):
        ids = [[text[position]] for text, position in zip(texts, documents.positions, strict=True)]
        compare("unequal texts", documents, documents.feed(ids), [0, 1, 2])
    documents.keep([2, 0])
    for _ in range(5):
        ids = [[texts[row][position]] for row, position in zip([2, 0], documents.positions, strict=True)]
        compare("one that ends", documents, documents.feed(ids), [2, 0])
    # Two texts behind the first 11 tokens of one.
    prefix, documents = Documents(module), Documents(module)
    prefix.begin([texts[0][:11]], room=0)
    logits = documents.begin_behind(prefix, [texts[0][11:20], texts[0][11:13]], room=1)
    compare("a beginning that is shared", documents, logits, [0, 0])
    for _ in range(4):
        ids = [[texts[0][position]] for position in documents.positions]
        compare("a beginning that is shared", documents, documents.feed(ids), [0, 0])
    return worst


@pytest.fixture(scope="module")
def built(run_ranks: RunRanks) -> dict[str, Any]:
    (found,) = run_ranks(measure, 1)
    return dict(found)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_the_plain_one(built: dict[str, Any], name: str) -> None:
    model = MODELS[name]
    rows = plain.batch(model, plain.LENGTHS)
    mix = functools.partial(pairs, model)
    plain.assert_equal(built[name], plain.plain_figures(model, built[name]["weights"], rows, mix, learned))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_that_are_counted(built: dict[str, Any], name: str) -> None:
    """Those of blocks without a gated linear unit, and of learned positions, among them."""
    shapes = {path: tuple(weight.shape) for path, weight in built[name]["weights"].items()}
    assert shapes == parameter_shapes(MODELS[name])
    assert any(".mlp." in path for path in shapes) == (name != "quadratic")


def test_initial_weights(built: dict[str, Any]) -> None:
    """Output projections are smaller by the root of the number of residual connections, as the paper draws them."""
    for name, connections in (("linear", 4), ("quadratic", 2)):
        initial = built[name]["initial"]
        assert not initial["decoder.layers.0.self_attention.a_proj.bias"].any()
        out = initial["decoder.layers.0.self_attention.out_proj.weight"]
        assert float(out.std()) == pytest.approx(0.02 / connections**0.5, rel=0.35)


def test_more_tokens_than_positions_are_refused(built: dict[str, Any]) -> None:
    assert built["refusal"].startswith("161 tokens, but the model has 160 learned positions")


@pytest.mark.parametrize("name", WRITERS)
def test_the_quadratic_form_generates_as_it_computes_whole_texts(built: dict[str, Any], name: str) -> None:
    worst = built[f"writing {name}"]
    assert max(worst.values()) < 1e-10, worst


def test_the_form_decides_the_operator() -> None:
    assert layer_operators(MODELS["linear"]) == ("log_sum", "log_sum_whole")
    assert layer_operators(MODELS["quadratic"]) == ("relation", "relation")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["activation=relu"], r'activation = "relu" with form = "linear": only exp has a linear form'),
        (["pre_norm=exact"], r'pre_norm = "exact" with form = "linear": a norm of each pair needs form = "quadratic"'),
        (["form=quadratic", "pre_norm=off"], r'form = "linear" computes the same without overflow'),
        (["form=cubic"], r'form = "cubic".*"linear".*"quadratic"'),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(ROOT / "configs" / "causal-rn-tiny.toml", [f"model.mixer_options.causal-rn.{word}" for word in words])


def test_exponentials_that_could_overflow_are_refused() -> None:
    config = load(
        ROOT / "configs" / "causal-rn-tiny.toml",
        [f"model.mixer_options.causal-rn.{word}" for word in ("form=quadratic", "expansion=100")],
    )
    with pytest.raises(UserError, match=r"expansion = 100 and model.hidden_size = 64 give 6400 .* use at most 6000"):
        check_model(config.model, config.parallel)

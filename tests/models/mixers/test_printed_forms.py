"""Options that train what a paper prints: each against an oracle written from the equation, in fp64.

Scaling Laws: arXiv 2406.16690, appendix A.1; LightNet: arXiv 2405.21022. Equation numbers stand at the oracles.
"""

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
from lightscale.models.mixers.hgrn2 import lower_bounds_to_one

plain = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "plain_models.py")))
mixers = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "plain_mixers.py")))

RunRanks = Callable[..., list[Any]]
Weights = dict[str, Tensor]
Case = tuple[dict[str, Any], Callable[..., Tensor], Callable[[Tensor, Weights], Tensor] | None]
SHAPE = {"num_layers": 3, "hidden_size": 18, "num_heads": 3, "intermediate_size": 20, "vocab_size": 41}


# ----- the oracles: normalised input (n, d) of one document, raw input among the weights -----------------------------


def rotated(x: Tensor, theta: Tensor) -> Tensor:
    """(h, n, k) -> (h, n, 2 k): [cos(t θ) x, sin(t θ) x] (equation 17)."""
    turns = torch.arange(x.size(1), dtype=x.dtype)[:, None] * theta[:, None]
    return torch.cat([turns.cos() * x, turns.sin() * x], dim=-1)


def attended(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """LA(Q, K, V, λ), the recurrence; decay: (h,)."""
    S, outputs = torch.zeros(q.size(0), q.size(2), v.size(2), dtype=q.dtype), []
    for t in range(q.size(1)):
        S = decay[:, None, None] * S + k[:, t, :, None] * v[:, t, None, :]
        outputs.append((S * q[:, t, :, None]).sum(dim=1))
    return torch.stack(outputs, dim=1)


def printed_output(model: ModelConfig, o: Tensor, weights: Weights) -> Tensor:
    """Norm(Concat O) ⊙ Sigmoid(X W_down W_up), X without a bar, and no W_o (equations 9 and 17)."""
    gate = torch.sigmoid(weights[plain.RAW_INPUT] @ weights["gate_down.weight"].T @ weights["gate_up.weight"].T)
    return plain.norm(model, plain.concatenated(o)) * gate


def linear_decays(model: ModelConfig, layer: int) -> Tensor:
    """exp(-8h/H (1 - l/L)), h and l from 0."""
    return torch.tensor(
        [(-8 * h / model.num_heads * (1 - layer / model.num_layers)) for h in range(model.num_heads)],
        dtype=torch.float64,
    ).exp()


def minimax_decays(model: ModelConfig, layer: int) -> Tensor:
    """MiniMax-Text-01: base^(h+1) with base = 1 / 2^(8/H), times 1 - l / (L - 1 + 1e-5) + 1e-5."""
    base, factor = 1 / 2 ** (8 / model.num_heads), 1 - layer / (model.num_layers - 1 + 1e-5) + 1e-5
    rates = [base ** (h + 1) * factor for h in range(model.num_heads)]
    return torch.tensor(rates, dtype=torch.float64).neg().exp()


def tnl_printed(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Equation 9, without positions; λ of the linear slopes."""
    q, k, v = plain.heads(model, x, weights)
    o = attended(plain.silu(q), plain.silu(k), v, linear_decays(model, layer))
    return printed_output(model, o, weights)


def tnl_all_layers(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """LRPE in every layer, decays as MiniMax has them; gate and W_o as usual."""
    q, k, v = plain.heads(model, x, weights)
    q, k = (rotated(plain.silu(y), weights["lrpe.theta"]) for y in (q, k))
    return plain.gated_output(model, attended(q, k, v, minimax_decays(model, layer)), x, weights)


def cosformer2_printed(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Equation 17."""
    q, k, v = plain.heads(model, x, weights)
    q, k = (rotated(plain.silu(y), weights["lrpe.theta"]) for y in (q, k))
    return printed_output(model, attended(q, k, v, torch.ones(model.num_heads, dtype=x.dtype)), weights)


def toeplitz_printed(x: Tensor, weights: Weights) -> Tensor:
    """LightNet, equation 11, one dimension: y_n = Σ_{m ≤ n} Σ_r λ_r^(n-m) x_m."""
    decays = torch.sigmoid(weights["embedding.tpe.decay_logit"])
    rows = [sum((decays ** (n - m)).sum() * x[m] for m in range(n + 1)) for n in range(len(x))]
    return torch.stack(rows)  # type: ignore[arg-type]


def bounds_printed(table: Tensor) -> Tensor:
    """Equation 12: Cumsum(Softmax(LR, dim = 0), dim = 0)."""
    return (table.exp() / table.exp().sum(dim=0)).cumsum(dim=0)


def hgrn2_printed(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Equations 12 and 13: no activation on Og, no W_o."""
    og, fg, v = plain.heads(model, x, weights)
    bound = bounds_printed(weights["lower_bounds.table"])[layer].view(model.num_heads, 1, model.head_dim)
    forget = bound + (1 - bound) * torch.sigmoid(fg)
    S, outputs = torch.zeros(model.num_heads, model.head_dim, model.head_dim, dtype=x.dtype), []
    for t in range(len(x)):
        S = forget[:, t, :, None] * S + (1 - forget[:, t, :, None]) * v[:, t, None, :]
        outputs.append((S * og[:, t, :, None]).sum(dim=1))
    return plain.norm(model, plain.concatenated(torch.stack(outputs, dim=1)))


def fixed_angles(model: ModelConfig) -> Tensor:
    """LightNet, equation 14: θ_j = 10000^(-2j/d)."""
    j = torch.arange(model.hidden_size, dtype=torch.float64)
    return (10000.0 ** (-2 * j / model.hidden_size)).view(model.num_heads, model.head_dim)


def lightnet_sums(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """LightNet "w/o Decay": silu on the keys. Gate of full rank."""
    q, k, v = plain.heads(model, x, weights)
    q, k = (rotated(plain.silu(y), fixed_angles(model)) for y in (q, k))
    o = attended(q, k, v, torch.ones(model.num_heads, dtype=x.dtype))
    gate = torch.sigmoid(x @ weights["gate_proj.weight"].T)
    return (plain.norm(model, plain.concatenated(o)) * gate) @ weights["out_proj.weight"].T


def lightnet_bare(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """LightNet, equation 7, "w/o LRPE" and "w/o Norm"."""
    q, k, v = plain.heads(model, x, weights)
    s, S, outputs = torch.zeros_like(k[:, 0]), torch.zeros(*k[:, 0].shape, model.head_dim, dtype=x.dtype), []
    for t in range(len(x)):
        s = s + k[:, t].exp()
        share = k[:, t].exp() / s
        S = (1 - share)[..., None] * S + share[..., None] * v[:, t, None, :]
        outputs.append((S * plain.silu(q[:, t])[..., None]).sum(dim=1))
    gate = torch.sigmoid(x @ weights["gate_down.weight"].T @ weights["gate_up.weight"].T)
    return (plain.concatenated(torch.stack(outputs, dim=1)) * gate) @ weights["out_proj.weight"].T


def lightnet_no_share(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Equation 7 with δ beside the keys: a_t = s_{t-1} / s_t (proposition 3.2), keys as queries. Learned angles."""
    q, k, v = plain.heads(model, x, weights)
    delta = (x @ weights["decay_down.weight"].T @ weights["decay_up.weight"].T).exp()
    delta = delta.view(len(x), model.num_heads, model.head_dim).transpose(0, 1)
    q, k = (rotated(plain.silu(y), weights["lrpe.theta"]) for y in (q, k))
    s, S, outputs = torch.zeros_like(delta[:, 0]), torch.zeros(*k[:, 0].shape, model.head_dim, dtype=x.dtype), []
    for t in range(len(x)):
        left = s / (s + delta[:, t])
        s = s + delta[:, t]
        S = torch.cat([left, left], dim=-1)[..., None] * S + k[:, t, :, None] * v[:, t, None, :]
        outputs.append((S * q[:, t, :, None]).sum(dim=1))
    return plain.gated_output(model, torch.stack(outputs, dim=1), x, weights)


def lightnet_learned(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Equation 7 with the angles of equation 14 learned."""
    return mixers.MIX["lightnet"](model, x, weights, layer)


def lightnet_learned_whole(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Equation 8 with learned angles, over the document."""
    q, k, v = plain.heads(model, x, weights)
    k = k.exp() / k.exp().sum(dim=1, keepdim=True)
    q, k = (rotated(y, weights["lrpe.theta"]) for y in (plain.silu(q), k))
    return plain.gated_output(model, q @ (k.mT @ v), x, weights)


def lightnet_raw_gate(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Equation 8 "w/o LRPE", over the document; the gate of the raw input."""
    q, k, v = plain.heads(model, x, weights)
    S = (k.exp() / k.exp().sum(dim=1, keepdim=True)).mT @ v
    return plain.gated_output(model, plain.silu(q) @ S, weights[plain.RAW_INPUT], weights)


def tnl_two_scans(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Each pair of tokens once by its distance, and each token with itself twice, once for each scan."""
    q, k, v = plain.heads(model, x, weights)
    distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
    decay = minimax_decays(model, layer)[:, None, None] ** distance.abs()
    turns = distance[..., None] * weights["lrpe.theta"][:, None, None]
    scores = torch.einsum("htc, hsc, htsc -> hts", plain.silu(q), plain.silu(k), turns.cos()) * decay
    return plain.gated_output(model, (scores + torch.diag_embed(scores.diagonal(dim1=1, dim2=2))) @ v, x, weights)


def hgrn2_two_scans(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """The recurrence from either end, whose outputs are added."""
    q, f, v = plain.heads(model, x, weights)
    bound = mixers.lower_bounds(weights["lower_bounds.table"])[layer].view(model.num_heads, 1, model.head_dim)
    forget = bound + (1 - bound) * torch.sigmoid(f)
    outputs = [torch.zeros_like(v[:, 0])] * len(x)
    for tokens in (range(len(x)), reversed(range(len(x)))):
        S = torch.zeros(model.num_heads, model.head_dim, model.head_dim, dtype=x.dtype)
        for t in tokens:
            S = forget[:, t, :, None] * S + (1 - forget[:, t, :, None]) * v[:, t, None, :]
            outputs[t] = outputs[t] + torch.einsum("hkv, hk -> hv", S, plain.silu(q[:, t]))
    return plain.norm(model, plain.concatenated(torch.stack(outputs, dim=1))) @ weights["out_proj.weight"].T


PRINTED = {"gate_input": "raw", "output_projection": False}
UNTIED = {"final_norm": False, "tie_word_embeddings": False}
CASES: dict[str, Case] = {
    "tnl": (
        {"mixer": "tnl", **UNTIED, "mixer_options": {"tnl": {**PRINTED, "lrpe": "none", "decay": "linear"}}},
        tnl_printed,
        None,
    ),
    "tnl, LRPE everywhere": (
        {"mixer": "tnl", "norm": "rmsnorm", "mixer_options": {"tnl": {"lrpe": "all", "decay": "minimax"}}},
        tnl_all_layers,
        None,
    ),
    "cosformer2": (
        {
            "mixer": "cosformer2",
            **UNTIED,
            "norm": "rmsnorm",
            "tpe": {"form": "printed", "modes": 5},
            "mixer_options": {"cosformer2": PRINTED},
        },
        cosformer2_printed,
        toeplitz_printed,
    ),
    "hgrn2": (
        {
            "mixer": "hgrn2",
            **UNTIED,
            "mixer_options": {
                "hgrn2": {"query_activation": "none", "lower_bounds": "to_one", "output_projection": False}
            },
        },
        hgrn2_printed,
        None,
    ),
    "lightnet without decay": (
        {
            "mixer": "lightnet",
            "tpe": {"modes": 7},
            "mixer_options": {"lightnet": {"decay": False, "full_rank_gate": True}},
        },
        lightnet_sums,
        plain.toeplitz,
    ),
    "lightnet without LRPE, TPE and norm": (
        {"mixer": "lightnet", "mixer_options": {"lightnet": {"lrpe": False, "tpe": False, "output_norm": False}}},
        lightnet_bare,
        None,
    ),
    "lightnet, learned angles": (
        {"mixer": "lightnet", "mixer_options": {"lightnet": {"learned_angles": True, "gate_rank": 5}}},
        lightnet_learned,
        plain.toeplitz,
    ),
    "lightnet, no share": (
        {"mixer": "lightnet", "mixer_options": {"lightnet": {"shared_decay": False, "learned_angles": True}}},
        lightnet_no_share,
        plain.toeplitz,
    ),
    "noncausal, learned angles": (
        {"mixer": "lightnet", "mixer_options": {"lightnet": {"causal": False, "learned_angles": True}}},
        lightnet_learned_whole,
        plain.toeplitz,
    ),
    "noncausal tnl": (
        {"mixer": "tnl", "mixer_options": {"tnl": {"causal": False, "lrpe": "all", "decay": "minimax"}}},
        tnl_two_scans,
        None,
    ),
    "noncausal hgrn2": ({"mixer": "hgrn2", "mixer_options": {"hgrn2": {"causal": False}}}, hgrn2_two_scans, None),
    "noncausal without LRPE": (
        {
            "mixer": "lightnet",
            "mixer_options": {"lightnet": {"causal": False, "lrpe": False, "tpe": False, "gate_input": "raw"}},
        },
        lightnet_raw_gate,
        None,
    ),
}


def model_of(name: str) -> ModelConfig:
    return ModelConfig.model_validate({**SHAPE, **CASES[name][0]})


def measure(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    found = {}
    for number, name in enumerate(CASES):
        model = model_of(name)
        with plain.built_model(model, f"{init_method}-{number}") as module:
            plain.disturb(module)
            found[name] = plain.figures(module, plain.batch(model, plain.LENGTHS))
            if "noncausal" not in name:
                found[name]["in steps"] = in_steps(module, model)
    return found


@torch.no_grad()
def in_steps(module: Any, model: ModelConfig) -> tuple[Tensor, Tensor]:
    """Logits of a document in one pass, and as a prompt of 66 tokens with others behind it one by one."""
    tokens, positions = plain.batch(model, [[70]])["tokens"], torch.arange(70)[None]
    states: dict[str, Any] = {}
    parts = [module(tokens[:, :66], positions[:, :66], states=states)]
    parts += [module(tokens[:, t : t + 1], positions[:, t : t + 1], states=states) for t in range(66, 70)]
    return module(tokens, positions), torch.cat(parts, dim=1)


@pytest.fixture(scope="module")
def built(run_ranks: RunRanks) -> dict[str, Any]:
    (found,) = run_ranks(measure, 1)
    return dict(found)


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_the_printed_one(name: str, built: dict[str, Any]) -> None:
    """Logits, losses and the gradient of every parameter; then generation."""
    model, found = model_of(name), built[name]
    _, mix, encode = CASES[name]
    rows = plain.batch(model, plain.LENGTHS)
    expected = plain.plain_figures(model, found["weights"], rows, functools.partial(mix, model), encode)
    for key in ("logits", "losses"):
        assert plain.error(found[key], expected[key]) < 1e-10, key
    assert found["gradients"].keys() == expected["gradients"].keys()
    silent = []
    for key, gradient in expected["gradients"].items():
        # The oracle's sum over the layers is 1 up to rounding, which the norm of an output of 0 magnifies.
        if gradient.norm() < 1e-8:
            silent.append(key)
            assert not found["gradients"][key].any(), key
        else:
            assert plain.error(found["gradients"][key], gradient) < 1e-10, key
    # With bounds up to 1 the last layer's mixer writes nothing, and learns nothing.
    last = "decoder.layers.2.self_attention."
    assert silent == ([key for key in found["weights"] if key.startswith(last)] if name == "hgrn2" else [])
    if "in steps" in found:
        whole, steps = found["in steps"]
        assert plain.error(steps, whole) < 1e-10


def test_bounds_up_to_one_end_there() -> None:
    table = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    bounds = lower_bounds_to_one(table)
    torch.testing.assert_close(bounds, bounds_printed(table), rtol=1e-14, atol=0)
    assert torch.equal(bounds[-1], torch.ones(7, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(bounds[-1].sum() + 0 * table.sum(), table)
    assert torch.equal(gradient, torch.zeros_like(gradient))

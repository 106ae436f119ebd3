"""TNL against models.md §2, written out once more: whole matrices in fp64, gradients by autograd."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.models.language_model import LanguageModel, transformer_config
from lightscale.models.mixers.tnl import alibi_slopes, log_decays
from lightscale.parallel.initialization import draw_weights, named_parameters
from lightscale.parallel.mesh import start_mesh

RunRanks = Callable[..., list[Any]]
VOCAB_SIZE = 50
SHAPES: dict[str, dict[str, Any]] = {
    "three layers": {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "intermediate_size": 24},
    "one layer": {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 40},
    "six heads": {"num_layers": 2, "hidden_size": 48, "num_heads": 6, "intermediate_size": 32},
    "other choices": {
        "num_layers": 2,
        "hidden_size": 24,
        "num_heads": 3,
        "intermediate_size": 20,
        "glu_activation": "silu",
        "norm": "rmsnorm",
        "norm_eps": 1e-3,
        "mixer_options": {"tnl": {"gate_rank": 5}},
    },
}


# ----- the definition ------------------------------------------------------------------------------------------------


def slopes(num_heads: int) -> list[float]:
    """2^(-8(h+1)/H); with other numbers of heads, those of the power of two below, then every second of that above."""
    powers = {3: (2, 4, [0]), 6: (4, 8, [0, 2])}
    below, above, extra = powers.get(num_heads, (num_heads, 0, []))
    return [2 ** (-8 * (h + 1) / below) for h in range(below)] + [2 ** (-8 * (h + 1) / above) for h in extra]


def decay(head: int, layer: int, model: ModelConfig) -> float:
    factor = 1.0 if model.num_layers == 1 else 1 - layer / (model.num_layers - 1) + 1e-5
    return math.exp(-slopes(model.num_heads)[head] * factor)


def normalise(x: Tensor, model: ModelConfig, weight: Tensor | None) -> Tensor:
    x = x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) / x.size(-1) + model.norm_eps)
    return x if weight is None else x * weight


def mix(
    x: Tensor, w: dict[str, Tensor], layer: int, positions: Tensor, documents: Tensor, model: ModelConfig
) -> Tensor:
    """x: (n, d) of one row; positions and documents: (n,)."""
    n, d = x.shape
    h, k = model.num_heads, model.hidden_size // model.num_heads
    # The rows of the projection: for each head those of k, then of v.
    w_kv, w_q = w["kv_proj.weight"].view(h, 2, k, d), w["q_proj.weight"].view(h, k, d)
    outputs = []
    for head in range(h):
        q, key = F.silu(x @ w_q[head].T), F.silu(x @ w_kv[head, 0].T)
        v = x @ w_kv[head, 1].T
        if layer == 0:
            angles = positions[:, None] * w["lrpe.theta"][head]
            q = torch.cat([q * torch.cos(angles), q * torch.sin(angles)], dim=1)
            key = torch.cat([key * torch.cos(angles), key * torch.sin(angles)], dim=1)
        matrix = torch.zeros(n, n, dtype=torch.float64)
        for t in range(n):
            for s in range(t + 1):
                if documents[t] == documents[s]:
                    matrix[t, s] = decay(head, layer, model) ** (t - s)
        outputs.append(((q @ key.T) * matrix) @ v)
    gate = torch.sigmoid((x @ w["gate_down.weight"].T) @ w["gate_up.weight"].T)
    o = torch.cat(outputs, dim=1)
    o = o / torch.sqrt((o * o).mean(dim=-1, keepdim=True) + model.norm_eps)
    return (o * gate) @ w["out_proj.weight"].T


def logits_of(weights: dict[str, Tensor], tokens: Tensor, positions: Tensor, model: ModelConfig) -> Tensor:
    """(b, n, rows of the embedding)."""
    embedding = weights["embedding.word_embeddings.weight"]
    rows = []
    for row_tokens, row_positions in zip(tokens, positions, strict=True):
        documents = torch.cumsum((row_positions == 0).long(), dim=0)
        x = embedding[row_tokens]
        for layer in range(model.num_layers):
            prefix = f"decoder.layers.{layer}."
            own = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
            mixer = {name.removeprefix("self_attention."): w for name, w in own.items() if "self_attention" in name}
            normed = normalise(x, model, own.get("input_layernorm.weight"))
            x = x + mix(normed, mixer, layer, row_positions, documents, model)
            normed = normalise(x, model, own.get("pre_mlp_layernorm.weight"))
            first, second = (normed @ own["mlp.linear_fc1.weight"].T).chunk(2, dim=1)
            if model.glu_activation == "silu":
                first = first / (1 + torch.exp(-first))
            x = x + (first * second) @ own["mlp.linear_fc2.weight"].T
        x = normalise(x, model, weights.get("decoder.final_layernorm.weight"))
        rows.append(x @ embedding.T)
    return torch.stack(rows)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and labels (2, 23): a row that continues a document, and one of three documents."""
    tokens = torch.randint(0, VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(3))
    positions = torch.stack([torch.arange(23), torch.cat([torch.arange(9), torch.arange(1), torch.arange(13)])])
    return tokens[:, :-1], positions, tokens[:, 1:]


# ----- comparison ----------------------------------------------------------------------------------------------------


@contextmanager
def built(init_method: str, shape: dict[str, Any], dtype: torch.dtype) -> Iterator[LanguageModel]:
    """The model with weights ten times as large as usual, so that nothing is nearly linear."""
    model = ModelConfig(vocab_size=56, init_std=0.2, **shape)
    with start_mesh(device="cpu", init_method=init_method) as mesh:
        result = LanguageModel(transformer_config(model, mesh, dtype), model, vocab_size=VOCAB_SIZE, mesh=mesh)
        draw_weights(result, seed=1, tensor_rank=0, tensor_size=1)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in result.named_parameters():
                if "layernorm" in name:
                    parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype), alpha=0.3)
        yield result


def compare(rank: int, world_size: int, init_method: str) -> dict[str, dict[str, float]]:
    """Errors of logits, loss and every gradient in fp64, by shape of the model."""
    return {name: compare_shape(f"{init_method}-{name.replace(' ', '-')}", shape) for name, shape in SHAPES.items()}


def compare_shape(init_method: str, shape: dict[str, Any]) -> dict[str, float]:
    tokens, positions, labels = batch()
    with built(init_method, shape, torch.float64) as network:
        weights = {name: w.detach().clone().requires_grad_() for name, w in named_parameters(network)}
        expected = logits_of(weights, tokens, positions, network.model)
        losses = F.cross_entropy(expected[..., :VOCAB_SIZE].flatten(0, 1), labels.flatten(), reduction="none")
        cotangents = torch.randn(2, 23, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        (losses.view(2, 23) * cotangents).sum().backward()

        found_logits = network(tokens, positions)
        found = network(tokens, positions, labels)
        (found * cotangents).sum().backward()
        errors = {
            "logits": error(found_logits, expected),
            "losses": error(found, losses.view(2, 23)),
            "theta": float(weights["decoder.layers.0.self_attention.lrpe.theta"].grad.norm()),  # type: ignore[union-attr]
        }
        for name, parameter in named_parameters(network):
            assert parameter.grad is not None, name
            wanted = weights[name].grad
            assert wanted is not None, name
            errors[f"gradient of {name}"] = error(parameter.grad, wanted)
        return errors


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.detach() - expected.detach()).norm() / expected.detach().norm())


def test_the_whole_model_is_the_definition(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(compare, 1)
    assert set(found) == set(SHAPES)
    for shape, errors in found.items():
        # Only if the angles matter does their gradient show that they are right.
        assert errors.pop("theta") > 1e-3, shape
        assert len(errors) > 8
        for what, value in errors.items():
            assert value <= 1e-10, f"{shape}: {what} is off by {value}"


@pytest.mark.parametrize(
    ("num_heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (4, [2, 4, 6, 8]),
        (6, [2, 4, 6, 8, 1, 3]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (20, [*(0.5 * h for h in range(1, 17)), 0.25, 0.75, 1.25, 1.75]),
        (32, [0.25 * h for h in range(1, 33)]),
    ],
)
def test_slopes_of_every_published_number_of_heads(num_heads: int, exponents: list[float]) -> None:
    assert alibi_slopes(num_heads) == pytest.approx([2.0**-exponent for exponent in exponents], rel=1e-15)


def test_decays_grow_towards_one_with_the_layer() -> None:
    for layer, factor in ((0, 1.00001), (2, 0.50001), (4, 0.00001)):
        expected = [-(2.0**-exponent) * factor for exponent in (2, 4, 6, 8)]
        assert log_decays(4, layer, 5).tolist() == pytest.approx(expected, rel=1e-12)
    assert log_decays(4, 0, 1).tolist() == [-0.25, -0.0625, -(2.0**-6), -(2.0**-8)]
    assert log_decays(4, 0, 2).dtype == torch.float64

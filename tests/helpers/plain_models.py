"""Models written out with plain tensors, one document at a time, and the figures of built models to hold against them.

What the architectures share is here: embedding, norms, gated linear unit, tied output layer, cross entropy. Each test
brings its mixer as a function of one layer and one document. Nothing of the package's layers or kernels is used.
Loaded by path (runpy), by pytest's process and by the one that builds the model: tests are no package.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.models.language_model import LanguageModel, transformer_config
from lightscale.parallel.initialization import draw_weights, named_parameters
from lightscale.parallel.mesh import start_mesh

Weights = dict[str, Tensor]
"""By their global names; those of a layer's mixer by the names they have in it."""
Mix = Callable[[Tensor, Weights, int], Tensor]
"""(normalised input (n, d) of one document, weights of the mixer and of the model, layer from 0) -> output (n, d).

Among the weights ``RAW_INPUT`` is the input before the norm."""
RAW_INPUT = "input before the norm"
Encode = Callable[[Tensor, Weights], Tensor]
"""What the model does to the embedded tokens (n, d) of one document before the first layer."""

PADDING_ROWS = 4
"""Rows of the embedding beyond the vocabulary in the models of these tests."""
LENGTHS = [[1, 75, 2, 71], [149]]
"""Tokens of each document of each row: a chunk of the kernels ends inside documents, and documents inside a chunk."""


@contextmanager
def built_model(
    model: ModelConfig, init_method: str, dtype: torch.dtype = torch.float64, *, seed: int = 0
) -> Iterator[LanguageModel]:
    """``model`` on this one process, with its initial weights."""
    with start_mesh(device="cpu", init_method=init_method, timeout_s=60) as mesh:
        module = LanguageModel(
            transformer_config(model, mesh, dtype), model, vocab_size=model.vocab_size - PADDING_ROWS, mesh=mesh
        )
        draw_weights(module, seed=seed, tensor_rank=0, tensor_size=1)
        yield module


def weights_of(module: torch.nn.Module) -> Weights:
    return {name: weight.detach().clone() for name, weight in named_parameters(module)}


@torch.no_grad()
def disturb(module: torch.nn.Module, scale: float = 0.2) -> None:
    """Make every weight differ from every other, those that begin alike (bounds, angles, norms) included."""
    generator = torch.Generator().manual_seed(5)
    for _, weight in named_parameters(module):
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        weight.add_((scale * noise).to(weight.dtype))


def batch(model: ModelConfig, lengths: list[list[int]], seed: int = 0) -> dict[str, Tensor]:
    """Rows of documents: tokens, labels and positions (b, n), and a weight for the loss of each token."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), sum(lengths[0]))
    tokens, labels = torch.randint(0, model.vocab_size - PADDING_ROWS, (2, *shape), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    # Unequal, and 0 for some: a gradient that mixes tokens up cannot pass.
    weight = torch.rand(shape, generator=generator, dtype=torch.float64).sub_(0.1).clamp_(min=0)
    return {"tokens": tokens, "labels": labels, "positions": positions, "weight": weight}


def figures(module: LanguageModel, rows: dict[str, Tensor]) -> dict[str, Any]:
    """Logits, losses, and the gradient of the weighted loss in every parameter, of the built model."""
    module.zero_grad()
    losses = module(rows["tokens"], rows["positions"], rows["labels"])
    (losses * rows["weight"]).sum().backward()
    with torch.no_grad():
        logits = module(rows["tokens"], rows["positions"])
    gradients = {name: weight.grad for name, weight in named_parameters(module)}
    return {"logits": logits, "losses": losses.detach(), "gradients": gradients, "weights": weights_of(module)}


def initial_and_disturbed(
    rank: int, world_size: int, init_method: str, model: ModelConfig, lengths: list[list[int]]
) -> dict[str, Any]:
    """Of a model built on one process: its initial weights, and the figures with others."""
    with built_model(model, init_method) as module:
        initial = weights_of(module)
        disturb(module)
        return {"initial": initial, **figures(module, batch(model, lengths))}


def plain_figures(
    model: ModelConfig, weights: Weights, rows: dict[str, Tensor], mix: Mix, encode: Encode | None = None
) -> dict[str, Any]:
    """The same figures of the plain model; fp64, each document by itself."""
    leaves = {name: weight.double().clone().requires_grad_() for name, weight in weights.items()}
    logits, losses = [], []
    for tokens, positions, labels in zip(rows["tokens"], rows["positions"], rows["labels"], strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
        lengths = [stop - start for start, stop in pairwise(starts)]
        row = torch.cat([document_logits(model, leaves, ids, mix, encode) for ids in tokens.split(lengths)])
        used = row[:, : model.vocab_size - PADDING_ROWS]
        logits.append(row)
        losses.append(used.exp().sum(dim=1).log() - used[torch.arange(len(labels)), labels])
    loss = (torch.stack(losses) * rows["weight"]).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    gradients = dict(zip(leaves, found, strict=True))
    return {"logits": torch.stack(logits).detach(), "losses": torch.stack(losses).detach(), "gradients": gradients}


def document_logits(
    model: ModelConfig, weights: Weights, tokens: Tensor, mix: Mix, encode: Encode | None = None
) -> Tensor:
    """tokens (n,) of one document -> (n, V)."""
    embedding = weights["embedding.word_embeddings.weight"]
    x = embedding[tokens] * model.embedding_multiplier
    x = document_states(model, weights, x if encode is None else encode(x, weights), mix)
    logits = x @ weights.get("output_layer.weight", embedding).T
    return logits if model.final_logit_cap is None else model.final_logit_cap * (logits / model.final_logit_cap).tanh()


def document_states(model: ModelConfig, weights: Weights, x: Tensor, mix: Mix) -> Tensor:
    """x (n, d), the embedded and encoded tokens of one document -> the input of the output layer, (n, d)."""
    of_model = {name: weight for name, weight in weights.items() if ".layers." not in name}
    for layer in range(model.num_layers):
        block = f"decoder.layers.{layer}."
        own = {name.removeprefix(block): weight for name, weight in weights.items() if name.startswith(block)}
        of_mixer = {name.removeprefix("self_attention."): weight for name, weight in own.items()}
        of_mixer |= of_model | {RAW_INPUT: x}
        mixed = mix(before(model, x, own, "input_layernorm", layer), of_mixer, layer)
        x = x + behind(model, mixed, own, "self_attn_bda", layer)
        if model.intermediate_size:
            y = gated_linear_unit(model, before(model, x, own, "pre_mlp_layernorm", layer), own)
            x = x + behind(model, y, own, "mlp_bda", layer)
    if model.final_norm:
        x = block_norm(model, x, weights, "decoder.final_layernorm")
    return x


def placement(model: ModelConfig, layer: int) -> str:
    """Of the norms in a layer's block."""
    if model.norm_placement == "by_mixer":
        return "post" if model.layers[layer] in ("llama", "llama-local") else "pre"
    return model.norm_placement


def before(model: ModelConfig, x: Tensor, weights: Weights, name: str, layer: int) -> Tensor:
    """The input of a mixer or gated linear unit."""
    return x if placement(model, layer) == "post" else block_norm(model, x, weights, name)


def behind(model: ModelConfig, x: Tensor, weights: Weights, name: str, layer: int) -> Tensor:
    """Its output as the residual stream takes it."""
    return x if placement(model, layer) == "pre" else block_norm(model, x, weights, f"{name}.layernorm")


def block_norm(model: ModelConfig, x: Tensor, weights: Weights, name: str) -> Tensor:
    """``norm``, of x less its mean where that is LayerNorm."""
    weight = weights.get(f"{name}.weight")
    if weight is not None and model.zero_centered_norm:
        weight = 1 + weight
    x = x - x.mean(-1, keepdim=True) if model.norm == "layernorm" else x
    return norm(model, x, weight) + weights.get(f"{name}.bias", 0.0)


def norm(model: ModelConfig, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """RMS norm over the last dim, with a weight or without."""
    normalised = x / (x.square().mean(dim=-1, keepdim=True) + model.norm_eps).sqrt()
    return normalised if weight is None else normalised * weight


def gated_linear_unit(model: ModelConfig, x: Tensor, weights: Weights) -> Tensor:
    """W_3 (act(W_1 x) * W_2 x), W_1 above W_2 in one matrix; or W_2 act(W_1 x). With biases where there are any."""
    projected = x @ weights["mlp.linear_fc1.weight"].T + weights.get("mlp.linear_fc1.bias", 0.0)
    first = projected[..., : model.intermediate_size]
    if model.glu_activation == "silu":
        first = silu(first)
    elif model.glu_activation == "gelu_tanh":
        first = first / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (first + 0.044715 * first**3)))
    elif model.glu_activation == "gelu":
        first = first / 2 * (1 + torch.erf(first / math.sqrt(2)))
    if model.gated_linear_unit:
        first = first * projected[..., model.intermediate_size :]
    return first @ weights["mlp.linear_fc2.weight"].T + weights.get("mlp.linear_fc2.bias", 0.0)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def heads(model: ModelConfig, x: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """(n, d) -> three of (h, n, k): queries, and two vectors whose rows stand head by head in one projection."""
    both = "fv_proj" if "fv_proj.weight" in weights else "kv_proj"
    projected = x @ weights[f"{both}.weight"].T + weights.get(f"{both}.bias", 0.0)
    second, third = projected.view(len(x), model.num_heads, 2, -1).permute(2, 1, 0, 3)
    queries = x @ weights["q_proj.weight"].T + weights.get("q_proj.bias", 0.0)
    first = queries.view(len(x), model.num_heads, -1).transpose(0, 1)
    return first, second, third


def concatenated(o: Tensor) -> Tensor:
    """(h, n, v) -> (n, h v)."""
    return o.transpose(0, 1).flatten(1)


def gated_output(model: ModelConfig, o: Tensor, x: Tensor, weights: Weights) -> Tensor:
    """W_o (norm(concat o) * sigmoid(x W_down W_up)); o (h, n, v), x (n, d), the mixer's input."""
    gate = x @ weights["gate_down.weight"].T @ weights["gate_up.weight"].T
    return (norm(model, concatenated(o)) / (1 + torch.exp(-gate))) @ weights["out_proj.weight"].T


def places(model: ModelConfig, length: int) -> Tensor:
    """(n, axes) fp64: where the tokens of a document stand, by counting; leading tokens end the slices before."""
    if model.grid is None:
        return torch.arange(length, dtype=torch.float64)[:, None]
    inner = model.grid.shape[1:]
    slices = range(length + model.grid.leading_tokens + math.prod(inner))
    cells = list(itertools.product(slices, *map(range, inner)))
    lead = next(n for n in itertools.count(step=math.prod(inner)) if n >= model.grid.leading_tokens)
    first = lead - model.grid.leading_tokens
    return torch.tensor(cells[first : first + length], dtype=torch.float64)


def grid_toeplitz(model: ModelConfig, x: Tensor, weights: Weights) -> Tensor:
    """``toeplitz`` along each axis of a grid, added up: over the tokens before on the same line."""
    logits, gammas = weights["embedding.tpe.decay_logit"], weights.get("embedding.tpe.gamma")
    where, y = places(model, len(x)), torch.zeros_like(x)
    for axis in range(where.size(1)):
        logit = logits if logits.dim() == 1 else logits[axis]
        gamma = x.new_ones(x.size(1), len(logit)) if gammas is None else gammas[:, axis]
        steps = where[:, None] - where
        line = (steps.abs().sum(-1) == steps[..., axis].abs()) & (steps[..., axis] >= 0)
        powers = torch.where(line[..., None], torch.sigmoid(logit) ** steps[..., axis].clamp(min=0)[..., None], 0.0)
        y = y + torch.einsum("tsr, cr, sc -> tc", powers, gamma, x)
    return y if gammas is None else x + y


def toeplitz(x: Tensor, weights: Weights) -> Tensor:
    """Toeplitz positional encoding, the stream x + y (n, d): y_t[c] = Σ_τ (Σ_r γ[c, r] λ_r^τ) x_{t-τ}[c]."""
    logit, gamma = weights["embedding.tpe.decay_logit"], weights["embedding.tpe.gamma"]
    distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
    powers = torch.where(distance[..., None] >= 0, torch.sigmoid(logit) ** distance.clamp(min=0)[..., None], 0.0)
    return x + torch.einsum("tsr, cr, sc -> tc", powers, gamma, x)


def error(found: Tensor, expected: Tensor) -> float:
    """RMSE(difference) / RMSE(expected)."""
    return float(((found.double() - expected).norm() / expected.norm()).detach())


def assert_equal(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-10) -> None:
    """Logits, losses, and the gradient of every parameter, none of which may be zero."""
    for name in ("logits", "losses"):
        assert error(found[name], expected[name]) < tolerance, name
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        assert gradient.norm() > 0, name
        assert error(found["gradients"][name], gradient) < tolerance, name

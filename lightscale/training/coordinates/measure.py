"""Short trainings of a model at several widths, and the sizes of its activations.

µP promises (arXiv 2203.03466, appendix D.1) that all are of one size at every width, at the start and after each step.
The steps are of few tokens, always the same: sums over the width then add up, as they do in a limit of infinite width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightscale.config.schema import RunConfig
from lightscale.models.language_model import LanguageModel
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.training.build import build_engine
from lightscale.training.coordinates.slopes import CHANGE, LOGITS, SIZE, Key

_FOLLOWED = 0.5
"""Share of tokens whose label follows from them, so that there is something to learn."""
_HIDDEN, _ROWS = "hidden", "rows"


@dataclass(frozen=True, kw_only=True)
class FewTokens:
    """A micro-batch of one document per row."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    positions: Tensor
    document_starts: None = None
    lengths: None = None
    soft_labels: None = None


def measure(config: RunConfig, *, steps: int, seeds: int, tokens: int, device: str) -> Mapping[Key, float]:
    """Root mean squares of the activations of the model of ``config``, the mean over ``seeds``.

    Every step has the learning rate ``optimizer.lr`` and one row of ``tokens`` tokens, the same in all steps.
    """
    found: dict[Key, list[float]] = {}
    with start_mesh(device=device) as mesh:
        for seed in range(seeds):
            train = config.train.model_copy(update={"seed": seed})
            for key, value in _measured(config.model_copy(update={"train": train}), mesh, steps, tokens).items():
                found.setdefault(key, []).append(value)
    return {key: sum(values) / len(values) for key, values in found.items()}


def few_tokens(seed: int, vocab_size: int, tokens: int, device: torch.device) -> FewTokens:
    """Drawn tokens; the label of some is another id for each id, of the others any."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, vocab_size, (1, tokens), generator=generator)
    other = torch.randperm(vocab_size, generator=generator)[text]
    follows = torch.rand(text.shape, generator=generator) < _FOLLOWED
    labels = torch.where(follows, other, torch.randint(0, vocab_size, text.shape, generator=generator))
    return FewTokens(
        tokens=text.to(device),
        labels=labels.to(device),
        loss_mask=torch.ones(text.shape, device=device),
        positions=torch.arange(tokens, device=device)[None],
    )


def _measured(config: RunConfig, mesh: Mesh, steps: int, tokens: int) -> dict[Key, float]:
    vocab_size = config.model.vocab_size
    engine = build_engine(config, mesh, vocab_size=vocab_size, trainable=True)
    model: Any = engine.module
    batch = few_tokens(config.train.seed, vocab_size, tokens, mesh.device)
    first = activations(model, batch)
    found = {(name, SIZE, 0): _size(value) for name, value in first.items() if name not in (_HIDDEN, _ROWS)}
    for step in range(1, steps + 1):
        engine.forward_backward([batch])
        engine.step(config.optimizer.lr)
        now = activations(model, batch)
        for name, value in now.items():
            if name == LOGITS:
                # What the drawn weights make of changed activations vanishes slowly, as 1 / sqrt(width).
                learned = now[_HIDDEN] @ (now[_ROWS] - first[_ROWS]).mT
                found[name, CHANGE, step] = _size(learned)
            elif name not in (_HIDDEN, _ROWS):
                found[name, CHANGE, step] = _size(value - first[name])
    return found


def _size(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()


@torch.no_grad()
def activations(model: LanguageModel, batch: FewTokens) -> dict[str, Tensor]:
    """Outputs of the embedding, of each block's mixer and gated linear unit, and of each block; logits (b n, V).

    Beside them the input of the output layer, (b n, d), and its weight, (V, d).
    """
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: object, _inputs: object, output: Any) -> None:
            found[name] = (output[0] if isinstance(output, tuple) else output).clone()

        return hook

    hooks = [model.embedding.register_forward_hook(keep("embedding"))]
    for number, layer in enumerate(model.decoder.layers):
        hooks.append(layer.self_attention.register_forward_hook(keep(f"layer {number} mixer")))
        if model.model.intermediate_size:
            hooks.append(layer.mlp.register_forward_hook(keep(f"layer {number} linear unit")))
        hooks.append(layer.register_forward_hook(keep(f"layer {number}")))
    model.eval()
    try:
        hidden = model(batch.tokens, batch.positions, hidden_only=True)
    finally:
        for one in hooks:
            one.remove()
    found[_HIDDEN], found[_ROWS] = hidden.flatten(0, 1).clone(), model.output_rows.clone()
    found[LOGITS] = found[_HIDDEN] @ found[_ROWS].mT
    return found

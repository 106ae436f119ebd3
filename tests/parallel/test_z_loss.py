"""The z-loss of training on each axis: gradients of the plain sum of both terms in fp64; cross entropy apart."""

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

HELPERS = Path(__file__).parents[1] / "helpers"
tiny, plain, mixers = (
    SimpleNamespace(**runpy.run_path(str(HELPERS / f"{name}.py")))
    for name in ("tiny_engine", "plain_models", "plain_mixers")
)
Z_LOSS = 0.3
# Processes, tensor, pipeline, sequence.
LAYOUTS = [(1, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (2, 1, 1, 1)]


def on_ranks(rank: int, world_size: int, init_method: str, axes: tuple[int, ...]) -> dict[str, Any]:
    with tiny.engine_on(axes, rank, init_method) as engine:
        engine.z_loss = Z_LOSS
        before = tiny.weights(engine)
        batches = tiny.step_batches(0, engine.mesh)
        sums = engine.forward_backward(batches)
        ((_, gradients, _),) = tiny.train(engine, 0, 1)
        # Validation has no such term. The weights are those of the next step.
        validated = engine.forward_only(batches)
    return {
        "weights": before,
        "gradients": gradients,
        "loss": sums.mean,
        "z loss": sums.z_loss / sums.tokens,
        "validated": validated.z_loss,
    }


def plainly(weights: dict[str, Tensor]) -> tuple[float, float, dict[str, Tensor]]:
    """Mean cross entropy, mean z-loss, and the gradients of their sum."""
    model = ModelConfig(**tiny.MODEL)
    leaves = {key: weight.double().clone().requires_grad_() for key, weight in weights.items()}
    whole = SimpleNamespace(sequence=1, sequence_rank=0, data=1, data_rank=0)
    entropies, terms = [], []
    for batch in tiny.step_batches(0, whole):
        for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
            mix = functools.partial(mixers.MIX["tnl"], model)
            logits = plain.document_logits(model, leaves, tokens, mix, None)[:, : tiny.VOCAB_SIZE]
            log_normalizer = logits.exp().sum(dim=1).log()
            entropies.append(log_normalizer - logits.gather(1, labels[:, None])[:, 0])
            terms.append(Z_LOSS * log_normalizer**2)
    entropy, term = torch.cat(entropies).mean(), torch.cat(terms).mean()
    found = torch.autograd.grad(entropy + term, list(leaves.values()))
    return float(entropy), float(term), dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("axes", LAYOUTS, ids=["one process", "tensor", "pipeline", "sequence", "data"])
def test_gradients_are_those_of_both_terms(axes: tuple[int, ...], run_ranks: Callable[..., list[Any]]) -> None:
    for found in run_ranks(on_ranks, axes[0], axes):
        entropy, term, gradients = plainly(found["weights"])
        assert found["loss"] == pytest.approx(entropy, rel=1e-6), "the loss that is shown is the cross entropy"
        assert found["z loss"] == pytest.approx(term, rel=1e-6)
        assert found["validated"] is None
        assert found["gradients"].keys() == gradients.keys()
        for name, wanted in gradients.items():
            assert float((found["gradients"][name].double() - wanted).norm() / wanted.norm()) < 1e-4, name

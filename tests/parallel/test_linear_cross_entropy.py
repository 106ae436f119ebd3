"""The output layer's loss over a split vocabulary and split tokens, in fp64 and fp32, on one and two ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.kernels.cross_entropy import linear_cross_entropy_reference
from lightscale.parallel.cross_entropy import vocab_parallel_linear_cross_entropy
from lightscale.parallel.mesh import start_mesh

ROWS, VOCAB_SIZE, WIDTH, TOKENS, BATCH = 64, 45, 16, 8, 3
LIMITS = {torch.float64: 1e-13, torch.float32: 1e-5}


def make() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden (n, b, d), weight (V, d), labels and cotangents (n, b); padding rows would win."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, BATCH, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    weight[VOCAB_SIZE:] *= 50
    labels = torch.randint(0, VOCAB_SIZE, (TOKENS, BATCH), generator=generator)
    return hidden, weight, labels, torch.randn(TOKENS, BATCH, generator=generator, dtype=torch.float64)


def on_ranks(rank: int, world_size: int, init_method: str, z_loss: float) -> dict[torch.dtype, tuple[Tensor, ...]]:
    """Losses, their z-loss, the gradient of this rank's tokens, and that of its rows of the vocabulary."""
    found = {}
    mesh_of = {"tensor": world_size, "rank": rank, "world_size": world_size, "init_method": init_method}
    with start_mesh(**mesh_of) as mesh:
        for dtype in LIMITS:
            hidden, weight, labels, cotangents = make()
            own_hidden, own_weight = (t.to(dtype).chunk(world_size)[rank].requires_grad_() for t in (hidden, weight))
            losses, terms = vocab_parallel_linear_cross_entropy(
                own_hidden, own_weight, labels, vocab_size=VOCAB_SIZE, group=mesh.groups.tp, z_loss=z_loss
            )
            gradients = torch.autograd.grad(losses, (own_hidden, own_weight), cotangents.to(losses.dtype))
            found[dtype] = (losses.detach(), terms, *gradients)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_equals_log_softmax(ranks: int, z_loss: float, run_ranks: Callable[..., list[Any]]) -> None:
    hidden, weight, labels, cotangents = make()
    hidden.requires_grad_()
    weight.requires_grad_()
    terms = z_loss * (hidden @ weight[:VOCAB_SIZE].T).logsumexp(-1).square()
    losses = linear_cross_entropy_reference(hidden, weight, labels, num_ids=VOCAB_SIZE) + terms
    of_losses = torch.autograd.grad(losses, (hidden, weight), cotangents)
    expected = (losses.detach(), terms.detach(), *of_losses)
    results = run_ranks(on_ranks, ranks, z_loss)
    for dtype, limit in LIMITS.items():
        for index in (0, 1):
            assert all(torch.equal(result[dtype][index], results[0][dtype][index]) for result in results)
        gradients = [torch.cat([result[dtype][index] for result in results]) for index in (2, 3)]
        for found, wanted in zip((*results[0][dtype][:2], *gradients), expected, strict=True):
            assert float((found.double() - wanted).norm()) <= limit * float(wanted.norm())
        assert not gradients[1][VOCAB_SIZE:].any()

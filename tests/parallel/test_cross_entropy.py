"""The vocabulary-parallel cross entropy against PyTorch's in fp64, on one, two and four tensor ranks."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightscale.parallel.cross_entropy import vocab_parallel_cross_entropy

ROWS, VOCAB_SIZE = 64, 45  # on four ranks the last holds nothing but padding
ALONE: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


def make(dtype: torch.dtype, scale: float = 3.0, vocab_size: int = VOCAB_SIZE) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (2, 5, ROWS), labels and cotangents (2, 5); padding rows are the largest."""
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(2, 5, ROWS, generator=generator, dtype=torch.float64)).to(dtype)
    logits[..., vocab_size:] += 50 * scale
    labels = torch.randint(0, vocab_size, (2, 5), generator=generator)
    labels[0, :2] = torch.tensor([0, vocab_size - 1])
    return logits, labels, torch.randn(2, 5, generator=generator, dtype=torch.float64)


def expected(logits: Tensor, labels: Tensor, cotangents: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Loss and gradient, by PyTorch, of the rows in use."""
    leaf = logits.detach().double().requires_grad_()
    losses = F.cross_entropy(leaf[..., :vocab_size].flatten(0, 1), labels.flatten(), reduction="none").view(2, 5)
    (losses * cotangents).sum().backward()
    assert leaf.grad is not None
    return losses.detach(), leaf.grad


def compute(logits: Tensor, labels: Tensor, cotangents: Tensor, vocab_size: int, group: Any) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(leaf, labels, vocab_size=vocab_size, group=group)
    (losses * cotangents.to(losses.dtype)).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.detach(), logits), "the logits were changed"
    return losses.detach(), leaf.grad


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, ROWS])
def test_one_rank(dtype: torch.dtype, limit: float, vocab_size: int) -> None:
    case = make(dtype, vocab_size=vocab_size)
    losses, grad = compute(*case, vocab_size, ALONE)
    wanted_losses, wanted_grad = expected(*case, vocab_size)
    assert losses.dtype == grad.dtype == dtype
    assert error(losses, wanted_losses) <= limit
    assert error(grad, wanted_grad) <= limit


def test_padding_takes_no_probability_and_no_gradient() -> None:
    case = make(torch.float64)
    losses, grad = compute(*case, VOCAB_SIZE, ALONE)
    assert torch.equal(grad[..., VOCAB_SIZE:], torch.zeros(2, 5, ROWS - VOCAB_SIZE, dtype=torch.float64))
    # Whatever stands there.
    for value in (torch.inf, torch.nan, -torch.inf):
        case[0][..., VOCAB_SIZE:] = value
        again = vocab_parallel_cross_entropy(case[0], case[1], vocab_size=VOCAB_SIZE, group=ALONE)
        assert torch.equal(again, losses)


def test_half_precision_is_computed_in_fp32() -> None:
    for dtype, limit in ((torch.bfloat16, 4e-3), (torch.float16, 5e-4)):
        case = make(dtype, scale=1.0)
        losses, grad = compute(*case, VOCAB_SIZE, ALONE)
        wanted_losses, wanted_grad = expected(*case, VOCAB_SIZE)
        assert (losses.dtype, grad.dtype) == (torch.float32, dtype)
        assert error(losses, wanted_losses) <= 1e-6
        assert error(grad, wanted_grad) <= limit, "the gradient is rounded once, at the end"


def test_large_logits_stay_finite() -> None:
    for scale in (1e4, 1e30):
        case = make(torch.float32, scale=scale)
        losses, grad = compute(*case, VOCAB_SIZE, ALONE)
        wanted_losses, wanted_grad = expected(*case, VOCAB_SIZE)
        assert torch.isfinite(losses).all()
        assert error(losses, wanted_losses) <= 1e-6
        assert error(grad, wanted_grad) <= 1e-6


def on_ranks(rank: int, world_size: int, init_method: str) -> dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]]:
    """Losses and the gradient of this rank's rows, for groups of two and four."""
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    found = {}
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for size, group in ((2, pairs[rank // 2]), (4, dist.group.WORLD)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            logits, labels, cotangents = make(dtype)
            own = logits.chunk(size, dim=-1)[rank % size]
            found[size, dtype] = compute(own, labels, cotangents, VOCAB_SIZE, group)
    dist.destroy_process_group()
    return found


def test_two_and_four_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    results = run_ranks(on_ranks, 4)
    for size in (2, 4):
        for dtype, loss_limit, grad_limit in (
            (torch.float64, 1e-14, 1e-14),
            (torch.float32, 1e-6, 1e-6),
            (torch.bfloat16, 1e-6, 4e-3),
        ):
            wanted_losses, wanted_grad = expected(*make(dtype), VOCAB_SIZE)
            for losses, _ in (result[size, dtype] for result in results):
                assert error(losses, wanted_losses) <= loss_limit
            for first in range(0, 4, size):
                grad = torch.cat([result[size, dtype][1] for result in results[first : first + size]], dim=-1)
                assert error(grad, wanted_grad) <= grad_limit
                assert not grad[..., VOCAB_SIZE:].any()

"""The divergence of a linear layer from another model's, against PyTorch's kl_div and cross_entropy in fp64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels.cross_entropy.divergence import SoftTargets, linear_divergence

ROWS, NUM_IDS, TOKENS = 24, 19, (2, 5)


def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, SoftTargets]:
    """hidden, weight, labels, mask and targets of another width; padding rows are the largest."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, other, rows = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((*TOKENS, 8), (ROWS, 8), (*TOKENS, 6), (ROWS, 6))
    )
    weight[NUM_IDS:] *= 100
    rows[NUM_IDS:] *= 100
    labels = torch.randint(0, NUM_IDS, TOKENS, generator=generator)
    mask = torch.tensor([1.0, 0.0, 0.5, 1.0, 2.0], dtype=torch.float64).expand(TOKENS)
    hidden, weight = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    return hidden, weight, labels, mask, SoftTargets(other.to(dtype), rows.to(dtype))


def expected_losses(case: Any, cap: float | None) -> Tensor:
    hidden, weight, labels, mask, targets = case
    logits, wanted = hidden @ weight[:NUM_IDS].T, targets.hidden @ targets.weight[:NUM_IDS].T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    if targets.cap is not None:
        wanted = targets.cap * torch.tanh(wanted / targets.cap)
    soft = [torch.log_softmax(x / targets.temperature, dim=-1) for x in (logits, wanted)]
    divergence = F.kl_div(*soft, log_target=True, reduction="none").sum(dim=-1) * targets.temperature**2
    hard = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(TOKENS)
    return (divergence + targets.cross_entropy_weight * hard) * mask


@pytest.mark.parametrize("is_sum", [True, False], ids=["of a sum", "any cotangents"])
@pytest.mark.parametrize("chunk_tokens", [None, 3])
@pytest.mark.parametrize(
    ("cap", "how"), [(None, {}), (2.0, {"cap": 3.0, "temperature": 2.5, "cross_entropy_weight": 0.3})]
)
def test_equals_kl_div(cap: float | None, how: dict[str, float], chunk_tokens: int | None, is_sum: bool) -> None:
    for dtype, limit in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        case = make(torch.float64)
        expected = expected_losses((*case[:4], case[4]._replace(**how)), cap)
        cotangents = torch.ones_like(expected) if is_sum else torch.arange(expected.numel()).view(TOKENS) - 3.5
        wanted = torch.autograd.grad(expected, case[:2], cotangents)
        hidden, weight, labels, mask, targets = make(dtype)
        losses = linear_divergence(
            hidden,
            weight,
            labels.where(mask != 0, -100),
            targets._replace(**how),
            num_ids=NUM_IDS,
            loss_mask=mask,
            cap=cap,
            chunk_tokens=chunk_tokens,
        )
        if is_sum:
            found = torch.autograd.grad(losses.sum(), (hidden, weight))
        else:
            found = torch.autograd.grad(losses, (hidden, weight), cotangents.to(dtype))
        assert not found[1][NUM_IDS:].any(), "padding has no gradient"
        for one, other in zip((losses, *found), (expected, *wanted), strict=True):
            assert float((one.detach().double() - other).norm() / other.detach().norm()) < limit


def test_targets_of_other_rows_are_refused() -> None:
    hidden, weight, labels, _, targets = make(torch.float64)
    with pytest.raises(UserError, match=r"targets have .* 23 rows, but hidden has .* weight 24 rows"):
        linear_divergence(hidden, weight, labels, targets._replace(weight=targets.weight[1:]), num_ids=NUM_IDS)

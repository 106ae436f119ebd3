"""What the tests of all operators compare with; loaded by path."""

import torch
from torch import Tensor


def boundaries(starts: list[list[int]], tokens: int) -> Tensor:
    """cu_seqlens of rows of ``tokens`` with documents that start at ``starts`` (and at 0) in each row."""
    flat = {row * tokens + start for row, of_row in enumerate(starts) for start in [0, *of_row]}
    return torch.tensor(sorted({*flat, len(starts) * tokens}))


def error(actual: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """RMSE(difference) / the larger of RMSE(expected) and ``least``; / 1 where both are 0.

    Equal elements count as 0, also those of -inf, which are not expected to have a size.
    """
    assert actual.shape == expected.shape
    difference = torch.where(actual == expected, 0.0, actual.double() - expected.double())
    return rms(difference) / (max(rms(expected[expected.isfinite()]), least) or 1.0)


def assert_close(
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    tolerance: float = 1e-5,
    case: str = "",
    least: dict[str, float] | None = None,
) -> None:
    """Fails with the errors that are not below ``tolerance``, and the ``case``'s name; ``least`` as in ``error``."""
    assert actual.keys() == expected.keys()
    errors = {name: error(actual[name], expected[name], (least or {}).get(name, 0.0)) for name in expected}
    wrong = {name: e for name, e in errors.items() if not e < tolerance}
    assert not wrong, (case, wrong)


def with_gradients(
    results: dict[str, Tensor], cotangents: list[Tensor], leaves: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The results, whose cotangents are given in their order, and the gradients of all leaves."""
    found = torch.autograd.grad(list(results.values()), list(leaves.values()), cotangents, materialize_grads=True)
    gradients = {f"d{name}": gradient for name, gradient in zip(leaves, found, strict=True)}
    return {name: result.detach() for name, result in results.items()} | gradients


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0

"""The forget gate with a lower bound: both backends against formulas in fp64, and at both ends of the gate."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from triton.runtime.interpreter import InterpreterBuilder

from lightscale.errors import UserError
from lightscale.kernels.forget_gate import forget_gate, forget_gate_reference
from lightscale.kernels.forget_gate import triton as launches

LOGITS = [-1e4, -100.0, -90.0, -87.0, -50.0, -20.0, -1.0, -0.0, 1.0, 1.1, 2.0, 20.0, 50.0, 87.0, 100.0, 1e4]
BOUNDS = [0.0, 1e-30, 1e-6, 0.2, 0.5, 0.74, 0.75, 0.8, 1 - 1e-6, 1.0]
BACKENDS = ("chunked", "triton")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bounds(*shape: int) -> Tensor:
    """From 0 to 1, every third 0."""
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return drawn * (torch.arange(drawn.numel()).view(shape) % 3 > 0)


def run(logits: Tensor, bound: Tensor, function: Callable[..., Any], *dtype: torch.dtype, **options: Any) -> list[Any]:
    """log f, k, dlogits and dβ, for random cotangents."""
    leaves = [x.detach().requires_grad_() for x in (logits, bound)]
    found = function(*leaves, *dtype, **options)
    cotangents = [draw(*logits.shape, seed=n).to(x.dtype) for n, x in enumerate(found, start=1)]
    return [*(x.detach() for x in found), *torch.autograd.grad(found, leaves, cotangents)]


def check(found: list[Tensor], expected: list[Tensor], limit: float) -> None:
    for result, wanted in zip(found, expected, strict=True):
        assert result.shape == wanted.shape
        assert float((result.double() - wanted).norm() / wanted.norm()) < limit


def in_fp64(logits: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """log f and 1 - f: f = (1 + β e^-x) / (1 + e^-x), 1 - f = (1 - β) / (1 + e^x); log1p(f - 1) where f is near 1."""
    zero = torch.zeros_like(logits)
    log_f = torch.logaddexp(zero, bound.log() - logits) - torch.logaddexp(zero, -logits)
    key = (1 - bound) * torch.exp(-torch.logaddexp(zero, logits))
    return torch.where(key < 0.1, torch.log1p(-key), log_f), key


def at_the_ends(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Every logit with every bound: (logits, 1, bounds)."""
    bound = torch.tensor([BOUNDS], dtype=dtype)
    return torch.tensor(LOGITS, dtype=dtype)[:, None, None].expand(-1, *bound.shape).contiguous(), bound


# A tile has 128 columns, and 16 rows of them: heads that end in a tile, rows that end in one, and several programs.
@pytest.mark.parametrize("shape", [(1, 1), (5, 2, 3), (2, 19, 3, 80), (3, 1, 2, 3, 4)], ids=str)
def test_equals_the_formula(shape: tuple[int, ...]) -> None:
    logits, bound = draw(*shape), bounds(*shape[-2:])
    expected = run(logits, bound, forget_gate_reference)
    for found, wanted in zip(forget_gate(logits, bound, backend="chunked"), in_fp64(logits, bound), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=0)
    check(run(logits, bound, forget_gate, backend="chunked"), expected, 1e-13)
    for backend in BACKENDS:
        check(run(logits.float(), bound.float(), forget_gate, backend=backend), expected, 1e-6)


def test_gradients_are_those_of_the_values() -> None:
    logits = draw(5, 2, 3).requires_grad_()
    bound = (0.9 * torch.rand(2, 3, generator=torch.Generator().manual_seed(3)).double() + 0.05).requires_grad_()
    for backend in ("chunked", "reference"):
        assert torch.autograd.gradcheck(lambda *x, use=backend: forget_gate(*x, backend=use), (logits, bound))
    # A bound of 0 is a constant.
    assert torch.autograd.gradcheck(lambda x: forget_gate(x, torch.zeros_like(bound)), (logits,))


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [(torch.float64, "chunked"), *((torch.float32, backend) for backend in BACKENDS)],
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_accurate_at_both_ends(dtype: torch.dtype, backend: str) -> None:
    logits, bound = at_the_ends(dtype)
    found = forget_gate(logits, bound, backend=backend)
    for ours, theirs in zip(found, in_fp64(logits.double(), bound.double()), strict=True):
        # What is below the smallest normal number may be 0.
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5 if dtype == torch.float32 else 1e-10, atol=2e-38)
    assert (found[0] <= 0).all()


def test_a_logarithm_with_an_absolute_error_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of GPUs is 1e-7 off near 1, which is more than log f itself where f is nearly 1."""
    exact = InterpreterBuilder.create_log

    def rough(self: InterpreterBuilder, x: Any) -> Any:
        found = exact(self, x)
        found.data = found.data + np.float32(1e-7)
        return found

    monkeypatch.setattr(InterpreterBuilder, "create_log", rough)
    logits = torch.linspace(-3, 20, 800).view(-1, 1, 1).expand(-1, 1, 3).contiguous()
    bound = torch.tensor([[0.0, 0.3, 0.7]])
    found, _ = forget_gate(logits, bound, backend="triton")
    expected, _ = in_fp64(logits.double(), bound.double())
    ratio = (found.double() / expected - 1).abs()
    assert 2e-7 < ratio.max() < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_finite_at_both_ends(backend: str) -> None:
    logits, bound = (x.requires_grad_() for x in at_the_ends(torch.float32))
    log_f, key = forget_gate(logits, bound, backend=backend)
    found = torch.autograd.grad(1e3 * log_f.sum() + key.sum(), [logits, bound])
    assert all(gradient.isfinite().all() for gradient in found)
    # d log f / dx = (1 - β) sigmoid(x) sigmoid(-x) / f: at most 1, and 1 where only the sigmoid is left of f.
    assert found[0].abs().max() <= 1e3 + 1
    torch.testing.assert_close(found[0][:6, 0, 0], torch.full((6,), 1e3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend: str) -> None:
    """Gates beside the values of their head, in the order of tokens first; channels apart; broadcast cotangents."""
    projected = draw(7, 2, 3, 2, 5).float()
    for logits in (projected.transpose(0, 1)[:, :, :, 0], projected[:, 0, :, 1], projected[:, :, 0, :, ::2]):
        bound = bounds(*logits.shape[-2:])
        check(
            run(logits, bound.float(), forget_gate, backend=backend),
            run(logits.double(), bound, forget_gate_reference),
            1e-6,
        )
        leaves = [logits.detach().requires_grad_(), bound.float().requires_grad_()]
        found = torch.autograd.grad(sum(x.sum() for x in forget_gate(*leaves, backend=backend)), leaves)
        exact = [x.detach().double().requires_grad_() for x in leaves]
        check(found, torch.autograd.grad(sum(x.sum() for x in forget_gate_reference(*exact)), exact), 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_bounds_gradient_in_several_programs_per_row(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than programs, and the same numbers in every run."""
    monkeypatch.setattr(launches, "_PARTIAL_SUMS", 2)
    logits, bound = draw(90, 1, 130), bounds(1, 130)
    found = run(logits.float(), bound.float(), forget_gate, backend=backend)
    check(found, run(logits, bound, forget_gate_reference), 1e-6)
    again = run(logits.float(), bound.float(), forget_gate, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


# Triton's interpreter cuts bf16 off where GPUs round it.
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 6e-4), (torch.bfloat16, 8e-3)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_are_rounded_once(backend: str, dtype: torch.dtype, limit: float) -> None:
    logits, bound = draw(7, 2, 3).to(dtype), bounds(2, 3)
    found = run(logits, bound.float(), forget_gate, dtype, backend=backend)
    wide = run(logits.float(), bound.float(), forget_gate, backend=backend)
    assert torch.equal(found[0], wide[0])
    if dtype == torch.float16 or backend == "chunked":
        assert torch.equal(found[1], wide[1].to(dtype))
    assert found[2].dtype == dtype and found[3].dtype == torch.float32
    check(found, run(logits.double(), bound, forget_gate_reference), limit)
    reference = forget_gate(logits, bound.float(), dtype, backend="reference")
    assert [x.dtype for x in reference] == [torch.float32, dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: str) -> None:
    found = run(torch.empty(0, 2, 3), torch.ones(2, 3), forget_gate, backend=backend)
    assert [x.shape for x in found[:3]] == [(0, 2, 3)] * 3
    assert torch.equal(found[3], torch.zeros(2, 3))


def test_only_inputs_are_saved() -> None:
    logits, bound = draw(4, 2, 3).requires_grad_(), bounds(2, 3).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        forget_gate(logits, bound)
    assert [t.data_ptr() for t in saved] == [logits.data_ptr(), bound.data_ptr()]


def test_checkpoint_and_compile_change_nothing() -> None:
    logits, bound = draw(3, 2, 5).float(), bounds(2, 5).float()

    def recomputed(*x: Any, **options: Any) -> Any:
        return checkpoint(forget_gate, *x, use_reentrant=False, **options)

    plain = run(logits, bound, forget_gate, backend="triton")
    for function in (recomputed, torch.compile(forget_gate, backend="aot_eager")):
        other = run(logits, bound, function, backend="triton")
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


ONES = torch.ones(4, 2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.ones(3)}, r"logits must be \(..., H, K\), got shape \(3,\)"),
        ({"logits": ONES.int()}, "logits must be fp16, bf16, fp32 or fp64, got torch.int32"),
        ({"bound": torch.ones(3)}, r"bound must be \(H, K\) = \(2, 3\), got shape \(3,\)"),
        ({"bound": torch.ones(2, 3).bfloat16()}, "bound must be torch.float32 for logits of torch.float32, got"),
        ({"logits": ONES.double()}, "bound must be torch.float64 for logits of torch.float64, got torch.float32"),
        ({"bound": torch.ones(2, 3, device="meta")}, "bound must be on cpu, like logits, got meta"),
        ({"key_dtype": torch.int8}, "key_dtype must be fp16, bf16, fp32 or fp64, got torch.int8"),
        ({"backend": "cuda"}, "forget_gate has no backend 'cuda'; use auto, triton, chunked, reference"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        forget_gate(**({"logits": ONES, "bound": torch.ones(2, 3)} | change))

"""The gated linear unit: both backends against the fp64 formula."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightscale.errors import UserError
from lightscale.kernels.glu import glu, glu_reference
from lightscale.kernels.glu.activations import ACTIVATIONS


def draw(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(x: Tensor, dout: Tensor, function: Callable[..., Tensor], activation: str, **options: Any) -> list[Tensor]:
    """The output and the gradient."""
    leaf = x.detach().requires_grad_()
    out = function(leaf, activation, **options)
    return [out.detach(), *torch.autograd.grad(out, leaf, dout.to(x.dtype))]


def check(found: list[Tensor], expected: list[Tensor], limit: float) -> None:
    for result, wanted in zip(found, expected, strict=True):
        assert result.shape == wanted.shape
        assert float((result.double() - wanted).norm() / wanted.norm()) < limit


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(2,), (3, 2, 14), (2, 2 * 1100)], ids=str)
def test_equals_the_formula(activation: str, shape: tuple[int, ...]) -> None:
    x, dout = draw(*shape), draw(*shape[:-1], shape[-1] // 2, seed=1)
    expected = run(x, dout, glu_reference, activation)
    check(run(x, dout, glu, activation, backend="chunked"), expected, 1e-14)
    for backend in ("chunked", "triton"):
        check(run(x.float(), dout, glu, activation, backend=backend), expected, 1e-6)


@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_strides(backend: str) -> None:
    """Rows inside a wider tensor, columns apart, and a cotangent that is broadcast."""
    wide = draw(6, 40).float()
    for x in (wide[:, 8:28], wide.view(3, 2, 40).transpose(0, 1), wide[:, ::2]):
        dout = torch.ones(1).expand(*x.shape[:-1], x.shape[-1] // 2)
        expected = run(x.double(), dout, glu_reference, "silu")
        check(run(x, dout, glu, "silu", backend=backend), expected, 1e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_saturated_gates_stay_finite(backend: str) -> None:
    x = torch.tensor([[-200.0, 200.0, -1e30, 2.0, 3.0, 4.0]])
    out, dx = run(x, torch.ones(1, 3), glu, "silu", backend=backend)
    assert torch.allclose(out, torch.tensor([[0.0, 600.0, 0.0]]))
    assert torch.isfinite(dx).all()


def test_half_precision_is_rounded_once() -> None:
    x = draw(4, 64).bfloat16()
    found = glu(x, "silu")
    assert torch.equal(found, glu_reference(x.double(), "silu").bfloat16())


def test_only_the_projection_is_saved() -> None:
    x, saved = draw(4, 64).float().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        glu(x, "silu")
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]
    eager: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: eager.append(t) or t, lambda t: t):
        gate, up = x.chunk(2, dim=-1)
        F.silu(gate) * up
    assert len({t.data_ptr() for t in eager}) == 3  # gate and up, and silu(gate) beside them


def test_checkpoint_and_compile_change_nothing() -> None:
    x, dout = draw(3, 40).float(), draw(3, 20, seed=1)
    plain = run(x, dout, glu, "silu", backend="triton")
    recomputed = run(x, dout, lambda *a, **k: checkpoint(glu, *a, use_reentrant=False, **k), "silu", backend="triton")
    compiled = run(x, dout, torch.compile(glu, backend="aot_eager"), "silu", backend="triton")
    for other in (recomputed, compiled):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.ones(2, 7), {}, r"x must be \(..., 2 F\), .* got shape \(2, 7\)"),
        (torch.ones(2, 8, dtype=torch.int32), {}, "x must be fp16, bf16, fp32 or fp64, got torch.int32"),
        (
            torch.ones(2, 8),
            {"activation": "relu"},
            "activation must be one of none, sigmoid, silu, gelu, gelu_tanh, got 'relu'",
        ),
        (torch.ones(2, 8), {"backend": "cuda"}, "glu has no backend 'cuda'"),
        (torch.ones(2, 8).double(), {"backend": "triton"}, "backend 'triton' supports fp16, bf16 and fp32"),
    ],
)
def test_bad_input_is_named(x: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        glu(x, **options)

"""The norm with weight and gate: both backends against the fp64 formula, split over ranks too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightscale.errors import UserError
from lightscale.kernels.norm import norm, norm_reference, sum_and_norm

SHAPE = (3, 5, 70)
EXACT, SINGLE = 1e-13, 1e-5


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(shape: tuple[int, ...], *, weight: bool, gate: bool) -> dict[str, Tensor]:
    """Inputs in fp64 and the cotangent ``dy``."""
    inputs = {"x": draw(*shape), "dy": draw(*shape, seed=1)}
    if weight:
        inputs["weight"] = draw(shape[-1], seed=2)
    if gate:
        inputs["gate"] = draw(*shape, seed=3)
    return inputs


def run(
    inputs: dict[str, Tensor], function: Callable[..., Tensor], dtype: torch.dtype, **options: Any
) -> dict[str, Tensor]:
    """The output and every gradient."""
    leaves = {n: t.to(dtype).requires_grad_() for n, t in inputs.items() if n != "dy"}
    x, rest = leaves["x"], {n: t for n, t in leaves.items() if n != "x"}
    y = function(x, **rest, **options)
    gradients = torch.autograd.grad(y, list(leaves.values()), inputs["dy"].to(dtype))
    return {"y": y.detach()} | dict(zip((f"d{n}" for n in leaves), gradients, strict=True))


def check(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        error = float((found[name].double() - wanted).norm() / wanted.norm())
        assert error < limit, (name, error)


FORMS = [("chunked", torch.float64, EXACT), ("chunked", torch.float32, SINGLE), ("triton", torch.float32, SINGLE)]


@pytest.mark.parametrize(("backend", "dtype", "limit"), FORMS)
@pytest.mark.parametrize(
    ("weight", "gate", "activation"),
    [
        (False, False, "none"),
        (True, False, "none"),
        (False, True, "sigmoid"),
        (True, True, "silu"),
        (True, True, "none"),
    ],
)
def test_equals_the_formula(
    backend: str, dtype: torch.dtype, limit: float, weight: bool, gate: bool, activation: str
) -> None:
    inputs = make(SHAPE, weight=weight, gate=gate)
    expected = run(inputs, norm_reference, torch.float64, gate_activation=activation, eps=0.1)
    found = run(inputs, norm, dtype, gate_activation=activation, eps=0.1, backend=backend)
    check(found, expected, limit)
    assert all(t.dtype == dtype for t in found.values())


@pytest.mark.parametrize("shape", [(7,), (1, 1), (3, 4096), (2, 3000), (130, 33), (2, 2, 3, 8), (600, 2)], ids=str)
def test_any_shape(shape: tuple[int, ...]) -> None:
    """Odd widths, more rows than a tile, more rows than a program has, rows that fill a tile."""
    inputs = make(shape, weight=True, gate=True)
    expected = run(inputs, norm_reference, torch.float64, gate_activation="silu", eps=0.1)
    for backend, dtype, limit in FORMS[::2]:
        check(run(inputs, norm, dtype, gate_activation="silu", eps=0.1, backend=backend), expected, limit)


def test_weight_gradient_of_several_tiles_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightscale.kernels.norm import triton

    monkeypatch.setattr(triton, "_PARTIAL_SUMS", 2)
    monkeypatch.setattr(triton, "_TILE", 64)
    inputs = make((41, 16), weight=True, gate=False)
    expected = run(inputs, norm_reference, torch.float64)
    found = run(inputs, norm, torch.float32, backend="triton")
    check(found, expected, SINGLE)
    again = run(inputs, norm, torch.float32, backend="triton")
    assert all(torch.equal(found[n], again[n]) for n in found)


@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_heads_in_another_order(backend: str) -> None:
    """(b, n, h, v) of attention, read as (n, b, h v): no copy, and the gradient lies as the input does."""
    o, gate, dy = draw(2, 5, 3, 8), draw(5, 2, 24, seed=1), draw(5, 2, 24, seed=2)
    results = []
    for dtype, function in ((torch.float64, norm_reference), (torch.float32, norm)):
        options = {"backend": backend} if function is norm else {}
        leaf, g = o.to(dtype).requires_grad_(), gate.to(dtype).requires_grad_()
        y = function(leaf.transpose(0, 1).flatten(2), gate=g, gate_activation="sigmoid", **options)
        results.append(
            {"y": y.detach()} | dict(zip("og", torch.autograd.grad(y, (leaf, g), dy.to(dtype)), strict=True))
        )
    check(results[1], results[0], SINGLE)
    assert results[1]["y"].is_contiguous()


@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_strided_cotangent(backend: str) -> None:
    x, dy = draw(4, 3, 16), draw(3, 4, 32, seed=1).transpose(0, 1)[..., ::2]
    found = run({"x": x, "dy": dy}, norm, torch.float32, backend=backend)
    check(found, run({"x": x, "dy": dy}, norm_reference, torch.float64), SINGLE)


def test_half_precision_is_rounded_once() -> None:
    """fp32 in between: the output is the fp64 formula of the rounded inputs, rounded. (The interpreter has no bf16.)"""
    inputs = {n: t.bfloat16().double() for n, t in make(SHAPE, weight=True, gate=True).items()}
    expected = run(inputs, norm_reference, torch.float64, gate_activation="sigmoid")
    check(run(inputs, norm, torch.bfloat16, gate_activation="sigmoid"), expected, 4e-3)
    found = norm(inputs["x"].bfloat16())
    assert torch.equal(found, norm_reference(inputs["x"]).bfloat16())


def test_no_rows() -> None:
    for backend in ("chunked", "triton"):
        x = torch.zeros(0, 4, 8, requires_grad=True)
        norm(x, backend=backend).sum().backward()
        assert x.grad is not None and x.grad.shape == (0, 4, 8)


def test_checkpoint_and_compile_change_nothing() -> None:
    inputs = make(SHAPE, weight=True, gate=True)
    options = {"gate_activation": "silu", "backend": "triton"}
    plain = run(inputs, norm, torch.float32, **options)
    recomputed = run(inputs, lambda *a, **k: checkpoint(norm, *a, use_reentrant=False, **k), torch.float32, **options)
    compiled = run(inputs, torch.compile(norm, backend="aot_eager"), torch.float32, **options)
    for other in (recomputed, compiled):
        assert all(torch.equal(plain[n], other[n]) for n in plain)


@pytest.mark.parametrize(("backend", "dtype", "limit"), FORMS)
def test_channels_split_over_ranks(backend: str, dtype: torch.dtype, limit: float) -> None:
    """Two ranks, one after the other: ``reduce`` gives each the sums of both; what they gave must add up to them."""
    whole, options = make((2, 3, 24), weight=True, gate=True), {"gate_activation": "sigmoid", "eps": 0.1}
    squares = whole["x"].square().sum(dim=-1)
    h = whole["x"] / (squares / 24 + 0.1).sqrt().unsqueeze(-1)
    products = (whole["dy"] * whole["weight"] * torch.sigmoid(whole["gate"]) * h).sum(dim=-1)
    given: list[Tensor] = []

    def reduce(x: Tensor) -> None:
        given.append(x.clone())
        x.copy_(squares if len(given) % 2 else products)

    parts = [{n: t.chunk(2, dim=-1)[rank].contiguous() for n, t in whole.items()} for rank in range(2)]
    first, second = (run(part, norm, dtype, backend=backend, width=24, reduce=reduce, **options) for part in parts)
    assert len(given) == 4, "once forward and once backward on each rank"
    check(
        {"squares": given[0] + given[2], "products": given[1] + given[3]},
        {"squares": squares, "products": products},
        limit,
    )
    found = {n: torch.cat([first[n], second[n]], dim=-1) for n in first}
    check(found, run(whole, norm_reference, torch.float64, **options), limit)


def test_equals_pytorch() -> None:
    x, weight = draw(*SHAPE), draw(70, seed=1)
    assert torch.allclose(norm(x, weight, eps=1e-6), F.rms_norm(x, (70,), weight, 1e-6), rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 0)}, r"x must be \(..., D\) with D of at least 1, got shape \(2, 0\)"),
        ({"x": torch.ones(2, 8, dtype=torch.int64)}, "x must be fp16, bf16, fp32 or fp64, got torch.int64"),
        ({"weight": torch.ones(7)}, r"weight must be \(D,\) = \(8,\), got shape \(7,\)"),
        ({"gate": torch.ones(2, 7)}, r"gate must be of x's shape \(2, 8\) .* got \(2, 7\)"),
        ({"gate": torch.ones(2, 8).double()}, r"gate must be of x's .* torch.float64"),
        ({"weight": torch.ones(8, device="meta")}, "weight is on meta, but x is on cpu"),
        (
            {"gate_activation": "tanh"},
            "gate_activation must be one of none, sigmoid, silu, gelu, gelu_tanh, got 'tanh'",
        ),
        ({"width": 16}, "width 16 is not x's 8: a mean over more channels needs `reduce`"),
        ({"backend": "cuda"}, "norm has no backend 'cuda'; use auto, triton, chunked, reference"),
        ({"reduce": lambda t: None, "backend": "reference"}, "backend 'reference' has no `reduce`"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        norm(**({"x": torch.ones(2, 8)} | change))


def test_rows_too_wide_for_a_program_go_to_pytorch() -> None:
    x = torch.ones(1, 4097)
    assert torch.equal(norm(x), norm(x, backend="chunked"))
    with pytest.raises(UserError, match="norm has no backend 'triton'; use auto, chunked, reference"):
        norm(x, backend="triton")


def _stream(
    inputs: dict[str, Tensor], dtype: torch.dtype, function: Callable[..., tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """The sum, its norm and every gradient; ``dtotal`` and ``dy`` are their cotangents, where they are given."""
    leaves = {n: t.to(dtype).requires_grad_() for n, t in inputs.items() if n not in ("dtotal", "dy")}
    total, y = function(leaves["x"], leaves.get("added"), leaves.get("weight"))
    pairs = [(out, inputs[n].to(dtype)) for out, n in ((total, "dtotal"), (y, "dy")) if n in inputs]
    outputs, cotangents = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, list(leaves.values()), cotangents, allow_unused=True)
    gradients = {f"d{n}": g for n, g in zip(leaves, found, strict=True) if g is not None}
    return {"total": total.detach(), "y": y.detach()} | gradients


def _written_out(x: Tensor, added: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    total = x if added is None else x + added
    return total, norm_reference(total, weight, eps=0.1)


@pytest.mark.parametrize(("backend", "dtype", "limit"), FORMS)
@pytest.mark.parametrize("without", [(), ("added",), ("weight",), ("dtotal",), ("dy",), ("added", "weight", "dtotal")])
def test_sum_and_norm(backend: str, dtype: torch.dtype, limit: float, without: tuple[str, ...]) -> None:
    names = ("x", "added", "dtotal", "dy")
    inputs = {name: draw(*SHAPE, seed=seed) for seed, name in enumerate(names)} | {"weight": draw(70, seed=9)}
    inputs = {name: one for name, one in inputs.items() if name not in without}
    found = _stream(inputs, dtype, lambda *given: sum_and_norm(*given, eps=0.1, backend=backend))
    check(found, _stream(inputs, torch.float64, _written_out), limit)
    assert all(t.dtype == dtype for t in found.values())


@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_sum_and_norm_of_any_strides_and_shapes(backend: str) -> None:
    for shape in ((130, 33), (2, 3, 3000), (3, 5, 4, 8), (0, 2, 8)):
        whole = {name: draw(*shape[:-2], shape[-1], shape[-2], seed=seed).mT for seed, name in enumerate("abcd")}
        inputs = dict(zip(("x", "added", "dtotal", "dy"), whole.values(), strict=True))
        found = _stream(inputs, torch.float32, lambda *given: sum_and_norm(*given, eps=0.1, backend=backend))
        expected = _stream(inputs, torch.float64, _written_out)
        if 0 not in shape:
            check(found, expected, SINGLE)
        assert all(found[name].shape == one.shape for name, one in expected.items())


@pytest.mark.parametrize(("backend", "dtype"), [("chunked", torch.bfloat16), ("triton", torch.float16)])
def test_sum_and_norm_round_the_sum_before_its_norm(backend: str, dtype: torch.dtype) -> None:
    """As the operators apart. The gradient is rounded where PyTorch's is; by Triton once, behind the sum of the two."""
    inputs = {name: draw(*SHAPE, seed=seed) for seed, name in enumerate(("x", "added", "dtotal", "dy"))}
    inputs = {name: one.to(dtype).double() for name, one in inputs.items()}

    def apart(x: Tensor, added: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        assert added is not None
        total = x + added
        return total, norm(total, weight, eps=0.1, backend=backend)

    together = _stream(inputs, dtype, lambda *given: sum_and_norm(*given, eps=0.1, backend=backend))
    expected = _stream(inputs, dtype, apart)
    once = [] if backend == "chunked" else ["dx", "dadded"]
    assert [name for name in expected if not torch.equal(together[name], expected[name])] == once
    if once:
        # Of the rounded sum: its gradient in fp64, rounded.
        total = together["total"].double().requires_grad_()
        (exact,) = torch.autograd.grad(norm_reference(total, eps=0.1), total, inputs["dy"])
        exact = (exact + inputs["dtotal"]).to(dtype)
        units = (together["dx"].view(torch.int16).int() - exact.view(torch.int16).int()).abs()
        assert int(units.max()) <= 1
        assert float((units > 0).float().mean()) < 0.01


def test_sum_and_norm_name_bad_input() -> None:
    with pytest.raises(UserError, match=r"added must be of x's shape \(2, 8\), .* got \(2, 7\)"):
        sum_and_norm(torch.ones(2, 8), torch.ones(2, 7))

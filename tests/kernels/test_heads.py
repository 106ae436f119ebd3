"""Heads out of a projection: both backends against the fp64 formula, outputs and the projection's whole gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightscale.errors import UserError
from lightscale.kernels.heads import Heads, split_heads

FORMS = [("chunked", torch.float64, 1e-13), ("chunked", torch.float32, 1e-5), ("triton", torch.float32, 1e-5)]

GROUPS = {
    "gate, queries, keys and values": (
        (Heads(1, 24, ("copy",)), Heads(3, 16, ("silu",)), Heads(3, 16, ("silu", "none")))
    ),
    "keys and values": ((Heads(3, 20, ("silu", "none")),)),
    "values alone": ((Heads(2, 8, ("none", "none")),)),
    "rotated": ((Heads(4, 16, ("rotate",)), Heads(2, 16, ("rotate", "none")))),
    "one, wider than a tile": ((Heads(2, 200, ("silu",)),)),
    "rotated, wider than a tile": ((Heads(1, 200, ("rotate",)),)),
}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def phases(n: int, b: int, width: int) -> tuple[Tensor, Tensor]:
    angle = draw(b, n, 1, width // 2, seed=7)
    return torch.cat([angle.cos(), angle.cos()], dim=-1), angle.sin()


def run(
    x: Tensor,
    groups: tuple[Heads, ...],
    dtype: torch.dtype,
    backend: str,
    without: tuple[int, ...] = (),
    turned: int = 16,
) -> dict[str, Tensor]:
    leaf = x.to(dtype).requires_grad_()
    of_phases = None
    if any("rotate" in group.activations for group in groups):
        of_phases = tuple(one.to(dtype) for one in phases(*x.shape[:2], turned))
    parts = split_heads(leaf, groups, of_phases, backend=backend)
    used = [part for n, part in enumerate(parts) if n not in without]
    # As attention gives them: (b, n, h, k), whose tokens are not the first dimension.
    cotangents = [
        draw(*(p.shape[d] for d in (1, 0, 2, 3)), seed=n).to(dtype).transpose(0, 1) for n, p in enumerate(used)
    ]
    (gradient,) = torch.autograd.grad(used, leaf, cotangents)
    return {str(n): part.detach() for n, part in enumerate(parts)} | {"dx": gradient}


def check(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    for name, wanted in expected.items():
        assert found[name].shape == wanted.shape
        error = float((found[name].double() - wanted).norm() / wanted.norm())
        assert error < limit, (name, error)


def columns(groups: tuple[Heads, ...]) -> int:
    return sum(group.columns for group in groups)


@pytest.mark.parametrize(("backend", "dtype", "limit"), FORMS)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_equals_the_formula(backend: str, dtype: torch.dtype, limit: float, groups: tuple[Heads, ...]) -> None:
    x = draw(21, 2, columns(groups), seed=0)
    expected = run(x, groups, torch.float64, "reference")
    found = run(x, groups, dtype, backend)
    check(found, expected, limit)
    assert all(one.dtype == dtype for one in found.values())


@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_some_channels_are_turned(backend: str) -> None:
    """Half of a head's channels, and all of several tiles of rows."""
    groups = (Heads(2, 32, ("rotate", "none")),)
    x = draw(130, 1, columns(groups), seed=0)
    check(run(x, groups, torch.float32, backend), run(x, groups, torch.float64, "reference"), 1e-5)


@pytest.mark.parametrize("backend", ["chunked", "triton"])
@pytest.mark.parametrize("without", [(0,), (1, 3)])
def test_an_unused_part_has_no_gradient(backend: str, without: tuple[int, ...]) -> None:
    groups = GROUPS["gate, queries, keys and values"]
    x = draw(5, 2, columns(groups), seed=0)
    found = run(x, groups, torch.float32, backend, without)
    check(found, run(x, groups, torch.float64, "reference", without), 1e-5)
    assert (found["dx"] == 0).any()


@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_rows_of_any_strides(backend: str) -> None:
    groups = GROUPS["keys and values"]
    x = draw(2, 9, columns(groups), 2, seed=0).transpose(0, 1)
    for given in (x[..., 0], x.movedim(-1, -2)[..., 0, :]):
        check(run(given, groups, torch.float32, backend), run(given, groups, torch.float64, "reference"), 1e-5)


def test_values_are_views() -> None:
    groups = GROUPS["keys and values"]
    x = draw(5, 2, columns(groups), seed=0)
    _, v = split_heads(x, groups)
    assert v.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_no_rows() -> None:
    groups = GROUPS["rotated"]
    for backend in ("chunked", "triton"):
        x = torch.zeros(0, 2, columns(groups), requires_grad=True)
        found = split_heads(x, groups, phases(0, 2, 16) and tuple(p.float() for p in phases(0, 2, 16)), backend=backend)
        torch.cat([one.flatten() for one in found]).sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape


def test_checkpoint_and_compile_change_nothing() -> None:
    groups = GROUPS["gate, queries, keys and values"]
    x = draw(5, 2, columns(groups), seed=0).float()

    def total(x: Tensor) -> Tensor:
        return torch.stack([part.square().sum() for part in split_heads(x, groups, backend="triton")]).sum()

    functions: list[Any] = [
        total,
        lambda x: checkpoint(total, x, use_reentrant=False),
        torch.compile(total, backend="aot_eager"),
    ]
    plain, *others = (
        torch.autograd.grad(one(leaf), leaf)[0] for one in functions for leaf in [x.clone().requires_grad_()]
    )
    assert all(torch.equal(plain, other) for other in others)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 1, 7)}, r"x must be \(n, b, columns\) with the 8 columns of its groups, got \(2, 1, 7\)"),
        ({"x": torch.ones(2, 1, 8, dtype=torch.int64)}, "x must be fp16, bf16, fp32 or fp64, got torch.int64"),
        ({"groups": [Heads(2, 4, ("tanh",))]}, "an activation must be one of none, copy, silu, rotate, got 'tanh'"),
        ({"groups": [Heads(2, 4, ("rotate",))]}, "phases are needed where an activation is 'rotate'"),
        ({"groups": [Heads(2, 4, ("rotate",))], "phases": phases(2, 1, 8)}, "r of at most 4"),
        ({"groups": [Heads(1, 1, ("none",))] * 8}, "groups have 8 parts; use at most 4"),
        ({"backend": "cuda"}, "heads has no backend 'cuda'; use auto, triton, chunked, reference"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        split_heads(**({"x": torch.ones(2, 1, 8), "groups": [Heads(2, 4, ("silu",))]} | change))

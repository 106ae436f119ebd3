"""Relations in tiles against all pairs in fp64, with every gradient; and that memory is linear in the tokens."""

import pytest
import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels.log_sum import log_sum
from lightscale.kernels.relation import ACTIVATIONS, relation, relation_reference, tiled


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ranges(rows: int, tokens: int, keys: int) -> tuple[Tensor, Tensor]:
    """Any, some of them empty."""
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(0, keys // 2, (rows, tokens), generator=generator)
    return first, first + torch.randint(0, keys // 2, (rows, tokens), generator=generator)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_all_pairs(activation: str, norm: bool) -> None:
    """More than one tile each way, and more tokens that are read than that read."""
    a, b, do = normal(2, 70, 8).requires_grad_(), normal(2, 140, 8, seed=1).requires_grad_(), normal(2, 70, 8, seed=2)
    edges = ranges(2, 70, 140)
    o, expected = (
        compute(a, b, *edges, activation=activation, norm=norm, eps=1e-3) for compute in (relation, relation_reference)
    )
    torch.testing.assert_close(o, expected, rtol=1e-11, atol=1e-11)
    for found, exact in zip(torch.autograd.grad(o, (a, b), do), torch.autograd.grad(expected, (a, b), do), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("rows", "tokens"), [(0, 5), (2, 0)])
def test_of_no_tokens_there_is_nothing(rows: int, tokens: int) -> None:
    a, b = (torch.empty(rows, tokens, 8, requires_grad=True) for _ in range(2))
    end = torch.arange(1, tokens + 1).expand(rows, tokens)
    o = relation(a, b, torch.zeros_like(end), end, backend="chunked")
    o.sum().backward()
    assert o.shape == a.shape and a.grad is not None and b.grad is not None


def test_exp_without_a_norm_is_the_linear_form() -> None:
    """Σ_s e^{a_t + b_s} = e^{a_t + z_t} (equation 9)."""
    a, b = normal(2, 30, 4), normal(2, 30, 4, seed=1)
    end = torch.arange(1, 31).repeat(2, 1)
    o = relation(a, b, torch.zeros_like(end), end, norm=False)
    torch.testing.assert_close(o, torch.exp(a + log_sum(b)), rtol=1e-13, atol=0.0)


def test_what_is_not_read_may_be_anything() -> None:
    """Infinities of other documents do not arrive, as NaN or else."""
    a, b = normal(1, 4, 4), normal(1, 8, 4, seed=1)
    first, end = torch.zeros(1, 4, dtype=torch.int64), torch.full((1, 4), 3)
    expected = relation(a, b, first, end, norm=False)
    b[:, 3:] = 1e5
    a.requires_grad_()
    o = relation(a, b, first, end, norm=False)
    assert torch.equal(o, expected) and bool(torch.autograd.grad(o.sum(), a)[0].isfinite().all())


def test_tiles_are_those_that_ranges_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tile is larger than allowed, and causal ranges take half of them: memory is linear, nothing is in vain."""
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", 16 * 16 * 8)
    number = torch.arange(256)[None]
    found = list(tiled._tiles(torch.zeros_like(number), number + 1, normal(1, 256, 8), 256))
    assert all(tile.seen.shape == (1, 16, 16) for tile in found)
    assert len(found) == 16 * 17 // 2
    documents = list(tiled._tiles(number // 32 * 32, number + 1, normal(1, 256, 8), 256))
    assert len(documents) == 8 * 3


def test_half_precision_sums_in_fp32() -> None:
    a, b = normal(1, 20, 8).bfloat16(), normal(1, 20, 8, seed=1).bfloat16()
    edges = ranges(1, 20, 20)
    o = relation(a, b, *edges)
    assert o.dtype == torch.float32
    torch.testing.assert_close(o.double(), relation_reference(a.double(), b.double(), *edges), rtol=1e-4, atol=1e-4)


def test_wrong_arguments_are_refused() -> None:
    a, edge = torch.zeros(1, 4, 3), torch.zeros(1, 4, dtype=torch.int64)
    for wrong, message in (
        ({"b": a[..., :2]}, r"a must be \(B, T, D\) and b \(B, S, D\)"),
        ({"b": a.double()}, "one dtype"),
        ({"end": edge + 5}, "end must be between 0 and the 4 tokens of b"),
        ({"first": edge.int()}, "first must be .* int64 on the host"),
        ({"activation": "tanh"}, "activation must be one of exp, relu, elu, silu, got 'tanh'"),
        ({"backend": "flash"}, "relation has no backend 'flash'"),
    ):
        with pytest.raises(UserError, match=message):
            relation(**({"a": a, "b": a, "first": edge, "end": edge} | wrong))  # type: ignore[arg-type]

"""The Triton kernels of relations, interpreted in fp32, against all pairs in fp64, with every gradient."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lightscale.kernels.common.backends import choose_backend
from lightscale.kernels.relation import ACTIVATIONS, relation
from lightscale.kernels.relation.triton import tiling


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few dozen tokens make several bands of several tiles each way, as many do."""
    for name in ("BLOCK", "BLOCK_D", "PRODUCT_BLOCK", "PRODUCT_BLOCK_D", "SHARE_BLOCK_K"):
        monkeypatch.setattr(tiling, name, 16)
    monkeypatch.setattr(tiling, "MOST_CENTER_BLOCK_D", 16)
    monkeypatch.setattr(tiling, "BAND_PAIRS", 2 * 32**2)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ranges(rows: int, tokens: int, keys: int) -> tuple[Tensor, Tensor]:
    """Any; some are empty, and one tile of queries reads nothing."""
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(0, keys // 2, (rows, tokens), generator=generator)
    end = first + torch.randint(0, keys // 2 + 2, (rows, tokens), generator=generator)
    end[:, :16] = first[:, :16]
    return first, end


def figures(
    a: Tensor, b: Tensor, edges: tuple[Tensor, Tensor], backend: str, dtype: torch.dtype, **options: object
) -> tuple[Tensor, ...]:
    """The sums and the gradients of both sides."""
    sides = [x.to(dtype).requires_grad_() for x in (a, b)]
    o = relation(*sides, *edges, backend=backend, **options)  # type: ignore[arg-type]
    do = normal(*o.shape, seed=2).to(o.dtype)
    return o.detach(), *torch.autograd.grad(o, sides, do)


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], limit: float = 2e-6) -> None:
    for one, exact in zip(found, expected, strict=True):
        assert one.shape == exact.shape
        assert float((one.double() - exact).norm()) <= limit * float(exact.norm())


@pytest.mark.long
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("activation", "norm"), [*((name, True) for name in ACTIVATIONS), ("elu", False)])
def test_equals_all_pairs(activation: str, norm: bool) -> None:
    """More tokens that are read than that read; no side, and not the width, is a multiple of a tile."""
    a, b, edges = normal(2, 33, 17), normal(2, 41, 17, seed=1), ranges(2, 33, 41)
    options = {"activation": activation, "norm": norm, "eps": 1e-3}
    found = figures(a, b, edges, "triton", torch.float32, **options)
    assert {x.dtype for x in found} == {torch.float32}
    assert_close(found, figures(a, b, edges, "reference", torch.float64, **options))


def test_documents_as_they_are_trained_and_a_token_that_is_generated() -> None:
    """In tiles of the size that GPUs have: causal documents of a later segment, and one token that reads all."""
    number = torch.arange(50)
    documents = (number // 20 * 20)[None, 10:], (number + 1)[None, 10:]
    one = torch.tensor([[3]]), torch.tensor([[50]])
    for edges in (documents, one):
        a, b = normal(1, edges[0].shape[1], 6), normal(1, 50, 6, seed=1)
        found = figures(a, b, edges, "triton", torch.float32)
        assert_close(found, figures(a, b, edges, "reference", torch.float64))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("norm", [True, False])
def test_what_is_not_read_may_be_anything(norm: bool) -> None:
    """NaN of other documents does not arrive, neither in sums nor in gradients; of its own document it does."""
    a, b, number = normal(1, 20, 4), normal(1, 20, 4, seed=1), torch.arange(20)[None]
    edges = number // 10 * 10, number // 10 * 10 + 10
    expected = figures(a, b, edges, "triton", torch.float32, norm=norm)
    a[0, 13] = torch.inf
    b[0, 17] = torch.nan
    found = figures(a, b, edges, "triton", torch.float32, norm=norm)
    for one, exact in zip(found, expected, strict=True):
        assert torch.equal(one[:, :10], exact[:, :10])
        assert one[:, 17].isnan().all()


@pytest.mark.usefixtures("small_tiles")
def test_half_precision_and_strides() -> None:
    """As models give their sides, tokens first; sums are fp32, gradients of the sides' dtype."""
    edges = ranges(2, 20, 24)
    a, b = (normal(n, 2, 8, seed=n).half().transpose(0, 1) for n in (20, 24))
    for norm in (True, False):
        o, *gradients = figures(a, b, edges, "triton", torch.float16, norm=norm, eps=1e-3)
        assert o.dtype == torch.float32 and {x.dtype for x in gradients} == {torch.float16}
        exact = figures(a, b, edges, "reference", torch.float64, norm=norm, eps=1e-3)
        assert_close((o,), exact[:1])
        assert_close(tuple(gradients), exact[1:], limit=1e-3)


@pytest.mark.parametrize("norm", [True, False])
def test_offsets_need_more_than_32_bits(norm: bool) -> None:
    """Tokens that lie so far from each other: memory that nothing writes to is not taken."""
    stride, close = 3 * 2**29, [normal(1, 3, 5, seed=n).half() for n in (0, 1)]
    far = [torch.from_numpy(np.empty(2 * stride + 5, np.float16)).as_strided((1, 3, 5), (0, stride, 1)) for _ in close]
    for one, other in zip(far, close, strict=True):
        one.copy_(other)
    edges = torch.zeros(1, 3, dtype=torch.int64), torch.full((1, 3), 3)
    found, expected = ([x.detach().requires_grad_() for x in sides] for sides in (far, close))

    def results(sides: list[Tensor]) -> tuple[Tensor, ...]:
        o = relation(*sides, *edges, norm=norm, eps=1e-3, backend="triton")
        return o, *torch.autograd.grad(o.sum(), sides)

    for one, exact in zip(results(found), results(expected), strict=True):
        assert torch.equal(one, exact)


def test_nothing_to_read() -> None:
    a, b, none = torch.ones(2, 3, 4), torch.ones(2, 0, 4), torch.zeros(2, 3, dtype=torch.int64)
    for x in figures(a, b, (none, none), "triton", torch.float32):
        assert not x.any()
    found = figures(b, a, (none[:, :0], none[:, :0]), "triton", torch.float32)
    assert found[0].shape == (2, 0, 4) and not found[2].any()


@pytest.mark.parametrize("rows", [1, 3])
def test_bands_are_all_pairs_once(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(tiling, "PRODUCT_BLOCK", 16)
    monkeypatch.setattr(tiling, "BAND_PAIRS", rows * 32**2)
    first, end = ranges(rows, 100, 150)
    computed = torch.zeros(100, 150, dtype=torch.int64)
    for band in tiling.bands(first, end):
        assert band.num_queries * band.num_keys <= 32**2
        computed[band.query_0 : band.query_0 + band.num_queries, band.key_0 : band.key_0 + band.num_keys] += 1
    number = torch.arange(150)
    read = ((number >= first[..., None]) & (number < end[..., None])).any(0)
    assert int(computed.max()) == 1 and bool((computed[read] == 1).all())


def test_memory_of_a_million_tokens_is_that_of_some_thousands() -> None:
    """What is kept of pairs; and documents of 1,000 tokens take no more launches than their length asks for."""
    number = torch.arange(1 << 20)[None]
    for first in (torch.zeros_like(number), number // 1000 * 1000):
        found = list(tiling.bands(first, number + 1))
        assert max(band.num_queries * band.num_keys for band in found) <= tiling.BAND_PAIRS
    assert len(found) == (1 << 20) // 2048


def test_it_is_chosen_as_others_are() -> None:
    assert choose_backend("relation", torch.zeros(1), "triton") == "triton"
    assert choose_backend("relation", torch.zeros(1)) == "chunked"

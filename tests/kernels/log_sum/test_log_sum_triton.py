"""The Triton kernels of log-sums, interpreted in fp32, against all pairs in fp64: gradients and passes too."""

import pytest
import torch
from torch import Tensor

from lightscale.kernels.common.backends import choose_backend
from lightscale.kernels.log_sum import chunked, log_sum, log_sum_reference, triton
from lightscale.kernels.log_sum.triton import tiling

# Of 2 rows of 50 tokens: neighbours, a row that begins with one, ends of chunks and of splits.
STARTS = [0, 7, 8, 16, 31, 50, 51, 58, 66, 99, 100]
CASES = [(50, None, True), (50, STARTS, True), (50, STARTS, False), (50, [0, 50, 100], False), (1, None, True)]


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few dozen tokens have chunks and splits, as long ones have."""
    monkeypatch.setattr(tiling, "CHUNK", 4)
    monkeypatch.setattr(tiling, "LEAST_SPLIT_TOKENS", 16)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_close(found: Tensor, expected: Tensor, limit: float = 2e-6) -> None:
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert float((found.double() - expected).norm()) <= limit * float(expected.norm())


@pytest.mark.parametrize(("tokens", "starts", "with_state"), CASES)
def test_equals_all_pairs(tokens: int, starts: list[int] | None, with_state: bool) -> None:
    """Terms of e^10 beside e^-10; columns of a wider tensor, and some that write nothing."""
    b = 5 * normal(2, tokens, 6)
    b[0, 3:5] = -torch.inf
    state = normal(2, 3, seed=1) if with_state else None
    cut, dz = None if starts is None else torch.tensor(starts), normal(2, tokens, 3, seed=2)
    if starts is not None:
        # The cotangent of the log of nothing is NaN in autograd's reference.
        b[0, 3:5] = 0.0

    def figures(backend: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        wide = b.to(dtype).requires_grad_()
        entering = None if state is None else state.to(dtype).requires_grad_()
        leaves = [x for x in (wide, entering) if x is not None]
        z = log_sum(wide[..., ::2], initial_state=entering, cu_seqlens=cut, backend=backend)
        return z.detach(), *torch.autograd.grad(z, leaves, dz.to(dtype))

    for found, exact in zip(figures("triton", torch.float32), figures("reference", torch.float64), strict=True):
        assert_close(found, exact)


def test_the_log_of_nothing() -> None:
    b = normal(1, 40, 2).float()
    b[:, :20] = -torch.inf
    b.requires_grad_()
    z = log_sum(b, backend="triton")
    (gradient,) = torch.autograd.grad(z[:, 20:].sum(), b)
    assert bool((z[:, :20] == -torch.inf).all()) and not gradient[:, :20].any() and bool(gradient.isfinite().all())
    expected = b.detach().double()[:, 20:].requires_grad_()
    exact = log_sum(expected)
    assert_close(z[:, 20:], exact)
    assert_close(gradient[:, 20:], torch.autograd.grad(exact.sum(), expected)[0])


@pytest.mark.parametrize("starts", [None, STARTS])
def test_passes_are_those_in_chunks(starts: list[int] | None) -> None:
    """What sequence ranks call, with a cotangent of the state behind the row."""
    cut = None if starts is None else torch.tensor(starts)
    b, dz, state, dstate = 3 * normal(2, 50, 3), normal(2, 50, 3, seed=1), normal(2, 3, seed=2), normal(2, 3, seed=3)
    z = chunked.out_fwd(b, state, cut)
    single = b.float(), z.float(), dz.float(), state.float(), dstate.float()
    for found, exact in zip(triton.state_fwd(single[0], cut), chunked.state_fwd(b, cut), strict=True):
        assert_close(found, exact)
    assert_close(triton.out_fwd(single[0], single[3], cut), z)
    assert_close(triton.state_bwd(*single[1:4], cut), chunked.state_bwd(z, dz, state, cut))
    asked = []
    found = triton.grad_bwd(*single[:3], lambda: asked.append(1) or single[4], cut)
    assert asked == [1]
    assert_close(found, chunked.grad_bwd(b, z, dz, dstate, cut))


def test_rows_of_no_tokens() -> None:
    b = torch.zeros(2, 0, 3)
    assert triton.out_fwd(b, None).shape == triton.grad_bwd(b, b, b).shape == b.shape
    z, through = triton.state_fwd(b)
    assert bool((z == -torch.inf).all()) and through.tolist() == [1.0, 1.0]
    assert triton.state_bwd(b, b, torch.ones(2, 3)).tolist() == torch.zeros(2, 3).tolist()


def test_sums_of_many_tokens_keep_what_each_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By chunks: as many of them as tokens in each, and one split."""
    monkeypatch.setattr(tiling, "CHUNK", 16)
    monkeypatch.setattr(tiling, "LEAST_SPLIT_TOKENS", 256)
    z = log_sum(torch.zeros(1, 256, 1), backend="triton")
    assert float((z[0, :, 0].double() - torch.arange(1, 257).double().log()).abs().max()) < 2e-6


def test_it_is_chosen_as_others_are() -> None:
    assert choose_backend("log_sum", torch.zeros(1), "triton") == "triton"
    assert choose_backend("log_sum", torch.zeros(1)) == "chunked"
    reference = log_sum_reference(torch.zeros(1, 3, 2))[0]
    assert torch.equal(log_sum(torch.zeros(1, 3, 2), backend="reference"), reference)

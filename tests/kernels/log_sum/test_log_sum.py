"""Log-sums in chunks, over whole documents and folded over segments, against all pairs in fp64, with every gradient."""

import itertools

import pytest
import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels.log_sum import log_sum, log_sum_reference, log_sum_whole, recurrent_step
from lightscale.kernels.log_sum.reference import log_sum_whole_reference
from lightscale.kernels.log_sum.segments import entering_sums

ROWS, WIDTH = 2, 3
# Of 2 rows of 50 tokens: neighbours, a row that begins with one, ends of chunks.
STARTS = [0, 7, 8, 50, 51, 58, 99, 100]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)) if expected.numel() else 0.0


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 7, 64])
@pytest.mark.parametrize(("tokens", "starts"), [(1, None), (50, None), (50, STARTS), (130, [0, 130, 140, 260])])
def test_equals_all_pairs(tokens: int, starts: list[int] | None, chunk_size: int, with_state: bool) -> None:
    """Terms of e^10 beside e^-10."""
    b = (5 * normal(ROWS, tokens, WIDTH)).requires_grad_()
    state = normal(ROWS, WIDTH, seed=1).requires_grad_() if with_state else None
    cut = None if starts is None else torch.tensor(starts)
    leaves, dz = [x for x in (b, state) if x is not None], normal(ROWS, tokens, WIDTH, seed=2)
    z = log_sum(b, initial_state=state, cu_seqlens=cut, chunk_size=chunk_size)
    expected, _ = log_sum_reference(b, initial_state=state, cu_seqlens=cut)
    assert error(z, expected) < 1e-14
    pairs = zip(torch.autograd.grad(z, leaves, dz), torch.autograd.grad(expected, leaves, dz), strict=True)
    assert all(error(*pair) < 1e-12 for pair in pairs)


@pytest.mark.parametrize("starts", [None, STARTS])
def test_whole_documents_equal_all_pairs(starts: list[int] | None) -> None:
    b, cut = (5 * normal(ROWS, 50, WIDTH)).requires_grad_(), None if starts is None else torch.tensor(starts)
    dz = normal(ROWS, 50, WIDTH, seed=2)
    z, expected = log_sum_whole(b, cu_seqlens=cut), log_sum_whole_reference(b, cu_seqlens=cut)
    assert error(z, expected) < 1e-14
    assert error(torch.autograd.grad(z, b, dz)[0], torch.autograd.grad(expected, b, dz)[0]) < 1e-12


def test_a_token_at_a_time() -> None:
    b = normal(ROWS, 20, WIDTH)
    z = log_sum(b)
    state = b[:, 0]
    for token in range(1, 20):
        state = recurrent_step(b[:, token], state)
        assert error(state, z[:, token]) < 1e-14


def test_long_sums_keep_what_each_token_adds() -> None:
    """In fp32, 2^18 ones: a scan over all tokens stalls where one more is rounded away."""
    z = log_sum(torch.zeros(1, 2**18, 1))
    assert z.dtype == torch.float32
    expected = torch.arange(1, 2**18 + 1, dtype=torch.float64).log()
    assert float((z[0, :, 0].double() - expected).abs().max()) < 2e-5


def test_half_precision_sums_in_fp32() -> None:
    b = normal(ROWS, 40, WIDTH).bfloat16().requires_grad_()
    z = log_sum(b)
    z.sum().backward()
    assert z.dtype == torch.float32 and b.grad is not None and b.grad.dtype == torch.bfloat16
    assert error(z.double(), log_sum_reference(b.detach().double())[0]) < 1e-6


def test_what_is_not_written_adds_nothing() -> None:
    b = normal(1, 6, 2)
    b[:, :2] = -torch.inf
    b.requires_grad_()
    z = log_sum(b)
    (gradient,) = torch.autograd.grad(z[:, 2:].sum(), b)
    assert bool((z[:, :2] == -torch.inf).all()) and not gradient[:, :2].any()
    assert error(z[:, 2:], log_sum(b.detach()[:, 2:])) < 1e-14


def test_segments_fold_as_they_follow() -> None:
    """Against one after the other, with cuts anywhere."""
    z = 3 * normal(5, ROWS, WIDTH)
    state = normal(ROWS, WIDTH, seed=1)
    for cuts in itertools.product((0.0, 1.0), repeat=5):
        through = torch.tensor(cuts, dtype=torch.float64)[:, None].repeat(1, ROWS)
        found, running = entering_sums(z, through, state), state
        for number in range(5):
            assert error(found[number], running) < 1e-14
            running = torch.logaddexp(running if cuts[number] else torch.full_like(running, -torch.inf), z[number])
        assert error(found[5], running) < 1e-14


def test_wrong_arguments_are_refused() -> None:
    b = torch.zeros(2, 4, 3)
    for wrong, message in (
        ({"b": b[0]}, r"b must be \(B, T, D\)"),
        ({"b": b, "initial_state": torch.zeros(2, 4)}, r"initial_state must be \(B, D\) = \(2, 3\)"),
        ({"b": b, "cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens"),
    ):
        with pytest.raises(UserError, match=message):
            log_sum(**wrong)  # type: ignore[arg-type]

"""The laws of the algebra of segments, for each kind of state, with cut documents and empty states among the cases."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightscale.kernels.lightnet import LightNetState, exchanged_cotangent, plain_cotangent
from lightscale.kernels.lightnet.state import StateCotangent
from lightscale.parallel.sequence.algebra import DIAGONAL, LOG_SUM_EXP, Algebra, Tensors

B, H, K, V = 3, 2, 4, 5


def random(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def diagonal(generator: torch.Generator, *, per_channel: bool) -> Tensors:
    decay = torch.rand(B, H, K if per_channel else 1, 1, dtype=torch.float64, generator=generator)
    decay[0] = 0.0  # a document begins
    decay[1, 0] = 1.0
    return random(B, H, K, V, generator=generator), decay


def log_sum_exp(generator: torch.Generator) -> Tensors:
    z = 30 * random(B, H, K, generator=generator)
    S = random(B, H, 2 * K, V, generator=generator)
    z[2, 1] = -torch.inf  # nothing was written
    S[2, 1] = 0.0
    through = torch.ones(B, 1, dtype=torch.float64)
    through[0] = 0.0
    return z, S, through


def segments(kind: str, number: int) -> Iterator[Tensors]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(number):
        match kind:
            case "per head":
                yield diagonal(generator, per_channel=False)
            case "per channel":
                yield diagonal(generator, per_channel=True)
            case _:
                yield log_sum_exp(generator)


KINDS = ["per head", "per channel", "log-sum-exp"]
ALGEBRAS: dict[str, Algebra] = {"per head": DIAGONAL, "per channel": DIAGONAL, "log-sum-exp": LOG_SUM_EXP}


def assert_close(found: Tensors, expected: Tensors) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_combining_is_associative_with_the_identity(kind: str) -> None:
    algebra = ALGEBRAS[kind]
    a, b, c = segments(kind, 3)
    assert_close(algebra.combine(algebra.combine(a, b), c), algebra.combine(a, algebra.combine(b, c)))
    assert_close(algebra.combine(algebra.identity(a), a), a)
    assert_close(algebra.combine(a, algebra.identity(a)), a)


@pytest.mark.parametrize("kind", KINDS)
def test_a_combined_segment_acts_as_both(kind: str) -> None:
    algebra = ALGEBRAS[kind]
    a, b, before = segments(kind, 3)
    state = algebra.apply(before, algebra.empty(before))
    assert_close(algebra.apply(algebra.combine(a, b), state), algebra.apply(b, algebra.apply(a, state)))
    assert_close(algebra.apply(algebra.identity(a), state), state)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_passes_where_a_document_begins(kind: str) -> None:
    algebra = ALGEBRAS[kind]
    a, b = segments(kind, 2)
    fine, broken = algebra.apply(b, algebra.empty(a)), algebra.empty(a)
    for tensor in broken:
        tensor[0] = torch.nan
    after = algebra.apply(b, broken)
    for found, expected in zip(after, fine, strict=True):
        assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("kind", KINDS[:2])
def test_the_adjoint_is_the_transpose(kind: str) -> None:
    (segment,) = segments(kind, 1)
    generator = torch.Generator().manual_seed(1)
    state = random(B, H, K, V, generator=generator).requires_grad_()
    cotangent, reads = random(B, H, K, V, generator=generator), random(B, H, K, V, generator=generator)
    (after,) = DIAGONAL.apply(segment, (state,))
    (expected,) = torch.autograd.grad(after, state, cotangent)
    transition = DIAGONAL.transition(segment, (state.detach(),))
    assert_close(DIAGONAL.adjoint(transition, (reads,), (cotangent,)), (reads + expected,))


def test_the_adjoint_of_averages_is_the_transpose() -> None:
    """In the form that is carried: (U, R) stands for the cotangents of z and S."""
    segment, before = segments("log-sum-exp", 2)
    generator = torch.Generator().manual_seed(1)
    state = LightNetState(before[0].clone().requires_grad_(), before[1].clone().requires_grad_())
    after = LightNetState(*LOG_SUM_EXP.apply(segment, tuple(state)))
    dz, dS = random(B, H, K, generator=generator), random(B, H, 2 * K, V, generator=generator)
    dz[after.z.isinf()] = 0.0
    loss = (after.S * dS).sum() + (after.z.masked_fill(after.z.isinf(), 0.0) * dz).sum()
    expected = torch.autograd.grad(loss, tuple(state))
    carried = exchanged_cotangent(LightNetState(after.z.detach(), after.S.detach()), dz, dS)
    zero = tuple(torch.zeros_like(x) for x in carried)
    transition = LOG_SUM_EXP.transition(segment, before[:2])
    found = plain_cotangent(LightNetState(*before[:2]), StateCotangent(*LOG_SUM_EXP.adjoint(transition, zero, carried)))
    assert_close(found, tuple(torch.nan_to_num(x) for x in expected))


@pytest.mark.parametrize("kind", KINDS)
def test_transitions_multiply(kind: str) -> None:
    algebra = ALGEBRAS[kind]
    parts = list(segments(kind, 4))
    state, product = algebra.empty(parts[0]), None
    combined = algebra.identity(parts[0])
    for first, segment in enumerate(parts):
        transition = algebra.transition(segment, state)
        product = transition if product is None else product * transition
        state = algebra.apply(segment, state)
        combined = algebra.combine(combined, segment)
        if first == 0:
            start = algebra.empty(segment)
    assert product is not None
    torch.testing.assert_close(product, algebra.transition(combined, start), rtol=1e-12, atol=1e-12)


def test_kinds_are_told_apart() -> None:
    """The cases hold cut documents, undecayed channels and states in which nothing was written."""
    for kind in KINDS[:2]:
        decay = next(segments(kind, 1))[1]
        assert (decay == 0).any()
        assert (decay == 1).any()
    z, _, through = next(segments("log-sum-exp", 1))
    assert (through == 0).any()
    assert z.isinf().any()

"""The laws of the algebra of segments, for each kind of state, with cut documents and empty states among the cases."""

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightscale.kernels.common.backends import set_default_backend
from lightscale.kernels.lightnet import LightNetState, exchanged_cotangent, plain_cotangent
from lightscale.kernels.lightnet.state import StateCotangent
from lightscale.parallel.sequence.algebra import (
    AFFINE,
    BOTH,
    DIAGONAL,
    LOG_SUM_EXP,
    SUFFIX,
    WHOLE_LOG_SUM_EXP,
    Algebra,
    Tensors,
)
from lightscale.parallel.sequence.log_sums import LOG_SUM

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
            case "per mode":
                S, decay = diagonal(generator, per_channel=False)
                yield S[:, 0], decay[:, :1, 0] * torch.rand(B, 1, V, dtype=torch.float64, generator=generator)
            case "affine":
                M = random(B, H, K, K, generator=generator) / K**0.5
                M[0] = 0.0  # a document begins
                yield random(B, H, K, V, generator=generator), M
            case "log-sum":
                z, _, through = log_sum_exp(generator)
                yield z[:, 0], through
            case _:
                yield log_sum_exp(generator)


KINDS = ["per head", "per channel", "per mode", "affine", "log-sum-exp", "log-sum"]
ALGEBRAS: dict[str, Algebra] = {
    **dict.fromkeys(KINDS, DIAGONAL),
    "affine": AFFINE,
    "log-sum-exp": LOG_SUM_EXP,
    "log-sum": LOG_SUM,
}


def assert_close(found: Tensors, expected: Tensors, tolerance: float = 1e-12) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.to(b.dtype), b, rtol=tolerance, atol=tolerance)


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


@pytest.mark.parametrize("kind", KINDS[:4])
def test_the_adjoint_is_the_transpose(kind: str) -> None:
    algebra = ALGEBRAS[kind]
    (segment,) = segments(kind, 1)
    generator = torch.Generator().manual_seed(1)
    state, cotangent, reads = (random(*segment[0].shape, generator=generator) for _ in range(3))
    state.requires_grad_()
    (after,) = algebra.apply(segment, (state,))
    (expected,) = torch.autograd.grad(after, state, cotangent)
    transition = algebra.transition(segment, (state.detach(),))
    assert_close(algebra.adjoint(transition, (reads,), (cotangent,)), (reads + expected,))


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
    state, transitions = algebra.empty(parts[0]), []
    combined = algebra.identity(parts[0])
    for first, segment in enumerate(parts):
        transitions.append(algebra.transition(segment, state))
        state = algebra.apply(segment, state)
        combined = algebra.combine(combined, segment)
        if first == 0:
            start = algebra.empty(segment)
    # Of matrices the later one stands before the earlier.
    product = functools.reduce(lambda a, b: b @ a if kind == "affine" else b * a, transitions)
    torch.testing.assert_close(product, algebra.transition(combined, start), rtol=1e-12, atol=1e-12)


# ----- many segments at once -----------------------------------------------------------------------------------------


@pytest.fixture(params=["PyTorch", "Triton"])
def computed(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The dtype in which folds are computed, by the back-end of the parameter."""
    set_default_backend("triton" if request.param == "Triton" else "auto")
    yield torch.float32 if request.param == "Triton" else torch.float64
    set_default_backend("auto")


def gathered(parts: list[Tensors], dtype: torch.dtype) -> Tensors:
    """Stacked, as views into one buffer with other things between: what an all-gather leaves."""
    found = []
    for tensors in zip(*parts, strict=True):
        x = torch.stack(tensors).to(dtype)
        room = torch.full((x.size(0), x[0].numel() + 3), torch.nan, dtype=dtype)
        room[:, 1:-2] = x.flatten(1)
        found.append(room[:, 1:-2].unflatten(1, x.shape[1:]))
    return tuple(found)


def cast(tensors: Tensors | None, dtype: torch.dtype) -> Tensors | None:
    return None if tensors is None else tuple(x.to(dtype) for x in tensors)


@pytest.mark.parametrize("number", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fold_is_every_segment_in_turn(kind: str, number: int, computed: torch.dtype) -> None:
    """From an empty state and from one; with a document cut, and states of nothing, among them."""
    algebra, tolerance = ALGEBRAS[kind], 1e-12 if computed == torch.float64 else 1e-5
    first, *parts = segments(kind, number + 1)
    for begin in (None, algebra.apply(first, algebra.empty(first))):
        state, states, transitions = algebra.empty(first) if begin is None else begin, [], []
        for segment in parts:
            states.append(state)
            transitions.append(algebra.transition(segment, state))
            state = algebra.apply(segment, state)
        for end in {0, number // 2, number}:
            found, of_each = algebra.fold(gathered(parts, computed), cast(begin, computed), end)
            assert_close(found, [*states, state][end], tolerance)
            assert_close(tuple(of_each), tuple(transitions), tolerance)
            assert of_each.untyped_storage().nbytes() == of_each.numel() * of_each.element_size(), "keeps what it read"
    assert_close(algebra.combined(gathered(parts, computed)), functools.reduce(algebra.combine, parts), tolerance)


@pytest.mark.parametrize("number", [0, 1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fold_back_is_every_adjoint_in_turn(kind: str, number: int, computed: torch.dtype) -> None:
    algebra, tolerance = ALGEBRAS[kind], 1e-12 if computed == torch.float64 else 1e-5
    first, *parts = segments(kind, number + 1)
    _, transitions = algebra.fold(gathered([first, *parts], torch.float64), None, 0)
    generator = torch.Generator().manual_seed(2)
    state = algebra.empty(first)
    shapes = [x.shape for x in (reversed(state) if kind == "log-sum-exp" else state)]
    *reads, end = [tuple(random(*shape, generator=generator) for shape in shapes) for _ in range(number + 1)]
    stacked = gathered([end, *reads], computed)
    for begin in (None, end):
        expected = tuple(torch.zeros_like(x) for x in end) if begin is None else begin
        for transition, read in reversed(list(zip(transitions[1:], reads, strict=True))):
            expected = algebra.adjoint(transition, read, expected)
        found = algebra.fold_back(transitions[1:].to(computed), tuple(x[1:] for x in stacked), cast(begin, computed))
        assert_close(found, expected, tolerance)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_stays_before_a_document_that_begins(kind: str, computed: torch.dtype) -> None:
    """Row 0 of every segment begins a document; what is NaN before it must not come through."""
    algebra = ALGEBRAS[kind]
    broken, *parts = segments(kind, 3)
    broken[0][0] = torch.nan
    right, _ = algebra.fold(gathered(parts, computed), None, 2)
    found, transitions = algebra.fold(gathered([broken, *parts], computed), None, 3)
    back = algebra.fold_back(transitions[1:], *_cotangents(found, computed, broken=False))
    broken_back = algebra.fold_back(transitions[1:], *_cotangents(found, computed, broken=True))
    for x, y in (*zip(found, right, strict=True), *zip(broken_back, back, strict=True)):
        assert torch.equal(x[0], y[0])
        assert y[0].isfinite().all()


def _cotangents(state: Tensors, dtype: torch.dtype, *, broken: bool) -> tuple[Tensors, Tensors]:
    """Of two segments, and of the state behind them, whose row 0 is NaN when ``broken``."""
    shapes = [x.shape for x in (reversed(state) if len(state) == 2 else state)]
    generator = torch.Generator().manual_seed(3)
    parts = [tuple(random(*shape, generator=generator) for shape in shapes) for _ in range(3)]
    for x in parts[2]:
        x[0] = torch.nan if broken else 0.0
    return gathered(parts[:2], dtype), tuple(x.to(dtype) for x in parts[2])


@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_a_suffix_is_the_prefix_of_the_segments_turned_around(number: int, computed: torch.dtype) -> None:
    """Alone and beside a prefix, whose decays it shares: folds to any segment, with a state at the ends, and back."""
    tolerance = 1e-12 if computed == torch.float64 else 1e-5
    generator = torch.Generator().manual_seed(4)
    to_right = list(segments("per head", number))
    both = [(S, random(*S.shape, generator=generator), D) for S, D in to_right]
    to_left = [(other, D) for _, other, D in both]
    turned = to_left[::-1]
    ends = [random(*to_right[0][0].shape, generator=generator).to(computed) for _ in range(2)]
    D = torch.stack([D for *_, D in both]).to(computed)
    for rank in range(number):
        (prefix,), _ = DIAGONAL.fold(gathered(to_right, computed), (ends[0],), rank)
        (suffix,), _ = DIAGONAL.fold(gathered(turned, computed), (ends[1],), number - 1 - rank)
        found, transitions = BOTH.fold(gathered(both, computed), tuple(ends), rank)
        assert torch.equal(transitions, D)
        assert_close(found, (prefix, suffix), tolerance)
        assert_close(SUFFIX.fold(gathered(to_left, computed), (ends[1],), rank)[0], (suffix,), tolerance)
        for at, turned_at in ((rank, number - 1 - rank), (None, None)):
            reads = [torch.stack([x[side] for x in both]).to(computed) for side in range(2)]
            (left,) = DIAGONAL.fold_back(D, (reads[0],), (ends[0],), at)
            (right,) = DIAGONAL.fold_back(D.flip(0), (reads[1].flip(0),), (ends[1],), turned_at)
            assert_close(BOTH.fold_back(D, tuple(reads), tuple(ends), at), (left, right), tolerance)
            assert_close(SUFFIX.fold_back(D, (reads[1],), (ends[1],), at), (right,), tolerance)
    expected = functools.reduce(BOTH.combine, both)
    assert_close(BOTH.combined(gathered(both, computed)), expected, tolerance)
    assert_close(expected[1:], functools.reduce(DIAGONAL.combine, turned))
    assert_close(BOTH.combine(BOTH.identity(expected), expected), expected)


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 3, 8])
def test_both_sides_of_whole_documents_are_averages_and_their_cotangents_are_sums(
    number: int, computed: torch.dtype
) -> None:
    """What comes from either side is folded as LightNet's state is; backward as a state that nothing decays."""
    tolerance = 1e-12 if computed == torch.float64 else 1e-5
    generator = torch.Generator().manual_seed(8)
    to_right = list(segments("log-sum-exp", number))
    both = [(z, S, z.flip(1), 2 * S.flip(1), through) for z, S, through in to_right]
    turned = [(z, S, through) for *_, z, S, through in both][::-1]
    begin = [(random(B, H, K, generator=generator), random(B, H, 2 * K, V, generator=generator)) for _ in range(2)]
    ends = [cast(state, computed) for state in begin]
    for rank in range(number):
        prefix, _ = LOG_SUM_EXP.fold(gathered(to_right, computed), ends[0], rank)
        suffix, _ = LOG_SUM_EXP.fold(gathered(turned, computed), ends[1], number - 1 - rank)
        found, transitions = WHOLE_LOG_SUM_EXP.fold(gathered(both, computed), (*ends[0], *ends[1]), rank)
        assert_close(found, (*prefix, *suffix), tolerance)
        D = torch.stack([through for *_, through in to_right])[..., None, None].to(computed)
        assert torch.equal(transitions, D)
        reads = tuple(torch.stack([x[side] for x in both]).to(computed) for side in (1, 3))
        of_ends = (ends[0][1], ends[1][1])
        expected = BOTH.fold_back(D, reads, of_ends, rank)
        assert_close(WHOLE_LOG_SUM_EXP.fold_back(transitions, reads, of_ends, rank), expected, tolerance)
    combined = functools.reduce(WHOLE_LOG_SUM_EXP.combine, both)
    assert_close(WHOLE_LOG_SUM_EXP.combined(gathered(both, computed)), combined, tolerance)
    assert_close(combined[2:], functools.reduce(LOG_SUM_EXP.combine, turned))
    assert_close(WHOLE_LOG_SUM_EXP.combine(WHOLE_LOG_SUM_EXP.identity(combined), combined), combined)
    state = (*begin[0], *begin[1])
    after = WHOLE_LOG_SUM_EXP.apply(combined, state)
    assert_close(after[:2], LOG_SUM_EXP.apply((*combined[:2], combined[4]), begin[0]))
    assert_close(after[2:], LOG_SUM_EXP.apply(combined[2:], begin[1]))


def test_kinds_are_told_apart() -> None:
    """The cases hold cut documents, undecayed channels and states in which nothing was written."""
    for kind in KINDS[:2]:
        decay = next(segments(kind, 1))[1]
        assert (decay == 0).any()
        assert (decay == 1).any()
    z, _, through = next(segments("log-sum-exp", 1))
    assert (through == 0).any()
    assert z.isinf().any()

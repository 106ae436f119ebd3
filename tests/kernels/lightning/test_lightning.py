"""Lightning attention: the chunked form and its passes against the fp64 recurrence, with every gradient."""

import runpy
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightscale.kernels.lightning import (
    Angles,
    grad_bwd,
    lightning_attention,
    lightning_attention_reference,
    out_fwd,
    recurrent_step,
    state_bwd,
    state_fwd,
)
from lightscale.kernels.lightning.chunked import Gradients

comparing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "comparing.py")))
boundaries, error, assert_close = comparing.boundaries, comparing.error, comparing.assert_close

Results = dict[str, Tensor]

# No decay, almost none, usual ones, and one that 64 steps take below the smallest fp64 number.
DECAYS = (0.0, -1e-7, -0.004, -0.3, -20.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs of one call and the cotangents of its two results."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    initial_state: Tensor | None
    do: Tensor
    dstate: Tensor
    cu_seqlens: Tensor | None = None
    angles: Angles | None = None

    def to(self, dtype: torch.dtype, state_dtype: torch.dtype) -> "Case":
        """The same case with q, k, v, do in ``dtype`` and decays, angles and states in ``state_dtype``."""
        changed: dict[str, Any] = {name: getattr(self, name).to(dtype) for name in ("q", "k", "v", "do")}
        for name in ("log_decay", "initial_state", "dstate"):
            x = getattr(self, name)
            changed[name] = None if x is None else x.to(state_dtype)
        if self.angles is not None:
            changed["angles"] = Angles(self.angles.theta.to(state_dtype), self.angles.positions)
        return replace(self, **changed)


def make_case(
    rows: int,
    tokens: int,
    widths: tuple[int, int],
    *,
    decays: tuple[float, ...] | None = (-0.01, -0.2),
    heads: int = 2,
    with_state: bool = True,
    starts: list[list[int]] | None = None,
    with_angles: bool = False,
    seed: int = 0,
) -> Case:
    """Random fp64 inputs; ``starts`` are the document starts inside each row."""
    generator = torch.Generator().manual_seed(seed)
    heads = heads if decays is None else len(decays)
    key_width, value_width = widths

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    state_shape = (rows, heads, key_width * (1 + with_angles), value_width)
    angles = None
    if with_angles:
        # In a document's middle, as rows are.
        angles = Angles(draw(heads, key_width), (torch.arange(tokens) + 10).repeat(rows, 1))
    return Case(
        q=draw(rows, tokens, heads, key_width),
        k=draw(rows, tokens, heads, key_width),
        v=draw(rows, tokens, heads, value_width),
        log_decay=None if decays is None else torch.tensor(decays, dtype=torch.float64),
        initial_state=draw(*state_shape) if with_state else None,
        do=draw(rows, tokens, heads, value_width),
        dstate=draw(*state_shape),
        cu_seqlens=None if starts is None else boundaries(starts, tokens),
        angles=angles,
    )


def run(case: Case, backend: str = "chunked", **options: Any) -> Results:
    """Outputs, final state and all gradients of one call of the operator, or of the oracle itself."""
    names = [n for n in ("q", "k", "v", "log_decay", "initial_state") if getattr(case, n) is not None]
    leaves = {name: getattr(case, name).detach().requires_grad_() for name in names}
    given = dict(leaves)
    if case.angles is not None:
        leaves["theta"] = case.angles.theta.detach().requires_grad_()
        options["angles"] = Angles(leaves["theta"], case.angles.positions)
    if backend == "oracle":
        o, state = lightning_attention_reference(
            leaves["q"],
            leaves["k"],
            leaves["v"],
            leaves.get("log_decay"),
            initial_state=leaves.get("initial_state"),
            cu_seqlens=case.cu_seqlens,
            **options,
        )
    else:
        o, final = lightning_attention(
            **given, cu_seqlens=case.cu_seqlens, output_final_state=True, backend=backend, **options
        )
        assert final is not None
        state = final
    gradients = torch.autograd.grad([o, state], list(leaves.values()), [case.do, case.dstate])
    results = {"o": o.detach(), "state": state.detach()}
    return results | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}


# Every number of tokens with every width, and each of both with and without a state that enters.
SHAPES = [
    pytest.param(tokens, widths, (i + j) % 2 == 0, id=f"{tokens}-{widths[0]}x{widths[1]}")
    for i, tokens in enumerate((1, 15, 63, 130, 300))
    for j, widths in enumerate(((32, 32), (60, 60), (128, 128), (64, 32)))
]


@pytest.mark.parametrize(("tokens", "widths", "with_state"), SHAPES)
def test_equals_recurrence(tokens: int, widths: tuple[int, int], with_state: bool) -> None:
    case = make_case(1, tokens, widths, with_state=with_state, seed=tokens)
    assert_close(run(case), run(case, "oracle"), 1e-10)


@pytest.mark.parametrize("head", range(len(DECAYS)), ids=[f"{d:g}" for d in DECAYS])
def test_each_decay_alone(head: int) -> None:
    """One head at a time, so that no head's error hides behind another's magnitude."""
    case = make_case(2, 200, (16, 24), decays=DECAYS[head : head + 1])
    assert_close(run(case), run(case, "oracle"), 1e-10)


@pytest.mark.parametrize("length", [None, 3, 33, 100], ids=["whole", "3", "33", "100"])
@pytest.mark.parametrize("decay", [-0.05, -3.0, -8.0, -20.0])
def test_the_gradient_of_a_strong_decay_keeps_its_digits(decay: float, length: int | None) -> None:
    """It is far smaller than what each token reads of itself, and than the state that leaves beside its cotangent."""
    starts = None if length is None else [list(range(length, 200, length)), list(range(1, 200, length))]
    case = make_case(2, 200, (16, 24), decays=(decay,), starts=starts).to(torch.float32, torch.float32)
    expected = run(case.to(torch.float64, torch.float64), "oracle")["dlog_decay"]
    assert error(run(case)["dlog_decay"], expected) < 1e-5


@pytest.mark.parametrize("decays", [DECAYS, None], ids=["by-head", "none"])
def test_any_chunk_size(decays: tuple[float, ...] | None) -> None:
    case = make_case(2, 200, (12, 8), decays=decays, starts=[[70], [64, 199]])
    expected = run(case, "oracle")
    for chunk_size in (1, 7, 64, 100, 256):
        assert_close(run(case, chunk_size=chunk_size), expected, 1e-10, f"chunks of {chunk_size}")


def test_zero_decay_factor_forgets_everything() -> None:
    """λ = 0: each output sees its own token only."""
    case = make_case(1, 70, (8, 8), decays=(-float("inf"),))
    own_token = (case.q * case.k).sum(-1, keepdim=True) * case.v
    results = run(case)
    assert error(results["o"], own_token) < 1e-10
    assert all(x.isfinite().all() for x in results.values())


DOCUMENTS = {
    "chunk edge": [[64], []],
    "one before": [[63], [127]],
    "one after": [[65], [129]],
    "one-token documents": [[63, 64, 65, 66], [1, 2, 3, 199]],
    "many in a chunk": [[3, 5, 6, 20, 21, 40, 130], [70, 75, 80, 127, 128, 150]],
    "every chunk edge": [[64, 128, 192], [64, 128, 192]],
    "row starts only": [[], []],
    "every token": [list(range(200)), [100]],
}


@pytest.mark.parametrize("starts", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_documents_without_a_state_equal_recurrence(starts: list[list[int]]) -> None:
    """With a state that enters: the next test, in which the recurrence is held to separate runs too."""
    case = make_case(2, 200, (12, 20), decays=DECAYS, starts=starts, with_state=False)
    assert_close(run(case), run(case, "oracle"), 1e-10)


@pytest.mark.parametrize("starts", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_documents_equal_separate_runs(starts: list[list[int]]) -> None:
    """Every document by itself: also a check of how the reference treats boundaries."""
    case = make_case(2, 200, (12, 20), decays=DECAYS, starts=starts)
    assert case.initial_state is not None and case.cu_seqlens is not None and case.log_decay is not None
    expected = {f"d{n}": torch.zeros_like(getattr(case, n)) for n in ("q", "k", "v", "log_decay", "initial_state")}
    expected |= {"o": torch.zeros_like(case.do), "state": torch.zeros_like(case.dstate)}
    for begin, end in pairwise(case.cu_seqlens.tolist()):
        row, part = begin // 200, slice(begin % 200, begin % 200 + end - begin)
        first, last = part.start == 0, part.stop == 200
        document = Case(
            **{n: getattr(case, n)[row : row + 1, part] for n in ("q", "k", "v", "do")},
            log_decay=case.log_decay,
            initial_state=case.initial_state[row : row + 1] if first else None,
            dstate=case.dstate[row : row + 1] * last,
        )
        results = run(document, "oracle")
        for name in ("o", "dq", "dk", "dv"):
            expected[name][row, part] = results[name][0]
        expected["dlog_decay"] += results["dlog_decay"]
        if first:
            expected["dinitial_state"][row] = results["dinitial_state"][0]
        if last:
            expected["state"][row] = results["state"][0]
    assert_close(run(case), expected, 1e-10)
    assert_close(run(case, "oracle"), expected, 1e-10)


def test_overflow_stays_in_its_document() -> None:
    """The first document's state and the third one's cotangents overflow; the second is as if it were alone."""
    case = make_case(1, 300, (8, 8), starts=[[90, 200]]).to(torch.float32, torch.float32)
    case.k[:, 10:80] = case.v[:, 10:80] = 1e30
    case.q[:, 230:] = case.do[:, 230:] = 1e30
    results = run(case)
    for name in ("o", "dk", "dv"):
        assert not results[name].isfinite().all()
    part = slice(90, 200)
    alone = replace(case, cu_seqlens=None, initial_state=None, dstate=torch.zeros_like(case.dstate))
    expected = run(replace(alone, **{n: getattr(case, n)[:, part] for n in ("q", "k", "v", "do")}))
    for name in ("o", "dq", "dk", "dv"):
        assert error(results[name][:, part], expected[name]) < 1e-5


def restrict(case: Case, begin: int, end: int) -> tuple[Case, Tensor]:
    """A rank's tokens [begin, end) of every row, and the rows (B, 1, 1, 1) that begin with a new document."""
    rows, tokens = case.q.shape[:2]
    fresh = torch.zeros(rows, dtype=torch.bool)
    cu_seqlens = None
    if case.cu_seqlens is not None:
        known = set(case.cu_seqlens.tolist())
        inside = [[t - begin for t in range(begin + 1, end) if r * tokens + t in known] for r in range(rows)]
        cu_seqlens = boundaries(inside, end - begin)
        fresh = torch.tensor([0 < begin < end and r * tokens + begin in known for r in range(rows)])
    part = {n: getattr(case, n)[:, begin:end] for n in ("q", "k", "v", "do")}
    if case.log_decay is not None and case.log_decay.dim() == 3:
        part["log_decay"] = case.log_decay[:, begin:end]
    angles = None if case.angles is None else case.angles.of(slice(begin, end))
    return replace(case, **part, angles=angles, cu_seqlens=cu_seqlens), fresh[:, None, None, None]


def run_over_ranks(case: Case, cuts: list[int]) -> Results:
    """The passes as sequence parallelism composes them, with a rank for each part between two cuts."""
    zero = torch.zeros_like(case.dstate)
    state = zero if case.initial_state is None else case.initial_state
    ranks = []
    for begin, end in pairwise([0, *cuts, case.q.shape[1]]):
        shard, fresh = restrict(case, begin, end)
        local, through = state_fwd(shard.k, shard.v, shard.log_decay, shard.cu_seqlens, angles=shard.angles)
        decay = torch.where(fresh, zero, through[:, :, None, None])
        entering = torch.where(fresh, zero, state)
        o, leaving = out_fwd(
            shard.q, shard.k, shard.v, shard.log_decay, entering, shard.cu_seqlens, angles=shard.angles
        )
        state = decay * state + local
        assert error(leaving, state) < 1e-10
        ranks.append((shard, fresh, decay, entering, o))

    dstate = case.dstate
    gradients: list[Gradients] = []
    for s, fresh, decay, entering, _ in reversed(ranks):
        learned = {"with_decay": s.log_decay is not None, "with_theta": s.angles is not None}
        inputs = (s.q, s.k, s.v, s.log_decay, s.do, entering, dstate, s.cu_seqlens)
        gradients.insert(0, grad_bwd(*inputs, angles=s.angles, **learned))
        own = state_bwd(s.q, s.do, s.log_decay, s.cu_seqlens, angles=s.angles)
        dstate = torch.where(fresh, zero, own) + decay * dstate

    results = {"o": torch.cat([o for *_, o in ranks], 1), "state": state}
    results["dq"] = torch.cat([g.q for g in gradients], 1)
    results["dk"] = torch.cat([g.k for g in gradients], 1)
    results["dv"] = torch.cat([g.v for g in gradients], 1)
    if case.log_decay is not None:
        of_ranks = [g.log_decay for g in gradients if g.log_decay is not None]
        by_token = case.log_decay.dim() == 3
        results["dlog_decay"] = torch.cat(of_ranks, 1) if by_token else torch.stack(of_ranks).sum(0)
    if case.angles is not None:
        results["dtheta"] = torch.stack([g.theta for g in gradients if g.theta is not None]).sum(0)
    if case.initial_state is not None:
        results["dinitial_state"] = dstate
    return results


CUTS = {
    "one rank": [],
    "halves": [100],
    "uneven": [7, 130],
    "one-token ranks": [64, 65, 66, 199],
    "empty ranks": [0, 64, 64, 64, 200],
    "all": [0, 1, 63, 63, 128, 199],
}


@pytest.fixture(
    scope="module",
    params=[None, [[64], [63, 130]], [[65, 66, 67, 199], []]],
    ids=["whole", "documents", "short documents"],
)
def over_ranks(request: pytest.FixtureRequest) -> tuple[Case, Results]:
    """A case, and what the oracle makes of it: once for all cuts."""
    case = make_case(2, 200, (12, 8), decays=DECAYS, starts=request.param)
    return case, run(case, "oracle")


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_passes_compose_over_ranks(cuts: list[int], over_ranks: tuple[Case, Results]) -> None:
    case, expected = over_ranks
    assert_close(run_over_ranks(case, cuts), expected, 1e-10)


@pytest.mark.parametrize("decays", [DECAYS[:4], None], ids=["by-head", "none"])
@pytest.mark.parametrize("starts", [None, [[64], [63, 130]]], ids=["whole", "documents"])
def test_angles(starts: list[list[int]] | None, decays: tuple[float, ...] | None) -> None:
    """Positions need not restart with documents: only differences inside one count."""
    case = make_case(2, 200, (12, 8), decays=decays, starts=starts, with_angles=True)
    expected = run(case, "oracle")
    assert expected["dtheta"].any()
    for chunk_size in (1, 64, 100):
        assert_close(run(case, chunk_size=chunk_size), expected, 1e-10, f"chunks of {chunk_size}")


def test_passes_with_angles_compose_over_ranks() -> None:
    case = make_case(2, 200, (12, 8), decays=DECAYS[:4], starts=[[64], [63, 130]], with_angles=True)
    expected = run(case, "oracle")
    for name, cuts in CUTS.items():
        assert_close(run_over_ranks(case, cuts), expected, 1e-10, name)


def test_one_token_at_a_time_with_angles() -> None:
    case = make_case(2, 5, (6, 4), with_angles=True)
    assert case.angles is not None and case.initial_state is not None
    expected, state = run(case, "oracle"), case.initial_state
    for t in range(5):
        here = Angles(case.angles.theta, case.angles.positions[:, t])
        o, state = recurrent_step(case.q[:, t], case.k[:, t], case.v[:, t], case.log_decay, state, angles=here)
        assert error(o, expected["o"][:, t]) < 1e-14
    assert error(state, expected["state"]) < 1e-14


def decays_of_tokens() -> Tensor:
    """Some tokens of 2 rows of 200 forget nearly all, some nothing."""
    return -torch.exp(3 * torch.randn(2, 200, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


@pytest.mark.parametrize("starts", [None, [[64], [63, 130]]], ids=["whole", "documents"])
def test_decays_of_tokens(starts: list[list[int]] | None) -> None:
    by_token = decays_of_tokens()
    case = replace(make_case(2, 200, (12, 8), starts=starts), log_decay=by_token)
    expected = run(case, "oracle")
    assert_close(run(case), expected, 1e-10)
    for name in ("uneven", "empty ranks"):
        assert_close(run_over_ranks(case, CUTS[name]), expected, 1e-10, name)
    assert expected["dlog_decay"].shape == (2, 200, 2)
    if starts is None:
        state = case.initial_state
        assert state is not None
        for t in range(200):
            o, state = recurrent_step(case.q[:, t], case.k[:, t], case.v[:, t], by_token[:, t], state)
        assert error(o, expected["o"][:, -1]) < 1e-13 and error(state, expected["state"]) < 1e-13


def test_decays_of_tokens_that_are_alike_are_those_of_heads() -> None:
    case = make_case(2, 100, (12, 8))
    assert case.log_decay is not None
    by_head = run(case)
    by_token = run(replace(case, log_decay=case.log_decay.expand(2, 100, 2)))
    by_token["dlog_decay"] = by_token["dlog_decay"].sum((0, 1))
    assert_close(by_token, by_head, 1e-10)


def test_no_tokens() -> None:
    """An empty row hands its state on, forward and backward."""
    case = make_case(2, 0, (4, 6))
    assert case.initial_state is not None
    results = run(case)
    assert results["o"].shape == (2, 0, 2, 6)
    assert torch.equal(results["state"], case.initial_state)
    assert results["state"].data_ptr() != case.initial_state.data_ptr()
    assert torch.equal(results["dinitial_state"], case.dstate)
    assert torch.equal(results["dlog_decay"], torch.zeros(2, dtype=torch.float64))
    state, decay = state_fwd(case.k, case.v, case.log_decay, torch.tensor([0]))
    assert not state.any() and (decay == 1).all() and state_bwd(case.q, case.do, case.log_decay).shape == state.shape


@pytest.mark.parametrize("starts", [None, [[1100, 1999], [700]]], ids=["whole", "documents"])
def test_summaries_of_long_rows(starts: list[list[int]] | None) -> None:
    """Rows that a summary's products see in several splits."""
    case = make_case(2, 2500, (4, 6), decays=(0.0, -1e-4, -0.1), starts=starts, with_state=False)
    local, through = state_fwd(case.k, case.v, case.log_decay, case.cu_seqlens)
    own = state_bwd(case.q, case.do, case.log_decay, case.cu_seqlens)
    zero = torch.zeros_like(case.dstate)
    expected = run(replace(case, initial_state=zero, dstate=zero), "oracle")
    assert error(local, expected["state"]) < 1e-10
    assert error(own, expected["dinitial_state"]) < 1e-10
    assert case.log_decay is not None
    whole_row = (2500 * case.log_decay).exp()
    assert torch.allclose(through, whole_row if starts is None else 0 * whole_row, rtol=1e-12)


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_random_shapes_documents_and_splits(data: st.DataObject) -> None:
    """One call, a chain of calls that pass the state, and ranks: all equal the recurrence."""
    rows, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 150))
    widths = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    inner = st.lists(st.integers(1, tokens), max_size=6).map(lambda xs: sorted({x for x in xs if x < tokens}))
    starts = data.draw(st.none() | st.lists(inner, min_size=rows, max_size=rows))
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=5)))
    decays = data.draw(st.none() | st.lists(st.sampled_from(DECAYS), min_size=2, max_size=3).map(tuple))
    chunk_size = data.draw(st.sampled_from([1, 5, 16, 64]))
    case = make_case(rows, tokens, widths, decays=decays, starts=starts, seed=tokens)

    expected = run(case, "oracle")
    for actual in (run(case, chunk_size=chunk_size), run_over_ranks(case, cuts)):
        assert_close(actual, expected, 1e-10)

    state, outputs = case.initial_state, []
    for begin, end in pairwise([0, *cuts, tokens]):
        shard, fresh = restrict(case, begin, end)
        entering = None if state is None else torch.where(fresh, torch.zeros_like(state), state)
        o, state = lightning_attention(
            shard.q,
            shard.k,
            shard.v,
            shard.log_decay,
            initial_state=entering,
            output_final_state=True,
            cu_seqlens=shard.cu_seqlens,
            chunk_size=chunk_size,
        )
        outputs.append(o)
    assert state is not None
    assert error(torch.cat(outputs, 1), expected["o"]) < 1e-10 and error(state, expected["state"]) < 1e-10


@pytest.mark.parametrize("token", [0, 63, 64, 100, 149])
def test_a_token_changes_nothing_before_it_or_in_other_documents(token: int) -> None:
    case = make_case(2, 150, (8, 8), starts=[[64, 110], [120]])
    before = run(case)["o"]
    changed = replace(case, **{n: getattr(case, n).clone() for n in ("q", "k", "v")})
    for x in (changed.q, changed.k, changed.v):
        x[0, token] += 10.0
    after = run(changed)["o"]
    end = next(e for e in (64, 110, 150) if e > token)
    untouched = torch.ones(2, 150, dtype=torch.bool)
    untouched[0, token:end] = False
    assert torch.equal(after[untouched], before[untouched])
    assert (after[0, token:end] != before[0, token:end]).any(-1).all()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)], ids=str
)
@pytest.mark.parametrize("starts", [None, [[64, 133], [1, 100]]], ids=["angles", "documents"])
def test_lower_precision(dtype: torch.dtype, tolerance: float, starts: list[list[int]] | None) -> None:
    """Outputs and gradients have the inputs' dtype, states and the gradients of decays and angles are fp32, as exact
    as that: what is rounded are the inputs, which the oracle has too.
    """
    with_angles = starts is None
    case = make_case(2, 200, (32, 32), decays=DECAYS, starts=starts, with_angles=with_angles)
    rounded = case.to(dtype, torch.float32)
    results, expected = run(rounded), run(rounded.to(torch.float64, torch.float64), "oracle")
    halves, wide = ("o", "dq", "dk", "dv"), ["state", "dlog_decay", "dinitial_state", *["dtheta"] * with_angles]
    assert {results[n].dtype for n in halves} == {dtype} and {results[n].dtype for n in wide} == {torch.float32}
    assert_close(results, expected, tolerance)
    assert_close({n: results[n] for n in wide}, {n: expected[n] for n in wide}, 1e-5)


def test_reference_backend_takes_half_precision() -> None:
    case = make_case(2, 70, (8, 12), starts=[[10], [64]]).to(torch.bfloat16, torch.float32)
    actual, expected = run(case, "reference"), run(case, "chunked")
    assert {n: x.dtype for n, x in actual.items()} == {n: x.dtype for n, x in expected.items()}
    assert_close(actual, expected, 5e-3)
    assert all(torch.equal(x, expected[n]) for n, x in run(case, "auto").items())


@pytest.mark.parametrize("starts", [None, [[2, 4]]], ids=["whole", "documents"])
def test_finite_differences(starts: list[list[int]] | None) -> None:
    case = make_case(1, 6, (2, 3), starts=starts)
    leaves = [getattr(case, n).requires_grad_() for n in ("q", "k", "v", "log_decay", "initial_state")]

    def operator(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        *qkvd, initial_state = inputs
        o, state = lightning_attention(
            *qkvd,
            initial_state=initial_state,
            output_final_state=True,
            cu_seqlens=case.cu_seqlens,
            chunk_size=4,
        )
        assert state is not None
        return o, state

    assert torch.autograd.gradcheck(operator, leaves)


def test_one_result_is_enough_for_the_backward() -> None:
    """A loss of the outputs alone, or of the final state alone, with cotangents that autograd expands."""
    case = make_case(2, 70, (8, 6))
    ones, none = torch.ones_like, torch.zeros_like
    for do, dstate in ((ones(case.do), none(case.dstate)), (none(case.do), ones(case.dstate))):
        expected = run(replace(case, do=do, dstate=dstate), "oracle")
        leaves = [getattr(case, n).detach().requires_grad_() for n in ("q", "k", "v", "log_decay", "initial_state")]
        o, state = lightning_attention(*leaves[:4], initial_state=leaves[4], output_final_state=True)
        assert state is not None
        (o.sum() if do.any() else state.sum()).backward()
        assert {x.grad is not None for x in leaves} == {True}
        actual = dict(zip(("dq", "dk", "dv", "dlog_decay", "dinitial_state"), [x.grad for x in leaves], strict=True))
        assert_close({n: x for n, x in actual.items() if x is not None}, {n: expected[n] for n in actual}, 1e-10)


@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (2, 3)])
def test_strided_inputs_are_read_and_left_alone(rows: int, heads: int) -> None:
    """Slices of one projection, and head-major tensors; with one head, where a view would be contiguous."""
    case = make_case(rows, 50, (8, 8), decays=DECAYS[2 : 2 + heads])
    expected = run(case)
    packed = torch.cat([case.q, case.k, case.v], dim=-1)
    q, k, v = packed.split(8, dim=-1)
    do = case.do.transpose(1, 2).contiguous().transpose(1, 2)
    strided = replace(case, q=q, k=k, v=v, do=do)
    copy = packed.clone()
    assert_close(run(strided), expected, 1e-14)
    head_major = {n: getattr(case, n).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for n in ("q", "k", "v")}
    assert_close(run(replace(case, **head_major)), expected, 1e-14)
    assert torch.equal(packed, copy) and torch.equal(do, case.do)


def test_step_by_step_equals_recurrence() -> None:
    case = make_case(2, 70, (8, 12), decays=DECAYS)
    expected = run(case, "oracle")
    state, outputs = case.initial_state, []
    for t in range(70):
        assert state is not None
        o_t, state = recurrent_step(case.q[:, t], case.k[:, t], case.v[:, t], case.log_decay, state)
        outputs.append(o_t)
    assert state is not None
    assert error(torch.stack(outputs, 1), expected["o"]) < 1e-10 and error(state, expected["state"]) < 1e-10

    half = case.to(torch.bfloat16, torch.float32)
    assert half.initial_state is not None
    o, state = recurrent_step(half.q[:, 0], half.k[:, 0], half.v[:, 0], None, half.initial_state)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)


def test_autocast_does_not_touch_the_states() -> None:
    case = make_case(1, 100, (16, 16)).to(torch.float32, torch.float32)
    expected = run(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(case)
        state, _ = state_fwd(case.k, case.v, case.log_decay)
    assert all(torch.equal(actual[n], expected[n]) for n in expected)
    assert torch.equal(state, state_fwd(case.k, case.v, case.log_decay)[0])


@pytest.mark.parametrize(("num_tokens", "num_states"), [(320, 0), (300, 1)], ids=["one batch", "two"])
def test_inputs_and_few_states_are_saved_for_backward(num_tokens: int, num_states: int) -> None:
    case = make_case(1, num_tokens, (8, 8))
    q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        _, state = lightning_attention(q, k, v, case.log_decay)
    assert state is None  # nobody asked for it
    # Also the decays of two heads.
    assert sum(saved) == q.numel() + k.numel() + v.numel() + 2 + num_states * 2 * 8 * 8

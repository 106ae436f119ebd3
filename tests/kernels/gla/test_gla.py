"""Gated linear attention: the chunked form and its passes against the fp64 recurrence, with every gradient."""

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
from torch.nn.functional import logsigmoid

from lightscale.kernels.gla import (
    decays,
    gla,
    gla_reference,
    grad_bwd,
    out_fwd,
    state_bwd,
    state_fwd,
)
from lightscale.kernels.lightning import lightning_attention_reference

comparing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "comparing.py")))
boundaries, error, assert_close = comparing.boundaries, comparing.error, comparing.assert_close

Results = dict[str, Tensor]

INPUTS = ("q", "k", "v", "log_decay", "initial_state")


@pytest.fixture
def every_chunk_is_steep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decays between tokens come from halves of chunks, whatever the data."""
    monkeypatch.setattr(decays, "STEEP_LOG_DECAY", float("inf"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs of one call and the cotangents of its two results."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    initial_state: Tensor | None
    do: Tensor
    dstate: Tensor
    cu_seqlens: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Case":
        """The same case in ``dtype``."""
        tensors = {n: getattr(self, n) for n in (*INPUTS, "do", "dstate")}
        changed: dict[str, Any] = {n: x if x is None else x.to(dtype) for n, x in tensors.items()}
        return replace(self, **changed)

    def tokens(self, begin: int, end: int) -> dict[str, Tensor]:
        """What has a value per token, of the tokens [begin, end) of every row."""
        return {n: getattr(self, n)[:, begin:end] for n in ("q", "k", "v", "log_decay", "do")}


def draw_log_decay(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Log decays of one kind: of every strength, and at, below and far below where a chunk is steep."""
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    usual, a_tenth = logsigmoid(noise + 1), torch.rand(shape, generator=generator) < 0.1
    known = {
        "usual": usual,
        "f = 1": torch.zeros_like(noise),
        "f near 1": -1e-7 * noise.square(),
        "almost steep": torch.full_like(noise, -3.74),
        "just steep": torch.full_like(noise, -3.76),
        "steep or not": -1.5 * noise.square(),
        "strong": torch.full_like(noise, -20.0),
        "very strong": -80.0 + noise.clamp(-3, 3),
        "strong and weak": logsigmoid(100 * noise),
        "forgets": usual.masked_fill(a_tenth, -1e4),
        "forgets all": usual.masked_fill(a_tenth, -float("inf")),
    }
    return known[kind]


KINDS: tuple[str, ...] = (
    "usual",
    "f = 1",
    "f near 1",
    "almost steep",
    "just steep",
    "steep or not",
    "strong",
    "very strong",
)
KINDS += ("strong and weak", "forgets", "forgets all")


def make_case(
    rows: int,
    tokens: int,
    widths: tuple[int, int],
    *,
    kinds: tuple[str, ...] = ("usual", "steep or not"),
    with_state: bool = True,
    starts: list[list[int]] | None = None,
    seed: int = 0,
) -> Case:
    """Random fp64 inputs, a head for each kind of decay; ``starts`` are the document starts inside each row."""
    generator = torch.Generator().manual_seed(seed)
    heads, (key_width, value_width) = len(kinds), widths

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    state_shape = (rows, heads, key_width, value_width)
    return Case(
        q=draw(rows, tokens, heads, key_width),
        k=draw(rows, tokens, heads, key_width),
        v=draw(rows, tokens, heads, value_width),
        log_decay=torch.stack([draw_log_decay(kind, (rows, tokens, key_width), generator) for kind in kinds], 2),
        initial_state=draw(*state_shape) if with_state else None,
        do=draw(rows, tokens, heads, value_width),
        dstate=draw(*state_shape),
        cu_seqlens=None if starts is None else boundaries(starts, tokens),
    )


def run(case: Case, backend: str = "chunked", **options: Any) -> Results:
    """Outputs, final state and all gradients of one call of the operator, or of the oracle itself."""
    names = [n for n in INPUTS if getattr(case, n) is not None]
    leaves = {name: getattr(case, name).detach().requires_grad_() for name in names}
    if backend == "oracle":
        o, state = gla_reference(**leaves, cu_seqlens=case.cu_seqlens)
    else:
        o, final = gla(**leaves, cu_seqlens=case.cu_seqlens, output_final_state=True, backend=backend, **options)
        assert final is not None
        state = final
    gradients = torch.autograd.grad([o, state], list(leaves.values()), [case.do, case.dstate])
    results = {"o": o.detach(), "state": state.detach()}
    return results | {f"d{name}": g for name, g in zip(names, gradients, strict=True)}


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


@pytest.mark.parametrize("keys", ["free", "1 - f"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_decay_alone(kind: str, keys: str) -> None:
    """In fp64 and fp32; one head at a time, so that no head's error hides behind another's magnitude."""
    case = make_case(2, 200, (16, 24), kinds=(kind,))
    if keys == "1 - f" and kind != "f = 1":
        case = replace(case, k=-torch.expm1(case.log_decay))
    assert_close(run(case), run(case, "oracle"), 1e-10)
    rounded = case.to(torch.float32)
    results = run(rounded)
    assert_close(results, run(rounded.to(torch.float64), "oracle"), 1e-5)
    assert not results["dlog_decay"][case.log_decay < -1000].any()


def test_long_rows_in_fp32() -> None:
    """Errors must not grow along the row; each head's are looked at alone."""
    kinds = ("usual", "f = 1", "f near 1", "steep or not")
    case = make_case(1, 5000, (4, 4), kinds=kinds).to(torch.float32)
    actual, expected = run(case), run(case.to(torch.float64), "oracle")
    for head in range(len(kinds)):
        of_head = [
            {n: x.select(1 if n.endswith("state") else 2, head) for n, x in results.items()}
            for results in (actual, expected)
        ]
        assert_close(of_head[0], of_head[1], 1e-5)


@pytest.mark.parametrize("steep", [False, True], ids=["as data decides", "every chunk steep"])
def test_any_chunk_size(steep: bool, request: pytest.FixtureRequest) -> None:
    if steep:
        request.getfixturevalue("every_chunk_is_steep")
    case = make_case(2, 200, (12, 8), kinds=KINDS, starts=[[70], [64, 199]])
    expected = run(case, "oracle")
    for chunk_size in (1, 2, 7, 16, 64, 100, 256):
        assert_close(run(case, chunk_size=chunk_size), expected, 1e-10, f"chunks of {chunk_size}")


def test_only_steep_chunks_are_computed_by_halves() -> None:
    logs = torch.zeros(3, 2, 2, 16, 4)
    logs[1, 0, 1, 5, 2] = -61.0
    logs[2, 1, 0, :, 3] = -59.0 / 16
    logs[2, 1, 1, :, 0] = -61.0 / 16
    found = decays.GLADecays.of(logs, decays.chunk_sums(16, logs)).steep
    assert found is not None
    assert found.chunks.tolist() == [1 * 4 + 1, 2 * 4 + 3]
    assert decays.GLADecays.of(logs[:1], decays.chunk_sums(16, logs)).steep is None


def test_equals_the_full_matrix() -> None:
    """o = (Q ⊙ decays) Kᵀ masked, then V: no state anywhere, so no code or idea in common with the recurrence."""
    case = make_case(2, 40, (6, 5), kinds=("usual", "strong"), with_state=False)
    total = case.log_decay.cumsum(1)
    exponents = total[:, :, None] - total[:, None]
    causal = torch.ones(40, 40, dtype=torch.bool).tril()[None, :, :, None, None]
    scores = torch.einsum("bihk,bjhk,bijhk->bhij", case.q, case.k, exponents.exp().where(causal, 0.0))
    assert error(run(case)["o"], torch.einsum("bhij,bjhv->bihv", scores, case.v)) < 1e-10


def test_one_fixed_decay_equals_lightning_attention() -> None:
    case = make_case(2, 100, (8, 12))
    fixed = torch.tensor([-0.02, -0.7], dtype=torch.float64)
    case = replace(case, log_decay=fixed[None, None, :, None].expand(2, 100, 2, 8))
    o, state = lightning_attention_reference(case.q, case.k, case.v, fixed, initial_state=case.initial_state)
    results = run(case)
    assert error(results["o"], o) < 1e-10 and error(results["state"], state) < 1e-10


def test_zero_decay_factor_forgets_everything() -> None:
    """f = 0: each output sees its own token only, and no decay has a gradient."""
    case = make_case(1, 70, (8, 8), kinds=("usual",))
    case = replace(case, log_decay=torch.full_like(case.log_decay, -float("inf")))
    results = run(case)
    assert error(results["o"], (case.q * case.k).sum(-1, keepdim=True) * case.v) < 1e-10
    assert all(x.isfinite().all() for x in results.values())
    assert not results["dlog_decay"].any() and not results["dinitial_state"].any()


DOCUMENTS = {
    "chunk edge": [[64], []],
    "one before": [[63], [127]],
    "one after": [[65], [129]],
    "batch edge": [[96, 192], [95, 193]],
    "one-token documents": [[63, 64, 65, 66], [1, 2, 3, 199]],
    "many in a chunk": [[3, 5, 6, 20, 21, 40, 130], [70, 75, 80, 127, 128, 150]],
    "every chunk edge": [[*range(16, 200, 16)], [*range(16, 200, 16)]],
    "row starts only": [[], []],
    "every token": [list(range(200)), [100]],
}


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of six chunks, so that rows of 200 tokens have several."""
    monkeypatch.setattr("lightscale.kernels.gla.chunk_batches._BATCH_ELEMENTS", 1)
    monkeypatch.setattr("lightscale.kernels.gla.chunk_batches._BATCH_TOKENS", 96)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("starts", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_documents_without_a_state_equal_recurrence(starts: list[list[int]]) -> None:
    """With a state that enters: the next test, in which the recurrence is held to separate runs too."""
    kinds = ("usual", "f = 1", "steep or not", "forgets")
    case = make_case(2, 200, (12, 20), kinds=kinds, starts=starts, with_state=False)
    results = run(case)
    assert_close(results, run(case, "oracle"), 1e-10)
    unused = [(row, start) for row, of_row in enumerate(starts) for start in of_row if start]
    assert all(not results["dlog_decay"][index].any() for index in unused)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("starts", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_documents_equal_separate_runs(starts: list[list[int]]) -> None:
    """Every document by itself: also a check of how the reference treats boundaries."""
    kinds = ("usual", "f = 1", "steep or not", "strong", "forgets", "forgets all")
    case = make_case(2, 200, (12, 20), kinds=kinds, starts=starts)
    assert case.initial_state is not None and case.cu_seqlens is not None
    expected = {f"d{n}": torch.zeros_like(getattr(case, n)) for n in INPUTS}
    expected |= {"o": torch.zeros_like(case.do), "state": torch.zeros_like(case.dstate)}
    for begin, end in pairwise(case.cu_seqlens.tolist()):
        row, part = begin // 200, slice(begin % 200, begin % 200 + end - begin)
        first, last = part.start == 0, part.stop == 200
        document = Case(
            **{n: x[row : row + 1] for n, x in case.tokens(part.start, part.stop).items()},
            initial_state=case.initial_state[row : row + 1] if first else None,
            dstate=case.dstate[row : row + 1] * last,
        )
        results = run(document, "oracle")
        for name in ("o", "dq", "dk", "dv", "dlog_decay"):
            expected[name][row, part] = results[name][0]
        if first:
            expected["dinitial_state"][row] = results["dinitial_state"][0]
        if last:
            expected["state"][row] = results["state"][0]
    assert_close(run(case), expected, 1e-10)
    assert_close(run(case, "oracle"), expected, 1e-10)


@pytest.mark.parametrize("first", [True, False], ids=["first document", "second document"])
@pytest.mark.parametrize("start", [90, 96, 128])
def test_overflow_stays_in_its_document(start: int, first: bool) -> None:
    """One document's state is infinite in fp32; the other's results equal a run of its own."""
    case = make_case(1, 200, (8, 8), with_state=False, starts=[[start]]).to(torch.float32)
    begin, end = (start, 200) if first else (0, start)
    bad = slice(10, 80) if first else slice(start, 200)
    case.k[:, bad], case.v[:, bad] = 1e10, 1e30
    results = run(case)
    assert not results["o"][:, bad].isfinite().all()
    alone = replace(case, cu_seqlens=None, dstate=case.dstate * first, **case.tokens(begin, end))
    expected = run(alone)
    if first:
        assert error(results["state"], expected["state"]) < 1e-5
    for name in ("o", "dq", "dk", "dv", "dlog_decay"):
        assert error(results[name][:, begin:end], expected[name]) < 1e-5


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
    return replace(case, **case.tokens(begin, end), cu_seqlens=cu_seqlens), fresh[:, None, None, None]


def run_over_ranks(case: Case, cuts: list[int]) -> Results:
    """The passes as sequence parallelism composes them, with a rank for each part between two cuts."""
    zero = torch.zeros_like(case.dstate)
    state = zero if case.initial_state is None else case.initial_state
    ranks = []
    for begin, end in pairwise([0, *cuts, case.q.shape[1]]):
        shard, fresh = restrict(case, begin, end)
        local, through = state_fwd(shard.k, shard.v, shard.log_decay, shard.cu_seqlens)
        assert through.shape == zero.shape[:3]
        decay = torch.where(fresh, zero, through[..., None])
        entering = torch.where(fresh, zero, state)
        o, leaving = out_fwd(shard.q, shard.k, shard.v, shard.log_decay, entering, shard.cu_seqlens)
        state = decay * state + local
        assert error(leaving, state) < 1e-10
        ranks.append((shard, fresh, decay, entering, o))

    dstate = case.dstate
    gradients: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for s, fresh, decay, entering, _ in reversed(ranks):
        gradients.insert(0, grad_bwd(s.q, s.k, s.v, s.log_decay, s.do, entering, dstate, s.cu_seqlens))
        dstate = torch.where(fresh, zero, state_bwd(s.q, s.do, s.log_decay, s.cu_seqlens)) + decay * dstate

    results = {"o": torch.cat([o for *_, o in ranks], 1), "state": state}
    names = ("dq", "dk", "dv", "dlog_decay")
    results |= {n: torch.cat(parts, 1) for n, parts in zip(names, zip(*gradients, strict=True), strict=True)}
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
    case = make_case(
        2, 200, (12, 8), kinds=("usual", "f = 1", "steep or not", "strong", "forgets"), starts=request.param
    )
    return case, run(case, "oracle")


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_passes_compose_over_ranks(cuts: list[int], over_ranks: tuple[Case, Results]) -> None:
    case, expected = over_ranks
    assert_close(run_over_ranks(case, cuts), expected, 1e-10)


def test_no_tokens() -> None:
    """An empty row hands its state on, forward and backward."""
    case = make_case(2, 0, (4, 6))
    assert case.initial_state is not None
    results = run(case)
    assert results["o"].shape == (2, 0, 2, 6)
    assert results["dlog_decay"].shape == (2, 0, 2, 4)
    assert torch.equal(results["state"], case.initial_state)
    assert torch.equal(results["dinitial_state"], case.dstate)
    state, decay = state_fwd(case.k, case.v, case.log_decay, torch.tensor([0]))
    assert not state.any() and torch.equal(decay, torch.ones(2, 2, 4, dtype=torch.float64))
    assert state_bwd(case.q, case.do, case.log_decay).shape == state.shape


def test_passes_over_many_batches_in_fp32() -> None:
    """D is a sum over the row: in fp32 it must not drift where every decay is almost 1."""
    case = make_case(1, 50_000, (2, 2), kinds=("f near 1", "usual"), with_state=False)
    log_decay = case.log_decay.float()
    _, through = state_fwd(case.k.float(), case.v.float(), log_decay)
    assert error(through, log_decay.double().sum(1).exp()) < 1e-6
    cotangent = state_bwd(case.q.float(), case.do.float(), log_decay)
    weights = log_decay.double().cumsum(1).exp()
    assert error(cotangent, torch.einsum("bthk,bthv->bhkv", case.q.float() * weights, case.do)) < 1e-5


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_random_shapes_documents_and_splits(data: st.DataObject) -> None:
    """One call, a chain of calls that pass the state, and ranks: all equal the recurrence."""
    rows, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 150))
    widths = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    inner = st.lists(st.integers(1, tokens), max_size=6).map(lambda xs: sorted({x for x in xs if x < tokens}))
    starts = data.draw(st.none() | st.lists(inner, min_size=rows, max_size=rows))
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=5)))
    kinds = tuple(data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)))
    chunk_size = data.draw(st.sampled_from([1, 5, 16, 64]))
    case = make_case(rows, tokens, widths, kinds=kinds, starts=starts, seed=tokens)

    expected = run(case, "oracle")
    for actual in (run(case, chunk_size=chunk_size), run_over_ranks(case, cuts)):
        assert_close(actual, expected, 1e-10)

    state, outputs = case.initial_state, []
    for begin, end in pairwise([0, *cuts, tokens]):
        shard, fresh = restrict(case, begin, end)
        entering = None if state is None else torch.where(fresh, torch.zeros_like(state), state)
        o, state = gla(
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


@pytest.mark.parametrize("token", [0, 15, 64, 100, 149])
def test_a_token_changes_nothing_before_it_or_in_other_documents(token: int) -> None:
    case = make_case(2, 150, (8, 8), kinds=("usual", "usual"), starts=[[64, 110], [120]])
    before = run(case)["o"]
    changed = replace(case, **{n: getattr(case, n).clone() for n in ("q", "k", "v", "log_decay")})
    for x in (changed.q, changed.k, changed.v):
        x[0, token] += 10.0
    end = next(e for e in (64, 110, 150) if e > token)
    untouched = torch.ones(2, 150, dtype=torch.bool)
    untouched[0, token:end] = False
    after = run(changed)["o"]
    assert torch.equal(after[untouched], before[untouched])
    assert (after[0, token:end] != before[0, token:end]).any(-1).all()

    changed.log_decay[0, token] -= 1.0
    assert torch.equal(run(changed)["o"][0, :token], before[0, :token])
    # The chunk becomes steep and is computed in another way, also for the tokens around the changed one.
    changed.log_decay[0, token] -= 100.0
    assert error(run(changed)["o"][untouched], before[untouched]) < 1e-13

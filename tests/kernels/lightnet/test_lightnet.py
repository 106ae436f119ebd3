"""LightNet's operator: the chunked form and its passes against the fp64 recurrence, with every gradient."""

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

from lightscale.kernels.lightnet import (
    Angles,
    LightNetState,
    StateCotangent,
    exchanged_cotangent,
    factors,
    grad_bwd,
    lightnet_attention,
    lightnet_attention_reference,
    merge,
    out_fwd,
    passed_share,
    plain_cotangent,
    state_bwd,
    state_fwd,
)
from lightscale.kernels.lightnet.chunked import LightNetGradients
from lightscale.kernels.lightnet.state import by_row

drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "drawing.py")))
comparing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "comparing.py")))
boundaries, error, assert_close = comparing.boundaries, comparing.error, comparing.assert_close

Results = dict[str, Tensor]
INPUTS = ("q", "k", "v", "z", "S")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs of one call and the cotangents of its three results."""

    q: Tensor
    k: Tensor
    v: Tensor
    angles: Angles | None
    z: Tensor | None
    S: Tensor | None
    do: Tensor
    dz: Tensor
    dS: Tensor
    cu_seqlens: Tensor | None = None

    @property
    def state(self) -> LightNetState | None:
        return None if self.z is None or self.S is None else LightNetState(self.z, self.S)

    @property
    def empty(self) -> LightNetState:
        return LightNetState(torch.full_like(self.dz, -torch.inf), torch.zeros_like(self.dS))

    def to(self, dtype: torch.dtype, state_dtype: torch.dtype) -> "Case":
        """The same case with q, k, v, do in ``dtype`` and angles and states in ``state_dtype``."""
        changed: dict[str, Any] = {name: getattr(self, name).to(dtype) for name in ("q", "k", "v", "do")}
        for name in ("z", "S", "dz", "dS"):
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
    heads: int = 2,
    scale: float = 1.0,
    with_angles: bool = True,
    with_state: bool = True,
    starts: list[list[int]] | None = None,
    seed: int = 0,
) -> Case:
    """Random fp64 inputs, keys ~ N(0, scale²); ``starts`` are the document starts inside each row."""
    generator = torch.Generator().manual_seed(seed)
    key_width, value_width = widths

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    # In a document's middle, as rows are.
    angles = Angles(2 * draw(heads, key_width), (torch.arange(tokens) + 10).repeat(rows, 1))
    state_shape = (rows, heads, key_width * (1 + with_angles), value_width)
    return Case(
        q=draw(rows, tokens, heads, key_width),
        k=scale * draw(rows, tokens, heads, key_width),
        v=draw(rows, tokens, heads, value_width),
        angles=angles if with_angles else None,
        z=2 * draw(rows, heads, key_width) if with_state else None,
        S=draw(*state_shape) if with_state else None,
        do=draw(rows, tokens, heads, value_width),
        dz=draw(rows, heads, key_width),
        dS=draw(*state_shape),
        cu_seqlens=None if starts is None else boundaries(starts, tokens),
    )


def run(case: Case, backend: str = "chunked", **options: Any) -> Results:
    """Outputs, final state and all gradients of one call of the operator, or of the oracle itself."""
    names = [n for n in INPUTS if getattr(case, n) is not None]
    leaves = {name: getattr(case, name).detach().requires_grad_() for name in names}
    state = LightNetState(leaves["z"], leaves["S"]) if "z" in leaves else None
    qkv = (leaves["q"], leaves["k"], leaves["v"])
    angles = case.angles
    if angles is not None:
        leaves["theta"] = angles.theta.detach().requires_grad_()
        angles = Angles(leaves["theta"], angles.positions)
    options |= {"angles": angles, "initial_state": state, "cu_seqlens": case.cu_seqlens}
    if backend == "oracle":
        o, final = lightnet_attention_reference(*qkv, **options)
    else:
        o, out = lightnet_attention(*qkv, **options, output_final_state=True, backend=backend)
        assert out is not None
        final = out
    cotangents = [case.do, case.dz, case.dS]
    gradients = torch.autograd.grad([o, *final], list(leaves.values()), cotangents)
    results = {"o": o.detach(), "z": final.z.detach(), "S": final.S.detach()}
    return results | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}


SHAPES = [(1, (8, 8)), (15, (60, 60)), (63, (32, 32)), (130, (64, 32)), (300, (20, 28))]


@pytest.mark.parametrize(
    ("shape", "with_state", "with_angles"),
    drawing.covering("lightnet's shapes", SHAPES, (True, False), (True, False)),
    ids=str,
)
def test_equals_recurrence(shape: tuple[int, tuple[int, int]], with_state: bool, with_angles: bool) -> None:
    tokens, widths = shape
    case = make_case(1, tokens, widths, with_state=with_state, with_angles=with_angles, seed=tokens)
    assert_close(run(case), run(case, "oracle"), 1e-10)


@pytest.mark.parametrize("with_angles", [True, False], ids=["lrpe", "plain"])
def test_equals_full_matrix(with_angles: bool) -> None:
    """o_t = Σ_s≤t (Σ_c q_tc e^{k_sc - z_tc} φ_t·φ_s) v_s, all pairs at once: an oracle without a recurrence."""
    case = make_case(2, 40, (8, 6), with_state=False, with_angles=with_angles, scale=3.0)
    q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))
    leaves = {"q": q, "k": k, "v": v}
    z = k.logcumsumexp(1)
    weights = (k[:, None] - z[:, :, None]).exp()  # (B, T, S, H, K)
    if case.angles is not None:
        leaves["theta"] = case.angles.theta.clone().requires_grad_()
        distances = case.angles.positions[:, :, None] - case.angles.positions[:, None]
        weights = weights * torch.cos(distances[..., None, None] * leaves["theta"])
    scores = torch.einsum("bthk,btshk->bhts", q, weights).tril()
    o = torch.einsum("bhts,bshv->bthv", scores, v)
    gradients = torch.autograd.grad(o, list(leaves.values()), case.do)
    none = replace(case, dz=torch.zeros_like(case.dz), dS=torch.zeros_like(case.dS))
    expected = {"o": o.detach()} | {f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}
    for backend in ("chunked", "oracle"):
        actual = run(none, backend)
        assert_close({n: actual[n] for n in expected}, expected, 1e-10)


@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_any_chunk_size(scale: float) -> None:
    case = make_case(2, 200, (12, 8), starts=[[70], [64, 199]], scale=scale)
    expected = run(case, "oracle")
    for chunk_size in (1, 7, 64, 100, 256):
        assert_close(run(case, chunk_size=chunk_size), expected, 1e-10, f"chunks of {chunk_size}")


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


@pytest.mark.parametrize(
    ("name", "scale"), drawing.covering("lightnet's documents", list(DOCUMENTS), (1.0, 40.0), strength=1)
)
def test_documents_equal_separate_runs(name: str, scale: float) -> None:
    """Every document by itself, which also checks how the reference treats boundaries."""
    case = make_case(2, 200, (8, 12), starts=DOCUMENTS[name], scale=scale)
    assert case.angles is not None and case.cu_seqlens is not None
    assert case.z is not None and case.S is not None
    expected = {f"d{n}": torch.zeros_like(getattr(case, n)) for n in INPUTS}
    expected |= {n: torch.zeros_like(getattr(case, f"d{n}")) for n in ("o", "z", "S")}
    expected["dtheta"] = torch.zeros_like(case.angles.theta)
    for begin, end in pairwise(case.cu_seqlens.tolist()):
        row, part = begin // 200, slice(begin % 200, begin % 200 + end - begin)
        one, first, last = slice(row, row + 1), part.start == 0, part.stop == 200
        document = Case(
            **{n: getattr(case, n)[one, part] for n in ("q", "k", "v", "do")},
            angles=Angles(case.angles.theta, case.angles.positions[one, part]),
            z=case.z[one] if first else None,
            S=case.S[one] if first else None,
            dz=case.dz[one] * last,
            dS=case.dS[one] * last,
        )
        results = run(document, "oracle")
        for name in ("o", "dq", "dk", "dv"):
            expected[name][row, part] = results[name][0]
        expected["dtheta"] += results["dtheta"]
        for name in ("dz", "dS") if first else ():
            expected[name][row] = results[name][0]
        for name in ("z", "S") if last else ():
            expected[name][row] = results[name][0]
    assert_close(run(case), expected, 1e-10)
    assert_close(run(case, "oracle"), expected, 1e-10)


@pytest.mark.parametrize("starts", [None, [[1], [3, 7]], [[40], [199]]], ids=["whole", "short", "longer"])
def test_the_gradient_of_a_heavy_state_keeps_its_digits(starts: list[list[int]] | None) -> None:
    """A state of e^12 tokens hardly changes: its outputs gain of z what they lose of it, but for a share of e^-12."""
    case = make_case(2, 200, (8, 12), starts=starts).to(torch.float32, torch.float32)
    assert case.z is not None
    case = replace(case, z=case.z + 12)
    for of_end in (1, 0):  # with what the state that leaves passes back, and without
        same = replace(case, dz=of_end * case.dz, dS=of_end * case.dS)
        expected = run(same.to(torch.float64, torch.float64), "oracle")["dz"]
        # The cotangents of z at the row's end have the name of those at its start.
        assert error(run(same)["dz"], expected) < 2e-6


def test_overflow_stays_in_its_document() -> None:
    """The first document's outputs and gradients are infinite; the second one's equal a run of its own."""
    case = make_case(1, 200, (8, 8), with_state=False, starts=[[90]]).to(torch.float32, torch.float32)
    case.v[:, 10:80] = 3e38
    results = run(case)
    assert not results["o"][:, :90].isfinite().all() and not results["dk"][:, :90].isfinite().all()
    part = {n: getattr(case, n)[:, 90:] for n in ("q", "k", "v", "do")}
    assert case.angles is not None
    alone = run(replace(case, cu_seqlens=None, angles=case.angles.of(slice(90, 200)), **part))
    assert error(results["S"], alone["S"]) < 1e-5 and error(results["z"], alone["z"]) < 1e-5
    for name in ("o", "dq", "dk", "dv"):
        assert error(results[name][:, 90:], alone[name]) < 1e-5


def test_nan_in_one_document_leaves_steep_chunks_of_another_in_halves() -> None:
    """The rise of z in the second document asks for halves, whatever the sums of the first are."""
    case = make_case(1, 256, (8, 8), with_state=False, starts=[[128]]).to(torch.float32, torch.float32)
    case.k[:, 140:200] += torch.linspace(0, 300, 60)[:, None, None]
    expected = run(case)
    case.k[:, 5] = torch.inf
    results = run(case)
    assert not results["o"][:, 5:128].isfinite().any()
    for name in ("o", "dq", "dk", "dv"):
        assert torch.equal(results[name][:, 128:], expected[name][:, 128:])


def restrict(case: Case, begin: int, end: int) -> tuple[Case, Tensor]:
    """A rank's tokens [begin, end) of every row, and which rows (B,) begin with a new document."""
    rows, tokens = case.q.shape[:2]
    fresh = torch.zeros(rows, dtype=torch.bool)
    cu_seqlens = None
    if case.cu_seqlens is not None:
        known = set(case.cu_seqlens.tolist())
        inside = [[t - begin for t in range(begin + 1, end) if r * tokens + t in known] for r in range(rows)]
        cu_seqlens = boundaries(inside, end - begin)
        fresh = torch.tensor([0 < begin < end and r * tokens + begin in known for r in range(rows)])
    part: dict[str, Any] = {n: getattr(case, n)[:, begin:end] for n in ("q", "k", "v", "do")}
    if case.angles is not None:
        part["angles"] = case.angles.of(slice(begin, end))
    return replace(case, **part, cu_seqlens=cu_seqlens), fresh


def where_fresh(fresh: Tensor, state: LightNetState) -> LightNetState:
    z = state.z.masked_fill(fresh[:, None, None], -torch.inf)
    return LightNetState(z, state.S.masked_fill(fresh[:, None, None, None], 0.0))


def run_over_ranks(case: Case, cuts: list[int]) -> Results:
    """The passes as sequence parallelism composes them, with a rank for each part between two cuts."""
    state = case.state or case.empty
    ranks = []
    for begin, end in pairwise([0, *cuts, case.q.shape[1]]):
        s, fresh = restrict(case, begin, end)
        local, through = state_fwd(s.k, s.v, s.angles, s.cu_seqlens)
        through = through.masked_fill(fresh, 0.0)
        entering = where_fresh(fresh, state)
        o, leaving = out_fwd(s.q, s.k, s.v, s.angles, entering, s.cu_seqlens)
        before, state = state, merge(state, local, through)
        assert error(leaving.z, state.z) < 1e-10 and error(leaving.S, state.S) < 1e-10
        ranks.append((s, fresh, before, local, through, entering, o))

    cotangent = exchanged_cotangent(state, case.dz, case.dS)
    gradients: list[LightNetGradients] = []
    for s, fresh, before, local, through, entering, _ in reversed(ranks):
        inputs = (s.q, s.k, s.v, s.angles, s.do, entering)
        gradients.insert(0, grad_bwd(*inputs, cotangent, s.cu_seqlens, with_theta=s.angles is not None))
        own = state_bwd(*inputs, s.cu_seqlens)
        share = passed_share(before.z, local.z, through)
        passed = StateCotangent(U=by_row(share, cotangent.U.shape[2]) * cotangent.U, R=share * cotangent.R)
        cotangent = StateCotangent(
            U=passed.U + own.U.masked_fill(fresh[:, None, None, None], 0.0),
            R=passed.R + own.R.masked_fill(fresh[:, None, None], 0.0),
        )

    results = {"o": torch.cat([o for *_, o in ranks], 1), "z": state.z, "S": state.S}
    for name in ("q", "k", "v"):
        results[f"d{name}"] = torch.cat([getattr(g, name) for g in gradients], 1)
    if case.angles is not None:
        results["dtheta"] = torch.stack([g.theta for g in gradients if g.theta is not None]).sum(0)
    if case.state is not None:
        results["dz"], results["dS"] = plain_cotangent(case.state, cotangent)
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
    params=[
        (None, True, 1.0),
        (None, False, 30.0),
        ([[64], [63, 130]], True, 30.0),
        ([[65, 66, 67, 199], []], False, 1.0),
    ],
    ids=["whole", "whole, empty, wild", "documents, wild", "short documents, empty"],
)
def over_ranks(request: pytest.FixtureRequest) -> tuple[Case, Results]:
    """A case, and what the oracle makes of it: once for all cuts."""
    starts, with_state, scale = request.param
    case = make_case(2, 200, (12, 8), starts=starts, with_state=with_state, scale=scale)
    return case, run(case, "oracle")


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_passes_compose_over_ranks(cuts: list[int], over_ranks: tuple[Case, Results]) -> None:
    case, expected = over_ranks
    assert_close(run_over_ranks(case, cuts), expected, 1e-10)


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_random_shapes_documents_and_splits(data: st.DataObject) -> None:
    """One call, ranks, and a chain of calls that pass the state: all equal the recurrence."""
    rows, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 120))
    widths = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    inner = st.lists(st.integers(1, tokens), max_size=6).map(lambda xs: sorted({x for x in xs if x < tokens}))
    starts = data.draw(st.none() | st.lists(inner, min_size=rows, max_size=rows))
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=5)))
    case = make_case(
        rows,
        tokens,
        widths,
        scale=data.draw(st.sampled_from([0.1, 1.0, 10.0, 60.0])),
        with_angles=data.draw(st.booleans()),
        with_state=data.draw(st.booleans()),
        starts=starts,
        seed=tokens,
    )
    expected = run(case, "oracle")
    assert_close(run(case, chunk_size=data.draw(st.sampled_from([1, 5, 16, 64]))), expected, 1e-10)
    assert_close(run_over_ranks(case, cuts), expected, 1e-10)

    state, outputs = case.state or case.empty, []
    for begin, end in pairwise([0, *cuts, tokens]):
        s, fresh = restrict(case, begin, end)
        o, after = lightnet_attention(
            s.q,
            s.k,
            s.v,
            angles=s.angles,
            initial_state=where_fresh(fresh, state),
            output_final_state=True,
            cu_seqlens=s.cu_seqlens,
        )
        assert after is not None
        state = after
        outputs.append(o)
    assert error(torch.cat(outputs, 1), expected["o"]) < 1e-10
    assert error(state.z, expected["z"]) < 1e-10 and error(state.S, expected["S"]) < 1e-10


def test_no_tokens() -> None:
    """An empty row hands its state on, forward and backward."""
    case = make_case(2, 0, (4, 6))
    assert case.z is not None and case.S is not None
    results = run(case)
    assert results["o"].shape == (2, 0, 2, 6)
    assert torch.equal(results["z"], case.z) and torch.equal(results["S"], case.S)
    assert error(results["dz"], case.dz) < 1e-12 and torch.equal(results["dS"], case.dS)
    local, through = state_fwd(case.k, case.v, case.angles, torch.tensor([0]))
    assert torch.equal(local.z, case.empty.z) and torch.equal(local.S, case.empty.S) and (through == 1).all()
    own = state_bwd(case.q, case.k, case.v, case.angles, case.do, case.state)
    assert not own.U.any() and not own.R.any() and own.U.shape == case.S.shape


@pytest.mark.parametrize("token", [0, 63, 64, 100, 149])
def test_a_token_changes_nothing_before_it_or_in_other_documents(token: int) -> None:
    """Up to rounding: the tokens of a chunk share a reference point."""
    case = make_case(2, 150, (8, 8), starts=[[64, 110], [120]])
    before = run(case)["o"]
    changed = replace(case, **{n: getattr(case, n).clone() for n in ("q", "k", "v")})
    for x in (changed.q, changed.k, changed.v):
        x[0, token] += 10.0
    difference = (run(changed)["o"] - before).abs().amax((2, 3))
    end = next(e for e in (64, 110, 150) if e > token)
    touched = torch.zeros(2, 150, dtype=torch.bool)
    touched[0, token:end] = True
    assert difference[~touched].max() < 1e-13
    assert difference[touched].min() > 1e-6


def jump(case: Case, low: float, high: float, token: int) -> Case:
    """Keys around ``low`` before ``token`` and around ``high`` from there on."""
    level = torch.where(torch.arange(case.k.shape[1]) < token, low, high)
    return replace(case, k=case.k + level[:, None, None].to(case.k.dtype))


def ramp(case: Case, low: float, high: float) -> Case:
    return replace(case, k=case.k + torch.linspace(low, high, case.k.shape[1])[:, None, None])


# How the keys are changed, and the level of the z that enters beside them.
EXTREMES = {
    "N(0, 10²)": (lambda case: replace(case, k=10 * case.k), 0.0),
    "N(0, 30²)": (lambda case: replace(case, k=30 * case.k), 0.0),
    "±80 at random": (lambda case: replace(case, k=80 * case.k.sign()), 80.0),
    "from -80 to 80 inside a chunk": (lambda case: jump(case, -80.0, 80.0, 30), -80.0),
    "from -80 to 80 at a chunk's last token": (lambda case: jump(case, -80.0, 80.0, 63), -80.0),
    "from -80 slowly": (lambda case: ramp(case, -80.0, 80.0), -80.0),
    "steep ramp": (lambda case: ramp(case, -80.0, 980.0), -80.0),
    "from 80 to -80": (lambda case: jump(case, 80.0, -80.0, 100), 80.0),
    "all 80": (lambda case: replace(case, k=0 * case.k + 80), 80.0),
    "all -80": (lambda case: replace(case, k=0 * case.k - 80), -80.0),
}


@pytest.mark.parametrize(
    ("name", "starts", "with_state"),
    drawing.covering("extreme keys", list(EXTREMES), (None, [[90], [64, 65, 150]]), (True, False)),
    ids=str,
)
def test_extreme_keys_in_fp32(name: str, starts: list[list[int]] | None, with_state: bool) -> None:
    change, level = EXTREMES[name]
    case = change(make_case(2, 200, (16, 12), starts=starts, with_state=with_state))
    if case.z is not None:
        case = replace(case, z=case.z + level)
    rounded = case.to(torch.float32, torch.float32)
    actual, expected = run(rounded), run(rounded.to(torch.float64, torch.float64), "oracle")
    assert all(x.isfinite().all() for x in actual.values())
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("level", [-80.0, 80.0])
def test_state_far_from_the_keys_in_fp32(level: float) -> None:
    """A state that outweighs every key, and one that is outweighed."""
    case = make_case(2, 200, (16, 12))
    assert case.z is not None
    rounded = replace(case, z=case.z + level).to(torch.float32, torch.float32)
    actual, expected = run(rounded), run(rounded.to(torch.float64, torch.float64), "oracle")
    assert_close(actual, expected, 1e-5)


def test_documents_of_other_levels_in_one_chunk() -> None:
    """A document of keys around -80 between two around 80: what it averages is not lost."""
    case = make_case(1, 100, (8, 8), starts=[[20, 40]], with_state=False)
    low = torch.where((torch.arange(100) >= 20) & (torch.arange(100) < 40), -80.0, 80.0)
    rounded = replace(case, k=case.k + low[:, None, None]).to(torch.float32, torch.float32)
    expected = run(rounded.to(torch.float64, torch.float64), "oracle")
    actual = run(rounded)
    for part in (slice(0, 20), slice(20, 40), slice(40, 100)):
        for name in ("o", "dq", "dk", "dv"):
            assert error(actual[name][:, part], expected[name][:, part]) < 1e-5


def chunk_lengths(k: Tensor) -> list[int]:
    z = torch.full((k.shape[0], *k.shape[2:]), -torch.inf)
    cut = factors.chunk_batches(k, z, None, width=8, chunk_size=64, dtype=torch.float32)
    return [batch.cut.chunk_tokens for batch in cut for _ in range(batch.cut.num_chunks)]


def test_chunks_are_halved_where_z_rises_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(1, 192, (8, 8), with_state=False).to(torch.float32, torch.float32)
    assert chunk_lengths(case.k) == [64, 64, 64]
    assert chunk_lengths(10 * case.k)[-1] == 64
    assert chunk_lengths(jump(case, -25.0, 25.0, 100).k) == [64, 64, 64]
    wild = jump(case, -80.0, 80.0, 100)
    assert chunk_lengths(wild.k) == [64, 32, 4, 4, 8, 16, 64]

    expected = run(wild.to(torch.float64, torch.float64), "oracle")
    monkeypatch.setattr(factors, "_LEAST_WEIGHT", 0.0)
    broken = run(wild)
    assert not error(broken["o"], expected["o"]) < 1e-3


@pytest.mark.parametrize("with_state", [True, False], ids=["state", "empty"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_keys_of_minus_infinity_write_nothing(with_state: bool, dtype: torch.dtype) -> None:
    """Padding, at a document's end, at its beginning, and for a whole document."""
    case = make_case(2, 200, (6, 4), starts=[[90, 150], []], with_state=with_state).to(dtype, dtype)
    case.k[0, :20] = -torch.inf
    case.k[0, 85:90] = -torch.inf
    case.k[0, 90:150] = -torch.inf
    case.k[1, 60:] = -torch.inf
    actual = run(case)
    assert not any(x.isnan().any() for x in actual.values())
    assert not actual["o"][0, 90:150].any() and not actual["dk"][case.k == -torch.inf].any()
    expected = run(case.to(torch.float64, torch.float64), "oracle")
    assert_close(actual, expected, 1e-5 if dtype == torch.float32 else 1e-10)

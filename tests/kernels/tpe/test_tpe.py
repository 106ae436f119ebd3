"""The scan of Toeplitz positional encoding: the chunked form and its passes against the fp64 recurrence."""

import math
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

from lightscale.kernels.tpe import (
    grad_bwd,
    out_fwd,
    recurrent_step,
    state_bwd,
    state_fwd,
    tpe_scan,
    tpe_scan_reference,
)

comparing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "comparing.py")))
boundaries, error, assert_close = comparing.boundaries, comparing.error, comparing.assert_close

Results = dict[str, Tensor]
INPUTS = ("x", "log_decay", "gamma", "initial_state")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs of one call and the cotangents of its two results."""

    x: Tensor
    log_decay: Tensor
    gamma: Tensor
    initial_state: Tensor | None
    dy: Tensor
    dstate: Tensor
    cu_seqlens: Tensor | None = None

    def to(self, dtype: torch.dtype, wide: torch.dtype) -> "Case":
        """The same case with x, gamma and dy in ``dtype`` and decays and states in ``wide``."""
        changed: dict[str, Any] = {name: getattr(self, name).to(dtype) for name in ("x", "gamma", "dy")}
        for name in ("log_decay", "initial_state", "dstate"):
            tensor = getattr(self, name)
            changed[name] = None if tensor is None else tensor.to(wide)
        return replace(self, **changed)


def decays(modes: int, longest: float = 4096.0) -> Tensor:
    """log λ with λ = 1 - 1/s for time scales s from 1.1 to ``longest`` tokens."""
    scales = torch.logspace(math.log10(1.1), math.log10(longest), modes, dtype=torch.float64)
    return torch.log1p(-1 / (scales if modes > 1 else torch.tensor([longest], dtype=torch.float64)))


def make_case(
    rows: int,
    tokens: int,
    width: int,
    modes: int,
    *,
    with_state: bool = True,
    starts: list[list[int]] | None = None,
    seed: int = 0,
) -> Case:
    """Random inputs; ``starts`` are the document starts inside each row."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Case(
        x=draw(rows, tokens, width),
        log_decay=decays(modes),
        gamma=draw(width, modes),
        initial_state=draw(rows, width, modes) if with_state else None,
        dy=draw(rows, tokens, width),
        dstate=draw(rows, width, modes),
        cu_seqlens=None if starts is None else boundaries(starts, tokens),
    )


def run(case: Case, backend: str = "chunked", **options: Any) -> Results:
    """Outputs, final state and all gradients of one call of the operator, or of the oracle itself."""
    leaves = {name: getattr(case, name).detach().requires_grad_() for name in INPUTS if getattr(case, name) is not None}
    options |= {"cu_seqlens": case.cu_seqlens}
    if backend == "oracle":
        y, state = tpe_scan_reference(**leaves, **options)
    else:
        y, final = tpe_scan(**leaves, **options, output_final_state=True, backend=backend)
        assert final is not None
        state = final
    gradients = torch.autograd.grad([y, state], list(leaves.values()), [case.dy, case.dstate])
    results = {"y": y.detach(), "state": state.detach()}
    return results | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}


@pytest.mark.parametrize("with_state", [True, False], ids=["state", "zero-state"])
@pytest.mark.parametrize(
    ("tokens", "width", "modes"),
    [(1, 8, 4), (15, 3, 128), (63, 130, 1), (64, 5, 7), (500, 70, 12), (1000, 4, 64)],
    ids=str,
)
def test_equals_recurrence(tokens: int, width: int, modes: int, with_state: bool) -> None:
    case = make_case(1, tokens, width, modes, with_state=with_state, seed=tokens)
    assert_close(run(case), run(case, "oracle"), 1e-10)


def test_equals_convolution() -> None:
    """y = x * kernel with kernel[τ] = Σ_r γ λ^τ, all pairs at once: an oracle without a recurrence."""
    case = make_case(2, 90, 5, 6, with_state=False)
    x, log_decay, gamma = (getattr(case, n).requires_grad_() for n in INPUTS[:3])
    distance = torch.arange(90.0, dtype=torch.float64)
    kernel = gamma @ (log_decay[:, None] * distance).exp()  # (D, T)
    index = (distance[:, None] - distance).long()
    y = torch.einsum("cts,bsc->btc", kernel[:, index.clamp(min=0)] * (index >= 0), x)
    gradients = torch.autograd.grad(y, (x, log_decay, gamma), case.dy)
    expected = dict(zip(("y", "dx", "dlog_decay", "dgamma"), (y.detach(), *gradients), strict=True))
    without_state = replace(case, dstate=torch.zeros_like(case.dstate))
    for backend in ("chunked", "oracle"):
        actual = run(without_state, backend)
        assert_close({n: actual[n] for n in expected}, expected, 1e-10)


@pytest.mark.parametrize("mode", range(4), ids=["λ=e^-20", "λ=0.5", "λ=1-1/4096", "λ=1"])
def test_each_decay_alone(mode: int) -> None:
    """One mode at a time, so that no mode's error hides behind another's magnitude."""
    log_decay = torch.tensor([-20.0, math.log(0.5), math.log1p(-1 / 4096), 0.0], dtype=torch.float64)[mode : mode + 1]
    case = replace(make_case(2, 200, 8, 1), log_decay=log_decay)
    assert_close(run(case), run(case, "oracle"), 1e-10)


def test_zero_decay_factor_forgets_everything() -> None:
    """λ = 0: each output sees its own token only."""
    case = replace(make_case(1, 70, 8, 1), log_decay=torch.tensor([-torch.inf], dtype=torch.float64))
    results = run(case)
    assert error(results["y"], case.x * case.gamma[:, 0]) < 1e-12
    assert all(tensor.isfinite().all() for tensor in results.values())


def test_any_chunk_size() -> None:
    """Small chunks also cut the row into several chunk batches: 200 tokens in chunks of 1 or 7."""
    case = make_case(2, 200, 12, 8, starts=[[70], [64, 199]])
    expected = run(case, "oracle")
    for chunk_size in (1, 7, 64, 100, 256):
        assert_close(run(case, chunk_size=chunk_size), expected, 1e-10, f"chunks of {chunk_size}")


@pytest.mark.parametrize(
    "starts",
    [None, [[700], [511, 512, 513, 1023]], [[512], [1024]], [[2], list(range(500, 530))]],
    ids=["whole", "near the edge", "on the edge", "many"],
)
def test_rows_of_several_chunk_batches(starts: list[list[int]] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 512 tokens: the state goes from one to the next, unless a document ends there."""
    monkeypatch.setattr("lightscale.kernels.tpe.chunk_batches._BATCH_TOKENS", 1)
    case = make_case(2, 1100, 6, 5, starts=starts)
    assert_close(run(case), run(case, "oracle"), 1e-10)


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
def test_documents_equal_separate_runs(starts: list[list[int]]) -> None:
    """Every document by itself, which also checks how the reference treats boundaries."""
    case = make_case(2, 200, 6, 5, starts=starts)
    assert case.initial_state is not None and case.cu_seqlens is not None
    expected = {f"d{n}": torch.zeros_like(getattr(case, n)) for n in INPUTS}
    expected |= {"y": torch.zeros_like(case.dy), "state": torch.zeros_like(case.dstate)}
    for begin, end in pairwise(case.cu_seqlens.tolist()):
        row, part = begin // 200, slice(begin % 200, begin % 200 + end - begin)
        one, first, last = slice(row, row + 1), part.start == 0, part.stop == 200
        document = replace(
            case,
            **{n: getattr(case, n)[one, part] for n in ("x", "dy")},
            initial_state=case.initial_state[one] if first else None,
            dstate=case.dstate[one] * last,
            cu_seqlens=None,
        )
        results = run(document, "oracle")
        for name in ("y", "dx"):
            expected[name][row, part] = results[name][0]
        for name in ("dlog_decay", "dgamma"):
            expected[name] += results[name]
        if first:
            expected["dinitial_state"][row] = results["dinitial_state"][0]
        if last:
            expected["state"][row] = results["state"][0]
    assert_close(run(case), expected, 1e-10)
    assert_close(run(case, "oracle"), expected, 1e-10)


@pytest.mark.parametrize("start", [64, 90])
def test_overflow_stays_in_its_document(start: int) -> None:
    """The first document's state is infinite; the second one's results equal a run of its own."""
    case = make_case(1, 200, 8, 4, with_state=False, starts=[[start]]).to(torch.float32, torch.float32)
    case.x[:, 10 : start - 1] = 3e38
    results = run(case)
    assert not results["y"][:, :start].isfinite().all()
    part = {n: getattr(case, n)[:, start:] for n in ("x", "dy")}
    alone = run(replace(case, cu_seqlens=None, **part))
    assert error(results["state"], alone["state"]) < 1e-5
    for name in ("y", "dx"):
        assert error(results[name][:, start:], alone[name]) < 1e-5


def restrict(case: Case, begin: int, end: int) -> tuple[Case, Tensor]:
    """A rank's tokens [begin, end) of every row, and the rows (B, 1, 1) that begin with a new document."""
    rows, tokens = case.x.shape[:2]
    fresh = torch.zeros(rows, dtype=torch.bool)
    cu_seqlens = None
    if case.cu_seqlens is not None:
        known = set(case.cu_seqlens.tolist())
        inside = [[t - begin for t in range(begin + 1, end) if r * tokens + t in known] for r in range(rows)]
        cu_seqlens = boundaries(inside, end - begin)
        fresh = torch.tensor([0 < begin < end and r * tokens + begin in known for r in range(rows)])
    part = {n: getattr(case, n)[:, begin:end] for n in ("x", "dy")}
    return replace(case, **part, cu_seqlens=cu_seqlens), fresh[:, None, None]


def run_over_ranks(case: Case, cuts: list[int]) -> Results:
    """The passes as sequence parallelism composes them, with a rank for each part between two cuts."""
    zero = torch.zeros_like(case.dstate)
    state = zero if case.initial_state is None else case.initial_state
    ranks = []
    for begin, end in pairwise([0, *cuts, case.x.shape[1]]):
        s, fresh = restrict(case, begin, end)
        local, through = state_fwd(s.x, s.log_decay, s.cu_seqlens)
        decay = torch.where(fresh, zero, through[:, None, :])
        entering = torch.where(fresh, zero, state)
        y, leaving = out_fwd(s.x, s.log_decay, s.gamma, entering, s.cu_seqlens)
        state = decay * state + local
        assert error(leaving, state) < 1e-10
        ranks.append((s, fresh, decay, entering, y))

    dstate = case.dstate
    gradients: list[tuple[Tensor, Tensor, Tensor]] = []
    for s, fresh, decay, entering, _ in reversed(ranks):
        gradients.insert(0, grad_bwd(s.x, s.log_decay, s.gamma, s.dy, entering, dstate, s.cu_seqlens))
        own = state_bwd(s.dy, s.log_decay, s.gamma, s.cu_seqlens)
        dstate = torch.where(fresh, zero, own) + decay * dstate

    results = {"y": torch.cat([y for *_, y in ranks], 1), "state": state}
    results["dx"] = torch.cat([dx for dx, _, _ in gradients], 1)
    results["dlog_decay"] = torch.stack([g for _, g, _ in gradients]).sum(0)
    results["dgamma"] = torch.stack([g for _, _, g in gradients]).sum(0)
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
    ids=["whole", "some", "short"],
)
def over_ranks(request: pytest.FixtureRequest) -> tuple[Case, Results]:
    """A case, and what the oracle makes of it: once for all cuts."""
    case = make_case(2, 200, 12, 8, starts=request.param)
    return case, run(case, "oracle")


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_passes_compose_over_ranks(cuts: list[int], over_ranks: tuple[Case, Results]) -> None:
    case, expected = over_ranks
    assert_close(run_over_ranks(case, cuts), expected, 1e-10)


def test_no_tokens() -> None:
    """An empty row hands its state on, forward and backward."""
    case = make_case(2, 0, 4, 6)
    assert case.initial_state is not None
    results = run(case)
    assert results["y"].shape == (2, 0, 4)
    assert torch.equal(results["state"], case.initial_state)
    assert torch.equal(results["dinitial_state"], case.dstate)
    assert not results["dlog_decay"].any() and not results["dgamma"].any()
    state, decay = state_fwd(case.x, case.log_decay, torch.tensor([0]))
    assert not state.any() and (decay == 1).all()
    assert not state_bwd(case.dy, case.log_decay, case.gamma).any()


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_random_shapes_documents_and_splits(data: st.DataObject) -> None:
    """One call, ranks, and a chain of calls that pass the state: all equal the recurrence."""
    rows, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 150))
    inner = st.lists(st.integers(1, tokens), max_size=6).map(lambda xs: sorted({x for x in xs if x < tokens}))
    starts = data.draw(st.none() | st.lists(inner, min_size=rows, max_size=rows))
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=5)))
    width, modes = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 9))
    with_state = data.draw(st.booleans())
    case = make_case(rows, tokens, width, modes, with_state=with_state, starts=starts, seed=tokens)
    expected = run(case, "oracle")
    assert_close(run(case, chunk_size=data.draw(st.sampled_from([1, 5, 16, 64]))), expected, 1e-10)
    assert_close(run_over_ranks(case, cuts), expected, 1e-10)

    zero, outputs = torch.zeros_like(case.dstate), []
    state = zero if case.initial_state is None else case.initial_state
    for begin, end in pairwise([0, *cuts, tokens]):
        s, fresh = restrict(case, begin, end)
        y, after = tpe_scan(
            s.x,
            s.log_decay,
            s.gamma,
            initial_state=torch.where(fresh, zero, state),
            output_final_state=True,
            cu_seqlens=s.cu_seqlens,
        )
        assert after is not None
        state = after
        outputs.append(y)
    assert error(torch.cat(outputs, 1), expected["y"]) < 1e-10 and error(state, expected["state"]) < 1e-10


@pytest.mark.parametrize("token", [0, 63, 64, 100, 149])
def test_a_token_changes_nothing_before_it_or_in_other_documents(token: int) -> None:
    case = make_case(2, 150, 8, 6, starts=[[64, 110], [120]])
    before = run(case)["y"]
    changed = replace(case, x=case.x.clone())
    changed.x[0, token] += 10.0
    after = run(changed)["y"]
    end = next(e for e in (64, 110, 150) if e > token)
    untouched = torch.ones(2, 150, dtype=torch.bool)
    untouched[0, token:end] = False
    assert torch.equal(after[untouched], before[untouched])
    assert (after[0, token:end] != before[0, token:end]).any(-1).all()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)], ids=str
)
@pytest.mark.parametrize("starts", [None, [[64, 333], [1, 100]]], ids=["whole", "documents"])
def test_lower_precision(dtype: torch.dtype, tolerance: float, starts: list[list[int]] | None) -> None:
    """Outputs and gradients have the inputs' dtype, states and the decays' gradient are fp32."""
    rounded = make_case(2, 500, 16, 12, starts=starts).to(dtype, torch.float32)
    results = run(rounded)
    assert {results[n].dtype for n in ("y", "dx", "dgamma")} == {dtype}
    assert {results[n].dtype for n in ("state", "dlog_decay", "dinitial_state")} == {torch.float32}
    assert_close(results, run(rounded.to(torch.float64, torch.float64), "oracle"), tolerance)


def test_long_time_scales_in_fp32() -> None:
    """λ = 1 - 1/4096 over twice as many tokens; the state grows to the sum of thousands."""
    case = make_case(1, 8192, 2, 3).to(torch.float32, torch.float32)
    case = replace(case, x=case.x + 1, log_decay=decays(3).float())
    assert_close(run(case), run(case.to(torch.float64, torch.float64), "oracle"), 1e-5)


def test_parameters_of_other_dtypes() -> None:
    """gamma in fp32 beside x in bf16; decays in fp64."""
    case = make_case(1, 70, 8, 4).to(torch.bfloat16, torch.float32)
    mixed = replace(case, gamma=case.gamma.float(), log_decay=case.log_decay.double())
    results = run(mixed)
    assert results["dgamma"].dtype == torch.float32 and results["dlog_decay"].dtype == torch.float64
    assert results["y"].dtype == torch.bfloat16
    expected = run(mixed.to(torch.float64, torch.float64), "oracle")
    assert_close(results, expected, 5e-3)
    reference = run(mixed, "reference")
    assert {n: tensor.dtype for n, tensor in reference.items()} == {n: t.dtype for n, t in results.items()}
    assert_close(reference, expected, 5e-3)
    assert all(torch.equal(tensor, results[n]) for n, tensor in run(mixed, "auto").items())


@pytest.mark.parametrize("starts", [None, [[2, 4]]], ids=["whole", "documents"])
def test_finite_differences(starts: list[list[int]] | None) -> None:
    case = make_case(1, 6, 2, 3, starts=starts)
    leaves = [getattr(case, n).requires_grad_() for n in INPUTS]

    def operator(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        y, state = tpe_scan(
            *inputs[:3],
            initial_state=inputs[3],
            output_final_state=True,
            cu_seqlens=case.cu_seqlens,
            chunk_size=4,
        )
        assert state is not None
        return y, state

    assert torch.autograd.gradcheck(operator, leaves)


@pytest.mark.parametrize("used", ["y", "state"])
def test_one_result_is_enough_for_the_backward(used: str) -> None:
    """A loss of the outputs alone, or of the final state alone, with cotangents that autograd expands."""
    case = make_case(2, 70, 8, 6)
    ones, none = torch.ones_like, torch.zeros_like
    dy, dstate = (ones(case.dy), none(case.dstate)) if used == "y" else (none(case.dy), ones(case.dstate))
    expected = run(replace(case, dy=dy, dstate=dstate), "oracle")
    leaves = {n: getattr(case, n).detach().requires_grad_() for n in INPUTS}
    y, state = tpe_scan(**leaves, output_final_state=True)
    loss = y.sum() if state is None or used == "y" else state.sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    actual = {f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}
    assert_close(actual, {n: expected[n] for n in actual}, 1e-10)


def test_strided_inputs_are_read_and_left_alone() -> None:
    """A slice of a wider stream, and one whose tokens come first, as Megatron's do."""
    case = make_case(2, 50, 8, 4)
    expected = run(case)
    wide = torch.cat([case.x, case.x + 1], dim=-1)
    copy = wide.clone()
    assert_close(run(replace(case, x=wide[..., :8])), expected, 1e-14)
    token_major = {n: getattr(case, n).transpose(0, 1).contiguous().transpose(0, 1) for n in ("x", "dy")}
    assert_close(run(replace(case, **token_major)), expected, 1e-14)
    assert torch.equal(wide, copy)


def test_step_by_step_equals_recurrence() -> None:
    case = make_case(2, 70, 8, 12)
    expected = run(case, "oracle")
    state, outputs = case.initial_state, []
    for t in range(70):
        assert state is not None
        y_t, state = recurrent_step(case.x[:, t], case.log_decay, case.gamma, state)
        outputs.append(y_t)
    assert state is not None
    assert error(torch.stack(outputs, 1), expected["y"]) < 1e-10 and error(state, expected["state"]) < 1e-10

    half = case.to(torch.bfloat16, torch.float32)
    assert half.initial_state is not None
    y, state = recurrent_step(half.x[:, 0], half.log_decay, half.gamma, half.initial_state)
    assert y.dtype == torch.bfloat16 and state.dtype == torch.float32


def test_autocast_does_not_touch_the_states() -> None:
    case = make_case(1, 100, 16, 16).to(torch.float32, torch.float32)
    expected = run(case)
    local, _ = state_fwd(case.x, case.log_decay)
    own = state_bwd(case.dy, case.log_decay, case.gamma)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(case)
        assert all(torch.equal(actual[n], expected[n]) for n in expected)
        assert torch.equal(state_fwd(case.x, case.log_decay)[0], local)
        assert torch.equal(state_bwd(case.dy, case.log_decay, case.gamma), own)


def test_only_the_inputs_are_saved_and_nothing_of_tokens_times_modes_is_made() -> None:
    case = make_case(1, 4096, 64, 64, with_state=False).to(torch.float32, torch.float32)
    x, log_decay, gamma = (getattr(case, n).requires_grad_() for n in INPUTS[:3])
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        y, state = tpe_scan(x, log_decay, gamma)
        y.backward(case.dy)
    assert state is None  # nobody asked for it
    assert sum(saved) == x.numel() + log_decay.numel() + gamma.numel()
    largest_bytes = max(event.self_cpu_memory_usage for event in profile.events())
    assert x.numel() < largest_bytes < 3 * 4 * x.numel()  # all states would take 64 times x

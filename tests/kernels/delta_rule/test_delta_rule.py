"""The delta rule: the chunked form and its passes against the fp64 recurrence, with every gradient."""

import runpy
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels.delta_rule import (
    delta_rule,
    delta_rule_reference,
    grad_bwd,
    out_fwd,
    recurrent_step,
    state_bwd,
    state_fwd,
)

comparing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "comparing.py")))
boundaries, error, assert_close, rms = comparing.boundaries, comparing.error, comparing.assert_close, comparing.rms

Results = dict[str, Tensor]

INPUTS = ("q", "k", "v", "log_decay", "beta", "initial_state")
DECAYS = ("none", "head", "channel")
STRENGTHS = (0.01, 1.0, 30.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs of one call and the cotangents of its two results."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor
    initial_state: Tensor | None
    do: Tensor
    dstate: Tensor
    cu_seqlens: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Case":
        """Rounded to ``dtype``; log decays and states to fp32, if that is wider."""
        wide = torch.promote_types(dtype, torch.float32)
        changed: dict[str, Any] = {}
        for field in fields(self):
            x = getattr(self, field.name)
            if x is not None and x.is_floating_point():
                changed[field.name] = x.to(wide if field.name in ("log_decay", "initial_state", "dstate") else dtype)
        return replace(self, **changed)


def make_case(
    rows: int,
    tokens: int,
    *,
    heads: int = 2,
    groups: int = 1,
    widths: tuple[int, int] = (8, 6),
    decay: str = "head",
    strength: float = 1.0,
    most_beta: float = 1.0,
    with_state: bool = True,
    starts: list[list[int]] | None = None,
    seed: int = 0,
) -> Case:
    """Random fp64 inputs with keys of unit length; ``groups`` heads of values for each of queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    (K, V), N = widths, heads * groups

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    shapes = {"head": (rows, tokens, N), "channel": (rows, tokens, N, K)}
    return Case(
        q=normal(rows, tokens, heads, K),
        k=torch.nn.functional.normalize(normal(rows, tokens, heads, K), dim=-1),
        v=normal(rows, tokens, N, V),
        log_decay=None if decay == "none" else -strength * uniform(*shapes[decay]),
        beta=most_beta * uniform(rows, tokens, N),
        initial_state=normal(rows, N, K, V) if with_state else None,
        do=normal(rows, tokens, N, V),
        dstate=normal(rows, N, K, V),
        cu_seqlens=None if starts is None else boundaries(starts, tokens),
    )


def run(case: Case, backend: str = "chunked", **options: Any) -> Results:
    """Outputs, final state and all gradients of one call of the operator, or of the oracle itself."""
    names = [n for n in INPUTS if getattr(case, n) is not None]
    leaves = {"log_decay": None} | {name: getattr(case, name).detach().requires_grad_() for name in names}
    if backend == "oracle":
        o, state = delta_rule_reference(**leaves, cu_seqlens=case.cu_seqlens)
    else:
        o, final = delta_rule(**leaves, cu_seqlens=case.cu_seqlens, output_final_state=True, backend=backend, **options)
        assert final is not None
        state = final
    found = torch.autograd.grad([o, state], [leaves[n] for n in names], [case.do, case.dstate], materialize_grads=True)
    return {"o": o.detach(), "state": state.detach()} | {f"d{name}": g for name, g in zip(names, found, strict=True)}


def absolute_terms(case: Case) -> Tensor:
    """Σ |terms| (B, N, K, V) of the sum over tokens that dinitial_state is: all results are linear in the state."""
    (rows, tokens, heads, _), K = case.v.shape, case.q.shape[3]
    unit = torch.eye(K, dtype=case.q.dtype).expand(rows, heads, K, K)
    nothing = case.q.new_zeros(rows, tokens, heads, K)
    read, passed = delta_rule_reference(
        case.q, case.k, nothing, case.log_decay, case.beta, initial_state=unit, cu_seqlens=case.cu_seqlens
    )
    return torch.einsum("btnk,btnv->bnkv", read.abs(), case.do.abs()) + passed.abs().mT @ case.dstate.abs()


@settings(max_examples=60)
@given(data=st.data())
def test_chunks_are_the_recurrence(data: st.DataObject) -> None:
    """In fp64 within 1e-12: decays of every form and strength, β up to 2, documents, states, and heads in groups."""
    draw = data.draw
    rows, tokens = draw(st.integers(1, 2)), draw(st.sampled_from((1, 2, 15, 16, 17, 40, 150)))
    starts = draw(st.none() | st.lists(st.lists(st.integers(0, tokens - 1)), min_size=rows, max_size=rows))
    case = make_case(
        rows,
        tokens,
        heads=draw(st.integers(1, 2)),
        groups=draw(st.sampled_from((1, 2, 3))),
        widths=(draw(st.integers(1, 9)), draw(st.integers(1, 9))),
        decay=draw(st.sampled_from(DECAYS)),
        strength=draw(st.sampled_from(STRENGTHS)),
        most_beta=draw(st.sampled_from((1.0, 2.0))),
        with_state=draw(st.booleans()),
        starts=starts,
        seed=draw(st.integers(0, 1000)),
    )
    expected = run(case, "oracle")
    # The gradient of a log decay is a sum of such products over K and V, which may cancel to less than their rounding.
    least = {"dlog_decay": 1e-3 * rms((case.q * expected["dq"]).sum(-1))}
    if case.initial_state is not None:
        # That of a state of few numbers may cancel too (found: by a factor of 20); decays shrink its terms alike.
        least["dinitial_state"] = rms(absolute_terms(case))
    assert_close(run(case, chunk_size=draw(st.sampled_from((16, 16, 5, 64)))), expected, 1e-12, least=least)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("strength", STRENGTHS)
def test_fp32_is_as_exact_as_it_can_be(decay: str, strength: float) -> None:
    starts = [[5, 6, 7, 100], [64]]
    case = make_case(2, 200, widths=(32, 32), decay=decay, strength=strength, most_beta=2.0, starts=starts)
    case = case.to(torch.float32)
    exact = run(case.to(torch.float64), "oracle")
    # Where almost nothing passes from token to token, the gradient of a decay is a difference of what hardly differs.
    found = run(case)
    assert_close(found, exact, 1e-5)


@pytest.mark.parametrize("most_beta", [1.0, 2.0])
def test_keys_that_repeat_and_nothing_is_forgotten(most_beta: float) -> None:
    """The worst case for the inverse of a chunk: with β = 2 the state changes its sign at every token."""
    case = make_case(1, 100, widths=(8, 8), decay="none")
    case = replace(case, k=case.k[:, :1].expand_as(case.k).contiguous(), beta=torch.full_like(case.beta, most_beta))
    assert_close(run(case), run(case, "oracle"), 1e-12)
    rounded = case.to(torch.float32)
    assert_close(run(rounded), run(rounded.to(torch.float64), "oracle"), 1e-5)


@pytest.mark.parametrize("decay", DECAYS)
def test_half_precision_is_rounded_at_its_ends_alone(decay: str) -> None:
    """No worse than the recurrence, which computes in fp32 from the same numbers."""
    case = make_case(1, 150, widths=(32, 32), decay=decay, starts=[[40, 41]]).to(torch.bfloat16)
    exact, found, recurrent = run(case.to(torch.float64), "oracle"), run(case), run(case, "reference")
    for name, expected in exact.items():
        assert error(found[name], expected) < 1.05 * error(recurrent[name], expected) + 1e-6, name


def test_a_decay_of_minus_infinity_forgets() -> None:
    for decay in ("head", "channel"):
        case = make_case(1, 40, decay=decay)
        assert case.log_decay is not None
        forgets = torch.rand(case.log_decay.shape, generator=torch.Generator().manual_seed(3)) < 0.2
        case = replace(case, log_decay=case.log_decay.masked_fill(forgets, -torch.inf))
        assert_close(run(case), run(case, "oracle"), 1e-12)


def test_a_row_without_tokens_passes_the_state_on() -> None:
    case = make_case(2, 0)
    found = run(case)
    assert found["o"].shape == (2, 0, 2, 6) and case.initial_state is not None
    assert torch.equal(found["state"], case.initial_state) and torch.equal(found["dinitial_state"], case.dstate)


@pytest.mark.parametrize("decay", DECAYS)
def test_one_token_at_a_time(decay: str) -> None:
    case = make_case(2, 20, groups=2, decay=decay)
    expected = run(case, "oracle")
    state, outputs = case.initial_state, []
    for t in range(20):
        token = [None if x is None else x[:, t] for x in (case.q, case.k, case.v, case.log_decay, case.beta)]
        o, state = recurrent_step(*token, state)
        outputs.append(o)
    assert_close({"o": torch.stack(outputs, 1), "state": state}, {n: expected[n] for n in ("o", "state")}, 1e-13)


# ----- passes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edges", [[0, 33, 50], [0, 1, 1, 16, 47, 50]])
@pytest.mark.parametrize("decay", DECAYS)
def test_passes_over_segments_are_the_whole_row(edges: list[int], decay: str) -> None:
    """Cut anywhere: what a segment is summed up to gives the states between, forward, and cotangents backward."""
    case = make_case(1, 50, groups=2, decay=decay, most_beta=2.0)
    expected = run(case, "oracle")
    parts = [
        {
            name: None if (x := getattr(case, name)) is None else x[:, first:last]
            for name in ("q", "k", "v", "log_decay", "beta", "do")
        }
        for first, last in pairwise(edges)
    ]
    summaries = [state_fwd(*(part[name] for name in ("k", "v", "log_decay", "beta"))) for part in parts]
    state, entering = case.initial_state, []
    assert state is not None
    for local, through in summaries:
        entering.append(state)
        state = through @ state + local
    assert error(state, expected["state"]) < 1e-12
    outputs = [out_fwd(*list(part.values())[:5], before)[0] for part, before in zip(parts, entering, strict=True)]
    assert error(torch.cat(outputs, 1), expected["o"]) < 1e-12

    reads = [state_bwd(*(part[n] for n in ("q", "k", "do", "log_decay", "beta"))) for part in parts]
    cotangent, leaving = case.dstate, []
    for (_, through), own in zip(reversed(summaries), reversed(reads), strict=True):
        leaving.append(cotangent)
        cotangent = own + through.mT @ cotangent
    assert error(cotangent, expected["dinitial_state"]) < 1e-12
    found = [
        grad_bwd(*part.values(), before, behind)
        for part, before, behind in zip(parts, entering, reversed(leaving), strict=True)
    ]
    for number, name in enumerate(("q", "k", "v", "log_decay", "beta")):
        if f"d{name}" in expected:
            assert error(torch.cat([one[number] for one in found], 1), expected[f"d{name}"]) < 1e-12, name


def test_a_document_that_begins_lets_nothing_through() -> None:
    case = make_case(2, 40, starts=[[7], []])
    local, through = state_fwd(case.k, case.v, case.log_decay, case.beta, case.cu_seqlens)
    assert not through[0].any() and through[1].any()
    behind = make_case(2, 40, starts=[[7], []])
    changed = replace(behind, v=behind.v.clone(), k=behind.k.clone())
    changed.v[0, :7] = torch.inf
    assert torch.equal(state_fwd(changed.k, changed.v, case.log_decay, case.beta, case.cu_seqlens)[0][1], local[1])


# ----- errors ---------------------------------------------------------------------------------------------------------


def one(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": one(2, 10, 24)}, r"q must have 4 dimensions"),
        ({"k": one(2, 10, 3, 9)}, r"q and k must have the same shape .* \(2, 10, 3, 8\) and \(2, 10, 3, 9\)"),
        ({"v": one(2, 10, 4, 8)}, r"v must be \(B, T, N, V\) = \(2, 10, a multiple of 3, V\), got \(2, 10, 4, 8\)"),
        ({"v": one(2, 10, 3, 8, dtype=torch.float64)}, r"one dtype, got torch.float32"),
        (dict.fromkeys("qkv", one(2, 10, 3, 8, dtype=torch.int64)), r"must be fp16, bf16, fp32 or fp64"),
        ({"log_decay": -one(3)}, r"log_decay must be \(B, T, N\) = \(2, 10, 3\) or \(B, T, N, K\) .* got shape \(3,\)"),
        ({"log_decay": -one(2, 10, 3, dtype=torch.bfloat16)}, r"log_decay must be fp32 or fp64"),
        ({"log_decay": one(2, 10, 3)}, r"log_decay must be at most 0 .* largest value of 1"),
        ({"beta": one(2, 10)}, r"beta must be \(B, T, N\) = \(2, 10, 3\), got shape \(2, 10\)"),
        ({"beta": one(2, 10, 3).to("meta")}, r"beta is on meta, but q is on cpu"),
        ({"initial_state": one(2, 3, 8, 9)}, r"initial_state must be \(B, N, K, V\) = \(2, 3, 8, 8\)"),
        ({"cu_seqlens": torch.tensor([0, 7, 20])}, r"every row start, .* lacks 10"),
        ({"chunk_size": 0}, r"chunk_size must be at least 1"),
        ({"backend": "triton9"}, r"delta_rule has no backend 'triton9'; use auto, triton, chunked, reference"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {n: one(2, 10, 3, 8) for n in ("q", "k", "v")}
    arguments |= {"log_decay": -one(2, 10, 3), "beta": one(2, 10, 3)}
    with pytest.raises(UserError, match=message):
        delta_rule(**(arguments | change))

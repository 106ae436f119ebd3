"""LightNet's operator: precisions, single steps, the algebra of its states, and the form without causality."""

import math
import runpy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightscale.kernels.common.angles import features, phases_of
from lightscale.kernels.lightnet import (
    Angles,
    LightNetState,
    StateCotangent,
    empty_state,
    exchanged_cotangent,
    lightnet_attention,
    lightnet_noncausal,
    merge,
    passed_share,
    plain_cotangent,
    recurrent_step,
    state_fwd,
)
from lightscale.kernels.lightnet.state import by_row

comparing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "comparing.py")))
drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "drawing.py")))
error, assert_close = comparing.error, comparing.assert_close

Leaves = dict[str, Tensor]
WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(
    rows: int, tokens: int, key_width: int, value_width: int, *, heads: int = 2, dtype: torch.dtype = torch.float64
) -> tuple[Leaves, Angles]:
    """q, k, v in ``dtype``, the state's z and S and the angles in the dtype of states."""
    wide = WIDE.get(dtype, dtype)
    leaves = {
        "q": draw(rows, tokens, heads, key_width, seed=1, dtype=dtype),
        "k": draw(rows, tokens, heads, key_width, seed=2, dtype=dtype),
        "v": draw(rows, tokens, heads, value_width, seed=3, dtype=dtype),
        "z": draw(rows, heads, key_width, seed=4, dtype=wide),
        "S": draw(rows, heads, 2 * key_width, value_width, seed=5, dtype=wide),
    }
    theta = 2 * draw(heads, key_width, seed=6, dtype=wide)
    return leaves, Angles(theta, (torch.arange(tokens) + 10).repeat(rows, 1))


def run(leaves: Leaves, angles: Angles, *, rounded_as: Leaves | None = None, **options: Any) -> dict[str, Tensor]:
    """Outputs, final state and every gradient for fixed cotangents, rounded as the results of another run."""
    x = {name: leaf.detach().requires_grad_() for name, leaf in {**leaves, "theta": angles.theta}.items()}
    state, angles = LightNetState(x["z"], x["S"]), Angles(x["theta"], angles.positions)
    qkv = (x["q"], x["k"], x["v"])
    o, final = lightnet_attention(*qkv, angles=angles, initial_state=state, output_final_state=True, **options)
    assert final is not None
    results = {"o": o, "z": final.z, "S": final.S}
    cotangents = [
        draw(*y.shape, seed=i + 10, dtype=(rounded_as or results)[n].dtype).to(y.dtype)
        for i, (n, y) in enumerate(results.items())
    ]
    gradients = torch.autograd.grad(list(results.values()), list(x.values()), cotangents)
    return {n: y.detach() for n, y in results.items()} | {f"d{n}": g for n, g in zip(x, gradients, strict=True)}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)], ids=str
)
@pytest.mark.parametrize("starts", [[0, 500, 1000], [0, 64, 333, 500, 501, 600, 1000]], ids=["whole", "documents"])
def test_lower_precision(dtype: torch.dtype, tolerance: float, starts: list[int]) -> None:
    """Outputs and gradients have the dtype of the inputs, states and gradients of states and angles are fp32, as exact:
    what is rounded are the inputs, which the reference has too.
    """
    leaves, angles = inputs(2, 500, 16, 24, dtype=dtype)
    cu_seqlens = torch.tensor(starts)
    results = run(leaves, angles, cu_seqlens=cu_seqlens)
    assert {results[n].dtype for n in ("o", "dq", "dk", "dv")} == {dtype}
    exact = ("z", "S", "dz", "dS", "dtheta")
    assert {results[n].dtype for n in exact} == {torch.float32}
    wide = {n: x.double() for n, x in leaves.items()}
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "backend": "reference", "rounded_as": results}
    expected = run(wide, Angles(angles.theta.double(), angles.positions), **options)
    assert_close(results, expected, tolerance)
    assert_close({n: results[n] for n in exact}, {n: expected[n] for n in exact}, 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 5e-3), (torch.float16, 1e-3)], ids=str)
def test_noncausal_in_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    """The gradient of the angles is a sum over all tokens, in fp32, and must not be one of rounded terms."""
    leaves, (theta, positions) = inputs(2, 300, 16, 24, dtype=dtype)
    found = []
    for wide, backend in ((False, "chunked"), (True, "reference")):
        x = {n: (leaves[n].double() if wide else leaves[n]).detach().requires_grad_() for n in "qkv"}
        x["theta"] = (theta.double() if wide else theta).detach().requires_grad_()
        options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 40, 300, 600]), "backend": backend}
        o = lightnet_noncausal(x["q"], x["k"], x["v"], angles=Angles(x["theta"], positions), **options)
        do = draw(*o.shape, seed=9, dtype=dtype).to(o.dtype)
        gradients = torch.autograd.grad(o, list(x.values()), do)
        found.append({"o": o.detach()} | {f"d{n}": g for n, g in zip(x, gradients, strict=True)})
    results, expected = found
    assert {results[n].dtype for n in ("o", "dq", "dk", "dv")} == {dtype}
    assert results["dtheta"].dtype == torch.float32
    assert_close(results, expected, tolerance)
    assert error(results["dtheta"], expected["dtheta"]) < 1e-5


def test_reference_backend_takes_half_precision() -> None:
    leaves, angles = inputs(2, 70, 8, 12, dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, 10, 70, 134, 140])
    actual = run(leaves, angles, cu_seqlens=cu_seqlens, backend="reference")
    expected = run(leaves, angles, cu_seqlens=cu_seqlens, backend="chunked")
    assert {n: x.dtype for n, x in actual.items()} == {n: x.dtype for n, x in expected.items()}
    assert max(error(actual[n], expected[n]) for n in expected) < 5e-3
    automatic = run(leaves, angles, cu_seqlens=cu_seqlens)
    assert all(torch.equal(x, expected[n]) for n, x in automatic.items())


@pytest.mark.parametrize(
    ("starts", "scale"),
    drawing.covering("finite differences", [[0, 6], [0, 2, 4, 6]], [1.0, 100.0], strength=1),
)
def test_finite_differences(starts: list[int], scale: float) -> None:
    leaves, angles = inputs(1, 6, 2, 3)
    leaves["k"] = scale * leaves["k"]

    def operator(*x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        o, state = lightnet_attention(
            *x[:3],
            angles=angles,
            initial_state=LightNetState(*x[3:]),
            output_final_state=True,
            cu_seqlens=torch.tensor(starts),
            chunk_size=4,
        )
        assert state is not None
        return o, *state

    assert torch.autograd.gradcheck(operator, [x.requires_grad_() for x in leaves.values()])


@pytest.mark.parametrize("used", ["o", "z", "S"])
def test_one_result_is_enough_for_the_backward(used: str) -> None:
    """A loss of the outputs, of the final z or of the final S alone, with cotangents that autograd expands."""
    leaves, angles = inputs(2, 70, 8, 6)
    gradients = []
    for backend in ("chunked", "reference"):
        x = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
        o, state = lightnet_attention(
            x["q"],
            x["k"],
            x["v"],
            angles=angles,
            initial_state=LightNetState(x["z"], x["S"]),
            output_final_state=True,
            backend=backend,
        )
        assert state is not None
        loss = {"o": o, "z": state.z, "S": state.S}[used].sum()
        grads = torch.autograd.grad(loss, list(x.values()), allow_unused=True, materialize_grads=True)
        gradients.append(dict(zip(x, grads, strict=True)))
    for name, expected in gradients[1].items():
        difference = (gradients[0][name] - expected).abs().max()
        assert difference < 1e-10 * max(1.0, expected.abs().max().item()), name


@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (2, 3)])
def test_strided_inputs_are_read_and_left_alone(rows: int, heads: int) -> None:
    """Slices of one projection, head-major tensors, and angles that heads and rows share by strides of 0."""
    leaves, (theta, positions) = inputs(rows, 50, 8, 8, heads=heads)
    shared = Angles(theta[:1].expand(heads, -1), positions[:1].expand(rows, -1))
    expected = run(leaves, Angles(shared.theta.contiguous(), shared.positions.contiguous()))
    packed = torch.cat([leaves[n] for n in "qkv"], dim=-1)
    copy = packed.clone()
    sliced = leaves | dict(zip("qkv", packed.split(8, dim=-1), strict=True))
    head_major = leaves | {n: leaves[n].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for n in "qkv"}
    for strided in (sliced, head_major):
        actual = run(strided, shared)
        assert max(error(actual[n], expected[n]) for n in expected) < 1e-14
    assert torch.equal(packed, copy)


def test_average_of_ones_is_one() -> None:
    """With v = 1 and without LRPE, S = 1 in every channel: what a softmax average must give."""
    q, k = draw(1, 5000, 1, 4, seed=1).float(), 3 * draw(1, 5000, 1, 4, seed=2).float()
    o, state = lightnet_attention(q, k, torch.ones_like(k), output_final_state=True)
    assert state is not None
    assert (state.S - 1).abs().max() < 1e-5
    assert (o - q.sum(-1, keepdim=True)).abs().max() < 1e-4


def test_z_does_not_drift() -> None:
    """z of equal keys is the log of their number; a sequential fp32 sum of logs is 1e-3 off here."""
    k = torch.zeros(1, 2**17, 1, 1)
    state, _ = state_fwd(k, k)
    assert abs(state.z.item() - 17 * math.log(2)) < 2e-6


def test_step_by_step_equals_recurrence() -> None:
    leaves, angles = inputs(2, 70, 8, 12)
    leaves["k"] = 10 * leaves["k"]
    x = {name: leaf.detach().requires_grad_() for name, leaf in {**leaves, "theta": angles.theta}.items()}
    state = LightNetState(x["z"], x["S"])
    outputs = []
    for t in range(70):
        here = Angles(x["theta"], angles.positions[:, t])
        o, state = recurrent_step(x["q"][:, t], x["k"][:, t], x["v"][:, t], state, here)
        outputs.append(o)
    results = {"o": torch.stack(outputs, 1), "z": state.z, "S": state.S}
    cotangents = [draw(*y.shape, seed=i + 10) for i, y in enumerate(results.values())]
    gradients = torch.autograd.grad(list(results.values()), list(x.values()), cotangents)
    actual = results | {f"d{n}": g for n, g in zip(x, gradients, strict=True)}
    expected = run(leaves, angles, backend="reference")
    assert max(error(actual[n].detach(), expected[n]) for n in expected) < 1e-10


def test_steps_begin_with_nothing_and_keep_their_dtypes() -> None:
    leaves, _ = inputs(2, 3, 8, 12, dtype=torch.bfloat16)
    state = empty_state(2, 2, 8, 8, 12)
    o, state = recurrent_step(leaves["q"][:, 0], leaves["k"][:, 0], leaves["v"][:, 0], state)
    assert (o.dtype, state.z.dtype, state.S.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert torch.equal(state.z, leaves["k"][:, 0].float())
    assert torch.equal(state.S, leaves["v"][:, 0].float()[:, :, None].expand(-1, -1, 8, -1))


def test_autocast_does_not_touch_the_states() -> None:
    leaves, angles = inputs(1, 100, 16, 16, dtype=torch.float32)
    expected, local = run(leaves, angles), state_fwd(leaves["k"], leaves["v"], angles)[0]
    average = lightnet_noncausal(leaves["q"], leaves["k"], leaves["v"], angles=angles)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(leaves, angles)
        assert all(torch.equal(actual[n], expected[n]) for n in expected)
        assert torch.equal(state_fwd(leaves["k"], leaves["v"], angles)[0].S, local.S)
        assert torch.equal(lightnet_noncausal(leaves["q"], leaves["k"], leaves["v"], angles=angles), average)
        q, k, v = (leaves[n][:, 0] for n in "qkv")
        _, state = recurrent_step(q, k, v, LightNetState(leaves["z"], leaves["S"][:, :, :16]))
        assert state.S.dtype == torch.float32


def test_inputs_and_few_states_are_saved_for_backward() -> None:
    leaves, angles = inputs(1, 300, 8, 8)
    q, k, v = (leaves[n].requires_grad_() for n in "qkv")
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        _, state = lightnet_attention(q, k, v, angles=angles)
    assert state is None  # nobody asked for it
    # States: the last one, and those that enter the four whole chunks and the rest.
    assert sum(saved) == 3 * q.numel() + 2 * 8 + 300 + 3 * (leaves["z"].numel() + leaves["S"].numel())


def random_state(seed: int, *, holes: bool = False) -> LightNetState:
    """Keys of one width 4, S with two halves; with ``holes`` some channels are empty."""
    z = 20 * draw(3, 2, 4, seed=seed)
    if holes:
        z[0, 0] = -torch.inf
        z[1, :, 1] = -torch.inf
    S = draw(3, 2, 8, 5, seed=seed + 100)
    empty = (z == -torch.inf).repeat(1, 1, 2)
    return LightNetState(z, S.masked_fill(empty[..., None], 0.0))


def assert_states_equal(actual: LightNetState, expected: LightNetState) -> None:
    torch.testing.assert_close(actual.z, expected.z, rtol=1e-13, atol=0)
    torch.testing.assert_close(actual.S, expected.S, rtol=1e-12, atol=1e-13)


def test_merge_is_associative_and_empty_is_its_identity() -> None:
    a, b, c = random_state(1), random_state(2, holes=True), random_state(3, holes=True)
    assert_states_equal(merge(merge(a, b), c), merge(a, merge(b, c)))
    empty = empty_state(3, 2, 4, 8, 5, dtype=torch.float64)
    for state in (a, b):
        assert_states_equal(merge(state, empty), state)
        assert_states_equal(merge(empty, state), state)
    merged = merge(empty, empty)
    assert torch.equal(merged.z, empty.z) and torch.equal(merged.S, empty.S)


def test_merge_selects_what_counts() -> None:
    """Behind a document's start the earlier state may hold anything, and so may an empty one."""
    later, through = random_state(2), torch.tensor([1.0, 0.0, 1.0])
    broken = random_state(1)
    broken.z[1], broken.S[1] = torch.inf, torch.nan
    broken.z[2], broken.S[2] = -torch.inf, torch.nan
    merged = merge(broken, later, through)
    assert_states_equal(LightNetState(merged.z[1:], merged.S[1:]), LightNetState(later.z[1:], later.S[1:]))
    assert not torch.equal(merged.z[0], later.z[0])


def test_the_share_that_passes_is_the_adjoint_of_merging() -> None:
    """The exchanged cotangent of the earlier part against the plain one that autograd finds."""
    parts = (random_state(1, holes=True), random_state(2, holes=True))
    leaves = [x.requires_grad_() for state in parts for x in state]
    earlier, later = LightNetState(*leaves[:2]), LightNetState(*leaves[2:])
    through = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    merged = merge(earlier, later, through)
    dz, dS = draw(3, 2, 4, seed=7), draw(3, 2, 8, 5, seed=8)
    # Where nothing was written, z is -inf whatever the inputs.
    dz = dz.masked_fill(merged.z == -torch.inf, 0.0)
    expected = torch.autograd.grad(merged, leaves[:2], (dz, dS))
    merged = LightNetState(merged.z.detach(), merged.S.detach())
    U, R = exchanged_cotangent(merged, dz, dS)
    share = passed_share(parts[0].z, parts[1].z, through)
    passed = StateCotangent(by_row(share, 8) * U, share * R)
    for x, y in zip(plain_cotangent(parts[0], passed), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_plain_and_exchanged_cotangents_are_inverse() -> None:
    state = random_state(1)
    dz, dS = draw(3, 2, 4, seed=7), draw(3, 2, 8, 5, seed=8)
    back = plain_cotangent(state, exchanged_cotangent(state, dz, dS))
    torch.testing.assert_close(back, (dz, dS), rtol=1e-12, atol=1e-13)


def test_noncausal_equals_a_softmax_per_document() -> None:
    leaves, angles = inputs(2, 50, 6, 8)
    cos, sin = phases_of(angles, torch.float64)
    starts = [0, 20, 21, 50, 100]
    x = [leaves[n].detach().requires_grad_() for n in "qkv"]
    o = lightnet_noncausal(*x, angles=angles, cu_seqlens=torch.tensor(starts))
    by_document = []
    flat = [y.flatten(0, 1) for y in (*x, cos, sin)]
    for begin, end in pairwise(starts):
        q, k, v, c, s = (y[begin:end] for y in flat)
        weights = k.exp() / k.exp().sum(0)
        pairs = torch.einsum("thk,shk,thk,shk->tsh", q, weights, c, c)
        pairs = pairs + torch.einsum("thk,shk,thk,shk->tsh", q, weights, s, s)
        by_document.append(torch.einsum("tsh,shv->thv", pairs, v))
    expected = torch.cat(by_document).view_as(o)
    do = draw(*o.shape, seed=9)
    for actual, wanted in zip(
        (o, *torch.autograd.grad(o, x, do)), (expected, *torch.autograd.grad(expected, x, do)), strict=True
    ):
        assert error(actual.detach(), wanted.detach()) < 1e-12


def test_noncausal_reads_the_final_state_of_the_causal_form() -> None:
    leaves, angles = inputs(2, 130, 6, 8, dtype=torch.float32)
    q, k, v = leaves["q"], 80 * leaves["k"].sign(), leaves["v"]
    _, state = lightnet_attention(q, k, v, angles=angles, output_final_state=True)
    assert state is not None
    queries = features(q, phases_of(angles, torch.float32))
    expected = torch.einsum("bthr,bhrv->bthv", queries, state.S)
    assert error(lightnet_noncausal(q, k, v, angles=angles), expected) < 1e-5


def test_noncausal_of_padding_is_zero() -> None:
    leaves, _ = inputs(1, 20, 6, 8, dtype=torch.bfloat16)
    leaves["k"][:, 12:] = -torch.inf
    k = leaves["k"].requires_grad_()
    o = lightnet_noncausal(leaves["q"], k, leaves["v"], cu_seqlens=torch.tensor([0, 12, 20]))
    assert o.dtype == torch.bfloat16 and o[:, :12].all() and not o[:, 12:].any()
    (dk,) = torch.autograd.grad(o.sum(), k)
    assert dk.isfinite().all() and dk[:, :12].any() and not dk[:, 12:].any()


@pytest.mark.parametrize("cut", [False, True], ids=["whole rows", "documents"])
def test_noncausal_operations_are_the_formula_at_every_length(cut: bool) -> None:
    """4RV forward and 8RV backward for each token and head, R the width of LRPE's features."""
    for tokens in (40, 80, 160):
        leaves, angles = inputs(2, tokens, 6, 8)
        x = [leaves[n].detach().requires_grad_() for n in "qkv"]
        edges = torch.tensor([0, 7, 8, tokens, 2 * tokens - 5, 2 * tokens]) if cut else None
        one = 2 * tokens * x[0].shape[2] * 12 * 8
        with FlopCounterMode(display=False) as forward:
            o = lightnet_noncausal(*x, angles=angles, cu_seqlens=edges)
        with FlopCounterMode(display=False) as backward:
            o.sum().backward()
        assert (forward.get_total_flops(), backward.get_total_flops()) == (4 * one, 8 * one)

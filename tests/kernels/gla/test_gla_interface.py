"""Gated linear attention: dtypes, strides, autograd's and autocast's ways, single steps."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.kernels.gla import decays, gla, grad_bwd, out_fwd, recurrent_step, state_bwd, state_fwd

comparing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "comparing.py")))
assert_close = comparing.assert_close

Leaves = dict[str, Any]


def inputs(
    rows: int, tokens: int, key_width: int, value_width: int, *, heads: int = 2, dtype: torch.dtype = torch.float64
) -> Leaves:
    """The inputs of ``gla`` in ``dtype``, decays and state in that of the states; a token in 20 forgets."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    log_decay = -draw(rows, tokens, heads, key_width).square()
    log_decay.masked_fill_(torch.rand(log_decay.shape, generator=generator) < 0.05, -1e4)
    return {
        "q": draw(rows, tokens, heads, key_width).to(dtype),
        "k": draw(rows, tokens, heads, key_width).to(dtype),
        "v": draw(rows, tokens, heads, value_width).to(dtype),
        "log_decay": log_decay.to(state_dtype),
        "initial_state": draw(rows, heads, key_width, value_width).to(state_dtype),
    }


def cotangents(leaves: Leaves) -> tuple[Tensor, Tensor]:
    """Fixed ones of the outputs and of the final state, in their dtypes."""
    generator = torch.Generator().manual_seed(99)
    do = torch.randn(leaves["v"].shape, generator=generator).to(leaves["v"])
    return do, torch.randn(leaves["initial_state"].shape, generator=generator).to(leaves["initial_state"])


def run(
    leaves: Leaves,
    *,
    cu_seqlens: Tensor | None = None,
    backend: str = "chunked",
    given: tuple[Tensor, Tensor] | None = None,
) -> Leaves:
    """Outputs, final state and every gradient for the cotangents given."""
    x = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    o, state = gla(**x, cu_seqlens=cu_seqlens, output_final_state=True, backend=backend)
    assert state is not None
    gradients = torch.autograd.grad([o, state], list(x.values()), given or cotangents(leaves))
    results = {"o": o.detach(), "state": state.detach()}
    return results | {f"d{n}": g for n, g in zip(x, gradients, strict=True)}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)], ids=str
)
@pytest.mark.parametrize("starts", [[0, 400, 800], [0, 64, 333, 400, 401, 500, 800]], ids=["whole", "documents"])
def test_lower_precision(dtype: torch.dtype, tolerance: float, starts: list[int]) -> None:
    """Outputs and gradients have the inputs' dtype, states and the decays' gradients are fp32."""
    leaves, cu_seqlens = inputs(2, 400, 32, 24, dtype=dtype), torch.tensor(starts)
    results = run(leaves, cu_seqlens=cu_seqlens)
    assert {results[n].dtype for n in ("o", "dq", "dk", "dv")} == {dtype}
    assert {results[n].dtype for n in ("state", "dlog_decay", "dinitial_state")} == {torch.float32}
    wide = {n: x.double() for n, x in leaves.items()}
    do, dstate = cotangents(leaves)
    expected = run(wide, cu_seqlens=cu_seqlens, backend="reference", given=(do.double(), dstate.double()))
    assert_close(results, expected, tolerance)


def test_reference_backend_takes_half_precision() -> None:
    leaves, cu_seqlens = inputs(2, 70, 8, 12, dtype=torch.bfloat16), torch.tensor([0, 10, 70, 134, 140])
    actual = run(leaves, cu_seqlens=cu_seqlens, backend="reference")
    expected = run(leaves, cu_seqlens=cu_seqlens)
    assert {n: x.dtype for n, x in actual.items()} == {n: x.dtype for n, x in expected.items()}
    assert_close(actual, expected, 5e-3)
    automatic = run(leaves, cu_seqlens=cu_seqlens, backend="auto")
    assert all(torch.equal(x, expected[n]) for n, x in automatic.items())


def test_decays_may_be_wider_than_the_inputs() -> None:
    """fp64 decays of fp32 inputs: their gradient is fp64 too."""
    narrow = inputs(1, 40, 4, 4, dtype=torch.float32)
    actual = run(narrow | {"log_decay": narrow["log_decay"].double()})
    assert actual["dlog_decay"].dtype == torch.float64
    assert_close(actual, run(narrow), 1e-12)


@pytest.mark.parametrize("limit", [-60.0, float("inf")], ids=["as data decides", "every chunk steep"])
@pytest.mark.parametrize("starts", [[0, 6], [0, 2, 4, 6]], ids=["whole", "documents"])
def test_finite_differences(starts: list[int], limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decays, "STEEP_LOG_DECAY", limit)
    leaves: Leaves = {n: x.requires_grad_() for n, x in inputs(1, 6, 2, 3).items()}
    log_decay = leaves["log_decay"].detach().clamp(min=-5.0) - 0.1  # and a step beyond stays below 0
    leaves["log_decay"] = log_decay.requires_grad_()

    def operator(*x: Tensor) -> tuple[Tensor, Tensor]:
        named: Leaves = dict(zip(leaves, x, strict=True))
        o, state = gla(**named, output_final_state=True, cu_seqlens=torch.tensor(starts), chunk_size=4)
        assert state is not None
        return o, state

    assert torch.autograd.gradcheck(operator, tuple(leaves.values()))


@pytest.mark.parametrize("result", ["o", "state"])
def test_one_result_is_enough_for_the_backward(result: str) -> None:
    """A loss of the outputs alone, or of the final state alone, with cotangents that autograd expands."""
    leaves = inputs(2, 70, 8, 6)
    do, dstate = (
        torch.full_like(x, float(result == n)) for n, x in (("o", leaves["v"]), ("state", leaves["initial_state"]))
    )
    expected = run(leaves, backend="reference", given=(do, dstate))
    x = {n: leaf.detach().requires_grad_() for n, leaf in leaves.items()}
    o, state = gla(**x, output_final_state=True)
    assert state is not None
    (o.sum() if result == "o" else state.sum()).backward()
    for n, leaf in x.items():
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, expected[f"d{n}"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (2, 3)])
def test_strided_inputs_are_read_and_left_alone(rows: int, heads: int) -> None:
    """Slices of one projection, and head-major tensors; with one head, where a view would be contiguous."""
    leaves = inputs(rows, 50, 8, 8, heads=heads)
    expected = run(leaves)
    names = ("q", "k", "v", "log_decay")
    packed = torch.cat([leaves[n] for n in names], dim=-1)
    copy = packed.clone()
    do, dstate = cotangents(leaves)
    strided_do = do.transpose(1, 2).contiguous().transpose(1, 2)
    slices = dict(zip(names, packed.split(8, dim=-1), strict=True))
    assert_close(run(leaves | slices, given=(strided_do, dstate)), expected, 1e-14)
    head_major = {n: leaves[n].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for n in names}
    assert_close(run(leaves | head_major), expected, 1e-14)
    assert torch.equal(packed, copy) and torch.equal(strided_do, do)


def test_passes_leave_their_inputs_alone() -> None:
    """Contiguous inputs of the arithmetic's dtype, for which a load without a copy would be a view."""
    leaves = inputs(1, 16, 4, 4)
    copies = {n: x.clone() for n, x in leaves.items()}
    do, dstate = cotangents(leaves)
    q, k, v, log_decay, state = leaves.values()
    state_fwd(k, v, log_decay)
    out_fwd(q, k, v, log_decay, state)
    state_bwd(q, do, log_decay)
    grad_bwd(q, k, v, log_decay, do, state, dstate)
    assert all(torch.equal(x, copies[n]) for n, x in leaves.items())
    assert all(torch.equal(x, y) for x, y in zip((do, dstate), cotangents(leaves), strict=True))


def test_step_by_step_equals_recurrence() -> None:
    leaves = inputs(2, 70, 8, 12)
    expected = run(leaves, backend="reference")
    state, outputs = leaves["initial_state"], []
    for q_t, k_t, v_t, log_decay_t in zip(*(leaves[n].unbind(1) for n in ("q", "k", "v", "log_decay")), strict=True):
        o_t, state = recurrent_step(q_t, k_t, v_t, log_decay_t, state)
        outputs.append(o_t)
    actual = {"o": torch.stack(outputs, 1), "state": state}
    assert_close(actual, {n: expected[n] for n in actual}, 1e-10)


def test_step_keeps_the_dtypes() -> None:
    half = inputs(1, 1, 8, 12, dtype=torch.bfloat16)
    q, k, v, log_decay = (half[n][:, 0] for n in ("q", "k", "v", "log_decay"))
    o, state = recurrent_step(q, k, v, log_decay, half["initial_state"])
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)


def test_autocast_does_not_touch_the_states() -> None:
    leaves = inputs(1, 100, 16, 16, dtype=torch.float32)
    expected, (state, _) = run(leaves), state_fwd(leaves["k"], leaves["v"], leaves["log_decay"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, (state_there, _) = run(leaves), state_fwd(leaves["k"], leaves["v"], leaves["log_decay"])
    assert all(torch.equal(actual[n], expected[n]) for n in expected)
    assert torch.equal(state_there, state)


# One batch; three; three whose states would be larger than the values.
@pytest.mark.parametrize(("num_tokens", "key_width", "num_states"), [(288, 8, 0), (5000, 8, 2), (300, 512, 0)])
def test_inputs_and_few_states_are_saved_for_backward(num_tokens: int, key_width: int, num_states: int) -> None:
    leaves = {n: x.requires_grad_() for n, x in inputs(1, num_tokens, key_width, 8).items()}
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        _, state = gla(**leaves)
    assert state is None  # nobody asked for it
    kept = num_states * leaves["initial_state"].numel()
    assert sum(saved) == sum(x.numel() for x in leaves.values()) + kept

"""Lightning attention's Triton kernels on the device, in the dtypes and lengths of training: `make gpu-check`.

Correctness in bf16 is what only a GPU shows: known compilers have given wrong gradients on Hopper without an error.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightscale.kernels import lightning
from lightscale.kernels.common.backends import choose_backend
from lightscale.kernels.lightning import chunked, lightning_attention, lightning_attention_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: run `make gpu-check` on a machine that has one"),
    pytest.mark.timeout(300),  # kernels are compiled, and fp64 is slow
]
# RMSE of the difference to fp64 by RMSE; half of bf16's is the rounding of the results themselves.
Record = Callable[[str, Any], None]
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", dtype=dtype, generator=generator)


def inputs_of(rows: int, tokens: int, heads: int, K: int, V: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, the initial state, and the cotangents of the outputs and of the final state."""
    shapes = [(rows, tokens, heads, width) for width in (K, K, V)]
    q, k, v = (draw(shape, dtype, seed) for seed, shape in enumerate(shapes))
    state = (rows, heads, K, V)
    return [q, k, v, draw(state, torch.float32, 3), draw(shapes[2], dtype, 4), draw(state, torch.float32, 5)]


def gradients(
    operator: Callable[..., tuple[Tensor, Tensor | None]],
    inputs: list[Tensor],
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Outputs, final state and every gradient; everything in ``dtype`` when given."""
    *leaves, do, dstate = (x.detach().to(dtype or x.dtype) for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    names = ["dq", "dk", "dv", "dinitial_state"]
    if log_decay is not None:
        log_decay = log_decay.detach().to(dtype or log_decay.dtype).requires_grad_()
        leaves, names = [*leaves, log_decay], [*names, "dlog_decay"]
    q, k, v, state = leaves[:4]
    o, final = operator(q, k, v, log_decay, initial_state=state, cu_seqlens=cu_seqlens)
    assert final is not None
    found = torch.autograd.grad([o, final], leaves, [do, dstate])
    return {"o": o.detach(), "state": final.detach(), **dict(zip(names, found, strict=True))}


def ours(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    assert choose_backend("lightning", args[0]) == "triton"
    return lightning_attention(*args, output_final_state=True, **options)


def chunks(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    return lightning_attention(*args, output_final_state=True, backend="chunked", **options)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float, record: Record) -> None:
    errors = {name: error(found[name], expected[name]) for name in expected}
    record("errors", errors)
    assert all(e < limit for e in errors.values()), errors


CASES = {"decay": (True, False), "documents": (True, True), "no decay": (False, False)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (256, 128), (80, 48)], ids=lambda w: f"{w[0]}x{w[1]}")
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_equals_the_recurrence_in_fp64(
    dtype: torch.dtype, widths: tuple[int, int], case: str, record_property: Record
) -> None:
    with_decay, with_documents = CASES[case]
    inputs = inputs_of(2, 700, 4, *widths, dtype)
    log_decay = -torch.tensor([0.0005, 0.01, 0.1, 1.0], device="cuda") if with_decay else None
    cu_seqlens = torch.tensor([0, 3, 64, 300, 301, 700, 828, 1400], device="cuda") if with_documents else None
    expected = gradients(lightning_attention_reference, inputs, log_decay, cu_seqlens, torch.float64)
    found = gradients(ours, inputs, log_decay, cu_seqlens)
    assert_close(found, expected, LIMITS[dtype], record_property)
    again = gradients(ours, inputs, log_decay, cu_seqlens)
    assert all(torch.equal(found[name], again[name]) for name in found), "must not depend on the order of programs"


@pytest.mark.parametrize("tokens", [1, 63, 129, 8192, 65537, 2**20])
def test_any_length_in_bf16(tokens: int, record_property: Record) -> None:
    """Up to a million tokens, where the states of several splits are folded."""
    inputs = inputs_of(1, tokens, 2, 128, 128, torch.bfloat16)
    log_decay = -torch.tensor([1e-5, 0.02], device="cuda")
    expected = gradients(chunks, inputs, log_decay, None, torch.float64)
    assert_close(gradients(ours, inputs, log_decay, None), expected, LIMITS[torch.bfloat16], record_property)


@pytest.mark.xdist_group("memory")
def test_more_than_two_to_the_31_elements() -> None:
    """The last tokens of the last head, whose state forgets within a hundred tokens, against fp64 by themselves."""
    if torch.cuda.get_device_properties(0).total_memory < 70 * 2**30:
        pytest.skip("needs 70 GB of GPU memory")
    tokens, heads = 2**20, 17
    q, k, v, do = (draw((1, tokens, heads, 128), torch.bfloat16, seed) for seed in range(4))
    assert q.numel() > 2**31
    log_decay = torch.full((heads,), -0.5, device="cuda")
    o, _ = lightning.out_fwd(q, k, v, log_decay, None)
    dq, dk, dv, *_ = lightning.grad_bwd(q, k, v, log_decay, do, None, None)
    tail, settled = slice(-1000, None), slice(-800, None)
    x = [y[:, tail, -1:].double().requires_grad_() for y in (q, k, v)]
    expected, _ = lightning_attention_reference(*x, log_decay[-1:].double())
    exact = torch.autograd.grad(expected, x, do[:, tail, -1:].double())
    for found, right in zip((o, dq, dk, dv), (expected, *exact), strict=True):
        assert error(found[:, settled, -1:], right[:, 200:].detach()) < LIMITS[torch.bfloat16]


def test_passes_and_the_step() -> None:
    q, k, v, state, do, dstate = inputs_of(2, 1000, 4, 128, 128, torch.bfloat16)
    log_decay = -torch.tensor([0.001, 0.01, 0.1, 1.0], device="cuda")
    cu_seqlens = torch.tensor([0, 900, 1000, 2000], device="cuda")
    exact = [x.double() for x in (q, k, v, log_decay, state, do, dstate)]
    q64, k64, v64, decay64, state64, do64, dstate64 = exact
    pairs = [
        (lightning.state_fwd(k, v, log_decay, cu_seqlens), chunked.state_fwd(k64, v64, decay64, cu_seqlens)),
        (
            [lightning.state_bwd(q, do, log_decay, cu_seqlens)],
            [chunked.state_bwd(q64, do64, decay64, cu_seqlens)],
        ),
        (
            lightning.grad_bwd(q, k, v, log_decay, do, state, dstate, cu_seqlens)[:3],
            chunked.grad_bwd(q64, k64, v64, decay64, do64, state64, dstate64, cu_seqlens)[:3],
        ),
        (
            lightning.recurrent_step(q[:, 0], k[:, 0], v[:, 0], log_decay, state),
            chunked.recurrent_step(q64[:, 0], k64[:, 0], v64[:, 0], decay64, state64),
        ),
    ]
    for found, expected in pairs:
        for x, y in zip(found, expected, strict=True):
            assert error(x, y) < LIMITS[torch.bfloat16]


def test_compiled_and_recomputed() -> None:
    q, k, v, _, do, _ = inputs_of(1, 500, 4, 64, 64, torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    log_decay = -torch.tensor([0.001, 0.01, 0.1, 1.0], device="cuda")

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lightning_attention(q, k, v, log_decay)[0]

    expected = torch.autograd.grad(layer(*leaves), leaves, do)
    for form in (
        torch.compile(layer, fullgraph=True),
        lambda *x: checkpoint(layer, *x, use_reentrant=False),
    ):
        found = torch.autograd.grad(form(*leaves), leaves, do)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))

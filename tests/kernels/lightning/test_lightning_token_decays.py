"""Lightning attention's Triton kernels with a decay per head and token, in fp32, against the fp64 recurrence.

Strong and weak decays stand side by side: sums from a chunk's start are large then, and what counts are their small
differences.
"""

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.kernels import lightning
from lightscale.kernels.common.backends import set_default_backend
from lightscale.kernels.lightning import lightning_attention, lightning_attention_reference, token_decays, triton
from lightscale.kernels.lightning.triton import tiling

comparing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "comparing.py")))
boundaries, error, assert_close = comparing.boundaries, comparing.error, comparing.assert_close

Inputs = dict[str, Tensor]
NAMES = ("q", "k", "v", "log_decay", "initial_state")
SMALL = replace(tiling._FULL, chunk=32, tile_tokens=16, contracted=16, width=16, state_key=16, state_value=16)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "_FULL", SMALL)


def usual(noise: Tensor) -> Tensor:
    return -torch.exp(2 * noise)


# By noise (B, T, H): decays of heads and tokens.
DECAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "usual": usual,
    "none": torch.zeros_like,
    "strong": lambda noise: torch.full_like(noise, -30.0),
    "strong or none": lambda noise: torch.where(noise < 0, -30.0, 0.0),
    # Behind sums of -2400, differences of hundredths.
    "weak behind strong": lambda noise: (
        torch.where(torch.arange(noise.size(1))[:, None] // 8 % 2 == 1, -300.0, -0.01) * torch.ones_like(noise)
    ),
    "some forget everything": lambda noise: torch.where(noise < -1, -torch.inf, -noise.abs()),
}


def draw(rows: int, tokens: int, K: int, V: int, decays: str = "usual", heads: int = 1) -> Inputs:
    """Inputs of one call and the cotangents of its results, fp64."""
    generator = torch.Generator().manual_seed(tokens + K)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "q": normal(rows, tokens, heads, K),
        "k": normal(rows, tokens, heads, K),
        "v": normal(rows, tokens, heads, V),
        "log_decay": DECAYS[decays](normal(rows, tokens, heads)).float().double(),
        "initial_state": normal(rows, heads, K, V),
        "do": normal(rows, tokens, heads, V),
        "dstate": normal(rows, heads, K, V),
    }


def run(inputs: Inputs, cu_seqlens: Tensor | None, backend: str) -> dict[str, Tensor]:
    """Outputs, final state and all gradients; fp32 by Triton, fp64 by the reference."""
    dtype = torch.float32 if backend == "triton" else torch.float64
    cast = {name: x.detach().to(dtype) for name, x in inputs.items()}
    leaves = {name: cast[name].requires_grad_() for name in NAMES}
    o, state = lightning_attention(**leaves, cu_seqlens=cu_seqlens, output_final_state=True, backend=backend)
    assert state is not None
    return comparing.with_gradients({"o": o, "state": state}, [cast["do"], cast["dstate"]], leaves)


def assert_as_reference(inputs: Inputs, cu_seqlens: Tensor | None = None, tolerance: float = 1e-5) -> dict[str, Tensor]:
    found = run(inputs, cu_seqlens, "triton")
    assert_close(found, run(inputs, cu_seqlens, "reference"), tolerance)
    return found


@pytest.mark.parametrize("tokens", [0, 1, pytest.param(63, marks=pytest.mark.long), 65, 150])
def test_any_length(tokens: int) -> None:
    assert_as_reference(draw(1, tokens, 16, 24))


@pytest.mark.long
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("decays", DECAYS)
def test_any_decay(decays: str) -> None:
    """Two heads; tiles that the widths do not fill, and several of K and of V. The errors are those of rounding."""
    inputs = draw(1, 70, 12, 20, decays, heads=2)
    results = assert_as_reference(inputs, tolerance=1e-6)
    forgotten = inputs["log_decay"] == -torch.inf
    assert not results["dlog_decay"][forgotten].any()


def test_no_token_loses_its_gradient_to_cancellation() -> None:
    """Each strong decay stands between tokens that forget nothing: its gradient is e^-20 times theirs, and as exact."""
    inputs = draw(1, 60, 16, 16, "none")
    strong = torch.arange(5, 60, 7)
    inputs["log_decay"][:, strong] = -20.0
    found, right = (run(inputs, None, name)["dlog_decay"][:, strong] for name in ("triton", "reference"))
    assert right.abs().max() < 1e-5
    assert error(found, right) < 1e-5


DOCUMENTS = {
    "chunk edges": [[32, 64], [31, 65]],
    "one-token documents": [[31, 32, 33, 34], [1, 2, 3, 69]],
    "many in a chunk": [[3, 5, 6, 20, 21, 40], []],
    "every token": [list(range(70)), [50]],
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("split", [pytest.param(0, marks=pytest.mark.long), 1], ids=["one split", "splits"])
@pytest.mark.parametrize("starts", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_documents(starts: list[list[int]], split: int, chunks_per_split: Callable[[int], None]) -> None:
    """Chunks have 32 tokens here, and a split one chunk. The decay of a document's first token counts for nothing."""
    if split:
        chunks_per_split(split)
    results = assert_as_reference(draw(2, 70, 12, 16), boundaries(starts, 70))
    for row, of_row in enumerate(starts):
        firsts = [start for start in of_row if start]
        assert not results["dlog_decay"][row, firsts].any()


@pytest.mark.usefixtures("small_tiles")
def test_splits_of_several_chunks(chunks_per_split: Callable[[int], None]) -> None:
    """Two splits of two chunks and a shorter one; several tiles of the state."""
    chunks_per_split(2)
    inputs = draw(1, 140, 12, 24)
    inputs["log_decay"] /= 50  # so that states pass splits
    assert_as_reference(inputs)


@pytest.mark.usefixtures("small_tiles")
def test_chunks_of_four_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "_FULL", replace(SMALL, chunk=64))
    assert_as_reference(draw(1, 130, 12, 12), boundaries([[90]], 130))


@pytest.mark.long
def test_tiles_of_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of bf16, in fp32: chunks of 128 tokens in tiles of 64."""
    monkeypatch.setattr(tiling, "_FULL", replace(tiling._HALF, stored=torch.float32))
    assert_as_reference(draw(1, 200, 64, 64), boundaries([[20, 150]], 200))


def test_half_precision_is_converted_where_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp16, which the interpreter computes; bf16 differs by its rounding only."""
    monkeypatch.setattr(tiling, "_HALF", replace(SMALL, stored=torch.float16))
    inputs = draw(1, 70, 16, 16)
    inputs["log_decay"] /= 50  # fp16 has no e^-20
    halves = {n: inputs[n].half().requires_grad_() for n in ("q", "k", "v")}
    rest = {n: inputs[n].float().requires_grad_() for n in ("log_decay", "initial_state")}
    o, state = lightning_attention(**halves, **rest, output_final_state=True, backend="triton")
    leaves = [*halves.values(), *rest.values()]
    gradients = torch.autograd.grad([o, state], leaves, [inputs["do"].half(), inputs["dstate"].float()])
    assert state is not None
    assert [x.dtype for x in (o, state, *gradients)] == [torch.float16, torch.float32, *[x.dtype for x in leaves]]
    actual = {"o": o, "state": state} | {f"d{n}": g for n, g in zip((*halves, *rest), gradients, strict=True)}
    exact = {n: x.half().double() if n in ("q", "k", "v", "do") else x for n, x in inputs.items()}
    assert_close(actual, run(exact, None, "reference"), 2e-3)


@pytest.mark.usefixtures("small_tiles")
def test_strided_inputs() -> None:
    """Heads first in memory, a slice of a wider projection, decays that two heads share without a copy."""
    inputs = draw(2, 40, 16, 16, heads=2)
    q, k, v, log_decay = (inputs[name].float() for name in NAMES[:4])
    shared = log_decay[..., :1].requires_grad_()
    strided = [
        q.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(),
        torch.cat([k, torch.full_like(k, torch.nan)], -1)[..., :16].requires_grad_(),
        v.requires_grad_(),
    ]
    o, _ = lightning_attention(*strided, shared.expand(2, 40, 2), backend="triton")
    gradients = torch.autograd.grad(o.sum(), [*strided, shared])
    exact = [x.detach().double().requires_grad_() for x in (*strided, shared)]
    expected, _ = lightning_attention_reference(*exact[:3], exact[3].expand(2, 40, 2))
    exact_gradients = torch.autograd.grad(expected.sum(), exact)
    for found, right in zip((o, *gradients), (expected, *exact_gradients), strict=True):
        assert error(found, right) < 1e-5


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("small_tiles")
def test_overflow_stays_in_its_document() -> None:
    """The first document's state and the third one's cotangents overflow; the second is as if it were alone."""
    inputs = draw(1, 150, 8, 8)
    q, k, v, do = (inputs[name].float() for name in ("q", "k", "v", "do"))
    log_decay = inputs["log_decay"].float() / 50
    k[:, 5:40] = v[:, 5:40] = 1e30
    q[:, 115:] = do[:, 115:] = 1e30
    leaves = [x.requires_grad_() for x in (q, k, v, log_decay)]
    o, _ = lightning_attention(*leaves, cu_seqlens=torch.tensor([0, 45, 100, 150]), backend="triton")
    found = [o, *torch.autograd.grad(o, leaves, do)]
    alone = [x.detach()[:, 45:100].double().requires_grad_() for x in leaves]
    expected, _ = lightning_attention_reference(*alone)
    right = [expected, *torch.autograd.grad(expected, alone, do[:, 45:100].double())]
    assert not found[4].isfinite().all()
    for x, y in zip(found, right, strict=True):
        assert error(x[:, 45:100], y) < 1e-5


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("split", [pytest.param(0, marks=pytest.mark.long), 2], ids=["one split", "splits"])
@pytest.mark.parametrize("starts", [None, [[20, 90], []]], ids=["whole", "documents"])
def test_passes(starts: list[list[int]] | None, split: int, chunks_per_split: Callable[[int], None]) -> None:
    """What sequence parallelism calls, against the chunked passes in fp64."""
    if split:
        chunks_per_split(split)
    inputs = draw(2, 100, 16, 12)
    inputs["log_decay"] /= 50
    cu_seqlens = None if starts is None else boundaries(starts, 100)

    def results_of(module: Any, dtype: torch.dtype) -> list[Tensor]:
        x = {name: x.to(dtype) for name, x in inputs.items()}
        q, k, v, do, state, dstate = (x[n] for n in ("q", "k", "v", "do", "initial_state", "dstate"))
        decay = x["log_decay"]
        gradients = module.grad_bwd(q, k, v, decay, do, state, dstate, cu_seqlens, with_decay=True)
        return [
            *module.state_fwd(k, v, decay, cu_seqlens),
            *module.out_fwd(q, k, v, decay, state, cu_seqlens),
            module.out_fwd(q, k, v, decay, None, cu_seqlens)[0],
            module.state_bwd(q, do, decay, cu_seqlens),
            *(x for x in gradients if x is not None),
        ]

    for found, right in zip(results_of(triton, torch.float32), results_of(token_decays, torch.float64), strict=True):
        assert error(found, right) < 1e-5


def test_passes_of_an_empty_row() -> None:
    k = torch.ones(2, 0, 3, 4)
    for module in (triton, token_decays):
        local, through = module.state_fwd(k, k, -torch.ones(2, 0, 3), torch.tensor([0]))
        assert local.shape == (2, 3, 4, 4) and not local.any() and torch.equal(through, torch.ones(2, 3))


@pytest.mark.usefixtures("small_tiles")
def test_one_token_after_another() -> None:
    """In one launch each, as generation calls it."""
    inputs = {name: x.float() for name, x in draw(2, 5, 12, 20, heads=2).items()}
    expected, state = run(inputs, None, "reference"), inputs["initial_state"]
    set_default_backend("triton")
    try:
        for t in range(5):
            o, state = lightning.recurrent_step(*(inputs[name][:, t] for name in NAMES[:4]), state)
            assert error(o, expected["o"][:, t]) < 1e-6
    finally:
        set_default_backend("auto")
    assert error(state, expected["state"]) < 1e-6


@pytest.mark.usefixtures("small_tiles")
def test_registration() -> None:
    """Torch's own checks: what is declared of shapes, dtypes and aliases is true."""
    inputs = draw(1, 20, 16, 16, heads=2)
    q, k, v, log_decay, state = (inputs[name].float() for name in NAMES)
    tests = ("test_schema", "test_faketensor")
    for learned in (False, True):
        arguments = (q, k, v, log_decay, None, None, v, state, None, None, learned, False)
        torch.library.opcheck(triton._gradients, arguments, test_utils=tests)
    torch.library.opcheck(triton._state_fwd, (k, v, log_decay, None, None, None), test_utils=tests)
    torch.library.opcheck(triton._state_bwd, (q, v, log_decay, None, None, None), test_utils=tests)

"""LION's Triton kernels, interpreted in fp32, against the fp64 recurrences.

The interpreter takes milliseconds for a program, so shapes and tiles are small. Half precision is tested on GPUs
(tests/gpu): the interpreter computes bf16 wrongly.
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

from lightscale.kernels.lightning.triton import tiling
from lightscale.kernels.lion import LionOutputs, LionState, chunked, lion, triton

comparing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "comparing.py")))
boundaries, error, assert_close = comparing.boundaries, comparing.error, comparing.assert_close

Inputs = dict[str, Tensor | None]
SMALL = replace(tiling._FULL, chunk=32, tile_tokens=16, contracted=16, width=32, state_key=16, state_value=16)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "_FULL", SMALL)


def draw(rows: int, tokens: int, K: int, V: int, *, decays: str = "by token", normalize: bool = True) -> Inputs:
    """Inputs of one call and the cotangents of its results, fp64."""
    generator = torch.Generator().manual_seed(tokens + K)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs: Inputs = {
        "q": normal(rows, tokens, 1, K).abs(),
        "k": normal(rows, tokens, 1, K).abs(),
        "v": normal(rows, tokens, 1, V),
        "log_decay": -torch.exp(normal(rows, tokens, 1)).float().double(),
        "do": normal(rows, tokens, 1, V),
        **{name: normal(rows, 1, K, V + normalize) for name in ("prefix", "suffix", "dprefix", "dsuffix")},
    }
    if decays != "by token":
        inputs["log_decay"] = torch.tensor([-0.25], dtype=torch.float64) if decays == "by head" else None
    return inputs


def run(inputs: Inputs, backend: str, **options: Any) -> dict[str, Tensor]:
    """Outputs, final states and all gradients; fp32 by Triton, fp64 by the recurrences."""
    dtype = torch.float32 if backend == "triton" else torch.float64
    cast = {name: None if x is None else x.detach().to(dtype) for name, x in inputs.items()}
    leaves = {n: x.requires_grad_() for n, x in cast.items() if x is not None and not n.startswith("d")}
    given = {name: leaves.get(name) for name in ("q", "k", "v", "log_decay")}
    state = LionState(leaves["prefix"], leaves["suffix"])
    o, leaving = lion(**given, initial_state=state, output_final_state=True, backend=backend, eps=1e-3, **options)  # type: ignore[arg-type]
    assert leaving is not None
    results = {"o": o, **{f"leaving {name}": x for name, x in leaving._asdict().items()}}
    return comparing.with_gradients(results, [cast["do"], cast["dprefix"], cast["dsuffix"]], leaves)


def assert_as_reference(inputs: Inputs, **options: Any) -> None:
    assert_close(run(inputs, "triton", **options), run(inputs, "reference", **options))


@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_any_length(tokens: int) -> None:
    assert_as_reference(draw(1, tokens, 16, 24))


@pytest.mark.parametrize(
    ("decays", "normalize", "gate"),
    [("by token", True, "leave"), ("by token", True, "enter"), ("by head", False, "leave"), ("none", True, "enter")],
    ids=["by token", "by token enter", "by head unscaled", "none enter"],
)
def test_any_decay_width_and_documents(decays: str, normalize: bool, gate: str) -> None:
    """Tiles that the widths do not fill, and several tiles of K and of V."""
    inputs = draw(2, 45, 20, 20, decays=decays, normalize=normalize)
    assert_as_reference(inputs, gate=gate, normalize=normalize, cu_seqlens=boundaries([[20, 32, 33], [5]], 45))


@pytest.mark.long
def test_splits(chunks_per_split: Callable[[int], None]) -> None:
    """Two splits of two chunks and a shorter one, cut by documents in one row only."""
    chunks_per_split(2)
    assert_as_reference(draw(2, 130, 8, 12), cu_seqlens=boundaries([[], [20, 64, 70]], 130))


def test_tiles_of_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of bf16, in fp32: chunks of 128 tokens in tiles of 64."""
    monkeypatch.setattr(tiling, "_FULL", replace(tiling._HALF, stored=torch.float32))
    assert_as_reference(draw(1, 200, 64, 64))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_half_precision_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp16, which the interpreter computes; its gradients are made in fp32."""
    monkeypatch.setattr(tiling, "_HALF", replace(SMALL, stored=torch.float16))
    inputs = {n: x.half() for n in ("q", "k", "v", "do") if (x := draw(1, 40, 16, 16)[n]) is not None}
    given = [inputs["q"], torch.cat([inputs["k"], inputs["k"] * torch.nan], -1)[..., :16], inputs["v"]]
    log_decay = torch.full((1, 40, 1), -0.2)
    found = []
    for backend, dtype in (("triton", torch.float16), ("reference", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in given]
        assert dtype == torch.float64 or not leaves[1].is_contiguous()
        o, _ = lion(*leaves, log_decay, backend=backend)
        gradients = torch.autograd.grad(o, leaves, inputs["do"].to(dtype))
        assert {x.dtype for x in (o, *gradients)} == {dtype}
        found.append({str(n): x.detach() for n, x in enumerate((o, *gradients))})
    assert_close(found[0], found[1], 2e-3)


def test_passes() -> None:
    """What sequence parallelism calls, against the chunked passes in fp64."""
    inputs = draw(2, 50, 16, 12)
    cu_seqlens = boundaries([[20, 40], []], 50)

    def results_of(module: Any, dtype: torch.dtype) -> list[Tensor]:
        x = {name: None if y is None else y.to(dtype) for name, y in inputs.items()}
        q, k, v, decay, do = (x[n] for n in ("q", "k", "v", "log_decay", "do"))
        state, dstate = (LionState(x[d + "prefix"], x[d + "suffix"]) for d in ("", "d"))
        local, through = module.state_fwd(k, v, decay, cu_seqlens)
        outputs, leaving = module.out_fwd(q, k, v, decay, state, cu_seqlens, eps=1e-3)
        own = module.state_bwd(q, do, outputs, decay, cu_seqlens)
        gradients = module.grad_bwd(q, k, v, decay, do, outputs, state, lambda: dstate, cu_seqlens, with_decay=True)
        return [*local, through, *outputs, *leaving, *own, *gradients[:4], *gradients.state]

    for found, right in zip(results_of(triton, torch.float32), results_of(chunked, torch.float64), strict=True):
        assert error(found, right) < 1e-5


def test_passes_of_an_empty_row() -> None:
    k = torch.ones(2, 0, 3, 4)
    local, through = triton.state_fwd(k, k, -torch.ones(3), torch.tensor([0]))
    assert local.suffix.shape == (2, 3, 4, 5) and not torch.stack(local).any()
    assert torch.equal(through, torch.ones(2, 3))
    assert not torch.stack(triton.state_bwd(k, k, LionOutputs(k, torch.ones(2, 0, 3)), None)).any()


def test_torch_compile_and_registration() -> None:
    """Compiled as one graph; and torch's own checks that what is declared of shapes, dtypes and gradients is true."""
    inputs = draw(1, 20, 16, 16)
    leaves = [x.float().requires_grad_() for n in ("q", "k", "v", "log_decay") if (x := inputs[n]) is not None]

    def call(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        return lion(q, k, v.sigmoid(), log_decay, backend="triton")[0].sin().sum()

    expected = torch.autograd.grad(call(*leaves), leaves)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(*leaves), leaves)
    assert all(error(x, y) < 1e-6 for x, y in zip(found, expected, strict=True))

    q, k, v, log_decay = (x.detach() for x in leaves)
    tests = ("test_schema", "test_faketensor")
    for normalize in (True, False):
        arguments: tuple[Any, ...] = (q, k, v, log_decay, None, None, None, "leave", normalize, 0.0)
        torch.library.opcheck(triton._out_fwd, arguments, test_utils=tests)
        normalizer = torch.ones(1, 20, 1) if normalize else None
        arguments = (q, k, v, log_decay, v, v, normalizer, None, None, None, None, None, "enter", normalize)
        torch.library.opcheck(triton._gradients, arguments, test_utils=tests)

"""Gated linear attention's Triton kernels, interpreted in fp32, against the fp64 recurrence.

The interpreter takes milliseconds for a program, so shapes and most tiles are small. Half precision is tested on GPUs
(tests/gpu): the interpreter computes bf16 wrongly.
"""

import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint

from lightscale.errors import UserError
from lightscale.kernels import gla as package
from lightscale.kernels.common.backends import choose_backend, set_default_backend
from lightscale.kernels.gla import chunked, gla, gla_reference, triton
from lightscale.kernels.gla.triton import passes, tiling

comparing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "comparing.py")))
boundaries, error, assert_close = comparing.boundaries, comparing.error, comparing.assert_close

Inputs = dict[str, Tensor]
NAMES = ("q", "k", "v", "log_decay", "initial_state")
SMALL = replace(
    tiling._FULL,
    chunk=16,
    prepared=16,
    state_key=16,
    state_value=16,
    contracted=16,
    width=16,
    gradient=16,
    gradient_value=16,
)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "_FULL", SMALL)


def logs_of(kind: str, noise: Tensor, generator: torch.Generator) -> Tensor:
    """Log decays of one kind."""
    usual, a_tenth = logsigmoid(noise + 1), torch.rand(noise.shape, generator=generator) < 0.1
    known = {
        "usual": usual,
        "f = 1": torch.zeros_like(noise),
        "f near 1": -1e-7 * noise.square(),
        "strong": torch.full_like(noise, -20.0),
        "very strong": -80.0 + noise.clamp(-3, 3),
        "strong and weak": logsigmoid(100 * noise),
        "forgets": usual.masked_fill(a_tenth, -1e4),
        "forgets all": usual.masked_fill(a_tenth, -float("inf")),
    }
    return known[kind]


KINDS = ("usual", "f = 1", "f near 1", "strong", "very strong", "strong and weak", "forgets", "forgets all")


def draw(rows: int, tokens: int, K: int, V: int, *, kinds: tuple[str, ...] = ("usual",)) -> Inputs:
    """Inputs of one call, fp64, a head for each kind of decay."""
    generator = torch.Generator().manual_seed(tokens + K)
    heads = len(kinds)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "q": normal(rows, tokens, heads, K),
        "k": normal(rows, tokens, heads, K),
        "v": normal(rows, tokens, heads, V),
        # In fp32: at strong decays its rounding alone would be an error of 1e-6.
        "log_decay": torch.stack([logs_of(kind, normal(rows, tokens, K), generator) for kind in kinds], 2).float(),
        "initial_state": normal(rows, heads, K, V),
        "do": normal(rows, tokens, heads, V),
        "dstate": normal(rows, heads, K, V),
    }


def run(inputs: Inputs, cu_seqlens: Tensor | None, backend: str) -> dict[str, Tensor]:
    """Outputs, final state and all gradients; fp32 by Triton, fp64 by the reference."""
    dtype = torch.float32 if backend == "triton" else torch.float64
    cast = {name: x.detach().to(dtype) for name, x in inputs.items()}
    leaves: dict[str, Any] = {name: cast[name].requires_grad_() for name in NAMES}
    o, state = gla(**leaves, cu_seqlens=cu_seqlens, output_final_state=True, backend=backend)
    assert state is not None
    cotangents = {name: cast[f"d{name}"] for name in ("o", "state") if f"d{name}" in cast}
    used = {name: result for name, result in (("o", o), ("state", state)) if name in cotangents}
    return comparing.with_gradients(used, list(cotangents.values()), leaves)


def assert_as_reference(inputs: Inputs, cu_seqlens: Tensor | None = None) -> None:
    assert_close(run(inputs, cu_seqlens, "triton"), run(inputs, cu_seqlens, "reference"))


@pytest.mark.parametrize("tokens", [0, 1, 15, 33, 70])
def test_any_length(tokens: int) -> None:
    assert_as_reference(draw(1, tokens, 16, 24))


@pytest.mark.parametrize("unused", ["do", "dstate"])
def test_a_result_that_is_not_used(unused: str) -> None:
    inputs = draw(1, 33, 16, 24)
    del inputs[unused]
    assert_as_reference(inputs)


@pytest.mark.parametrize("widths", [(60, 24), (16, 100)], ids=lambda w: f"{w[0]}x{w[1]}")
def test_any_widths(widths: tuple[int, int]) -> None:
    """Tiles that the widths do not fill, and several tiles of K and of V."""
    assert_as_reference(draw(1, 40, *widths))


@pytest.mark.usefixtures("small_tiles")
def test_heads_differ() -> None:
    """Rows and heads at once, with decays of their own."""
    assert_as_reference(draw(2, 20, 16, 16, kinds=("usual", "strong")))


@pytest.mark.parametrize("kind", KINDS)
def test_any_decay(kind: str) -> None:
    """One head at a time, so that no head's error hides behind another's magnitude."""
    inputs = draw(1, 40, 12, 12, kinds=(kind,))
    results = run(inputs, None, "triton")
    assert_close(results, run(inputs, None, "reference"))
    assert not results["dlog_decay"][inputs["log_decay"] < -1000].any()


def test_zero_decay_factor_forgets_everything() -> None:
    inputs = draw(1, 40, 16, 16)
    inputs["log_decay"].fill_(-float("inf"))
    results = run(inputs, None, "triton")
    assert error(results["o"], (inputs["q"] * inputs["k"]).sum(-1, keepdim=True) * inputs["v"]) < 1e-6
    assert all(x.isfinite().all() for x in results.values())
    assert not results["dlog_decay"].any() and not results["dinitial_state"].any()


DOCUMENTS = {
    "chunk edges": [[16, 32], [15, 33]],
    "one-token documents": [[15, 16, 17, 18], [1, 2, 3, 36]],
    "many in a chunk": [[3, 5, 6, 20, 21, 30], []],
    "every token": [list(range(37)), [25]],
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("starts", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_documents(starts: list[list[int]], chunks_per_split: Callable[[int], None]) -> None:
    """Chunks have 16 tokens here, and a split one chunk. What no decay separates has a gradient of exactly 0."""
    chunks_per_split(1)
    inputs, cu_seqlens = draw(2, 37, 12, 16), boundaries(starts, 37)
    results = run(inputs, cu_seqlens, "triton")
    assert_close(results, run(inputs, cu_seqlens, "reference"))
    assert all(not results["dlog_decay"][row, t].any() for row, of_row in enumerate(starts) for t in of_row if t)


@pytest.mark.usefixtures("small_tiles")
def test_splits_of_several_chunks(chunks_per_split: Callable[[int], None]) -> None:
    """Two splits of two chunks and a shorter one; two tiles of the state."""
    chunks_per_split(2)
    assert_as_reference(draw(1, 70, 20, 16, kinds=("f near 1",)))


def test_tiles_of_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of bf16, in fp32: chunks of 64 tokens."""
    monkeypatch.setattr(tiling, "_FULL", replace(tiling._HALF, stored=torch.float32))
    assert_as_reference(draw(1, 100, 64, 64), boundaries([[20, 75]], 100))


def test_half_precision_is_converted_where_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp16, which the interpreter computes; bf16 differs by its rounding only."""
    monkeypatch.setattr(tiling, "_HALF", replace(SMALL, stored=torch.float16))
    inputs = {n: x.half().double() if n in ("q", "k", "v", "do") else x for n, x in draw(1, 37, 16, 16).items()}
    leaves = [inputs[n].half().requires_grad_() for n in ("q", "k", "v")]
    leaves += [inputs[n].float().requires_grad_() for n in ("log_decay", "initial_state")]
    q, k, v, log_decay, initial_state = leaves
    o, state = gla(q, k, v, log_decay, initial_state=initial_state, output_final_state=True, backend="triton")
    assert state is not None
    found = torch.autograd.grad([o, state], leaves, [inputs["do"].half(), inputs["dstate"].float()])
    assert [x.dtype for x in (o, state, *found)] == [torch.float16, torch.float32, *[x.dtype for x in leaves]]
    actual = {"o": o, "state": state} | {f"d{n}": g for n, g in zip(NAMES, found, strict=True)}
    assert_close(actual, run(inputs, None, "reference"), 2e-3)


@pytest.mark.usefixtures("small_tiles")
def test_strided_inputs() -> None:
    """Heads first in memory, slices of a wider projection, every second value, a cotangent without memory."""
    inputs = draw(2, 20, 16, 16, kinds=("usual", "strong"))
    q, k, v, log_decay = (inputs[n].float() for n in ("q", "k", "v", "log_decay"))
    nan = torch.full_like(k, torch.nan)
    strided = [
        q.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(),
        torch.cat([k, nan], -1)[..., :16].requires_grad_(),
        v.repeat_interleave(2, -1)[..., ::2].requires_grad_(),
        log_decay.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0).requires_grad_(),
    ]
    assert not any(x.is_contiguous() for x in strided)
    o, _ = gla(*strided, backend="triton")
    found = torch.autograd.grad(o.sum(), strided)
    exact = [x.detach().double().requires_grad_() for x in strided]
    expected, _ = gla_reference(*exact)
    for x, right in zip((o, *found), (expected, *torch.autograd.grad(expected.sum(), exact)), strict=True):
        assert error(x, right) < 1e-5


@pytest.mark.usefixtures("small_tiles")
def test_overflow_stays_in_its_document() -> None:
    """The first document's state and the third one's cotangents overflow; the second is as if it were alone."""
    inputs = draw(1, 75, 8, 8)
    q, k, v, log_decay, do = (inputs[n].float() for n in ("q", "k", "v", "log_decay", "do"))
    k[:, 5:22] = v[:, 5:22] = 1e30
    q[:, 57:] = do[:, 57:] = 1e30
    leaves = [x.requires_grad_() for x in (q, k, v, log_decay)]
    o, _ = gla(*leaves, cu_seqlens=torch.tensor([0, 22, 50, 75]), backend="triton")
    found = [o, *torch.autograd.grad(o, leaves, do)]
    alone = [x.detach()[:, 22:50].double().requires_grad_() for x in leaves]
    expected, _ = gla_reference(*alone)
    right = [expected, *torch.autograd.grad(expected, alone, do[:, 22:50].double())]
    assert not any(x.isfinite().all() for x in (o, found[2], found[3], found[4]))
    for x, y in zip(found, right, strict=True):
        assert error(x[:, 22:50], y) < 1e-5


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("starts", "split"), [(None, 0), ([[10, 30], []], 0), ([[10], [33]], 2)], ids=["whole", "documents", "splits"]
)
def test_passes(starts: list[list[int]] | None, split: int, chunks_per_split: Callable[[int], None]) -> None:
    """What sequence parallelism calls, against the chunked passes in fp64."""
    if split:
        chunks_per_split(split)
    inputs = draw(2, 36, 16, 12)
    cu_seqlens = None if starts is None else boundaries(starts, 36)

    def results_of(module: Any, dtype: torch.dtype) -> list[Tensor]:
        q, k, v, decay, state, do, dstate = (x.to(dtype) for x in inputs.values())
        return [
            *module.state_fwd(k, v, decay, cu_seqlens),
            *module.out_fwd(q, k, v, decay, state, cu_seqlens),
            *module.out_fwd(q, k, v, decay, None, cu_seqlens),
            module.state_bwd(q, do, decay, cu_seqlens),
            *module.grad_bwd(q, k, v, decay, do, state, dstate, cu_seqlens),
            *module.grad_bwd(q, k, v, decay, do, None, None, cu_seqlens),
        ]

    for found, right in zip(results_of(triton, torch.float32), results_of(chunked, torch.float64), strict=True):
        assert error(found, right) < 1e-5


def test_decays_may_be_wider_than_the_inputs() -> None:
    """fp64 decays of fp32 inputs: their gradient is fp64 too."""
    q, k, v, decay, state, do, dstate = (x.float() for x in draw(1, 20, 16, 16).values())
    found = triton.grad_bwd(q, k, v, decay.double(), do, state, dstate)
    assert found[3].dtype == torch.float64
    assert all(
        torch.equal(x, y) for x, y in zip(found, triton.grad_bwd(q, k, v, decay, do, state, dstate), strict=True)
    )


def test_passes_of_an_empty_row() -> None:
    k = torch.ones(2, 0, 3, 4)
    local, through = triton.state_fwd(k, k, k, torch.tensor([0]))
    assert local.shape == (2, 3, 4, 4) and not local.any() and torch.equal(through, torch.ones(2, 3, 4))
    assert not triton.state_bwd(k, k, k).any()


def test_recurrent_step() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, noise = (torch.randn(2, 2, 24, generator=generator) for _ in range(3))
    v, state = torch.randn(2, 2, 40, generator=generator), torch.randn(2, 2, 24, 40, generator=generator)
    log_decay = logsigmoid(noise)
    found = triton.recurrent_step(q, k, v, log_decay, state)
    exact = [x.double() for x in (q, k, v, log_decay, state)]
    for x, y in zip(found, chunked.recurrent_step(*exact), strict=True):
        assert error(x, y) < 1e-6


def small_call() -> tuple[list[Tensor], Callable[..., Tensor]]:
    inputs = draw(1, 20, 16, 16)

    def call(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> Tensor:
        decay = -log_decay.square()
        o, final = gla(q, k, v.sigmoid(), decay, initial_state=state, output_final_state=True, backend="triton")
        assert final is not None
        return o.sin().sum() + final.sin().sum()

    return [inputs[name].float().requires_grad_() for name in NAMES], call


@pytest.mark.usefixtures("small_tiles")
def test_recomputation_and_torch_compile_give_the_same() -> None:
    """Compiled as one graph, forward and backward: the operator is called in it and not looked into."""
    leaves, call = small_call()
    expected = torch.autograd.grad(call(*leaves), leaves)
    for reentrant in (False, True):
        for leaf in leaves:
            leaf.grad = None
        checkpoint(call, *leaves, use_reentrant=reentrant).backward()
        assert all(x.grad is not None and torch.equal(x.grad, g) for x, g in zip(leaves, expected, strict=True))
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(*leaves), leaves)
    assert all(error(x, y) < 1e-6 for x, y in zip(found, expected, strict=True))


@pytest.mark.usefixtures("small_tiles")
def test_registration() -> None:
    """Torch's own checks: what is declared of shapes, dtypes, aliases and gradients is true."""
    q, k, v, log_decay, state = small_call()[0]
    torch.library.opcheck(triton._out_fwd, (q, k, v, log_decay, state, None))
    q, k, v, log_decay, state = (x.detach() for x in (q, k, v, log_decay, state))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(triton._gradients, (q, k, v, log_decay, v, state, None, None), test_utils=tests)
    torch.library.opcheck(triton._state_fwd, (k, v, log_decay, None), test_utils=tests)
    torch.library.opcheck(triton._state_bwd, (q, v, log_decay, None), test_utils=tests)


@pytest.fixture
def default_backend() -> Iterator[Callable[[str], None]]:
    yield set_default_backend
    set_default_backend("auto")


def test_choice_of_the_backend(default_backend: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1, 3, 1, 16)
    assert choose_backend("gla", x) == "chunked"
    assert choose_backend("gla", x, "triton") == "triton"
    default_backend("triton")
    assert choose_backend("gla", x) == "triton"
    assert choose_backend("gla", x, "reference") == "reference"
    with pytest.raises(UserError, match=r"gla: backend 'triton' supports fp16, bf16 and fp32, not torch\.float64"):
        choose_backend("gla", x.double())
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(UserError, match="'triton' needs a GPU, but the inputs are on cpu"):
        choose_backend("gla", x)


@pytest.mark.usefixtures("small_tiles")
def test_passes_follow_the_setting(default_backend: Callable[[str], None]) -> None:
    q, k, v, decay, state, do, dstate = (x.float() for x in draw(1, 20, 16, 16).values())
    q0, k0, v0, decay0 = (x[:, 0] for x in (q, k, v, decay))

    def results_of(module: Any) -> list[Tensor]:
        return [
            *module.state_fwd(k, v, decay),
            *module.out_fwd(q, k, v, decay, None),
            module.state_bwd(q, do, decay),
            *module.grad_bwd(q, k, v, decay, do, state, dstate),
            *module.recurrent_step(q0, k0, v0, decay0, state),
        ]

    for name, module in (("auto", chunked), ("triton", triton)):
        default_backend(name)
        assert all(torch.equal(x, y) for x, y in zip(results_of(package), results_of(module), strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(results_of(chunked), results_of(triton), strict=True))
    # A gradient through one step needs the form that autograd knows.
    o, _ = package.recurrent_step(q0.requires_grad_(), k0, v0, decay0, state)
    assert o.requires_grad


@pytest.mark.usefixtures("small_tiles")
def test_only_the_inputs_are_saved_for_backward() -> None:
    q, k, v, log_decay, _ = small_call()[0]
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        gla(q, k, v, log_decay, backend="triton")
    assert sum(saved) == sum(x.numel() for x in (q, k, v, log_decay))


@pytest.mark.parametrize("chunk", [16, 64])
def test_paths_are_those_of_the_recurrence(chunk: int) -> None:
    """Any pair of tokens is parted by one border, and the two paths to it are the tokens between them."""
    paths = passes.paths_on(torch.device("cpu"), chunk, torch.float32).bool()
    levels = chunk.bit_length() - 1
    for i in range(chunk):
        assert torch.equal(paths[levels + 1, i], torch.arange(chunk) <= i)
        assert torch.equal(paths[levels, i], torch.arange(chunk) > i)
        for j in range(i):
            level = (i ^ j).bit_length() - 1
            between = (torch.arange(chunk) > j) & (torch.arange(chunk) <= i)
            assert torch.equal(paths[level, i] ^ paths[level, j], between)

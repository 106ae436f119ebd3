"""Lightning attention's Triton kernels, interpreted in fp32, against the fp64 recurrence.

The interpreter takes milliseconds for a program, so shapes are small, and tiles too where a test is about many tiles.
Half precision is tested on GPUs (tests/gpu): the interpreter computes bf16 wrongly.
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
from torch.utils.checkpoint import checkpoint

from lightscale.errors import UserError
from lightscale.kernels import lightning
from lightscale.kernels.common.angles import Angles, angles_of
from lightscale.kernels.common.backends import choose_backend, set_default_backend
from lightscale.kernels.lightning import chunked, lightning_attention, lightning_attention_reference, triton
from lightscale.kernels.lightning.triton import tiling

drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "drawing.py")))
comparing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "comparing.py")))
boundaries, error, assert_close = comparing.boundaries, comparing.error, comparing.assert_close

Inputs = dict[str, Tensor | None]
NAMES = ("q", "k", "v", "log_decay", "theta", "initial_state")
SMALL = replace(tiling._FULL, chunk=32, tile_tokens=16, contracted=16, width=16, state_key=16, state_value=16)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "_FULL", SMALL)


def draw(
    rows: int,
    tokens: int,
    K: int,
    V: int,
    *,
    decays: tuple[float, ...] | None = (-0.05,),
    heads: int = 1,
    first_position: int | None = None,
) -> Inputs:
    """Inputs of one call, fp64; with ``first_position`` the angles of LRPE too, whose K is half of the states'."""
    generator = torch.Generator().manual_seed(tokens + K)
    heads = heads if decays is None else len(decays)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "q": normal(rows, tokens, heads, K),
        "k": normal(rows, tokens, heads, K),
        "v": normal(rows, tokens, heads, V),
        "log_decay": None if decays is None else torch.tensor(decays, dtype=torch.float64),
        "initial_state": normal(rows, heads, K if first_position is None else 2 * K, V),
        "do": normal(rows, tokens, heads, V),
        "dstate": normal(rows, heads, K if first_position is None else 2 * K, V),
        "theta": None if first_position is None else normal(heads, K).float().double(),
        "positions": None if first_position is None else (first_position + torch.arange(tokens)).repeat(rows, 1),
    }


def run(inputs: Inputs, cu_seqlens: Tensor | None, backend: str) -> dict[str, Tensor]:
    """Outputs, final state and all gradients; fp32 by Triton, fp64 by the reference."""
    dtype = torch.float32 if backend == "triton" else torch.float64
    cast = {name: None if x is None else x.detach().to(dtype) for name, x in inputs.items()}
    leaves = {name: x.requires_grad_() for name in NAMES if (x := cast[name]) is not None}
    given = {name: x for name, x in leaves.items() if name != "theta"}
    angles = angles_of(leaves.get("theta"), inputs["positions"])
    o, state = lightning_attention(
        **given, angles=angles, cu_seqlens=cu_seqlens, output_final_state=True, backend=backend
    )
    assert state is not None
    cotangents = {name: cast[f"d{name}"] for name in ("o", "state") if f"d{name}" in cast}
    used = {name: result for name, result in (("o", o), ("state", state)) if name in cotangents}
    return comparing.with_gradients(used, list(cotangents.values()), leaves)


def assert_as_reference(inputs: Inputs, cu_seqlens: Tensor | None = None) -> None:
    assert_close(run(inputs, cu_seqlens, "triton"), run(inputs, cu_seqlens, "reference"))


@pytest.mark.parametrize("tokens", [0, 1, 15, 63, 65, 150])
def test_any_length(tokens: int) -> None:
    assert_as_reference(draw(1, tokens, 16, 24))


@pytest.mark.parametrize("unused", ["do", "dstate"])
def test_a_result_that_is_not_used(unused: str) -> None:
    inputs = draw(1, 65, 16, 24)
    del inputs[unused]
    assert_as_reference(inputs)


@pytest.mark.parametrize("widths", [(60, 24), (80, 16), (16, 100)], ids=lambda w: f"{w[0]}x{w[1]}")
def test_any_widths(widths: tuple[int, int]) -> None:
    """Tiles that the widths do not fill, and several tiles of K and of V."""
    assert_as_reference(draw(1, 70, *widths))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("decays", [None, (0.0, -1e-4, -0.3), (-20.0,)], ids=["none", "by head", "strong"])
def test_any_decay(decays: tuple[float, ...] | None) -> None:
    assert_as_reference(draw(1, 40, 12, 12, decays=decays))


def test_decays_of_tokens() -> None:
    inputs = draw(1, 40, 16, 16)
    noise = torch.randn(1, 40, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_as_reference({**inputs, "log_decay": -torch.exp(2 * noise)}, boundaries([[25]], 40))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", ["heads", "tokens", "tokens, angles", "none, angles"])
def test_a_column_beside_the_tiles(kind: str, chunks_per_split: Callable[[int], None]) -> None:
    """Values of 33 columns are two tiles and a column; rows of two splits."""
    chunks_per_split(1)
    heads = 2 if kind == "heads" else 1
    decays = None if "none" in kind else (-0.05, -0.3)[:heads]
    inputs = draw(1, 45, 12, 33, decays=decays, heads=heads, first_position=3 if "angles" in kind else None)
    if "tokens" in kind:
        noise = torch.randn(1, 45, heads, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        inputs["log_decay"] = -torch.exp(2 * noise)
    assert_as_reference(inputs, None if "angles" in kind else boundaries([[25]], 45))


@pytest.mark.parametrize("tokens", [0, 1, 63, 150])
def test_angles_at_any_length(tokens: int) -> None:
    assert_as_reference(draw(1, tokens, 16, 24, first_position=0))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("widths", "decays"),
    [((12, 12), (-0.001, -0.3)), ((20, 12), None), ((20, 20), (-0.05,))],
    ids=["12x12 by head", "20x12 undecayed", "20x20"],
)
def test_angles_at_any_widths(widths: tuple[int, int], decays: tuple[float, ...] | None) -> None:
    """Tiles that the halves do not fill, and several tiles of a half."""
    assert_as_reference(draw(1, 40, *widths, decays=decays, first_position=3))


def restart_positions(inputs: Inputs, starts: list[list[int]]) -> None:
    positions = inputs["positions"]
    assert positions is not None
    for of_row, documents in zip(positions, starts, strict=True):
        for start in documents:
            of_row[start:] = torch.arange(of_row.numel() - start)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", ["chunk edges", "many in a chunk"])
def test_angles_of_documents(name: str, chunks_per_split: Callable[[int], None]) -> None:
    """A split has one chunk."""
    chunks_per_split(1)
    inputs = draw(2, 70, 8, 8, first_position=5)
    restart_positions(inputs, DOCUMENTS[name])
    assert_as_reference(inputs, boundaries(DOCUMENTS[name], 70))


def test_angles_with_tiles_of_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "_FULL", replace(tiling._HALF, stored=torch.float32))
    assert_as_reference(draw(1, 140, 40, 24, first_position=0))


@pytest.mark.usefixtures("small_tiles")
def test_angles_are_exact_at_a_million_tokens() -> None:
    """A product of fp32 numbers would be off by 0.03 rad there. The gradient of theta grows with the positions."""
    inputs = draw(1, 40, 12, 12, first_position=1_000_003)
    found, right = run(inputs, None, "triton"), run(inputs, None, "reference")
    assert_close(found, right)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_zero_decay_factor_forgets_everything() -> None:
    inputs = draw(1, 70, 16, 16, decays=(-float("inf"),))
    q, k, v = (inputs[name] for name in "qkv")
    assert q is not None and k is not None and v is not None
    results = run(inputs, None, "triton")
    assert error(results["o"], (q * k).sum(-1, keepdim=True) * v) < 1e-6
    assert all(x.isfinite().all() for x in results.values())


DOCUMENTS = {
    "chunk edges": [[32, 64], [31, 65]],
    "one-token documents": [[31, 32, 33, 34], [1, 2, 3, 69]],
    "many in a chunk": [[3, 5, 6, 20, 21, 40], []],
    "every token": [list(range(70)), [50]],
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("name", "split"), drawing.covering("documents", list(DOCUMENTS), (0, 1), strength=1))
def test_documents(name: str, split: int, chunks_per_split: Callable[[int], None]) -> None:
    """Chunks have 32 tokens here, and a split one chunk, or all."""
    if split:
        chunks_per_split(split)
    assert_as_reference(draw(2, 70, 12, 16), boundaries(DOCUMENTS[name], 70))


@pytest.mark.usefixtures("small_tiles")
def test_splits_of_several_chunks(chunks_per_split: Callable[[int], None]) -> None:
    """Two splits of two chunks and a shorter one; several tiles of the state."""
    chunks_per_split(2)
    assert_as_reference(draw(1, 140, 12, 24, decays=(-0.01,)))


def test_tiles_of_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of bf16, in fp32: chunks of 128 tokens in tiles of 64."""
    monkeypatch.setattr(tiling, "_FULL", replace(tiling._HALF, stored=torch.float32))
    assert_as_reference(draw(1, 200, 64, 64), boundaries([[20, 150]], 200))


def test_half_precision_is_converted_where_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp16, which the interpreter computes; bf16 differs by its rounding only."""
    monkeypatch.setattr(tiling, "_HALF", replace(SMALL, stored=torch.float16))
    inputs = {name: x if x is None or x.dim() == 1 else x.half().double() for name, x in draw(1, 70, 16, 16).items()}
    halves = {n: x.half().requires_grad_() for n in ("q", "k", "v") if (x := inputs[n]) is not None}
    rest = {n: x.float().requires_grad_() for n in ("log_decay", "initial_state") if (x := inputs[n]) is not None}
    o, state = lightning_attention(**halves, **rest, output_final_state=True, backend="triton")
    assert state is not None and inputs["do"] is not None and inputs["dstate"] is not None
    leaves = [*halves.values(), *rest.values()]
    gradients = torch.autograd.grad([o, state], leaves, [inputs["do"].half(), inputs["dstate"].float()])
    assert [x.dtype for x in (o, state, *gradients)] == [torch.float16, torch.float32, *[x.dtype for x in leaves]]
    actual = {"o": o, "state": state} | {f"d{n}": g for n, g in zip((*halves, *rest), gradients, strict=True)}
    assert_close(actual, run(inputs, None, "reference"), 2e-3)


@pytest.mark.usefixtures("small_tiles")
def test_strided_inputs() -> None:
    """Heads first in memory, a slice of a wider projection, every second value, a cotangent without memory."""
    inputs = draw(2, 40, 16, 16, decays=(-0.1, -0.2))
    q, k, v = (x.float() for name in "qkv" if (x := inputs[name]) is not None)
    strided = [
        q.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(),
        torch.cat([k, torch.full_like(k, torch.nan)], -1)[..., :16].requires_grad_(),
        v.repeat_interleave(2, -1)[..., ::2].requires_grad_(),
    ]
    assert not any(x.is_contiguous() for x in strided)
    log_decay = inputs["log_decay"]
    o, _ = lightning_attention(*strided, log_decay, backend="triton")
    gradients = torch.autograd.grad(o.sum(), strided)
    exact = [x.detach().double().requires_grad_() for x in strided]
    expected, _ = lightning_attention_reference(*exact, log_decay)
    exact_gradients = torch.autograd.grad(expected.sum(), exact)
    for found, right in zip((o, *gradients), (expected, *exact_gradients), strict=True):
        assert error(found, right) < 1e-5


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("small_tiles")
def test_overflow_stays_in_its_document() -> None:
    """The first document's state and the third one's cotangents overflow; the second is as if it were alone."""
    inputs = draw(1, 100, 8, 8)
    q, k, v, do = (x.float() for name in ("q", "k", "v", "do") if (x := inputs[name]) is not None)
    k[:, 5:40] = v[:, 5:40] = 1e30
    q[:, 85:] = do[:, 85:] = 1e30
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, _ = lightning_attention(
        *leaves, torch.tensor([-0.05]), cu_seqlens=torch.tensor([0, 45, 75, 100]), backend="triton"
    )
    found = [o, *torch.autograd.grad(o, leaves, do)]
    alone = [x.detach()[:, 45:75].double().requires_grad_() for x in leaves]
    expected, _ = lightning_attention_reference(*alone, torch.tensor([-0.05], dtype=torch.float64))
    right = [expected, *torch.autograd.grad(expected, alone, do[:, 45:75].double())]
    for x, y in zip(found, right, strict=True):
        assert not x.isfinite().all() or x is found[1]
        assert error(x[:, 45:75], y) < 1e-5


@pytest.mark.long
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("starts", "split"), drawing.covering("passes", (None, [[20, 60], []]), (0, 2), strength=1))
def test_passes(starts: list[list[int]] | None, split: int, chunks_per_split: Callable[[int], None]) -> None:
    """What sequence parallelism calls, against the chunked passes in fp64."""
    if split:
        chunks_per_split(split)
    # With angles where there are no documents: one test fewer of what takes long.
    inputs = draw(2, 70, 16, 12, first_position=None if starts else 7)
    cu_seqlens = None if starts is None else boundaries(starts, 70)

    def results_of(module: Any, dtype: torch.dtype) -> list[Tensor]:
        x = {name: None if x is None else x.to(dtype) for name, x in inputs.items()}
        q, k, v, do, state, dstate = (x[n] for n in ("q", "k", "v", "do", "initial_state", "dstate"))
        decay = x["log_decay"]
        angles = angles_of(x["theta"], inputs["positions"])
        learned = {"with_decay": True, "with_theta": angles is not None}
        gradients = module.grad_bwd(q, k, v, decay, do, state, dstate, cu_seqlens, angles=angles, **learned)
        return [
            *module.state_fwd(k, v, decay, cu_seqlens, angles=angles),
            *module.out_fwd(q, k, v, decay, state, cu_seqlens, angles=angles),
            *module.out_fwd(q, k, v, decay, None, cu_seqlens, angles=angles),
            module.state_bwd(q, do, decay, cu_seqlens, angles=angles),
            *(x for x in gradients if x is not None),
        ]

    for found, right in zip(results_of(triton, torch.float32), results_of(chunked, torch.float64), strict=True):
        assert error(found, right) < 1e-5
    assert triton.grad_bwd(*(torch.ones(1, 1, 1, 16),) * 3, None, torch.ones(1, 1, 1, 16), None, None)[3] is None


def test_passes_of_an_empty_row() -> None:
    k = torch.ones(2, 0, 3, 4)
    local, through = triton.state_fwd(k, k, -torch.ones(3), torch.tensor([0]))
    assert local.shape == (2, 3, 4, 4) and not local.any() and torch.equal(through, torch.ones(2, 3))
    assert not triton.state_bwd(k, k, None).any()


@pytest.mark.parametrize("log_decay", [None, torch.tensor([-0.5, -0.1])], ids=["none", "by head"])
def test_recurrent_step(log_decay: Tensor | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 2, 24, generator=generator) for _ in range(2))
    v, state = torch.randn(2, 2, 40, generator=generator), torch.randn(2, 2, 24, 40, generator=generator)
    found = triton.recurrent_step(q, k, v, log_decay, state)
    exact = [None if x is None else x.double() for x in (q, k, v, log_decay, state)]
    for x, y in zip(found, chunked.recurrent_step(*exact), strict=True):  # type: ignore[arg-type]
        assert error(x, y) < 1e-6


def small_call(tokens: int = 40) -> tuple[list[Tensor], Callable[..., Tensor]]:
    inputs = draw(1, tokens, 16, 16)
    leaves = [x.float().requires_grad_() for name in NAMES if (x := inputs[name]) is not None]

    def call(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> Tensor:
        o, final = lightning_attention(
            q, k, v.sigmoid(), log_decay, initial_state=state, output_final_state=True, backend="triton"
        )
        assert final is not None
        return o.sin().sum() + final.sin().sum()

    return leaves, call


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
    leaves, _ = small_call(8)
    q, k, v, log_decay, state = leaves
    torch.library.opcheck(triton._out_fwd, (q, k, v, log_decay, None, None, state, None))
    q, k, v, log_decay, state = (x.detach() for x in leaves)
    tests = ("test_schema", "test_faketensor")
    positions = torch.arange(q.size(1)).expand(q.shape[:2])
    angles, wide = (torch.ones(q.shape[2:]), positions), torch.cat([state, state], 2)
    for given, S_in in (((None, None), state), (angles, wide)):
        torch.library.opcheck(triton._out_fwd, (q, k, v, log_decay, *given, S_in, None), test_utils=tests)
        for learned in (False, True):
            arguments = (q, k, v, log_decay, *given, v, S_in, None, None, learned, learned and S_in is wide)
            torch.library.opcheck(triton._gradients, arguments, test_utils=tests)
        torch.library.opcheck(triton._state_fwd, (k, v, log_decay, *given, None), test_utils=tests)
        torch.library.opcheck(triton._state_bwd, (q, v, log_decay, *given, None), test_utils=tests)


@pytest.fixture
def default_backend() -> Iterator[Callable[[str], None]]:
    yield set_default_backend
    set_default_backend("auto")


def test_choice_of_the_backend(default_backend: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1, 3, 1, 16)
    assert choose_backend("lightning", x) == "chunked"
    assert choose_backend("lightning", x, "triton") == "triton"
    default_backend("triton")
    assert choose_backend("lightning", x) == "triton"
    assert choose_backend("lightning", x, "reference") == "reference"
    with pytest.raises(UserError, match=r"supports fp16, bf16 and fp32, not torch\.float64"):
        choose_backend("lightning", x.double())
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(UserError, match="'triton' needs a GPU, but the inputs are on cpu"):
        choose_backend("lightning", x)


@pytest.mark.usefixtures("small_tiles")
def test_passes_follow_the_setting(default_backend: Callable[[str], None]) -> None:
    inputs = draw(1, 20, 16, 16)
    q, k, v = (x.float() for name in "qkv" if (x := inputs[name]) is not None)
    state = torch.zeros(1, 1, 16, 16)
    for name, module in (("auto", chunked), ("triton", triton)):
        default_backend(name)
        for found, right in (
            (lightning.state_fwd(k, v, None), module.state_fwd(k, v, None)),
            (lightning.out_fwd(q, k, v, None, None), module.out_fwd(q, k, v, None, None)),
            ((lightning.state_bwd(q, v, None),), (module.state_bwd(q, v, None),)),
            (lightning.grad_bwd(q, k, v, None, v, None, None)[:3], module.grad_bwd(q, k, v, None, v, None, None)[:3]),
            (
                lightning.recurrent_step(q[:, 0], k[:, 0], v[:, 0], None, state),
                module.recurrent_step(q[:, 0], k[:, 0], v[:, 0], None, state),
            ),
        ):
            assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))
    # A gradient through one step needs the form that autograd knows.
    o, _ = lightning.recurrent_step(q[:, 0].requires_grad_(), k[:, 0], v[:, 0], None, state)
    assert o.requires_grad


@pytest.mark.usefixtures("small_tiles")
def test_only_the_inputs_are_saved_for_backward() -> None:
    leaves, _ = small_call()
    q, k, v, log_decay, _ = leaves
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        lightning_attention(q, k, v, log_decay.detach(), backend="triton")
    inputs = q.numel() + k.numel() + v.numel() + 1
    assert sum(saved) == inputs
    saved.clear()
    angles = Angles(torch.ones(1, 16), torch.arange(40)[None])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        lightning_attention(q, k, v, log_decay.detach(), angles=angles, backend="triton")
    assert sum(saved) == inputs + 16 + 40

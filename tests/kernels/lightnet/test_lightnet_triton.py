"""LightNet's Triton kernels, interpreted in fp32, against the fp64 recurrence.

The interpreter takes milliseconds for a program, so shapes are small, and tiles too where a test is about many tiles.
Half precision is tested on GPUs: the interpreter computes bf16 wrongly.
"""

import math
import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightscale.errors import UserError
from lightscale.kernels import lightnet
from lightscale.kernels.common.angles import angles_of
from lightscale.kernels.common.backends import choose_backend, set_default_backend
from lightscale.kernels.lightnet import Angles, LightNetState, StateCotangent, chunked, lightnet_attention, triton
from lightscale.kernels.lightnet.triton import kernels, keys, queries, states, tiling

comparing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "comparing.py")))
boundaries, error, assert_close = comparing.boundaries, comparing.error, comparing.assert_close

Tensors = dict[str, Tensor]
LEAVES = ("q", "k", "v", "z", "S", "theta")
SMALL = replace(
    tiling._FULL,
    chunk=32,
    tile_tokens=16,
    partners=16,
    scan_tile_tokens=16,
    weighed=16,
    contracted=16,
    value_width=16,
    key_width=16,
    state_key=16,
    state_value=16,
)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "_FULL", SMALL)


@pytest.fixture
def highest_rise(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """How far z may lie below a reference."""

    def change(rise: float) -> None:
        for module in (kernels, keys, queries, states):
            monkeypatch.setattr(module, "RISE", tl.constexpr(rise))
        monkeypatch.setattr(states, "LEAST", tl.constexpr(math.exp(-rise)))

    return change


def draw(
    rows: int,
    tokens: int,
    K: int,
    V: int,
    *,
    heads: int = 1,
    scale: float = 1.0,
    angles: bool = True,
    state: bool = True,
) -> Tensors:
    """Inputs and cotangents of one call, fp64; keys ~ N(0, scale²)."""
    generator = torch.Generator().manual_seed(tokens + K)

    def normal(*shape: int) -> Tensor:
        # Rounded, so that fp32 and fp64 compute the same.
        return torch.randn(shape, generator=generator).double()

    R = 2 * K if angles else K
    inputs = {
        "q": normal(rows, tokens, heads, K),
        "k": scale * normal(rows, tokens, heads, K),
        "v": normal(rows, tokens, heads, V),
        "do": normal(rows, tokens, heads, V),
        "dz": normal(rows, heads, K),
        "dS": normal(rows, heads, R, V),
    }
    if angles:
        # In a document's middle, as rows are.
        inputs |= {"theta": 2 * normal(heads, K), "positions": (torch.arange(tokens) + 1000).repeat(rows, 1)}
    if state:
        inputs |= {"z": 2 * normal(rows, heads, K), "S": normal(rows, heads, R, V)}
    return inputs


def cast(inputs: Tensors, dtype: torch.dtype) -> Tensors:
    """Copies without a gradient; positions stay what they are."""
    return {name: x if name == "positions" else x.detach().to(dtype) for name, x in inputs.items()}


def found(gradients: Any) -> list[Tensor]:
    """Those that were asked for."""
    return [x for x in gradients if x is not None]


def angles_in(x: Tensors) -> Angles | None:
    return angles_of(x.get("theta"), x.get("positions"))


def run(inputs: Tensors, cu_seqlens: Tensor | None, backend: str) -> Tensors:
    """Outputs, final state and all gradients; fp32 by Triton, fp64 by the reference."""
    x = cast(inputs, torch.float32 if backend == "triton" else torch.float64)
    leaves = {name: x[name].requires_grad_() for name in LEAVES if name in x}
    o, state = lightnet_attention(
        x["q"],
        x["k"],
        x["v"],
        angles=angles_in(x),
        initial_state=LightNetState(x["z"], x["S"]) if "z" in x else None,
        cu_seqlens=cu_seqlens,
        output_final_state=True,
        backend=backend,
    )
    assert state is not None
    return comparing.with_gradients({"o": o, "z": state.z, "S": state.S}, [x["do"], x["dz"], x["dS"]], leaves)


def assert_as_reference(inputs: Tensors, cu_seqlens: Tensor | None = None) -> None:
    assert_close(run(inputs, cu_seqlens, "triton"), run(inputs, cu_seqlens, "reference"))


@pytest.mark.parametrize(
    ("tokens", "angles", "state"),
    [(0, True, True), (1, False, True), (15, True, False), (63, False, False), (65, True, True), (150, False, True)],
)
def test_any_length(tokens: int, angles: bool, state: bool) -> None:
    assert_as_reference(draw(1, tokens, 16, 24, angles=angles, state=state))


@pytest.mark.parametrize("widths", [(60, 24), (80, 16), (16, 100)], ids=lambda w: f"{w[0]}x{w[1]}")
def test_any_widths(widths: tuple[int, int]) -> None:
    """Tiles that the widths do not fill, and several tiles of K and of V."""
    assert_as_reference(draw(1, 40, *widths))


DOCUMENTS = {
    "at and beside chunk edges": [[32, 65]],
    "one-token documents": [[1, 2, 31, 32, 33, 69]],
    "many in a chunk": [[3, 5, 6, 20, 21, 40]],
    "every token": [list(range(70))],
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("split", [0, pytest.param(1, marks=pytest.mark.long)], ids=["one split", "splits"])
@pytest.mark.parametrize("starts", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_documents(starts: list[list[int]], split: int, chunks_per_split: Callable[[int], None]) -> None:
    """Chunks have 32 tokens here, and a split one chunk."""
    if split:
        chunks_per_split(split)
    assert_as_reference(draw(1, 70, 12, 16, angles=not split), boundaries(starts, 70))


@pytest.mark.long
@pytest.mark.usefixtures("small_tiles")
def test_rows_and_heads() -> None:
    """Documents differ from row to row."""
    assert_as_reference(draw(2, 40, 8, 12, heads=2, angles=False), boundaries([[20], [32, 33]], 40))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("state", [True, pytest.param(False, marks=pytest.mark.long)], ids=["state", "empty"])
def test_splits_of_several_chunks(state: bool, chunks_per_split: Callable[[int], None]) -> None:
    """Two splits of two chunks and a shorter one, and documents that begin in two of them."""
    chunks_per_split(2)
    assert_as_reference(draw(1, 134, 12, 12, state=state), None if state else boundaries([[30, 70]], 134))


@pytest.mark.long
def test_tiles_of_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of bf16, in fp32: chunks of 128 tokens in tiles of 64."""
    monkeypatch.setattr(tiling, "_FULL", replace(tiling._HALF, compute=torch.float32))
    assert_as_reference(draw(1, 150, 16, 64), boundaries([[20, 140]], 150))


def jump(keys: Tensor, low: float, high: float, token: int) -> Tensor:
    """Keys around ``low`` before ``token`` and around ``high`` from there on."""
    return keys + torch.where(torch.arange(keys.size(1)) < token, low, high)[:, None, None]


# How the keys are changed, and the level of the z that enters beside them.
EXTREMES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "N(0, 30²)": (lambda k: 30 * k, 0.0),
    "±80 at random": (lambda k: 80 * k.sign(), 80.0),
    "from -80 to 80 inside a tile": (lambda k: jump(k, -80.0, 80.0, 25), -80.0),
    "from -80 to 80 at a chunk's last token": (lambda k: jump(k, -80.0, 80.0, 31), -80.0),
    "from -80 to 0 over a row": (lambda k: k + torch.linspace(-80, 0, k.size(1))[:, None, None], -80.0),
    "from 80 to -80": (lambda k: jump(k, 80.0, -80.0, 40), 80.0),
    "all -80, far below the state": (lambda k: 0 * k - 80, 80.0),
    "all 80, far above the state": (lambda k: 0 * k + 80, -80.0),
}

SELDOM = ("N(0, 30²)", "from -80 to 80 at a chunk's last token", "from 80 to -80")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("starts", [None, pytest.param([[20, 36]], marks=pytest.mark.long)], ids=["whole", "documents"])
@pytest.mark.parametrize(
    ("change", "level"),
    [pytest.param(*x, id=name, marks=[pytest.mark.long] * (name in SELDOM)) for name, x in EXTREMES.items()],
)
def test_extreme_keys(change: Callable[[Tensor], Tensor], level: float, starts: list[list[int]] | None) -> None:
    """Two chunks, the second one with a state of this level or of the keys of the first."""
    inputs = draw(1, 44, 12, 12, angles=starts is None)
    inputs["k"], inputs["z"] = change(inputs["k"]).float().double(), inputs["z"] + level
    cu_seqlens = None if starts is None else boundaries(starts, 44)
    actual, expected = run(inputs, cu_seqlens, "triton"), run(inputs, cu_seqlens, "reference")
    assert all(x.isfinite().all() for x in actual.values())
    # What fp32 cannot hold is 0.
    expected = {name: torch.where(x.abs() < 1e-38, 0.0, x) for name, x in expected.items()}
    # Where keys rise by 160 inside a tile, few tokens before the rise decide the gradient of z.
    assert error(actual.pop("dz"), expected.pop("dz")) < 2e-5
    assert_close(actual, expected)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("starts", [None, [[3]]], ids=["whole", "short"])
def test_the_gradient_of_a_heavy_state_keeps_its_digits(starts: list[list[int]] | None) -> None:
    """A state of e^12 tokens, of which nothing is passed back from the row's end."""
    inputs = draw(1, 34, 8, 12, angles=starts is None)
    inputs |= {"z": inputs["z"] + 12, "dz": 0 * inputs["dz"], "dS": 0 * inputs["dS"]}
    cu_seqlens = None if starts is None else boundaries(starts, 34)
    expected = run(inputs, cu_seqlens, "reference")["dz"]
    assert error(run(inputs, cu_seqlens, "triton")["dz"], expected) < 2e-6


@pytest.mark.long
@pytest.mark.usefixtures("small_tiles")
def test_document_that_begins_far_below(highest_rise: Callable[[float], None]) -> None:
    """A document from -80 to 80 inside a tile, and one of keys around -80 between others: nothing is lost.

    With one reference for all, as where z rises less, outputs are wrong.
    """
    inputs = draw(1, 48, 12, 12, state=False)
    inputs["k"] = jump(inputs["k"], -80.0, 80.0, 10)
    inputs["k"][:, 20:28] -= 160
    cu_seqlens = boundaries([[20, 28]], 48)
    actual, expected = run(inputs, cu_seqlens, "triton"), run(inputs, cu_seqlens, "reference")
    for part in (slice(0, 10), slice(10, 20), slice(20, 28), slice(28, 48)):
        for name in ("o", "dq", "dk", "dv"):
            assert error(actual[name][:, part], expected[name][:, part]) < 1e-5
    highest_rise(1e4)
    broken = run(inputs, cu_seqlens, "triton")
    assert not error(broken["o"][:, :10], expected["o"][:, :10]) < 1e-3


@pytest.mark.long
@pytest.mark.usefixtures("small_tiles")
def test_many_references_give_the_same_as_one(highest_rise: Callable[[float], None]) -> None:
    """Ordinary keys, by the usual path and by several rounds for every tile; a document crosses the chunks' edge.

    Rounds of rows without boundaries: ``test_extreme_keys``.
    """
    inputs = draw(1, 44, 12, 12, scale=2.0)
    cu_seqlens = boundaries([[5, 36, 40]], 44)
    usual = run(inputs, cu_seqlens, "triton")
    highest_rise(1.5)
    rounds = run(inputs, cu_seqlens, "triton")
    assert any(not torch.equal(rounds[name], usual[name]) for name in ("o", "dq", "dk", "dv"))
    assert_close(rounds, usual, 2e-6)
    assert_close(rounds, run(inputs, cu_seqlens, "reference"))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("state", [True, False], ids=["state", "empty"])
def test_keys_of_minus_infinity_write_nothing(state: bool) -> None:
    """Padding, at a document's end, at its beginning, and for a whole document."""
    inputs = draw(1, 60, 12, 8, state=state)
    for part in (slice(0, 10), slice(25, 50), slice(55, 60)):
        inputs["k"][:, part] = -torch.inf
    cu_seqlens = boundaries([[30, 50]], 60)
    actual = run(inputs, cu_seqlens, "triton")
    assert not actual["o"][0, 30:50].any() and not actual["dk"][inputs["k"] == -torch.inf].any()
    assert_close(actual, run(inputs, cu_seqlens, "reference"))


@pytest.mark.usefixtures("small_tiles")
def test_overflow_stays_in_its_document() -> None:
    """The first document's outputs and gradients are infinite; the second one's equal a run of its own."""
    inputs = draw(1, 44, 12, 12, state=False)
    inputs["v"][:, 5:20] = 3e38
    results = run(inputs, boundaries([[25]], 44), "triton")
    assert not results["o"][:, :25].isfinite().all() and not results["dq"][:, :25].isfinite().all()
    alone = {name: x[:, 25:] if x.size(1) == 44 else x for name, x in inputs.items()}
    expected = run(alone, None, "reference")
    # Angles are of all documents.
    del expected["dtheta"]
    for name, x in expected.items():
        assert error(results[name][:, 25:] if name in ("o", "dq", "dk", "dv") else results[name], x) < 1e-5


def test_half_precision_is_converted_where_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp16, which the interpreter computes; on GPUs dots are bf16, which differs by its rounding only."""
    monkeypatch.setattr(tiling, "_HALF", replace(SMALL, compute=torch.float16))
    inputs = {
        name: x.half().double() if name in ("q", "k", "v", "do") else x for name, x in draw(1, 50, 16, 16).items()
    }
    x = cast(inputs, torch.float32) | {name: inputs[name].half() for name in ("q", "k", "v", "do")}
    leaves = [x[name].requires_grad_() for name in LEAVES]
    o, state = lightnet_attention(
        x["q"],
        x["k"],
        x["v"],
        angles=angles_in(x),
        initial_state=LightNetState(x["z"], x["S"]),
        output_final_state=True,
        backend="triton",
    )
    assert state is not None
    gradients = torch.autograd.grad([o, *state], leaves, [x["do"], x["dz"], x["dS"]])
    assert [y.dtype for y in (o, *state, *gradients)] == [
        torch.float16,
        torch.float32,
        torch.float32,
        *(leaf.dtype for leaf in leaves),
    ]
    actual = {"o": o, "z": state.z, "S": state.S} | {f"d{n}": g for n, g in zip(LEAVES, gradients, strict=True)}
    expected = run(inputs, None, "reference")
    # dz is what remains of nearly equal numbers.
    assert error(actual.pop("dz"), expected.pop("dz")) < 1e-2
    assert_close(actual, expected, 3e-3)


@pytest.mark.usefixtures("small_tiles")
def test_angles_are_exact_at_a_million_tokens() -> None:
    """A product of fp32 numbers would be off by 0.03 rad there."""
    inputs = draw(1, 20, 12, 12)
    inputs["positions"] += 1_000_003
    actual, expected = run(inputs, None, "triton"), run(inputs, None, "reference")
    # Only distances count: what such positions multiply adds up to 0, but for the rounding that they magnify.
    del actual["dtheta"], expected["dtheta"]
    assert_close(actual, expected)


@pytest.mark.usefixtures("small_tiles")
def test_strided_inputs() -> None:
    """Heads first in memory, a slice of a wider projection, every second value, angles that heads and rows share."""
    inputs = draw(2, 20, 16, 16, heads=2)
    inputs["theta"] = inputs["theta"][:1].expand(2, -1)
    q, k, v, theta = (inputs[name].float() for name in ("q", "k", "v", "theta"))
    strided = [
        q.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(),
        torch.cat([k, torch.full_like(k, torch.nan)], -1)[..., :16].requires_grad_(),
        v.repeat_interleave(2, -1)[..., ::2].requires_grad_(),
    ]
    angles = Angles(theta[:1].expand(2, -1), inputs["positions"][:1].expand(2, -1))
    o, _ = lightnet_attention(*strided, angles=angles, backend="triton")
    do = torch.ones(1).expand_as(o)
    gradients = torch.autograd.grad(o, strided, do)
    plain = {name: inputs[name] for name in ("q", "k", "v", "theta", "positions")}
    plain |= {"do": torch.ones_like(inputs["do"]), "dz": 0 * inputs["dz"], "dS": 0 * inputs["dS"]}
    expected = run(plain, None, "reference")
    for name, x in zip(("o", "dq", "dk", "dv"), (o.detach(), *gradients), strict=True):
        assert error(x, expected[name]) < 1e-5


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("split", [0, pytest.param(16, marks=pytest.mark.long)], ids=["one split", "splits"])
def test_z_does_not_drift(split: int, chunks_per_split: Callable[[int], None]) -> None:
    """z of 2048 keys, of which the first one is by far the smallest; in each chunk sums of 32 round alike."""
    if split:
        chunks_per_split(split)
    k = torch.full((1, 2048, 1, 1), 0.3)
    k[:, 0], k[:, 1::2] = -50.0, -1.7
    state, _ = triton.state_fwd(k, torch.ones_like(k))
    assert abs(state.z.item() - k.double().logsumexp(1).item()) < 1e-6
    assert abs(state.S.item() - 1) < 2e-6


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("angles", "starts"),
    [
        pytest.param(True, [[20], []], id="lrpe, documents"),
        pytest.param(False, None, id="plain, whole", marks=pytest.mark.long),
    ],
)
def test_passes(angles: bool, starts: list[list[int]] | None) -> None:
    """What sequence parallelism calls, against the chunked form in fp64; with and without a state and a cotangent."""
    inputs = draw(2, 36, 12, 16, angles=angles)
    cu_seqlens = None if starts is None else boundaries(starts, 36)

    def results_of(module: Any, dtype: torch.dtype) -> list[Tensor]:
        x = cast(inputs, dtype)
        q, k, v, do = (x[name] for name in ("q", "k", "v", "do"))
        angles = angles_in(x)
        state, cotangent = LightNetState(x["z"], x["S"]), StateCotangent(x["dS"], x["dz"])
        local, through = module.state_fwd(k, v, angles, cu_seqlens)
        o, end = module.out_fwd(q, k, v, angles, state, cu_seqlens)
        return [
            *local,
            through,
            o,
            *end,
            module.out_fwd(q, k, v, angles, None, cu_seqlens)[0],
            *module.state_bwd(q, k, v, angles, do, state, cu_seqlens),
            *found(module.grad_bwd(q, k, v, angles, do, state, cotangent, cu_seqlens, with_theta=angles is not None)),
            *found(module.grad_bwd(q, k, v, angles, do, state, None, cu_seqlens)),
        ]

    for own, right in zip(results_of(triton, torch.float32), results_of(chunked, torch.float64), strict=True):
        assert error(own, right) < 1e-5


def test_passes_of_an_empty_row() -> None:
    k = torch.ones(2, 0, 3, 4)
    local, through = triton.state_fwd(k, k, Angles(torch.ones(3, 4), torch.ones(2, 0).long()), torch.tensor([0]))
    assert (local.z == -torch.inf).all() and local.S.shape == (2, 3, 8, 4) and not local.S.any()
    assert torch.equal(through, torch.ones(2))
    own = triton.state_bwd(k, k, k, None, k, None)
    assert not own.U.any() and not own.R.any() and own.U.shape == (2, 3, 4, 4)


@pytest.mark.parametrize("angles", [True, False], ids=["lrpe", "plain"])
def test_recurrent_step(angles: bool) -> None:
    inputs = draw(2, 1, 24, 40, heads=2, angles=angles)
    inputs["z"][0, 0], inputs["z"][1, 1, :3] = -torch.inf, 90.0
    inputs["S"][0, 0] = torch.nan  # what is empty may hold anything
    inputs["k"][0, 0, 0, 5] = -torch.inf
    inputs["k"][1, 0, 0] += 90

    def step(module: Any, dtype: torch.dtype) -> list[Tensor]:
        x = cast(inputs, dtype)
        q, k, v = (x[name][:, 0] for name in ("q", "k", "v"))
        here = Angles(x["theta"], x["positions"][:, 0]) if angles else None
        o, after = module.recurrent_step(q, k, v, LightNetState(x["z"], x["S"]), here)
        return [o, *after]

    for found, right in zip(step(triton, torch.float32), step(chunked, torch.float64), strict=True):
        assert error(found, right) < 1e-6


def small_call() -> tuple[list[Tensor], Callable[..., Tensor]]:
    inputs = cast(draw(1, 20, 16, 16), torch.float32)
    leaves = [inputs[name].requires_grad_() for name in LEAVES]

    def call(q: Tensor, k: Tensor, v: Tensor, z: Tensor, S: Tensor, theta: Tensor) -> Tensor:
        o, final = lightnet_attention(
            q,
            k,
            v.sigmoid(),
            angles=Angles(theta, inputs["positions"]),
            initial_state=LightNetState(z, S),
            output_final_state=True,
            backend="triton",
        )
        assert final is not None
        return o.sin().sum() + final.z.sin().sum() + final.S.sin().sum()

    return leaves, call


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.long)])
def test_recomputation_and_torch_compile_give_the_same(reentrant: bool) -> None:
    """Compiled as one graph, forward and backward: the operator is called in it and not looked into."""
    leaves, call = small_call()
    expected = torch.autograd.grad(call(*leaves), leaves)
    again = checkpoint(call, *leaves, use_reentrant=reentrant)
    again.backward()
    assert all(x.grad is not None and torch.equal(x.grad, g) for x, g in zip(leaves, expected, strict=True))
    if reentrant:
        return
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(*leaves), leaves)
    assert all(error(x, y) < 1e-6 for x, y in zip(found, expected, strict=True))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "angles", [True, pytest.param(False, marks=pytest.mark.long)], ids=["with all", "with nothing optional"]
)
def test_registration(angles: bool) -> None:
    """Torch's own checks: what is declared of shapes, dtypes, aliases and gradients is true."""
    inputs = cast(draw(1, 5, 16, 16, angles=angles, state=angles), torch.float32)
    q, k, v, do = (inputs[name] for name in ("q", "k", "v", "do"))
    theta, positions, z, S = (inputs.get(name) for name in ("theta", "positions", "z", "S"))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(triton._state_fwd, (k, v, theta, positions, None), test_utils=tests)
    torch.library.opcheck(triton._state_bwd, (q, k, v, theta, positions, do, z, S, None), test_utils=tests)
    cotangent = (inputs["dS"], inputs["dz"]) if angles else (None, None)
    torch.library.opcheck(
        triton._gradients, (q, k, v, theta, positions, do, z, S, *cotangent, None, angles), test_utils=tests
    )
    *leaves, theta = (None if x is None else x.requires_grad_() for x in (q, k, v, z, S, theta))
    torch.library.opcheck(triton._out_fwd, (*leaves[:3], theta, positions, *leaves[3:], None))


@pytest.fixture
def default_backend() -> Iterator[Callable[[str], None]]:
    yield set_default_backend
    set_default_backend("auto")


def test_choice_of_the_backend(default_backend: Callable[[str], None]) -> None:
    x = torch.ones(1, 3, 1, 16)
    assert choose_backend("lightnet", x) == "chunked"
    default_backend("triton")
    assert choose_backend("lightnet", x) == "triton"
    assert choose_backend("lightnet", x, "reference") == "reference"
    with pytest.raises(UserError, match=r"supports fp16, bf16 and fp32, not torch\.float64"):
        choose_backend("lightnet", x.double())


@pytest.mark.usefixtures("small_tiles")
def test_passes_follow_the_setting(default_backend: Callable[[str], None]) -> None:
    inputs = cast(draw(1, 20, 16, 16), torch.float32)
    q, k, v, do = (inputs[name] for name in ("q", "k", "v", "do"))
    angles, state = Angles(inputs["theta"], inputs["positions"]), LightNetState(inputs["z"], inputs["S"])
    cotangent = StateCotangent(inputs["dS"], inputs["dz"])
    here = Angles(angles.theta, angles.positions[:, 0])

    def flat(module: Any) -> list[Tensor]:
        local, through = module.state_fwd(k, v, angles, None)
        o, end = module.out_fwd(q, k, v, angles, state, None)
        one, after = module.recurrent_step(q[:, 0], k[:, 0], v[:, 0], state, here)
        return [
            *local,
            through,
            o,
            *end,
            *module.state_bwd(q, k, v, angles, do, state, None),
            *found(module.grad_bwd(q, k, v, angles, do, state, cotangent, None)),
            one,
            *after,
        ]

    for name, module in (("auto", chunked), ("triton", triton)):
        default_backend(name)
        assert all(torch.equal(x, y) for x, y in zip(flat(lightnet), flat(module), strict=True))
    # A gradient through one step needs the form that autograd knows.
    o, _ = lightnet.recurrent_step(q[:, 0].requires_grad_(), k[:, 0], v[:, 0], state, here)
    assert o.requires_grad


@pytest.mark.usefixtures("small_tiles")
def test_only_the_inputs_and_the_final_state_are_saved_for_backward() -> None:
    inputs = cast(draw(1, 40, 16, 16), torch.float32)
    q, k, v = (inputs[name].requires_grad_() for name in ("q", "k", "v"))
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        lightnet_attention(q, k, v, angles=angles_in(inputs), backend="triton")
    assert sum(saved) == 3 * q.numel() + 16 + 40 + inputs["z"].numel() + inputs["S"].numel()

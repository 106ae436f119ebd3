"""The delta rule's Triton kernels, interpreted in fp32, against the fp64 recurrence.

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
from torch.utils.checkpoint import checkpoint

from lightscale.errors import UserError
from lightscale.kernels import delta_rule as package
from lightscale.kernels.common.backends import choose_backend, set_default_backend
from lightscale.kernels.delta_rule import chunked, delta_rule, triton
from lightscale.kernels.delta_rule.triton import tiling

HERE = Path(__file__).parent
comparing = SimpleNamespace(**runpy.run_path(str(HERE.parents[1] / "helpers" / "comparing.py")))
cases = SimpleNamespace(**runpy.run_path(str(HERE / "test_delta_rule.py")))
boundaries, error, assert_close = comparing.boundaries, comparing.error, comparing.assert_close
make_case, run, DECAYS = cases.make_case, cases.run, cases.DECAYS

SMALL = replace(
    tiling._FULL,
    chunk=16,
    prepared=16,
    channel_prepared=16,
    state_value=16,
    gradient=16,
    gradient_value=16,
)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "_FULL", SMALL)


def assert_as_recurrence(case: Any) -> dict[str, Tensor]:
    """In fp32, from the same numbers; the results."""
    rounded = case.to(torch.float32)
    found: dict[str, Tensor] = run(rounded, "triton")
    assert_close(found, run(rounded.to(torch.float64), "oracle"))
    return found


def small_case(tokens: int = 20, **options: Any) -> Any:
    return make_case(1, tokens, **{"heads": 1, "widths": (16, 16), **options})


@pytest.mark.parametrize("tokens", [0, 1, 15, 33, 70])
def test_any_length(tokens: int) -> None:
    assert_as_recurrence(small_case(tokens, decay="channel" if tokens % 2 else "head"))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("widths", "decay"), [((20, 40), "head"), ((40, 12), "channel")], ids=["20x40", "40x12"])
def test_any_widths(widths: tuple[int, int], decay: str) -> None:
    """Tiles that the widths do not fill, and several tiles of K and of V."""
    assert_as_recurrence(small_case(17, widths=widths, decay=decay))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_heads_share_queries_and_keys(decay: str) -> None:
    """Two rows, and two heads of values for each of two heads of queries and keys."""
    assert_as_recurrence(make_case(2, 5, groups=2, widths=(8, 8), decay=decay))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("strength", [1e-7, 1.0, 30.0])
@pytest.mark.parametrize("decay", DECAYS)
def test_any_decay(decay: str, strength: float) -> None:
    if decay != "none" or strength == 1.0:
        assert_as_recurrence(small_case(20, decay=decay, strength=strength, most_beta=2.0))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_decays_of_one_head_differ_by_token(decay: str) -> None:
    """Strong ones do not take digits from weak ones behind them: no decay is a difference of sums."""
    case = small_case(32, decay=decay, strength=1e-3)
    case.log_decay[:, 1:9] = -300.0
    found = assert_as_recurrence(case)
    assert error(found["dlog_decay"][:, 9:], run(case, "oracle")["dlog_decay"][:, 9:]) < 1e-5


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_zero_decay_factor_forgets_everything(decay: str) -> None:
    case = small_case(20, decay=decay)
    case.log_decay.fill_(-torch.inf)
    found = run(case.to(torch.float32), "triton")
    own = (case.q * case.k).sum(-1, keepdim=True) * case.beta[..., None] * case.v
    assert error(found["o"], own) < 1e-6
    assert all(x.isfinite().all() for x in found.values())
    assert not found["dlog_decay"].any() and not found["dinitial_state"].any()


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_keys_that_repeat_and_nothing_is_forgotten(beta: float) -> None:
    """The worst case for the inverse of a chunk: with β = 2 the state changes its sign at every token."""
    case = small_case(70, decay="none", widths=(8, 8))
    case = replace(case, k=case.k[:, :1].expand_as(case.k).contiguous(), beta=torch.full_like(case.beta, beta))
    assert_as_recurrence(case)


DOCUMENTS = {
    "chunk edges": ([[16, 32], [15, 33]], "head"),
    "one-token documents": ([[15, 16, 17, 18]], "channel"),
    "every token, by head": ([list(range(20))], "head"),
    "every token, by channel": ([list(range(20))], "channel"),
    "undecayed": ([[3, 17]], "none"),
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("starts", "decay"), DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_documents(starts: list[list[int]], decay: str, chunks_per_split: Callable[[int], None]) -> None:
    """Chunks have 16 tokens here, and a split one chunk. What no decay separates has a gradient of exactly 0."""
    chunks_per_split(1)
    tokens = 34 if len(starts) == 2 else 20
    found = assert_as_recurrence(make_case(len(starts), tokens, heads=1, widths=(8, 12), decay=decay, starts=starts))
    if decay != "none":
        of_decay = found["dlog_decay"]
        assert all(not of_decay[row, t].any() for row, of_row in enumerate(starts) for t in of_row if t)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_splits_of_several_chunks(decay: str, chunks_per_split: Callable[[int], None]) -> None:
    """A split of two chunks and a shorter one; two tiles of the state."""
    chunks_per_split(2)
    assert_as_recurrence(small_case(40, widths=(12, 20), decay=decay, strength=0.01))


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_tiles_of_half_precision(decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of bf16, in fp32."""
    monkeypatch.setattr(tiling, "_FULL", replace(tiling._HALF, stored=torch.float32))
    assert_as_recurrence(small_case(40, widths=(80, 72), decay=decay, starts=[[20, 35]]))


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_half_precision_is_converted_where_it_should_be(decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp16, which the interpreter computes; bf16 differs by its rounding only."""
    monkeypatch.setattr(tiling, "_HALF", replace(SMALL, stored=torch.float16))
    case = small_case(20, decay=decay).to(torch.float16)
    found = run(case, "triton")
    wide = ("log_decay", "initial_state")
    assert all(found[f"d{name}"].dtype == getattr(case, name).dtype for name in cases.INPUTS)
    assert all(getattr(case, name).dtype == torch.float32 for name in wide) and found["o"].dtype == torch.float16
    assert found["state"].dtype == torch.float32
    assert_close(found, run(case.to(torch.float64), "oracle"), 3e-3)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_strided_inputs(decay: str) -> None:
    """Heads first in memory, slices of a wider projection, every second value, a cotangent without memory."""
    case = make_case(2, 3, widths=(16, 16), decay=decay, with_state=False).to(torch.float32)
    nan = torch.full_like(case.k, torch.nan)
    strided = [
        case.q.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(),
        torch.cat([case.k, nan], -1)[..., :16].requires_grad_(),
        case.v.repeat_interleave(2, -1)[..., ::2].requires_grad_(),
        case.log_decay.transpose(0, -1).contiguous().transpose(0, -1).requires_grad_(),
        case.beta.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(),
    ]
    assert not any(x.is_contiguous() for x in strided)
    o, _ = delta_rule(*strided, backend="triton")
    found = torch.autograd.grad(o.sum(), strided)
    exact = [x.detach().double().requires_grad_() for x in strided]
    expected, _ = package.delta_rule_reference(*exact)
    for x, right in zip((o, *found), (expected, *torch.autograd.grad(expected.sum(), exact)), strict=True):
        assert error(x, right) < 1e-5


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_overflow_stays_in_its_document(decay: str) -> None:
    """What enters and the cotangent of what leaves overflow; a document between is as if it were alone."""
    case = small_case(48, decay=decay, starts=[[16, 32]]).to(torch.float32)
    case.v[:, :16] = case.k[:, :16] = 1e30
    case.q[:, 32:] = case.do[:, 32:] = 1e30
    found = run(case, "triton")
    parts = {n: getattr(case, n)[:, 16:32] for n in ("q", "k", "v", "log_decay", "beta", "do")}
    lone = replace(case, **parts, initial_state=None, dstate=torch.zeros_like(case.dstate), cu_seqlens=None)
    exact = run(lone.to(torch.float64), "oracle")
    assert not any(found[name].isfinite().all() for name in ("o", "dq", "dk", "dv", "dlog_decay", "dbeta"))
    for name, right in exact.items():
        if name not in ("state",):
            assert error(found[name][:, 16:32], right) < 1e-5, name


# ----- passes ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("starts", "split", "decay"),
    [
        (None, 0, "none"),
        ([[10, 30]], 0, "head"),
        ([[20]], 1, "channel"),
        (None, 2, "head"),
    ],
)
def test_passes(
    starts: list[list[int]] | None, split: int, decay: str, chunks_per_split: Callable[[int], None]
) -> None:
    """What sequence parallelism calls, against the chunked passes in fp64."""
    if split:
        chunks_per_split(split)
    groups = 2 if split == 1 else 1
    case = make_case(1, 36, heads=1, groups=groups, widths=(16, 12), decay=decay, most_beta=2.0, starts=starts)

    def results_of(module: Any, of: Any) -> list[Tensor | None]:
        written, cut = (of.k, of.v, of.log_decay, of.beta), of.cu_seqlens
        return [
            *module.state_fwd(*written, cut),
            *module.out_fwd(of.q, *written, of.initial_state, cut),
            *module.out_fwd(of.q, *written, None, cut),
            module.state_bwd(of.q, of.k, of.do, of.log_decay, of.beta, cut),
            *module.grad_bwd(of.q, *written, of.do, of.initial_state, of.dstate, cut),
            *module.grad_bwd(of.q, *written, of.do, None, None, cut),
        ]

    rounded = case.to(torch.float32)
    exact = results_of(chunked, rounded.to(torch.float64))
    for found, right in zip(results_of(triton, rounded), exact, strict=True):
        assert found is right is None or error(found, right) < 1e-5


def test_decays_may_be_wider_than_the_inputs() -> None:
    """fp64 decays of fp32 inputs: their gradient is fp64 too."""
    case = small_case().to(torch.float32)
    inputs = (case.q, case.k, case.v, case.log_decay, case.beta, case.do, case.initial_state, case.dstate)
    found = triton.grad_bwd(*inputs[:3], case.log_decay.double(), *inputs[4:])
    assert found[3] is not None and found[3].dtype == torch.float64
    assert all(torch.equal(x, y) for x, y in zip(found, triton.grad_bwd(*inputs), strict=True))


def test_passes_of_an_empty_row() -> None:
    k, beta = torch.ones(2, 0, 3, 4), torch.ones(2, 0, 3)
    local, through = triton.state_fwd(k, k, None, beta, torch.tensor([0]))
    assert local.shape == (2, 3, 4, 4) and not local.any()
    assert torch.equal(through, torch.eye(4).expand(2, 3, 4, 4))
    assert not triton.state_bwd(k, k, k, None, beta).any()


@pytest.mark.parametrize("decay", DECAYS)
def test_recurrent_step(decay: str) -> None:
    case = make_case(2, 1, groups=2, widths=(24, 40), decay=decay).to(torch.float32)
    token = [None if x is None else x[:, 0] for x in (case.q, case.k, case.v, case.log_decay, case.beta)]
    exact = [None if x is None else x.double() for x in (*token, case.initial_state)]
    found = triton.recurrent_step(*token, case.initial_state)
    for x, y in zip(found, chunked.recurrent_step(*exact), strict=True):
        assert error(x, y) < 1e-6


# ----- the operator ---------------------------------------------------------------------------------------------------


def small_call(decay: str) -> tuple[list[Tensor], Callable[..., Tensor]]:
    case = small_case(decay=decay).to(torch.float32)
    leaves = [getattr(case, name).requires_grad_() for name in cases.INPUTS]

    def call(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        inputs = (q, k, v.sigmoid(), -log_decay.square(), beta.sigmoid())
        o, final = delta_rule(*inputs, initial_state=state, output_final_state=True, backend="triton")
        assert final is not None
        return o.sin().sum() + final.sin().sum()

    return leaves, call


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_recomputation_and_torch_compile_give_the_same(decay: str) -> None:
    """Compiled as one graph, forward and backward: the operator is called in it and not looked into."""
    leaves, call = small_call(decay)
    expected = torch.autograd.grad(call(*leaves), leaves)
    checkpoint(call, *leaves, use_reentrant=False).backward()
    assert all(x.grad is not None and torch.equal(x.grad, g) for x, g in zip(leaves, expected, strict=True))
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(*leaves), leaves)
    assert all(error(x, y) < 1e-6 for x, y in zip(found, expected, strict=True))


@pytest.mark.long
@pytest.mark.usefixtures("small_tiles")
def test_registration() -> None:
    """Torch's own checks: what is declared of shapes, dtypes, aliases and gradients is true."""
    q, k, v, log_decay, beta, state = small_call("head")[0]
    torch.library.opcheck(triton._out_fwd, (q, k, v, log_decay, beta, state, None))
    q, k, v, log_decay, beta, state = (x.detach() for x in (q, k, v, log_decay, beta, state))
    tests = ("test_schema", "test_faketensor")
    for decays in (log_decay, None):
        arguments = (q, k, v, decays, beta, v, state, None, None)
        torch.library.opcheck(triton._gradients, arguments, test_utils=tests)
    torch.library.opcheck(triton._state_fwd, (k, v, log_decay, beta, None), test_utils=tests)
    torch.library.opcheck(triton._state_bwd, (q, k, v, log_decay, beta, None), test_utils=tests)


@pytest.fixture
def default_backend() -> Iterator[Callable[[str], None]]:
    yield set_default_backend
    set_default_backend("auto")


def test_choice_of_the_backend(default_backend: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1, 3, 1, 16)
    assert choose_backend("delta_rule", x) == "chunked"
    default_backend("triton")
    assert choose_backend("delta_rule", x) == "triton"
    assert choose_backend("delta_rule", x, "reference") == "reference"
    with pytest.raises(UserError, match=r"delta_rule: backend 'triton' supports .* not torch\.float64"):
        choose_backend("delta_rule", x.double())
    with pytest.raises(UserError, match=r"has no backend 'triton'; use auto, chunked, reference"):
        choose_backend("delta_rule", torch.ones(1, 3, 1, 257))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(UserError, match="'triton' needs a GPU, but the inputs are on cpu"):
        choose_backend("delta_rule", x)


@pytest.mark.usefixtures("small_tiles")
def test_passes_follow_the_setting(default_backend: Callable[[str], None]) -> None:
    case = small_case().to(torch.float32)
    written = (case.k, case.v, case.log_decay, case.beta)
    token = [x[:, 0] for x in (case.q, *written)]

    def results_of(module: Any) -> list[Tensor]:
        return [
            *module.state_fwd(*written),
            *module.out_fwd(case.q, *written, None),
            module.state_bwd(case.q, case.k, case.do, case.log_decay, case.beta),
            *module.grad_bwd(case.q, *written, case.do, case.initial_state, case.dstate),
            *module.recurrent_step(*token, case.initial_state),
        ]

    for name, module in (("auto", chunked), ("triton", triton)):
        default_backend(name)
        assert all(torch.equal(x, y) for x, y in zip(results_of(package), results_of(module), strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(results_of(chunked), results_of(triton), strict=True))
    # A gradient through one step needs the form that autograd knows.
    o, _ = package.recurrent_step(token[0].requires_grad_(), *token[1:], case.initial_state)
    assert o.requires_grad


@pytest.mark.usefixtures("small_tiles")
def test_only_the_inputs_are_saved_for_backward() -> None:
    leaves = small_call("head")[0][:5]
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        delta_rule(*leaves, backend="triton")
    assert sum(saved) == sum(x.numel() for x in leaves)

"""LION's vector gate: gla's passes in both directions against the full fp64 tensor of scores, with every gradient."""

import runpy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightscale.errors import UserError
from lightscale.kernels.common.backends import set_default_backend
from lightscale.kernels.gla import chunk_batches
from lightscale.kernels.lion import lion, lion_vector, vector

FOLDER = Path(__file__).parent
comparing = SimpleNamespace(**runpy.run_path(str(FOLDER.parents[1] / "helpers" / "comparing.py")))
boundaries, error, assert_close = comparing.boundaries, comparing.error, comparing.assert_close
vector_matrix = runpy.run_path(str(FOLDER / "full_matrix.py"))["vector_matrix"]

LEARNED = ("q", "k", "v", "log_decay")
# Log decays of noise: from near 0 to far below it; and chunks whose sums are below -60 beside others.
DECAYS = {"any": lambda noise: -torch.exp(2 * noise), "steep": lambda noise: -8 * noise.abs()}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs of one call and the cotangent of its outputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    do: Tensor
    gate: str = "leave"
    normalize: bool = True
    eps: float = 1e-3
    cu_seqlens: Tensor | None = None

    def to(self, dtype: torch.dtype, decay_dtype: torch.dtype) -> "Case":
        changed: dict[str, Any] = {name: getattr(self, name).to(dtype) for name in ("q", "k", "v", "do")}
        return replace(self, **changed, log_decay=self.log_decay.to(decay_dtype))


def make_case(
    rows: int,
    tokens: int,
    widths: tuple[int, int] = (6, 5),
    *,
    decays: str = "any",
    heads: int = 2,
    starts: list[list[int]] | None = None,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Random fp64 inputs, q and k positive as feature maps make them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(width: int) -> Tensor:
        return torch.randn(rows, tokens, heads, width, generator=generator, dtype=torch.float64)

    K, V = widths
    return Case(
        q=draw(K).abs(),
        k=draw(K).abs(),
        v=draw(V),
        log_decay=DECAYS[decays](draw(V)).float().double(),
        do=draw(V),
        cu_seqlens=None if starts is None else boundaries(starts, tokens),
        **options,
    )


def run(case: Case, backend: str = "chunked", **options: Any) -> dict[str, Tensor]:
    """Outputs and all gradients, of the operator or of the full tensor."""
    leaves = {name: getattr(case, name).detach().requires_grad_() for name in LEARNED}
    form = {name: getattr(case, name) for name in ("gate", "normalize", "eps", "cu_seqlens")}
    compute = vector_matrix if backend == "matrix" else lion_vector
    named = {} if backend == "matrix" else {"backend": backend}
    o = compute(**leaves, **form, **named, **options)
    return dict(comparing.with_gradients({"o": o}, [case.do[:, : o.shape[1]]], leaves))


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_recurrences_and_chunks_equal_the_full_tensor(data: st.DataObject) -> None:
    """Any shape, decay, gate and documents, with and without the division."""
    rows, tokens = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 15, 16, 33, 70]))
    inner = st.lists(st.integers(1, tokens), max_size=6).map(lambda xs: sorted({x for x in xs if x < tokens}))
    case = make_case(
        rows,
        tokens,
        data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9))),
        decays=data.draw(st.sampled_from(list(DECAYS))),
        starts=data.draw(st.none() | st.lists(inner, min_size=rows, max_size=rows)),
        gate=data.draw(st.sampled_from(["leave", "enter"])),
        normalize=data.draw(st.booleans()),
        seed=tokens,
    )
    expected = run(case, "matrix")
    for backend in ("reference", "chunked"):
        assert_close(run(case, backend), expected, 1e-10, backend)


@pytest.mark.parametrize("gate", ["leave", "enter"])
def test_equal_channels_are_the_scalar_gate(gate: str) -> None:
    case = make_case(2, 50, starts=[[16], [1, 2, 49]], gate=gate)
    of_heads = case.log_decay[..., :1]
    form = {"gate": gate, "eps": case.eps, "cu_seqlens": case.cu_seqlens}
    expected, _ = lion(case.q, case.k, case.v, of_heads[..., 0], **form)  # type: ignore[arg-type]
    found = lion_vector(case.q, case.k, case.v, of_heads.expand_as(case.v), **form)  # type: ignore[arg-type]
    assert error(found, expected) < 1e-12


def test_a_decay_of_zero_cuts_its_channel() -> None:
    """Gates left: in channel 2 nothing of tokens up to 30 comes to those behind; in the others it does."""
    case = make_case(1, 70)
    case.log_decay[:, 30, :, 2] = -torch.inf
    results = run(case)
    assert all(x.isfinite().all() for x in results.values())
    assert not results["dlog_decay"][:, 30, :, 2].any() and results["dlog_decay"][:, 30].any()
    changed = replace(case, v=case.v.clone())
    changed.v[:, :31] += 1.0
    differs = (run(changed)["o"] != results["o"])[:, 31:].flatten(0, 2).any(0)
    assert differs.tolist() == [True, True, False, True, True]
    all_cut = replace(case, log_decay=torch.full_like(case.log_decay, -torch.inf), eps=0.0)
    assert error(run(all_cut)["o"], case.v) < 1e-12


def test_padding_is_read_by_nobody() -> None:
    """Key and value zero, log decay zero: in the middle, at both ends, and a whole row of it without ε."""
    case = make_case(2, 40, eps=0.0)
    padding = torch.zeros(40, dtype=torch.bool)
    padding[[0, 1, 20, 21, 22, 39]] = True
    for x in (case.k, case.v, case.log_decay):
        x[0, padding] = 0.0
        x[1] = 0.0
    # A padded query, too, reads something: its cotangent would reach the others.
    case.do[0, padding] = 0.0
    found = run(case)
    short = {n: getattr(case, n)[:1, ~padding] for n in (*LEARNED, "do")}
    for name, x in run(replace(case, **short), "matrix").items():
        assert error(found[name][:1, ~padding], x) < 1e-10, name
    assert not found["o"][1].any() and all(x.isfinite().all() for x in found.values())


def test_an_overflow_stays_in_its_document() -> None:
    """Of the outputs; gradients of those that are not finite may reach others of their chunk."""
    case = make_case(2, 100, (8, 8), starts=[[40, 45], []]).to(torch.float32, torch.float32)
    expected = run(case)["o"]
    for x in (case.k, case.v):
        x[0, :30] = 1e30
    found = run(case)["o"]
    assert not found[0, :40].isfinite().all()
    assert torch.equal(found[0, 40:], expected[0, 40:]) and torch.equal(found[1], expected[1])


def test_right_at_32k_tokens_in_fp32() -> None:
    """Some outputs, and the gradients that they cause, by their rows of the fp64 tensor."""
    queries = torch.tensor([0, 1, 16384, 32767])
    case = make_case(1, 32768, (8, 4), heads=1, eps=0.0)
    # Decays that reach far: a token sees about a thousand others.
    case.log_decay.mul_(1e-3)
    case = case.to(torch.float32, torch.float32)
    of_queries = torch.zeros_like(case.do)
    of_queries[:, queries] = case.do[:, queries]
    found = run(replace(case, do=of_queries))
    found["o"] = found["o"][:, queries]
    exact = replace(case.to(torch.float64, torch.float64), do=case.do[:, queries].double())
    assert_close(found, run(exact, "matrix", queries=queries), 1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str
)
def test_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    """Outputs and gradients have the inputs' dtype, the decay's gradient is fp32."""
    rounded = make_case(2, 100, (16, 16), starts=[[64, 93], [1, 50]]).to(dtype, torch.float32)
    results = run(rounded)
    assert {results[n].dtype for n in ("o", "dq", "dk", "dv")} == {dtype}
    assert results["dlog_decay"].dtype == torch.float32
    assert_close(results, run(rounded.to(torch.float64, torch.float64), "matrix"), tolerance)


class _Exponents(TorchDispatchMode):
    """The largest number that an exponential was taken of, and the elements of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.elements = -torch.inf, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.exp, torch.ops.aten.exp_) and args[0].numel():
            self.largest = max(self.largest, float(args[0].max()))
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else (found,):
            self.elements += x.numel() if isinstance(x, Tensor) else 0
        return found


def test_operations_and_memory_are_linear_and_no_exponent_is_above_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: of the products, of what all operators write, and of what is kept for the backward pass."""
    monkeypatch.setattr(chunk_batches, "_BATCH_ELEMENTS", 1)
    counts = []
    for tokens in (256, 384, 512):
        # Entered, so that no token is added to the rows.
        case = make_case(1, tokens, (8, 8), gate="enter")
        case.log_decay.clamp_(min=-3.0)
        saved: list[int] = []

        def pack(x: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(x.numel())
            return x

        flops, written = FlopCounterMode(display=False), _Exponents()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), written, flops:
            run(case)
        assert -torch.inf < written.largest <= 0
        counts.append((flops.get_total_flops(), written.elements, sum(saved)))
    for first, second, third in zip(*counts, strict=True):
        assert third - second == second - first > 0
    C, K, U = 16, 8, 16
    forward, backward = 2 * C * K + 6 * C * U + 4 * K * U, 6 * C * K + 22 * C * U + 16 * K * U
    assert counts[1][0] - counts[0][0] == 128 * 2 * 2 * (forward + backward)


def test_strong_decays_have_no_exponent_above_0() -> None:
    written = _Exponents()
    with written:
        run(make_case(2, 50, decays="steep"))
    assert -torch.inf < written.largest <= 0


@pytest.fixture
def interpreted() -> Iterator[None]:
    set_default_backend("triton")
    yield
    set_default_backend("auto")


@pytest.mark.parametrize("tokens", [0, 40])
def test_triton(tokens: int) -> None:
    """Interpreted in fp32, whose kernels are gla's, against the fp64 recurrences."""
    case = make_case(1, tokens, (12, 8), heads=1, starts=[[20, 32, 33]] if tokens else None)
    assert_close(run(case.to(torch.float32, torch.float32), "triton"), run(case, "reference"))


@pytest.mark.long
@pytest.mark.usefixtures("interpreted")
def test_triton_passes() -> None:
    """What sequence parallelism calls, against the chunked passes in fp64."""
    case = make_case(2, 33, (12, 16), heads=1, starts=[[20], []], gate="enter", normalize=False)
    case.log_decay.mul_(0.1)
    found = passes_of(case.to(torch.float32, torch.float32))
    set_default_backend("chunked")
    for x, right in zip(found, passes_of(case), strict=True):
        assert error(x, right) < 1e-5


def passes_of(case: Case) -> list[Tensor]:
    q, k, v, decay, cut = case.q, case.k, case.v, case.log_decay, case.cu_seqlens
    form: Any = {"gate": case.gate, "normalize": case.normalize}
    local, through = vector.state_fwd(k, v, decay, cut, **form)
    outputs, _ = vector.out_fwd(q, k, v, decay, local, cut, **form)
    own = vector.state_bwd(q, case.do, outputs, decay, cut, gate=case.gate)
    gradients = vector.grad_bwd(q, k, v, decay, case.do, outputs, local, lambda: own, cut, gate=case.gate)
    return [*local, through, *(x for x in outputs if x is not None), *own, *gradients]


def test_two_parts_of_a_row_are_the_row() -> None:
    """The passes by hand: what one half leaves enters the other, there and back."""
    for gate in ("leave", "enter"):
        case = make_case(2, 40, gate=gate)
        parts = []
        for begin, end in pairwise([0, 23, 40]):
            parts.append(replace(case, **{n: getattr(case, n)[:, begin:end] for n in (*LEARNED, "do")}))
        summaries = [vector.state_fwd(x.k, x.v, x.log_decay, gate=gate)[0] for x in parts]
        zero = torch.zeros_like(summaries[0].prefix)
        states = [vector.LionState(zero, summaries[1].suffix), vector.LionState(summaries[0].prefix, zero)]
        outputs = [
            vector.out_fwd(x.q, x.k, x.v, x.log_decay, state, gate=gate, eps=case.eps)[0]
            for x, state in zip(parts, states, strict=True)
        ]
        reads = [
            vector.state_bwd(x.q, x.do, out, x.log_decay, gate=gate) for x, out in zip(parts, outputs, strict=True)
        ]
        leaving = [vector.LionState(reads[1].prefix, zero), vector.LionState(zero, reads[0].suffix)]
        found = [
            vector.grad_bwd(x.q, x.k, x.v, x.log_decay, x.do, out, state, dstate, gate=gate)
            for x, out, state, dstate in zip(parts, outputs, states, leaving, strict=True)
        ]
        expected = run(case, "matrix")
        assert error(torch.cat([x.o for x in outputs], 1), expected["o"]) < 1e-10
        for name in LEARNED:
            assert error(torch.cat([getattr(x, name) for x in found], 1), expected[f"d{name}"]) < 1e-10, (gate, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"log_decay": -torch.ones(2, 10, 3)},
            r"log_decay must be \(B, T, H, V\) = \(2, 10, 3, 8\), like v, got shape",
        ),
        ({"log_decay": torch.ones(2, 10, 3, 8)}, r"log_decay must be at most 0 .* largest value of 1"),
        ({"gate": "left"}, r"gate must be one of leave, enter, got 'left'"),
        ({"eps": -1.0}, r"eps must be at least 0, got -1.0"),
        ({"cu_seqlens": torch.tensor([0, 7, 20])}, r"every row start, .* lacks 10"),
        ({"backend": "triton9"}, r"no backend 'triton9'; use auto, triton, chunked, reference"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {n: torch.ones(2, 10, 3, 8) for n in ("q", "k", "v")}
    arguments["log_decay"] = -torch.ones(2, 10, 3, 8)
    with pytest.raises(UserError, match=message):
        lion_vector(**(arguments | change))

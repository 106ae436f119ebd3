"""LION: the recurrences, the chunked form and its passes against the full fp64 matrix, with every gradient."""

import runpy
from collections.abc import Callable
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

from lightscale.kernels.lion import LionState, chunk_batches, grad_bwd, lion, out_fwd, state_bwd, state_fwd

FOLDER = Path(__file__).parent
comparing = SimpleNamespace(**runpy.run_path(str(FOLDER.parents[1] / "helpers" / "comparing.py")))
boundaries, error, assert_close = comparing.boundaries, comparing.error, comparing.assert_close
full_matrix = runpy.run_path(str(FOLDER / "full_matrix.py"))["full_matrix"]

Results = dict[str, Tensor]
LEARNED = ("q", "k", "v", "log_decay")

# By noise (B, T, H): decays of heads and tokens, of heads, or none.
DECAYS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "by token": lambda noise: -torch.exp(2 * noise),
    "by head": lambda noise: -noise[0, 0].exp() / 10,
    "none": lambda noise: None,
    # Behind sums of -2400, differences of hundredths.
    "weak behind strong": lambda noise: (
        torch.where(torch.arange(noise.size(1))[:, None] // 8 % 2 == 1, -300.0, -0.01) * torch.ones_like(noise)
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs of one call and the cotangent of its outputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    do: Tensor
    gate: str = "leave"
    normalize: bool = True
    eps: float = 1e-3
    cu_seqlens: Tensor | None = None

    def to(self, dtype: torch.dtype, decay_dtype: torch.dtype) -> "Case":
        """The same case with q, k, v, do in ``dtype``."""
        changed: dict[str, Any] = {name: getattr(self, name).to(dtype) for name in ("q", "k", "v", "do")}
        log_decay = None if self.log_decay is None else self.log_decay.to(decay_dtype)
        return replace(self, **changed, log_decay=log_decay)

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("gate", "normalize", "eps", "cu_seqlens")}


def make_case(
    rows: int,
    tokens: int,
    widths: tuple[int, int] = (6, 5),
    *,
    decays: str = "by token",
    heads: int = 2,
    starts: list[list[int]] | None = None,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Random fp64 inputs, q and k positive as feature maps make them; ``starts`` of documents inside each row."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    log_decay = DECAYS[decays](draw(rows, tokens, heads))
    return Case(
        q=draw(rows, tokens, heads, widths[0]).abs(),
        k=draw(rows, tokens, heads, widths[0]).abs(),
        v=draw(rows, tokens, heads, widths[1]),
        log_decay=None if log_decay is None else log_decay.float().double(),
        do=draw(rows, tokens, heads, widths[1]),
        cu_seqlens=None if starts is None else boundaries(starts, tokens),
        **options,
    )


def run(case: Case, backend: str = "chunked", **options: Any) -> Results:
    """Outputs and all gradients of one call of the operator, or of the full matrix."""
    leaves = {name: x.detach().requires_grad_() for name in LEARNED if (x := getattr(case, name)) is not None}
    given = {"log_decay": None} | leaves
    if backend == "matrix":
        o = full_matrix(**given, **case.options, **options)
    else:
        o, state = lion(**given, **case.options, backend=backend, **options)
        assert state is None  # nobody asked for it
    return comparing.with_gradients({"o": o}, [case.do[:, : o.shape[1]]], leaves)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_recurrences_and_chunks_equal_the_full_matrix(data: st.DataObject) -> None:
    """Any shape, chunk, decay, gate and documents, with and without the division."""
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
    assert_close(run(case, "reference"), expected, 1e-10)
    for chunk_size in (data.draw(st.integers(1, 20)), 64):
        assert_close(run(case, chunk_size=chunk_size), expected, 1e-10, f"chunks of {chunk_size}")


DOCUMENTS = {
    "chunk edge": [[16], []],
    "one-token documents": [[15, 16, 17, 18], [1, 2, 3, 49]],
    "every chunk edge": [[16, 32, 48], [16, 32, 48]],
    "row starts only": [[], []],
    "every token": [list(range(50)), [20]],
}


@pytest.mark.parametrize("starts", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_documents_equal_separate_runs(starts: list[list[int]]) -> None:
    case = make_case(2, 50, starts=starts)
    assert case.cu_seqlens is not None
    expected = {name: torch.zeros_like(x) for name, x in run(case).items()}
    for begin, end in pairwise(case.cu_seqlens.tolist()):
        row, part = begin // 50, slice(begin % 50, begin % 50 + end - begin)
        of_document = {n: getattr(case, n)[row : row + 1, part] for n in (*LEARNED, "do")}
        for name, x in run(replace(case, **of_document, cu_seqlens=None), "matrix").items():
            expected[name][row, part] = x[0]
    assert_close(run(case, chunk_size=16), expected, 1e-10)


def test_a_decay_of_zero_cuts_and_has_no_gradient() -> None:
    """Gates left: token 30 is reached from the right only through its own gate, and sends nothing to the right."""
    case = make_case(1, 70)
    assert case.log_decay is not None
    case.log_decay[:, 30] = -torch.inf
    results = run(case, chunk_size=16)
    assert all(x.isfinite().all() for x in results.values())
    # Between tokens up to 30 and those behind nothing passes to the right, nor from 30 on to the left.
    changed = replace(case, v=case.v.clone())
    changed.v[:, :31] += 1.0
    assert torch.equal(run(changed, chunk_size=16)["o"][:, 31:], results["o"][:, 31:])
    all_cut = replace(case, log_decay=torch.full_like(case.log_decay, -torch.inf), eps=0.0)
    assert error(run(all_cut)["o"], case.v) < 1e-12


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_padding_is_read_by_nobody(backend: str) -> None:
    """Key and value zero, log decay zero: in the middle, at both ends, and a whole row of it without ε."""
    case = make_case(2, 40, eps=0.0)
    padding = torch.zeros(40, dtype=torch.bool)
    padding[[0, 1, 20, 21, 22, 39]] = True
    assert case.log_decay is not None
    for x in (case.k, case.v, case.log_decay):
        x[0, padding] = 0.0
        x[1] = 0.0
    found = run(case, backend)
    short = {n: getattr(case, n)[:1, ~padding] for n in (*LEARNED, "do")}
    # A padded query, too, reads something: its cotangent would reach the others.
    case.do[0, padding] = 0.0
    found = run(case, backend)
    expected = run(replace(case, **short), "matrix")
    for name, x in expected.items():
        assert error(found[name][:1, ~padding], x) < 1e-10, name
    assert not found["o"][1].any() and all(x.isfinite().all() for x in found.values())


def test_queries_have_no_gradient_along_themselves() -> None:
    """Outputs do not depend on the length of q, without ε."""
    case = make_case(1, 60, eps=0.0)
    dq = run(case)["dq"]
    assert (case.q * dq).sum(-1).abs().max() < 1e-12 < dq.abs().max()


def test_right_at_32k_tokens_in_fp32() -> None:
    """Some outputs, and the gradients that they cause, by their rows of the fp64 matrix."""
    queries = torch.tensor([0, 1, 4095, 16384, 20001, 32767])
    case = make_case(1, 32768, (8, 8), heads=1, eps=0.0)
    # Decays that reach far: a token sees about a thousand others.
    assert case.log_decay is not None
    case.log_decay.mul_(1e-3)
    case = case.to(torch.float32, torch.float32)
    of_queries = torch.zeros_like(case.do)
    of_queries[:, queries] = case.do[:, queries]
    found = run(replace(case, do=of_queries))
    found["o"] = found["o"][:, queries]
    exact = replace(case.to(torch.float64, torch.float64), do=case.do[:, queries].double())
    assert_close(found, run(exact, "matrix", queries=queries), 1e-5)


def restrict(case: Case, begin: int, end: int) -> tuple[Case, Tensor]:
    """A rank's tokens [begin, end) of every row, and the rows (B, 1, 1, 1) that begin with a new document."""
    rows, tokens = case.q.shape[:2]
    fresh = torch.zeros(rows, dtype=torch.bool)
    cu_seqlens = None
    if case.cu_seqlens is not None:
        known = set(case.cu_seqlens.tolist())
        inside = [[t - begin for t in range(begin + 1, end) if r * tokens + t in known] for r in range(rows)]
        cu_seqlens = boundaries(inside, end - begin)
        fresh = torch.tensor([0 < begin < end and r * tokens + begin in known for r in range(rows)])
    part = {n: getattr(case, n)[:, begin:end] for n in ("q", "k", "v", "do")}
    if case.log_decay is not None and case.log_decay.dim() == 3:
        part["log_decay"] = case.log_decay[:, begin:end]
    return replace(case, **part, cu_seqlens=cu_seqlens), fresh[:, None, None, None]


def run_over_ranks(case: Case, cuts: list[int]) -> Results:
    """The passes as sequence parallelism composes them, with a rank for each part between two cuts."""
    ranks = [restrict(case, begin, end) for begin, end in pairwise([0, *cuts, case.q.shape[1]])]
    shared = {"gate": case.gate, "normalize": case.normalize}
    summaries = []
    for shard, fresh in ranks:
        local, through = state_fwd(shard.k, shard.v, shard.log_decay, shard.cu_seqlens, **shared)
        # A document that begins with the rank's first token: nothing crosses that border in either direction.
        left = torch.where(fresh, 0.0, local.suffix)
        summaries.append((local.prefix, left, torch.where(fresh, 0.0, through[..., None, None])))
    zero = torch.zeros_like(summaries[0][0])

    def fold(parts: list[Tensor], decays: list[Tensor]) -> list[Tensor]:
        states = [zero]
        for part, decay in zip(parts, decays, strict=True):
            states.append(part + decay * states[-1])
        return states[:-1]

    def around(to_right: list[Tensor], to_left: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        decays = [d for *_, d in summaries]
        return list(zip(fold(to_right, decays), fold(to_left[::-1], decays[::-1])[::-1], strict=True))

    entering = around([p for p, _, _ in summaries], [s for _, s, _ in summaries])
    outputs, states = [], []
    for (shard, fresh), (prefix, suffix) in zip(ranks, entering, strict=True):
        states.append(LionState(torch.where(fresh, 0.0, prefix), suffix))
        found, _ = out_fwd(
            shard.q, shard.k, shard.v, shard.log_decay, states[-1], shard.cu_seqlens, **shared, eps=case.eps
        )
        outputs.append(found)
    reads = []
    for (shard, fresh), found in zip(ranks, outputs, strict=True):
        own = state_bwd(shard.q, shard.do, found, shard.log_decay, shard.cu_seqlens, gate=case.gate)
        reads.append((own.suffix, torch.where(fresh, 0.0, own.prefix)))
    # The suffix' cotangents go to the right, the prefix' to the left.
    cotangents = around([s for s, _ in reads], [p for _, p in reads])
    parts: dict[str, list[Tensor]] = {"o": [found.o for found in outputs]}
    for number, ((shard, fresh), (dsuffix, dprefix)) in enumerate(zip(ranks, cotangents, strict=True)):
        leaving = LionState(dprefix, torch.where(fresh, 0.0, dsuffix))
        gradients = grad_bwd(
            shard.q,
            shard.k,
            shard.v,
            shard.log_decay,
            shard.do,
            outputs[number],
            states[number],
            lambda leaving=leaving: leaving,
            shard.cu_seqlens,
            gate=case.gate,
            with_decay=shard.log_decay is not None,
        )
        for name, x in gradients._asdict().items():
            if isinstance(x, Tensor):
                parts.setdefault(f"d{name}", []).append(x)
    sums = {"dlog_decay"} if case.log_decay is not None and case.log_decay.dim() == 1 else set()
    return {name: torch.stack(x).sum(0) if name in sums else torch.cat(x, 1) for name, x in parts.items()}


@pytest.mark.parametrize("cuts", [[], [20, 21, 21, 47], [0, 0, 60]], ids=["one rank", "uneven", "empty ends"])
@pytest.mark.parametrize(
    ("decays", "starts", "options"),
    [
        ("by token", None, {}),
        ("by token", [[20, 30], [21, 47, 59]], {"gate": "enter"}),
        ("by head", [[], [47]], {"normalize": False}),
        ("none", None, {"eps": 0.0}),
    ],
    ids=["by token", "documents", "sums", "undecayed"],
)
def test_ranks_equal_one_row(
    decays: str, starts: list[list[int]] | None, options: dict[str, Any], cuts: list[int]
) -> None:
    case = make_case(2, 60, decays=decays, starts=starts, **options)
    assert_close(run_over_ranks(case, cuts), run(case, "matrix"), 1e-10)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("gate", ["leave", "enter"])
def test_states_that_enter_and_leave(gate: str, normalize: bool) -> None:
    """With their gradients, by the recurrences; documents cut them off."""
    case = make_case(2, 40, starts=[[7], []], gate=gate, normalize=normalize)
    generator = torch.Generator().manual_seed(1)
    shape = (2, 2, 6, 5 + normalize)
    states = [torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    found = []
    for backend in ("chunked", "reference"):
        leaves = {n: getattr(case, n).detach().requires_grad_() for n in LEARNED}
        entering = LionState(*(x.detach().requires_grad_() for x in states[:2]))
        o, left = lion(
            **leaves, **case.options, initial_state=entering, output_final_state=True, backend=backend, chunk_size=16
        )
        assert left is not None
        leaves |= entering._asdict()
        results = {"o": o, "left prefix": left.prefix, "left suffix": left.suffix}
        found.append(comparing.with_gradients(results, [case.do, *states[2:]], leaves))
    assert_close(*found, 1e-10)


def test_a_state_alone_is_enough_for_the_backward() -> None:
    case = make_case(1, 40)
    k = case.k.requires_grad_()
    for side in range(2):
        _, state = lion(case.q, k, case.v, case.log_decay, output_final_state=True)
        assert state is not None
        _, expected = lion(case.q, k, case.v, case.log_decay, output_final_state=True, backend="reference")
        assert expected is not None
        (found,), (right,) = (torch.autograd.grad(x[side].sum(), k) for x in (state, expected))
        assert error(found, right) < 1e-10


def test_overflow_stays_in_its_document() -> None:
    """The first document's states and the third one's cotangents overflow; the second is as if it were alone."""
    case = make_case(1, 150, (8, 8), starts=[[45, 100]], normalize=False).to(torch.float32, torch.float32)
    case.k[:, 5:40] = case.v[:, 5:40] = 1e30
    case.q[:, 115:] = case.do[:, 115:] = 1e30
    results = run(case, chunk_size=16)
    for name in ("o", "dk", "dv"):
        assert not results[name].isfinite().all()
    part = slice(45, 100)
    alone = {n: getattr(case, n)[:, part] for n in (*LEARNED, "do")}
    expected = run(replace(case, **alone, cu_seqlens=None).to(torch.float64, torch.float64), "matrix")
    for name in ("o", "dq", "dk", "dv", "dlog_decay"):
        assert error(results[name][:, part], expected[name]) < 1e-5, name


def test_a_nan_in_one_row_does_not_hide_the_steep_chunks_of_another() -> None:
    case = make_case(2, 70, (8, 8), decays="by token").to(torch.float32, torch.float32)
    assert case.log_decay is not None
    log_decay = torch.full_like(case.log_decay, -20.0)
    log_decay[0, 3] = torch.nan
    found, _ = lion(case.q, case.k, case.v, log_decay)
    q, k, v = (x[1:].double() for x in (case.q, case.k, case.v))
    expected, _ = lion(q, k, v, log_decay[1:].double(), backend="reference")
    assert not found[0].isfinite().all()
    assert error(found[1:], expected) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str
)
@pytest.mark.parametrize("decays", DECAYS)
def test_lower_precision(dtype: torch.dtype, tolerance: float, decays: str) -> None:
    """Outputs and gradients have the inputs' dtype, the decay's gradient is fp32."""
    rounded = make_case(2, 200, (16, 16), decays=decays, starts=[[64, 133], [1, 100]]).to(dtype, torch.float32)
    results = run(rounded)
    assert {results[n].dtype for n in ("o", "dq", "dk", "dv")} == {dtype}
    assert results.get("dlog_decay", torch.ones(1)).dtype == torch.float32
    assert_close(results, run(rounded.to(torch.float64, torch.float64), "matrix"), tolerance)


@pytest.mark.parametrize("decay", [-0.05, -3.0, -8.0, -20.0])
def test_the_gradient_of_a_strong_decay_keeps_its_digits(decay: float) -> None:
    """It is far smaller than what each token reads of itself."""
    case = make_case(2, 100, (16, 24), decays="by head", heads=1)
    assert case.log_decay is not None
    case = replace(case, log_decay=torch.full_like(case.log_decay, decay))
    expected = run(case.to(torch.float32, torch.float32).to(torch.float64, torch.float64), "matrix")["dlog_decay"]
    assert error(run(case.to(torch.float32, torch.float32))["dlog_decay"], expected) < 1e-5


class _Allocated(TorchDispatchMode):
    """The elements of all results of torch's operators: what is written, once or more; and the largest exponent."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.exponent = 0, -torch.inf

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.exp, torch.ops.aten.exp_):
            self.exponent = max(self.exponent, float(args[0].max()))
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else (found,):
            if isinstance(x, Tensor):
                self.elements += x.numel()
        return found


@pytest.mark.parametrize("decays", ["by token", "by head"])
def test_operations_and_memory_are_linear_and_exponents_are_small(decays: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: of the products, of what all operators write, and of what is kept for the backward pass."""
    monkeypatch.setattr(chunk_batches, "_BATCH_ELEMENTS", 4 * 2 * 16 * 8)
    counts = []
    for tokens in (128, 256, 384):
        case = make_case(1, tokens, (8, 8), decays=decays)
        saved: list[int] = []

        def pack(x: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(x.numel())
            return x

        flops, written = FlopCounterMode(display=False), _Allocated()
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
        with hooks, written, flops:
            run(case, chunk_size=16)
        assert -torch.inf < written.exponent <= -chunk_batches._STEEP / 2
        counts.append((flops.get_total_flops(), written.elements, sum(saved)))
    for first, second, third in zip(*counts, strict=True):
        assert third - second == second - first > 0
    # Each product of widths K, V + 1 or 2K: of pairs 2 forward and 5 backward, of states 2 and 5 times both sides.
    C, K, W = 16, 8, 9
    forward = 2 * C * (K + W) + 2 * 2 * (2 * K * W)
    backward = 2 * C * (3 * K + 2 * W) + 5 * 2 * (2 * K * W)
    assert counts[1][0] - counts[0][0] == 128 * 2 * (forward + backward)


def test_strided_inputs_are_read_and_left_alone() -> None:
    case = make_case(2, 50, (8, 8))
    packed = torch.cat([case.q, case.k, case.v], dim=-1)
    q, k, v = packed.split(8, dim=-1)
    copy = packed.clone()
    strided = replace(case, q=q, k=k, v=v, do=case.do.transpose(1, 2).contiguous().transpose(1, 2))
    assert_close(run(strided), run(case), 1e-14)
    assert torch.equal(packed, copy)


def test_finite_differences() -> None:
    case = make_case(1, 6, (2, 3), heads=1, starts=[[2]])
    leaves = [getattr(case, n).requires_grad_() for n in LEARNED]
    assert torch.autograd.gradcheck(lambda *x: lion(*x, cu_seqlens=case.cu_seqlens, chunk_size=4)[0], leaves)


def test_autocast_does_not_touch_the_states() -> None:
    case = make_case(1, 100, (16, 16)).to(torch.float32, torch.float32)
    expected = run(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(case)
    assert all(torch.equal(actual[n], expected[n]) for n in expected)

"""State passing by the Triton kernels: its results, interpreted in fp32, and how much a GPU would be given to launch.

All ranks are in one process here: test_sequence.py has the exchanges, and the operators by PyTorch, on processes.
"""

import itertools
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.kernels.common.backends import set_default_backend
from lightscale.parallel.sequence import GatedScan, LightNetScan, LightningScan, Scan, TPEScan

HERE = Path(__file__).parent
sequence = SimpleNamespace(**runpy.run_path(str(HERE / "test_sequence.py")))
launches = SimpleNamespace(**runpy.run_path(str(HERE.parent / "helpers" / "launches.py")))

B, T = sequence.B, sequence.T
# PyTorch alone computes sums over whole documents.
KINDS = tuple(kind for kind in sequence.KINDS if kind != "whole log sum")


@pytest.fixture
def by_triton() -> Iterator[None]:
    set_default_backend("triton")
    yield
    set_default_backend("auto")


def scan_of(kind: str, edges: list[int], rank: int, starts: list[set[int]]) -> Scan:
    scan: Scan = sequence.scan_of(kind, SimpleNamespace(sequence_rank=rank), edges, starts)
    return scan


def own_inputs(kind: str, segment: slice) -> list[Any]:
    """In fp32, the last one what reads."""

    def own(name: str, x: Tensor | None) -> Tensor | None:
        part = sequence.own_part(x, segment)
        if part is None or not part.is_floating_point():
            return part
        return part.float().requires_grad_(sequence.differentiable(kind, name))

    return [own(name, x) for name, x in sequence.inputs_of(kind).items()]


def run_ranks_in_turn(kind: str, edges: list[int], starts: list[set[int]]) -> dict[str, float]:
    """Errors of all ranks' outputs and gradients against the whole row in fp64."""
    exact, expected, upstream = sequence.exact_case(kind, tuple(frozenset(row) for row in starts))
    segments = [slice(first, last) for first, last in itertools.pairwise(edges)]
    scans = [scan_of(kind, edges, rank, starts) for rank in range(len(segments))]
    inputs = [own_inputs(kind, segment) for segment in segments]
    with torch.no_grad():
        # Nothing reads log-sums.
        written = [x if kind == "log sum" else x[:-1] for x in inputs]
        summaries = [scan.summarize(x) for scan, x in zip(scans, written, strict=True)]
        gathered = tuple(torch.stack(parts) for parts in zip(*summaries, strict=True))
        algebra = scans[0].algebra
        folded = [algebra.fold(gathered, None, rank) for rank in range(len(scans))]
        states = [scan.entering(before) for scan, (before, _) in zip(scans, folded, strict=True)]
        transitions = folded[0][1]
        found = [scan.outputs(x, state) for scan, x, state in zip(scans, inputs, states, strict=True)]
        # Outputs alone, or with others that the backward passes find behind the state.
        taken = [x[1:] if isinstance(x, tuple) else () for x in found]
        outputs = [x[0] if isinstance(x, tuple) else x for x in found]
        states = [(*state, *others) for state, others in zip(states, taken, strict=True)]
        do = [upstream[:, segment].float() for segment in segments]
        each = list(zip(scans, inputs, do, states, strict=True))
        reads = tuple(torch.stack(x) for x in zip(*[scan.reads(x, do, s) for scan, x, do, s in each], strict=True))
        gradients = []
        for rank, (scan, x, do_rank, state) in enumerate(each):
            leaving = algebra.fold_back(transitions, reads, rank=rank)
            gradients.append(scan.gradients(x, do_rank, state, lambda found=leaving: found))
    errors = {"o": sequence.error(torch.cat(outputs, 1).double(), expected)}
    for name, of_ranks in zip(exact, zip(*gradients, strict=True), strict=True):
        right = exact[name]
        if right is not None and right.requires_grad:
            whole = torch.cat(of_ranks, 1) if sequence.split_by_token(right) else sum(of_ranks)
            errors[name] = sequence.error(whole.double(), right.grad)
    return errors


def check(kind: str, edges: list[int], documents: str) -> None:
    errors = run_ranks_in_turn(kind, edges, sequence.documents(edges)[documents])
    inputs = sequence.inputs_of(kind)
    assert len(errors) == 1 + sum(sequence.differentiable(kind, name) for name, x in inputs.items() if x is not None)
    for name, value in errors.items():
        assert value < 1e-5, f"{name} is off by {value:.1e}"


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize("kind", ["learned decay", "gated", "delta rule", "tpe", "lightnet", "lion", "log sum"])
def test_two_ranks_compute_what_one_does(kind: str) -> None:
    """One of each summary; documents begin beside the edge."""
    check(kind, [0, 9, T], "beside edges")


MANY_EDGES = {
    "2, one token": ([0, 1, T], "beside edges"),
    "3, one document": ([0, 8, 16, T], "one"),
    "4, first empty": ([0, 0, 5, 9, T], "on an edge"),
    "8": ([0, 1, 4, 8, 8, 14, 15, 20, T], "many in one rank"),
}


def many() -> Iterator[Any]:
    """Each operator with every other layout, each layout with every other operator; the rest takes long."""
    for (row, (name, (edges, documents))), (column, kind) in itertools.product(
        enumerate(MANY_EDGES.items()), enumerate(KINDS)
    ):
        is_soak = (row + column) % 2 == 1 or (name == "8" and kind not in sequence.SUMMARIES)
        yield pytest.param(kind, edges, documents, id=f"{name}-{kind}", marks=[pytest.mark.soak] if is_soak else [])


@pytest.mark.long
@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize(("kind", "edges", "documents"), many())
def test_ranks_compute_what_one_does(kind: str, edges: list[int], documents: str) -> None:
    check(kind, edges, documents)


# ----- how much is launched ------------------------------------------------------------------------------------------

# Of a layer, forward and backward; docs/explanation/state-passing.md has those of `gather`. More want a reason.
BUDGETS = {
    "lightning": {"gather": 31, "two_level": 49, "ring": 33},
    "angles": {"gather": 41, "two_level": 59, "ring": 43},
    "gla": {"gather": 34, "two_level": 52, "ring": 36},
    "lightnet": {"gather": 48, "two_level": 74, "ring": 53},
    "tpe": {"gather": 33, "two_level": 50, "ring": 35},
}
# Where documents begin: the position of each token's.
FOR_DOCUMENTS = 8


def layer(kind: str, tokens: int, *, documents: bool) -> tuple[Scan, list[Tensor | None], Tensor]:
    """A layer's scan and its inputs on one rank, with states of two heads of 16 x 16."""
    shape = (1, tokens, 2, 16)
    k, v, q, gate = (torch.ones(shape, requires_grad=True) for _ in range(4))
    angles = [torch.ones(2, 16), torch.arange(tokens)[None]]
    written: dict[str, tuple[type[Scan], list[Tensor | None]]] = {
        "lightning": (LightningScan, [k, v, -torch.ones(2), None, None]),
        "angles": (LightningScan, [k, v, None, angles[0].requires_grad_(), angles[1]]),
        "gla": (GatedScan, [k, v, gate]),
        "lightnet": (LightNetScan, [k, v, *(x.detach() for x in angles)]),
        "tpe": (TPEScan, [k.detach()[..., 0].requires_grad_(), -torch.ones(16, requires_grad=True)]),
    }
    kind_of_scan, inputs = written[kind]
    cu_seqlens = torch.tensor([0, tokens // 2, tokens]) if documents else None
    scan = kind_of_scan(continues=torch.ones(1, dtype=torch.bool), cu_seqlens=cu_seqlens)
    return scan, inputs, torch.ones(2, 16, requires_grad=True) if kind == "tpe" else q


def launched(kind: str, exchange: str, ranks: int, tokens: int, *, documents: bool = False) -> int:
    scan, written, read = layer(kind, tokens, documents=documents)
    with launches.counted() as found:
        launches.pass_states(scan, launches.exchange_of(exchange, ranks), written, read)
    assert found.num_kernels > 10
    return len(found.names)


@pytest.mark.parametrize("kind", BUDGETS)
@pytest.mark.parametrize("exchange", ["gather", "two_level", "ring"])
def test_launches_depend_neither_on_the_length_nor_on_the_ranks(kind: str, exchange: str) -> None:
    usual = launched(kind, exchange, 16, 8192)
    assert usual <= BUDGETS[kind][exchange]
    assert launched(kind, exchange, 128, 8192) == usual
    assert launched(kind, exchange, 16, 32768) == usual
    assert usual < launched(kind, exchange, 16, 8192, documents=True) <= usual + FOR_DOCUMENTS


@pytest.mark.parametrize("kind", ["lightning", "gla", "lightnet"])
def test_gradients_are_begun_while_the_cotangent_travels(kind: str) -> None:
    """Before it is waited for: states made again, and gradients of queries where they are a kernel of their own."""
    scan, written, read = layer(kind, 8192, documents=False)
    inputs = [*written, read]
    with launches.counted() as found:
        state = scan.algebra.empty(scan.summarize(written))
        reads = scan.reads(inputs, torch.ones_like(inputs[1]), state)
        before: list[str] = []
        start = len(found.names)

        def leaving() -> Any:
            before.extend(found.names[start:])
            return reads

        scan.gradients(inputs, torch.ones_like(inputs[1]), state, leaving)
    after = found.names[start + len(before) :]
    own = {"lightning": "attend", "gla": "prepare", "lightnet": "query_gradients"}[kind]
    assert {"scan_states", own} <= set(before)
    assert any("scan" in name for name in after), "the cotangents' scan needs it"

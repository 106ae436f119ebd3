"""Sequence parallelism of the operators by themselves, over every exchange; whole models are in test_parity.py.

One start of the processes runs all cases. Upstream gradients are random and differ by rank: equal ones hide errors of
a gather's backward. What a rank holds is cut anywhere, down to nothing.
"""

import functools
import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from lightscale.errors import UserError
from lightscale.kernels.common.angles import angles_of
from lightscale.kernels.delta_rule.reference import delta_rule_reference
from lightscale.kernels.gla.reference import gla_reference
from lightscale.kernels.lightnet.reference import lightnet_attention_reference, lightnet_noncausal_reference
from lightscale.kernels.lightning.reference import lightning_attention_reference
from lightscale.kernels.lion.reference import lion_reference
from lightscale.kernels.log_sum.reference import log_sum_reference, log_sum_whole_reference
from lightscale.kernels.tpe.reference import tpe_scan_reference
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.parallel.sequence import (
    BothWays,
    DeltaRuleScan,
    GatedScan,
    LightNetScan,
    LightNetWholeScan,
    LightningScan,
    LionScan,
    LionVectorScan,
    LogSumScan,
    LogSumWholeScan,
    Scan,
    TPEScan,
    begin,
    begin_gather,
    begin_tail,
)
from lightscale.training.profile import StepProfiler

RunRanks = Callable[..., list[Any]]
B, T, H, K, V = 2, 24, 3, 4, 5
DOUBLE = torch.float64
KINDS = (
    "undecayed", "decay", "learned decay", "token decay", "token decay, angles", "angles", "gated", "tpe", "lightnet",
    "lightnet with angles", "lion", "lion unscaled", "lion by channel", "lightnet whole", "lightnet whole with angles",
    "gated both ways", "decay both ways", "log sum", "whole log sum", "delta rule", "delta rule by channel",
    "delta rule undecayed",
)  # fmt: skip
# One of each summary: exchanges see no more of an operator. (Heads, channels, modes, a log-sum-exp, both sides,
# a matrix.)
SUMMARIES = (
    "decay", "gated", "tpe", "lightnet", "lion", "lightnet whole", "gated both ways", "log sum", "whole log sum",
    "delta rule",
)  # fmt: skip
CUT = ("decay", "token decay", "gated", "tpe", "lightnet", "log sum", "delta rule")
Tensors = dict[str, Tensor | None]


def inputs_of(kind: str, seed: int = 0, tokens: int = T) -> Tensors:
    """Whole inputs; those that are split along the sequence have (B, T, …), decays differ by head and channel."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=DOUBLE, generator=generator)

    k, v, q = normal(B, tokens, H, K), normal(B, tokens, H, V), normal(B, tokens, H, K)
    decay = -torch.tensor([0.01, 0.3, 2.0], dtype=DOUBLE)
    match kind:
        case "undecayed":
            return {"k": k, "v": v, "log_decay": None, "theta": None, "positions": None, "q": q}
        case "decay" | "learned decay":
            return {"k": k, "v": v, "log_decay": decay, "theta": None, "positions": None, "q": q}
        case "lion":
            return {"k": k.abs(), "v": v, "log_decay": -torch.exp(3 * normal(B, tokens, H)), "q": q.abs()}
        case "lion by channel":
            return {"k": k.abs(), "v": v, "log_decay": -torch.exp(3 * normal(B, tokens, H, V)), "q": q.abs()}
        case "lion unscaled":
            return {"k": k, "v": v, "log_decay": decay, "q": q}
        case "token decay":
            # Some tokens forget all, some nothing.
            decay = -torch.exp(3 * normal(B, tokens, H))
            return {"k": k, "v": v, "log_decay": decay, "theta": None, "positions": None, "q": q}
        case "token decay, angles":
            angles = {"theta": normal(H, K), "positions": torch.arange(tokens).repeat(B, 1)}
            return {"k": k, "v": v, "log_decay": -torch.exp(3 * normal(B, tokens, H)), **angles, "q": q}
        case "angles":
            positions = torch.arange(tokens).repeat(B, 1)
            return {"k": k, "v": v, "log_decay": decay, "theta": normal(H, K), "positions": positions, "q": q}
        case "decay both ways":
            angles = {"theta": normal(H, K), "positions": torch.arange(tokens).repeat(B, 1)}
            return {"k": k, "v": v, "log_decay": decay, **angles, "q": q}
        case "gated" | "gated both ways":
            # Some gates are as good as shut, some as good as open.
            return {"k": k, "v": v, "log_decay": -torch.exp(3 * normal(B, tokens, H, K)), "q": q}
        case "delta rule" | "delta rule by channel" | "delta rule undecayed":
            decays = {"delta rule": (H,), "delta rule by channel": (H, K)}.get(kind)
            return {
                "k": torch.nn.functional.normalize(k, dim=-1),
                "v": v,
                "log_decay": None if decays is None else -torch.exp(3 * normal(B, tokens, *decays)),
                # Up to 2: states may change their sign.
                "beta": 2 * normal(B, tokens, H).sigmoid(),
                "q": q,
            }
        case "log sum" | "whole log sum":
            # Of a few tokens alone, so that those of other ranks count.
            return {"b": 3 * normal(B, tokens, H * K)}
        case "tpe":
            return {"x": normal(B, tokens, H * K), "log_decay": decay, "gamma": normal(H * K, 3)}
        case _:
            angles = {"theta": normal(H, K), "positions": torch.arange(tokens).repeat(B, 1)}
            # Weights of e^40 beside e^-40; over whole documents they would leave those of most tokens no gradient, but
            # the rounding of p (dp - c).
            return {
                "k": (4 if "whole" in kind else 20) * k,
                "v": v,
                **(angles if "angles" in kind else dict.fromkeys(angles)),
                "q": q,
            }


SCANS: dict[str, Callable[..., Scan]] = {
    "tpe": TPEScan,
    "gated": GatedScan,
    "gated both ways": functools.partial(BothWays, of=GatedScan),
    "decay both ways": functools.partial(BothWays, of=LightningScan),
    "delta rule": DeltaRuleScan,
    "delta rule by channel": DeltaRuleScan,
    "delta rule undecayed": DeltaRuleScan,
    "lightnet": LightNetScan,
    "lightnet with angles": LightNetScan,
    "lightnet whole": LightNetWholeScan,
    "lightnet whole with angles": LightNetWholeScan,
    "lion": LionScan,
    "lion by channel": LionVectorScan,
    "log sum": LogSumScan,
    "whole log sum": LogSumWholeScan,
    "lion unscaled": functools.partial(LionScan, gate="enter", normalize=False),
}
LEARNED = {
    "learned decay": {"log_decay"},
    "token decay": {"log_decay"},
    "token decay, angles": {"log_decay", "theta"},
    "lion": {"log_decay"},
    "lion by channel": {"log_decay"},
    "lion unscaled": {"log_decay"},
    "angles": {"theta"},
    "decay both ways": {"log_decay", "theta"},
    "lightnet with angles": {"theta"},
    "lightnet whole with angles": {"theta"},
    "tpe": {"log_decay", "gamma"},
    "delta rule": {"log_decay"},
    "delta rule by channel": {"log_decay"},
}
FIXED = {"log_decay", "theta", "positions"}


def differentiable(kind: str, name: str) -> bool:
    return name not in FIXED or kind.startswith("gated") or name in LEARNED.get(kind, ())


def split_by_token(x: Tensor | None) -> bool:
    return x is not None and (x.dim() >= 3 or x.dtype == torch.int64)


def reference(kind: str, x: Tensors, cu_seqlens: Tensor | None) -> Tensor:
    if kind.endswith(" both ways"):
        one_way = kind.removesuffix(" both ways")
        # Row by row from its end, unlike ``doubled``, which turns the rows around as well.
        image = {name: value.flip(1) if split_by_token(value) else value for name, value in x.items()}
        cut = None if cu_seqlens is None else image_bounds(cu_seqlens)
        return reference(one_way, x, cu_seqlens) + reference(one_way, image, cut).flip(1)
    if kind == "tpe":
        return tpe_scan_reference(x["x"], x["log_decay"], x["gamma"], cu_seqlens=cu_seqlens)[0]
    if kind == "gated":
        return gla_reference(x["q"], x["k"], x["v"], x["log_decay"], cu_seqlens=cu_seqlens)[0]
    if kind.startswith("delta rule"):
        return delta_rule_reference(x["q"], x["k"], x["v"], x["log_decay"], x["beta"], cu_seqlens=cu_seqlens)[0]
    if kind == "log sum":
        return log_sum_reference(x["b"], cu_seqlens=cu_seqlens)[0]
    if kind == "whole log sum":
        return log_sum_whole_reference(x["b"], cu_seqlens=cu_seqlens)
    if kind.startswith("lightnet"):
        angles = angles_of(x["theta"], x["positions"])
        if "whole" in kind:
            return lightnet_noncausal_reference(x["q"], x["k"], x["v"], angles=angles, cu_seqlens=cu_seqlens)
        return lightnet_attention_reference(x["q"], x["k"], x["v"], angles=angles, cu_seqlens=cu_seqlens)[0]
    if kind.startswith("lion"):
        options = {"gate": "enter", "normalize": False} if "unscaled" in kind else {}
        return lion_reference(x["q"], x["k"], x["v"], x["log_decay"], cu_seqlens=cu_seqlens, **options)[0]
    angles = angles_of(x["theta"], x["positions"])
    return lightning_attention_reference(x["q"], x["k"], x["v"], x["log_decay"], angles=angles, cu_seqlens=cu_seqlens)[
        0
    ]


def image_bounds(cu_seqlens: Tensor) -> Tensor:
    """Of rows that are each turned around."""
    tokens = int(cu_seqlens[-1]) // B
    edges = {row * tokens + tokens - (int(x) - row * tokens) for row in range(B) for x in cu_seqlens
             if row * tokens <= x <= (row + 1) * tokens}  # fmt: skip
    return torch.tensor(sorted(edges))


def boundaries(starts: list[set[int]], first: int, last: int) -> Tensor | None:
    """cu_seqlens of the tokens first … last - 1 of each row, whose documents begin at ``starts``."""
    n = last - first
    edges = {row * n for row in range(B)} | {
        row * n + start - first for row in range(B) for start in starts[row] if first <= start < last
    }
    return torch.tensor([*sorted(edges), B * n]) if n and len(edges) > B else None


def documents(edges: list[int]) -> dict[str, list[set[int]]]:
    """By name: where the documents of the two rows begin."""
    inner = [edge for edge in edges[1:-1] if 0 < edge < T]
    edge = inner[0] if inner else T // 2
    return {
        "one": [set(), set()],
        "on an edge": [{edge}, set()],
        "beside edges": [{max(edge - 1, 1)}, {min(edge + 1, T - 1)}],
        "many in one rank": [set(range(1, 6)), {T - 3, T - 2, T - 1}],
        "over three ranks": [{1, T - 1}, {2}],
    }


def layouts(ranks: int) -> dict[str, list[int]]:
    """By name: where each rank's tokens begin, and the end."""
    found = {
        "equal": [T * rank // ranks for rank in range(ranks + 1)],
        "one token": [0, *range(1, ranks), T],
        "first empty": [0, 0, *range(3, ranks + 1), T],
    }
    # Of two ranks none is between others.
    return found if ranks == 2 else {**found, "empty": [0, *[T // 2] * (ranks - 1), T]}


def combinations(ranks: int, turn: int, whole: bool) -> list[tuple[str, str]]:
    """Layouts × documents: all, or each layout with one kind of documents, another with each ``turn``.

    Five turns in a row cover the product. A turn counts operators and exchanges, so that every exchange meets all of it
    with the operators together, and every operator with the exchanges together.
    """
    found = []
    for number, (layout, edges) in enumerate(layouts(ranks).items()):
        names = [*documents(edges)]
        found += [(layout, name) for name in (names if whole else [names[(number + turn) % len(names)]])]
    return found


def own_part(x: Tensor | None, segment: slice) -> Tensor | None:
    return x[:, segment].clone() if x is not None and split_by_token(x) else x


def scan_of(kind: str, mesh: Mesh, edges: list[int], starts: list[set[int]]) -> Scan:
    first, last = edges[mesh.sequence_rank], edges[mesh.sequence_rank + 1]
    continues = torch.tensor([first > 0 and first not in starts[row] for row in range(B)])
    scan, cut = SCANS.get(kind, LightningScan), boundaries(starts, first, last)
    if "whole" in kind:
        scan = functools.partial(scan, bounds=None if cut is None else tuple(cut.tolist()))
    return scan(continues=continues, cu_seqlens=cut)


def pass_states(kind: str, mesh: Mesh, x: Tensors, scan: Scan) -> Tensor:
    assert mesh.exchange is not None
    if "log sum" in kind:
        # Nothing reads.
        return begin(scan, mesh.exchange, *x.values())()
    *written, read = x.values()
    return begin(scan, mesh.exchange, *written)(read)


def error(found: Tensor, expected: Tensor) -> float:
    size = float(expected.norm())
    return float((found - expected).norm()) / (size or 1.0)


@functools.cache
def exact_case(kind: str, starts: tuple[frozenset[int], ...]) -> tuple[Tensors, Tensor, Tensor]:
    """Whole inputs with their gradients, outputs, and upstream gradients."""
    exact = {
        name: x.clone().requires_grad_() if x is not None and differentiable(kind, name) else x
        for name, x in inputs_of(kind).items()
    }
    expected = reference(kind, exact, boundaries([set(row) for row in starts], 0, T))
    upstream = torch.randn(expected.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    expected.backward(upstream)
    return exact, expected.detach(), upstream


def run_case(kind: str, mesh: Mesh, edges: list[int], starts: list[set[int]]) -> dict[str, float]:
    """Errors of this rank's outputs and of every gradient, those of shared parameters summed over the ranks."""
    exact, expected, upstream = exact_case(kind, tuple(frozenset(row) for row in starts))
    segment = slice(edges[mesh.sequence_rank], edges[mesh.sequence_rank + 1])
    own = {
        name: own_part(x, segment).detach().requires_grad_(differentiable(kind, name)) if x is not None else None
        for name, x in inputs_of(kind).items()
    }
    o = pass_states(kind, mesh, own, scan_of(kind, mesh, edges, starts))
    o.backward(upstream[:, segment])
    errors = {"o": error(o.detach(), expected[:, segment])}
    for name, x in own.items():
        if x is None or not x.requires_grad:
            continue
        gradient, whole = x.grad, exact[name]
        assert gradient is not None and whole is not None and whole.grad is not None
        if split_by_token(x):
            errors[name] = error(gradient, whole.grad[:, segment])
        else:
            dist.all_reduce(gradient)
            errors[name] = error(gradient, whole.grad)
    return errors


def payloads(kind: str, mesh: Mesh, tokens: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Calls and bytes of this rank, forward and backward each."""
    n = tokens // mesh.sequence
    segment = slice(mesh.sequence_rank * n, (mesh.sequence_rank + 1) * n)
    x = {
        name: own_part(x, segment).requires_grad_(differentiable(kind, name)) if x is not None else None
        for name, x in inputs_of(kind, tokens=tokens).items()
    }
    scan = SCANS.get(kind, LightningScan)(continues=torch.full((B,), segment.start > 0), cu_seqlens=None)
    exchange = mesh.exchange
    assert exchange is not None
    before = exchange.num_calls, exchange.payload_bytes
    o = pass_states(kind, mesh, x, scan)
    middle = exchange.num_calls, exchange.payload_bytes
    o.sum().backward()
    after = exchange.num_calls, exchange.payload_bytes
    calls, sent = (tuple(b - a for a, b in itertools.pairwise(x)) for x in zip(before, middle, after, strict=True))
    return calls, sent


@torch.no_grad()
def undisturbed(kind: str, mesh: Mesh) -> bool:
    """Whether a change on rank 1, down to overflows, leaves earlier ranks and later documents bitwise the same.

    But for LightNet's documents on that rank, which may share a reference with the changed keys, and so rounding, and
    the delta rule's, whose chunk has written what overflowed.
    """
    edges = [T * rank // mesh.sequence for rank in range(mesh.sequence + 1)]
    # A document begins on every rank from the third on, and in the middle of the second.
    starts = [{*edges[2:-1], edges[1] + 2}] * B
    segment = slice(edges[mesh.sequence_rank], edges[mesh.sequence_rank + 1])
    outputs = []
    for changed in (False, True):
        x = {name: own_part(value, segment) for name, value in inputs_of(kind).items()}
        if changed and mesh.sequence_rank == 1:
            # Only tokens of the document that ends on this rank.
            first = next(iter(x.values()))
            assert first is not None
            first[:, :2] = 1e300 if kind not in ("lightnet", "log sum") else 700.0
        outputs.append(pass_states(kind, mesh, x, scan_of(kind, mesh, edges, starts)))
    ours = [o[:, 2:] if mesh.sequence_rank == 1 else o for o in outputs]
    own_chunk = kind == "delta rule" and mesh.sequence_rank == 1
    same = own_chunk or torch.equal(*ours) or (kind == "lightnet" and mesh.sequence_rank == 1 and error(*ours) < 1e-15)
    changed_something = mesh.sequence_rank != 1 or not torch.equal(outputs[0][:, :2], outputs[1][:, :2])
    return same and changed_something


EXCHANGES = ("gather", "ring", "two_level of 1", "two_level of 2", "two_level of all")
Found = dict[tuple[str, ...], Any]


def on_ranks(
    rank: int, world_size: int, init_method: str, exchanges: list[str], kinds: tuple[str, ...], whole: bool
) -> dict[str, Found]:
    found: dict[str, Found] = {"errors": {}, "payloads": {}, "undisturbed": {}}
    for number, name in enumerate(exchanges):
        exchange, _, size = name.partition(" of ")
        with start_mesh(
            sequence=world_size,
            rank=rank,
            world_size=world_size,
            init_method=f"{init_method}-{number}",
            exchange=exchange,
            ranks_per_node=int(size) if size.isdigit() else None,
            timeout_s=60,
        ) as mesh:
            for of_kind, kind in enumerate(kinds):
                for layout, row_documents in combinations(world_size, of_kind + EXCHANGES.index(name), whole):
                    case = (name, kind, layout, row_documents)
                    print("case:", *case, flush=True)
                    edges = layouts(world_size)[layout]
                    found["errors"][case] = run_case(kind, mesh, edges, documents(edges)[row_documents])
                found["payloads"][name, kind] = [payloads(kind, mesh, tokens) for tokens in (T, 2 * T)]
                if world_size > 2 and kind in CUT:
                    found["undisturbed"][name, kind] = undisturbed(kind, mesh)
    return found


def sizes(kind: str) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Shapes of what a rank sums up, of the state, and of its cotangent, by the formulas."""
    if kind == "tpe":
        return [[B, H * K, 3], [B, 1, 3]], [[B, H * K, 3]], [[B, H * K, 3]]
    if kind.endswith(" both ways"):
        summary, state, cotangent = sizes({"decay both ways": "angles"}.get(kind, "gated"))
        return [*state, *summary], 2 * state, 2 * cotangent
    if kind == "gated":
        return [[B, H, K, V], [B, H, K]], [[B, H, K, V]], [[B, H, K, V]]
    if kind.startswith("delta rule"):
        # K (K + V) numbers of each head, whatever the decays.
        return [[B, H, K, V], [B, H, K, K]], [[B, H, K, V]], [[B, H, K, V]]
    if "log sum" in kind:
        sides = [[B, H * K]] * (2 if "whole" in kind else 1)
        return [*sides, [B, 1]], sides, sides
    if "whole" in kind:
        average = [[B, H, K], [B, H, 2 * K if "angles" in kind else K, V]]
        return [*average, *average, [B, 1]], 2 * average, 2 * average[1:]
    if kind.startswith("lightnet"):
        state = [[B, H, K], [B, H, 2 * K if "angles" in kind else K, V]]
        return [*state, [B, 1]], state, state
    if kind == "lion by channel":
        # A decay for each channel of the values, and of the ones beside them.
        sides = [[B, H, 2 * V, K]] * 2
        return [*sides, [B, H, 2 * V]], sides, sides
    if kind.startswith("lion"):
        sides = [[B, H, K, V + (kind == "lion")]] * 2
        return [*sides, [B, H]], sides, sides
    state = [B, H, 2 * K if "angles" in kind else K, V]
    return [state, [B, H]], [state], [state]


def num_bytes(shapes: list[list[int]], ranks: int = 1) -> int:
    """Of fp64 tensors, heads shared out to ``ranks`` (rounded up); what has no heads is sent whole."""
    total = 0
    for b, heads, *others in shapes:
        own = heads if heads == 1 else -(-heads // ranks)
        total += 8 * b * own * int(torch.tensor(others).prod())
    return total


def expected_payload(name: str, kind: str, rank: int, world_size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    summary, state, cotangent = sizes(kind)
    if name == "gather":
        return (1, 1), (num_bytes(summary), num_bytes(cotangent))
    if name == "ring":
        sends, answers = rank < world_size - 1, rank > 0
        if kind.startswith("lion") or "whole" in kind or "both ways" in kind:
            # One side to each neighbour, there and back.
            one_side = [num_bytes(x[: len(x) // 2]) for x in (state, cotangent)]
            return (sends + answers,) * 2, ((sends + answers) * one_side[0], (sends + answers) * one_side[1])
        return (int(sends), int(answers)), (sends * num_bytes(state), answers * num_bytes(cotangent))
    node = {"1": 1, "2": 2, "all": world_size}[name.rpartition(" ")[2]]
    forward = num_bytes(summary) + num_bytes(summary, node) + num_bytes(state, node)
    return (3, 3), (forward, num_bytes(cotangent) + 2 * num_bytes(cotangent, node))


def check(
    run_ranks: RunRanks,
    world_size: int,
    exchanges: list[str],
    kinds: tuple[str, ...] = KINDS,
    *,
    whole: bool = False,
    timeout_s: float = 500,
) -> None:
    ranks = run_ranks(on_ranks, world_size, exchanges, kinds, whole, timeout_s=timeout_s)
    for rank, found in enumerate(ranks):
        for case, errors in found["errors"].items():
            for tensor, value in errors.items():
                assert value < 1e-10, f"rank {rank} of {world_size}, {case}: {tensor} is off by {value:.1e}"
        for (name, kind), measured in found["payloads"].items():
            expected = expected_payload(name, kind, rank, world_size)
            # Twice as many tokens send just as much.
            assert measured == [expected, expected], f"rank {rank} of {world_size}, {name}, {kind}"
        for case, same in found["undisturbed"].items():
            assert same, f"rank {rank} of {world_size}, {case}"


def test_two_ranks(run_ranks: RunRanks) -> None:
    check(run_ranks, 2, ["gather", "ring", "two_level of 1"], SUMMARIES)


@pytest.mark.long
def test_three_ranks(run_ranks: RunRanks) -> None:
    """Every operator in every combination; with a rank before, one behind, and one between."""
    check(run_ranks, 3, ["gather"], whole=True)


def test_four_ranks(run_ranks: RunRanks) -> None:
    check(run_ranks, 4, ["two_level of 2"], SUMMARIES)


def exchanges_of(world_size: int) -> list[str]:
    return [name for name in EXCHANGES if name != "two_level of 2" or world_size % 2 == 0]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_exchange(run_ranks: RunRanks, world_size: int) -> None:
    check(run_ranks, world_size, exchanges_of(world_size))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_eight_ranks(run_ranks: RunRanks) -> None:
    check(run_ranks, 8, ["gather", "two_level of 2"], timeout_s=800)


# The same operators, exchanges, layouts and documents in all their combinations.


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_exchange_in_every_case(run_ranks: RunRanks, world_size: int) -> None:
    check(run_ranks, world_size, exchanges_of(world_size), whole=True, timeout_s=800)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_eight_ranks_in_every_case(run_ranks: RunRanks) -> None:
    check(run_ranks, 8, ["gather", "two_level of 2"], whole=True, timeout_s=800)


# ----- padding -------------------------------------------------------------------------------------------------------


# Of 24 tokens, 8 on each of three ranks: in the middle, over edges, and all that the first or the second rank has.
PADDING = {
    "inside": {2, 3, 11},
    "over edges": {6, 7, 8, 15, 16, 23},
    "first rank": set(range(8)),
    "second": {*range(8, 16)},
}
# Not where heads have one decay for all tokens: it counts padding, too.
PADDED = ("lion", "lion by channel", "lightnet whole", "lightnet whole with angles")


def without_padding(kind: str, padding: set[int], start: int | None) -> tuple[list[int], Tensors, Tensor, Tensor]:
    """The tokens that are no padding; their inputs with gradients, outputs, and upstream gradients, without ranks."""
    kept = [token for token in range(T) if token not in padding]
    x = {
        name: value[:, kept].clone() if value is not None and split_by_token(value) else value
        for name, value in inputs_of(kind).items()
    }
    for name, value in x.items():
        if value is not None:
            value.requires_grad_(differentiable(kind, name) and value.is_floating_point())
    # Where a document begins with padding, it begins with the first token behind it.
    starts = set() if start is None else {sum(token < start for token in kept)} - {0, len(kept)}
    cuts = sorted({row * len(kept) + edge for row in range(B) for edge in (0, *starts)} | {B * len(kept)})
    o = reference(kind, x, torch.tensor(cuts))
    upstream = torch.randn(o.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))
    o.backward(upstream)
    return kept, x, o.detach(), upstream


def padded_case(kind: str, mesh: Mesh, padding: set[int], start: int | None) -> dict[str, float]:
    """Errors of this rank's tokens, without those of padding: outputs, and gradients of what is split by token."""
    kept, exact, expected, short_upstream = without_padding(kind, padding, start)
    absent = [*padding]
    whole = inputs_of(kind)
    for name in ("k", "v", "log_decay"):
        value = whole.get(name)
        if value is not None and split_by_token(value):
            # Log-keys are exponents: theirs of nothing is -inf.
            value[:, absent] = -torch.inf if name == "k" and "lightnet" in kind else 0.0
    upstream = torch.zeros(B, T, H, V, dtype=DOUBLE)
    upstream[:, kept] = short_upstream
    edges = [T * rank // mesh.sequence for rank in range(mesh.sequence + 1)]
    segment = slice(edges[mesh.sequence_rank], edges[mesh.sequence_rank + 1])
    own = {
        name: None if x is None else own_part(x, segment).detach().requires_grad_(differentiable(kind, name))
        for name, x in whole.items()
    }
    starts: list[set[int]] = [set() if start is None else {start}] * B
    o = pass_states(kind, mesh, own, scan_of(kind, mesh, edges, starts))
    o.backward(upstream[:, segment])
    here = [token - segment.start for token in kept if segment.start <= token < segment.stop]
    there = [number for number, token in enumerate(kept) if segment.start <= token < segment.stop]
    errors = {"o": error(o.detach()[:, here], expected[:, there])}
    for name, x in own.items():
        if x is not None and x.requires_grad and split_by_token(x):
            assert x.grad is not None and exact[name] is not None
            errors[name] = error(x.grad[:, here], exact[name].grad[:, there])  # type: ignore[union-attr,index]
            if "lightnet" in kind and name != "q":
                # What weighs nothing has no gradient, not even NaN.
                gone = [token - segment.start for token in absent if segment.start <= token < segment.stop]
                errors[f"{name} of padding"] = float(x.grad[:, gone].abs().sum())
    return errors


def with_padding(rank: int, world_size: int, init_method: str) -> Found:
    found: Found = {}
    for number, exchange in enumerate(("gather", "ring", "two_level")):
        with start_mesh(
            sequence=world_size,
            rank=rank,
            world_size=world_size,
            init_method=f"{init_method}-{number}",
            exchange=exchange,
            ranks_per_node=1 if exchange == "two_level" else None,
            timeout_s=60,
        ) as mesh:
            for kind, (name, padding), start in itertools.product(PADDED, PADDING.items(), (None, 12)):
                found[exchange, kind, name, f"document at {start}"] = padded_case(kind, mesh, padding, start)
    return found


def test_padding_over_ranks_is_read_by_nobody(run_ranks: RunRanks) -> None:
    """Whole documents: keys that weigh nothing, values of 0 and open gates leave what the other tokens get alone."""
    for rank, found in enumerate(run_ranks(with_padding, 3)):
        assert len(found) == 3 * len(PADDED) * len(PADDING) * 2
        for case, errors in found.items():
            for tensor, value in errors.items():
                assert value < 1e-10, f"rank {rank}, {case}: {tensor} is off by {value:.1e}"


# ----- what runs meanwhile -------------------------------------------------------------------------------------------


def late_neighbour(rank: int, world_size: int, init_method: str, folder: str) -> None:
    """Rank 1 comes when rank 0 has its queries; rank 0 leaves the trace that a run would, of what it did until then."""
    begun, queried = threading.Event(), Path(folder) / "queried"
    with start_mesh(sequence=2, rank=rank, world_size=2, init_method=init_method) as mesh:
        x = {name: None if value is None else value.float() for name, value in inputs_of("decay").items()}
        scan = LightningScan(continues=torch.full((B,), rank > 0), cu_seqlens=None)
        pass_states("decay", mesh, x, scan)
        assert mesh.exchange is not None
        with StepProfiler((1, 1), Path(folder), mesh) as profiler, profiler.step(1):
            # Together, with the profilers on.
            dist.barrier()
            if rank == 1:
                await_(queried.exists)
            gather = mesh.exchange.forward

            def noted(*args: Any) -> Any:
                begun.set()
                return gather(*args)

            mesh.exchange.forward = noted  # type: ignore[method-assign]
            finish = begin(scan, mesh.exchange, x["k"], x["v"], x["log_decay"], None, None)
            with record_function("queries"):
                # The projection of a real model takes longer than a thread needs to start.
                await_(begun.is_set)
                q = x["q"] * 2
            queried.touch()
            finish(q)


def await_(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_trace_shows_queries_beside_the_exchange(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(late_neighbour, 2, str(tmp_path))
    events = json.loads((tmp_path / "rank-00000.trace.json").read_text())["traceEvents"]
    times = {
        event["name"]: (event["ts"], event["ts"] + event["dur"], event["tid"]) for event in events if "dur" in event
    }
    start, stop, thread = times["state exchange: Gather"]
    _, last, other = times["queries"]
    assert start < last < stop, "the queries are not computed beside the exchange"
    assert other != thread
    assert times["outputs"][0] > stop, "outputs are made from the state that came in"


def failing(rank: int, world_size: int, init_method: str) -> str:
    """What an exchange raises reaches the computation that waits for it."""
    with start_mesh(sequence=2, rank=rank, world_size=2, init_method=init_method) as mesh:
        exchange = mesh.exchange
        assert exchange is not None

        def broken(*args: Any) -> None:
            raise OSError("the cable is out")

        wait = exchange.submit(broken, LightningScan.algebra, (torch.zeros(1),))
        try:
            wait()
        except OSError as raised:
            return str(raised)
        return "nothing was raised"


def test_an_error_of_an_exchange_is_raised_where_it_is_waited_for(run_ranks: RunRanks) -> None:
    assert run_ranks(failing, 2) == ["the cable is out"] * 2


# ----- keys and values -----------------------------------------------------------------------------------------------


def gathered(rank: int, world_size: int, init_method: str) -> list[tuple[float, float]]:
    found = []
    with start_mesh(sequence=3, rank=rank, world_size=3, init_method=init_method) as mesh:
        for lengths in ([8, 8, 8], [5, 0, 19], [1, 22, 1]):
            whole = torch.randn(B, T, 2, H, K, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
            upstream = [
                torch.randn(whole.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(other + 1))
                for other in range(3)
            ]
            first = sum(lengths[:rank])
            segment = slice(first, first + lengths[rank])
            own = whole[:, segment].clone().requires_grad_()
            assert mesh.exchange is not None
            result = begin_gather(own, mesh.exchange, None if lengths[0] == 8 else lengths)()
            result.backward(upstream[rank])
            assert own.grad is not None
            found.append((error(result.detach(), whole), error(own.grad, torch.stack(upstream).sum(0)[:, segment])))
    return found


def test_gathered_tokens_and_their_gradients(run_ranks: RunRanks) -> None:
    for found in run_ranks(gathered, 3):
        for values, gradients in found:
            assert values == 0.0
            assert gradients < 1e-15


# ----- tails ---------------------------------------------------------------------------------------------------------


TAIL = 3


def tails(rank: int, world_size: int, init_method: str) -> list[tuple[float, float]]:
    """How far each rank's tail, and the gradients of its own tokens, are from those of one row."""
    found = []
    with start_mesh(sequence=3, rank=rank, world_size=3, init_method=init_method) as mesh:
        # Segments longer than a tail, empty ones, and such that two ranks read one token.
        for lengths in ([8, 8, 8], [5, 1, 2], [4, 0, 3], [1, 1, 1], [0, 2, 1]):
            tokens = sum(lengths)
            whole = torch.randn(tokens, B, K, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)).requires_grad_()
            firsts = [sum(lengths[:other]) for other in range(3)]
            padded = torch.cat([whole.new_zeros(TAIL, B, K), whole])
            expected = torch.stack([padded[first : first + TAIL] for first in firsts])
            upstream = torch.randn(expected.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
            (gradient,) = torch.autograd.grad(expected, whole, upstream)
            behind = firsts[rank] + lengths[rank]
            last = slice(behind - min(TAIL, lengths[rank]), behind)
            own = whole.detach()[last].clone().requires_grad_()
            assert mesh.exchange is not None
            result = begin_tail(own, mesh.exchange, lengths, TAIL, name="layer")()
            result.backward(upstream[rank])
            assert own.grad is not None
            differences = (result - expected[rank], own.grad - gradient[last])
            found.append(tuple(float(one.detach().abs().sum()) for one in differences))
    return found


def test_tails_and_the_gradients_of_what_several_ranks_read(run_ranks: RunRanks) -> None:
    for found in run_ranks(tails, 3):
        for values, gradients in found:
            assert values == 0.0
            assert gradients < 1e-14


# ----- nodes ---------------------------------------------------------------------------------------------------------


def uneven_nodes(rank: int, world_size: int, init_method: str) -> str:
    try:
        with start_mesh(
            sequence=3, rank=rank, world_size=3, init_method=init_method, exchange="two_level", ranks_per_node=2
        ):
            return ""
    except UserError as refused:
        return str(refused)


def test_nodes_with_unequal_shares_are_refused(run_ranks: RunRanks) -> None:
    for message in run_ranks(uneven_nodes, 3):
        for part in ("parallel.exchange", "parallel.ranks_per_node", "[2, 1]", 'use parallel.exchange = "gather"'):
            assert part in message


def test_the_cases_cover_what_they_are_named_for() -> None:
    for ranks in (2, 3, 4, 8):
        for name, edges in layouts(ranks).items():
            segments = [stop - start for start, stop in itertools.pairwise(edges)]
            assert len(segments) == ranks
            assert sum(segments) == T
            assert min(segments) >= 0
            assert (0 in segments) == name.endswith("empty")
            assert name != "one token" or 1 in segments
        different = {tuple(edges) for edges in layouts(ranks).values()}
        assert len(different) == len(layouts(ranks)), "a layout is tested twice"


def test_turns_cover_what_the_product_has() -> None:
    """With five operators in a row, or with the five exchanges."""
    for ranks in (2, 4):
        product = set(combinations(ranks, 0, whole=True))
        for first in range(len(KINDS)):
            assert {case for turn in range(5) for case in combinations(ranks, first + turn, whole=False)} == product

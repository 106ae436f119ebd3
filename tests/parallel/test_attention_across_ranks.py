"""Softmax attention across sequence ranks: what one rank computes, what is held, and what is sent."""

import itertools
import math
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightscale.kernels.attention import HeadMaxima
from lightscale.models.layers.context import SequenceContext
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.parallel.sequence import key_ring
from lightscale.parallel.sequence.ring_plan import HalfReads, RingPlan, first_half

RunRanks = Callable[..., list[Any]]
drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "drawing.py")))

DOUBLE = torch.float64
B, T, HEADS, K = 2, 24, 12, 4
# Where documents begin, in each row.
DOCUMENTS = {
    "whole rows": ((), ()),
    "one row is long": ((5, 6, 12), ()),
    "on the edges": ((6, 12, 18), (8, 16)),
    "many": (tuple(range(2, T, 3)), tuple(range(1, T, 4))),
}
KINDS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 5},
    "capped": {"causal": True, "window": 11, "cap": 1.5},
    "both ways": {"causal": False},
}
EDGES = ("equal", "uneven", "empty")
ATTENTIONS = ("gather", "ring", "all_to_all")


def lengths_of(edges: str, ranks: int) -> tuple[int, ...]:
    if edges == "equal":
        return (T // ranks,) * ranks
    cuts = [0, *(3 + 4 * rank for rank in range(1, ranks)), T]
    if edges == "empty":
        cuts[ranks // 2] = cuts[ranks // 2 + 1]
    return tuple(stop - start for start, stop in itertools.pairwise(cuts))


def positions_of(documents: str) -> Tensor:
    positions = torch.arange(T).repeat(B, 1)
    for row, starts in zip(positions, DOCUMENTS[documents], strict=True):
        for start in starts:
            row[start:] = torch.arange(T - start)
    return positions


def inputs_of(groups: int, *, has_sinks: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(groups)
    shapes = [(B, T, HEADS, K), (B, T, groups, K), (B, T, groups, K), *([(HEADS,)] * has_sinks)]
    return [torch.randn(shape, dtype=DOUBLE, generator=generator) for shape in shapes]


def logits(
    positions: Tensor, q: Tensor, k: Tensor, *, causal: bool, window: int | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Of all pairs of tokens, whether the first reads the second (b, 1, n, n), and the scores (b, h, n, n)."""
    number = (positions == 0).cumsum(dim=1)
    seen = number[:, :, None] == number[:, None]
    back = torch.arange(T)[:, None] - torch.arange(T)
    if causal:
        seen = seen & (back >= 0) & (back < (window or T))
    k = k.repeat_interleave(HEADS // k.size(2), dim=2)
    return seen[:, None], torch.einsum("bthk, bshk -> bhts", q, k) / K**0.5


def dense(
    positions: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, causal: bool,
    window: int | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    """By all pairs of tokens."""
    seen, scores = logits(positions, q, k, causal=causal, window=window)
    v = v.repeat_interleave(HEADS // v.size(2), dim=2)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    weights = torch.where(seen, scores.exp(), 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    total = total if sinks is None else total + sinks.exp()[:, None, None]
    return torch.einsum("bhts, bshk -> bthk", weights / total, v)


def error(x: Tensor, expected: Tensor) -> float:
    return float((x - expected).norm() / (expected.norm() + 1e-30)) if expected.numel() else 0.0


Case = tuple[str, str, str, str, int, bool]


def of_ranks(mesh: Mesh, case: Case) -> Iterator[tuple[str, float]]:
    """By the name of the tensor: how far this rank's part is from the same part of one rank's."""
    _, edges, documents, kind, groups, has_sinks = case
    lengths, positions = lengths_of(edges, mesh.sequence), positions_of(documents)
    inputs = [x.requires_grad_() for x in inputs_of(groups, has_sinks=has_sinks)]
    upstream = torch.randn(B, T, HEADS, K, dtype=DOUBLE, generator=torch.Generator().manual_seed(7))
    expected = dense(positions, *inputs, **KINDS[kind])
    gradients = torch.autograd.grad(expected, inputs, upstream)
    seen, scores = logits(positions, *inputs[:2], **KINDS[kind])
    # They are kept in fp32.
    largest = torch.where(seen, scores, -torch.inf).amax(dim=(0, 2, 3)).detach()
    first = sum(lengths[: mesh.sequence_rank])
    own = slice(first, first + lengths[mesh.sequence_rank])
    context = SequenceContext.of(positions[:, own], exchange=mesh.exchange, across=mesh.attention, lengths=lengths)
    parts = [(x if x.dim() == 1 else x[:, own]).detach().clone().requires_grad_() for x in inputs]
    sinks = parts[3] if has_sinks else None
    # Two layers of one pass share what is known of the documents.
    for layer in range(2):
        attention = context.attention_of(**KINDS[kind])
        maxima = HeadMaxima(layer, 0, HEADS, torch.device("cpu"))
        o = context.begin_attention(attention, parts[1], parts[2], sinks, maxima)(parts[0])
        assert mesh.exchange is not None
        torch.distributed.all_reduce(maxima.values, torch.distributed.ReduceOp.MAX, group=mesh.exchange.group)
        yield f"{layer}: largest logits", error(maxima.values, largest) * 1e-6
        found = torch.autograd.grad(o, parts, upstream[:, own])
        yield f"{layer}: o", error(o.detach(), expected[:, own].detach())
        for name, gradient, of_one in zip("qkv", found[:3], gradients[:3], strict=True):
            # Relative to all tokens': what is zero but for rounding has no size of its own.
            yield f"{layer}: d{name}", float((gradient - of_one[:, own]).norm() / of_one.norm())
        if sinks is not None:
            total = found[3].clone()
            torch.distributed.all_reduce(total, group=mesh.exchange.group)
            yield f"{layer}: dsinks", error(total, gradients[3])


def compared(rank: int, world_size: int, init_method: str, cases: list[Case]) -> dict[Case, dict[str, float]]:
    found = {}
    for number, (attention, same) in enumerate(itertools.groupby(cases, key=lambda case: case[0])):
        with start_mesh(
            sequence=world_size, rank=rank, world_size=world_size, init_method=f"{init_method}-{number}",
            attention=attention,  # type: ignore[arg-type]
        ) as mesh:  # fmt: skip
            found |= {case: dict(of_ranks(mesh, case)) for case in same}
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_attention_across_ranks_is_that_of_one(run_ranks: RunRanks, ranks: int) -> None:
    """Of drawn cases, outputs and every gradient, in fp64, by an oracle of all pairs."""
    axes = (ATTENTIONS, EDGES, list(DOCUMENTS), list(KINDS), (1, ranks, HEADS), (False, True))
    cases = drawing.covering(f"attention across {ranks} ranks", *axes)
    for errors in run_ranks(compared, ranks, cases):
        assert list(errors) == cases
        for case, of_case in errors.items():
            for name, value in of_case.items():
                assert value < 1e-12, f"{case}: {name} is off by {value:.1e}"


# ----- what is held and sent -----------------------------------------------------------------------------------------


def attended(mesh: Mesh, positions: Tensor, **kind: Any) -> Iterator[None]:
    """Forward, and then backward, of one layer whose segments are equal."""
    n = T // mesh.sequence
    own = slice(mesh.sequence_rank * n, (mesh.sequence_rank + 1) * n)
    context = SequenceContext.of(positions[:, own], exchange=mesh.exchange, across=mesh.attention)
    q, k, v = (x[:, own].clone().requires_grad_() for x in inputs_of(2, has_sinks=False))
    output = context.begin_attention(context.attention_of(**kind), k, v, None)(q)
    yield
    output.sum().backward()
    yield


def watched(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    """Most tensors of other ranks alive at once, forward and backward, and to whom messages go, by the kind."""
    most, peers, alive = [0], set[int](), list[StorageWeakRef]()
    send = key_ring.messages

    def messages(exchange: Any, like: Tensor, sent: Any, wanted: Any) -> tuple[Tensor, ...]:
        received = send(exchange, like, sent, wanted)
        alive.extend(StorageWeakRef(x.untyped_storage()) for x in received)
        alive[:] = [one for one in alive if not one.expired()]
        most[0] = max(most[0], len(alive))
        peers.update(to - rank for to, _ in sent)
        return received

    key_ring.messages = messages
    try:
        with start_mesh(
            sequence=world_size, rank=rank, world_size=world_size, init_method=init_method, attention="ring"
        ) as mesh:
            found: dict[str, Any] = {}
            documents = torch.arange(T // world_size).repeat(B, world_size)
            for name, positions, kind in (
                ("causal", positions_of("whole rows"), {"causal": True}),
                ("window", positions_of("whole rows"), {"causal": True, "window": 4}),
                ("own documents", documents, {"causal": False}),
            ):
                peers.clear()
                held = []
                most[0] = 0
                for _ in attended(mesh, positions, **kind):
                    held.append(most[0])
                    most[0] = 0
                found[name] = (held, set(peers))
            return found
    finally:
        key_ring.messages = send


def test_a_rank_holds_as_many_blocks_whatever_the_number_of_ranks(run_ranks: RunRanks) -> None:
    """Blocks of keys: one that is computed with and one that arrives; backward two arriving gradients beside them."""
    for ranks in (2, 6):
        by_rank = run_ranks(watched, ranks)
        for rank, found in enumerate(by_rank):
            forward, backward = found["causal"][0]
            assert forward <= 2 and backward <= 4, f"of {ranks} ranks, rank {rank} holds {forward}, {backward} blocks"
            assert found["own documents"] == ([0, 0], set()), "documents that end with their segments need no message"
            # Keys go on, and gradients come back.
            assert found["window"][1] <= {1, -1}, f"a window of neighbours is sent to {found['window'][1]}"
        assert any(found["window"][1] for found in by_rank)


def plan_of(reads: Any, lengths: tuple[int, ...]) -> RingPlan:
    """``reads``: of a token, the first key and the end of its keys."""
    starts = [0, *itertools.accumulate(lengths)]
    halves = []
    for start, length in zip(starts, lengths, strict=False):
        middle = start + first_half(length)
        parts = [[reads(token) for token in part] for part in (range(start, middle), range(middle, start + length))]
        halves.append(
            tuple(
                HalfReads(min(a for a, _ in part), max(b for _, b in part), sum(b - a for a, b in part))
                if part else HalfReads(0, 0, 0)
                for part in parts
            )
        )  # fmt: skip
    return RingPlan(lengths, tuple(halves))


def causal(token: int) -> tuple[int, int]:
    return 0, token + 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_traded_queries_balance_a_causal_mask(ranks: int) -> None:
    """Pairs of the busiest rank; contiguous segments come near to twice the mean, traded halves to the mean."""
    n = 64
    plan = plan_of(causal, (n,) * ranks)
    mean = sum(plan.pairs) / ranks
    assert sum(plan.pairs) == ranks * n * (ranks * n + 1) // 2
    assert max(plan.pairs) / mean == pytest.approx(2 - 1 / ranks, rel=0.02)
    assert plan.trades
    # Of an odd number, the rank in the middle has the mean too.
    assert max(plan.traded_pairs) / mean == pytest.approx(1, abs=1e-9)
    windowed = plan_of(lambda token: (max(0, token - 15), token + 1), (n,) * ranks)
    assert not windowed.trades, "windows are balanced as they are, and traded queries would read far keys"


def busiest(plan: RingPlan, pairs: tuple[int, ...]) -> list[float]:
    """Of the ranks, the most work over the mean: pairs, and tokens."""
    return [max(work) * plan.size / sum(work) for work in (pairs, plan.lengths)]


def test_the_page_has_the_counts_of_a_causal_mask() -> None:
    """The table that decides between uneven segments and traded queries."""
    page = (Path(__file__).parents[2] / "docs/explanation/attention-across-ranks.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    table = {tuple(row[:2]): row[2:] for row in rows if len(row) == 5}
    tokens, found = 2048, []
    for ranks in (2, 4, 8):
        equal = plan_of(causal, (tokens // ranks,) * ranks)
        cuts = [round(tokens * math.sqrt(rank / ranks)) for rank in range(ranks + 1)]
        uneven = plan_of(causal, tuple(stop - start for start, stop in itertools.pairwise(cuts)))
        ways = [busiest(equal, equal.pairs), busiest(uneven, uneven.pairs), busiest(equal, equal.traded_pairs)]
        found.append([work for way in ways for work in way])
    kinds = ("contiguous, equal", "contiguous, sqrt(r / W)", "equal, queries traded")
    for number, (kind, work) in enumerate(itertools.product(kinds, ("attention", "linear work"))):
        printed = [float(cell) for cell in table[kind, work]]
        assert printed == pytest.approx([of_ranks[number] for of_ranks in found], abs=0.01), (kind, work)


def test_every_block_reaches_its_readers_and_every_gradient_its_owner() -> None:
    """Of drawn plans, by following each message: who has what, and what is added up."""
    rng = drawing.generator("rings")
    for _ in range(200):
        ranks = rng.randint(2, 7)
        lengths = tuple(rng.choice((0, 1, 3, 8)) for _ in range(ranks))
        tokens = sum(lengths)
        spans = [(rng.randint(0, token), rng.randint(token + 1, tokens)) for token in range(tokens)]
        follow(plan_of(lambda token, spans=spans: spans[token], lengths))


def follow(plan: RingPlan) -> None:
    ranks = range(plan.size)
    held: dict[int, int | None] = {rank: rank for rank in ranks}
    # Whose gradients of the block that a rank computes with have been added up there; and those at the owners.
    sums: dict[int, set[int]] = {}
    owned: dict[int, list[int]] = {rank: [] for rank in ranks}
    computed = set()
    for step in range(plan.num_steps + 1):
        if step:
            sent = {}
            for rank in ranks:
                found = plan.keys(rank, step)
                for to, block in ((found.held_to, held[rank]), (found.own_to, rank)):
                    if to is not None:
                        assert block is not None
                        assert (rank, to) not in sent
                        sent[rank, to] = block
            held = dict.fromkeys(ranks)
            for rank in ranks:
                for source in plan.keys(rank, step).sources:
                    held[rank] = sent.pop((source, rank))
                    assert held[rank] == plan.block(rank, step)
            assert not sent, "a block nobody receives"
        if step > 1:
            given = {(rank, plan.gradients(rank, step).held_to): sums[rank] for rank in ranks if rank in sums}
            sums = {}
            for rank in ranks:
                sources = list(plan.gradients(rank, step).sources)
                if plan.adds(rank, step):
                    sums[rank] = given.pop((sources.pop(0), rank))
                if plan.returns(rank, step):
                    owned[rank] += given.pop((sources.pop(0), rank))
                assert not sources
            assert not given, "gradients nobody receives"
        elif step == 1:
            sums = {}
        for rank in ranks:
            if plan.computes(rank, step):
                assert held[rank] == plan.block(rank, step)
                computed.add((rank, held[rank]))
                if step:
                    sums[rank] = {*sums.get(rank, ()), rank}
                else:
                    owned[rank].append(rank)
    assert computed == {(rank, block) for rank in ranks for block in ranks if plan.readers[rank][block]}
    for block in ranks:
        assert sorted(owned[block]) == [rank for rank in ranks if plan.readers[rank][block]]

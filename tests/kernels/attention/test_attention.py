"""Attention of packed documents against full matrices in fp64, and what it holds and calls."""

import functools
import runpy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.kernels.attention import DocumentAttention, documents, flash_parts, read_starts, tiled
from lightscale.models.layers.context import SequenceContext

drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "drawing.py")))

ROWS, HEADS, WIDTH = 2, 3, 8
# Of each row: the position at its first token, and where documents end.
CASES: dict[str, tuple[int, tuple[tuple[int, tuple[int, ...]], ...]]] = {
    "one document a row": (50, ((0, ()), (0, ()))),
    "of any length": (60, ((0, (1, 2, 40)), (0, (30, 59)))),
    "many short ones": (90, ((0, tuple(range(3, 90, 4))), (0, tuple(range(1, 90, 5))))),
    "of one length": (60, ((0, (20, 40)), (0, (20, 40)))),
    "all from earlier ranks": (40, ((70, ()), (9, ()))),
    "some from earlier ranks": (40, ((70, (11, 12, 30)), (0, (5,)))),
    "short ones behind one from an earlier rank": (60, ((3, tuple(range(2, 60, 6))), (70, tuple(range(1, 60, 3))))),
    "padding behind all of them": (40, ((0, tuple(range(3, 40, 3))), (0, tuple(range(3, 40, 3))))),
    "one token": (1, ((70, ()), (0, ()))),
}
BEFORE = 70
# Not causal: of each row's last document the tokens that ranks behind hold, and all keys there.
AFTER, BEHIND = (33, 0), 37


def positions_of(length: int, rows: tuple[tuple[int, tuple[int, ...]], ...]) -> Tensor:
    positions = torch.stack([first + torch.arange(length) for first, _ in rows])
    for row, (_, cuts) in zip(positions, rows, strict=True):
        for cut in cuts:
            row[cut:] = torch.arange(length - cut)
    return positions


def drawn(case: str, behind: int = 0) -> tuple[Tensor, list[Tensor], Tensor]:
    """(positions, [q, k, v], cotangent)."""
    length, rows = CASES[case]
    positions = positions_of(length, rows)
    before = BEFORE if any(first for first, _ in rows) else 0
    generator = torch.Generator().manual_seed(0)
    sizes = (length, before + length + behind, before + length + behind, length)
    *inputs, cotangent = [
        torch.randn(ROWS, size, HEADS, WIDTH, dtype=torch.float64, generator=generator) for size in sizes
    ]
    return positions, [x.requires_grad_() for x in inputs], cotangent


def dense(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """A token of the row sees those since its document's start, by all pairs."""
    own = torch.arange(k.size(1))[-q.size(1) :].expand_as(positions)
    keys = torch.arange(k.size(1))
    seen = (keys >= (own - positions)[..., None]) & (keys <= own[..., None])
    if window is not None:
        seen = seen & (own[..., None] - keys < window)
    scores = torch.einsum("bthk, bshk -> bhts", q, k) / WIDTH**0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    weights = torch.where(seen[:, None], scores.exp(), 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return torch.einsum("bhts, bshk -> bthk", weights / total, v)


def dense_both_ways(positions: Tensor, q: Tensor, k: Tensor, v: Tensor, after: tuple[int, ...]) -> Tensor:
    """A token of the row sees its whole document, by the number of the document of each key."""
    before, n = k.size(1) - BEHIND - q.size(1), q.size(1)
    documents_of = torch.full((len(positions), k.size(1)), -1)
    for row, (own, more) in enumerate(zip(positions, after, strict=True)):
        numbers = (own == 0).long().cumsum(0)
        documents_of[row, before : before + n] = numbers
        documents_of[row, before - min(before, int(own[0])) : before] = numbers[0]
        documents_of[row, before + n : before + n + more] = numbers[-1]
    seen = documents_of[:, before : before + n, None] == documents_of[:, None]
    scores = torch.einsum("bthk, bshk -> bhts", q, k) / WIDTH**0.5
    return torch.einsum("bhts, bshk -> bthk", scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1), v)


def attention_of(positions: Tensor, num_keys: int, after: tuple[int, ...] | None = None) -> DocumentAttention:
    before = num_keys - positions.size(1) - (0 if after is None else BEHIND)
    return DocumentAttention(
        read_starts(positions),
        *positions.shape,
        before,
        positions.device,
        after=None if after is None else torch.tensor(after),
    )


def assert_equal_to_dense(
    way: Any, positions: Tensor, inputs: list[Tensor], cotangent: Tensor, oracle: Any = dense
) -> None:
    found, expected = way(*inputs), oracle(positions, *inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(found, inputs, cotangent)
    for gradient, other in zip(gradients, torch.autograd.grad(expected, inputs, cotangent), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", CASES)
def test_grouped_documents_are_full_matrices(case: str) -> None:
    positions, inputs, cotangent = drawn(case)
    assert_equal_to_dense(attention_of(positions, inputs[1].size(1)), positions, inputs, cotangent)


@pytest.mark.parametrize("after", [(0, 0), AFTER], ids=["ended", "goes on"])
@pytest.mark.parametrize("case", CASES)
def test_documents_that_are_read_both_ways_are_full_matrices(
    monkeypatch: pytest.MonkeyPatch, case: str, after: tuple[int, ...]
) -> None:
    """By both ways of computing them; keys behind the row are those of later ranks."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", functools.partial(variable_length, causal=False))
    positions, inputs, cotangent = drawn(case, BEHIND)
    attention = attention_of(positions, inputs[1].size(1), after)
    for way in (attention.grouped, attention.flash):
        assert_equal_to_dense(way, positions, inputs, cotangent, functools.partial(dense_both_ways, after=after))


@pytest.mark.parametrize("case", ["one document a row", "many short ones", "some from earlier ranks", "one token"])
def test_heads_of_queries_share_those_of_keys_and_values(case: str) -> None:
    """Six heads of queries and three of keys and values: the first two share the first."""
    positions, (q, k, v), cotangent = drawn(case)
    q = torch.cat([q, q.flip(1)], dim=2).detach().requires_grad_()
    attention = attention_of(positions, k.size(1))

    def repeated(x: Tensor) -> Tensor:
        return x[:, :, [0, 0, 1, 1, 2, 2]]

    found, expected = attention(q, k, v), dense(positions, q, repeated(k), repeated(v))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    cotangent = torch.cat([cotangent, 2 * cotangent], dim=2)
    gradients = torch.autograd.grad(found, (q, k, v), cotangent)
    for gradient, other in zip(gradients, torch.autograd.grad(expected, (q, k, v), cotangent), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("case", "window", "cap", "has_sinks"),
    drawing.covering("tiles", [*CASES], [None, 1, 7, 40], [None, 0.8], [False, True]),
)
def test_tiles_are_full_matrices(
    monkeypatch: pytest.MonkeyPatch, case: str, window: int | None, cap: float | None, has_sinks: bool
) -> None:
    """Blocks of 16 queries and tiles of 9 keys."""
    monkeypatch.setattr(tiled, "_QUERIES", 16)
    monkeypatch.setattr(tiled, "_KEYS", 9)
    positions, inputs, cotangent = drawn(case)
    if has_sinks:
        inputs.append(torch.tensor([0.3, -2.0, 1.5], dtype=torch.float64, requires_grad=True))
    attention = replace(attention_of(positions, inputs[1].size(1)), window=window, cap=cap)
    oracle = functools.partial(dense, window=window, cap=cap)
    assert_equal_to_dense(attention.tiled, positions, inputs, cotangent, oracle)
    assert_equal_to_dense(attention, positions, inputs, cotangent, oracle)


@pytest.mark.parametrize("window", [1, 16, 100, 600])
def test_tiles_that_a_window_hides_are_not_computed(window: int) -> None:
    """At most a block more of keys for each query, whatever the length; and fewer where documents are short."""
    for n in (2000, 4000):
        whole = replace(attention_of(positions_of(n, ((0, ()),)), n), window=window)
        assert n * window - window**2 / 2 <= whole.ranges.pairs <= n * (window + min(128, max(16, window)))
    many = replace(attention_of(positions_of(2000, ((0, tuple(range(50, 2000, 50))),)), 2000), window=600)
    assert many.ranges.pairs <= 2000 * (50 + 50)
    for tiles in whole.ranges.blocks(0):
        for tile in tiles:
            first, end = (x[0, tile.rows] for x in (whole.ranges.first, whole.ranges.end))
            assert ((first < tile.keys.stop) & (end > tile.keys.start)).any()


@pytest.mark.parametrize("case", ["of any length", "some from earlier ranks"])
def test_flash_attention_gets_the_window(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", functools.partial(variable_length, window=7))
    positions, inputs, cotangent = drawn(case)
    attention = replace(attention_of(positions, inputs[1].size(1)), window=7)
    assert_equal_to_dense(attention.flash, positions, inputs, cotangent, functools.partial(dense, window=7))


def test_pytorch_hands_the_window_to_the_backward_pass() -> None:
    """Of flash attention's operator, which no CPU computes: the arguments are recorded."""
    given = {}

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._flash_attention_forward.default:
                state = torch.zeros((), dtype=torch.uint64)
                return torch.zeros_like(args[0]), torch.zeros(HEADS, len(args[0])), state, state, torch.empty(0)
            if func is torch.ops.aten._flash_attention_backward.default:
                given.update(kwargs)
                return tuple(map(torch.zeros_like, args[1:4]))
            return func(*args, **(kwargs or {}))

    positions, inputs, cotangent = drawn("of any length")
    with Record():
        replace(attention_of(positions, inputs[1].size(1)), window=7).flash(*inputs).backward(cotangent)
    assert {key: given[key] for key in ("window_size_left", "window_size_right")} == {
        "window_size_left": 6,
        "window_size_right": 0,
    }


def test_blocks_of_queries_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of at most 200 pairs: blocks of one query and of three."""
    monkeypatch.setattr(documents, "_MASK_ELEMENTS", 200)
    positions, inputs, cotangent = drawn("some from earlier ranks")
    assert_equal_to_dense(attention_of(positions, inputs[1].size(1)), positions, inputs, cotangent)


def variable_length(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor,
    keys: Tensor,
    longest: int,
    most_keys: int,
    *how: Any,
    causal: bool = True,
    window: int | None = None,
    **sizes: int,
) -> tuple[Tensor]:
    """What flash attention's operator means: causal from the last query and the last key of each document."""
    assert how == (0.0, causal, False)
    assert sizes == ({} if window is None else {"window_size_left": window - 1, "window_size_right": 0})
    assert (queries.dtype, keys.dtype) == (torch.int32, torch.int32)
    assert (longest, most_keys) == (int(queries.diff().max()), int(keys.diff().max()))
    assert (len(q), len(k), len(v)) == (queries[-1], keys[-1], keys[-1])
    outputs = []
    for (first, last), (begin, end) in zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True):
        scores = torch.einsum("thk, shk -> hts", q[first:last], k[begin:end]) / WIDTH**0.5
        hidden = (
            torch.ones_like(scores, dtype=torch.bool).triu(end - begin - (last - first) + 1)
            if causal
            else torch.zeros_like(scores, dtype=torch.bool)
        )
        if window is not None:
            hidden |= torch.ones_like(hidden).tril(end - begin - (last - first) - window)
        outputs.append(
            torch.einsum("hts, shk -> thk", scores.masked_fill(hidden, -torch.inf).softmax(-1), v[begin:end])
        )
    return (torch.cat(outputs),)


@pytest.mark.parametrize("case", CASES)
def test_flash_attention_gets_the_documents(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Its operator is for GPUs only: a plain one with its meaning stands for it, so that the arguments are proved."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", variable_length)
    positions, inputs, cotangent = drawn(case)
    assert_equal_to_dense(attention_of(positions, inputs[1].size(1)).flash, positions, inputs, cotangent)


def packed(
    q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, causal: bool, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:  # fmt: skip
    """Of each run its queries, its keys, and the scores as flash attention hides them."""
    for (first, last), (begin, end) in zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True):
        place = torch.arange(last - first)[:, None] + (end - begin) - (last - first)
        number = torch.arange(end - begin)
        seen = number <= place if causal else torch.ones(last - first, end - begin, dtype=torch.bool)
        if window_size_left is not None:
            assert window_size_left >= 0
            assert window_size_right == (0 if causal else -1)
            seen = seen & (number >= place - window_size_left)
        assert seen.any(dim=1).all(), "flash attention is not asked for queries that read nothing"
        scores = torch.einsum("thk, shk -> hts", q[first:last], k[begin:end]) / WIDTH**0.5
        yield slice(first, last), slice(begin, end), scores.masked_fill(~seen, -torch.inf)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, longest: int, most: int, dropout: float,
    causal: bool, debug: bool, **window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert (longest, most) == (int(queries.diff().max()), int(keys.diff().max()))
    o, lse = torch.empty_like(q), q.new_empty(q.size(1), len(q))
    for rows, columns, scores in packed(q, k, queries, keys, causal, **window):
        o[rows] = torch.einsum("hts, shk -> thk", scores.softmax(-1), v[columns])
        lse[:, rows] = scores.logsumexp(-1)
    return o, lse


def flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, queries: Tensor, keys: Tensor, longest: int,
    most: int, dropout: float, causal: bool, *random: Tensor, **window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """By the outputs and normalisers it is given, which may be of more keys."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for rows, columns, scores in packed(q, k, queries, keys, causal, **window):
        weights = (scores - lse[:, rows, None]).exp()
        inner = torch.einsum("thk, shk -> hts", do[rows], v[columns])
        ds = weights * (inner - (do[rows] * o[rows]).sum(-1).mT[..., None]) / WIDTH**0.5
        dq[rows] = torch.einsum("hts, shk -> thk", ds, k[columns])
        dk[columns] = torch.einsum("hts, thk -> shk", ds, q[rows])
        dv[columns] = torch.einsum("hts, thk -> shk", weights, do[rows])
    return dq, dk, dv


@pytest.mark.parametrize(
    ("after", "window"),
    [(None, None), (None, 7), (None, 30), ((0, 0), None), (AFTER, None)],
    ids=["causal", "window 7", "window 30", "ended", "goes on"],
)
@pytest.mark.parametrize("case", CASES)
def test_parts_of_the_keys_by_flash_attention_are_tiles(
    monkeypatch: pytest.MonkeyPatch, case: str, after: tuple[int, ...] | None, window: int | None
) -> None:
    """Its operators are for GPUs only: plain ones with their meaning show that runs are all that is read, once."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    positions, inputs, cotangent = drawn(case, 0 if after is None else BEHIND)
    q, k, v = (x.detach() for x in inputs)
    ranges = replace(attention_of(positions, k.size(1), after), window=window).ranges
    sinks = torch.randn(HEADS, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    results = []
    for forward, backward in (
        (lambda sums, *x: sums.add(*x, None), lambda *x: tiled.add_gradients(*x, None)),
        (flash_parts.flash, flash_parts.flash_gradients),
    ):
        sums, edges = tiled.AttentionSums.before(q, sinks), [0, 41, 75, k.size(1)]
        parts = [(min(a, k.size(1)), min(b, k.size(1))) for a, b in pairwise(edges)]
        for a, b in parts:
            forward(sums, q, k[:, a:b], v[:, a:b], ranges.of_part(a, b))
        cotangents = tiled.Cotangents.of(cotangent, sums.o, sums.lse)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for a, b in parts:
            inside = slice(a, b)
            found = (dq, dk[:, inside], dv[:, inside])
            backward(found, cotangents, (q, k[:, inside], v[:, inside]), ranges.of_part(a, b))
        results.append((sums.o, sums.lse, dq, dk, dv))
    for found_one, expected in zip(*results, strict=True):
        torch.testing.assert_close(found_one, expected, rtol=1e-12, atol=1e-12)


def calls(monkeypatch: pytest.MonkeyPatch, positions: Tensor) -> int:
    """Of attention, for rows with ``positions``."""
    count, whole = 0, torch.nn.functional.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal count
        count += 1
        return whole(*args, **kwargs)

    monkeypatch.setattr(documents.F, "scaled_dot_product_attention", counted)
    q = torch.zeros(*positions.shape, 1, 8)
    attention_of(positions, positions.size(1))(q, q, q)
    monkeypatch.undo()
    return count


def test_short_documents_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of an evaluation: hundreds of documents in a row, a few calls; long ones stay where they are."""
    short = positions_of(2000, ((0, tuple(range(7, 2000, 13))), (0, tuple(range(5, 2000, 17)))))
    assert calls(monkeypatch, short) <= 2
    long = positions_of(2000, ((0, (500, 1200)), (0, (900,))))
    assert calls(monkeypatch, long) == 5
    assert attention_of(long, 2000)._layout.moves is None, "nothing is copied where every document is alone"
    assert calls(monkeypatch, positions_of(2000, ((0, ()), (0, ())))) == 1


def test_an_overflow_stays_in_its_document() -> None:
    positions = positions_of(40, ((0, tuple(range(3, 40, 3))),))
    q, k, v = torch.randn(3, 1, 40, 1, 8)
    v[0, 4] = torch.nan
    o = attention_of(positions, 40)(q, k, v)
    reached = torch.isnan(o).any(dim=-1).flatten().nonzero().flatten().tolist()
    # Of its own document, tokens 3 to 5: PyTorch's kernel multiplies what comes later by zero.
    assert {4, 5} <= set(reached) <= {3, 4, 5}


def largest_tensor(positions: Tensor, before: int, **how: Any) -> int:
    """Most elements of any tensor that forward and backward make."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(one, Tensor):
                    largest = max(largest, one.numel())
            return out

    n = positions.size(1)
    q = torch.randn(1, n, 1, 8, requires_grad=True)
    k, v = torch.randn(2, 1, n + before, 1, 8, requires_grad=True).unbind(0)
    with Watch():
        replace(attention_of(positions, n + before), **how)(q, k, v).sum().backward()
    return largest


@pytest.mark.long
def test_memory_is_linear_in_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last of eight ranks: no tensor grows with the product of queries and keys."""
    monkeypatch.setattr(documents, "_MASK_ELEMENTS", 2**14)
    sizes = {n: largest_tensor(positions_of(n, ((7 * n, ()),)), 7 * n) for n in (512, 1024, 2048)}
    assert sizes[2048] <= 2 * sizes[1024] <= 4 * sizes[512]
    assert sizes[2048] <= 2 * 8 * 8 * 2048, sizes


def test_memory_of_tiles_is_linear_in_the_length() -> None:
    n = 2048
    for how in ({"window": 500}, {"cap": 2.0}):
        largest = largest_tensor(positions_of(n, ((7 * n, ()),)), 7 * n, **how)
        assert largest <= max(128 * 512, 2 * 8 * n * 8), how


def test_documents_that_are_given_are_those_of_the_positions() -> None:
    positions = positions_of(60, CASES["of any length"][1])
    read = SequenceContext.of(positions)
    given = SequenceContext.of(positions, starts=read_starts(positions))
    assert read.cu_seqlens is not None and given.cu_seqlens is not None
    assert read.cu_seqlens.tolist() == given.cu_seqlens.tolist() == [0, 1, 2, 40, 60, 90, 119, 120]
    assert SequenceContext.of(positions_of(60, ((5, ()), (0, ())))).cu_seqlens is None

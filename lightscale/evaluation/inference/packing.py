"""Requests as rows of tokens: whole documents one behind the other, and prefixes that are run once. Without torch.

A ``TreeNode`` is a part of documents that is run in one go: the end of one, of which tokens are scored, or a prefix
that several have in common and whose state goes on to its children. Everything here is a function of the documents, so
that all ranks come to the same rows.
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightscale.evaluation.inference.requests import Ids, Request, RollingLogLikelihood, num_tokens

_DEEPEST = 200


class ScoredDocument(NamedTuple):
    """A document, of which the ids from ``first`` on are scored."""

    ids: Ids
    first: int
    """At least 1: nothing stands before the first token."""


@dataclass(eq=False, kw_only=True, slots=True)
class TreeNode:
    """Tokens that are fed one behind the other, at the beginning of a document or behind the node above."""

    inputs: Ids
    start: int
    """Position of the first of them."""
    number: int = -1
    """Of the document that ends here; -1: a prefix, and nothing of it is scored."""
    labels: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """Labels of the last inputs."""
    children: list["TreeNode"] = field(default_factory=list)

    @property
    def first_scored(self) -> int:
        """Index of the first input whose label is scored."""
        return len(self.inputs) - len(self.labels)


class Placed(NamedTuple):
    """A node in a row, from this column on."""

    node: TreeNode
    column: int


def order(documents: Sequence[ScoredDocument]) -> list[int]:
    """The numbers of ``documents`` in an order that puts documents with equal beginnings together."""
    # As bytes: big-endian numbers without sign sort as the ids do.
    return sorted(range(len(documents)), key=lambda number: documents[number].ids.astype(">u4").tobytes())


def share(documents: Sequence[ScoredDocument], ranks: int, *, written: Sequence[int] | None = None) -> list[list[int]]:
    """The documents of each data rank, by number: equal shares of the tokens, equal beginnings together.

    ``written``: tokens to generate behind each document, which count like its own.
    """
    numbers = order(documents)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    costs, before = [], np.empty(0, dtype=np.int32)
    for number in numbers:
        ids = documents[number].ids
        # What it has in common with the one before is run once.
        costs.append(max(1, len(ids) - _num_common(before, ids)) + (written[number] if written else 0))
        before = ids
    total, done = sum(costs), 0
    for number, cost in zip(numbers, costs, strict=True):
        shares[min(ranks - 1, (done + cost // 2) * ranks // total)].append(number)
        done += cost
    return shares


def forest(
    documents: Sequence[ScoredDocument], numbers: Sequence[int], *, least_shared: int | None, align: int = 1
) -> list[TreeNode]:
    """The documents ``numbers``, in the order of ``order``, as trees of the prefixes that they share.

    Args:
        documents: all documents.
        numbers: the requested documents.
        least_shared: minimum of shared tokens of a prefix that is run separately; None: no prefix is.
        align: prefixes end at multiples of it.
    """

    def leaf(number: int, start: int) -> TreeNode:
        ids, first = documents[number]
        return TreeNode(inputs=ids[start:-1], start=start, number=number, labels=ids[first:])

    def grow(numbers: Sequence[int], start: int, depth: int) -> Iterator[TreeNode]:
        if least_shared is None or depth == _DEEPEST:
            yield from (leaf(number, start) for number in numbers)
            return
        begin = 0
        while begin < len(numbers):
            end, shared = begin + 1, len(documents[numbers[begin]].ids)
            while end < len(numbers):
                common = _shareable(documents[numbers[begin]], documents[numbers[end]])
                # Sorted, each has less in common with the first; but another may be scored from earlier on.
                common = min(shared, common // align * align)
                if common - start < max(1, least_shared):
                    break
                end, shared = end + 1, common
            if end - begin == 1:
                yield leaf(numbers[begin], start)
            else:
                children = list(grow(numbers[begin:end], shared, depth + 1))
                yield TreeNode(inputs=documents[numbers[begin]].ids[start:shared], start=start, children=children)
            begin = end

    return list(grow(numbers, 0, 0))


def _shareable(one: ScoredDocument, other: ScoredDocument) -> int:
    """Inputs that both have in common, before the first that predicts a scored token of either."""
    return min(_num_common(one.ids, other.ids), one.first - 1, other.first - 1)


def _num_common(one: Ids, other: Ids) -> int:
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def pack(nodes: Sequence[TreeNode], row_tokens: int) -> list[list[Placed]]:
    """Whole documents in as few rows as a simple rule finds, none longer than ``row_tokens`` but for one document.

    The longest first, each row filled up with the longest that still fit.
    """
    # By length, then by number: the shortest first, as the longest that fits is then found by halving.
    waiting = sorted(nodes, key=lambda node: (len(node.inputs), -node.number))
    lengths = [len(node.inputs) for node in waiting]
    rows = []
    while waiting:
        row, filled = [], 0
        index = len(waiting) - 1
        while index >= 0:
            row.append(Placed(waiting.pop(index), filled))
            filled += lengths.pop(index)
            index = bisect.bisect_right(lengths, row_tokens - filled) - 1
        rows.append(row)
    return rows


class Columns(NamedTuple):
    """Some columns of rows: (b, n) tokens and positions, and (m,) their scored places."""

    tokens: NDArray[Any]
    """Of images (b, n, p) uint8."""
    positions: NDArray[np.int64]
    chosen: NDArray[np.int64]
    """Indices into the b·n tokens, row after row."""
    labels: NDArray[np.int64]
    numbers: NDArray[np.int32]
    """The document of each."""
    offsets: NDArray[np.int32]
    """Which of the document's scored tokens it is."""


def columns(rows: Sequence[Sequence[Placed]], first: int, stop: int, *, filler: int) -> Columns:
    """The columns ``first`` to ``stop`` of ``rows``; places without a node hold ``filler`` as separate documents."""
    shape = (len(rows), stop - first)
    tokens = np.full(shape, filler, dtype=np.int64)
    # Before the first node and behind the last one: the fillers of a row may as well be one document each.
    positions = np.broadcast_to(np.arange(first, stop), shape).copy()
    parts = []
    for index, row in enumerate(rows):
        for node, column in row:
            end = column + len(node.inputs)
            low, high = max(first, column), min(stop, end)
            if low < high:
                tokens[index, low - first : high - first] = node.inputs[low - column : high - column]
                begin = node.start + low - column
                positions[index, low - first : high - first] = np.arange(begin, begin + high - low)
            scored = np.arange(max(first, column + node.first_scored), high)
            if len(scored):
                offsets = scored - column - node.first_scored
                numbers = np.full(len(scored), node.number)
                parts.append((index * shape[1] + scored - first, node.labels[offsets], numbers, offsets))
        end = max((column + len(node.inputs) for node, column in row), default=0)
        low = max(first, end)
        positions[index, low - first :] = np.arange(low - end, max(low, stop) - end)
    nothing = (np.empty(0, dtype=np.int64),) * 4
    chosen, labels, numbers, offsets = map(np.concatenate, zip(nothing, *parts, strict=True))
    return Columns(
        tokens,
        positions,
        chosen.astype(np.int64),
        labels.astype(np.int64),
        numbers.astype(np.int32),
        offsets.astype(np.int32),
    )


def blocks(requests: Sequence[Request], block_tokens: Callable[[], int]) -> Iterator[list[int]]:
    """The numbers of ``requests`` in parts of about ``block_tokens()``, which are answered one after the other.

    Those that begin alike are together, and what they have in common counts once in a part. How large a part is to be
    is asked when it is wanted.
    """
    numbers = sorted(range(len(requests)), key=lambda number: _beginning(requests[number]).astype(">u4").tobytes())
    block: list[int] = []
    tokens, before = 0, np.empty(0, dtype=np.int32)
    for number in numbers:
        request = requests[number]
        ids = _beginning(request)
        # Windows are documents of their own.
        common = 0 if isinstance(request, RollingLogLikelihood) else _num_common(before, ids)
        block.append(number)
        tokens, before = tokens + num_tokens(request) - common, ids
        if tokens >= block_tokens():
            yield block
            block, tokens, before = [], 0, np.empty(0, dtype=np.int32)
    if block:
        yield block


def _beginning(request: Request) -> Ids:
    return request.ids if isinstance(request, RollingLogLikelihood) else request.context

"""Rows and trees of documents: every scored token once, prefixes once, what they have in common found."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightscale.evaluation.inference.packing import (
    Placed,
    ScoredDocument,
    TreeNode,
    columns,
    forest,
    order,
    pack,
    share,
)

# Few ids, so that documents begin alike.
IDS = st.lists(st.integers(0, 2), min_size=2, max_size=30)
DOCUMENTS = st.lists(IDS.flatmap(lambda ids: st.tuples(st.just(ids), st.integers(1, len(ids) - 1))), max_size=12)


def documents_of(drawn: list[tuple[list[int], int]]) -> list[ScoredDocument]:
    return [ScoredDocument(np.array(ids, dtype=np.int32), first) for ids, first in drawn]


def ends(node: TreeNode, above: list[int], least: int, align: int) -> list[tuple[int, list[int], list[int]]]:
    """(number, all inputs from the document's start on, labels) of each document that ends in or below ``node``."""
    assert node.start == len(above)
    inputs = above + node.inputs.tolist()
    if not node.children:
        return [(node.number, inputs, node.labels.tolist())]
    assert node.number == -1
    assert len(node.inputs) >= least
    assert len(inputs) % align == 0
    assert len(node.children) > 1
    return [end for child in node.children for end in ends(child, inputs, least, align)]


@settings(max_examples=40)
@given(DOCUMENTS, st.integers(1, 6), st.sampled_from([1, 2, 4]))
def test_trees_hold_every_document_once(drawn: list[tuple[list[int], int]], least: int, align: int) -> None:
    documents = documents_of(drawn)
    nodes = forest(documents, order(documents), least_shared=least, align=align)
    found = sorted(end for node in nodes for end in ends(node, [], least, align))
    assert found == [(number, ids[:-1], ids[first:]) for number, (ids, first) in enumerate(drawn)]


@settings(max_examples=40)
@given(DOCUMENTS, st.integers(1, 40))
def test_rows_hold_every_scored_token_once(drawn: list[tuple[list[int], int]], row_tokens: int) -> None:
    documents = documents_of(drawn)
    nodes = forest(documents, order(documents), least_shared=None)
    seen: dict[tuple[int, int], tuple[int, list[int]]] = {}
    for row in pack(nodes, row_tokens):
        width = sum(len(node.inputs) for node, _ in row)
        assert width <= row_tokens or len(row) == 1
        # In two parts, and with fillers behind.
        middle = width // 2
        for first, stop in ((0, middle), (middle, width + 3)):
            if first < stop:
                part = columns([row], first, stop, filler=9)
                for chosen, label, number, offset in zip(
                    part.chosen, part.labels, part.numbers, part.offsets, strict=True
                ):
                    assert (number, offset) not in seen
                    ids, begin = drawn[number]
                    position = begin + offset - 1
                    assert (part.tokens[0, chosen], part.positions[0, chosen]) == (ids[position], position)
                    assert label == ids[position + 1]
                    seen[number, offset] = (label, [])
    assert len(seen) == sum(len(ids) - first for ids, first in drawn)


def test_fillers_are_documents_of_their_own() -> None:
    node = TreeNode(inputs=np.array([5, 6, 7], dtype=np.int32), start=0)
    before = columns([[Placed(node, 2)]], 0, 5, filler=9)
    assert before.tokens.tolist() == [[9, 9, 5, 6, 7]]
    assert before.positions.tolist() == [[0, 1, 0, 1, 2]]
    behind = columns([[Placed(TreeNode(inputs=node.inputs, start=4), 0)]], 0, 5, filler=9)
    assert behind.tokens.tolist() == [[5, 6, 7, 9, 9]]
    assert behind.positions.tolist() == [[4, 5, 6, 0, 1]]


def test_a_haystack_is_run_once_whatever_stands_behind() -> None:
    """Needles at 35 depths of one text: the text once, and what stands behind each needle."""
    generator = np.random.default_rng(0)
    text = generator.integers(0, 50, 1000).astype(np.int32)
    documents = []
    for depth in np.linspace(0, 1000, 35).astype(int):
        needle = np.array([60, 61, depth % 50], dtype=np.int32)
        ids = np.concatenate([text[:depth], needle, text[depth:], np.array([62, 63], dtype=np.int32)])
        documents.append(ScoredDocument(ids, len(ids) - 1))

    def total(node: TreeNode) -> int:
        return len(node.inputs) + sum(map(total, node.children))

    separately = sum(len(ids) - 1 for ids, _ in documents)
    run = sum(map(total, forest(documents, order(documents), least_shared=16)))
    assert run < 0.55 * separately


@settings(max_examples=40)
@given(DOCUMENTS, st.integers(1, 4))
def test_data_ranks_share_the_documents(drawn: list[tuple[list[int], int]], ranks: int) -> None:
    documents = documents_of(drawn)
    shares = share(documents, ranks)
    assert sorted(number for own in shares for number in own) == list(range(len(documents)))
    assert [number for own in shares for number in own] == order(documents)

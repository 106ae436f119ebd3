"""From records to the documents to drop: of every cluster of duplicates the lowest id is kept.

Documents that share a key are linked; a cluster is a connected set of documents, also over documents between. The keys
are divided into independent ranges. Each range gives the clusters of its keys. Merging these gives the clusters of all
keys, for any number and order of ranges.

Clusters are kept as *pairs*, a (2, n) array of uint64: row 0 the documents that are not the lowest of their cluster,
ascending, row 1 the lowest of each one's cluster. Only documents with a duplicate take memory; the README beside this
file gives the amount.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.preparation.dedup.key_files import read_ranges
from lightscale.data_pipeline.preparation.dedup.records import KEY_SPACE, Kind, ascending_order, in_batches

# Documents looked up, and links added, at a time: bounds the temporary arrays, whatever the size of a range.
_LOOKED_UP_AT_ONCE = 2**16
_LINKS_AT_ONCE = 2**16
_NO_PAIRS = np.empty((2, 0), dtype=np.uint64)


def find_pairs(
    files: Sequence[Path],
    kind: Kind,
    *,
    range_index: int = 0,
    count: int = 1,
    num_ranges: int = 1,
    sizes: Sequence[int | None] | None = None,
) -> NDArray[np.uint64]:
    """The pairs that the keys of some ranges show: ``count`` from ``range_index`` on, of ``num_ranges`` equal ones.

    ``files``: of ``write_exact_records`` or ``write_band_records``; ``sizes``: theirs in bytes, if known. One range is
    in memory at a time. Tasks take some ranges each, and ``merge_pairs`` combines the results. The result is the same
    for any order of ``files``, any division of the records over them, and any ``num_ranges``. Raises ``UserError`` for
    a missing or damaged file.
    """
    bounds = range_bounds(range_index, count, num_ranges)
    return merge_pairs(pairs_of(batches) for batches in read_ranges(files, kind, bounds, sizes=sizes))


def range_bounds(first: int, count: int, num_ranges: int) -> list[int]:
    """The first keys of ``count`` ranges from ``first`` on, of ``num_ranges`` equal ones, and one after the last."""
    assert 0 <= first < first + count <= num_ranges
    return [KEY_SPACE * index // num_ranges for index in range(first, first + count + 1)]


def pairs_of(batches: Iterable[NDArray[np.void]]) -> NDArray[np.uint64]:
    """The pairs that the records of a range show, which come in order, in batches."""
    links = np.concatenate([_NO_PAIRS, *map(_links, batches)], axis=1)
    return _united([links[:, ascending_order(links[0])]])


def begins_of_keys(records: NDArray[np.void]) -> NDArray[np.bool_]:
    """(n,) where another key than that of the record before begins; equal keys stand together."""
    begins = np.arange(len(records)) == 0
    for name in records.dtype.names or ():
        if name != "document":
            begins[1:] |= records[name][1:] != records[name][:-1]
    return begins


def merge_pairs(parts: Iterable[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """The pairs of all ``parts`` together, one part in memory at a time if they come one by one."""
    pairs = _NO_PAIRS
    waiting: list[NDArray[np.uint64]] = []
    num_waiting = 0
    for part in parts:
        if pairs.shape[1] == 0 and num_waiting == 0:
            # Nothing to unite it with: a part shows its own clusters already.
            pairs = part
            continue
        for start in range(0, part.shape[1], _LINKS_AT_ONCE):
            waiting.append(part[:, start : start + _LINKS_AT_ONCE])
            num_waiting += waiting[-1].shape[1]
            # A union costs as much as all pairs in it: with as many new ones as there are already, unions are few, and
            # none takes more memory than in proportion to the result.
            if num_waiting >= max(_LINKS_AT_ONCE, pairs.shape[1]):
                pairs, waiting, num_waiting = _united([pairs, *waiting]), [], 0
    return _united([pairs, *waiting]) if waiting else pairs


def _links(records: NDArray[np.void]) -> NDArray[np.uint64]:
    """(2, n): each document that shares a key, and the lowest document with that key; ``records`` in order."""
    starts = np.flatnonzero(begins_of_keys(records))
    counts = np.diff(starts, append=len(records))
    # Most keys are one document's.
    shared = np.repeat(counts > 1, counts)
    documents, counts = records["document"][shared], counts[counts > 1]
    if not len(counts):
        return _NO_PAIRS
    # Linking each document to the lowest of its key and not to every other one: n links for n documents, not n².
    lowest = np.repeat(np.minimum.reduceat(documents, np.cumsum(counts) - counts), counts)
    linked = documents != lowest
    return np.stack([documents[linked], lowest[linked]])


def _united(parts: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """The pairs of the clusters that ``parts`` show: pairs, or any links of a document to a lower one, ascending."""
    united, links = [_NO_PAIRS], [_NO_PAIRS]
    for slices in in_batches([part[0] for part in parts]):
        # Row by row: of both at once numpy takes columns one by one.
        documents, lowest = (
            np.concatenate([part[row, own] for part, own in zip(parts, slices, strict=True)]) for row in range(2)
        )
        order = np.argsort(documents, kind="stable")
        documents, lowest = documents[order], lowest[order]
        # A document that several parts have stands several times in a row, mostly with the same lowest one: keys agree
        # in many bands.
        again = documents[1:] == documents[:-1]
        differ = np.flatnonzero(again & (lowest[1:] != lowest[:-1]))
        links.append(np.stack([lowest[differ], lowest[differ + 1]]))
        if len(documents):
            starts = np.flatnonzero(np.concatenate([[True], ~again]))
            united.append(np.stack([documents[starts], np.minimum.reduceat(lowest, starts)]))
    return _joined(np.concatenate(united, axis=1), np.concatenate(links, axis=1))


def _joined(united: NDArray[np.uint64], links: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``united``, a row for each document, with further ``links`` between documents."""
    # What is the lowest of a cluster in one part may have a lower one in another.
    ends = _intersection(np.concatenate([united[1], links.ravel()]), united[0])
    links = np.concatenate([links, np.stack([ends, _lowest(united, ends)])], axis=1)
    if links.shape[1] == 0:
        return united
    joined = _connected(links)
    united[1] = _lowest(joined, united[1])
    added = joined[:, ~_in_ascending(joined[0], united[0])]
    if added.shape[1] == 0:
        return united
    united = np.concatenate([united, added], axis=1)
    return united[:, np.argsort(united[0], kind="stable")]


def _intersection(values: NDArray[np.uint64], ascending: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Those of ``values`` that are in ``ascending``."""
    parts = [_NO_PAIRS[0]]
    for start in range(0, len(values), _LOOKED_UP_AT_ONCE):
        some = values[start : start + _LOOKED_UP_AT_ONCE]
        parts.append(some[_in_ascending(some, ascending)])
    return np.concatenate(parts)


def _in_ascending(values: NDArray[np.uint64], ascending: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which of ``values`` are in ``ascending``, which is not empty."""
    return ascending[np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)] == values


def _lowest(pairs: NDArray[np.uint64], documents: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The lowest document of the cluster of each of ``documents``, any shape; itself where it is in no pair."""
    if pairs.shape[1] == 0:
        return documents
    lowest = documents.ravel().copy()
    for start in range(0, len(lowest), _LOOKED_UP_AT_ONCE):
        some = lowest[start : start + _LOOKED_UP_AT_ONCE]
        indices = np.minimum(np.searchsorted(pairs[0], some), pairs.shape[1] - 1)
        found = pairs[0][indices] == some
        some[found] = pairs[1][indices[found]]
    return lowest.reshape(documents.shape)


def _connected(links: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The pairs of the clusters that (2, m) ``links`` make.

    Union-find over arrays: every root hooks to the lowest root it is linked with, then all paths are halved until
    they are flat; what hooks is higher than what it hooks to, so the root of a finished cluster is its lowest.
    """
    documents, indices = np.unique(links, return_inverse=True)
    ends = indices.reshape(links.shape)
    parents = np.arange(len(documents))
    while True:
        roots = parents[ends]
        # Links inside a cluster have done their work; what remains is fewer each round.
        open_links = roots[0] != roots[1]
        if not open_links.any():
            break
        ends = ends[:, open_links]
        roots = roots[:, open_links]
        np.minimum.at(parents, roots.max(axis=0), roots.min(axis=0))
        while not np.array_equal(halved := parents[parents], parents):
            parents = halved
    moved = parents != np.arange(len(documents))
    return np.stack([documents[moved], documents[parents[moved]]])

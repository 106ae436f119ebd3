"""From records to the documents to drop: of every cluster of duplicates the lowest id is kept.

Documents that share a key are linked; a cluster is what is connected by links, also over documents between. The
keys are divided into ranges that know nothing of each other; each gives the clusters that its keys show, and merging
those gives the clusters of all keys, whatever the number of ranges and the order in which they come.

Clusters are kept as *pairs*, a (2, n) array of uint64: row 0 the documents that are not the lowest of their cluster,
ascending, row 1 the lowest of each one's cluster. Only documents with a duplicate take memory. The README beside this
file says how much.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.preparation.dedup.records import KEY_SPACE, Kind, read_range

# Documents looked up, and links added, at a time: bounds the temporary arrays, whatever the size of a range.
_LOOKED_UP_AT_ONCE = 2**16
_LINKS_AT_ONCE = 2**18
_NO_PAIRS = np.empty((2, 0), dtype=np.uint64)


def find_pairs(files: Sequence[Path], kind: Kind, *, range_index: int = 0, num_ranges: int = 1) -> NDArray[np.uint64]:
    """The pairs that the keys of one range show: ``range_index`` of 0 ... ``num_ranges`` - 1, equal ranges of keys.

    ``files``: what ``write_exact_records`` or ``write_band_records`` wrote. Tasks take a range each; ``merge_pairs``
    puts the results together, to the same for any order of ``files``, any way the records are spread over them, and
    any ``num_ranges``. Raises ``UserError`` for a file that is missing or damaged.
    """
    assert 0 <= range_index < num_ranges
    start, stop = (KEY_SPACE * index // num_ranges for index in (range_index, range_index + 1))
    return _connected(_links(read_range(files, kind, start, stop)))


def merge_pairs(parts: Iterable[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """The pairs of all ``parts`` together, one part in memory at a time if they come one by one."""
    pairs = _NO_PAIRS
    for part in parts:
        if pairs.shape[1] == 0:
            pairs = part
            continue
        for start in range(0, part.shape[1], _LINKS_AT_ONCE):
            pairs = _merge(pairs, part[:, start : start + _LINKS_AT_ONCE])
    return pairs


def _links(records: NDArray[np.void]) -> NDArray[np.uint64]:
    """(2, n): each document that shares a key, and the lowest document with that key."""
    keys = [name for name in records.dtype.names or () if name != "document"]
    # Linking each document to the lowest of its key and not to every other one: n links for n documents, not n².
    order = np.lexsort([records[name] for name in reversed(keys)])
    documents = records["document"][order]
    begins = np.arange(len(order)) == 0
    for name in keys:
        values = records[name][order]
        begins[1:] |= values[1:] != values[:-1]
    starts = np.flatnonzero(begins)
    lowest = np.minimum.reduceat(documents, starts)
    lowest = np.repeat(lowest, np.diff(starts, append=len(order)))
    linked = documents != lowest
    return np.stack([documents[linked], lowest[linked]])


def _merge(pairs: NDArray[np.uint64], links: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``pairs`` with the clusters joined that ``links``, any (2, m) array of documents, connect."""
    # Links between clusters, not documents: each end is replaced by the lowest of its cluster so far.
    joined = _connected(_lowest(pairs, links))
    if joined.shape[1] == 0:
        return pairs
    if pairs.shape[1] == 0:
        return joined
    documents = np.concatenate([pairs[0], joined[0]])
    order = np.argsort(documents, kind="stable")  # fast on two ascending runs
    merged = np.empty((2, len(order)), dtype=np.uint64)
    np.take(documents, order, out=merged[0], mode="clip")
    documents[: pairs.shape[1]] = _lowest(joined, pairs[1])
    documents[pairs.shape[1] :] = joined[1]
    np.take(documents, order, out=merged[1], mode="clip")
    return merged


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

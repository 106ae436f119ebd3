"""(key, document) records, and the files of them that the units of work write for finding duplicates.

A file has raw little-endian records in ascending order of their keys; ``key_files.py`` reads and merges them.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

KEY_SPACE = 2**64
# So many records are sorted at a time: what belongs to them stays in the processor's second cache.
_BATCH_RECORDS = 2**15

Kind = Literal["exact", "near"]
"""``exact``: one 128-bit key a document. ``near``: one 64-bit key a band."""
DTYPES: dict[Kind, np.dtype[Any]] = {
    "exact": np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<u8")]),
    "near": np.dtype([("high", "<u8"), ("document", "<u8")]),
}


def document_key(text: str) -> bytes:
    """The 16-byte key of a normalised text: XXH3-128 of its UTF-8 bytes. Equal texts, and only they, share one."""
    return xxhash.xxh3_128_digest(text.encode())


def write_exact_records(path: Path, keys: Sequence[bytes], document_ids: NDArray[np.uint64]) -> None:
    """Write the records of (docs,) 16-byte ``keys`` of the (docs,) documents."""
    halves = np.frombuffer(b"".join(keys), dtype=">u8").reshape(len(document_ids), 2)
    records = np.empty(len(document_ids), dtype=DTYPES["exact"])
    records["high"], records["low"], records["document"] = halves[:, 0], halves[:, 1], document_ids
    _write(path, records)


def write_band_records(path: Path, keys: NDArray[np.uint64], document_ids: NDArray[np.uint64]) -> None:
    """Write the records of (docs, bands) ``keys`` of the (docs,) documents."""
    records = np.empty(keys.size, dtype=DTYPES["near"])
    records["high"], records["document"] = keys.ravel(), np.repeat(document_ids, keys.shape[1])
    _write(path, records)


def records_of(keys: NDArray[np.void], kind: Kind, document: int) -> NDArray[np.void]:
    """The records of (n,) ``keys``, fields without a document, of one ``document``."""
    records = np.empty(len(keys), dtype=DTYPES[kind])
    for name in keys.dtype.names or ():
        records[name] = keys[name]
    records["document"] = document
    return records


def key_order(records: NDArray[np.void]) -> NDArray[np.intp]:
    """The order in which equal keys stand together, by their high halves ascending; equal keys stay as they stand."""
    order = ascending_order(np.ascontiguousarray(records["high"]))
    if "low" in (records.dtype.names or ()):
        high, low = records["high"][order], records["low"][order]
        if np.any((high[1:] == high[:-1]) & (low[1:] != low[:-1])):
            return np.lexsort([records["low"], records["high"]])
    return order


def in_batches(runs: Sequence[NDArray[np.uint64]]) -> Iterator[list[slice]]:
    """Cut ascending ``runs`` into batches of few values that are sorted on their own: a slice of each, in order.

    All values of a batch are below all of the next one, so equal ones are in one batch. Sorted batch by batch, any
    number of values costs as much for each as a few do.
    """
    # Of each run one value in so many: between two that are len(runs) further on there are about so many records.
    step = max(1, _BATCH_RECORDS // max(1, len(runs)))
    seen = np.sort(np.concatenate([np.empty(0, dtype=np.uint64), *(run[::step] for run in runs)]))
    bounds = np.unique(seen[len(runs) :: len(runs) or 1])
    cuts = [[0, *np.searchsorted(run, bounds).tolist(), len(run)] for run in runs]
    for batch in range(len(bounds) + 1):
        yield [slice(cut[batch], cut[batch + 1]) for cut in cuts]


def ascending_order(keys: NDArray[np.uint64]) -> NDArray[np.intp]:
    """The stable order of ``keys``; fastest where they are spread evenly between the least and the greatest."""
    if len(keys) == 0:
        return np.empty(0, dtype=np.intp)
    # Numbers of 16 bits are sorted by counting, in time linear in how many there are. After it the keys are nearly
    # ascending, of which the sort of all 64 bits makes few comparisons, and these in the processor's caches.
    least = keys.min()
    places = keys - least
    places >>= np.uint64(max(0, int(places.max()).bit_length() - 16))
    nearly = np.argsort(places.astype(np.uint16), kind="stable")
    del places  # arrays that are not there need no pages
    return nearly[np.argsort(keys[nearly], kind="stable")]


def _taken(records: NDArray[np.void], order: NDArray[np.intp]) -> NDArray[np.void]:
    """``records[order]``, of 16 bytes each as one number, which numpy copies faster than fields."""
    if records.dtype.itemsize != np.dtype(np.complex128).itemsize:
        return records[order]
    return records.view(np.complex128).take(order).view(records.dtype)


def _write(path: Path, records: NDArray[np.void]) -> None:
    documents = records["document"]
    # Units give them ascending. A file is the same for the same records, whoever gives them.
    if np.any(documents[1:] < documents[:-1]):
        records = records[np.argsort(documents, kind="stable")]
    path.write_bytes(_taken(records, key_order(records)).data)

"""(key, document) records, and the files of them that the units of work write for finding duplicates.

A file has raw little-endian records in ascending order of their keys; ``key_files.py`` reads and merges them.
"""

import sys
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
    by_document = _ascending_documents(document_ids)
    if by_document is not None:
        records = records[by_document]
    path.write_bytes(records[key_order(records)].data)


def write_band_records(path: Path, keys: NDArray[np.uint64], document_ids: NDArray[np.uint64]) -> None:
    """Write the records of (docs, bands) ``keys`` of the (docs,) documents."""
    by_document = _ascending_documents(document_ids)
    if by_document is not None:
        keys, document_ids = keys[by_document], document_ids[by_document]
    # Put in order before they are records, which take twice the room: as much as can stays in the processor's cache.
    num_bands, keys = keys.shape[1], keys.ravel()
    order = ascending_order(keys)
    records = np.empty(len(keys), dtype=DTYPES["near"])
    records["high"] = keys[order]
    order //= num_bands
    records["document"] = document_ids[order]
    path.write_bytes(records.data)


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
    least, greatest = int(keys.min()), int(keys.max())
    shift = max(0, (greatest - least).bit_length() - 16)
    if shift == 48:
        places = keys.view(np.uint16)[(3 if sys.byteorder == "little" else 0) :: 4].copy()
    else:
        places = ((keys - np.uint64(least)) >> np.uint64(shift)).astype(np.uint16)
    nearly = np.argsort(places, kind="stable")
    return nearly[np.argsort(keys[nearly], kind="stable")]


def _ascending_documents(document_ids: NDArray[np.uint64]) -> NDArray[np.intp] | None:
    """The order in which documents ascend; None where they do, as units give them.

    A file is the same for the same records, whoever gives them.
    """
    if np.all(document_ids[1:] >= document_ids[:-1]):
        return None
    return np.argsort(document_ids, kind="stable")

"""(key, document) records, and the files of them that the units of work write for finding duplicates.

A file has raw little-endian records in ascending order of their keys; ``key_files.py`` reads and merges them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

KEY_SPACE = 2**64

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


def key_order(records: NDArray[np.void]) -> NDArray[np.intp]:
    """The order in which equal keys stand together, by their high halves ascending."""
    high = np.ascontiguousarray(records["high"])
    # Of few ascending runs, which files make, several times as fast as any order of the whole records.
    order = np.argsort(high, kind="stable")
    if "low" in (records.dtype.names or ()):
        high, low = high[order], records["low"][order]
        if np.any((high[1:] == high[:-1]) & (low[1:] != low[:-1])):
            return np.lexsort([records["low"], records["high"]])
    return order


def _write(path: Path, records: NDArray[np.void]) -> None:
    order = np.lexsort([records[name] for name in reversed(records.dtype.names or ())])
    path.write_bytes(records[order].tobytes())

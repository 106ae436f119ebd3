"""Files of (key, document) records: what the units of work write for finding duplicates.

One file a unit of work, raw little-endian records in ascending order of their keys, so that the records of a range
of keys are contiguous in each file and nothing else of it is read.
"""

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightscale.errors import UserError

KEY_SPACE = 2**64

Kind = Literal["exact", "near"]
"""``exact``: one 128-bit key a document. ``near``: one 64-bit key a band."""
_DTYPES: dict[Kind, np.dtype[Any]] = {
    "exact": np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<u8")]),
    "near": np.dtype([("high", "<u8"), ("document", "<u8")]),
}


def document_key(text: str) -> bytes:
    """The 16-byte key of a normalised text: XXH3-128 of its UTF-8 bytes. Equal texts, and only they, share one."""
    return xxhash.xxh3_128_digest(text.encode())


def write_exact_records(path: Path, keys: Sequence[bytes], document_ids: NDArray[np.uint64]) -> None:
    """Write the records of (docs,) 16-byte ``keys`` of the (docs,) documents."""
    halves = np.frombuffer(b"".join(keys), dtype=">u8").reshape(len(document_ids), 2)
    records = np.empty(len(document_ids), dtype=_DTYPES["exact"])
    records["high"], records["low"], records["document"] = halves[:, 0], halves[:, 1], document_ids
    _write(path, records)


def write_band_records(path: Path, keys: NDArray[np.uint64], document_ids: NDArray[np.uint64]) -> None:
    """Write the records of (docs, bands) ``keys`` of the (docs,) documents."""
    records = np.empty(keys.size, dtype=_DTYPES["near"])
    records["high"], records["document"] = keys.ravel(), np.repeat(document_ids, keys.shape[1])
    _write(path, records)


def read_range(files: Sequence[Path], kind: Kind, start: int, stop: int) -> NDArray[np.void]:
    """The records of all ``files`` with ``start`` <= key < ``stop``.

    ``UserError`` names a file that is cut off or not in order.
    """
    parts = [np.empty(0, dtype=_DTYPES[kind])]
    for path in files:
        records = _open(path, kind)
        part = np.array(records[bisect_left(records["high"], start) : bisect_left(records["high"], stop)])
        if np.any(part["high"][1:] < part["high"][:-1]):
            raise UserError(f"{path}: its records are not in order; the file is damaged, prepare with --restart")
        parts.append(part)
    return np.concatenate(parts)


def _write(path: Path, records: NDArray[np.void]) -> None:
    order = np.lexsort([records[name] for name in reversed(records.dtype.names or ())])
    path.write_bytes(records[order].tobytes())


def _open(path: Path, kind: Kind) -> NDArray[np.void]:
    dtype = _DTYPES[kind]
    try:
        num_bytes = path.stat().st_size
        if num_bytes % dtype.itemsize:
            raise UserError(
                f"{path}: {num_bytes} bytes are not a whole number of {kind} records; the file is truncated"
            )
        return np.asarray(np.memmap(path, dtype=dtype, mode="r")) if num_bytes else np.empty(0, dtype=dtype)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; a file of {kind} records was expected there") from error

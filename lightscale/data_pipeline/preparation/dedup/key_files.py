"""Files of (key, document) records in ascending order of their keys: read forward by range, merged many into one.

The records of a range of keys are contiguous in each file, so a range is one read of each. With more files than
``FAN_IN`` that would be a small read of each of very many: they are merged first, ``FAN_IN`` into one, until so few are
left. Every record is then read once for each time that the files become fewer, and once by its range.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.preparation.dedup.records import DTYPES, KEY_SPACE, Kind, key_order
from lightscale.data_pipeline.whole_files import whole_file
from lightscale.errors import UserError

FAN_IN = 256
"""Files that are open, and read from, at a time."""
# In hand while files are merged.
_MERGED_AT_ONCE_BYTES = 2**23
# Where a key stands in a file: so many guesses from the keys around it; at the end so many records are read.
_GUESSES = 6
_LOOKED_AT = 128


class KeyFile:
    """A file of records, read from front to back. A context manager.

    Args:
        path: of the file.
        kind: of its records.
        size: in bytes, where it is known.

    Raises ``UserError`` for a file that is missing, cut off or not in order.
    """

    def __init__(self, path: Path, kind: Kind, size: int | None = None) -> None:
        self._path, self._dtype = path, DTYPES[kind]
        self._num_taken = 0
        self._last_key = 0
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; a file of {kind} records was expected there") from error
        self.num_bytes = num_bytes = path.stat().st_size
        if size is not None and num_bytes != size:
            self._file.close()
            raise UserError(f"{path}: it has {num_bytes} bytes and had {size} when all units were finished")
        if num_bytes % self._dtype.itemsize:
            self._file.close()
            raise UserError(
                f"{path}: {num_bytes} bytes are not a whole number of {kind} records; the file is truncated"
            )
        self._num_records = num_bytes // self._dtype.itemsize

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def skip(self, start: int) -> None:
        """Go on at the first key that is not below ``start``."""
        self._num_taken = self._find(start)

    def take(self, stop: int) -> NDArray[np.void]:
        """The records from where the last call ended that have a key below ``stop``."""
        end = self._find(stop)
        records = self._read(self._num_taken, end - self._num_taken)
        keys = records["high"]
        if len(keys) and (int(keys[0]) < self._last_key or int(keys[-1]) >= stop or np.any(keys[1:] < keys[:-1])):
            raise UserError(f"{self._path}: its records are not in order; the file is damaged, prepare with --restart")
        self._num_taken = end
        self._last_key = int(keys[-1]) if len(keys) else self._last_key
        return records

    def _find(self, key: int) -> int:
        """The number of the first record that is not below ``key``, from what is taken on."""
        if key >= KEY_SPACE:
            return self._num_records
        first, stop = self._num_taken, self._num_records
        low, high = self._last_key, KEY_SPACE
        # Keys are hashes, spread evenly: where one stands is nearly known, and found in a few reads. In halves from
        # then on, so that it ends soon whatever the keys are.
        for is_half in itertools.chain([False] * _GUESSES, itertools.repeat(True)):
            if stop - first <= _LOOKED_AT:
                break
            share = 0.5 if is_half else min(1.0, max(0.0, (key - low) / max(1, high - low)))
            middle = min(stop - 1, first + int(share * (stop - first)))
            found = int(self._read(middle, 1)["high"][0])
            if found < key:
                first, low = middle + 1, found
            else:
                stop, high = middle, found
        return first + int(np.searchsorted(self._read(first, stop - first)["high"], np.uint64(key)))

    def _read(self, first: int, count: int) -> NDArray[np.void]:
        offset, left = first * self._dtype.itemsize, count * self._dtype.itemsize
        parts = []
        while left:
            # Less than was asked for where that is more than 2 GiB.
            parts.append(os.pread(self._file.fileno(), left, offset))
            if not parts[-1]:
                raise UserError(f"{self._path}: it became shorter while it was read; prepare with --restart")
            offset, left = offset + len(parts[-1]), left - len(parts[-1])
        return np.frombuffer(b"".join(parts), dtype=self._dtype)


def read_range(
    files: Sequence[Path], kind: Kind, start: int, stop: int, *, sizes: Sequence[int | None] | None = None
) -> NDArray[np.void]:
    """The records of all ``files``, of ``sizes`` in bytes, with ``start`` <= key < ``stop``, ascending by keys."""
    parts = [np.empty(0, dtype=DTYPES[kind])]
    for path, size in zip(files, sizes or [None] * len(files), strict=True):
        with KeyFile(path, kind, size) as file:
            file.skip(start)
            parts.append(file.take(stop))
    return _in_order(parts)


def merge_key_files(
    files: Sequence[Path], kind: Kind, target: Path, *, sizes: Sequence[int | None] | None = None
) -> None:
    """The records of all ``files``, at most ``FAN_IN``, as one file ``target``, which appears when it is whole."""
    assert len(files) <= FAN_IN
    with whole_file(target) as temporary, temporary.open("wb") as output:
        for records in _merged(files, kind, sizes or [None] * len(files)):
            output.write(records.data)


def _merged(files: Sequence[Path], kind: Kind, sizes: Sequence[int | None]) -> Iterator[NDArray[np.void]]:
    with ExitStack() as stack:
        opened = [stack.enter_context(KeyFile(path, kind, size)) for path, size in zip(files, sizes, strict=True)]
        # Keys are hashes: equal ranges of them hold about equally many records.
        num_ranges = 1 + sum(file.num_bytes for file in opened) // _MERGED_AT_ONCE_BYTES
        for number in range(1, num_ranges + 1):
            stop = KEY_SPACE * number // num_ranges
            yield _in_order([file.take(stop) for file in opened])


def _in_order(parts: Sequence[NDArray[np.void]]) -> NDArray[np.void]:
    records = np.concatenate(parts)
    return records[key_order(records)]

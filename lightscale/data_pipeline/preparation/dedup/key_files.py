"""Files of (key, document) records in ascending order of their keys: read forward by range, merged many into one.

The records of a range of keys are contiguous in each file, so ranges that follow one another are a read each. With
more files than ``FAN_IN`` that would be a small read of each of very many: they are merged first, ``FAN_IN`` into one,
until so few are left. Every record is then read once for each time that the files become fewer, and once by its range.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.preparation.dedup.records import DTYPES, KEY_SPACE, Kind, in_batches, key_order
from lightscale.data_pipeline.whole_files import whole_file
from lightscale.errors import UserError

FAN_IN = 512
"""Files that are open, and read from, at a time."""
# In hand while files are merged.
_MERGED_AT_ONCE_BYTES = 2**23
# Where a key stands in a file: so many guesses from the keys around it, in halves after that; so many records are read
# at each.
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
        self._last_key = 0
        # Read and not yet taken, and the number of the first record behind them.
        self._ahead = np.empty(0, dtype=self._dtype)
        self._num_read = 0
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; expected a file of {kind} records") from error
        self.num_bytes = num_bytes = path.stat().st_size
        if size is not None and num_bytes != size:
            self._file.close()
            raise UserError(f"{path}: {num_bytes} bytes instead of {size}: it changed after all units were finished")
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
        """Go on at the first key that is not below ``start``; before anything is taken."""
        first, stop = 0, self._num_records
        low, high = 0, KEY_SPACE
        # Keys are hashes, spread evenly: where one stands is nearly known, and found in a few reads. In halves from
        # then on, so that it ends soon whatever the keys are.
        for is_half in itertools.chain([False] * _GUESSES, itertools.repeat(True)):
            share = 0.5 if is_half else min(1.0, max(0.0, (start - low) / max(1, high - low)))
            begin = max(first, min(stop, first + int(share * (stop - first)) + _LOOKED_AT // 2) - _LOOKED_AT)
            records = self._read(begin, min(stop - begin, _LOOKED_AT))
            place = self._below(records, start)
            if (place or begin == first) and (place < len(records) or begin + place == stop):
                break
            if place:
                first, low = begin + place, int(records["high"][-1])
            else:
                stop, high = begin, int(records["high"][0])
        self._num_read, self._ahead, self._last_key = begin + len(records), records[place:], start

    def take(self, stop: int) -> NDArray[np.void]:
        """The records from where the last call ended that have a key below ``stop``."""
        ahead = self._ahead
        while (place := self._below(ahead, stop)) == len(ahead) and self._num_read < self._num_records:
            # In one read mostly, and little too much: keys are hashes. Twice as much each time where they are not.
            low = int(ahead["high"][-1]) if len(ahead) else self._last_key
            left = self._num_records - self._num_read
            expected = left * min(1.0, max(0, stop - low) / max(1, KEY_SPACE - low))
            count = min(left, max(int(expected + 4 * expected**0.5) + _LOOKED_AT // 2, len(ahead)))
            more = self._read(self._num_read, count)
            ahead = np.concatenate([ahead, more]) if len(ahead) else more
            self._num_read += count
        records, self._ahead = ahead[:place], ahead[place:]
        keys = records["high"]
        if len(keys) and (int(keys[0]) < self._last_key or int(keys[-1]) >= stop or np.any(keys[1:] < keys[:-1])):
            raise UserError(f"{self._path}: records are not sorted; the file is damaged; prepare with --restart")
        self._last_key = int(keys[-1]) if len(keys) else self._last_key
        return records

    def _below(self, records: NDArray[np.void], key: int) -> int:
        return len(records) if key >= KEY_SPACE else int(np.searchsorted(records["high"], np.uint64(key)))

    def _read(self, first: int, count: int) -> NDArray[np.void]:
        offset, left = first * self._dtype.itemsize, count * self._dtype.itemsize
        parts = []
        while left:
            # Less than was asked for where that is more than 2 GiB.
            parts.append(os.pread(self._file.fileno(), left, offset))
            if not parts[-1]:
                raise UserError(f"{self._path}: truncated while it was read; prepare with --restart")
            offset, left = offset + len(parts[-1]), left - len(parts[-1])
        return np.frombuffer(b"".join(parts), dtype=self._dtype)


def read_ranges(
    files: Sequence[Path],
    kind: Kind,
    bounds: Sequence[int],
    *,
    sizes: Sequence[int | None] | None = None,
    more: Callable[[int, int], NDArray[np.void]] | None = None,
) -> Iterator[Iterator[NDArray[np.void]]]:
    """For each of some neighbouring ranges, ``bounds[i]`` <= key < ``bounds[i + 1]``, the records of all ``files``.

    Ascending by keys, in batches; equal keys are in one. ``files``: all are open meanwhile, and read forward;
    ``sizes``: theirs in bytes, where they are known; ``more``: further records of a range, in ascending order.
    """
    with ExitStack() as stack:
        opened = [
            stack.enter_context(KeyFile(path, kind, size))
            for path, size in zip(files, sizes or [None] * len(files), strict=True)
        ]
        if bounds[0]:
            for file in opened:
                file.skip(bounds[0])
        for start, stop in itertools.pairwise(bounds):
            parts = [more(start, stop) if more else np.empty(0, dtype=DTYPES[kind])]
            yield _in_order([*parts, *(file.take(stop) for file in opened)])


def merge_key_files(
    files: Sequence[Path], kind: Kind, target: Path, *, sizes: Sequence[int | None] | None = None
) -> None:
    """The records of all ``files``, at most ``FAN_IN``, as one file ``target``, which appears when it is whole."""
    assert len(files) <= FAN_IN
    # Keys are hashes: equal ranges of them hold about equally many records.
    num_ranges = 1 + sum(path.stat().st_size for path in files if path.exists()) // _MERGED_AT_ONCE_BYTES
    bounds = [KEY_SPACE * number // num_ranges for number in range(num_ranges + 1)]
    with whole_file(target) as temporary, temporary.open("wb") as output:
        for batches in read_ranges(files, kind, bounds, sizes=sizes):
            for records in batches:
                output.write(records.data)


def _in_order(parts: Sequence[NDArray[np.void]]) -> Iterator[NDArray[np.void]]:
    for slices in in_batches([np.ascontiguousarray(part["high"]) for part in parts]):
        # Joined as bytes: numpy would compare the fields of every two parts, which are small and many.
        content = b"".join([part[own].data for part, own in zip(parts, slices, strict=True)])
        records = np.frombuffer(content, dtype=parts[0].dtype)
        yield records[key_order(records)]

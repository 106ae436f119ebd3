"""Which documents are dropped as duplicates of an earlier one, over all units: first exact, then near duplicates.

    duplicates/exact-pairs/NNNNNN.npy   what the keys of one range show; near-pairs/ likewise
    duplicates/exact.npy, near.npy      (2, n): the documents to drop, ascending, and the kept one for each

Which documents share a key cannot be said unit by unit. So a task is not a unit but a range of keys over the key files
of all units; ranges know nothing of each other (``dedup/README.md``).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.preparation.dedup import find_pairs, merge_pairs
from lightscale.data_pipeline.preparation.dedup.records import Kind
from lightscale.data_pipeline.preparation.plan import UNIT_SHIFT, UnitSummary
from lightscale.data_pipeline.preparation.readers import Advance
from lightscale.data_pipeline.preparation.units import Context
from lightscale.data_pipeline.preparation.work_directory import WorkDirectory
from lightscale.data_pipeline.whole_files import write_array

KINDS: tuple[Kind, ...] = ("exact", "near")
_REASONS: dict[Kind, str] = {"exact": "exact duplicate", "near": "near duplicate"}
# So much of the key files is read for one range: bounds the memory of a task, whatever the size of the corpus.
_RANGE_BYTES = 2**23


@dataclass(frozen=True, kw_only=True)
class KeyRange:
    """One of ``num_ranges`` equal ranges of keys."""

    kind: Kind
    number: int
    num_ranges: int
    num_bytes: int
    """For progress: about how much is read."""


def key_ranges(work: WorkDirectory, kind: Kind) -> list[KeyRange]:
    """The tasks of ``kind``: as many as the keys are large."""
    num_bytes = sum(path.stat().st_size for path in key_files(work, kind))
    num_ranges = -(-num_bytes // _RANGE_BYTES)
    return [
        KeyRange(kind=kind, number=number, num_ranges=num_ranges, num_bytes=num_bytes // num_ranges)
        for number in range(num_ranges)
    ]


def key_files(work: WorkDirectory, kind: Kind) -> list[Path]:
    """The keys of all units, in order."""
    return sorted((work.path / "units").glob(f"*/{kind}-*"))


def find_in_range(context: Context, key_range: KeyRange, advance: Advance) -> None:
    """The task of a range of keys."""
    work = context.work
    target = work.entry(f"duplicates/{key_range.kind}-pairs", key_range.number, ".npy")
    if not target.exists():
        files = key_files(work, key_range.kind)
        pairs = find_pairs(files, key_range.kind, range_index=key_range.number, num_ranges=key_range.num_ranges)
        write_array(target, pairs)
    advance(key_range.num_bytes)


def merge_ranges(work: WorkDirectory, kind: Kind) -> None:
    """Put the ranges of ``kind`` together."""
    target = _merged(work, kind)
    if not target.exists():
        parts = sorted((work.path / f"duplicates/{kind}-pairs").glob("*.npy"))
        write_array(target, merge_pairs(np.load(part) for part in parts))


class UnitDuplicates:
    """The documents of one unit that are dropped."""

    def __init__(self, work: WorkDirectory, unit: UnitSummary) -> None:
        """``numbers`` and ``kept_ids`` by reason: documents in the unit, ascending, and the ids of the kept ones."""
        # Ids are ascending by unit, so those of one unit are contiguous in the pairs.
        first = unit.number << UNIT_SHIFT
        self.numbers: dict[str, NDArray[np.int64]] = {}
        self.kept_ids: dict[str, NDArray[np.uint64]] = {}
        seen = np.empty(0, dtype=np.int64)
        for kind in KINDS:
            path = _merged(work, kind)
            if not path.exists():
                continue
            # Mapped: pairs are ascending, so a unit touches a small part of a file that grows with the corpus.
            pairs = np.load(path, mmap_mode="r")
            begin, end = np.searchsorted(pairs[0], np.array([first, first + (1 << UNIT_SHIFT)], dtype=np.uint64))
            numbers = (pairs[0, begin:end] - np.uint64(first)).astype(np.int64)
            fresh = ~np.isin(numbers, seen)  # an exact duplicate is a near one too, and counts once
            self.numbers[_REASONS[kind]] = numbers[fresh]
            self.kept_ids[_REASONS[kind]] = np.array(pairs[1, begin:end])[fresh]
            seen = np.union1d(seen, numbers)
        self.all = seen

    def kept_mask(self, num_documents: int) -> NDArray[np.bool_]:
        """(num_documents,) which documents are kept."""
        mask = np.ones(num_documents, dtype=bool)
        mask[self.all] = False
        return mask


def _merged(work: WorkDirectory, kind: Kind) -> Path:
    return work.path / "duplicates" / f"{kind}.npy"

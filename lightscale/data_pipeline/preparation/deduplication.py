"""Documents to drop as duplicates of an earlier one, over all units: first exact, then near duplicates.

    duplicates/exact-keys.json            the key files of all units, and the number of ranges of keys
    duplicates/exact-keys-1/NNNNNN        key files merged, FAN_IN into one; -2 those of -1, while there are more
    duplicates/exact-pairs-0/NNNNNN.npy   the pairs of one range of keys, or of some neighbouring ones
    duplicates/exact-pairs-1/NNNNNN.npy   the pairs of some ranges, united; -2 those of -1, and so on
    duplicates/exact.npy                  (2, n): the documents to drop, ascending, and the kept one for each
    store/document_keys/exact/NNNNNN      the keys of one range, each once, for ``data add`` (``keep_keys``)
    keys/exact/NNNNNN.json                the number of these keys, and their hash

and the same for near duplicates. Documents that share a key may be in different units. A task is therefore not a unit
but some ranges of keys over all key files, independent of the others (``dedup/README.md``). Every task reads at most
``FAN_IN`` files, and each step has a fixed share of the tasks of the one before: work grows with the corpus, no faster.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.executors import Task
from lightscale.data_pipeline.preparation.base import KNOWN, BaseStore
from lightscale.data_pipeline.preparation.dedup import (
    FAN_IN,
    begins_of_keys,
    merge_key_files,
    merge_pairs,
    pairs_of,
    range_bounds,
    read_ranges,
    records_of,
)
from lightscale.data_pipeline.preparation.dedup.records import DTYPES, Kind
from lightscale.data_pipeline.preparation.plan import UNIT_SHIFT, UnitSummary
from lightscale.data_pipeline.preparation.readers import Advance
from lightscale.data_pipeline.preparation.units import Context
from lightscale.data_pipeline.preparation.work_directory import WorkDirectory
from lightscale.data_pipeline.store.document_keys import KEY_DTYPES, KeysFile, write_index, write_keys
from lightscale.data_pipeline.store.format import KEYS_DIR
from lightscale.data_pipeline.whole_files import TEMPORARY_SUFFIX, write_array, write_json
from lightscale.errors import UserError

KINDS: tuple[Kind, ...] = ("exact", "near")
_REASONS: dict[Kind, str] = {"exact": "exact duplicate", "near": "near duplicate"}
# So much of the key files is in one range, which is in memory at a time: bounds the memory of a task, whatever the size
# of the corpus.
_RANGE_BYTES = 2**24
# Key files that one task merges at least: with fewer, tasks of a small corpus would mostly make and sync files.
_MERGED_AT_LEAST = 16
# So many ranges, which follow one another, one task reads at most, so that it opens the files once for all of them; no
# more than leave so many tasks, of which all workers have some.
_RANGES_AT_ONCE = 16
_RANGE_TASKS = 1024
# Files of pairs that one task unites, one after the other.
_UNITED_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class KeyFiles:
    """The key files of all units, as they were when all units were finished.

    Kept in a file: a later call finds the same tasks, also where files have been merged and emptied.
    """

    names: list[str]
    """In the work directory, by unit."""
    num_bytes: list[int]
    """Of each."""
    num_ranges: int


@dataclass(frozen=True, kw_only=True)
class DedupTask:
    """Some files of the work directory, of which one is made."""

    kind: Kind
    inputs: tuple[str, ...]
    sizes: tuple[int, ...]
    """Of the inputs, in bytes; of files of pairs nothing."""
    target: str
    num_bytes: int
    """Size for progress: approximate bytes to read, or the number of inputs."""
    range_index: int = 0
    """The first of"""
    count: int = 0
    """ranges of keys that it reads, of"""
    num_ranges: int = 0


@dataclass(frozen=True, kw_only=True)
class KnownFile:
    """A file of keys of the store that is added to."""

    kind: str
    number: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class DedupStep:
    """Tasks that may run side by side, when those of the step before are done."""

    name: str
    task: Task
    items: Sequence[DedupTask]


def list_key_files(work: WorkDirectory, kind: Kind, base: BaseStore | None = None) -> KeyFiles:
    """All key files of ``kind``; by one process, when all units are finished."""
    path = work.path / "duplicates" / f"{kind}-keys.json"
    if not path.exists():
        # Not those of a unit that a process which nobody waits for any more still writes.
        units = (unit for unit in (work.path / "units").glob("*") if unit.suffix != TEMPORARY_SUFFIX)
        found = sorted(itertools.chain.from_iterable(unit.glob(f"{kind}-*") for unit in units))
        num_bytes = [file.stat().st_size for file in found]
        if 0 in num_bytes:
            raise UserError(
                f"{found[num_bytes.index(0)]}: merged into a file that no longer exists; prepare with --restart"
            )
        names = [str(file.relative_to(work.path)) for file in found]
        known_bytes = base.keys.num_keys(kind) * DTYPES[kind].itemsize if base else 0
        found_ranges = num_ranges(sum(num_bytes) + known_bytes)
        write_json(path, {"names": names, "num_bytes": num_bytes, "num_ranges": found_ranges})
    return KeyFiles(**json.loads(path.read_bytes()))


def num_ranges(num_bytes: int) -> int:
    """Number of ranges that keys of so many bytes are divided into."""
    return -(-num_bytes // _RANGE_BYTES)


def steps(files: KeyFiles, kind: Kind) -> Iterator[DedupStep]:
    """The tasks, in order; the same for every process."""
    names, num_bytes = files.names, files.num_bytes
    level = 0
    while len(names) > FAN_IN:
        level += 1
        # In as many tasks as there may be files afterwards, if they are worth it: all workers have some.
        size = min(FAN_IN, max(_MERGED_AT_LEAST, -(-len(names) // FAN_IN)))
        tasks = _grouped(names, num_bytes, size, kind, f"duplicates/{kind}-keys-{level}/{{:06}}")
        yield DedupStep(name=f"sort keys of {kind} duplicates", task=merge_keys, items=tasks)
        names, num_bytes = [task.target for task in tasks], [task.num_bytes for task in tasks]
    # One tuple for all ranges, which are very many.
    inputs, sizes = tuple(names), tuple(num_bytes)
    size = max(1, min(_RANGES_AT_ONCE, files.num_ranges // _RANGE_TASKS))
    ranges = [
        DedupTask(
            kind=kind,
            inputs=inputs,
            sizes=sizes,
            target=f"duplicates/{kind}-pairs-0/{first // size:06}.npy",
            num_bytes=sum(num_bytes) * (stop - first) // files.num_ranges,
            range_index=first,
            count=stop - first,
            num_ranges=files.num_ranges,
        )
        for first, stop in ((first, min(first + size, files.num_ranges)) for first in range(0, files.num_ranges, size))
    ]
    yield DedupStep(name=f"find {kind} duplicates", task=find_in_ranges, items=ranges)
    names, level = [task.target for task in ranges], 0
    while len(names) > _UNITED_AT_ONCE:
        level += 1
        ones = [1] * len(names)
        tasks = _grouped(names, ones, _UNITED_AT_ONCE, kind, f"duplicates/{kind}-pairs-{level}/{{:06}}.npy")
        yield DedupStep(name=f"unite {kind} duplicates", task=unite_pairs, items=tasks)
        names = [task.target for task in tasks]
    last = DedupTask(kind=kind, inputs=tuple(names), sizes=(), target=f"duplicates/{kind}.npy", num_bytes=len(names))
    yield DedupStep(name=f"unite {kind} duplicates", task=unite_pairs, items=[last])


def _grouped(names: Sequence[str], num_bytes: Sequence[int], size: int, kind: Kind, target: str) -> list[DedupTask]:
    return [
        DedupTask(
            kind=kind,
            inputs=tuple(names[first : first + size]),
            sizes=tuple(num_bytes[first : first + size]),
            target=target.format(first // size),
            num_bytes=sum(num_bytes[first : first + size]),
        )
        for first in range(0, len(names), size)
    ]


def merge_keys(context: Context, item: DedupTask, advance: Advance) -> None:
    """The task of some key files: one file of all their records, instead of them."""
    root = context.work.path
    inputs = [root / name for name in item.inputs]
    target = root / item.target
    if not target.exists():
        try:
            merge_key_files(inputs, item.kind, target, sizes=item.sizes)
        except UserError:
            # Where another has done the same task meanwhile, the inputs are empty now.
            if not target.exists():
                raise
    # Only now: the disk holds all keys once, and what is being merged a second time. The empty file stays, as a name
    # that says that this work is done.
    for path in inputs:
        os.truncate(path, 0)
    advance(item.num_bytes)


def find_in_ranges(context: Context, item: DedupTask, advance: Advance) -> None:
    """The task of some neighbouring ranges of keys: their pairs of duplicates, and the keys for the store."""
    root = context.work.path
    if not (root / item.target).exists():
        bounds = range_bounds(item.range_index, item.count, item.num_ranges)
        files = [root / name for name in item.inputs]
        ranges = read_ranges(files, item.kind, bounds, sizes=item.sizes, more=_known(context, item.kind))
        pairs = merge_pairs(
            pairs_of(_kept(context, item.kind, index, batches))
            for index, batches in enumerate(ranges, item.range_index)
        )
        # After the keys of all its ranges: what has its pairs is not done again.
        write_array(root / item.target, pairs)
    advance(item.num_bytes)


def _known(context: Context, kind: Kind) -> Callable[[int, int], NDArray[np.void]] | None:
    """What gives the records of the store that is added to, by range; None: there is no such store."""
    if context.base is None:
        return None
    keys = context.base.keys
    return lambda start, stop: records_of(keys.between(kind, start, stop), kind, KNOWN)


def _kept(
    context: Context, kind: Kind, range_index: int, batches: Iterable[NDArray[np.void]]
) -> Iterator[NDArray[np.void]]:
    """The records of a range as they come; behind the last one their keys are written, each once, for the store."""
    dtype, found = KEY_DTYPES[kind], []
    keep = context.corpus.duplicates.keep_keys
    for records in batches:
        if keep:
            found.append(records[begins_of_keys(records)][list(dtype.names or ())].astype(dtype))
        yield records
    if keep:
        written = write_keys(context.work.entry(f"store/{KEYS_DIR}/{kind}", range_index), found)
        write_json(context.work.entry(f"keys/{kind}", range_index, ".json"), asdict(written))


def check_known(context: Context, item: KnownFile, advance: Advance) -> None:
    """The task of a file of keys of the store that is added to: compare it with its hash."""
    assert context.base is not None
    if fault := context.base.keys.fault(item.kind, item.number):
        raise UserError(f"{fault}; duplicates of the store's documents cannot be found")
    advance(item.num_bytes)


def known_files(base: BaseStore) -> list[KnownFile]:
    """The files of keys of the store that is added to."""
    return [
        KnownFile(kind=kind, number=number, num_bytes=file.num_keys * KEY_DTYPES[kind].itemsize)
        for kind, files in base.keys.files.items()
        for number, file in enumerate(files)
    ]


def write_known(context: Context) -> None:
    """Record in the store which keys it keeps; called by one process, after all ranges."""
    duplicates = context.corpus.duplicates
    if not duplicates.keep_keys:
        return
    kinds: dict[str, list[KeysFile]] = {}
    for kind in KINDS:
        if getattr(duplicates, kind):
            num_ranges = list_key_files(context.work, kind, context.base).num_ranges
            records = [context.work.entry(f"keys/{kind}", number, ".json") for number in range(num_ranges)]
            kinds[kind] = [KeysFile(**json.loads(record.read_bytes())) for record in records]
    write_index(context.work.store, kinds)


def unite_pairs(context: Context, item: DedupTask, advance: Advance) -> None:
    """The task of some files of pairs: one file of the clusters that they show together."""
    root = context.work.path
    if not (root / item.target).exists():
        write_array(root / item.target, merge_pairs(np.load(root / name) for name in item.inputs))
    advance(item.num_bytes)


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

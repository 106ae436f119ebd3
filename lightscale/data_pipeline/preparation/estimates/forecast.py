"""Time, disk, memory and file opens of a preparation on some hosts, from the estimate of a sample.

The work of each step is scaled from that of the sample: units by their text, duplicates and shards by documents and
tokens, at a speed measured on generated ones. Tasks of a step are divided among all workers. No step is shorter than
its longest task, such as a file that cannot be divided. Between steps, one process works alone.
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from lightscale.data_pipeline.preparation import deduplication, unit_parts
from lightscale.data_pipeline.preparation.corpus import Corpus
from lightscale.data_pipeline.preparation.dedup import (
    NUM_BANDS,
    find_pairs,
    merge_key_files,
    merge_pairs,
    write_band_records,
)
from lightscale.data_pipeline.preparation.dedup.records import DTYPES, Kind
from lightscale.data_pipeline.preparation.estimates.estimate import CorpusEstimate, SourceEstimate
from lightscale.data_pipeline.preparation.plan import (
    AIMED_UNITS,
    MAX_RANGES,
    MAX_UNIT_BYTES,
    MIN_UNIT_BYTES,
)
from lightscale.data_pipeline.store.format import array_layouts
from lightscale.data_pipeline.store.shards import ShardFileWriter
from lightscale.errors import UserError

# Counted: what opens files, those for fsync included; tests/data_pipeline/preparation/estimates/test_forecast.py holds
# them.
_OPENS_ONCE, _OPENS_UNIT, _OPENS_KEY_FILE, _OPENS_TASK, _OPENS_SHARD, _OPENS_UNIT_IN_SHARD = 140, 35, 2, 3, 16, 8
# Of a part of a large compressed file, and of a range of keys where the store keeps them.
_OPENS_PART, _OPENS_KEPT_RANGE = 36, 7
# Processor time beside the texts, measured by `python tools/bench.py preparation-costs` (2-core x86-64, CPU,
# 2026-11-24, other work beside it): of a unit, of counting what it keeps, of its part of a shard, of a small range of
# keys or file of pairs; and between the steps, where one process works alone, of a unit and of a file, listed twice.
UNIT_S, COUNT_UNIT_S, SHARD_PART_S, TASK_S, UNIT_ALONE_S, FILE_ALONE_S = 4.4e-3, 1.8e-3, 6e-4, 2.6e-3, 9e-4, 4e-5
# Memory: what is said in the READMEs of this folder's parent and of dedup/.
_SORTED_BYTES, _UNIT_MEMORY_BYTES, _FILE_MEMORY_BYTES, _UNITED_BYTES = 39e6, 500, 108, 170
_SUPPOSED_DUPLICATES = 0.2
# What is drawn to measure by.
_DRAWN_DOCUMENTS, _DRAWN_UNITS, _DRAWN_RANGES, _DRAWN_TOKENS = 2**16, 8, 4, 2**22


@dataclass(frozen=True, kw_only=True)
class StepForecast:
    """A step of the preparation: tasks that any worker takes."""

    name: str
    tasks: int
    seconds: float
    """Processor time of all of them."""
    longest_seconds: float
    """Of the longest one."""

    def wall_seconds(self, workers: int) -> float:
        """With so many workers."""
        return max(self.seconds / min(workers, max(1, self.tasks)), self.longest_seconds)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Costs of a preparation."""

    hosts: int
    workers: int
    """On each."""
    steps: list[StepForecast]
    """Steps that are divided over workers, in order."""
    alone_seconds: float
    """Of one process, between the steps, while all others wait."""
    units: int
    opens: int
    store_bytes: float
    work_bytes: float
    """The most that is beside the store, until that is finished."""
    key_bytes: float
    """Of these the keys of duplicates."""
    io_bytes: float
    """Read and written together."""
    worker_bytes: float
    """Memory of a worker, and"""
    handing_bytes: float
    """of the process that hands tasks out."""
    uniting_bytes: float
    """Of the task that unites all duplicates, if a fifth of the documents has one."""

    @property
    def hours(self) -> float:
        """From the start to the store, where reading and writing do not take longer than the processors do."""
        workers = self.hosts * self.workers
        return (self.alone_seconds + sum(step.wall_seconds(workers) for step in self.steps)) / 3600

    @property
    def needed_bytes_s(self) -> float:
        """Bytes per second that all hosts together read and write, on average."""
        return self.io_bytes / (3600 * self.hours) if self.hours else 0.0

    def record(self) -> dict[str, Any]:
        """For JSON."""
        workers = self.hosts * self.workers
        return {
            "hosts": self.hosts,
            "workers": self.workers,
            "hours": self.hours,
            "steps": [
                {
                    "name": step.name,
                    "tasks": step.tasks,
                    "seconds": step.seconds,
                    "longest_seconds": step.longest_seconds,
                    "wall_seconds": step.wall_seconds(workers),
                }
                for step in self.steps
            ],
            "alone_seconds": self.alone_seconds,
            "units": self.units,
            "opens": self.opens,
            "disk": {
                "store_bytes": round(self.store_bytes),
                "work_bytes": round(self.work_bytes),
                "key_bytes": round(self.key_bytes),
                "read_and_written_bytes": round(self.io_bytes),
                "needed_bytes_per_second": self.needed_bytes_s,
            },
            "memory": {
                "worker_bytes": round(self.worker_bytes),
                "handing_out_bytes": round(self.handing_bytes),
                "uniting_bytes_of_a_fifth": round(self.uniting_bytes),
            },
        }


def forecast(
    corpus: Corpus, found: CorpusEstimate, *, hosts: int = 1, workers: int = 1, unit_bytes: int | None = None
) -> Forecast:
    """Costs of preparing ``corpus``, estimated as ``found``, with ``workers`` on each of ``hosts``.

    ``unit_bytes``: as in ``PrepareOptions``. Takes about half a second, to measure how fast this machine finds
    duplicates and writes; that is done in a temporary directory.
    """
    require_workers(hosts, workers)
    sources = list(found.sources.values())
    if unit_bytes is None:
        total = sum(source.file_bytes for source in sources)
        unit_bytes = min(max(total // AIMED_UNITS, MIN_UNIT_BYTES), MAX_UNIT_BYTES)
    counted = [_units(source, unit_bytes) for source in sources]
    units, ranges = (sum(one[index] for one in counted) for index in (0, 1))
    documents = sum(source.documents for source in sources)
    kinds: list[Kind] = [kind for kind in deduplication.KINDS if getattr(corpus.duplicates, kind)]
    key_bytes = {kind: documents * DTYPES[kind].itemsize * (NUM_BANDS if kind == "near" else 1) for kind in kinds}
    shards = in_shards = 0
    for (name, source), (units_of, _) in zip(found.sources.items(), counted, strict=True):
        arrays, token_shards = _arrays(corpus, name), -(-int(source.tokens) // corpus.shard_tokens)
        shards += arrays + token_shards
        # Every unit is a part of each array; and one goes on in each further shard.
        in_shards += units_of * (arrays + bool(corpus.validation_of(name))) + token_shards
    token_bytes = 4 * found.tokens

    steps = [_unit_step(sources, counted, unit_bytes)]
    in_parts = [size for source in sources for size in source.part_sizes if size > unit_bytes]
    parts = sum(size // unit_parts.PART_BYTES for size in in_parts)  # each is a little longer
    key_files = units - len(in_parts) + parts
    opens = _OPENS_ONCE + units * _OPENS_UNIT + parts * _OPENS_PART + key_files * _OPENS_KEY_FILE * len(kinds) + ranges
    record_s, token_byte_s = _record_seconds(), _token_byte_seconds()
    for kind in deduplication.KINDS:
        own, own_opens = _duplicate_steps(
            kind, key_files, key_bytes.get(kind, 0.0), record_s, keep_keys=corpus.duplicates.keep_keys
        )
        steps += own
        opens += own_opens
    steps.append(_even("count kept documents", units, units * COUNT_UNIT_S))
    steps.append(_even("write shards", shards, token_bytes * token_byte_s + in_shards * SHARD_PART_S))
    opens += _OPENS_SHARD * shards + _OPENS_UNIT_IN_SHARD * in_shards
    keys = sum(key_bytes.values())
    merged = sum(1 for step in steps if step.name.startswith("sort keys of near"))
    return Forecast(
        hosts=hosts,
        workers=workers,
        steps=steps,
        alone_seconds=sum(source.files for source in sources) * FILE_ALONE_S + units * UNIT_ALONE_S,
        units=units,
        opens=opens,
        store_bytes=found.store_bytes,
        work_bytes=found.work_bytes,
        key_bytes=keys,
        # Texts read once; tokens written, read and written again; keys written, merged and read.
        io_bytes=sum(source.file_bytes for source in sources) + 3 * token_bytes + keys * (2 + 2 * merged),
        worker_bytes=psutil.Process().memory_info().rss + _SORTED_BYTES,
        handing_bytes=units * _UNIT_MEMORY_BYTES + sum(source.files for source in sources) * _FILE_MEMORY_BYTES,
        uniting_bytes=documents * _SUPPOSED_DUPLICATES * _UNITED_BYTES if kinds else 0.0,
    )


def _arrays(corpus: Corpus, name: str) -> int:
    """Arrays of a source in the store: tokens, where documents end and came from; their ids, and where those end."""
    source = corpus.sources[name]
    own = 3 + 2 * (source.id_field is not None) + (source.label_field is not None)
    return own * (1 + bool(corpus.validation_of(name)))


def require_workers(hosts: int, workers: int) -> None:
    """``UserError`` for less than one."""
    for name, number in (("--hosts", hosts), ("--workers", workers)):
        if number < 1:
            raise UserError(f"{name} {number}: must be at least 1")


def _units(source: SourceEstimate, unit_bytes: int) -> tuple[int, int]:
    """How many units and ranges of files a source is cut into; as ``plan.py`` does, whatever the order of the files."""
    units = ranges = num_bytes = num_here = 0
    for size in itertools.chain(source.whole_sizes, _range_sizes(source, unit_bytes)):
        if num_here and (num_bytes + size > unit_bytes or num_here == MAX_RANGES):
            units, num_bytes, num_here = units + 1, 0, 0
        ranges, num_bytes, num_here = ranges + 1, num_bytes + size, num_here + 1
    return units + (num_here > 0), ranges


def _range_sizes(source: SourceEstimate, unit_bytes: int) -> Iterator[int]:
    for size in source.divided_sizes:
        yield from itertools.repeat(unit_bytes, size // unit_bytes)
        if size % unit_bytes:
            yield size % unit_bytes


def _unit_step(sources: list[SourceEstimate], counted: list[tuple[int, int]], unit_bytes: int) -> StepForecast:
    seconds = sum(source.total_seconds for source in sources)
    units = sum(units for units, _ in counted)
    longest = 0.0
    for source in sources:
        largest = max(min(unit_bytes, source.file_bytes), max(source.whole_sizes, default=0))
        if source.file_bytes:
            longest = max(longest, source.total_seconds * largest / source.file_bytes)
    return StepForecast(
        name="read, filter, tokenize",
        tasks=units,
        seconds=seconds + units * UNIT_S,
        longest_seconds=longest + UNIT_S,
    )


def _even(name: str, tasks: int, seconds: float) -> StepForecast:
    return StepForecast(name=name, tasks=tasks, seconds=seconds, longest_seconds=seconds / max(1, tasks))


def _duplicate_steps(
    kind: Kind, key_files: int, key_bytes: float, record_s: dict[str, float], *, keep_keys: bool
) -> tuple[list[StepForecast], int]:
    """The steps that find duplicates of ``kind``, as they would be, and the files that they open."""
    num_files = key_files if key_bytes else 0
    files = deduplication.KeyFiles(
        names=[""] * num_files,
        num_bytes=[int(key_bytes) // max(1, num_files)] * num_files,
        num_ranges=deduplication.num_ranges(int(key_bytes)),
    )
    records = key_bytes / DTYPES[kind].itemsize
    found: list[StepForecast] = []
    opens = 0
    for step in deduplication.steps(files, kind):
        opens += sum(len(item.inputs) + _OPENS_TASK + _OPENS_KEPT_RANGE * item.count * keep_keys for item in step.items)
        own_s = records * record_s[step.name.partition(" ")[0]]
        found.append(_even(step.name, len(step.items), own_s + TASK_S * sum(max(1, item.count) for item in step.items)))
    return found, opens


def _record_seconds() -> dict[str, float]:
    """Processor time of a record of a key to be sorted, found and united, of drawn ones; by the names of the steps."""
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 2**64, (_DRAWN_DOCUMENTS, NUM_BANDS), dtype=np.uint64)
    num_twins = _DRAWN_DOCUMENTS // 10
    keys[-num_twins:] = keys[:num_twins]
    with tempfile.TemporaryDirectory(prefix="lightscale-plan-") as name:
        files = [Path(name) / str(number) for number in range(_DRAWN_UNITS)]
        for file, some in zip(files, np.array_split(np.arange(len(keys), dtype=np.uint64), _DRAWN_UNITS), strict=True):
            write_band_records(file, keys[some], some)
        spent = {"sort": _seconds(lambda: merge_key_files(files, "near", Path(name) / "merged"))}
        parts: list[NDArray[np.uint64]] = []
        spent["find"] = _seconds(
            lambda: parts.extend(
                find_pairs(files, "near", range_index=index, num_ranges=_DRAWN_RANGES) for index in range(_DRAWN_RANGES)
            )
        )
        spent["unite"] = _seconds(lambda: merge_pairs(parts))
    return {step: seconds / keys.size for step, seconds in spent.items()}


def _token_byte_seconds() -> float:
    """Processor time to take a byte of tokens from a unit to a shard, with its hash and count."""
    tokens = np.random.default_rng(0).integers(0, 50_000, _DRAWN_TOKENS, dtype=np.uint32)
    with tempfile.TemporaryDirectory(prefix="lightscale-plan-") as folder:

        def write() -> None:
            shard = ShardFileWriter(Path(folder) / "0", array_layouts(_DRAWN_TOKENS, 2**16)["tokens"])
            shard.append(tokens.copy())
            np.bincount(tokens)
            shard.close()

        return _seconds(write) / tokens.nbytes


def _seconds(call: Callable[[], object]) -> float:
    begun_s = time.process_time()
    call()
    return time.process_time() - begun_s

"""The plan: the corpus cut into units of work by its files alone, for any number of workers.

A unit of work is some whole files, or ranges of large ones, of one source. One task reads, filters and tokenizes it.
Its number and a document's number in it are the document's id (``unit << 32 | number``). Ids are in the order of the
corpus, so that two integers show the earlier of two duplicates in any order of reading. ``plan.jsonl`` has one unit per
line; a task reads only its line.
"""

import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightscale.data_pipeline.preparation.corpus import Corpus
from lightscale.data_pipeline.preparation.readers import FileRange, cut_into_ranges
from lightscale.data_pipeline.preparation.readers.inputs import Problems, SourceFile, path_of
from lightscale.data_pipeline.preparation.sources import FileLister
from lightscale.data_pipeline.whole_files import whole_file

# Small enough that an interruption loses little and all workers have some, large enough that a unit's fixed costs (a
# directory, a few files and renames) do not count.
MIN_UNIT_BYTES, MAX_UNIT_BYTES = 2**20, 2**26
AIMED_UNITS = 1024
# A unit of many tiny files ends here, so that its list of files stays small.
MAX_RANGES = 4096
UNIT_SHIFT = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSummary:
    """The part of a unit that every process holds; its list of files stays in the file of the plan."""

    number: int
    source: str
    num_bytes: int
    """Of files, compressed as they are; for progress."""
    offset: int
    """Where its line begins in the plan."""


@dataclass(frozen=True, kw_only=True)
class PreparationPlan:
    """All units, in order."""

    path: Path
    units: list[UnitSummary]
    problems: dict[str, dict[str, Any]]
    """By source: faults of its files when they were listed, as ``Problems.as_part`` returns them."""
    num_files: int
    num_known_files: int
    """Files of the corpus that are skipped, because the store that is added to has them."""
    sha256: str
    """Identity: of units, files, their sizes and times."""

    def file_ranges(self, unit: UnitSummary) -> Iterator[FileRange]:
        """The file ranges of a unit, in order."""
        with self.path.open("rb") as lines:
            lines.seek(unit.offset)
            content = json.loads(lines.readline())
        for path, file_id, size, mtime_ns, start, stop, number, num_bytes in content["ranges"]:
            file = SourceFile(path=path_of(path), id=file_id, size_bytes=size, mtime_ns=mtime_ns)
            yield FileRange(file=file, start=start, stop=stop, file_number=number, num_bytes=num_bytes)

    def files(self) -> Iterator[tuple[str, int]]:
        """The id and the size in bytes of every file, by their numbers."""
        num_named = 0
        with self.path.open("rb") as lines:
            for line in lines:
                for _, file_id, size, *_, number, _ in json.loads(line).get("ranges", []):
                    if number == num_named:  # its first range; those of a file follow one another
                        yield file_id, size
                        num_named += 1


Known = Collection[tuple[str, int]]
"""(id, size in bytes) of the files of a store."""


def write_plan(path: Path, corpus: Corpus, *, unit_bytes: int | None, strict: bool, known: Known | None = None) -> str:
    """Plan ``corpus`` into the file ``path`` and return the plan's sha256.

    ``unit_bytes``: size of a unit; none: a 1024th of the corpus within 1 to 64 MiB. ``known``: files that the store
    already has; they are skipped. Raises ``UserError`` for paths that do not exist and, if ``strict``, for unreadable
    files.
    """
    # Listed twice where the size of a unit follows from the total: a list of all files would grow with the corpus.
    if unit_bytes is None:
        files = _files(corpus, _problems_of(corpus, strict=False))
        total = sum(file.size_bytes for _, file in files if (file.id, file.size_bytes) not in (known or ()))
        unit_bytes = min(max(total // AIMED_UNITS, MIN_UNIT_BYTES), MAX_UNIT_BYTES)
    problems = _problems_of(corpus, strict=strict)
    num_files = 0
    digest = hashlib.sha256()
    with whole_file(path) as temporary, temporary.open("wb") as lines:
        found = _NewFiles(corpus, problems, known or ())
        # Documents of the store are of unit 0, so that they come before all others: no file may be in that one.
        first = [{"source": next(iter(corpus.sources)), "ranges": []}] if known is not None else []
        for content in itertools.chain(first, _units(corpus, found, problems, unit_bytes)):
            line = json.dumps(content).encode() + b"\n"
            digest.update(line)
            lines.write(line)
            num_files += sum(1 for file_range in content["ranges"] if file_range[4] == 0)  # ranges that begin a file
        # Known only after the last file; not part of the hash, which units alone decide.
        last = {
            "problems": {name: one.as_part() for name, one in problems.items()},
            "num_files": num_files,
            "num_known_files": found.num_known,
        }
        lines.write(json.dumps(last).encode() + b"\n")
    return digest.hexdigest()


def read_plan(path: Path) -> PreparationPlan:
    """The plan in the file ``path``."""
    units: list[UnitSummary] = []
    digest = hashlib.sha256()
    offset = 0
    content: dict[str, Any] = {}
    with path.open("rb") as lines:
        for line in lines:
            content = json.loads(line)
            if "source" in content:
                digest.update(line)
                size = sum(file_range[-1] for file_range in content["ranges"])
                unit = UnitSummary(number=len(units), source=content["source"], num_bytes=size, offset=offset)
                units.append(unit)
            offset += len(line)
    return PreparationPlan(
        path=path,
        units=units,
        problems=content["problems"],
        num_files=content["num_files"],
        num_known_files=content["num_known_files"],
        sha256=digest.hexdigest(),
    )


def _problems_of(corpus: Corpus, *, strict: bool) -> dict[str, Problems]:
    return {name: Problems(strict=strict) for name in corpus.sources}


def _files(corpus: Corpus, problems: dict[str, Problems]) -> Iterator[tuple[str, SourceFile]]:
    seen: FileLister | None = None
    for name, source in corpus.sources.items():
        seen = FileLister(problems[name], after=seen)
        for file in seen.files(source.paths, suffixes=source.suffixes):
            yield name, file


class _NewFiles:
    """The files of a corpus that are not ``known``, in order."""

    def __init__(self, corpus: Corpus, problems: dict[str, Problems], known: Known) -> None:
        self._files, self._known = _files(corpus, problems), known
        self.num_known = 0

    def __iter__(self) -> Iterator[tuple[str, SourceFile]]:
        for name, file in self._files:
            if (file.id, file.size_bytes) in self._known:
                self.num_known += 1
            else:
                yield name, file


def _units(
    corpus: Corpus, files: Iterable[tuple[str, SourceFile]], problems: dict[str, Problems], unit_bytes: int
) -> Iterator[dict[str, Any]]:
    """The lines of the plan: file ranges of one source, gathered until they make a unit."""
    source, num_bytes = "", 0
    ranges: list[list[Any]] = []
    num_files = 0
    for name, file in files:
        begun = False
        for file_range in cut_into_ranges(file, unit_bytes, problems[name], options=corpus.read_options(name)):
            # Of files with ranges, so that a number is that of a name in the store.
            num_files, begun = num_files + (not begun), True
            # A unit has one source, because tokens, filters and shards are by source.
            full = num_bytes + file_range.num_bytes > unit_bytes or len(ranges) == MAX_RANGES
            if ranges and (full or name != source):
                yield {"source": source, "ranges": ranges}
                ranges, num_bytes = [], 0
            source = name
            ranges.append(_range_row(file_range, num_files - 1))
            num_bytes += file_range.num_bytes
    if ranges:
        yield {"source": source, "ranges": ranges}


def _range_row(file_range: FileRange, file_number: int) -> list[Any]:
    file = file_range.file
    return [
        str(file.path),
        file.id,
        file.size_bytes,
        file.mtime_ns,
        file_range.start,
        file_range.stop,
        file_number,
        file_range.num_bytes,
    ]

"""The plan: the corpus cut into units of work that depend on its files alone, never on who works on them.

A unit is some whole files, or parts of large ones, of one source. Its number and a document's number in it are the
document's id (``unit << 32 | number``), and ids are in the order of the corpus. ``plan.jsonl`` has a unit a line, so
that whoever works on one reads no other.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightscale.data_pipeline.preparation.corpus import Corpus
from lightscale.data_pipeline.preparation.readers import Piece, cut
from lightscale.data_pipeline.preparation.sources import FileLister, Problems, SourceFile
from lightscale.data_pipeline.whole_files import whole_file

# Small enough that little is lost and all workers have some, large enough that a unit's own costs do not count.
MIN_UNIT_BYTES, MAX_UNIT_BYTES = 2**20, 2**26
_AIMED_UNITS = 1024
# A unit of many tiny files ends here, so that its list of files stays small.
_MAX_PIECES = 4096
UNIT_SHIFT = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSummary:
    """What of a unit everybody knows."""

    number: int
    source: str
    num_bytes: int
    """Of files, packed as they are; for progress."""
    offset: int
    """Where its line begins in the plan."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All units, in order."""

    path: Path
    units: list[UnitSummary]
    problems: dict[str, dict[str, Any]]
    """By source: what was wrong with its files when they were listed, as ``Problems.as_json`` gives it."""
    num_files: int
    sha256: str
    """Identity: of units, files, their sizes and times."""

    def pieces(self, unit: UnitSummary) -> Iterator[Piece]:
        """The pieces of files of a unit, in order."""
        with self.path.open("rb") as lines:
            lines.seek(unit.offset)
            content = json.loads(lines.readline())
        for path, file_id, size, mtime_ns, start, stop, num_bytes in content["pieces"]:
            file = SourceFile(path=Path(path), id=file_id, size_bytes=size, mtime_ns=mtime_ns)
            yield Piece(file=file, start=start, stop=stop, num_bytes=num_bytes)


def write_plan(path: Path, corpus: Corpus, *, unit_bytes: int | None, strict: bool) -> str:
    """Plan ``corpus`` into the file ``path`` and return the plan's sha256.

    ``unit_bytes``: size of a unit; none: a 1024th of the corpus within 1 to 64 MiB. Raises ``UserError`` for paths that
    do not exist and, if ``strict``, for files that cannot be read.
    """
    if unit_bytes is None:
        total = sum(file.size_bytes for _, file in _files(corpus, _problems_of(corpus, strict=False)))
        unit_bytes = min(max(total // _AIMED_UNITS, MIN_UNIT_BYTES), MAX_UNIT_BYTES)
    problems = _problems_of(corpus, strict=strict)
    num_files = 0
    digest = hashlib.sha256()
    with whole_file(path) as temporary, temporary.open("wb") as lines:
        for content in _units(corpus, problems, unit_bytes):
            line = json.dumps(content).encode() + b"\n"
            digest.update(line)
            lines.write(line)
            num_files += sum(1 for piece in content["pieces"] if piece[4] == 0)
        last = {"problems": {name: found.as_json() for name, found in problems.items()}, "num_files": num_files}
        lines.write(json.dumps(last).encode() + b"\n")
    return digest.hexdigest()


def read_plan(path: Path) -> Plan:
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
                size = sum(piece[-1] for piece in content["pieces"])
                unit = UnitSummary(number=len(units), source=content["source"], num_bytes=size, offset=offset)
                units.append(unit)
            offset += len(line)
    return Plan(
        path=path,
        units=units,
        problems=content["problems"],
        num_files=content["num_files"],
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


def _units(corpus: Corpus, problems: dict[str, Problems], unit_bytes: int) -> Iterator[dict[str, Any]]:
    """The lines of the plan: pieces of one source, gathered until they make a unit."""
    source, num_bytes = "", 0
    pieces: list[list[Any]] = []
    for name, file in _files(corpus, problems):
        for piece in cut(file, unit_bytes, problems[name]):
            full = num_bytes + piece.num_bytes > unit_bytes or len(pieces) == _MAX_PIECES
            if pieces and (full or name != source):
                yield {"source": source, "pieces": pieces}
                pieces, num_bytes = [], 0
            source = name
            pieces.append(_piece_row(piece))
            num_bytes += piece.num_bytes
    if pieces:
        yield {"source": source, "pieces": pieces}


def _piece_row(piece: Piece) -> list[Any]:
    file = piece.file
    return [str(file.path), file.id, file.size_bytes, file.mtime_ns, piece.start, piece.stop, piece.num_bytes]

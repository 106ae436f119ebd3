"""Input files as the steps of a preparation exchange them: the files, the fields to read, and faults."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightscale.data_pipeline.preparation.readers.remote import RemotePath, is_remote
from lightscale.errors import UserError

UNREADABLE = "unreadable file"
TRUNCATED = "file ends too early"
CHANGED = "file changed since the preparation began"
DIRECTORY_LOOP = "directory loop"
INVALID_UTF8 = "invalid UTF-8 replaced"
NOT_JSON = "line is not a JSON object"
NO_TEXT = "no text in the field"
OTHER_FIELDS = "row with another number of fields"
TOO_LONG = "document too long"
EMPTY = "empty document skipped"
READ_TWICE = "file given twice, read once"
NO_CHECKSUM = "compressed file without a checksum, read all the same"
NO_DOCUMENT = "record that is no document"
OTHER_KIND = "other file in a directory, by its suffix"
_HARMLESS = frozenset({EMPTY, READ_TWICE, OTHER_KIND, NO_CHECKSUM, NO_DOCUMENT})
_MAX_EXAMPLES = 20
MAX_DOCUMENT_BYTES = 16 * 2**20


class Missing:
    """Value of a missing field."""


MISSING = Missing()


class Problems:
    """Faults of reading, counted by reason, with the first examples of each.

    With ``strict`` the first problem that loses or changes text raises ``UserError`` instead.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}
        # By reason: the first and the last file of which it was said as a whole. Ranges of a file follow one another.
        self._files: dict[str, tuple[str, str]] = {}

    def add(self, reason: str, where: str, *, file: "SourceFile | None" = None) -> None:
        """Count ``reason`` at ``where``, a file's id with line and detail where there are any.

        ``file``: it is all of this file that is wrong, which counts once, however many ranges it is read in.
        """
        if self.strict and reason not in _HARMLESS:
            raise UserError(f"{reason}: {where} (--strict stops here; without it, this is counted and skipped)")
        if file is not None:
            first, last = self._files.get(reason, (file.id, None))
            self._files[reason] = (first, file.id)
            if file.id == last:
                return
        self.counts[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _MAX_EXAMPLES:
            examples.append(where)

    def as_json(self) -> dict[str, Any]:
        """Plain values: by reason, ``count`` and ``examples``."""
        return {
            reason: {"count": count, "examples": self.examples[reason]} for reason, count in sorted(self.counts.items())
        }

    def as_part(self) -> dict[str, Any]:
        """The same, with the data that ``merge`` needs of a part of the corpus."""
        return {reason: {**problem, "files": self._files.get(reason)} for reason, problem in self.as_json().items()}

    def merge(self, found: dict[str, Any]) -> None:
        """Add the result of ``as_part`` for the next part of the corpus."""
        for reason, problem in found.items():
            examples = self.examples.setdefault(reason, [])
            new = problem["examples"]
            count = problem["count"]
            if problem["files"] is not None:
                first, last = problem["files"]
                before = self._files.get(reason)
                self._files[reason] = (first if before is None else before[0], last)
                if before is not None and before[1] == first:
                    # The file that the part before ended in: its examples begin with it.
                    count, new = count - 1, new[1:]
            self.counts[reason] += count
            examples.extend(new[: _MAX_EXAMPLES - len(examples)])


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file of the corpus."""

    path: Path | RemotePath
    id: str
    """Stable name: the path from the given directory (its name included), or the given file's name."""
    size_bytes: int
    mtime_ns: int
    """Time of the last change; of a remote file the number that replaces it."""
    gives_parts: bool = True
    """Whether any part of it can be read without the part before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """The fields to read from a file."""

    text_field: str = "text"
    """Of objects and rows. ``a.b`` is field b of field a, if no field has that name."""
    text_pair_field: str | None = None
    """Of the second text of a pair; none: documents are single texts."""
    columns: tuple[str, ...] | None = None
    """Of csv and tsv files without a header; none: the first record names them."""
    format: str | None = None
    """Of the files, whatever their suffixes; none: by these."""
    id_field: str | None = None
    """Of the documents' own ids; where a document has none there it gets none."""
    has_records: bool = False
    """Whether documents are whole records, as JSON, in place of a text field."""
    label_field: str | None = None
    """Of the documents' classes, which all documents have; none: they have none."""
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    """Of a text; longer ones are counted and skipped. Memory grows with it."""

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Of the one text, or of both."""
        return (self.text_field,) if self.text_pair_field is None else (self.text_field, self.text_pair_field)

    @property
    def max_line_bytes(self) -> int:
        """Of a jsonl file: JSON can write a byte of text as six."""
        return 4 * self.max_document_bytes * len(self.text_fields)


def path_of(text: str) -> Path | RemotePath:
    """The path that ``str(file.path)`` gave."""
    return RemotePath(text) if is_remote(text) else Path(text)

"""Interface of input formats, and the common messages for documents with no text or too much text."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightscale.data_pipeline.executors import Advance
from lightscale.data_pipeline.preparation.readers.file_parts import FIRST, FilePart, PartBegin
from lightscale.data_pipeline.preparation.readers.inputs import (
    MISSING,
    NO_TEXT,
    TOO_LONG,
    Problems,
    ReadOptions,
    SourceFile,
)
from lightscale.data_pipeline.preparation.readers.ranges import FileRange

MAX_ID_CHARACTERS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class RawDocument:
    """A text as it was found."""

    id: str
    """The file's id; for one of many in a file ``id@n``: the byte it begins at, unpacked, or its row."""
    data: bytes | str
    """Bytes, expected in UTF-8; or text of JSON, which may have lone surrogates."""
    pair: str | None = None
    """The second text of a pair."""
    begin: int = 0
    """The byte that its line or record begins at, unpacked, or its row."""
    num_bytes: int = 0
    """Of its line or record, or of its file; 0 for a row."""
    own_id: str | None = None
    """Its own id or URL, from the field that the source names."""
    label: Any = MISSING
    """The raw value of the field of its class that the source names."""

    @property
    def texts(self) -> tuple[bytes | str, ...]:
        """The one text, or both of a pair."""
        return (self.data,) if self.pair is None else (self.data, self.pair)

    @property
    def text_bytes(self) -> int:
        """Of its texts, as they were found."""
        return sum(len(one) if isinstance(one, bytes) else _utf8_length(one) for one in self.texts)


@dataclass(kw_only=True, slots=True)
class Reading:
    """State of the reading of a file range; of its next part, if that begins with the same open file."""

    problems: Problems
    """Counts unreadable parts."""
    options: ReadOptions
    advance: Advance
    """Called with the bytes of the file that were read, as they are there."""
    part: FilePart | None = None
    """Of a compressed file: the part that is being read; None: it is read as a whole."""

    @property
    def begin(self) -> PartBegin:
        """Where its part begins."""
        return FIRST if self.part is None else self.part.begin

    def end_before(self, document: int, known: Any = None) -> PartBegin | None:
        """The end of the part, if it ends before the document at byte ``document`` of the content; else None.

        ``known``: state of the format reader that is needed to begin there, as JSON.
        """
        return None if self.part is None else self.part.end_before(document, known)

    def fits(self, text: str | bytes, document_id: str) -> bool:
        """Whether a text is short enough; counts one that is not."""
        # A character is four bytes at most: most texts need no second look.
        most = self.options.max_document_bytes
        num_bytes = len(text) if isinstance(text, bytes) or 4 * len(text) <= most else _utf8_length(text)
        if num_bytes <= most:
            return True
        self.too_long(document_id, num_bytes)
        return False

    def too_long(self, document_id: str, num_bytes: int) -> None:
        """Count a text of more than ``max_document_bytes``."""
        most = self.options.max_document_bytes
        self.problems.add(TOO_LONG, f"{document_id}: {num_bytes} bytes, more than max_document_bytes = {most}")

    def document(
        self, record: dict[str, Any], document_id: str, *, begin: int = 0, num_bytes: int = 0
    ) -> RawDocument | None:
        """The document that ``record`` holds; None, and counted, where it has no text or too much."""
        options = self.options
        names = options.text_fields
        texts = [_as_json(record)] if options.has_records else [field_of(record, name) for name in names]
        for text, name in zip(texts, names, strict=True):
            if not isinstance(text, str):
                found = _describe_fields(record)
                self.problems.add(NO_TEXT, f"{document_id}: no string {name!r} (found {found})")
                return None
            if not self.fits(text, document_id):
                return None
        return RawDocument(
            id=document_id,
            data=texts[0],
            pair=texts[1] if len(texts) > 1 else None,
            begin=begin,
            num_bytes=num_bytes,
            own_id=id_text(field_of(record, options.id_field)) if options.id_field else None,
            label=field_of(record, options.label_field) if options.label_field else MISSING,
        )


class InputFormat(ABC):
    """How files of a format are divided, and read."""

    def ranges(self, file: SourceFile, range_bytes: int, problems: Problems) -> Iterator[FileRange]:
        """``file`` in ranges of about ``range_bytes``, as far as the format allows. Reads metadata only.

        A file that cannot be read at all is counted in ``problems``.
        """
        yield FileRange(file=file, num_bytes=file.size_bytes)

    def num_rows(self, file: SourceFile) -> int | None:
        """Number of documents of a file that :meth:`ranges` found readable; None: its metadata lack it."""
        return None

    @abstractmethod
    def read(self, file_range: FileRange, reading: Reading) -> Iterator[RawDocument | PartBegin]:
        """The documents of a range, in order; unreadable parts are counted and passed over.

        Of a compressed file: from ``reading.begin`` on. Between documents come the ends of parts that
        ``reading.end_before`` returns; ``reading`` is then of the next part. Raises ``OSError`` for an unreadable file.
        """


def field_of(record: dict[str, Any], name: str) -> Any:
    """The field ``name`` of a record; where it has none of that name, ``a.b`` is field b of field a. Or MISSING."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return MISSING
        value = value[part]
    return value


def _as_json(record: dict[str, Any]) -> str:
    # Columns may hold dates and bytes, which no conversation needs.
    return json.dumps(record, ensure_ascii=False, default=str)


def id_text(value: Any) -> str | None:
    """An id or URL as text, where it is a string or a whole number; of a long one its beginning."""
    is_id = isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))
    return str(value)[:MAX_ID_CHARACTERS] if is_id else None


def one_line(error: BaseException) -> str:
    """Text of ``error`` on one line."""
    return " ".join(str(error).split())


def _utf8_length(text: str) -> int:
    return len(text.encode("utf-8", errors="surrogatepass"))


def _describe_fields(record: dict[str, Any]) -> str:
    names = [f"{name}: {type(value).__name__}" for name, value in list(record.items())[:5]]
    return ", ".join(names) if names else "no fields"

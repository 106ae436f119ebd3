"""JSON lines: each line holds one document, an object."""

import codecs
import contextlib
import json
from collections.abc import Iterator
from typing import Any

from lightscale.data_pipeline.preparation.readers.file_parts import PartBegin
from lightscale.data_pipeline.preparation.readers.inputs import INVALID_UTF8, NOT_JSON, TOO_LONG, Problems, SourceFile
from lightscale.data_pipeline.preparation.readers.interface import InputFormat, RawDocument, Reading
from lightscale.data_pipeline.preparation.readers.ranges import FileRange, byte_ranges
from lightscale.data_pipeline.preparation.readers.streams import (
    after_newline,
    contents,
    is_packed,
    lines,
)

try:
    import orjson
except ImportError:  # json reads the same, slower
    orjson = None  # type: ignore[assignment]


class JsonLines(InputFormat):
    """Lines begin anywhere, so a plain file is read in ranges of bytes; a compressed one as a whole, or in parts."""

    def ranges(self, file: SourceFile, range_bytes: int, problems: Problems) -> Iterator[FileRange]:
        """Of ``range_bytes`` each."""
        yield from super().ranges(file, range_bytes, problems) if is_packed(file) else byte_ranges(file, range_bytes)

    def read(self, file_range: FileRange, reading: Reading) -> Iterator[RawDocument | PartBegin]:
        """The lines that begin in the range."""
        file, options = file_range.file, reading.options
        # A line belongs to the range that it begins in, so that ranges together have every line once, wherever they
        # end. At a range's beginning one does if the byte before ends another.
        with file.path.open("rb", buffering=0) as content:
            content.seek(max(file_range.start - 1, 0))
            begins_line = file_range.start == 0 or content.read(1) == b"\n"
            first, buffers = reading.begin.document or file_range.start, contents(content, file, reading)
            if not begins_line:
                assert file_range.stop is not None
                # No further than this range: a line that fills several of them would be read to its end by each.
                first, buffers = after_newline(buffers, file_range.start, file_range.stop)
            for offset, line in lines(buffers, first, options.max_line_bytes):
                if file_range.stop is not None and offset >= file_range.stop:
                    break
                if (end := reading.end_before(offset)) is not None:
                    yield end
                document_id = f"{file.id}@{offset}"
                if line is None:
                    reading.problems.add(TOO_LONG, f"{document_id}: a line of more than {options.max_line_bytes} bytes")
                elif line and not line.isspace():
                    document = document_of_json(line, document_id, offset, reading)
                    if document is not None:
                        yield document


def document_of_json(line: bytes, document_id: str, begin: int, reading: Reading) -> RawDocument | None:
    """The document of a JSON object; None for any other value, which is counted."""
    # Some programs begin a UTF-8 file with the mark; JSON forbids it.
    record = _record_of_line(line.removeprefix(codecs.BOM_UTF8), document_id, reading.problems)
    return None if record is None else reading.document(record, document_id, begin=begin, num_bytes=len(line))


def _record_of_line(line: bytes, document_id: str, problems: Problems) -> dict[str, Any] | None:
    try:
        record = _parse(line, document_id, problems)
    except (ValueError, RecursionError) as error:
        problems.add(NOT_JSON, f"{document_id}: {error}")
        return None
    if not isinstance(record, dict):
        problems.add(NOT_JSON, f"{document_id}: a {type(record).__name__}")
        return None
    return record


def _parse(line: bytes, document_id: str, problems: Problems) -> Any:
    """orjson where it can: it refuses what json takes (lone surrogates, NaN), never the other way round."""
    if orjson is not None:
        with contextlib.suppress(orjson.JSONDecodeError):
            return orjson.loads(line)
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        problems.add(INVALID_UTF8, f"{document_id}: byte 0x{line[error.start]:02x} at byte {error.start} of the line")
        text = line.decode("utf-8", errors="replace")
    return json.loads(text)

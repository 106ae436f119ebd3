"""WARC and WET: pages of crawls. Texts that were extracted (``conversion``) are documents as they are; of pages in HTML
trafilatura finds the text.
"""

import codecs
import contextlib
import importlib
import io
from collections.abc import Callable, Iterator
from email.message import Message
from typing import Any

from warcio.archiveiterator import WARCIterator
from warcio.exceptions import ArchiveLoadFailed

from lightscale.data_pipeline.preparation.readers.file_parts import PartBegin
from lightscale.data_pipeline.preparation.readers.inputs import (
    NO_DOCUMENT,
    NO_TEXT,
    TOO_LONG,
    TRUNCATED,
    UNREADABLE,
    SourceFile,
)
from lightscale.data_pipeline.preparation.readers.interface import (
    InputFormat,
    RawDocument,
    Reading,
    field_of,
    id_text,
    one_line,
)
from lightscale.data_pipeline.preparation.readers.ranges import FileRange
from lightscale.data_pipeline.preparation.readers.streams import contents
from lightscale.errors import UserError

_HTML = ("text/html", "application/xhtml+xml")
# As browsers read them (https://encoding.spec.whatwg.org): what is often said for the larger set.
_LARGER_SETS = {"iso-8859-1": "cp1252", "latin1": "cp1252", "ascii": "cp1252", "us-ascii": "cp1252"}
_LARGER_SETS |= {"gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932", "euc-kr": "cp949", "iso-8859-9": "cp1254"}
_LEAST_BYTES = 2
# Of Python, and no character set that a page is written in.
_NO_SETS = frozenset({"unicode-escape", "raw-unicode-escape", "punycode", "idna", "utf-7", "undefined"})


class Warc(InputFormat):
    """Fields are the headers of a record, like ``WARC-Target-URI``; ``text_field`` does not matter."""

    def read(self, file_range: FileRange, reading: Reading) -> Iterator[RawDocument | PartBegin]:
        """Its records with text."""
        file, first = file_range.file, reading.begin.document
        with file.path.open("rb", buffering=0) as content:
            records = WARCIterator(_Stream(contents(content, file, reading)))
            try:
                for record in records:
                    begin = first + records.offset  # get_record_offset() reads the record to its end
                    if (end := reading.end_before(begin)) is not None:
                        yield end
                    document_id = f"{file.id}@{begin}"
                    data = _text_of(record, document_id, file, reading)
                    num_bytes = records.get_record_length() if data is not None else 0
                    if data is not None and reading.fits(data, document_id):
                        yield _document(record, data, document_id, begin, num_bytes, reading)
            except UserError:  # which is a ValueError, as what warcio says of numbers is
                raise
            except (ArchiveLoadFailed, EOFError, ValueError) as error:
                where = f"{file.id}: after byte {first + records.offset}"
                reading.problems.add(UNREADABLE, f"{where}: {' '.join(str(error).split())}")


def _document(record: Any, data: bytes | str, document_id: str, begin: int, size: int, reading: Reading) -> RawDocument:
    options, headers = reading.options, dict(record.rec_headers.headers)
    fields: dict[str, Any] = {"id": None} if options.id_field is None else {"id": field_of(headers, options.id_field)}
    if options.label_field is not None:
        fields["label"] = field_of(headers, options.label_field)
    own_id = id_text(fields.pop("id"))
    return RawDocument(id=document_id, data=data, begin=begin, num_bytes=size, own_id=own_id, **fields)


def _text_of(record: Any, document_id: str, file: SourceFile, reading: Reading) -> bytes | str | None:
    """The text of a record; None, and counted, where it has none."""
    kind, http = record.rec_type, record.http_headers
    header = (http.get_header("Content-Type") if http else record.rec_headers.get_header("Content-Type")) or ""
    media = header.partition(";")[0].strip().lower()
    status = http.get_statuscode() if http else "200"
    is_html = kind in ("response", "resource") and media in _HTML
    if not is_html and not (kind in ("conversion", "response", "resource") and media == "text/plain"):
        reading.problems.add(NO_DOCUMENT, f"{document_id}: {kind}, {media or 'of no type'}")
        return None
    if status != "200":
        reading.problems.add(NO_DOCUMENT, f"{document_id}: {kind} with status {status}")
        return None
    most = reading.options.max_line_bytes
    if record.length is None:
        reading.problems.add(UNREADABLE, f"{document_id}: Content-Length is no number of bytes")
        return None
    if record.length > most:
        reading.problems.add(TOO_LONG, f"{document_id}: a record of {record.length} bytes, more than {most}")
        return None
    # A compressed page can be any size unpacked.
    data: bytes = record.content_stream().read(most + 1)
    if record.raw_stream.limit:  # what is still to come of the record
        reading.problems.add(TRUNCATED, f"{document_id}: {record.raw_stream.limit} bytes of the record are missing")
        return None
    if len(data) > most:
        reading.problems.add(TOO_LONG, f"{document_id}: a page of more than {most} bytes")
        return None
    content = _decoded(data, header)
    if not is_html:
        return content
    text = _extractor(file)(content)
    if text is None:
        reading.problems.add(NO_TEXT, f"{document_id}: no text found in the page")
    return text


def _decoded(data: bytes, header: str) -> bytes | str:
    """What is no UTF-8 by the character set that ``header`` names; as it is, to be guessed, where that cannot be."""
    try:
        data.decode()
    except UnicodeDecodeError:
        charset = Message()
        charset["Content-Type"] = header
        name = charset.get_content_charset("")
        with contextlib.suppress(LookupError, ValueError):  # no such set, or not of this text
            codec = codecs.lookup(_LARGER_SETS.get(name, name)).name.replace("_", "-")
            return data if codec in _NO_SETS else data.decode(codec)
    return data


def _extractor(file: SourceFile) -> Callable[[bytes | str], str | None]:
    try:
        extract: Callable[[bytes | str], str | None] = importlib.import_module("trafilatura").extract
    except ImportError as error:
        raise UserError(
            f"{file.path}: it has HTML pages; trafilatura is needed to extract their text ({one_line(error)}); "
            "pip install 'lightscale[web]'"
        ) from error
    return extract


class _Stream(io.RawIOBase):
    """Buffers as a file that can be read once."""

    def __init__(self, buffers: Iterator[bytes]) -> None:
        self._buffers = buffers
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        # At least two bytes: of one alone warcio cannot tell that it begins no gzip member, and loses it.
        while len(self._rest) < _LEAST_BYTES and (buffer := next(self._buffers, None)) is not None:
            self._rest = memoryview(bytes(self._rest) + buffer) if self._rest else memoryview(buffer)
        count = min(len(out), len(self._rest))
        out[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

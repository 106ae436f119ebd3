"""Documents out of files: text, jsonl (plain, gzip, zstandard) and parquet, in ranges that can be read on their own.

A file range is the lines that begin in a range of bytes of a plain jsonl file, a range of row groups of a parquet file,
or a whole file. Memory is bounded: a line or text beyond the limits below is counted and skipped.
"""

import codecs
import contextlib
import itertools
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from lightscale.data_pipeline.executors import Advance
from lightscale.data_pipeline.preparation.labels import MISSING
from lightscale.data_pipeline.preparation.normalise import INVALID_UTF8
from lightscale.data_pipeline.preparation.sources import (
    CHANGED,
    JSONL_SUFFIXES,
    NO_TEXT,
    NOT_JSON,
    PARQUET_SUFFIX,
    TOO_LONG,
    TRUNCATED,
    UNREADABLE,
    Problems,
    ReadOptions,
    SourceFile,
)
from lightscale.errors import UserError

try:
    import orjson
except ImportError:  # json reads the same, slower
    orjson = None  # type: ignore[assignment]
try:
    import zstandard
except ImportError:
    zstandard = None  # type: ignore[assignment]
try:
    import pyarrow
    import pyarrow.parquet
except ImportError:
    pyarrow = None

MAX_ID_CHARACTERS = 2048
_READ_BYTES = 2**20
_COMPRESSED_READ_BYTES = 2**16
_ROWS = 256
_PACKED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz", ".zip", ".7z", ".tar", ".tgz")
# Their texts are inside of something: trained on as they are, a model would learn the format.
_OTHER_SUFFIXES = (
    *(".json", ".csv", ".tsv", ".arrow", ".feather", ".orc", ".avro", ".warc", ".wet", ".wat"),
    *(".pdf", ".docx", ".epub", ".sqlite", ".db", ".npy", ".npz", ".pkl", ".bin", ".idx"),
)

_UNPACK_ERRORS: tuple[type[Exception], ...] = (zlib.error,) if zstandard is None else (zlib.error, zstandard.ZstdError)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRange:
    """A part of a file that is read on its own."""

    file: SourceFile
    start: int = 0
    """First byte of a jsonl file, first row group of a parquet file."""
    stop: int | None = None
    """The byte or row group after the last; none: to the end."""
    file_number: int = 0
    """Of the file among all files of the corpus."""
    num_bytes: int
    """For progress: how much of the file it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RawDocument:
    """A text as it was found."""

    id: str
    """The file's id; for one of many in a file ``id@n``: the byte its line begins at, unpacked, or its row."""
    data: bytes | str
    """UTF-8, or what it should be; or JSON's text, in which lone surrogates may be."""
    begin: int = 0
    """The byte that its line begins at, unpacked, or its row."""
    num_bytes: int = 0
    """Of its line, or of its file; 0 for a row."""
    own_id: str | None = None
    """Its own id or URL, from the field that the source says."""
    label: Any = MISSING
    """What is in the field of its class that the source says, whatever that is."""


def cut_into_ranges(
    file: SourceFile, range_bytes: int, problems: Problems, *, options: ReadOptions
) -> Iterator[FileRange]:
    """``file`` in ranges of about ``range_bytes``, as far as its format allows. Reads metadata only.

    A file that cannot be read at all is counted in ``problems``. ``UserError`` where a package for the format is
    missing.
    """
    name = file.path.name.lower()
    if name.endswith(".jsonl"):
        for start in range(0, file.size_bytes, range_bytes):
            stop = min(start + range_bytes, file.size_bytes)
            yield FileRange(file=file, start=start, stop=stop, num_bytes=stop - start)
    elif name.endswith(PARQUET_SUFFIX):
        yield from _parquet_ranges(file, range_bytes, problems)
    elif name.endswith(JSONL_SUFFIXES):
        if name.endswith(".zst") and zstandard is None:
            raise UserError(f"{file.path}: zstandard is needed to read it; pip install 'lightscale[corpus]'")
        yield FileRange(file=file, num_bytes=file.size_bytes)
    elif name.endswith(_PACKED_SUFFIXES):
        problems.add(UNREADABLE, f"{file.id}: compressed files are read as .jsonl.gz and .jsonl.zst only")
    elif name.endswith(_OTHER_SUFFIXES) and not name.endswith(options.suffixes):
        advice = "write its documents as .jsonl, or name its suffix in suffixes to read all of it as one text"
        problems.add(UNREADABLE, f"{file.id}: neither text, jsonl nor parquet; {advice}")
    else:
        yield FileRange(file=file, num_bytes=file.size_bytes)


def read(file_range: FileRange, problems: Problems, *, options: ReadOptions, advance: Advance) -> Iterator[RawDocument]:
    """The documents of ``file_range`` in order.

    What cannot be read is counted in ``problems`` with file and position, and the rest is read: a missing or changed
    file, the end of a truncated one, lines that are no objects, rows and objects without text, texts that are too long.
    """
    name = file_range.file.path.name.lower()
    try:
        status = file_range.file.path.stat()
        # The plan was made for the file as it was: ranges of another file would begin in the middle of anything.
        if (status.st_size, status.st_mtime_ns) != (file_range.file.size_bytes, file_range.file.mtime_ns):
            problems.add(
                CHANGED,
                f"{file_range.file.id}: {status.st_size} bytes, {file_range.file.size_bytes} when it was listed",
                file=file_range.file,
            )
            return
        if name.endswith(PARQUET_SUFFIX):
            yield from _read_parquet(file_range, problems, options, advance)
        elif name.endswith(JSONL_SUFFIXES):
            yield from _read_jsonl(file_range, problems, options, advance)
        else:
            yield from _read_text(file_range, problems, options, advance)
    except OSError as error:
        problems.add(UNREADABLE, f"{file_range.file.id}: {error.strerror or error}", file=file_range.file)


def _read_text(
    file_range: FileRange, problems: Problems, options: ReadOptions, advance: Advance
) -> Iterator[RawDocument]:
    if file_range.file.size_bytes > options.max_document_bytes:
        problems.add(TOO_LONG, _too_long(file_range.file.id, file_range.file.size_bytes, options))
    else:
        data = file_range.file.path.read_bytes()
        yield RawDocument(id=file_range.file.id, data=data, num_bytes=len(data))
    advance(file_range.num_bytes)


def _read_jsonl(
    file_range: FileRange, problems: Problems, options: ReadOptions, advance: Advance
) -> Iterator[RawDocument]:
    packed = not file_range.file.path.name.lower().endswith(".jsonl")
    # A line belongs to the range that it begins in, so that ranges together have every line once, wherever they end.
    # Reading starts a byte early: the first newline from there ends a line of the range before, or nothing if the range
    # begins exactly where a line does.
    first = max(file_range.start - 1, 0)
    with file_range.file.path.open("rb", buffering=0) as file:
        file.seek(first)
        buffers = _unpacked(file, file_range.file, problems, advance) if packed else _plain(file, advance)
        if file_range.start:
            assert file_range.stop is not None
            # No further than this range: a line that fills several of them would be read to its end by each.
            first, buffers = _after_newline(buffers, first, file_range.stop)
        for offset, line in _lines(buffers, first, options.max_line_bytes):
            if file_range.stop is not None and offset >= file_range.stop:
                break
            document_id = f"{file_range.file.id}@{offset}"
            if line is None:
                problems.add(TOO_LONG, f"{document_id}: a line of more than {options.max_line_bytes} bytes")
            elif line and not line.isspace():
                # Some programs begin a UTF-8 file with the mark; JSON forbids it.
                record = _record_of_line(line.removeprefix(codecs.BOM_UTF8), document_id, problems)
                text = None if record is None else _text_of(record, document_id, problems, options)
                if record is not None and text is not None:
                    own_id = _own_id(record.get(options.id_field)) if options.id_field else None
                    label = record.get(options.label_field, MISSING) if options.label_field else MISSING
                    yield RawDocument(
                        id=document_id, data=text, begin=offset, num_bytes=len(line), own_id=own_id, label=label
                    )


def _plain(file: Any, advance: Advance) -> Iterator[bytes]:
    while buffer := file.read(_READ_BYTES):
        yield buffer
        advance(len(buffer))


def _after_newline(buffers: Iterator[bytes], offset: int, stop: int) -> tuple[int, Iterator[bytes]]:
    """Where the first line begins, and ``buffers`` from there on; nothing if that is not before ``stop``."""
    for buffer in buffers:
        if (place := buffer.find(b"\n")) >= 0:
            return offset + place + 1, itertools.chain([buffer[place + 1 :]], buffers)
        offset += len(buffer)
        if offset >= stop:
            break
    return offset, iter(())


class _Unpacker(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _unpacked(file: Any, source: SourceFile, problems: Problems, advance: Advance) -> Iterator[bytes]:
    """The content of a gzip or zstandard file; what comes before damage or a missing end is given."""
    is_zst = source.path.name.lower().endswith(".zst")
    unpacker: _Unpacker | None = None
    position = unpacked = 0
    try:
        while packed := file.read(_COMPRESSED_READ_BYTES):
            num_packed = len(packed)
            while packed:
                if unpacker is None:
                    if not (packed := packed if is_zst else packed.lstrip(b"\0")):  # gzip files may be padded
                        break
                    unpacker = _make_unpacker(is_zst)
                buffer = unpacker.decompress(packed)
                unpacked += len(buffer)
                yield buffer
                packed = b""
                if unpacker.eof:
                    packed, unpacker = unpacker.unused_data, None
            position = file.tell()
            advance(num_packed)
    except _UNPACK_ERRORS as error:
        problems.add(UNREADABLE, f"{source.id}: damaged after byte {position} ({unpacked} bytes decompressed): {error}")
        return
    if unpacker is not None:
        problems.add(
            TRUNCATED, f"{source.id}: at byte {position} ({unpacked} bytes decompressed), inside a compressed block"
        )


def _make_unpacker(is_zst: bool) -> _Unpacker:
    return zstandard.ZstdDecompressor().decompressobj() if is_zst else zlib.decompressobj(31)


def _lines(buffers: Iterator[bytes], offset: int, most_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """(where it begins, line without newline) of what ``buffers`` hold from ``offset`` on; None: it was too long."""
    waiting: list[bytes] = []
    num_waiting = 0
    for buffer in buffers:
        *whole, last = buffer.split(b"\n")
        for part in whole:
            size = num_waiting + len(part)
            line = b"".join([*waiting, part]) if waiting else part
            yield offset, line if size <= most_bytes else None
            offset += size + 1
            waiting, num_waiting = [], 0
        if last:
            num_waiting += len(last)
            # Of a longer line nothing more is kept, only its length: the next line's offset depends on it.
            if num_waiting <= most_bytes:
                waiting.append(last)
    if num_waiting:
        yield offset, b"".join(waiting) if num_waiting <= most_bytes else None


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


def _text_of(record: dict[str, Any], document_id: str, problems: Problems, options: ReadOptions) -> str | None:
    text = record.get(options.text_field)
    if not isinstance(text, str):
        problems.add(NO_TEXT, f"{document_id}: no string {options.text_field!r} (found {_describe_fields(record)})")
        return None
    return text if _fits(text, document_id, problems, options) else None


def _own_id(value: Any) -> str | None:
    """An id or URL as text, where it is a string or a whole number; of a long one its beginning."""
    is_id = isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))
    return str(value)[:MAX_ID_CHARACTERS] if is_id else None


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


def _fits(text: str | bytes, document_id: str, problems: Problems, options: ReadOptions) -> bool:
    # A character is four bytes at most: most texts need no second look.
    most = options.max_document_bytes
    num_bytes = len(text) if isinstance(text, bytes) or 4 * len(text) <= most else _utf8_length(text)
    if num_bytes <= most:
        return True
    problems.add(TOO_LONG, _too_long(document_id, num_bytes, options))
    return False


def _too_long(document_id: str, num_bytes: int, options: ReadOptions) -> str:
    return f"{document_id}: {num_bytes} bytes, more than max_document_bytes = {options.max_document_bytes}"


def _utf8_length(text: str) -> int:
    return len(text.encode("utf-8", errors="surrogatepass"))


def _describe_fields(record: dict[str, object]) -> str:
    names = [f"{name}: {type(value).__name__}" for name, value in list(record.items())[:5]]
    return ", ".join(names) if names else "no fields"


def _parquet_ranges(file: SourceFile, range_bytes: int, problems: Problems) -> Iterator[FileRange]:
    if pyarrow is None:
        raise UserError(f"{file.path}: pyarrow is needed to read it; pip install 'lightscale[corpus]'")
    try:
        metadata = pyarrow.parquet.read_metadata(file.path)
    except (OSError, pyarrow.ArrowException) as error:
        problems.add(UNREADABLE, f"{file.id}: {_one_line(error)}")
        return
    num_groups = metadata.num_row_groups
    start = num_bytes = 0
    for group in range(num_groups):
        num_bytes += file.size_bytes // num_groups
        if num_bytes >= range_bytes or group == num_groups - 1:
            yield FileRange(file=file, start=start, stop=group + 1, num_bytes=num_bytes)
            start, num_bytes = group + 1, 0


def _read_parquet(
    file_range: FileRange, problems: Problems, options: ReadOptions, advance: Advance
) -> Iterator[RawDocument]:
    assert file_range.stop is not None
    try:
        with pyarrow.parquet.ParquetFile(file_range.file.path, pre_buffer=False) as parquet:
            if (fault := _column_fault(parquet.schema_arrow, options.text_field)) is not None:
                problems.add(NO_TEXT, f"{file_range.file.id}: {fault}", file=file_range.file)
                return
            row = sum(parquet.metadata.row_group(group).num_rows for group in range(file_range.start))
            for group in range(file_range.start, file_range.stop):
                yield from _read_group(parquet, group, row, file_range.file, problems, options)
                row += parquet.metadata.row_group(group).num_rows
                advance(file_range.num_bytes // (file_range.stop - file_range.start))
    except pyarrow.ArrowException as error:
        problems.add(UNREADABLE, f"{file_range.file.id}: {_one_line(error)}", file=file_range.file)


def _read_group(
    parquet: Any, group: int, row: int, file: SourceFile, problems: Problems, options: ReadOptions
) -> Iterator[RawDocument]:
    """The documents of a row group, which begins at ``row``. Damage is counted, and costs nothing of other groups."""
    text_field, names = options.text_field, parquet.schema_arrow.names
    fields = (options.id_field, options.label_field)
    others = sorted({field for field in fields if field is not None and field in names and field != text_field})
    try:
        for batch in parquet.iter_batches(_ROWS, row_groups=[group], columns=[text_field, *others]):
            # As bytes: pyarrow does not check that its strings are UTF-8.
            texts = batch.column(text_field).cast(pyarrow.large_binary()).to_pylist()
            ids, labels = (
                batch.column(field).to_pylist() if field in others else itertools.repeat(absent)
                for field, absent in ((options.id_field, None), (options.label_field, MISSING))
            )
            for data, own_id, label in zip(texts, ids, labels, strict=False):
                document_id = f"{file.id}@{row}"
                if data is None:
                    problems.add(NO_TEXT, f"{document_id}: null in {options.text_field!r}")
                elif _fits(data, document_id, problems, options):
                    yield RawDocument(id=document_id, data=data, begin=row, own_id=_own_id(own_id), label=label)
                row += 1
    except (OSError, pyarrow.ArrowException) as error:
        problems.add(UNREADABLE, f"{file.id}: after row {row}: {_one_line(error)}")


def _column_fault(schema: Any, text_field: str) -> str | None:
    found = ", ".join(f"{field.name}: {field.type}" for field in list(schema)[:8])
    if text_field not in schema.names:
        return f"no column {text_field!r} (found {found})"
    kind = schema.field(text_field).type
    types = pyarrow.types
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return None
    return f"column {text_field!r} is {kind}, not string (found {found})"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def num_parquet_rows(file: SourceFile) -> int:
    """The rows of a parquet file, by its metadata."""
    num_rows: int = pyarrow.parquet.read_metadata(file.path).num_rows
    return num_rows

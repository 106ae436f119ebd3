"""Comma- and tab-separated values: the first record names the columns, each other one is a document.

Fields in quotes may hold line ends, so a file cannot be divided without reading it. The source names the ``columns`` of
files without a header. In tab-separated ones of these, quotes are text, as in those of Long Range Arena's retrieval.
"""

import csv
from collections.abc import Iterator

from lightscale.data_pipeline.preparation.readers.file_parts import PartBegin
from lightscale.data_pipeline.preparation.readers.inputs import INVALID_UTF8, NO_TEXT, OTHER_FIELDS, TOO_LONG
from lightscale.data_pipeline.preparation.readers.interface import InputFormat, RawDocument, Reading
from lightscale.data_pipeline.preparation.readers.ranges import FileRange
from lightscale.data_pipeline.preparation.readers.streams import contents, lines

# The module's own limit is of characters in a field; here the bytes of a record are counted before it sees them.
_NO_LIMIT = 2**31 - 1


class _TooLong(Exception):
    """A record beyond the limit: where quotes are missing, it would be the rest of the file."""


class Csv(InputFormat):
    """With commas."""

    delimiter = ","
    quotes_are_text = False
    """Of files without a header."""

    def read(self, file_range: FileRange, reading: Reading) -> Iterator[RawDocument | PartBegin]:
        """Its records after the first."""
        file, options = file_range.file, reading.options
        csv.field_size_limit(_NO_LIMIT)
        with file.path.open("rb", buffering=0) as content:
            feed = _Lines(contents(content, file, reading), file.id, reading)
            plain = options.columns is not None and self.quotes_are_text
            records = csv.reader(feed, delimiter=self.delimiter, quoting=csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL)
            try:
                header = reading.begin.known or options.columns or next(records, None)
                missing = [name for name in options.text_fields if header is not None and name not in header]
                if header is not None and missing and not options.has_records:
                    found = ", ".join(header[:8])
                    reading.problems.add(NO_TEXT, f"{file.id}: no column {missing[0]!r} (found {found})", file=file)
                    return
                while True:
                    begin = feed.begin_record()
                    # Before the record is read: what is wrong in it is said then.
                    if (end := reading.end_before(begin, header)) is not None:
                        yield end
                    fields = next(records, None)
                    if fields is None:
                        return
                    if fields and options.columns is not None and len(fields) != len(options.columns):
                        where = f"{file.id}@{begin}: {len(fields)} fields, not {', '.join(options.columns)}"
                        reading.problems.add(OTHER_FIELDS, where)
                    elif fields and header is not None:
                        document = reading.document(
                            dict(zip(header, fields, strict=False)),
                            f"{file.id}@{begin}",
                            begin=begin,
                            num_bytes=feed.end - begin,
                        )
                        if document is not None:
                            yield document
            except (_TooLong, csv.Error) as error:
                advice = "this record and the rest of the file are skipped; check for a missing quote"
                reading.problems.add(TOO_LONG, f"{file.id}@{feed.begin}: {error}; {advice}")


class Tsv(Csv):
    """With tabs."""

    delimiter = "\t"
    quotes_are_text = True


class _Lines:
    """Gives lines to the reader of records, and knows where in the file it stands."""

    def __init__(self, buffers: Iterator[bytes], file_id: str, reading: Reading) -> None:
        self._next = self.begin = self.end = reading.begin.document
        """Of the record: its first byte, and the byte after its last without the line end."""
        self._found = lines(buffers, self._next, reading.options.max_line_bytes)
        self._file_id, self._reading = file_id, reading

    def begin_record(self) -> int:
        """A record begins with the next line: its first byte."""
        self.begin = self._next
        return self.begin

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        offset, line = next(self._found)
        most = self._reading.options.max_line_bytes
        if line is None or offset + len(line) - self.begin > most:
            raise _TooLong(f"a record of more than {most} bytes")
        self.end = offset + len(line.removesuffix(b"\r"))
        self._next = offset + len(line) + 1
        try:
            text = line.decode("utf-8-sig" if not offset else "utf-8")
        except UnicodeDecodeError as error:
            where = f"{self._file_id}@{offset}: byte 0x{line[error.start]:02x} at byte {error.start} of the line"
            self._reading.problems.add(INVALID_UTF8, where)
            text = line.decode(errors="replace")
        return text + "\n"

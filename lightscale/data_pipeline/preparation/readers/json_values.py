"""JSON: an array of objects, one object, or objects one after another; each of them is a document.

The reader divides the file at the brackets and reads each object separately, like a line of jsonl. A broken object
loses only itself, each has a place in bytes, and memory holds one of them.
"""

import re
from collections.abc import Iterator

from lightscale.data_pipeline.preparation.readers.file_parts import PartBegin
from lightscale.data_pipeline.preparation.readers.inputs import NOT_JSON, TOO_LONG, TRUNCATED
from lightscale.data_pipeline.preparation.readers.interface import InputFormat, RawDocument, Reading
from lightscale.data_pipeline.preparation.readers.jsonl import document_of_json
from lightscale.data_pipeline.preparation.readers.ranges import FileRange
from lightscale.data_pipeline.preparation.readers.streams import contents

_STRUCTURE = re.compile(rb'["{}\[\]]')
_IN_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
# Between values there are commas, spaces, and at the beginning a byte order mark.
_BETWEEN = b" \t\r\n,\xef\xbb\xbf"


class JsonValues(InputFormat):
    """A whole file is one range: the nesting at a byte depends on all bytes before it."""

    def read(self, file_range: FileRange, reading: Reading) -> Iterator[RawDocument | PartBegin]:
        """Its objects."""
        file, most_bytes = file_range.file, reading.options.max_line_bytes
        with file.path.open("rb", buffering=0) as content:
            splitter = _Splitter(most_bytes, offset=reading.begin.document, is_in_array=bool(reading.begin.known))
            for buffer in contents(content, file, reading):
                for offset, value in splitter.split(buffer):
                    document_id = f"{file.id}@{offset}"
                    if value is None:
                        reading.problems.add(TOO_LONG, f"{document_id}: an object of more than {most_bytes} bytes")
                        continue
                    if not value.startswith(b"{"):
                        reading.problems.add(NOT_JSON, f"{document_id}: {value[:40].decode(errors='replace')!r}")
                        continue
                    if (end := reading.end_before(offset, splitter.is_in_array)) is not None:
                        yield end
                    if (document := document_of_json(value, document_id, offset, reading)) is not None:
                        yield document
            if splitter.is_inside:
                where = f"{file.id}: at byte {splitter.offset} of its content"
                reading.problems.add(TRUNCATED, f"{where}, inside of a value")


class _Splitter:
    """Finds the objects of a stream of JSON, and what else stands where one should be."""

    def __init__(self, most_bytes: int, *, offset: int, is_in_array: bool) -> None:
        """``offset``: where the stream begins in the content; ``is_in_array``: that is inside the array of objects."""
        self._most_bytes = most_bytes
        self.offset = offset
        """Of the next buffer in the content."""
        self._brackets = bytearray(b"[" * is_in_array)
        """Those that are open. A ``[`` at the bottom is the array of objects, which is no part of any."""
        self._in_string = self._escaped = False
        self._begin = offset
        self._waiting: list[bytes] = []
        self._num_waiting = 0

    @property
    def is_inside(self) -> bool:
        """Whether something is open."""
        return bool(self._brackets) or self._in_string

    @property
    def is_in_array(self) -> bool:
        """Whether the objects are those of an array."""
        return self._brackets[:1] == b"["

    def split(self, buffer: bytes) -> Iterator[tuple[int, bytes | None]]:
        """(where it begins, object) of those that end in ``buffer``, the next of the stream; None: it was too long."""
        position = kept = 0
        while position < len(buffer):
            if self._in_string:
                position = self._leave_string(buffer, position)
                continue
            found = _STRUCTURE.search(buffer, position)
            if found is None:
                break
            position, mark = found.end(), found.group()
            if mark == b'"':
                self._in_string = True
                continue
            if not self._in_object and mark == b"{":
                yield from self._between(buffer[kept : position - 1])
                kept = position - 1
                self._brackets += mark
            elif not self._in_object and (mark == b"]" or (mark == b"[" and not self._brackets)):
                yield from self._between(buffer[kept : position - 1])
                kept = position
                self._begin = self.offset + position
                if mark == b"[":
                    self._brackets += mark
                elif self._brackets:
                    del self._brackets[-1]
            elif mark in b"{[":
                self._brackets += mark
            elif self._brackets:
                del self._brackets[-1]
                if mark == b"}" and not self._in_object:
                    self._keep(buffer[kept:position])
                    yield self._take()
                    kept, self._begin = position, self.offset + position
        self._keep(buffer[kept:])
        self.offset += len(buffer)

    @property
    def _in_object(self) -> bool:
        return len(self._brackets) > self.is_in_array

    def _leave_string(self, buffer: bytes, position: int) -> int:
        """Where to go on: behind the end of the string, or at the end of the buffer."""
        if self._escaped:
            self._escaped = False
            position += 1
        found = _IN_STRING.match(buffer, position)
        assert found is not None, "it matches nothing too"
        end = found.end()
        if end == len(buffer):
            return end
        if buffer[end : end + 1] == b'"':
            self._in_string = False
        else:  # a backslash at the end of the buffer
            self._escaped = True
        return end + 1

    def _between(self, rest: bytes) -> Iterator[tuple[int, bytes | None]]:
        """What stands before an object, if it is anything; the next begins behind it."""
        self._keep(rest)
        begin, value = self._take()
        self._begin = begin + self._num_taken
        if value is None or value.strip(_BETWEEN):
            yield begin, value if value is None else value.strip(_BETWEEN)

    def _keep(self, part: bytes) -> None:
        self._num_waiting += len(part)
        if part and self._num_waiting <= self._most_bytes:
            self._waiting.append(part)

    def _take(self) -> tuple[int, bytes | None]:
        value = b"".join(self._waiting) if self._num_waiting <= self._most_bytes else None
        self._num_taken, self._num_waiting = self._num_waiting, 0
        self._waiting = []
        return self._begin, value

"""Arrow's IPC format, as a file (Feather 2) or as a stream, the format of Hugging Face's saved data sets."""

from collections.abc import Iterator
from typing import Any

import pyarrow
import pyarrow.ipc

from lightscale.data_pipeline.preparation.readers.columns import (
    ROWS,
    column_fault,
    documents_of_batch,
    too_large,
    top_names,
    wanted_columns,
)
from lightscale.data_pipeline.preparation.readers.inputs import NO_TEXT, UNREADABLE, Problems, SourceFile
from lightscale.data_pipeline.preparation.readers.interface import InputFormat, RawDocument, Reading, one_line
from lightscale.data_pipeline.preparation.readers.ranges import FileRange, part_ranges

_MAGIC = b"ARROW1"


class Arrow(InputFormat):
    """A file in ranges of record batches, which its end lists; a stream as a whole."""

    def ranges(self, file: SourceFile, range_bytes: int, problems: Problems) -> Iterator[FileRange]:
        """Ranges of the record batches that the footer lists."""
        try:
            with file.path.open("rb") as content:
                if not _is_file(content):
                    yield from super().ranges(file, range_bytes, problems)
                    return
                num_batches = pyarrow.ipc.open_file(content).num_record_batches
        except (OSError, pyarrow.ArrowException) as error:
            problems.add(UNREADABLE, f"{file.id}: {one_line(error)}")
            return
        yield from part_ranges(file, num_batches, range_bytes)

    def read(self, file_range: FileRange, reading: Reading) -> Iterator[RawDocument]:
        """The rows of its batches."""
        file = file_range.file
        row = 0
        try:
            with file.path.open("rb") as content:
                opened = pyarrow.ipc.open_file(content) if _is_file(content) else pyarrow.ipc.open_stream(content)
                if (fault := column_fault(opened.schema, reading.options)) is not None:
                    reading.problems.add(NO_TEXT, f"{file.id}: {fault}", file=file)
                    return
                row, batches = _batches(opened, file_range)
                columns = top_names(opened.schema, wanted_columns(opened.schema, reading.options))
                for batch in batches:
                    for start in range(0, batch.num_rows, ROWS):
                        part = batch.slice(start, ROWS).select(columns)
                        for column in part.columns:
                            _require_sound(column)
                        yield from documents_of_batch(part, file.id, row, reading)
                        row += part.num_rows
        # The names of columns may be no UTF-8; pyarrow finds that when they are asked for.
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            reading.problems.add(UNREADABLE, f"{file.id}: after row {row}: {one_line(error)}", file=file)
        except MemoryError:
            raise too_large(file, row) from None
        reading.advance(file_range.num_bytes)


def _require_sound(column: Any) -> None:
    """ArrowInvalid where offsets lead out of the file's buffers, which pyarrow takes as they are."""
    # Whether strings are UTF-8 is the normaliser's matter.
    if pyarrow.types.is_string(column.type):
        column = column.view(pyarrow.binary())
    elif pyarrow.types.is_large_string(column.type):
        column = column.view(pyarrow.large_binary())
    column.validate(full=True)


def _batches(opened: Any, file_range: FileRange) -> tuple[int, Iterator[Any]]:
    """The first row of a range, and its record batches."""
    if file_range.stop is None:
        return 0, iter(opened)
    row = sum(opened.get_batch(number).num_rows for number in range(file_range.start))
    return row, (opened.get_batch(number) for number in range(file_range.start, file_range.stop))


def _is_file(content: Any) -> bool:
    """Whether an open file is one with a footer; leaves it at its beginning."""
    begin = content.read(len(_MAGIC))
    content.seek(0)
    return bool(begin == _MAGIC)

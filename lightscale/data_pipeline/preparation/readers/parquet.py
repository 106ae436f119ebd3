"""Parquet: a document is a row."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from lightscale.data_pipeline.preparation.readers.columns import (
    ROWS,
    column_fault,
    documents_of_batch,
    too_large,
    wanted_columns,
)
from lightscale.data_pipeline.preparation.readers.inputs import NO_TEXT, UNREADABLE, Problems, SourceFile
from lightscale.data_pipeline.preparation.readers.interface import InputFormat, RawDocument, Reading, one_line
from lightscale.data_pipeline.preparation.readers.ranges import FileRange, part_ranges


class Parquet(InputFormat):
    """In ranges of row groups."""

    def ranges(self, file: SourceFile, range_bytes: int, problems: Problems) -> Iterator[FileRange]:
        """Ranges of the row groups that the metadata at its end list."""
        try:
            metadata = pyarrow.parquet.read_metadata(_source(file))
        # Names of columns need not be UTF-8 in a damaged file.
        except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
            problems.add(UNREADABLE, f"{file.id}: {one_line(error)}")
            return
        yield from part_ranges(file, metadata.num_row_groups, range_bytes)

    def num_rows(self, file: SourceFile) -> int:
        """By its metadata."""
        rows: int = pyarrow.parquet.read_metadata(_source(file)).num_rows
        return rows

    def read(self, file_range: FileRange, reading: Reading) -> Iterator[RawDocument]:
        """The rows of its groups."""
        file = file_range.file
        assert file_range.stop is not None
        try:
            with pyarrow.parquet.ParquetFile(_source(file), pre_buffer=False) as parquet:
                if (fault := column_fault(parquet.schema_arrow, reading.options)) is not None:
                    reading.problems.add(NO_TEXT, f"{file.id}: {fault}", file=file)
                    return
                row = sum(parquet.metadata.row_group(group).num_rows for group in range(file_range.start))
                for group in range(file_range.start, file_range.stop):
                    yield from _read_group(parquet, group, row, file, reading)
                    row += parquet.metadata.row_group(group).num_rows
                    reading.advance(file_range.num_bytes // (file_range.stop - file_range.start))
        # The names of columns may be no UTF-8; pyarrow finds that when they are asked for.
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            reading.problems.add(UNREADABLE, f"{file.id}: {one_line(error)}", file=file)


def _source(file: SourceFile) -> Any:
    """What pyarrow opens: of a file on this machine the path, which it reads without Python."""
    return file.path if isinstance(file.path, Path) else file.path.open("rb")


def _read_group(parquet: Any, group: int, row: int, file: SourceFile, reading: Reading) -> Iterator[RawDocument]:
    """The documents of a row group, which begins at ``row``. Damage is counted, and costs nothing of other groups."""
    columns = wanted_columns(parquet.schema_arrow, reading.options)
    try:
        for batch in parquet.iter_batches(ROWS, row_groups=[group], columns=columns):
            yield from documents_of_batch(batch, file.id, row, reading)
            row += batch.num_rows
    except (OSError, pyarrow.ArrowException) as error:
        reading.problems.add(UNREADABLE, f"{file.id}: after row {row}: {one_line(error)}")
    except MemoryError:
        raise too_large(file, row) from None

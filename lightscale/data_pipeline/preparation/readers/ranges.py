"""The part of a file that is read independently."""

from collections.abc import Iterator
from dataclasses import dataclass

from lightscale.data_pipeline.preparation.readers.inputs import SourceFile


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRange:
    """A part of a file that is read on its own."""

    file: SourceFile
    start: int = 0
    """First byte of a file of lines, first row group or batch of a table; where that begins is the format's matter."""
    stop: int | None = None
    """The byte or row group after the last; none: to the end."""
    file_number: int = 0
    """Of the file among all files of the corpus."""
    num_bytes: int
    """Bytes of the file in this range, for progress."""


def byte_ranges(file: SourceFile, range_bytes: int) -> Iterator[FileRange]:
    """``file`` in ranges of ``range_bytes``; of an empty file none."""
    for start in range(0, file.size_bytes, range_bytes):
        stop = min(start + range_bytes, file.size_bytes)
        yield FileRange(file=file, start=start, stop=stop, num_bytes=stop - start)


def part_ranges(file: SourceFile, num_parts: int, range_bytes: int) -> Iterator[FileRange]:
    """``file`` of ``num_parts`` parts of about one size, like row groups, in ranges of at least ``range_bytes``."""
    start = num_bytes = 0
    for part in range(num_parts):
        num_bytes += file.size_bytes // num_parts
        if num_bytes >= range_bytes or part == num_parts - 1:
            yield FileRange(file=file, start=start, stop=part + 1, num_bytes=num_bytes)
            start, num_bytes = part + 1, 0

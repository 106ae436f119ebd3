"""Files of any format in ranges, and the documents of a range. Memory is bounded: too long texts are counted."""

from collections.abc import Iterator

from lightscale.data_pipeline.executors import Advance
from lightscale.data_pipeline.preparation.readers.file_parts import FilePart, PartBegin
from lightscale.data_pipeline.preparation.readers.inputs import CHANGED, UNREADABLE, Problems, ReadOptions, SourceFile
from lightscale.data_pipeline.preparation.readers.interface import RawDocument, Reading
from lightscale.data_pipeline.preparation.readers.ranges import FileRange
from lightscale.data_pipeline.preparation.readers.remote import RemotePath
from lightscale.data_pipeline.preparation.readers.streams import is_packed, require_unpacker
from lightscale.data_pipeline.preparation.readers.table import format_of


def cut_into_ranges(
    file: SourceFile, range_bytes: int, problems: Problems, *, options: ReadOptions
) -> Iterator[FileRange]:
    """``file`` in ranges of about ``range_bytes``, as far as its format allows. Reads metadata only.

    A file that cannot be read at all is counted in ``problems``. ``UserError`` where a package for the format is
    missing.
    """
    entry = format_of(file, options)
    if isinstance(entry, str):
        problems.add(UNREADABLE, f"{file.id}: {entry}")
    else:
        require_unpacker(file)
        if isinstance(file.path, RemotePath) and not file.gives_parts:
            range_bytes = max(range_bytes, file.size_bytes)  # each range would fetch all of it
        yield from entry.load(file).ranges(file, range_bytes, problems)


def has_parts(file: SourceFile, options: ReadOptions) -> bool:
    """Whether ``file`` is read in parts, one after the other."""
    return is_packed(file) and not isinstance(format_of(file, options), str)


def read(
    file_range: FileRange,
    problems: Problems,
    *,
    options: ReadOptions,
    advance: Advance,
    part: FilePart | None = None,
) -> Iterator[RawDocument]:
    """The documents of ``file_range`` in order; of a file that ``has_parts`` those of ``part``, which then has its end.

    Unreadable parts are counted in ``problems`` with file and position, and the rest is read. These are: missing or
    changed files, ends of truncated files, lines that are no objects, rows and objects without text, too long texts.
    """
    file = file_range.file
    entry = format_of(file, options)
    assert not isinstance(entry, str), "it has ranges"
    try:
        status = file.path.stat()
        # The plan was made for the file as it was: ranges of another file would begin in the middle of anything.
        if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
            was = f"{status.st_size} bytes, {file.size_bytes} when the corpus was listed"
            problems.add(CHANGED, f"{file.id}: {was}", file=file)
            return
        if part is None or part.opened is None:
            reading = Reading(problems=problems, options=options, advance=advance, part=part)
            documents = entry.load(file).read(file_range, reading)
        else:
            (reading, documents), part.opened = part.opened, None
            reading.problems, reading.advance, reading.part = problems, advance, part
        for document in documents:
            if isinstance(document, PartBegin):
                assert part is not None
                part.end, part.opened = document, (reading, documents)
                reading.part = None  # no cycle: what is dropped is closed at once
                return
            yield document
    except OSError as error:
        problems.add(UNREADABLE, f"{file.id}: {error.strerror or error}", file=file)

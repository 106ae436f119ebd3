"""Lines of documents: the store keeps a file and bytes in it; the line is counted in the file."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from lightscale.data_pipeline.preparation.readers import Reading
from lightscale.data_pipeline.preparation.readers.inputs import Problems, ReadOptions, SourceFile
from lightscale.data_pipeline.preparation.readers.streams import contents, require_unpacker
from lightscale.data_pipeline.store.origins import Origin


def find_lines(origins: Iterable[Origin], folder: Path) -> dict[tuple[str, int], int]:
    """(file, first byte) to line, from 1, of the documents whose files are below ``folder`` and can be read so far."""
    wanted: dict[str, set[int]] = {}
    for origin in origins:
        if origin.first_byte is not None:
            wanted.setdefault(origin.file, set()).add(origin.first_byte)
    found = {}
    for name, offsets in wanted.items():
        if (folder / name).is_file():
            for offset, line in _lines_at(folder / name, sorted(offsets)):
                found[name, offset] = line
    return found


def _lines_at(path: Path, offsets: list[int]) -> Iterator[tuple[int, int]]:
    """(offset, line) of ascending ``offsets`` in what the file unpacks to, as far as it can be read."""
    status = path.stat()
    source = SourceFile(path=path, id=str(path), size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)
    require_unpacker(source)
    reading = Reading(problems=Problems(strict=False), options=ReadOptions(), advance=_silent)
    with path.open("rb") as file:
        begin, line, left = 0, 1, iter(offsets)
        offset = next(left, None)
        for buffer in contents(file, source, reading):
            while offset is not None and offset < begin + len(buffer):
                yield offset, line + buffer.count(b"\n", 0, offset - begin)
                offset = next(left, None)
            if offset is None:
                return
            begin, line = begin + len(buffer), line + buffer.count(b"\n")


def _silent(num_bytes: int) -> None:
    pass

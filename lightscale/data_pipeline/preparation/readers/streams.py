"""The bytes of a file in buffers, unpacked where it is compressed, and the lines in them."""

import bz2
import contextlib
import gzip
import itertools
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from lightscale.data_pipeline.executors import Advance
from lightscale.data_pipeline.preparation.readers.access_points import AccessPoint, GzipMember
from lightscale.data_pipeline.preparation.readers.inputs import NO_CHECKSUM, TRUNCATED, UNREADABLE, SourceFile
from lightscale.data_pipeline.preparation.readers.interface import Reading
from lightscale.data_pipeline.preparation.readers.table import PACKED_SUFFIXES
from lightscale.errors import UserError

try:
    import zstandard
except ImportError:
    zstandard = None  # type: ignore[assignment]

_READ_BYTES = 2**20
_COMPRESSED_READ_BYTES = 2**16
_GZ, _ZST = ".gz", ".zst"
# bz2 says of damage that it is an OSError, or a ValueError.
_UNPACK_ERRORS: tuple[type[Exception], ...] = (
    zlib.error,
    OSError,
    ValueError,
    *(() if zstandard is None else (zstandard.ZstdError,)),
)
# Of a zstandard frame: its header has at most so many bytes.
_MOST_HEADER_BYTES = 18


def is_packed(file: SourceFile) -> bool:
    """Whether ``file`` is compressed, by its name."""
    return file.path.name.lower().endswith(PACKED_SUFFIXES)


def line_ends_before(path: Path, begin: int) -> int:
    """Line ends among the first ``begin`` bytes of a local file's content, unpacked; it reads these bytes."""
    name = path.name.lower()
    opener: Any = {_GZ: gzip.open, ".bz2": bz2.open}.get(path.suffix.lower(), open)
    if name.endswith(_ZST) and zstandard is not None:
        opener = zstandard.open
    opened: Any = opener(path, "rb")
    count = 0
    with opened as content:
        while begin > 0 and (part := content.read(min(begin, _COMPRESSED_READ_BYTES))):
            count += part.count(b"\n")
            begin -= len(part)
    return count


def require_unpacker(file: SourceFile) -> None:
    """``UserError`` where the package that unpacks ``file`` is missing."""
    if zstandard is None and file.path.name.lower().endswith(_ZST):
        raise UserError(f"{file.path}: zstandard is needed to read it; pip install 'lightscale[corpus]'")


def plain(file: BinaryIO, advance: Advance) -> Iterator[bytes]:
    """The content of a file from where it stands."""
    while buffer := file.read(_READ_BYTES):
        yield buffer
        advance(len(buffer))


def after_newline(buffers: Iterator[bytes], offset: int, stop: int) -> tuple[int, Iterator[bytes]]:
    """Begin of the first line, and ``buffers`` from there on; no buffers if it is not before ``stop``."""
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


def contents(content: BinaryIO, source: SourceFile, reading: Reading) -> Iterator[bytes]:
    """The content of the open file ``content`` from its position on, unpacked if the file is compressed.

    Of a part of a compressed file: from its first document on.
    """
    if is_packed(source):
        begin = reading.begin
        return _without_first(_unpacked(content, source, reading), begin.document - begin.point.unpacked)
    return plain(content, reading.advance)


def _unpacked(file: BinaryIO, source: SourceFile, reading: Reading) -> Iterator[bytes]:
    """The content of a compressed file; what comes before damage or a missing end is given.

    Of a part: from its access point on. Of the parts that follow one another it is the same iterator, and whatever part
    is being read when a point is found, or something wrong, is told of it.
    """
    ending = next(one for one in PACKED_SUFFIXES if source.path.name.lower().endswith(one))
    point, num_known = reading.begin.point, reading.begin.packed
    unpacker: _Unpacker | None = GzipMember(point) if point.is_inside else None
    position, num_unpacked = point.packed, point.unpacked
    if position:
        file.seek(position)
    # In blocks that begin at multiples of their size from wherever: so damage costs the same text.
    while packed := file.read(_COMPRESSED_READ_BYTES - position % _COMPRESSED_READ_BYTES):
        begin, position = position, position + len(packed)
        if reading.part is not None:
            reading.part.packed = position
        try:
            while packed:
                if unpacker is None:
                    if not (packed := packed if ending == _ZST else packed.lstrip(b"\0")):  # padding, of tapes
                        break
                    if reading.part is not None and num_unpacked:
                        reading.part.note(AccessPoint(packed=position - len(packed), unpacked=num_unpacked))
                    unpacker = _UNPACKERS[ending]() if ending != _GZ or reading.part is None else GzipMember()
                    if ending == _ZST and not num_unpacked and not num_known and not _has_checksum(packed):
                        reading.problems.add(NO_CHECKSUM, source.id, file=source)
                if reading.part is not None and isinstance(unpacker, GzipMember) and reading.part.wants_point:
                    at = position - len(packed)
                    buffer, found = unpacker.decompress_and_find(packed, packed=at, unpacked=num_unpacked)
                    if found is not None:
                        reading.part.note(found)
                else:
                    buffer = unpacker.decompress(packed)
                num_unpacked += len(buffer)
                yield buffer
                packed = b""
                if unpacker.eof:
                    packed, unpacker = unpacker.unused_data, None
        except _UNPACK_ERRORS as error:
            _ended(reading)
            begin -= begin % _COMPRESSED_READ_BYTES
            where = f"{source.id}: damaged after byte {begin} ({num_unpacked} bytes decompressed)"
            reading.problems.add(UNREADABLE, f"{where}: {error}")
            return
        if begin >= num_known:  # what is before was done as the part before
            reading.advance(position - begin)
    _ended(reading)
    if unpacker is not None:
        where = f"{source.id}: at byte {position} ({num_unpacked} bytes decompressed)"
        reading.problems.add(TRUNCATED, f"{where}, inside a compressed block")


def _ended(reading: Reading) -> None:
    if reading.part is not None:
        reading.part.is_last = True


def _without_first(buffers: Iterator[bytes], num_bytes: int) -> Iterator[bytes]:
    """``buffers`` but for the first ``num_bytes`` in them."""
    for buffer in buffers:
        if num_bytes < len(buffer):
            yield buffer[num_bytes:]
        num_bytes = max(num_bytes - len(buffer), 0)


def _has_checksum(begin: bytes) -> bool:
    """Whether the zstandard frame that ``begin`` begins ends with a checksum of what is in it."""
    with contextlib.suppress(zstandard.ZstdError):  # of damage, unpacking says more
        return bool(zstandard.get_frame_parameters(begin[:_MOST_HEADER_BYTES]).has_checksum)
    return True


# gzip and bzip2 have checksums, which are compared; zstandard where the writer asked for them.
_UNPACKERS: dict[str, Callable[[], _Unpacker]] = {
    _GZ: lambda: zlib.decompressobj(31),
    ".bz2": bz2.BZ2Decompressor,
    _ZST: lambda: zstandard.ZstdDecompressor().decompressobj(),
}


def lines(buffers: Iterator[bytes], offset: int, most_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """(begin, line without newline) for the lines of ``buffers`` from ``offset`` on; None: the line is too long."""
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

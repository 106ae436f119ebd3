"""The bytes of a file in buffers, unpacked where it is compressed, and the lines in them."""

import itertools
import zlib
from collections.abc import Iterator
from typing import BinaryIO, Protocol

from lightscale.data_pipeline.executors import Advance
from lightscale.data_pipeline.preparation.readers.inputs import TRUNCATED, UNREADABLE, Problems, SourceFile
from lightscale.data_pipeline.preparation.readers.table import PACKED_SUFFIXES
from lightscale.errors import UserError

try:
    import zstandard
except ImportError:
    zstandard = None  # type: ignore[assignment]

_READ_BYTES = 2**20
_COMPRESSED_READ_BYTES = 2**16
_UNPACK_ERRORS: tuple[type[Exception], ...] = (zlib.error,) if zstandard is None else (zlib.error, zstandard.ZstdError)


def is_packed(file: SourceFile) -> bool:
    """Whether ``file`` is compressed, by its name."""
    return file.path.name.lower().endswith(PACKED_SUFFIXES)


def require_unpacker(file: SourceFile) -> None:
    """``UserError`` where the package that unpacks ``file`` is missing."""
    if zstandard is None and _is_zst(file):
        raise UserError(f"{file.path}: zstandard is needed to read it; pip install 'lightscale[corpus]'")


def _is_zst(file: SourceFile) -> bool:
    return file.path.name.lower().endswith(".zst")


def plain(file: BinaryIO, advance: Advance) -> Iterator[bytes]:
    """The content of a file from where it stands."""
    while buffer := file.read(_READ_BYTES):
        yield buffer
        advance(len(buffer))


def after_newline(buffers: Iterator[bytes], offset: int, stop: int) -> tuple[int, Iterator[bytes]]:
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


def unpacked(file: BinaryIO, source: SourceFile, problems: Problems, advance: Advance) -> Iterator[bytes]:
    """The content of a gzip or zstandard file; what comes before damage or a missing end is given."""
    is_zst = _is_zst(source)
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


def lines(buffers: Iterator[bytes], offset: int, most_bytes: int) -> Iterator[tuple[int, bytes | None]]:
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

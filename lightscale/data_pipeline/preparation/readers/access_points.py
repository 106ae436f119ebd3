"""Access points: places in a compressed file where unpacking can begin without the data before.

Access points are the beginnings of gzip members, bzip2 streams and zstandard frames. In a gzip member they are also the
beginnings of deflate blocks (RFC 1951), if the 32 KiB of text before are known, as in zlib's ``zran.c``. Python's zlib
does not report the beginnings of blocks, but a test finds them. An unpacker gets one of two known blocks at some bit.
It returns the text of the block if and only if it expects a block there. It cannot begin in the middle of a byte
either: empty blocks of ten bits before the block fill the byte, which leads to any even bit. So only blocks at even
bits are access points.
"""

import base64
import zlib
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

_WINDOW_BYTES = 2**15
# A last block with fixed codes that holds a text which repeats nothing and stands in no file by chance.
_TEXT = bytes.fromhex("d1a37f0c94e85b26c06eb9124f83fa37")
_OWN_BLOCK = zlib.compress(_TEXT, wbits=-15)
# A stored block of it behind its header (RFC 1951, 3.2.4), which begins at a byte.
_OWN_STORED = len(_TEXT).to_bytes(2, "little") + (len(_TEXT) ^ 0xFFFF).to_bytes(2, "little") + _TEXT
# Three bits of header and the seven of the end of block, by fixed codes.
_EMPTY_BLOCK, _EMPTY_BLOCK_BITS = 0b010, 10
# RFC 1951, 3.2.7: header, three numbers of codes, then at most 19 lengths of three bits.
_HEADER_BITS, _MOST_CODE_LENGTHS = 17, 19


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessPoint:
    """Where to go on."""

    packed: int
    """The byte of the file that unpacking begins with, and"""
    unpacked: int
    """the byte of the content that it gives first."""
    bit: int = 0
    """Of that byte, where a block begins in a gzip member."""
    is_inside: bool = False
    """Whether a member has begun before. Of that:"""
    window: bytes = b""
    """its last 32 KiB before the point,"""
    crc: int = 0
    """the CRC-32 of its content before the point, and"""
    length: int = 0
    """the length of that: both are compared at the end of the member."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "window": base64.b64encode(self.window).decode()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """The inverse of ``as_json``."""
        return cls(**{**content, "window": base64.b64decode(content["window"])})


class GzipMember:
    """Unpacks a member of a gzip file from its beginning or from a point inside, and finds points.

    As ``zlib.decompressobj(31)``, with the same errors for damaged data.
    """

    def __init__(self, point: AccessPoint | None = None) -> None:
        self._point = point if point is not None and point.is_inside else None
        if self._point is None:
            self._inflate = zlib.decompressobj(31)
            self._window, self._crc, self._length = b"", 0, 0
        else:
            self._inflate = zlib.decompressobj(-15, zdict=self._point.window)
            self._window, self._crc, self._length = self._point.window, self._point.crc, self._point.length
        self._bit = self._point.bit if self._point is not None else 0
        self._trailer = b""
        self.eof = False
        """Whether the member has ended."""
        self.unused_data = b""
        """The data behind the member, after its end."""

    def decompress(self, data: bytes, /) -> bytes:
        """The content of the next bytes."""
        if self._inflate.eof:
            content, rest = b"", data
        else:
            content = self._inflate.decompress(self._aligned(data))
            rest = self._inflate.unused_data
        self._window = (self._window + content)[-_WINDOW_BYTES:]
        self._crc = zlib.crc32(content, self._crc)
        self._length += len(content)
        if self._inflate.eof:
            self._end(rest)
        return content

    def decompress_and_find(self, data: bytes, *, packed: int, unpacked: int) -> tuple[bytes, AccessPoint | None]:
        """The same, and the first access point in ``data``; None: no block is seen to begin there.

        ``packed``, ``unpacked``: where ``data`` begins in the file, and its content in that of the file.
        """
        if self._inflate.eof:
            return self.decompress(data), None
        window, crc, length = self._window, self._crc, self._length
        before, blocks = self._inflate.copy(), self._aligned(data, once=False)
        content = self.decompress(data)
        found = first_block(before, blocks)
        if found is None:
            return content, None
        byte, bit, size = found
        point = AccessPoint(
            packed=packed + byte - (len(blocks) - len(data)),
            unpacked=unpacked + size,
            bit=bit,
            is_inside=True,
            window=(window + content[:size])[-_WINDOW_BYTES:],
            crc=zlib.crc32(content[:size], crc),
            length=length + size,
        )
        return content, point

    def _aligned(self, data: bytes, *, once: bool = True) -> bytes:
        """The first ``data`` after a point with empty blocks in place of the bits before it."""
        num_blocks = self._bit // 2  # 10 n is 2 n modulo 8
        if not num_blocks or not data:
            return data
        value = sum(_EMPTY_BLOCK << _EMPTY_BLOCK_BITS * number for number in range(num_blocks))
        value |= data[0] >> self._bit << _EMPTY_BLOCK_BITS * num_blocks
        if once:
            self._bit = 0
        return value.to_bytes(_EMPTY_BLOCK_BITS * num_blocks // 8 + 1, "little") + data[1:]

    def _end(self, rest: bytes) -> None:
        if self._point is None:
            self.eof, self.unused_data = True, rest
            return
        # Of blocks alone zlib does not know the trailer: CRC-32 and length, four bytes each.
        missing = 8 - len(self._trailer)
        self._trailer, self.unused_data = self._trailer + rest[:missing], rest[missing:]
        self._check(self._trailer[:4], self._crc, "incorrect data check")
        self._check(self._trailer[4:], self._length % 2**32, "incorrect length check")
        self.eof = len(self._trailer) == 8

    def _check(self, written: bytes, value: int, fault: str) -> None:
        if len(written) == 4 and int.from_bytes(written, "little") != value:
            raise zlib.error(f"Error -3 while decompressing data: {fault}")


def first_block(inflate: Any, data: bytes) -> tuple[int, int, int] | None:
    """The first block with its own codes at an even bit of ``data``, the next input of ``inflate``.

    (byte, bit in it, bytes of content before it); None: no such block. ``inflate`` is used up.
    """
    given = num_content = 0
    for begin in _candidates(data).tolist():
        byte, bit = divmod(begin, 8)
        num_content += len(inflate.decompress(data[given:byte]))
        given = byte
        if inflate.eof:
            return None
        if (content := _content_up_to_block(inflate, data[byte] & ((1 << bit) - 1), bit)) is not None:
            return byte, bit, num_content + len(content)
    return None


def _content_up_to_block(inflate: Any, bits: int, num_bits: int) -> bytes | None:
    """What ``inflate`` gives for its next ``num_bits`` ``bits``, if it expects a block behind them; else None.

    It is asked twice. In the middle of a block with fixed codes it may take the first bits of the block with such codes
    for the rest of a symbol, and then read our text; in the middle of a stored one it copies whatever it is given.
    """
    fixed = int.from_bytes(_OWN_BLOCK, "little") << num_bits | bits
    stored = (bits | 1 << num_bits).to_bytes((num_bits + 3 + 7) // 8, "little") + _OWN_STORED
    found = set()
    for block in (fixed.to_bytes(len(_OWN_BLOCK) + 1, "little"), stored):
        try:
            content = inflate.copy().decompress(block)
        except zlib.error:
            return None
        if not content.endswith(_TEXT):
            return None
        found.add(content[: -len(_TEXT)])
    return found.pop() if len(found) == 1 else None


def _candidates(data: bytes) -> Any:
    """Even bits of ``data`` where the header of a block with codes of its own may stand: type 2, and a complete code
    of the codes' lengths. Of random bits about one in a thousand."""
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")
    num_begins = len(bits) - _HEADER_BITS - 3 * _MOST_CODE_LENGTHS
    if num_begins <= 0:
        return np.empty(0, dtype=np.int64)
    begins = np.arange(0, num_begins, 2)
    begins = begins[(bits[begins + 1] == 0) & (bits[begins + 2] == 1)]
    triples = bits[:-2] | bits[1:-1] << 1 | bits[2:] << 2
    num_lengths = 4 + (triples[begins + 13] | bits[begins + 16] << 3)
    space = np.zeros(len(begins), dtype=np.int64)
    for number in range(_MOST_CODE_LENGTHS):
        lengths = triples[begins + _HEADER_BITS + 3 * number]
        space += np.where((number < num_lengths) & (lengths > 0), 128 >> lengths.astype(np.int64), 0)
    return begins[space == 128]

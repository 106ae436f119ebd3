"""Hashes of blocks: readers verify the values of an array, 16 KiB at a time.

    ARRAY/c/N               a shard; block b of it is its values b · block_length …, the last one shorter
    hashes/ARRAY/c/N        uint64: the XXH3-64 of every block of that shard
    block_digests[ARRAY]    in the attributes of the group: of every shard the XXH3-64 of each 512 of its hashes

A reader keeps the digests in memory (2 bytes per 1 MiB of values). It reads hashes, 512 at a time, for blocks that it
has not verified yet. The digests therefore fix the hashes at the opening of the store. A window of 8,192 tokens costs
at most 48 KiB of tokens and 8 KiB of hashes: 1.71 times its own bytes.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from lightscale.errors import UserError

BLOCK_BYTES = 2**14
# One page of hashes, of 8 MiB of values.
GROUP_BLOCKS = 512
GROUP_BYTES = GROUP_BLOCKS * 8
_CACHED_GROUPS = 1024
_DIGEST_DIGITS = 16


def hash_blocks(raw: memoryview, block_bytes: int) -> bytes:
    """The hashes of the blocks of ``raw``, the last of which may be shorter, as uint64 in little-endian order."""
    # Digests are in big-endian order.
    return b"".join(
        [xxhash.xxh3_64_digest(raw[begin : begin + block_bytes])[::-1] for begin in range(0, len(raw), block_bytes)]
    )


class BlockHasher:
    """Makes the hashes of the blocks of a stream."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._hashes = bytearray()
        self._begun: xxhash.xxh3_64 | None = None
        self._num_begun = 0

    def update(self, raw: memoryview) -> None:
        """Go on with the bytes ``raw``."""
        begin = 0
        if self._begun is not None:
            begin = min(self._block_bytes - self._num_begun, len(raw))
            self._begun.update(raw[:begin])
            self._num_begun += begin
            if self._num_begun == self._block_bytes:
                self._end_block(self._begun)
        whole = (len(raw) - begin) // self._block_bytes * self._block_bytes
        self._hashes += hash_blocks(raw[begin : begin + whole], self._block_bytes)
        if begin + whole < len(raw):
            self._begun = xxhash.xxh3_64(raw[begin + whole :])
            self._num_begun = len(raw) - begin - whole

    def finish(self) -> bytes:
        """The hashes in the form of ``hash_blocks``, also that of a block which the stream did not fill."""
        if self._begun is not None:
            self._end_block(self._begun)
        return bytes(self._hashes)

    def _end_block(self, begun: xxhash.xxh3_64) -> None:
        self._hashes += begun.digest()[::-1]
        self._begun, self._num_begun = None, 0


def digests_of(hashes: bytes) -> str:
    """Of each 512 of a shard's block hashes the hash, in hexadecimal one after another."""
    groups = (hashes[first : first + GROUP_BYTES] for first in range(0, len(hashes), GROUP_BYTES))
    return "".join(xxhash.xxh3_64_hexdigest(group) for group in groups)


def num_digits(num_blocks: int) -> int:
    """The length of the digests of a shard with ``num_blocks`` blocks."""
    return -(-num_blocks // GROUP_BLOCKS) * _DIGEST_DIGITS


class BlockHashes:
    """Reads the block hashes of an array, which are compared with its digests."""

    def __init__(self, path_of: Callable[[int], Path], digests: Sequence[str]) -> None:
        """``path_of``: the file with the hashes of a shard; ``digests``: by shard, the result of ``digests_of``."""
        self._path_of = path_of
        self._digests = digests
        # The cache belongs to the object: one on the method would keep every array alive.
        cache = functools.lru_cache(maxsize=_CACHED_GROUPS)
        self._group: Callable[[int, int, int], bytes] = cache(self._read_group)

    def of(self, shard: int, first: int, stop: int, num_blocks: int) -> bytes:
        """Hashes (``hash_blocks``) of the blocks ``first`` … ``stop`` - 1 of a shard with ``num_blocks``.

        Raises ``UserError`` that names the file if they differ from the written ones.
        """
        group, last = first // GROUP_BLOCKS, (stop - 1) // GROUP_BLOCKS
        hashes = self._group(shard, group, num_blocks)
        if group < last:
            hashes = b"".join(self._group(shard, one, num_blocks) for one in range(group, last + 1))
        begin = group * GROUP_BLOCKS
        return hashes[(first - begin) * 8 : (stop - begin) * 8]

    def _read_group(self, shard: int, group: int, num_blocks: int) -> bytes:
        path = self._path_of(shard)
        first = group * GROUP_BLOCKS
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(first * 8)
                raw: bytes = file.read(min(GROUP_BLOCKS, num_blocks - first) * 8)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; the block-hash file of a shard is missing") from error
        digits = group * _DIGEST_DIGITS
        if xxhash.xxh3_64_hexdigest(raw) != self._digests[shard][digits : digits + _DIGEST_DIGITS]:
            raise UserError(
                f"{path}: its hashes {first} to {first + GROUP_BLOCKS} have changed; `lightscale data verify` lists "
                f"all damage; restore the file from a copy"
            )
        return raw


@dataclass(slots=True)
class CheckedBlocks:
    """Which blocks of a shard file this process has compared, as long as the file is as it was then."""

    changed_ns: int
    """Of the file: when it was last changed, or took the place of another."""
    looked_ns: int
    """When that was last asked for; threads may write it together."""
    flags: bytearray
    """A byte a block: 1 where it was compared. Threads may set them together."""

    def cover(self, first: int, stop: int) -> bool:
        """Whether the blocks ``first`` … ``stop`` - 1 were all compared."""
        return self.flags.find(0, first, stop) < 0

    def add(self, first: int, stop: int) -> None:
        """The blocks ``first`` … ``stop`` - 1 are as they were prepared."""
        self.flags[first:stop] = b"\1" * (stop - first)

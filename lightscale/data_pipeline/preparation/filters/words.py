"""Words of a text as arrays, found and compared on its UTF-8 bytes without making a string of any."""

from functools import cached_property

import numpy as np
import xxhash
from numpy.typing import NDArray

_LOAD = 8  # bytes of a word that are looked at together
_LONG_WORD_BYTES = 2 * _LOAD  # longer ones are few
_SPACE = 32  # in a normalised text the bytes up to here are spaces, tabs, line feeds and form feeds
_KEEP = np.array([256**length - 1 for length in range(_LOAD + 1)], dtype=np.uint64)  # the first bytes of a load
_MULTIPLIER = np.uint64(0x9FB21C651E98DF25)
_HALF = np.uint64(32)


class Words:
    """The words of a normalised text: the parts between ASCII spaces."""

    def __init__(self, text: str) -> None:
        self._text_is_ascii = text.isascii()
        self._raw = text.encode() + bytes(_LOAD)  # ends the last word, and every load lies within
        self._bytes = np.frombuffer(self._raw, dtype=np.uint8)
        is_space = self._bytes <= _SPACE
        edges = np.flatnonzero(is_space[1:] != is_space[:-1]) + 1
        if not is_space[0]:
            edges = np.concatenate([[0], edges])
        self._starts, self._ends = edges[::2], edges[1::2]

    def __len__(self) -> int:
        return len(self._starts)

    @cached_property
    def ids(self) -> NDArray[np.uint64]:
        """(words,) 64-bit hashes: equal words have equal ones, and only they but for a chance of 2^-64."""
        lengths = self._ends - self._starts
        loads = np.ndarray((len(self._raw) - _LOAD + 1,), dtype=f"V{_LOAD}", buffer=self._raw, strides=(1,))
        hashes = _mixed(lengths.astype(np.uint64), loads[self._starts], lengths)
        longer = np.flatnonzero(lengths > _LOAD)
        hashes[longer] = _mixed(hashes[longer], loads[self._starts[longer] + _LOAD], lengths[longer] - _LOAD)
        for index in np.flatnonzero(lengths > _LONG_WORD_BYTES):
            hashes[index] = xxhash.xxh3_64_intdigest(self._raw[self._starts[index] : self._ends[index]])
        return hashes

    @cached_property
    def characters(self) -> NDArray[np.int64]:
        """(words,) characters of each."""
        lengths = self._ends - self._starts
        if self._text_is_ascii or not len(self):
            return lengths
        # Of a character's bytes all but the first are 10xxxxxx.
        following = (self._bytes & 0xC0) == 0x80
        return lengths - np.add.reduceat(following.astype(np.int64), self._starts)

    @cached_property
    def num_with_letter(self) -> int:
        """Words with at least one letter of any script."""
        if not len(self):
            return 0
        has_letter = np.logical_or.reduceat(is_ascii_letter(self._bytes), self._starts)
        count = int(np.count_nonzero(has_letter))
        if self._text_is_ascii:
            return count
        other = np.flatnonzero(~has_letter & np.logical_or.reduceat(self._bytes >= 0x80, self._starts))
        words = (self._raw[self._starts[index] : self._ends[index]].decode() for index in other)
        return count + sum(any(map(str.isalpha, word)) for word in words)


def is_ascii_letter(codes: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which of the bytes are A to Z or a to z."""
    lower = codes | np.uint8(0x20)
    return (lower - np.uint8(ord("a"))) < 26  # unsigned: what is below wraps around


def is_ascii_digit(codes: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which of the bytes are 0 to 9."""
    return (codes - np.uint8(ord("0"))) < 10


def _mixed(hashes: NDArray[np.uint64], loads: NDArray[np.void], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    mixed = loads.view("<u8") & _KEEP[np.minimum(lengths, _LOAD)]
    mixed ^= hashes
    mixed *= _MULTIPLIER
    mixed ^= mixed >> _HALF
    mixed *= _MULTIPLIER
    return mixed

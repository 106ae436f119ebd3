"""Measurements of a text for rules. Each is computed at its first use, and then kept."""

import re
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.preparation.filters.repetition import Ngrams
from lightscale.data_pipeline.preparation.filters.words import Words

Unit = Literal["word", "Chinese character"]

_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")
# CJK Unified Ideographs with extension A, compatibility forms, the further extensions, as (first, last).
_CHINESE = ((0x3400, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF))
_SPACE, _IDEOGRAPHIC_SPACE = 32, 0x3000


class DocumentView:
    """A normalised text as lines, paragraphs, and units: words between spaces, or Chinese characters."""

    def __init__(self, text: str, unit: Unit) -> None:
        self.text = text
        self.unit = unit

    @cached_property
    def raw_lines(self) -> list[str]:
        """All lines as they are."""
        return self.text.split("\n")

    @cached_property
    def lines(self) -> list[str]:
        """Lines that are not blank, without spaces around them; of Chinese those with a letter or a digit.

        Technical Chinese has tables drawn with ``+--+`` and ``├──┤``: their rules would be taken for repeated lines.
        """
        lines = map(str.strip, self.raw_lines)
        if self.unit == "word":
            return [line for line in lines if line]
        return [line for line in lines if any(map(str.isalnum, line))]

    @cached_property
    def paragraphs(self) -> list[str]:
        """The parts between blank lines."""
        return _PARAGRAPH.split(self.text.strip())

    @cached_property
    def words(self) -> Words:
        """The parts between spaces."""
        return Words(self.text)

    @cached_property
    def utf8(self) -> NDArray[np.uint8]:
        """(n,) bytes of the text."""
        return np.frombuffer(self.text.encode(), dtype=np.uint8)

    @cached_property
    def characters(self) -> NDArray[np.uint32]:
        """(n,) code points of the characters that are no space."""
        points = np.frombuffer(self.text.encode("utf-32-le"), dtype="<u4")
        return points[(points > _SPACE) & (points != _IDEOGRAPHIC_SPACE)]

    @cached_property
    def chinese_characters(self) -> NDArray[np.uint32]:
        """(m,) those of ``characters`` that are Chinese."""
        # Unsigned: what is below the first of a range wraps around to far above its size.
        ranges = [self.characters - np.uint32(first) <= last - first for first, last in _CHINESE]
        return self.characters[np.logical_or.reduce(ranges)]

    @cached_property
    def num_units(self) -> int:
        """Words or Chinese characters."""
        return len(self.words if self.unit == "word" else self.chinese_characters)

    def ngrams(self) -> Ngrams:
        """The n-grams of the units, from n = 1 on; what stands between Chinese characters is skipped."""
        if self.unit == "word":
            return Ngrams(self.words.ids, self.words.characters)
        return Ngrams(self.chinese_characters.astype(np.uint64), None)

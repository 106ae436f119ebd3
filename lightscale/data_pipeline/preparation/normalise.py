"""Normalise: any bytes or string to a text that every later step accepts, with counts of changes.

The text that comes out is valid Unicode in UTF-8, its lines end with LF, and its only control characters are tab,
line feed and form feed (old sources separate pages by it). Nothing else is touched: spaces, indentation, full-width
forms, combining marks and blank lines stay, because in code and in Chinese they mean something.
``normalise(normalise(x).text)`` changes nothing.
"""

import codecs
import re
from dataclasses import dataclass, field

from lightscale.data_pipeline.preparation.readers.inputs import INVALID_UTF8

BYTE_ORDER_MARK = "byte order mark removed"
LONE_SURROGATE = "lone surrogate replaced"
LINE_END = "line end made LF"
NUL = "NUL removed"
CONTROL = "control character removed"
ENORMOUS_LINE = "enormous line kept"

COUNTED = {
    BYTE_ORDER_MARK: "U+FEFF at the start, which some programs write before UTF-8",
    INVALID_UTF8: "sequences of bytes that are not UTF-8, each replaced by one U+FFFD",
    LONE_SURROGATE: "halves of UTF-16 pairs (from JSON), each replaced by U+FFFD; whole pairs become the character",
    LINE_END: "CR LF, single CR and U+0085, each replaced by one LF",
    NUL: "U+0000",
    CONTROL: "U+0001 to U+001F without tab, LF, form feed and CR, and U+007F to U+009F without U+0085",
    ENORMOUS_LINE: "lines of more than 100,000 characters; kept whole; filters apply their own limits",
}
"""The changes that ``Normalised.counts`` counts, with their descriptions."""

ENORMOUS_LINE_CHARACTERS = 100_000
_REPLACEMENT = "\ufffd"
_CONTROL_BYTES = bytes({*range(0x01, 0x20), 0x7F} - {*b"\t\n\f\r"})
# In UTF-8: U+0080 to U+009F are C2 80 to C2 9F, and C2 begins nothing else that ends in those.
_C1_LEAD, _NEXT_LINE = b"\xc2", b"\xc2\x85"
_C1 = re.compile(rb"\xc2[\x80-\x9f]")


@dataclass(frozen=True, slots=True)
class Normalised:
    """A normalised text and its changes."""

    text: str
    counts: dict[str, int] = field(default_factory=dict)
    """Number of each change in ``COUNTED``; changes that did not occur have no entry."""


def normalise(data: bytes | str) -> Normalised:
    """``data``, bytes meant as UTF-8 or a string that may hold lone surrogates, as a clean text.

    Raises nothing: every input has an outcome. Works on bytes, where searching is fastest.
    """
    counts: dict[str, int] = {}
    raw = _valid(data, counts) if isinstance(data, bytes) else _without_surrogates(data, counts)
    text = _without_marks(_without_controls(_with_line_feeds(raw, counts), counts), counts).decode()
    if len(text) > ENORMOUS_LINE_CHARACTERS:
        _count(counts, ENORMOUS_LINE, sum(len(line) > ENORMOUS_LINE_CHARACTERS for line in text.split("\n")))
    return Normalised(text, counts)


def valid_unicode(data: bytes | str) -> Normalised:
    """``data`` as valid Unicode, otherwise unchanged: for texts that are data of a format."""
    counts: dict[str, int] = {}
    raw = _valid(data, counts) if isinstance(data, bytes) else _without_surrogates(data, counts)
    return Normalised(raw.decode(), counts)


def _count(counts: dict[str, int], what: str, times: int) -> None:
    if times:
        counts[what] = counts.get(what, 0) + times


def _valid(raw: bytes, counts: dict[str, int]) -> bytes:
    """Comes before anything is removed: bytes apart in a broken sequence must not be joined to a character."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        text = raw.decode(errors="replace")
        _count(counts, INVALID_UTF8, text.count(_REPLACEMENT) - raw.count(_REPLACEMENT.encode()))
        return text.encode()
    return raw


def _without_surrogates(text: str, counts: dict[str, int]) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        paired = text.encode("utf-16-le", errors="surrogatepass").decode("utf-16-le", errors="replace")
        _count(counts, LONE_SURROGATE, paired.count(_REPLACEMENT) - text.count(_REPLACEMENT))
        return paired.encode()


def _with_line_feeds(raw: bytes, counts: dict[str, int]) -> bytes:
    if b"\r" in raw:
        with_lf = raw.replace(b"\r\n", b"\n")
        _count(counts, LINE_END, len(raw) - len(with_lf) + with_lf.count(b"\r"))
        raw = with_lf.replace(b"\r", b"\n")
    if _NEXT_LINE in raw:
        _count(counts, LINE_END, raw.count(_NEXT_LINE))
        raw = raw.replace(_NEXT_LINE, b"\n")
    return raw


def _without_controls(raw: bytes, counts: dict[str, int]) -> bytes:
    if b"\0" in raw:
        _count(counts, NUL, raw.count(b"\0"))
        raw = raw.replace(b"\0", b"")
    kept = raw.translate(None, _CONTROL_BYTES)
    _count(counts, CONTROL, len(raw) - len(kept))
    if _C1_LEAD in kept:
        kept, removed = _C1.subn(b"", kept)
        _count(counts, CONTROL, removed)
    return kept


def _without_marks(raw: bytes, counts: dict[str, int]) -> bytes:
    while raw.startswith(codecs.BOM_UTF8):
        raw = raw.removeprefix(codecs.BOM_UTF8)
        _count(counts, BYTE_ORDER_MARK, 1)
    return raw

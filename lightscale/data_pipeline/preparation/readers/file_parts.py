"""Parts of a compressed file: each ends before a document, which the next begins with.

A process that reads consecutive parts keeps the file open and unpacks it once. Another process begins at the last
access point, which may be the beginning of the file, and skips the data before the document.
"""

from dataclasses import asdict, dataclass
from typing import Any, Self

from lightscale.data_pipeline.preparation.readers.access_points import AccessPoint

# To look for the beginning of a deflate block in 64 KiB takes some 0.05 s, as long as to work on the text. Text has one
# every few ten KB; where none of many has, as in a file that is stored and not compressed, the part ends without one.
_SEARCHED_SHARE = 1 / 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PartBegin:
    """Where a part begins."""

    point: AccessPoint
    """Where unpacking begins."""
    document: int = 0
    """The byte of the content where its first document begins: at the point or after it."""
    packed: int = 0
    """The byte of the file that was read up to there; its own are counted from it."""
    known: Any = None
    """State of the format reader at this place, as JSON."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "point": self.point.as_json()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """The inverse of ``as_json``."""
        return cls(**{**content, "point": AccessPoint.from_json(content["point"])})


FIRST = PartBegin(point=AccessPoint(packed=0, unpacked=0))
"""Of a file."""


class FilePart:
    """A part that is being read.

    It ends at the first document after an access point in the bytes behind ``least_bytes``. Without an access point
    there, it ends after those bytes. The content of the file decides, not the reader.
    """

    def __init__(self, begin: PartBegin, least_bytes: int, *, opened: Any = None) -> None:
        """``least_bytes``: minimum of bytes of the file. ``opened``: open source of its documents; None: open it."""
        self.begin = begin
        self.end: PartBegin | None = None
        """Where the next one begins; None: nothing comes after it, or it is not read to its end yet."""
        self.opened = opened
        """After its end: open source of the documents behind it; only ``read.py`` uses it."""
        self.packed = begin.packed
        """The byte of the file that it is read up to."""
        self.is_last = False
        """Whether reading has come to the end of the file, or to damage."""
        self._least_bytes = least_bytes
        self._least_end = begin.packed + max(least_bytes, 1)
        self._most_end = self._least_end + int(least_bytes * _SEARCHED_SHARE)
        self._point, self._is_found = begin.point, False

    def next(self) -> "FilePart":
        """The part behind this one, which has ended."""
        assert self.end is not None
        return FilePart(self.end, self._least_bytes, opened=self.opened)

    @property
    def wants_point(self) -> bool:
        """Whether the reader must search the last bytes for an access point."""
        return not self._is_found and self.packed > self._least_end

    def note(self, point: AccessPoint) -> None:
        """A point is known: the last one before its least end is kept, and then the first."""
        # Those before its own bytes it sees only if it was opened anew.
        if not self._is_found and point.packed >= self.begin.packed:
            self._point, self._is_found = point, point.packed >= self._least_end

    def end_before(self, document: int, known: Any) -> PartBegin | None:
        """Its end, if it ends before the document at byte ``document`` of the content; ``known``: see ``PartBegin``."""
        # What was found behind the last whole document is said of the last part: it must not be said again.
        if self.is_last or document < self._point.unpacked or not (self._is_found or self.packed >= self._most_end):
            return None
        return PartBegin(point=self._point, document=document, packed=self.packed, known=known)

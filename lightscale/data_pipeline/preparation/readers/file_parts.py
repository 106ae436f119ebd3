"""Parts of a compressed file: each ends where the next can begin without what comes before it."""

from dataclasses import dataclass
from typing import Any, Self

from lightscale.data_pipeline.preparation.readers.access_points import AccessPoint

# To look for the beginning of a block in 64 KiB takes some 0.05 s, as long as to work on the text. Most have one; where
# none of so many has, as in a file that is stored and not compressed, the next are looked at only later.
_MOST_SEARCHES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class PartBegin:
    """Where a part begins."""

    point: AccessPoint
    document: int
    """The byte of the content where its first document begins: at the point or after it."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"point": self.point.as_json(), "document": self.document}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """The inverse of ``as_json``."""
        return cls(point=AccessPoint.from_json(content["point"]), document=content["document"])


class FilePart:
    """A part that is being read."""

    def __init__(self, begin: PartBegin | None, least_bytes: int) -> None:
        """``begin``: where; None: at the beginning of the file. ``least_bytes``: of the file, which it has at least."""
        self.begin = begin
        self.end: PartBegin | None = None
        """Where the next one begins; None: nothing comes after it, or it is not read to its end yet."""
        self.is_last = False
        """Whether reading has come to the end of the file, or to damage."""
        self._least_bytes = max(least_bytes, 1)
        self._least_end = (0 if begin is None else begin.point.packed) + self._least_bytes
        self._num_searches = 0
        self._point: AccessPoint | None = None

    def wants(self, packed: int) -> bool:
        """Whether an access point is to be looked for before the byte ``packed`` of the file."""
        return self._point is None and packed > self._least_end

    def note_search(self, point: AccessPoint | None) -> None:
        """One was looked for; None: not found."""
        self._num_searches += 1
        if point is not None:
            self.note(point)
        elif self._num_searches == _MOST_SEARCHES:
            self._least_end, self._num_searches = self._least_end + self._least_bytes, 0

    def note(self, point: AccessPoint) -> None:
        """One is known; the first that may be the end is taken."""
        if self._point is None and point.packed >= self._least_end:
            self._point = point

    def ends_before(self, document: int) -> bool:
        """Whether it ends before the document at byte ``document`` of the content, which is then its end."""
        # What was found behind the last whole document is said of the last part: it must not be said again.
        if self.is_last or self._point is None or document < self._point.unpacked:
            return False
        self.end = PartBegin(point=self._point, document=document)
        return True

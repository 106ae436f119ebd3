"""All lines that a record of a run ever had, including those destroyed by a fault."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightscale.records import Record
from lightscale.runs.run_directory import read_lines


class History:
    """The lines of the record `path`; `damaged` stores them before a change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: list[Record] = []
        # Of the lines in the file, how many are among those that were kept.
        self._num_old = 0

    def lines(self) -> list[Record]:
        """All lines that were ever complete, in the order written."""
        return [*self._kept, *read_lines(self._path)[self._num_old :]]

    @contextmanager
    def damaged(self) -> Iterator[None]:
        """Context in which the file may be damaged; no other process writes to it."""
        kept = self.lines()
        yield
        self._kept, self._num_old = kept, len(read_lines(self._path))

"""All lines that a record of a run ever had, also those that a fault has destroyed since."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightscale.records import Record
from lightscale.runs.run_directory import read_lines


class History:
    """The lines of the record `path`, which `damaged` keeps before they are changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: list[Record] = []
        # Of the lines in the file, how many are among those that were kept.
        self._num_old = 0

    def lines(self) -> list[Record]:
        """All that were whole at some time, in the order written."""
        return [*self._kept, *read_lines(self._path)[self._num_old :]]

    @contextmanager
    def damaged(self) -> Iterator[None]:
        """Within, the file may become anything; nobody else writes to it."""
        kept = self.lines()
        yield
        self._kept, self._num_old = kept, len(read_lines(self._path))

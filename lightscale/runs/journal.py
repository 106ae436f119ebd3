"""Events (events.jsonl) and log lines of a run, written by one rank."""

import sys
from typing import Any

from lightscale.runs.full_disk import PendingRecords
from lightscale.runs.run_directory import RunDirectory


class Journal:
    """Records of the run in ``directory``. Every rank has one; only one is ``enabled``, the others do nothing."""

    def __init__(self, directory: RunDirectory, *, enabled: bool) -> None:
        self._directory, self._enabled = directory, enabled
        self._pending = PendingRecords(directory.append_event)

    def event(self, event: str, **fields: Any) -> None:
        """Append to events.jsonl; it is on disk when this returns."""
        if self._enabled:
            # Events stay in order: those held back come first.
            # Raises where the disk is still full: what a restart depends on must be on disk before the run goes on.
            self._pending.flush()
            self._directory.event(event, **fields)

    def note(self, event: str, **fields: Any) -> None:
        """Append to events.jsonl as soon as its disk has space, for events that a restart does not need."""
        if self._enabled:
            self._pending.add(self._directory.event_record(event, **fields))

    def begin_attempt(self, *beginning: Any, **fields: Any) -> None:
        """Record a new attempt of the run; see ``RunDirectory.begin_attempt``."""
        if self._enabled:
            self._directory.begin_attempt(*beginning, **fields)

    def say(self, text: str) -> None:
        """Print a line on stderr."""
        if self._enabled:
            print(text, file=sys.stderr, flush=True)

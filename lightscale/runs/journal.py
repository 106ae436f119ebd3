"""What a run tells while it goes on, by the voice of one rank: events that are kept, and lines for the log."""

import sys
from typing import Any

from lightscale.runs.full_disk import Held
from lightscale.runs.run_directory import RunDirectory


class Journal:
    """Of the run in ``directory``. Every rank has one; only one is ``enabled``, the others do nothing."""

    def __init__(self, directory: RunDirectory, *, enabled: bool) -> None:
        self._directory, self._enabled = directory, enabled
        self._held = Held(directory.append_event)

    def event(self, event: str, **fields: Any) -> None:
        """Append to events.jsonl; it is on disk when this returns."""
        if self._enabled:
            self._held.flush()
            self._directory.event(event, **fields)

    def note(self, event: str, **fields: Any) -> None:
        """Append to events.jsonl, as soon as there is space on its disk: training does not depend on it."""
        if self._enabled:
            self._held.add(self._directory.event_record(event, **fields))

    def begin_attempt(self, *beginning: Any, **fields: Any) -> None:
        """Count another attempt at the run; see ``RunDirectory.begin_attempt``."""
        if self._enabled:
            self._directory.begin_attempt(*beginning, **fields)

    def say(self, text: str) -> None:
        """A line on stderr."""
        if self._enabled:
            print(text, file=sys.stderr, flush=True)

"""metrics.jsonl, the record that other commands read: one object a line."""

import sys

from lightscale.runs.full_disk import PendingRecords
from lightscale.runs.metrics.sink import Measurement, RunFacts, Sink
from lightscale.runs.run_directory import LineWriter, RunDirectory


class JsonlSink(Sink):
    """Lines of all attempts; for each step ``read_metrics`` uses the last attempt's line.

    The training thread writes them. They are on disk when ``write`` returns, because goodput is computed from them.
    Lines that the disk does not accept stay in memory and are written later.
    """

    def __init__(self, run: RunFacts) -> None:
        self._path = RunDirectory(run.directory).metrics
        self._lines = LineWriter(self._path)
        self._pending = PendingRecords(self._lines.write, passes=lambda error: True)

    def write(self, measurement: Measurement) -> None:
        """See ``Sink``."""
        if measurement.fields:
            beginning = {"step": measurement.step, "attempt": measurement.attempt, "time": measurement.time}
            self._pending.add({**beginning, **measurement.fields})

    def go_back(self, step: int) -> None:
        """See ``Sink``. The lines hold their attempt's number."""

    def close(self) -> None:
        """See ``Sink``. Lines that the disk still does not accept are lost; a message reports it."""
        try:
            self._pending.flush()
            self._lines.sync()
        except OSError as error:
            print(f"the last lines of {self._path} are lost: {error}", file=sys.stderr, flush=True)
        finally:
            self._lines.close()

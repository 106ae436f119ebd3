"""metrics.jsonl, the record that other commands read: one object a line."""

import sys

from lightscale.runs.full_disk import PendingRecords
from lightscale.runs.metrics.sink import Measurement, RunFacts, Sink
from lightscale.runs.run_directory import LineWriter, RunDirectory


class JsonlSink(Sink):
    """Lines of all attempts; ``read_metrics`` takes the last attempt's of each step.

    Written by the thread that trains, and on its disk when ``write`` returns: goodput is computed of it. What the disk
    does not accept is kept in memory and written later.
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
        """See ``Sink``. Its lines say which attempt they are from."""

    def close(self) -> None:
        """See ``Sink``. What the disk does not accept even now is lost, which is said."""
        try:
            self._pending.flush()
            self._lines.sync()
        except OSError as error:
            print(f"the last lines of {self._path} are lost: {error}", file=sys.stderr, flush=True)
        finally:
            self._lines.close()

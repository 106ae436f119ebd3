"""The waits of a null run: whether there are enough of them, and what would come of each that is missing."""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from cuda_twin.recorded.accesses import Accesses, AccessNotes
from cuda_twin.recorded.kinds import OF_MEMORY, Kind
from cuda_twin.recorded.ordering import Race, races
from cuda_twin.recorded.records import Recorder, Recording
from lightscale.data_pipeline.loading.prefetch import Prefetcher
from lightscale.training.checkpoints.saving import Saver

FORGETTABLE = {"wait_stream": torch.cuda.Stream, "wait_event": torch.cuda.Stream, "record_stream": torch.Tensor}
"""What lightscale must not forget, and what has it."""


@contextmanager
def noted(notes: AccessNotes) -> Iterator[None]:
    """While this is open, what this thread, the prefetcher's and the saver's do to memory is noted."""
    read, write = Prefetcher._batches_after, Saver._write

    @functools.wraps(read)
    def read_noted(ahead: Prefetcher, tokens: int) -> Any:
        with Accesses(notes):
            return read(ahead, tokens)

    @functools.wraps(write)
    def write_noted(saver: Saver, snapshot: Any, *words: Any) -> Any:
        def note() -> None:
            for shard in snapshot.shards:
                notes.note(Kind.READ, shard.data, "a checkpoint that is written")

        # By what is no operation of PyTorch: read from the first moment to the last.
        note()
        found = write(saver, snapshot, *words)
        note()
        return found

    with (
        mock.patch.object(Prefetcher, "_batches_after", read_noted),
        mock.patch.object(Saver, "_write", write_noted),
        Accesses(notes),
    ):
        yield


@contextmanager
def forgetting(method: str) -> Iterator[None]:
    """While this is open, lightscale's own calls of ``method``, one of ``FORGETTABLE``, do nothing; "": none."""
    if not method:
        yield
        return
    owner: Any = FORGETTABLE[method]
    real: Callable[..., Any] = getattr(owner, method)

    def call(*words: Any) -> Any:
        forgotten = "/lightscale/" in sys._getframe(1).f_code.co_filename
        return None if forgotten else real(*words)

    with mock.patch.object(owner, method, call):
        yield


def waits_of(recorder: Recorder, notes: AccessNotes, last: Recording, *, tried: bool) -> dict[str, Any]:
    """Races of a run, and of its last step the places where a stream waits for an event, as JSON takes them.

    Args:
        recorder: of the run.
        notes: of what its operations access.
        last: the last step.
        tried: whether each wait of it is left out once, to see whether that would be a race.
    """
    rows, names = recorder.all_rows()
    found = races(rows, names, notes.places)
    waits = [int(number) + last.first for number in np.nonzero(rows["kind"][last.first :] == Kind.WAIT)[0]]
    places: dict[str, Counter[str]] = {}
    for number, where in zip(waits, last.stream_waits, strict=False):
        counts = places.setdefault(where, Counter())
        counts["waits"] += 1
        if tried and (new := races(rows, names, notes.places, without={number}) - found):
            counts["needed"] += 1
            counts.update({f"without one: {race}": 1 for race in list(new)[:1]})
    return {
        "races": _listed(found),
        "accesses": int(np.isin(rows["kind"], OF_MEMORY).sum()),
        "accesses_of_streams": {
            hex(stream): int(count)
            for stream, count in zip(
                *np.unique(rows["stream"][np.isin(rows["kind"], OF_MEMORY)], return_counts=True), strict=True
            )
        },
        "stream_waits": [{"where": where, **counts} for where, counts in places.items()],
    }


def _listed(found: Counter[Race]) -> list[dict[str, Any]]:
    return [{"race": str(race), "times": count} for race, count in found.most_common()]

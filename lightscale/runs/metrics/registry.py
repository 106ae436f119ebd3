"""Opens the sinks named in `metrics.sinks`."""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

from lightscale.config.sinks import sink_entry
from lightscale.runs.metrics.background import BackgroundSink
from lightscale.runs.metrics.sink import RunFacts, Sink


def open_sinks(names: Sequence[str], run: RunFacts) -> list[Sink]:
    """Open a sink for each of `names`. Only the sink of the record, metrics.jsonl, can raise or delay training."""
    return [_open(name, run) if sink_entry(name).is_record else _in_background(name, run) for name in names]


def _in_background(name: str, run: RunFacts) -> Sink:
    return BackgroundSink(name, functools.partial(_open, name), run)


def _open(name: str, run: RunFacts) -> Sink:
    # Not before it is opened: TensorBoard alone takes a second to import, and only rank 0 needs it.
    module, _, cls = sink_entry(name).cls.partition(":")
    found: Any = getattr(importlib.import_module(module), cls)
    sink: Sink = found(run)
    return sink

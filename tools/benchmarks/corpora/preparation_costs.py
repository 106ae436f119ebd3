"""What a preparation costs beside its texts: processor time of a unit, a small task and a file, on this machine.

The same texts are prepared in few and in many units, ranges of keys or files, in this process; what one more of them
costs is the slope between the two. ``lightscale data plan --hosts`` takes these costs from
``preparation/estimates/forecast.py``.
"""

import argparse
import json
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from rich.table import Table

from benchmarks.turns import positive
from lightscale.data_pipeline.executors import InProcess, Progress, Task
from lightscale.data_pipeline.preparation import deduplication
from lightscale.data_pipeline.preparation.corpus import make_corpus
from lightscale.data_pipeline.preparation.estimates import forecast
from lightscale.data_pipeline.preparation.prepare import PrepareOptions, prepare

# As in ``forecast.py``.
COSTS = {
    "read, filter, tokenize: a unit": forecast.UNIT_S,
    "count kept documents: a unit": forecast.COUNT_UNIT_S,
    "write shards: a unit's part of an array": forecast.SHARD_PART_S,
    "find and unite duplicates: a task": forecast.TASK_S,
    "one process alone: a unit": forecast.UNIT_ALONE_S,
    "one process alone: a file": forecast.FILE_ALONE_S,
}
_ARRAYS = 3


class _Timed(InProcess):
    """Adds the processor time of each step, and the number of its tasks, to those of the last preparation."""

    seconds: defaultdict[str, float]
    tasks: Counter[str]

    def run(self, step: str, task: Task, items: Sequence[Any], sizes: Sequence[int], progress: Progress) -> None:
        begun_s = time.process_time()
        super().run(step, task, items, sizes, progress)
        self.seconds[step] += time.process_time() - begun_s
        self.tasks[step] += len(items)


def run(units: int, repeats: int) -> Iterator[dict[str, Any]]:
    """What is known so far, a turn more each time. ``units``: as many, beside two; tasks and files in proportion."""
    samples: dict[str, list[float]] = {name: [] for name in COSTS}
    for _ in range(repeats):
        for name, seconds in _turn(units).items():
            samples[name].append(seconds)
        measured = {name: median(of) for name, of in samples.items()}
        yield {"seconds": measured, "samples_s": samples, "supposed_s": COSTS}


def _turn(units: int) -> dict[str, float]:
    few, many = (_prepared([units], unit_bytes=size) for size in (units * 1000 // 2, 1000))
    more = many["units"] - few["units"]
    found = {
        "read, filter, tokenize: a unit": _slope(few, many, "read, filter, tokenize", more),
        "count kept documents: a unit": _slope(few, many, "count kept documents", more),
        "write shards: a unit's part of an array": _slope(few, many, "write shards", _ARRAYS * more),
        "one process alone: a unit": _slope(few, many, "alone", more),
    }
    num_bytes = units * (24 + 14 * 16)
    few, many = (_prepared([units], unit_bytes=10**9, range_bytes=size) for size in (num_bytes, num_bytes // units))
    found["find and unite duplicates: a task"] = _slope(few, many, "duplicates", many["tasks"] - few["tasks"])
    few, many = (_prepared([1] * count, unit_bytes=10**9) for count in (units, 5 * units))
    found["one process alone: a file"] = _slope(few, many, "alone", 4 * units)
    return found


def _slope(few: dict[str, float], many: dict[str, float], what: str, more: float) -> float:
    return (many[what] - few[what]) / more


def _prepared(documents: Sequence[int], *, unit_bytes: int, range_bytes: int = 2**24) -> dict[str, float]:
    """Prepare files of so many ``documents`` of 1,000 bytes: seconds by step, ``alone`` between them, and counts."""
    made: list[_Timed] = []

    def make(make_context: Callable[[], Any]) -> _Timed:
        made.append(_Timed(make_context))
        made[0].seconds, made[0].tasks = defaultdict(float), Counter()
        return made[0]

    with tempfile.TemporaryDirectory(prefix="bench-costs-") as name:
        folder, draw = Path(name) / "texts", random.Random(0)
        folder.mkdir()
        for number, count in enumerate(documents):
            lines = (json.dumps({"text": f"{draw.getrandbits(4 * 986):0986x}"}) for _ in range(count))
            (folder / f"{number:06}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        corpus = make_corpus({"tokenizer": "ascii", "sources": {"a": {"paths": [str(folder)]}}}, origin="bench")
        options = PrepareOptions(make_executor=make, unit_bytes=unit_bytes)
        with mock.patch.object(deduplication, "_RANGE_BYTES", range_bytes):
            begun_s = time.process_time()
            prepare(corpus, Path(name) / "store", options)
            seconds = time.process_time() - begun_s
    of, tasks = made[0].seconds, made[0].tasks
    finds = [step for step in of if step.partition(" ")[0] in ("find", "unite")]
    return {
        **of,
        "duplicates": sum(of[step] for step in finds),
        "tasks": sum(tasks[step] for step in finds),
        "units": tasks["read, filter, tokenize"],
        "alone": seconds - sum(of.values()),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``bench.py preparation-costs``."""
    parser.add_argument("--units", type=positive, default=200, help="units in the larger preparation (default 200)")


def table(figures: dict[str, Any]) -> Table:
    """For people."""
    made = Table("processor time", "measured, ms", "assumed by `data plan`, ms")
    for name, seconds in figures["seconds"].items():
        made.add_row(name, f"{1e3 * seconds:.3f}", f"{1e3 * figures['supposed_s'][name]:.3f}")
    return made

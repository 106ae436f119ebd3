"""Deduplication over growing corpora: CPU time, files opened and bytes read, for each document.

Keys are drawn at random as MinHash would give them: of every ten documents eight share none, one has a near copy (ten
of its bands), one an exact copy. Units, as many as a preparation
makes of documents of 4 KB, write them, and its own tasks find the duplicates and write the keys that a store keeps, in
this process. What units do beside, reading, filtering and tokenizing, is not part of it.
"""

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from benchmarks.turns import positive
from lightscale.data_pipeline.preparation.corpus import DuplicatesConfig
from lightscale.data_pipeline.preparation.dedup import NUM_BANDS, write_band_records
from lightscale.data_pipeline.preparation.deduplication import list_key_files, steps
from lightscale.data_pipeline.preparation.plan import AIMED_UNITS, MAX_UNIT_BYTES, MIN_UNIT_BYTES, UNIT_SHIFT
from lightscale.data_pipeline.preparation.work_directory import WorkDirectory

MOST_GROWTH = 1.3
DOCUMENTS = (100_000, 1_000_000, 10_000_000)
_DOCUMENT_BYTES = 4096
_NEAR_BANDS = 10


class _Opened:
    """How many files below a folder have been opened; auditing cannot be taken back, so there is one of it."""

    def __init__(self) -> None:
        self.count, self._folder = 0, "\0"
        sys.addaudithook(self._audit)

    def begin(self, folder: Path) -> None:
        self.count, self._folder = 0, str(folder)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(self._folder):
            self.count += 1


def run(documents: Sequence[int], repeats: int = 1) -> Iterator[dict[str, Any]]:
    """What is known so far, one measurement more each time; the sizes take turns, ``repeats`` times.

    Of each size the measurement that is the median by CPU time counts, so that what else a machine does in one turn
    does not.
    """
    measured: dict[str, list[dict[str, Any]]] = {}
    opened = _Opened()
    for _, count in itertools.product(range(repeats), documents):
        with tempfile.TemporaryDirectory(prefix="bench-dedup-") as name:
            measured.setdefault(str(count), []).append(_measure(Path(name), count, opened))
        figures = {
            name: _median(samples) | {"samples_us": [sample["cpu_us_per_document"] for sample in samples]}
            for name, samples in measured.items()
        }
        each_us = [found["cpu_us_per_document"] for found in figures.values()]
        growth = max(each_us) / min(each_us)
        yield {"documents": figures, "growth": growth, "target": MOST_GROWTH, "reached": growth <= MOST_GROWTH}


def _median(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The lower one of an even number."""
    return sorted(samples, key=lambda sample: sample["cpu_us_per_document"])[(len(samples) - 1) // 2]


def _measure(folder: Path, count: int, opened: _Opened) -> dict[str, Any]:
    work = WorkDirectory(folder / "store.work")
    os.sync()  # what the turn before left to be written is not this one's
    begun_s = time.process_time()
    drawing_s = _write_units(work, count)
    seconds = {"write keys": time.process_time() - begun_s - drawing_s}
    opened.begin(work.path)
    read_before = _bytes_read()
    files = list_key_files(work, "near")
    corpus = SimpleNamespace(duplicates=DuplicatesConfig())
    context: Any = SimpleNamespace(work=work, base=None, corpus=corpus)
    for step in steps(files, "near"):
        begun_s = time.process_time()
        for item in step.items:
            step.task(context, item, lambda num_bytes: None)
        seconds[step.name] = seconds.get(step.name, 0.0) + time.process_time() - begun_s
    bytes_read = _bytes_read() - read_before
    pairs = np.load(work.path / "duplicates/near.npy", mmap_mode="r")
    assert pairs.shape[1] == 2 * (count // 10), "a near and an exact copy in ten documents"
    return {
        "cpu_us_per_document": 1e6 * sum(seconds.values()) / count,
        "cpu_us_per_document_of": {name: 1e6 * of / count for name, of in seconds.items()},
        "key_files": len(files.names),
        "opened": opened.count,
        "bytes_read_per_document": bytes_read / count,
    }


def _write_units(work: WorkDirectory, count: int) -> float:
    """Write the key files of ``count`` documents; the CPU seconds that drawing them took."""
    drawing_s = 0.0
    size = unit_documents(count)
    for unit, first in enumerate(range(0, count, size)):
        begun_s = time.process_time()
        keys = _keys(np.arange(first, min(count, first + size), dtype=np.uint64), count)
        folder = work.entry("units", unit)
        folder.mkdir(parents=True)
        ids = np.arange(len(keys), dtype=np.uint64) + np.uint64(unit << UNIT_SHIFT)
        drawing_s += time.process_time() - begun_s
        write_band_records(folder / "near-0000", keys, ids)
    return drawing_s


def unit_documents(count: int) -> int:
    """Documents of a unit, if ``count`` of 4 KB each are a corpus."""
    unit_bytes = min(max(count * _DOCUMENT_BYTES // AIMED_UNITS, MIN_UNIT_BYTES), MAX_UNIT_BYTES)
    return unit_bytes // _DOCUMENT_BYTES


def _keys(numbers: NDArray[np.uint64], count: int) -> NDArray[np.uint64]:
    """(docs, bands) keys: of the last tenth of ``count`` documents those of the first, of the tenth before nearly."""
    tenth = np.uint64(count // 10)
    exact, near = (numbers >= 9 * tenth) & (numbers < 10 * tenth), (numbers >= 8 * tenth) & (numbers < 9 * tenth)
    original = numbers.copy()
    original[exact] -= 9 * tenth
    original[near] -= 7 * tenth
    bands = np.arange(NUM_BANDS, dtype=np.uint64)
    own_bands = near[:, None] & (bands >= _NEAR_BANDS)
    sources = np.where(own_bands, numbers[:, None], original[:, None])
    return _mixed(sources * np.uint64(NUM_BANDS) + bands)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread over all 64 bits: a different one for each (splitmix64's finalizer)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values


def _bytes_read() -> int:
    """By this process, from files, cached or not."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(lines[0].removeprefix("rchar: "))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How large the corpora are; ``--repeats`` measures all of them, in turns."""
    parser.add_argument(
        "--documents", type=positive, nargs="+", default=list(DOCUMENTS), help="default: 100000 1000000 10000000"
    )


def table(figures: dict[str, Any]) -> Table:
    """For people."""
    names = list(dict.fromkeys(itertools.chain.from_iterable(
        found["cpu_us_per_document_of"] for found in figures["documents"].values()
    )))  # fmt: skip
    rows = Table("documents", caption=f"CPU time grows {figures['growth']:.2f} times (at most {figures['target']})")
    for heading in (*names, "all, µs a document", "key files", "opened", "bytes read a document"):
        rows.add_column(heading, justify="right")
    for count, found in figures["documents"].items():
        of = found["cpu_us_per_document_of"]
        rows.add_row(
            f"{int(count):,}", *(f"{of[name]:.2f}" if name in of else "" for name in names),
            f"{found['cpu_us_per_document']:.2f}", f"{found['key_files']:,}", f"{found['opened']:,}",
            f"{found['bytes_read_per_document']:.0f}",
        )  # fmt: skip
    return rows

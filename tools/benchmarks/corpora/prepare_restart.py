"""A preparation that is started again late in a large compressed file of one piece: what it unpacks and skips, timed.

Beside it what that spares: the same texts read, filtered, tokenized and their keys of duplicates made, as the benchmark
``data`` does it, in this process. The two take turns.
"""

import argparse
import bz2
import functools
import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.corpora import prepare as whole
from lightscale.data_pipeline.executors import InProcess, Progress, Task
from lightscale.data_pipeline.preparation.corpus import make_corpus
from lightscale.data_pipeline.preparation.prepare import PrepareOptions, prepare
from lightscale.data_pipeline.preparation.readers import FIRST, FilePart, PartBegin, cut_into_ranges, read
from lightscale.data_pipeline.preparation.readers.inputs import Problems, ReadOptions
from lightscale.data_pipeline.preparation.sources import FileLister


def _zst(data: bytes) -> bytes:
    import zstandard  # noqa: PLC0415 - part of an extra: other benchmarks run without it

    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "zst": _zst,
    "bz2": bz2.compress,
    "gz": functools.partial(gzip.compress, compresslevel=0),
}
"""By suffix; one frame, one stream, and stored blocks alone: nothing inside of them is an access point."""
_STEP = "read, filter, tokenize"


class _Timed(InProcess):
    seconds = 0.0
    """Of the step."""

    def run(self, step: str, task: Task, items: Sequence[Any], sizes: Sequence[int], progress: Progress) -> None:
        begun_s = time.perf_counter()
        super().run(step, task, items, sizes, progress)
        if step == _STEP:
            _Timed.seconds = time.perf_counter() - begun_s


def run(documents: Path | None, *, repeats: int, tokenizer: str) -> Iterator[dict[str, Any]]:
    """What is known so far, a suffix and turn more each time.

    ``documents``: jsonl in English; none: as the benchmark ``data``.
    """
    with tempfile.TemporaryDirectory(prefix="bench-restart-") as name:
        folder = Path(name)
        text = (documents or whole.pages(folder)).read_bytes()
        figures: dict[str, Any] = {"text_bytes": len(text), "ways": {}}
        for suffix, pack in PACKERS.items():
            path = folder / f"texts.jsonl.{suffix}"
            path.write_bytes(pack(text))
            found: dict[str, Any] = {"packed_bytes": path.stat().st_size, "skip_s": [], "prepare_s": []}
            figures["ways"][suffix] = found
            for turn in range(repeats):
                found["skip_s"].append(_skip(path, text.rstrip().rfind(b"\n") + 1))
                found["prepare_s"].append(_prepare(path, folder / "out" / suffix / str(turn), tokenizer))
                for way in ("skip", "prepare"):
                    found[f"{way}_megabytes_per_s"] = len(text) / median(found[f"{way}_s"]) / 1e6
                yield json.loads(json.dumps(figures))


def _skip(path: Path, last: int) -> float:
    """Seconds that it takes to read the document at byte ``last`` alone, as a part of ``path``."""
    options = ReadOptions()
    (file,) = FileLister(Problems()).files([str(path)])
    (file_range,) = cut_into_ranges(file, 10**12, Problems(), options=options)
    part = FilePart(PartBegin(point=FIRST.point, document=last, packed=file.size_bytes), 10**12)
    begun_s = time.perf_counter()
    found = list(read(file_range, Problems(strict=True), options=options, advance=lambda _: None, part=part))
    seconds = time.perf_counter() - begun_s
    assert [document.begin for document in found] == [last]
    return seconds


def _prepare(path: Path, out: Path, tokenizer: str) -> float:
    """Seconds of the step that a part is, for all of ``path``."""
    sources = {"a": {"paths": [str(path)], "language": "en"}}
    prepare(
        make_corpus({"tokenizer": tokenizer, "sources": sources}, origin="benchmark"),
        out,
        PrepareOptions(make_executor=_Timed),
    )
    return _Timed.seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``bench.py prepare-restart``."""
    parser.add_argument("--documents", type=Path, help="English jsonl (default: pages of Debian packages)")
    parser.add_argument("--tokenizer", default=f"tiktoken:{whole.ENCODING}", help="default: tiktoken:cl100k_base")


def table(figures: dict[str, Any]) -> Table:
    """For people."""
    made = Table("file", "packed, MB", "unpacked and skipped, MB of text a second", "prepared, MB of text a second")
    for suffix, found in figures["ways"].items():
        speeds = (f"{found[f'{way}_megabytes_per_s']:.1f}" for way in ("skip", "prepare"))
        made.add_row(f".jsonl.{suffix}", f"{found['packed_bytes'] / 1e6:.1f}", *speeds)
    return made

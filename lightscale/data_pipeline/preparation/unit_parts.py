"""A unit that is one large compressed file, part after part: an interruption loses one part, not the file.

parts/NNNNNN/unit-MMMMMM/     part MMMMMM of unit NNNNNN, with the files of a unit (``units.py``)
parts/NNNNNN/sample-MMMMMM/   the same of its texts to train a tokenizer on
…/end.json                    where the next part begins (``readers/file_parts.py``); null in the last

The parts of a file are the same for every reader, interrupted or not. A process keeps the file open from part to part;
another process begins with the results of the part before on disk.
"""

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from lightscale.data_pipeline.executors import Advance
from lightscale.data_pipeline.preparation.labels import check_number
from lightscale.data_pipeline.preparation.readers import FIRST, FilePart, PartBegin
from lightscale.data_pipeline.preparation.removed import FILE as REMOVED
from lightscale.data_pipeline.store.format import LOSS_MASK
from lightscale.data_pipeline.whole_files import whole_directory

PART_BYTES = 2**24
"""Of the compressed file, at least: some 64 MB of text, as much as a large unit of other files."""
_END = "end.json"
_JOINED = ("tokens", LOSS_MASK, "documents", "names", "ids", REMOVED)
_KEYS = ("exact", "near")

WritePart = Callable[[Path, FilePart, Sequence[Path]], None]
"""(new directory, part of the file to read, the parts before): writes a part."""


def write_parts(directory: Path, kind: str, write: WritePart, advance: Advance) -> list[Path]:
    """The directories of all parts, in order; missing ones are written."""
    parts: list[Path] = []
    part = FilePart(FIRST, PART_BYTES)
    while True:
        path = directory / f"{kind}-{len(parts):06}"
        was_there = path.exists()
        if not was_there:
            with whole_directory(path) as new:
                write(new, part, parts)
                content = json.dumps(None if part.end is None else part.end.as_json())
                (new / _END).write_text(content, encoding="utf-8")
        parts.append(path)
        found = json.loads((path / _END).read_bytes())
        if found is None:
            return parts
        end = PartBegin.from_json(found)
        if was_there:
            advance(end.packed - part.begin.packed)
        # What another process wrote meanwhile might end elsewhere, and the open file be somewhere else.
        part = part.next() if part.end == end else FilePart(end, PART_BYTES)


def join_parts(parts: Sequence[Path], target: Path, source: str) -> None:
    """Write the files of the unit that ``parts`` of ``source`` are, but its counts, into the directory ``target``."""
    for name in _JOINED:
        if not (parts[0] / name).exists():
            continue
        with (target / name).open("wb") as joined:
            for part in parts:
                with (part / name).open("rb") as content:
                    shutil.copyfileobj(content, joined)
    for kind in _KEYS:
        # Each file is sorted by itself, as those that one writer leaves.
        files = itertools.chain.from_iterable(sorted(part.glob(f"{kind}-*")) for part in parts)
        for number, file in enumerate(files):
            shutil.copyfile(file, target / f"{kind}-{number:04}")
    classes: dict[str, int] = {}
    with (target / "labels").open("wb") as labels:
        for part in parts:
            names = json.loads((part / "classes.json").read_bytes())
            numbers = np.array([classes.setdefault(name, len(classes)) for name in names], dtype="<u4")
            labels.write(numbers[np.fromfile(part / "labels", dtype="<u4")].tobytes())
    check_number(classes, f"sources.{source}")
    (target / "classes.json").write_text(json.dumps(list(classes)), encoding="utf-8")

"""The documents that filters drop, kept for people to look at: SOURCE.jsonl.zst in a directory of their choice.

units/NNNNNN/removed       JSON lines, a zstandard frame: id, rule, score, text, of a unit's dropped documents
"""

import json
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lightscale.data_pipeline.preparation.plan import PreparationPlan
from lightscale.data_pipeline.preparation.work_directory import WorkDirectory
from lightscale.data_pipeline.whole_files import whole_directory
from lightscale.errors import UserError

FILE = "removed"
SUFFIX = ".jsonl.zst"
_LEVEL = 3


def require_new(path: Path) -> None:
    """UserError where ``path`` cannot become the directory of removed documents."""
    if path.exists():
        raise UserError(f"--keep-removed {path}: the directory exists; use a new path")
    _zstandard()


class RemovedWriter:
    """Writes those of a unit."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._file = self._path.open("wb")
        self._packed = _zstandard().ZstdCompressor(level=_LEVEL).stream_writer(self._file, closefd=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._packed.close()
        self._file.close()

    def add(self, document_id: str, rule: str, score: float | None, text: str) -> None:
        """Write one, whole, as the filters were given it."""
        record = {"id": document_id, "rule": rule, "score": score, "text": text}
        self._packed.write(f"{json.dumps(record, ensure_ascii=False)}\n".encode())


def export(work: WorkDirectory, plan: PreparationPlan, out: Path) -> None:
    """Put those of all units, in the order of the corpus, into ``out``: a file for each source.

    An ``out`` that is there was written by an attempt that was interrupted later: a first one begins without.
    """
    if out.exists():
        return
    with whole_directory(out) as directory:
        for unit in plan.units:
            part = work.entry("units", unit.number) / FILE
            with part.open("rb") as source, (directory / f"{unit.source}{SUFFIX}").open("ab") as target:
                # Frames one after the other are a zstandard file.
                shutil.copyfileobj(source, target)


def _zstandard() -> Any:
    try:
        import zstandard  # noqa: PLC0415 - an optional package
    except ImportError:
        raise UserError("--keep-removed needs zstandard; pip install 'lightscale[corpus]'") from None
    return zstandard

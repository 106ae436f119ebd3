"""Curves as files: one CSV per cell, and one parquet file of all."""

import csv
import io
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lightscale.errors import UserError
from lightscale.files import read_regular
from lightscale.runs.run_directory import write_atomically
from lightscale.study.history import RunCurve

COLUMNS = ("step", "tokens", "flops", "paper_flops", "seconds", "loss", "smoothed")
_MOST_BYTES = 2**26


def write_curve(path: Path, curve: RunCurve) -> None:
    """Write a curve as CSV, in full or not at all; unknown values are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in zip(*(getattr(curve, name).tolist() for name in COLUMNS), strict=True):
        step, tokens, *rest = row
        writer.writerow([step, round(tokens), *("" if math.isnan(value) else f"{value:.7g}" for value in rest)])
    write_atomically(path, text.getvalue())


def read_curve(path: Path) -> RunCurve:
    """Read a file of `write_curve`. Raises `UserError` with the file, line and column of a fault."""
    try:
        text = read_regular(path, what="a curve", most_bytes=_MOST_BYTES).decode()
        rows = list(csv.reader(text.splitlines(), strict=True))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; remove the cell's .json beside it to create it again") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not CSV ({error}); restore it, or remove it and the .json beside it") from error
    if not rows or tuple(rows[0]) != COLUMNS or len(rows) == 1:
        raise UserError(f"{path}: not the curve of a cell: the first line must be {','.join(COLUMNS)}, then values")
    values = np.array([_values(path, number, row) for number, row in enumerate(rows[1:], start=2)], dtype=np.float64)
    if (np.diff(values[:, :2], axis=0) <= 0).any():
        raise UserError(f"{path}: step and tokens must increase from line to line; restore the file")
    columns = dict(zip(COLUMNS, values.T, strict=True))
    return RunCurve(step=columns.pop("step").astype(np.int64), **columns)


def write_parquet(path: Path, curves: Mapping[str, RunCurve]) -> None:
    """Write all curves as one table with a column `cell`. Raises `UserError` without pyarrow."""
    try:
        import pyarrow  # noqa: PLC0415 - a second, and only for this
        import pyarrow.parquet  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise UserError("parquet needs pyarrow: pip install 'lightscale[study]'") from error
    cells = [name for name, curve in curves.items() for _ in range(len(curve))]
    columns = {name: np.concatenate([getattr(curve, name) for curve in curves.values()] or [[]]) for name in COLUMNS}
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pyarrow.parquet.write_table(pyarrow.table({"cell": pyarrow.array(cells, pyarrow.string()), **columns}), draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _values(path: Path, line: int, row: list[str]) -> list[float]:
    if len(row) != len(COLUMNS):
        raise UserError(f"{path}, line {line}: {len(row)} values; must be {len(COLUMNS)}")
    values = []
    for name, text in zip(COLUMNS, row, strict=True):
        try:
            value = float(text) if text or name != "paper_flops" else math.nan
        except ValueError:
            value = -1.0
        if math.isinf(value) or value < 0 or (value == 0 and name != "seconds"):
            raise UserError(f"{path}, line {line}: {name} = {text!r}; must be a number above 0")
        values.append(value)
    return values

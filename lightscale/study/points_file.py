"""Points of runs from a CSV file, so that published results can be fitted like one's own runs."""

import csv
import math
from pathlib import Path

import numpy as np

from lightscale.errors import UserError
from lightscale.files import read_regular
from lightscale.study.fits.curves import Points

COLUMNS = "N (parameters), loss (nats per token), and D (tokens) or C (FLOPs); `run` may name the run of a point"
_MOST_BYTES = 2**26


def read_points(path: Path) -> Points:
    """Read the points in `path`: a header with the names of `COLUMNS`, then one line per point.

    A missing D is C / (6 N). Lines with the same `run` belong to one run; without that column each line is a run.
    Raises `UserError` with file, line and column.
    """
    try:
        raw = read_regular(path, what="a file of points", most_bytes=_MOST_BYTES, follow_links=True)
        text = raw.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; it needs the columns {COLUMNS}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error}); must be CSV") from error
    rows = csv.DictReader(text.splitlines(), strict=True)
    try:
        names = set(rows.fieldnames or ())
        if not {"N", "loss"} <= names or not names & {"D", "C"}:
            found = ", ".join(rows.fieldnames or ()) or "none"
            raise UserError(f"{path}: columns {found}; it needs {COLUMNS}")
        lines = [(rows.line_num, row) for row in rows]
    except csv.Error as error:
        raise UserError(f"{path}, line {rows.line_num}: not CSV ({error})") from error
    parameters, losses, tokens, runs = [], [], [], []
    for number, row in lines:
        size = _number(path, number, row, "N")
        parameters.append(size)
        losses.append(_number(path, number, row, "loss"))
        tokens.append(_number(path, number, row, "D") if "D" in names else _number(path, number, row, "C") / (6 * size))
        runs.append(row["run"] if "run" in names else str(number))
    return Points(
        parameters=np.array(parameters, dtype=np.float64),
        tokens=np.array(tokens, dtype=np.float64),
        loss=np.array(losses, dtype=np.float64),
        runs=np.unique(np.array(runs, dtype=str), return_inverse=True)[1].astype(np.int64),
    )


def _number(path: Path, line: int, row: dict[str, str | None], column: str) -> float:
    text = row.get(column)
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{path}, line {line}: {column} = {text!r}; must be a number above 0")
    return value

"""A study on disk: its definition, directory, cells and their progress.

    STUDY/study.json        its cells, each with the digest of its run
    STUDY/runs/CELL/        an ordinary run for each cell
    STUDY/logs/CELL.log     output of its launcher
    STUDY/cells/CELL.json   of an ended cell: size, compute, last loss, evaluation; CELL.csv: its curve
    STUDY/curves.parquet    all curves
    STUDY/fit.json, STUDY/report.html

A cell with both files in cells/ is finished: its run may be removed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightscale.errors import UserError, shortened
from lightscale.files import read_regular
from lightscale.records import trained_stores
from lightscale.runs.run_directory import RunDirectory, write_atomically
from lightscale.study.cells import Cell, Choice, make_cells
from lightscale.study.counts import CellCounts, count
from lightscale.study.curve_files import read_curve, write_curve
from lightscale.study.definition import Definition, read_definition
from lightscale.study.history import RunCurve, run_curve
from lightscale.study.scores import newest_scores

STUDIES = Path("studies")
_FORMAT = 1
_MOST_BYTES = 2**26
_MOST_SHOWN = 5
_EDGE = "is the {} value of the sweep: add values beyond it"


@dataclass(frozen=True, kw_only=True)
class SweepChoice:
    """Result of the sweep for one combination of the axes in sweep.per."""

    choice: Choice
    losses: Mapping[float, float]
    """Last smoothed loss of each finished run, by value."""
    missing: tuple[str, ...]
    """Runs that have not finished."""

    @property
    def value(self) -> float | None:
        """The value with the least loss; None until all its runs have finished."""
        return None if self.missing else min(self.losses, key=lambda value: self.losses[value])

    @property
    def warning(self) -> str | None:
        """Warning that the best value is at an edge, so that a better one may lie beyond; None: it is not."""
        if self.value is None or min(self.losses) < self.value < max(self.losses):
            return None
        return _EDGE.format("least" if self.value == min(self.losses) else "greatest")


class Study:
    """The current state of a study."""

    def __init__(self, file: Path, directory: Path | None = None) -> None:
        self.definition: Definition = read_definition(file)
        self.path = directory or STUDIES / self.definition.name
        self._counts: dict[str, CellCounts] = {}
        # Before any record is looked at: a mistake in the file is the first thing to say.
        make_cells(self.definition)

    @property
    def record_path(self) -> Path:
        """study.json."""
        return self.path / "study.json"

    def run(self, cell: Cell) -> RunDirectory:
        """The run directory of `cell`."""
        return RunDirectory(self.path / "runs" / cell.name)

    def log(self, cell: Cell) -> Path:
        """The log of the cell's launcher."""
        return self.path / "logs" / f"{cell.name}.log"

    def counts(self, cell: Cell) -> CellCounts:
        """Size and cost of `cell`."""
        if cell.name not in self._counts:
            self._counts[cell.name] = count(cell.config)
        return self._counts[cell.name]

    def cells(self) -> list[Cell]:
        """All cells, with the values that the sweep has chosen so far."""
        first = make_cells(self.definition)
        chosen = {one.choice: one.value for one in self.choices(first) if one.value is not None}
        return make_cells(self.definition, chosen) if chosen else first

    def choices(self, cells: Sequence[Cell]) -> list[SweepChoice]:
        """Results of the sweep so far; [] without a sweep."""
        by_choice: dict[Choice, list[Cell]] = {}
        for cell in cells:
            if cell.part == "sweep" and cell.choice is not None:
                by_choice.setdefault(cell.choice, []).append(cell)
        return [self._choice(choice, tried) for choice, tried in by_choice.items()]

    def _choice(self, choice: Choice, tried: Sequence[Cell]) -> SweepChoice:
        losses, missing = {}, []
        for cell in tried:
            record = self.finished_record(cell)
            if record is None:
                missing.append(cell.name)
            else:
                assert cell.tried is not None
                losses[cell.tried] = float(record["smoothed"])
        return SweepChoice(choice=choice, losses=losses, missing=tuple(missing))

    def begin(self, *, extend: bool = False) -> None:
        """Write study.json after `check`; `extend` allows new cells."""
        self.check(extend=extend)
        for folder in (self.path / "runs", self.path / "logs", self.path / "cells"):
            folder.mkdir(parents=True, exist_ok=True)
        record = {"format": _FORMAT, "study": self.definition.name, "cells": self._digests()}
        write_atomically(self.record_path, json.dumps(record, indent=1) + "\n")

    def check(self, *, extend: bool = False) -> None:
        """Raise `UserError` if the directory holds another study or an unreadable record."""
        recorded = self._recorded()
        if recorded is None:
            return
        now = self._digests()
        gone = [name for name in recorded if name not in now]
        changed = [name for name, digest in recorded.items() if now.get(name, digest) != digest]
        added = [name for name in now if name not in recorded]
        if gone or changed:
            what = [f"without {_names(gone)}"] * bool(gone) + [f"with another {_names(changed)}"] * bool(changed)
            raise UserError(
                f"{self.path} holds another study than {self.definition.path}, which is {' and '.join(what)}; "
                "restore the axes and the base, or use another directory with --dir"
            )
        if added and not extend:
            raise UserError(
                f"{self.path} holds a study of {len(recorded)} cells, and {self.definition.path} has {len(added)} "
                f"more: {_names(added)}; `lightscale study run --extend` adds them"
            )

    def require(self) -> None:
        """Raise `UserError` if the directory holds no study, or another one."""
        if not self.record_path.exists():
            raise UserError(f"{self.path}: no study here; start it with `lightscale study run {self.definition.path}`")
        self.check()

    def finished_record(self, cell: Cell) -> dict[str, Any] | None:
        """The content of cells/CELL.json; None: the cell is not finished."""
        path = self.path / "cells" / f"{cell.name}.json"
        try:
            value = json.loads(read_regular(path, what="the record of a cell", most_bytes=_MOST_BYTES))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: {error}; remove it to create it again from its run") from None
        if not isinstance(value, dict) or not isinstance(value.get("smoothed"), float) or "digest" not in value:
            raise UserError(f"{path}: not the record of a cell; remove it to create it again from its run")
        if not cell.is_pending and value["digest"] != cell.digest:
            raise UserError(
                f"{path}: the record of a run with another configuration; remove it and {self.run(cell).path} to train "
                "the cell again, or use another directory with --dir"
            )
        return value

    def finish(self, cell: Cell) -> bool:
        """Write the records of `cell` if its run has ended; returns whether it is finished."""
        run = self.run(cell)
        if not run.config.exists() or not run.is_finished(cell.config):
            return self.finished_record(cell) is not None
        # Raises where it is a run of another configuration.
        run.changes(cell.config)
        counts, curve = self.counts(cell), self.curve(cell, from_run=True)
        if curve is None:
            raise UserError(f"{run.metrics}: the run is finished, but no step is readable; restore the file")
        folder = self.path / "cells"
        folder.mkdir(parents=True, exist_ok=True)
        write_curve(folder / f"{cell.name}.csv", curve)
        record = {
            "cell": cell.name,
            "digest": cell.digest,
            "part": cell.part,
            "values": dict(cell.values),
            "architecture": cell.architecture,
            **asdict(counts),
            "lr": cell.config.optimizer.lr,
            "step": int(curve.step[-1]),
            "store": next(reversed(list(trained_stores(run.path))), None),
            "seconds": float(curve.seconds[-1]),
            "smoothed": float(curve.smoothed[-1]),
            "scores": newest_scores(run),
        }
        # Last: a cell counts as finished when it is there.
        write_atomically(folder / f"{cell.name}.json", json.dumps(record, indent=1) + "\n")
        return True

    def curve(self, cell: Cell, *, from_run: bool = False) -> RunCurve | None:
        """The curve of `cell`, finished or in progress; None before its first step."""
        if not from_run and self.finished_record(cell) is not None:
            return read_curve(self.path / "cells" / f"{cell.name}.csv")
        return run_curve(
            self.run(cell), self.counts(cell), cell.config.step_tokens, smoothing=self.definition.about.smoothing
        )

    def _digests(self) -> dict[str, str]:
        return {cell.name: cell.digest for cell in make_cells(self.definition)}

    def _recorded(self) -> dict[str, str] | None:
        try:
            value = json.loads(read_regular(self.record_path, what="the record of a study", most_bytes=_MOST_BYTES))
        except FileNotFoundError:
            if (self.path / "config.toml").exists():
                raise UserError(f"{self.path} is the directory of a run; use another with --dir") from None
            return None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.record_path}: {shortened(str(error))}; restore it") from None
        cells = value.get("cells") if isinstance(value, dict) and value.get("format") == _FORMAT else None
        if not isinstance(cells, dict) or not all(isinstance(one, str) for one in cells.values()):
            raise UserError(f"{self.record_path}: not the record of a study; restore it")
        return cells


def _names(names: Sequence[str]) -> str:
    more = len(names) - _MOST_SHOWN
    return ", ".join(names[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")

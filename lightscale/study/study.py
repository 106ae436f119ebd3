"""A study on disk: its definition, directory, cells and their progress.

    STUDY/study.json        its cells, each with the digest of its run
    STUDY/runs/CELL/        an ordinary run for each cell
    STUDY/logs/CELL.log     output of its launcher
    STUDY/cells/CELL.json   of an ended cell: size, compute, last loss, evaluation; CELL.csv: its curve
    STUDY/search.jsonl      of a search: losses at rungs, and decisions
    STUDY/curves.parquet    all curves
    STUDY/fit.json, STUDY/report.html

A cell with both files in cells/ is finished: its run may be removed.
"""

import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightscale.errors import UserError, shortened
from lightscale.files import read_regular
from lightscale.records import trained_stores
from lightscale.runs.run_directory import RunDirectory, write_atomically
from lightscale.study.cells import Cell, Choice, groups_of, make_cells
from lightscale.study.counts import CellCounts, count
from lightscale.study.curve_files import read_curve, write_curve
from lightscale.study.definition import Definition, read_definition
from lightscale.study.history import RunCurve, gave_up, run_curve, training_loss, validation_loss
from lightscale.study.scores import newest_scores
from lightscale.study.search.halving import Halving, TrialGroup
from lightscale.study.search.records import Decision, RungScore, SearchRecords

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
        cells, search = make_cells(self.definition), self.definition.search
        self._trials = cells if search is not None else []
        self.halving: Halving | None = None
        if search is not None:
            records = SearchRecords(self.path / "search.jsonl")
            self.halving = Halving(groups_of(self.definition, cells), search.factor, records)

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
        """All cells, with the values that the sweep has chosen so far, or the steps that the search has."""
        if self.halving is not None:
            self.halving.records.reload()
            found = self.halving.next_of_cells()
            after = ((cell, found[cell.name]) for cell in self._trials)
            return [replace(cell, until=one.until, is_pending=one.waits, stopped=one.stopped) for cell, one in after]
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
        if self.definition.search is not None:
            record["search"] = self._rules()
        write_atomically(self.record_path, json.dumps(record, indent=1) + "\n")

    def check(self, *, extend: bool = False) -> None:
        """Raise `UserError` if the directory holds another study or an unreadable record."""
        record = self._recorded()
        if record is None:
            return
        recorded, now = record["cells"], self._digests()
        rules, before = self._rules(), record.get("search", {})
        if bool(before) != bool(rules):
            # Its runs end at rungs, or have no scores.
            raise UserError(
                f"{self.path} holds a study with{'' if before else 'out'} [search], and {self.definition.path} has "
                f"{'one' if rules else 'none'}; restore the file, or use another directory with --dir"
            )
        # A group that is new has no rule yet.
        if others := [key for key, value in rules.items() if before.get(key, value) != value]:
            raise UserError(
                f"{self.path} holds a search with {others[0]} = {json.dumps(before[others[0]])}, by which it has "
                f"chosen so far; restore it in {self.definition.path}, or use another directory with --dir"
            )
        gone = [name for name in recorded if name not in now]
        changed = [name for name, digest in recorded.items() if now.get(name, digest) != digest]
        added = [name for name in now if name not in recorded]
        if gone or changed:
            what = [f"without {_names(gone)}"] * bool(gone) + [f"with another {_names(changed)}"] * bool(changed)
            raise UserError(
                f"{self.path} holds another study than {self.definition.path}, which is {' and '.join(what)}; "
                "restore the axes and the base, or use another directory with --dir"
            )
        if more := self._cells_of_trials(recorded):
            raise UserError(
                f"{self.path} holds a search whose trials would have more cells: {_names(more)}, and it has decided "
                f"without them; restore the seeds in {self.definition.path}, or use another directory with --dir"
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
        if (score := self.score(cell)) is not None and not math.isfinite(score.loss):
            return False
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
            "searched": None if cell.trial is None else cell.trial.values,
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

    def score(self, cell: Cell) -> RungScore | None:
        """The recorded loss of a trial at the step `until`; None: it has none, or the study has no search."""
        if self.halving is None or cell.until is None:
            return None
        return self.halving.records.scores.get((cell.name, cell.until))

    def add_score(self, cell: Cell) -> None:
        """Record the loss of a trial if its run has reached the step `until` or diverged; under `study_lock`."""
        run, step = self.run(cell), cell.until
        if self.halving is None or step is None or self.score(cell) is not None or not run.config.exists():
            return
        if run.is_finished(cell.job):
            # Raises where it is a run of another configuration.
            run.changes(cell.config)
            loss = self._loss(cell, step)
            reason = "" if math.isfinite(loss) else f"the loss is not finite at step {step}"
        elif (fault := gave_up(run)) is not None:
            loss, reason = math.inf, fault
        else:
            return
        self.halving.records.add_score(RungScore(cell=cell.name, step=step, loss=loss, reason=reason))

    def decide(self) -> Iterator[Decision]:
        """Make and record the decisions of a search that its scores allow; under `study_lock`."""
        if self.halving is not None:
            yield from self.halving.decide()

    def _loss(self, cell: Cell, step: int) -> float:
        search = self.definition.search
        assert search is not None
        if search.validation is not None:
            return validation_loss(self.run(cell), search.validation, step=step)
        smoothing = self.definition.about.smoothing
        return training_loss(self.run(cell), cell.config.step_tokens, step=step, smoothing=smoothing)

    def curve(self, cell: Cell, *, from_run: bool = False) -> RunCurve | None:
        """The curve of `cell`, finished or in progress; None before its first step."""
        if not from_run and self.finished_record(cell) is not None:
            return read_curve(self.path / "cells" / f"{cell.name}.csv")
        return run_curve(
            self.run(cell), self.counts(cell), cell.config.step_tokens, smoothing=self.definition.about.smoothing
        )

    def _rules(self) -> dict[str, Any]:
        """Keys that decide what a search chooses, beside those of its cells; {} without a search."""
        search = self.definition.search
        if search is None:
            return {}
        rules = {f"search.{key}": value for key, value in search.rules().items()}
        rules |= {"study.smoothing": None if search.validation else self.definition.about.smoothing}
        if (name := search.validation) is not None:
            # Resuming a run may change it, and no digest has it.
            configs = {cell.name: cell.config for cell in self._trials}
            for group in self._groups:
                measured = configs[next(iter(group.cells.values()))[0]].data.validation[name]
                rules[f"{group.name}: data.validation.{name}"] = measured.model_dump(mode="json")
        return rules

    @property
    def _groups(self) -> Sequence[TrialGroup]:
        return () if self.halving is None else self.halving.groups

    def _cells_of_trials(self, recorded: Container[str]) -> list[str]:
        """Cells that are not `recorded`, of trials that are, such as those of another seed."""
        trials = [alike for group in self._groups for alike in group.cells.values()]
        known = [alike for alike in trials if any(name in recorded for name in alike)]
        return [name for alike in known for name in alike if name not in recorded]

    def _digests(self) -> dict[str, str]:
        return {cell.name: cell.digest for cell in make_cells(self.definition)}

    def _recorded(self) -> dict[str, Any] | None:
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
        assert isinstance(value, dict)
        if not isinstance(value.get("search", {}), dict):
            raise UserError(f"{self.record_path}: not the record of a study; restore it")
        return value


def _names(names: Sequence[str]) -> str:
    more = len(names) - _MOST_SHOWN
    return ", ".join(names[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")

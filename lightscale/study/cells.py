"""The cells of a study: every combination of its axes that no rule skips, each an ordinary run."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightscale.config.files import load_tables
from lightscale.config.layout import check_mixers
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.runs.run_directory import HARMLESS_KEYS, is_named
from lightscale.study.definition import Axis, AxisValue, CellRule, Definition, SweepSection, table_of, value_name

MOST_CELLS = 10_000
_MOST_SHOWN = 40

Part = Literal["main", "sweep"]
Combination = tuple[AxisValue, ...]
Choice = tuple[str, ...]
"""Names of the values of the axes in sweep.per, in order."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a study."""

    name: str
    part: Part
    """main: a cell of the study itself; sweep: a run that helps to choose a value."""
    values: Mapping[str, str]
    """Names of its values, by axis."""
    config: RunConfig
    choice: Choice | None = None
    """Its choice of the sweep; None: the study has no sweep."""
    tried: float | None = None
    """The value tried by a run of the sweep."""
    is_pending: bool = False
    """Whether the choice of the sweep is pending; `config` then has the middle value."""

    @property
    def architecture(self) -> str:
        """Its mixers, which group laws and pictures."""
        return "+".join(dict.fromkeys(self.config.model.layers))

    @property
    def digest(self) -> str:
        """sha256 of the run's identity: its configuration without keys that may change on a resume.

        Defaults are skipped too: a later version may have more keys.
        """
        chosen = self.config.model_dump(mode="json", exclude_defaults=True)
        kept = {key: value for key, value in _leaves(chosen) if not is_named(key, HARMLESS_KEYS)}
        return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def make_cells(definition: Definition, chosen: Mapping[Choice, float] | None = None) -> list[Cell]:
    """The cells of the sweep, then the others. `chosen`: the values chosen by the sweep so far.

    Raises UserError with the reason for every cell that cannot run, for duplicate names, and if the rules skip all
    cells.
    """
    size = sum(1 for _ in itertools.islice(_combinations(definition.axes), MOST_CELLS + 1))
    if size > MOST_CELLS:
        raise UserError(f"{definition.path}: axes: more than {MOST_CELLS:,} combinations; use fewer values")
    faults: list[str] = []
    cells: list[Cell] = []
    for make in (_sweep_cells(definition), _main_cells(definition, chosen or {})):
        for name, tables, more in make:
            try:
                config = load_tables(tables, definition.path)
                check_mixers(config.model, config.parallel)
                cells.append(Cell(name=name, config=config, **more))
            except UserError as error:
                faults += [f"{name}: {line}" for line in str(error).splitlines()]
    faults += _twice(cells)
    if faults:
        shown = faults[:_MOST_SHOWN] + [f"and {len(faults) - _MOST_SHOWN} more"] * (len(faults) > _MOST_SHOWN)
        raise UserError(f"{definition.path}: these cells cannot run:\n" + "\n".join(shown))
    if not any(cell.part == "main" for cell in cells):
        raise UserError(f"{definition.path}: the rules skip all {size} cells; remove one of them")
    return cells


_Made = tuple[str, list[tuple[str, dict[str, Any]]], dict[str, Any]]


def _main_cells(definition: Definition, chosen: Mapping[Choice, float]) -> Iterator[_Made]:
    sweep = definition.sweep
    for combination in _combinations(definition.axes):
        rules = _rules(definition, combination)
        if any(rule.skip is not None for rule in rules):
            continue
        tables = _tables(definition, combination, rules)
        more: dict[str, Any] = {"part": "main", "values": _values(definition, combination)}
        if sweep is not None:
            choice = _choice(sweep, more["values"])
            value = chosen.get(choice)
            more |= {"choice": choice, "is_pending": value is None}
            used = sweep.values[len(sweep.values) // 2] if value is None else value
            tables.append((f"{definition.path} [sweep]", table_of(sweep.key, used)))
        yield _name(definition.axes, combination) or definition.name, tables, more


def _sweep_cells(definition: Definition) -> Iterator[_Made]:
    sweep = definition.sweep
    if sweep is None:
        return
    axes = [
        axis if axis.name in sweep.per else Axis(name=axis.name, values=(_at(axis, sweep),)) for axis in definition.axes
    ]
    for combination in _combinations(axes):
        rules = _rules(definition, combination)
        if any(rule.skip is not None for rule in rules):
            continue
        values = _values(definition, combination)
        for tried in sweep.values:
            tables = [
                *_tables(definition, combination, rules),
                (f"{definition.path} [sweep.set]", sweep.set),
                (f"{definition.path} [sweep]", table_of(sweep.key, tried)),
            ]
            parts = ["sweep", _name(axes, combination), value_name(sweep.key, float(tried))]
            yield (
                "-".join(filter(None, parts)),
                tables,
                {"part": "sweep", "values": values, "choice": _choice(sweep, values), "tried": float(tried)},
            )


def _at(axis: Axis, sweep: SweepSection) -> AxisValue:
    found = axis.value(sweep.at[axis.name]) if axis.name in sweep.at else axis.values[0]
    assert found is not None, "checked with the definition"
    return found


def _combinations(axes: Sequence[Axis]) -> Iterator[Combination]:
    return itertools.product(*(axis.values for axis in axes))


def _values(definition: Definition, combination: Combination) -> dict[str, str]:
    return {axis.name: value.name for axis, value in zip(definition.axes, combination, strict=True)}


def _choice(sweep: SweepSection, values: Mapping[str, str]) -> Choice:
    return tuple(values[name] for name in sweep.per)


def _name(axes: Sequence[Axis], combination: Combination) -> str:
    """By what varies: axes of one value are not in it."""
    return "-".join(value.name for axis, value in zip(axes, combination, strict=True) if len(axis.values) > 1)


def _rules(definition: Definition, combination: Combination) -> list[CellRule]:
    written = {axis.name: value.written for axis, value in zip(definition.axes, combination, strict=True)}

    def applies(rule: CellRule) -> bool:
        return all(
            written[name] in wanted if isinstance(wanted, list) else written[name] == wanted
            for name, wanted in rule.when.items()
        )

    return [rule for rule in definition.rules if applies(rule)]


def _tables(
    definition: Definition, combination: Combination, rules: Sequence[CellRule]
) -> list[tuple[str, dict[str, Any]]]:
    tables = [(f"{definition.path} [base]", definition.base)]
    for axis, value in zip(definition.axes, combination, strict=True):
        tables.append((f"{definition.path} axes.{axis.name}.{value.name}", value.table))
    return [*tables, *((f"{definition.path} [[rules]]", rule.set) for rule in rules if rule.set is not None)]


def _twice(cells: Sequence[Cell]) -> Iterator[str]:
    names: dict[str, Cell] = {}
    runs: dict[tuple[str, ...], Cell] = {}
    for cell in cells:
        if (other := names.setdefault(cell.name, cell)) is not cell:
            yield f"{cell.name}: two cells have this name: {_shown(other)} and {_shown(cell)}; rename a value"
            continue
        # Paths of stores may change on a resume and are not in the digest, but an axis may be the data.
        run = cell.digest, *map(str, cell.config.data.store_paths.values())
        if cell.part == "main" and (other := runs.setdefault(run, cell)) is not cell:
            yield f"{cell.name}: the same run as {other.name}; remove the axis or value without effect"


def _shown(cell: Cell) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in cell.values.items())


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value

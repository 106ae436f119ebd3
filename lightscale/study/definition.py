"""The format of STUDY.toml: a base configuration, axes, rules, a sweep or a search, and the fit of laws.

[base]                              shared by all cells, as in a run's file
extends = ["recipe/stdlib"]

[axes]                              cells are all combinations of the values
"train.seed" = [0, 1]               a key of the configuration and its values

[axes.architecture.tnl]             or named values with their keys, as in a run's file
extends = "arch/tnl"

[[rules]]                           for the cells of these values
when = { architecture = "tnl", seed = [0] }
set.model.num_layers = 25           or skip = "why"
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from lightscale.config.fields import shown_value
from lightscale.config.files import mistakes
from lightscale.config.section import Fraction, Section
from lightscale.config.shipped import STUDIES, study_names
from lightscale.config.text import path_fault
from lightscale.config.toml import read_toml
from lightscale.errors import UserError, shortened
from lightscale.study.search.section import ParameterSection, SearchSection, search_faults

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+]*")
_VALUE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_KEY = re.compile(r"[a-z_]+(\.[A-Za-z0-9_]+)+")
_MOST_VALUES = 1000

Scalar = bool | int | float | str
_Table = dict[str, Any]


class AboutSection(Section):
    """[study]: description of the study, and smoothing of curves."""

    about: str = ""
    """Description in one sentence, for the report."""
    smoothing: Annotated[float, Field(gt=1, le=10)] = 1.1
    """The loss at D is read from a line through log loss over log D, fitted from D / smoothing to D · smoothing."""


class FitSection(Section):
    """[fit]: the data for the fits of laws."""

    skip: Fraction = 0.02
    """Share of a run's tokens, from its start, to skip; the warm-up is always skipped."""
    draws: Annotated[int, Field(ge=2, le=100_000)] = 200
    """Number of draws of the bootstrap."""


class CellRule(Section):
    """[[rules]]: exceptions for some cells."""

    when: Annotated[dict[str, Scalar | list[Scalar]], Field(min_length=1)]
    """The cells concerned: one or several values of one or several axes."""
    set: _Table | None = None
    """Keys that override the values of the axes."""
    skip: str | None = None
    """The reason to leave out these cells."""


class SweepSection(Section):
    """[sweep]: small runs that choose one key's value for the cells."""

    key: str
    """The key, such as "optimizer.lr"."""
    values: Annotated[list[float | int], Field(min_length=2, max_length=100)]
    """Values to try, ascending."""
    per: list[str] = Field(default=[])
    """Axes; the sweep chooses a value for each combination of their values."""
    at: dict[str, Scalar] = Field(default={})
    """Values of the other axes during the sweep."""
    set: _Table = Field(default={})
    """Keys that differ in the sweep's runs, such as fewer tokens."""


class _File(Section):
    study: AboutSection = AboutSection()
    base: _Table = Field(default={})
    axes: Annotated[dict[str, Any], Field(max_length=20)] = Field(default={})
    rules: list[CellRule] = Field(default=[], max_length=_MOST_VALUES)
    sweep: SweepSection | None = None
    search: SearchSection | None = None
    fit: FitSection = FitSection()
    launch: _Table = Field(default={})
    """[launch] as in a run's file, for schedulers."""


@dataclass(frozen=True, kw_only=True)
class AxisValue:
    """One value of an axis."""

    name: str
    """Name in the names of cells."""
    written: Scalar
    """Name in rules."""
    table: _Table
    """Keys that it sets."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What varies."""

    name: str
    values: tuple[AxisValue, ...]

    def value(self, written: Scalar) -> AxisValue | None:
        """The value of this name, or None."""
        return next((one for one in self.values if one.written == written), None)

    @property
    def is_of_seeds(self) -> bool:
        """Whether its values differ in nothing but the seed."""
        return all(value.table.keys() == {"train"} and value.table["train"].keys() == {"seed"} for value in self.values)


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A study as defined by its file."""

    path: Path
    about: AboutSection
    base: _Table
    axes: tuple[Axis, ...]
    rules: tuple[CellRule, ...]
    sweep: SweepSection | None
    search: SearchSection | None
    fit: FitSection

    @property
    def name(self) -> str:
        """Name of the study: the stem of its file."""
        return self.path.stem

    def axis(self, name: str) -> Axis | None:
        """The axis of this name, or None."""
        return next((axis for axis in self.axes if axis.name == name), None)


def find_study(given: Path) -> Path:
    """The file that STUDY names: a path, or a shipped study, with or without `.toml`."""
    if fault := path_fault(str(given)):
        raise UserError(f'STUDY "{shortened(str(given))}": {fault}')
    name = str(given).removesuffix(".toml")
    if not given.is_file() and name in study_names():
        return STUDIES / f"{name}.toml"
    return given


def read_definition(given: Path) -> Definition:
    """Read the study in `given`. Raises `UserError` with a line per mistake: file, key, value and remedy."""
    path = find_study(given)
    try:
        table = read_toml(path, what="a study file")
    except OSError as error:
        raise UserError(
            f"cannot read the study {path}: {error.strerror}; shipped studies: {', '.join(study_names())}"
        ) from None
    try:
        file = _File.model_validate(table)
    except ValidationError as error:
        raise UserError(mistakes(error, lambda item: _explain(path, item))) from None
    axes = tuple(_axis(path, name, values) for name, values in file.axes.items())
    definition = Definition(
        path=path,
        about=file.study,
        base=file.base,
        axes=axes,
        rules=tuple(file.rules),
        sweep=file.sweep,
        search=file.search,
        fit=file.fit,
    )
    checks = _name_faults, _rule_faults, _sweep_faults, _search_faults
    if faults := [fault for check in checks for fault in check(definition)]:
        raise UserError("\n".join(f"{path}: {fault}" for fault in faults))
    return definition


def table_of(key: str, value: Any) -> dict[str, Any]:
    """ "optimizer.lr", 1 -> {"optimizer": {"lr": 1}}"""
    for part in reversed(key.split(".")):
        value = {part: value}
    table: dict[str, Any] = value
    return table


def value_name(key: str, value: Scalar) -> str:
    """The value in names of cells: "lr0.001" for optimizer.lr; a text stays itself."""
    if isinstance(value, str):
        return value
    text = str(value).lower()
    # Shorter, where it is the same number.
    if isinstance(value, float) and float(f"{value:g}") == value:
        text = f"{value:g}"
    return f"{key.rpartition('.')[2]}{text}"


def _axis(path: Path, name: str, values: Any) -> Axis:
    where = f"{path}: axes.{shortened(name)}"
    if isinstance(values, list):
        if not _KEY.fullmatch(name):
            raise UserError(f'{where}: a list needs a key of the configuration, such as "optimizer.lr" = [1e-3]')
        if not 0 < len(values) <= _MOST_VALUES or not all(isinstance(one, Scalar) for one in values):
            raise UserError(f"{where} = {shown_value(values)}: must be a list of 1 to {_MOST_VALUES} numbers or texts")
        short = name.rpartition(".")[2]
        points = [AxisValue(name=value_name(name, one), written=one, table=table_of(name, one)) for one in values]
        return Axis(name=short, values=tuple(points))
    if not isinstance(values, dict) or not 0 < len(values) <= _MOST_VALUES:
        raise UserError(f"{where} = {shown_value(values)}: must be a list of values, or tables [axes.NAME.VALUE]")
    if wrong := [one for one, table in values.items() if not isinstance(table, dict)]:
        raise UserError(f"{where}.{shortened(wrong[0])}: must be a table of keys, as in a run's file")
    return Axis(
        name=name,
        values=tuple(AxisValue(name=one, written=one, table=table) for one, table in values.items()),
    )


def _name_faults(definition: Definition) -> Iterator[str]:
    axes = definition.axes
    names = [axis.name for axis in axes]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"axes: two axes have the name {name}; give one of them named values, [axes.NAME.VALUE]"
    for axis in axes:
        for value in axis.values:
            if not _NAME.fullmatch(value.name):
                yield (
                    f"axes.{axis.name}: the value {shown_value(value.name)} becomes part of a folder's name; "
                    "use letters, digits, '_', '.' and '+'"
                )


def _rule_faults(definition: Definition) -> Iterator[str]:
    for number, rule in enumerate(definition.rules, start=1):
        if (rule.set is None) == (rule.skip is None):
            yield f"rules, number {number}: must have either set (a table) or skip (the reason)"
        for name, wanted in rule.when.items():
            yield from _value_faults(definition, f"rules, number {number}: when", name, wanted)


def _sweep_faults(definition: Definition) -> Iterator[str]:
    sweep = definition.sweep
    if sweep is None:
        return
    if not _KEY.fullmatch(sweep.key):
        yield f"sweep.key = {shown_value(sweep.key)}: must be a key of the configuration, such as optimizer.lr"
    if sorted(set(sweep.values)) != sweep.values:
        yield f"sweep.values = {shown_value(sweep.values)}: must be different numbers in ascending order"
    for name in sweep.per:
        if definition.axis(name) is None:
            yield f"sweep.per: no axis {shortened(name)}; the axes are {_axis_names(definition)}"
    for name, wanted in sweep.at.items():
        yield from _value_faults(definition, "sweep.at", name, wanted)
    for axis in definition.axes:
        if axis.name not in sweep.per and axis.name not in sweep.at and len(axis.values) > 1:
            yield f"sweep: the axis {axis.name} must be in per, or have one of its values in at"


def _search_faults(definition: Definition) -> Iterator[str]:
    search = definition.search
    if search is None:
        if not definition.axes:
            yield "axes is missing; only a study with [search] needs none"
        return
    if definition.sweep is not None:
        yield "[search] and [sweep] exclude each other: a search trains no cells with what it finds; remove either"
    yield from search_faults(search)
    if definition.axis("trial") is not None:
        yield "axes.trial: a search numbers its trials by this name; rename the axis"
    for key, parameter in search.parameters.items():
        if not _KEY.fullmatch(key):
            yield f'search.parameters.{shortened(key)}: must be a key of the configuration in quotes, "optimizer.lr"'
        if any(_sets(value.table, key) for axis in definition.axes for value in axis.values):
            yield f"search.parameters.{key}: an axis sets it too; remove either"
        # Drawn trials are numbered.
        named = parameter.values or () if search.is_grid else ()
        if wrong := [one for one in named if not _VALUE_NAME.fullmatch(value_name(key, one))]:
            yield (
                f"search.parameters.{key}: the value {shown_value(wrong[0])} becomes part of a folder's name; use "
                "letters, digits, '_', '.', '+' and '-'"
            )


def _sets(table: _Table, key: str) -> bool:
    first, _, rest = key.partition(".")
    inner = table.get(first)
    return first in table and (not rest or (isinstance(inner, dict) and _sets(inner, rest)))


def _value_faults(definition: Definition, where: str, name: str, wanted: Scalar | list[Scalar]) -> Iterator[str]:
    axis = definition.axis(name)
    if axis is None:
        yield f"{where}: no axis {shortened(name)}; the axes are {_axis_names(definition)}"
        return
    for one in wanted if isinstance(wanted, list) else [wanted]:
        if axis.value(one) is None:
            there = ", ".join(str(value.written) for value in axis.values)
            yield f"{where}: the axis {name} has no value {shown_value(one)}; it has {there}"


def _axis_names(definition: Definition) -> str:
    return ", ".join(axis.name for axis in definition.axes)


def _explain(path: Path, item: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in item["loc"] if not str(part).startswith(("list[", "union", "constrained")))
    if item["type"] == "missing":
        return f"{path}: {key} is missing"
    if item["type"] == "extra_forbidden":
        return f"{path}: unknown key {shortened(key)}; {_known(item['loc'])}"
    return f"{path}: {shortened(key)} = {shown_value(item['input'])}: {str(item['msg']).lower()}"


def _known(unknown: tuple[int | str, ...]) -> str:
    """The keys that could stand where `unknown` does."""
    section: type[Section] = _File
    if unknown[0] == "search":
        section = SearchSection
        if unknown[1] == "parameters":
            section, key = ParameterSection, str(unknown[2])
            if not _KEY.fullmatch(key):
                return f'write a key of the configuration in quotes, "{shortened(key)}.{shortened(str(unknown[3]))}"'
    return f"the keys are {', '.join(section.model_fields)}"

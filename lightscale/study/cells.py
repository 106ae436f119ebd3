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
from lightscale.study.search.halving import TrialGroup
from lightscale.study.search.section import SearchSection
from lightscale.study.search.trials import SearchTrial, make_trials

MOST_CELLS = 10_000
TRIAL = "trial"
"""Name of a trial among the values of its cell."""
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
    """Whether it waits: for the choice of the sweep, where `config` then has the middle value, or at a rung."""
    trial: SearchTrial | None = None
    """Its values in a search; None: the study has no search."""
    until: int | None = None
    """The step that a trial trains to, at most; None: the last one."""
    stopped: str | None = None
    """Why a trial trains no more before its last step; None: it goes on."""

    @property
    def job(self) -> RunConfig:
        """The configuration to start the run with: `config` until the step `until`."""
        if self.trial is None:
            return self.config
        stop_step = None if self.until == self.config.total_steps else self.until
        return self.config.model_copy(update={"train": self.config.train.model_copy(update={"stop_step": stop_step})})

    @property
    def waits_for_sweep(self) -> bool:
        """Whether the sweep has not chosen its value yet."""
        return self.is_pending and self.trial is None

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
    trials = [] if definition.search is None else _named_trials(definition, definition.search)
    if size * max(1, len(trials)) > MOST_CELLS:
        what = "axes and search" if trials else "axes"
        raise UserError(f"{definition.path}: {what}: more than {MOST_CELLS:,} combinations; use fewer values")
    faults: list[str] = []
    of_trials: dict[str, list[str]] = {}
    cells: list[Cell] = []
    for make in (_sweep_cells(definition), _main_cells(definition, chosen or {}, trials)):
        for name, tables, more in make:
            try:
                config = load_tables(tables, definition.path)
                check_mixers(config.model, config.parallel)
                if config.train.stop_step is not None:
                    raise UserError(f"train.stop_step = {config.train.stop_step}: a cell trains to its end; remove it")
                cells.append(Cell(name=name, config=config, **more))
            except UserError as error:
                for line in str(error).splitlines():
                    # A mistake in a key of the search is one of every trial.
                    if "trial" in more:
                        of_trials.setdefault(line, []).append(name)
                    else:
                        faults.append(f"{name}: {line}")
    for line, names in of_trials.items():
        faults.append(f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: {line}")
    faults += _twice(cells)
    if definition.search is not None and not faults:
        faults += _search_faults(definition, definition.search, cells)
    if faults:
        shown = faults[:_MOST_SHOWN] + [f"and {len(faults) - _MOST_SHOWN} more"] * (len(faults) > _MOST_SHOWN)
        raise UserError(f"{definition.path}: these cells cannot run:\n" + "\n".join(shown))
    if not any(cell.part == "main" for cell in cells):
        raise UserError(f"{definition.path}: the rules skip all {size} cells; remove one of them")
    return cells


_Made = tuple[str, list[tuple[str, dict[str, Any]]], dict[str, Any]]


def _main_cells(
    definition: Definition, chosen: Mapping[Choice, float], trials: Sequence[tuple[str, SearchTrial]]
) -> Iterator[_Made]:
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
        name = _name(definition.axes, combination)
        if definition.search is None:
            yield name or definition.name, tables, more
        for trial_name, trial in trials:
            where = f"{definition.path} [search.parameters]"
            searched = [(where, table_of(key, value)) for key, value in trial.values.items()]
            of_trial = {"values": {**more["values"], TRIAL: trial_name}, "trial": trial}
            yield "-".join(filter(None, [name, trial_name])), [*tables, *searched], more | of_trial


def _named_trials(definition: Definition, search: SearchSection) -> list[tuple[str, SearchTrial]]:
    """Trials by name: those of a grid by their values, so that more values rename none."""
    try:
        trials = make_trials(search)
    except UserError as error:
        raise UserError(f"{definition.path}: {error}") from None
    if not search.is_grid:
        return [(f"trial{trial.number:03}", trial) for trial in trials]
    return [("-".join(value_name(key, value) for key, value in trial.values.items()), trial) for trial in trials]


def groups_of(definition: Definition, cells: Sequence[Cell]) -> list[TrialGroup]:
    """The groups of trials that a search compares: one for each combination of the axes, without those of seeds."""
    assert definition.search is not None
    axes = [axis for axis in definition.axes if len(axis.values) > 1 and not axis.is_of_seeds]
    groups: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells:
        name = "-".join(cell.values[axis.name] for axis in axes) or definition.name
        groups.setdefault(name, {}).setdefault(cell.values[TRIAL], []).append(cell)
    found = []
    for name, trials in groups.items():
        steps = next(iter(trials.values()))[0].config.total_steps
        found.append(
            TrialGroup(
                name=name,
                cells={trial: tuple(cell.name for cell in alike) for trial, alike in trials.items()},
                rungs=(*definition.search.rungs_before(steps), steps),
            )
        )
    return found


def _search_faults(definition: Definition, search: SearchSection, cells: Sequence[Cell]) -> Iterator[str]:
    """What is wrong with a search beside the configurations of its cells; one line for each mistake."""
    by_name = {cell.name: cell for cell in cells}
    for group in groups_of(definition, cells):
        configs = [by_name[name].config for alike in group.cells.values() for name in alike]
        sets = configs[0].data.validation
        if search.validation is not None and (search.validation not in sets or not configs[0].train.validate_every):
            there = ", ".join(sets) or "none"
            yield (
                f"{group.name}: search.metric = {search.metric}: no validation measures it (sets of data.validation: "
                f"{there}; train.validate_every = {configs[0].train.validate_every}); set both"
            )
        if len(lengths := {config.total_steps for config in configs}) > 1:
            yield (
                f"{group.name}: search.parameters: trials have {min(lengths)} to {max(lengths)} steps, which cannot be "
                "compared; make the key that changes the length an axis, or set train.steps"
            )
            continue
        for step in (*search.rungs_before(configs[0].total_steps), configs[0].total_steps):
            if len(tokens := {config.step_tokens.after(step) for config in configs}) > 1:
                yield (
                    f"{group.name}: search.parameters: trials have {min(tokens):,} to {max(tokens):,} tokens after "
                    f"step {step}, which cannot be compared; make the key that changes the batch an axis"
                )
                break
        if search.method != "successive_halving":
            continue
        rungs, total = search.rungs_before(configs[0].total_steps), configs[0].total_steps
        key = "search.min_steps" if search.rungs is None else "search.rungs"
        if not rungs or rungs[-1] >= total:
            late = rungs[-1] if rungs else search.min_steps
            yield f"{group.name}: {key}: step {late} is not before the last one, {total}; use fewer steps"
        elif (warmup := max(config.optimizer.warmup_steps for config in configs)) > rungs[0]:
            yield (
                f"{group.name}: {key}: the rung at step {rungs[0]} is within the warm-up (optimizer.warmup_steps = "
                f"{warmup}), where no trial has its learning rate; use {warmup + 1} or more"
            )


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

"""Reads a run's configuration from TOML files and `section.key=value` overrides; writes its resolved form.

Later values win: first the files that a file `extends`, in the order given, then the file itself, then the overrides.
Tables of files are merged key by key; an override replaces the whole value of its key. The text "none" unsets an
optional field. train.steps and train.tokens replace each other: the one set last wins.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from lightscale.config.fields import (
    MIXER_OPTIONS,
    NAMED,
    field_type_text,
    key_text,
    nearest_key,
    shown_key,
    shown_value,
    table_type,
    toml_value,
    type_text,
)
from lightscale.config.mixers import known_mixers, mixer_options_type
from lightscale.config.schema import RunConfig
from lightscale.config.section import Section
from lightscale.config.shipped import find_base, find_config
from lightscale.config.text import path_fault, text_fault
from lightscale.config.toml import MOST_BYTES, TomlError, parse_toml, read_toml
from lightscale.errors import UserError, shortened

Key = tuple[str, ...]

# Two ways to say one thing: a file or command line that sets one drops what earlier files say of the other.
_ALTERNATIVES: tuple[tuple[Key, Key], ...] = ((("train", "steps"), ("train", "tokens")),)

# The table for `lightscale submit`, which see.
_LAUNCH = "launch"

# A file may be extended by several of those that a file extends, and is then read again.
_MOST_FILES, _MOST_CHAIN = 64, 16
_MOST_MISTAKES = 20


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load the configuration in the file `path`, or the shipped one of that name, with `overrides` (section.key=value).

    Raises UserError with one line per mistake: file or override, key, value and remedy.
    """
    path = find_config(Path(path))
    return _resolve(_Reader().read(path), overrides, path)


def load_tables(tables: Sequence[tuple[str, Mapping[str, Any]]], path: Path) -> RunConfig:
    """Load the configuration of `tables`, merged in their order.

    Each table has the content of a run's file (`extends` too) and, for messages, its place in the file `path`. Raises
    as `load` does.
    """
    reader = _Reader()
    read = (one for origin, table in tables for one in reader.read_table(dict(table), path, origin))
    return _resolve(read, (), path)


def _resolve(tables: Iterable[tuple[str, dict[str, Any]]], overrides: Sequence[str], path: Path) -> RunConfig:
    merged = _Merged()
    for origin, table in tables:
        # What a cluster needs is no part of a run.
        merged.merge({name: value for name, value in table.items() if name != _LAUNCH}, origin)
    merged.override(overrides)
    try:
        return RunConfig.model_validate(merged.table)
    except ValidationError as error:
        raise UserError(mistakes(error, lambda item: _explain(item, merged, path))) from None


def mistakes(error: ValidationError, explain: Callable[[dict[str, Any]], str]) -> str:
    """One line for each mistake that pydantic found, worded by `explain`; beyond a limit, the number of the rest."""
    items: list[dict[str, Any]] = [dict(item) for item in error.errors(include_url=False)]
    # A list of wrong values is one mistake. What a check of ours says can differ where the rest is the same.
    different = {(str(item["loc"]), item["type"], str(item["ctx"]) if "ctx" in item else ""): item for item in items}
    lines = list(dict.fromkeys(map(explain, itertools.islice(different.values(), _MOST_MISTAKES))))
    more = len(different) - _MOST_MISTAKES
    return "\n".join([*lines, f"and {more:,} more"] if more > 0 else lines)


def launch_tables(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file, its table [launch]) for the files that `path` extends, then for `path`; files without one are skipped."""
    for origin, table in _Reader().read(find_config(Path(path))):
        launch = table.get(_LAUNCH)
        if launch is not None:
            if not isinstance(launch, dict):
                raise UserError(f"{origin}: launch = {shown_value(launch)}: must be a table, [launch]")
            yield origin, launch


def to_toml(config: RunConfig) -> str:
    """The resolved form as TOML: every field, in the order of definition. `load` reads it back."""
    return "\n\n".join(_blocks(config.model_dump(mode="json"), ())) + "\n"


def difference(first: RunConfig, second: RunConfig) -> list[tuple[str, Any, Any]]:
    """(key, value in `first`, value in `second`) for each field that differs; None for a missing field."""
    left, right = flat(first), flat(second)
    keys = dict.fromkeys([*left, *right])
    return [(key, left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)]


def flat(config: RunConfig) -> dict[str, Any]:
    """Every field, by its whole key: section.key."""
    return {key_text(key): value for key, value in _leaves(config.model_dump(mode="json"), ())}


class _Merged:
    """The tables laid over one another so far, and where each value came from."""

    def __init__(self) -> None:
        self.table: dict[str, Any] = {}
        self._origins: dict[Key, str] = {}

    def merge(self, table: Mapping[str, Any], origin: str) -> None:
        """Merge a file's table over the present values."""
        # Key by key, with the origin of each: an error then names the file that set the value, not the last one read.
        values = dict(_leaves(table, ()))
        self._drop_alternatives(values)
        for key, value in values.items():
            # An empty table says nothing about what earlier files put there.
            if value != {} or not isinstance(self.value(key), dict):
                self._set(key, value, origin)

    def override(self, overrides: Sequence[str]) -> None:
        """Set the command line's keys."""
        parsed = [(*_parse_override(text), text) for text in overrides]
        self._drop_alternatives({key: value for key, value, _ in parsed})
        for key, value, text in parsed:
            self._set(key, value, f'override "{shortened(text)}"')

    def value(self, key: Key) -> Any:
        """The value at `key`, or None."""
        value: Any = self.table
        for part in key:
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def origin(self, key: Key) -> str | None:
        """The file or override that set `key`, a table around it, or a key inside it."""
        prefixes = [key[:length] for length in range(len(key), 0, -1)]
        inside = [other for other in self._origins if other[: len(key)] == key]
        return next((self._origins[other] for other in [*prefixes, *inside] if other in self._origins), None)

    def _set(self, key: Key, value: Any, origin: str) -> None:
        table = self.table
        for part in key[:-1]:
            if not isinstance(table.get(part), dict):
                table[part] = {}
            table = table[part]
        table[key[-1]] = value
        self._origins[key] = origin

    def _drop_alternatives(self, values: Mapping[Key, Any]) -> None:
        for pair in _ALTERNATIVES:
            for chosen, other in (pair, pair[::-1]):
                if chosen in values and other not in values and isinstance(self.table.get(other[0]), dict):
                    self.table[other[0]].pop(other[1], None)


class _Reader:
    """Reads a file with those that it extends: so many, and so much of them, that none can keep it busy."""

    def __init__(self) -> None:
        self._num_files = self._num_bytes = 0

    def read(self, path: Path, chain: tuple[Path, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
        """(file, its table) for the files that `path` extends, then for `path`. `chain`: the files that lead to it."""
        if path.resolve() in [earlier.resolve() for earlier in chain]:
            raise UserError(f"{chain[0]}: extends is circular: {' -> '.join(map(str, [*chain, path]))}")
        if len(chain) > _MOST_CHAIN:
            raise UserError(
                f"{chain[0]}: a chain of {_MOST_CHAIN} files extend one another, down to {path}; use fewer files"
            )
        yield from self.read_table(self._parse(path, chain), path, str(path), chain)

    def read_table(
        self, table: dict[str, Any], path: Path, origin: str, chain: tuple[Path, ...] = ()
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """As `read`, for a `table` inside the file `path`; `origin` is its place, for messages."""
        bases = table.pop("extends", [])
        bases = [bases] if isinstance(bases, str) else bases
        if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
            raise UserError(f"{origin}: extends = {shown_value(bases)}: must be a path or a list of paths")
        for base in bases:
            if fault := path_fault(base):
                raise UserError(f"{origin}: extends = {shown_value(base)}: {fault}")
            yield from self.read(find_base(base, path), (*chain, path))
        yield origin, table

    def _parse(self, path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
        self._num_files += 1
        if self._num_files > _MOST_FILES:
            raise UserError(
                f"{chain[0]}: extends reads more than {_MOST_FILES} files (a file extended twice counts twice); "
                f"use fewer files (at {path})"
            )
        try:
            table = read_toml(path, what="a configuration file")
            self._num_bytes += path.stat().st_size
        except OSError as error:
            context = f'{chain[-1]}: extends "{path}": ' if chain else ""
            shown = shortened(str(path))
            raise UserError(f"{context}cannot read the configuration file {shown}: {error.strerror}") from None
        if self._num_bytes > MOST_BYTES:
            raise UserError(f"{chain[0]}: the file and all that it extends exceed {MOST_BYTES:,} bytes (at {path})")
        return table


def _parse_override(text: str) -> tuple[Key, Any]:
    """'model.hidden_size=64' -> (("model", "hidden_size"), 64). A value that is not TOML is text."""
    if fault := text_fault(text):
        raise UserError(f'override "{shortened(text)}": {fault}')
    name, equals, value = text.partition("=")
    try:
        key = [] if not equals else list(_leaves(parse_toml(f"{name} = 0"), ()))
    except TomlError:
        key = []
    if len(key) != 1 or len(key[0][0]) < 2:
        raise UserError(f'override "{shortened(text)}": must be section.key=value, such as train.steps=100')
    try:
        parsed = parse_toml(f"value = {value}")
    except TomlError:
        parsed = {}
    return key[0][0], parsed["value"] if list(parsed) == ["value"] else value


def _explain(error: dict[str, Any], merged: _Merged, path: Path) -> str:
    """One line for one of pydantic's errors."""
    key, type_name = _locate(error["loc"])
    origin, value = merged.origin(key) or path, merged.value(key)
    if error["type"] == "value_error":
        # A check of a section names its keys itself, one of a field or of a mixer's options only says what is wrong.
        where = path if len(key) <= 1 else f"{origin}: {shown_key(key)}"
        given = "" if len(key) <= 1 or value is None else f" = {shown_value(value)}"
        return f"{where}{given}: {shortened(str(error['ctx']['error']), 1000)}"
    if error["type"] == "extra_forbidden":
        return f"{origin}: unknown key {shown_key(key)}; {nearest_key(key)}"
    if value is None and len(key) == 1:
        return f"{origin}: the section [{shown_key(key)}] is missing; it needs {', '.join(_required(key[0]))}"
    if value is None:
        return f"{origin}: {shown_key(key)} is missing; it must be {type_name}"
    return f"{origin}: {shown_key(key)} = {shown_value(value)}: must be {type_name}"


def _locate(location: Sequence[int | str]) -> tuple[Key, str]:
    """The key that pydantic's `location` lies in, and what the key takes.

    Beyond the key, a location continues with indices into lists and with the members of unions.
    """
    key: list[str] = []
    section: type[BaseModel] | None = RunConfig
    expected = "a table"
    # Types decide: what pydantic adds behind the key can look like a key.
    parts = iter(map(str, location))
    for part in parts:
        if section is None:
            break
        key.append(part)
        field = section.model_fields.get(part)
        if field is None:
            break
        expected = field_type_text(field)
        section, _ = table_type(field.annotation)
        if tuple(key) in NAMED and (name := next(parts, None)) is not None:
            # In the place of a key stands the name that decides the type.
            names, class_of = NAMED[tuple(key)]
            section = class_of(name).options if name in names else None
            continue
        if get_origin(field.annotation) is dict and (name := next(parts, None)) is not None:
            key.append(name)
            expected = type_text(get_args(field.annotation)[1])
            if tuple(key[:-1]) == MIXER_OPTIONS:
                section = (mixer_options_type(name) or Section) if name in known_mixers() else None
    return tuple(key), expected


def _required(section: str) -> list[str]:
    inner, _ = table_type(RunConfig.model_fields[section].annotation)
    assert inner is not None, section
    return [name for name, field in inner.model_fields.items() if field.is_required()]


def _blocks(table: Mapping[str, Any], path: Key) -> Iterator[str]:
    """`table` as TOML: a block for its own values, then those of the tables in it."""
    inner = {name: value for name, value in table.items() if isinstance(value, dict) and value}
    own = {name: value for name, value in table.items() if name not in inner}
    if own:
        lines = [f"{key_text([name])} = {toml_value(value)}" for name, value in own.items()]
        yield "\n".join([f"[{key_text(path)}]", *lines])
    for name, value in inner.items():
        yield from _blocks(value, (*path, name))


def _leaves(table: Mapping[str, Any], path: Key) -> Iterator[tuple[Key, Any]]:
    """(key, value) of everything in `table` that is no table, and of its empty tables."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value

"""The fields of a configuration as text, for `lightscale config --describe` and error messages."""

import difflib
import itertools
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lightscale.config.mixers import MIXERS, known_mixers, mixer_options_type
from lightscale.config.optimizers import OPTIMIZERS, optimizer_class
from lightscale.config.schema import RunConfig
from lightscale.config.tasks import TASKS, task_class
from lightscale.errors import shortened

SECTIONS: tuple[str, ...] = tuple(RunConfig.model_fields)
MIXER_OPTIONS = ("model", "mixer_options")
"""The table with one table per mixer, each of the mixer's own type."""
NAMED: dict[tuple[str, ...], tuple[Mapping[str, str], Callable[[object], Any]]] = {
    ("task",): (TASKS, task_class),
    ("optimizer",): (OPTIMIZERS, optimizer_class),
}
"""Tables of which the key ``name`` decides the type: the known names, and the class by name."""

# Keys that have another name now.
_RENAMED = {
    ("model", "width"): ("model", "hidden_size"),
    ("model", "glu_width"): ("model", "intermediate_size"),
    ("model", "gate_rank"): (*MIXER_OPTIONS, "NAME", "gate_rank"),
    ("metrics", "tensorboard"): ("metrics", "sinks"),
}
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    Path: "a path",
    type(None): '"none"',
}
# Python writes no whole number of more than some thousand digits. Values in a list or table are shown up to so many.
_MOST_BITS, _MOST_SHOWN = 256, 20
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True, kw_only=True)
class FieldDescription:
    """One field: dotted key, type, default as TOML, meaning.

    NAME in a key stands for a name that the user chooses. Options of mixers have the mixer's name in their key.
    """

    key: str
    type: str
    default: str
    description: str


def describe_fields() -> list[FieldDescription]:
    """Every field of a run's configuration, in the order of the sections, with the options of all known mixers.

    Raises UserError when another package's mixer cannot be loaded.
    """
    return list(_describe(RunConfig, (), known_mixers()))


def _describe(
    section: type[BaseModel], path: tuple[str, ...], mixers: Iterable[str] = ()
) -> Iterator[FieldDescription]:
    """The fields of `section`, which stands at `path`, with the options of `mixers`."""
    for name, field in section.model_fields.items():
        if (*path, name) == MIXER_OPTIONS:
            for mixer in mixers:
                options = mixer_options_type(mixer)
                yield from () if options is None else _describe(options, (*MIXER_OPTIONS, mixer))
            continue
        inner, named = table_type(field.annotation)
        if (*path, name) in NAMED:
            assert inner is not None
            yield from _describe(inner, (*path, name))
            yield from _own_keys(inner, (*path, name))
            continue
        if inner is not None:
            if field.default is None:
                yield _described((*path, name), field)
            yield from _describe(inner, (*path, name, "NAME") if named else (*path, name), mixers)
            continue
        yield _described((*path, name), field)


def _own_keys(shared: type[BaseModel], table: tuple[str, ...]) -> Iterator[FieldDescription]:
    """The fields of ``table`` beyond the ``shared`` ones: of which names, where they are the same of several."""
    names, class_of = NAMED[table]
    known = {one.key for one in _describe(shared, table)}
    owners: dict[FieldDescription, list[str]] = {}
    for name in names:
        for one in _describe(class_of(name).options, table):
            if one.key not in known:
                owners.setdefault(one, []).append(name)
    for one, having in owners.items():
        said = f"Of {' and '.join(having)}: {one.description[:1].lower()}{one.description[1:]}"
        yield replace(one, description=said)


def _described(path: tuple[str, ...], field: FieldInfo) -> FieldDescription:
    return FieldDescription(
        key=key_text(path),
        type=field_type_text(field),
        default="(required)" if field.is_required() else toml_value(field.default),
        description=" ".join((field.description or "").split()),
    )


def table_type(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The type of the table that a field holds (None: no table), and whether it holds one table per NAME.

    The table may be optional: ``X | None``.
    """
    named = get_origin(annotation) is dict
    inner = get_args(annotation)[1] if named else annotation
    if get_origin(inner) in (Union, types.UnionType):
        inner = next((one for one in get_args(inner) if table_type(one)[0] is not None), inner)
    return (inner, named) if isinstance(inner, type) and issubclass(inner, BaseModel) else (None, False)


def field_type_text(field: FieldInfo) -> str:
    """The field's type in words, such as "a whole number >= 1"."""
    return type_text(field.annotation, field.metadata)


def type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The type `annotation` with pydantic's `metadata`, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        base, *notes = arguments
        inner = [note.metadata if isinstance(note, FieldInfo) else [note] for note in notes]
        return type_text(base, [*metadata, *itertools.chain(*inner)])
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(argument) for argument in arguments)
    if origin is Literal:
        return " or ".join(f'"{argument}"' for argument in arguments)
    if origin is dict:
        return f"a table of NAME = {type_text(arguments[1])}"
    if origin is list:
        return f"a list of {type_text(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {type_text(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a table"
    bounds = [
        f"{sign} {_bound_text(getattr(item, name))}"
        for item in metadata
        for name, sign in _BOUNDS.items()
        if getattr(item, name, None) is not None
    ]
    return f"{_TYPE_NAMES[annotation]} {' and '.join(bounds)}".strip()


def _bound_text(bound: float) -> str:
    """As TOML takes it, and people can read it: 1_000_000."""
    return f"{bound:_}" if isinstance(bound, int) else f"{bound:g}"


def nearest_key(path: tuple[str, ...]) -> str:
    """Advice on the unknown key `path`: its new name, the nearest key, or all keys of its table."""
    if path in _RENAMED:
        return f"use its new name, {key_text(_RENAMED[path])}"
    if len(path) == 1:
        near = difflib.get_close_matches(path[0], [*SECTIONS, "extends"], n=1)
        return f"did you mean {near[0]}?" if near else f"the sections are {', '.join(SECTIONS)}"
    if path[:2] == MIXER_OPTIONS:
        return _nearest_option(path)
    if path[:1] in NAMED and len(path) == 2:
        names, class_of = NAMED[path[:1]]
        if having := [name for name in names if path[1] in class_of(name).options.model_fields]:
            return f"it needs {path[0]}.name = {' or '.join(map(_quoted, having))}"
    by_name: dict[str, list[str]] = {}
    # Of built-in mixers only: another package that is broken has nothing to do with this mistake.
    for field in _describe(RunConfig, (), MIXERS):
        by_name.setdefault(field.key.rpartition(".")[2], []).append(field.key)
    table = ".".join(name if depth < 2 else "NAME" for depth, name in enumerate(path[:-1]))
    siblings = [name for name, keys in by_name.items() if f"{table}.{name}" in keys]
    if path[-1] in by_name:
        return f"did you mean {by_name[path[-1]][0]}?"
    if near := difflib.get_close_matches(path[-1], siblings, n=1):
        return f"did you mean {key_text((*path[:-1], near[0]))}?"
    if near := difflib.get_close_matches(path[-1], by_name, n=1):
        return f"did you mean {by_name[near[0]][0]}?"
    return f"[{key_text(path[:-1])}] has {', '.join(siblings)}"


def _nearest_option(path: tuple[str, ...]) -> str:
    """Advice on an unknown option of a mixer, model.mixer_options.NAME.OPTION, or key of an option that is a table."""
    mixer, *tables = path[2:-1]
    options = mixer_options_type(mixer)
    for name in tables:
        field = None if options is None else options.model_fields.get(name)
        options = None if field is None else table_type(field.annotation)[0]
    names = [] if options is None else list(options.model_fields)
    if not names:
        return f"the mixer {mixer} has no options"
    if near := difflib.get_close_matches(path[-1], names, n=1):
        return f"did you mean {key_text((*path[:-1], near[0]))}?"
    if tables:
        return f"[{key_text(path[:-1])}] has {', '.join(names)}"
    return f"the mixer {mixer} has the options {', '.join(names)}"


def key_text(path: Sequence[str]) -> str:
    """The dotted key, with parts quoted where TOML requires it."""
    return ".".join(part if _BARE_KEY.fullmatch(part) else _quoted(part) for part in path)


def shown_key(path: Sequence[str]) -> str:
    """`key_text` for a message, shortened."""
    return shortened(key_text([shortened(part, 100) for part in path[:8]]))


def shown_value(value: object) -> str:
    """`toml_value` for a message, shortened; accepts any value, even a number with thousands of digits."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a number of {value.bit_length():,} bits"
    if isinstance(value, (list, tuple)) and len(value) > _MOST_SHOWN:
        return f"[{', '.join(map(shown_value, value[:3]))}, … ({len(value):,} values)]"
    if isinstance(value, (list, tuple)):
        return shortened(f"[{', '.join(map(shown_value, value))}]")
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{shown_key([name])} = {shown_value(value[name])}" for name in [*value][:_MOST_SHOWN])
        return shortened(f"{{{pairs}{', …' if len(value) > _MOST_SHOWN else ''}}}")
    return shortened(toml_value(value))


def toml_value(value: object) -> str:
    """`value` in TOML; None, which TOML lacks, becomes the text "none"."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{key_text([name])} = {toml_value(item)}" for name, item in value.items())
        return f"{{{pairs}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return _quoted(str(value))


def _quoted(text: str) -> str:
    # TOML's basic strings take JSON's escapes, and want DEL escaped too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

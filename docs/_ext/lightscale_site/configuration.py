"""Every key of a configuration: what it takes, its default and meaning, and shipped files that set another value."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from lightscale.config import shipped
from lightscale.config.fields import FieldDescription, describe_fields, key_text, toml_value
from lightscale.config.schema import RunConfig
from lightscale.config.toml import read_toml
from lightscale_site.markdown import code, directive, plain, sentence

_PAPER = re.compile(r"arXiv (\d{4}\.\d{5})")
_IN_A_LINE = 3
# By name: what a shipped file sets, by whole keys, and the papers that it names.
Files = dict[str, tuple[dict[str, Any], list[str]]]


def configuration_text() -> str:
    """A section for each table, an entry for each key."""
    tables: dict[str, list[FieldDescription]] = defaultdict(list)
    for described in describe_fields():
        tables[described.key.rpartition(".")[0]].append(described)
    files = _shipped_files()
    return "\n".join(text for table, keys in tables.items() for text in (_heading(table), *_entries(keys, files)))


def _heading(table: str) -> str:
    """Of a section of a run, or of a table below one."""
    if "." in table:
        return f"### \\[{table}\\]\n"
    annotation: Any = RunConfig.model_fields[table].annotation
    summary = (annotation.__doc__ or "").partition(": ")[2].partition("\n")[0]
    return f"## \\[{table}\\]\n\n{sentence(summary)}"


def _entries(keys: list[FieldDescription], files: Files) -> Iterator[str]:
    """One for each; several optimizers may have a key of one name, and links lead to the first."""
    seen: set[str] = set()
    for one in keys:
        yield _entry(one, files, again=one.key in seen)
        seen.add(one.key)


def _entry(described: FieldDescription, files: Files, *, again: bool) -> str:
    default = "required" if described.default == "(required)" else code(described.default)
    options = [("type", plain(described.type)), ("default", default), ("no-contents-entry", "")]
    options += [("no-index", "")] if again else []
    body = "\n\n".join([plain(described.description), *(() if again else _uses(described, files))])
    return directive("confval", described.key, body, options)


def _uses(described: FieldDescription, files: Files) -> Iterator[str]:
    """The values of shipped files, with the papers that these name; many values fold away."""
    pattern = re.compile(re.escape(described.key).replace("NAME", "[^.]+"))
    by_value: dict[str, list[str]] = defaultdict(list)
    for name, (table, papers) in files.items():
        for key, value in table.items():
            text = toml_value(value)
            if pattern.fullmatch(key) and text != described.default:
                of = f" (arXiv {', '.join(papers)})" if papers else ""
                by_value[text].append(f"{code(name)}{of}")
    if by_value:
        parts = [f"{code(value)} in {', '.join(names)}" for value, names in by_value.items()]
        if len(parts) <= _IN_A_LINE:
            yield f"Shipped with: {'; '.join(parts)}."
        else:
            yield f"<details><summary>Shipped with {len(parts)} other values</summary>"
            yield "\n".join(f"- {part}" for part in parts)
            yield "</details>"


def _shipped_files() -> Files:
    """What each shipped file sets itself, by whole keys, and the papers that it names."""
    names = [*(name for part in shipped.part_names().values() for name in part), *shipped.run_names()]
    found: Files = {}
    for name in names:
        path = shipped.shipped_file(name)
        papers = list(dict.fromkeys(_PAPER.findall(path.read_text(encoding="utf-8"))))
        found[name] = (dict(_leaves(read_toml(path, what="configuration"), ())), papers)
    return found


def _leaves(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))
        else:
            yield key_text((*path, name)), value

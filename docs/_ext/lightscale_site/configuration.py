"""Every key of a configuration: what it takes, its default, its meaning, and the shipped files that set another value."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from lightscale_site.markdown import code, directive, plain

from lightscale.config import shipped
from lightscale.config.fields import FieldDescription, describe_fields, key_text, toml_value
from lightscale.config.schema import RunConfig
from lightscale.config.toml import read_toml

_PAPER = re.compile(r"arXiv (\d{4}\.\d{5})")
# Of one key: files that set it, each with its value.
Uses = dict[str, dict[str, str]]


def configuration_text() -> str:
    """A section for each table, an entry for each key."""
    tables: dict[str, list[FieldDescription]] = defaultdict(list)
    for described in describe_fields():
        tables[described.key.rpartition(".")[0]].append(described)
    files = _shipped_files()
    return "\n".join(
        text for table, keys in tables.items() for text in (_heading(table), *(_entry(one, files) for one in keys))
    )


def _heading(table: str) -> str:
    """Of a section of a run, or of a table below one."""
    summary = ""
    if "." not in table:
        annotation: Any = RunConfig.model_fields[table].annotation
        summary = plain((annotation.__doc__ or "").partition(": ")[2].partition("\n")[0])
    level = "##" if "." not in table else "###"
    return f"{level} [{table}]\n\n{summary[:1].upper()}{summary[1:]}\n".replace(f"{level} [", f"{level} \\[").replace(
        f"{table}]", f"{table}\\]"
    )


def _entry(described: FieldDescription, files: Mapping[str, tuple[dict[str, Any], list[str]]]) -> str:
    options = [("type", described.type), ("default", "required" if described.default == "(required)" else code(described.default))]
    return directive("confval", described.key, "\n\n".join([plain(described.description), *_uses(described, files)]), options)


def _uses(described: FieldDescription, files: Mapping[str, tuple[dict[str, Any], list[str]]]) -> Iterator[str]:
    """One line that lists the values of shipped files, with the papers that these name."""
    pattern = re.compile(re.escape(described.key).replace("NAME", "[^.]+"))
    by_value: dict[str, list[str]] = defaultdict(list)
    for name, (table, papers) in files.items():
        for key, value in table.items():
            text = toml_value(value)
            if pattern.fullmatch(key) and text != described.default:
                of = f" (arXiv {', '.join(papers)})" if papers else ""
                by_value[text].append(f"{code(name)}{of}")
    if by_value:
        parts = (f"{code(value)} in {', '.join(names)}" for value, names in by_value.items())
        yield f"Shipped with: {'; '.join(parts)}."


def _shipped_files() -> dict[str, tuple[dict[str, Any], list[str]]]:
    """What each shipped file sets itself, by whole keys, and the papers that it names."""
    names = [*(name for part in shipped.part_names().values() for name in part), *shipped.run_names()]
    found = {}
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

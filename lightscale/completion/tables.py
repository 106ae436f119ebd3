"""The words that can follow on a command line, as the shell function `tables` that `complete.sh` reads."""

import argparse
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from lightscale.cli import COMMANDS, load_command
from lightscale.config import shipped
from lightscale.config.arguments import CONFIG, OVERRIDE, RUN
from lightscale.config.fields import NAMED, FieldDescription, describe_fields, key_text

# By the words of a metavar: what the shell completes as files.
_FILES = {"FILE", "PATH", "STORE", "CORPUS.toml", "STUDY.toml"}
_CHOICES = re.compile(r'"[^"]+"( or "[^"]+")*')


@dataclass(kw_only=True)
class Tables:
    """Lines by table and key; see `complete.sh`."""

    lines: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def add(self, table: str, key: str, word: str, text: str = "") -> None:
        """Add a line to `table` at `key`."""
        text = " ".join(text.split())
        self.lines.setdefault((table, key), []).append(f"{word}\t{text}" if text else word)

    def function(self) -> str:
        """All tables as one function of sh."""
        quote = shlex.quote
        cases = [
            f"{quote(f'{table} {key}')}) printf '%s\\n' {' '.join(map(quote, lines))} ;;"
            for (table, key), lines in self.lines.items()
        ]
        return "\n".join(["tables() {", 'case "$1 ${2-}" in', *cases, "esac", "}", ""])


def make_tables() -> Tables:
    """The tables of all commands (importing their modules) and of the configuration keys."""
    tables = Tables()
    tables.add("kind", " 0", "COMMAND")
    tables.add("options", "", "--help", "show the commands")
    tables.add("options", "", "--version", "show the version")
    for name, command in COMMANDS.items():
        tables.add("commands", "", name, command.help)
        _add_parser(tables, f" {name}", load_command(name)[1])
    for name in shipped.run_names():
        tables.add("configs", "", name, "shipped configuration")
    for described in describe_fields():
        _add_key(tables, described)
    for table, (names, _) in NAMED.items():
        for name in names:
            tables.add("values", key_text((*table, "name")), name)
    return tables


def _add_parser(tables: Tables, path: str, parser: argparse.ArgumentParser) -> None:
    """The options and positions of the command at `path`, and of the commands below it."""
    position = 0
    for action in parser._actions:
        if action.option_strings:
            for option in action.option_strings:
                tables.add("options", path, option, _help(parser, action))
                # An option without a value has 0 of them.
                if action.nargs != 0:
                    tables.add("kind", f"{path} {option}", _kind(tables, f"{path} {option}", action))
        elif isinstance(action, argparse._SubParsersAction):
            tables.add("kind", f"{path} {position}", "COMMAND")
            for listed in action._choices_actions:
                tables.add("commands", path, listed.dest, listed.help or "")
                _add_parser(tables, f"{path} {listed.dest}", action.choices[listed.dest])
        else:
            where = f"{path} {'*' if action.nargs in ('*', '+') else position}"
            tables.add("kind", where, _kind(tables, where, action))
            position += 1


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def _kind(tables: Tables, where: str, action: argparse.Action) -> str:
    """What completes the value, by its choices or its metavar; `complete.sh` knows these kinds."""
    if action.choices is not None:
        for choice in action.choices:
            tables.add("words", where, str(choice))
        return f"WORDS:{where}"
    metavar = str(action.metavar)
    if metavar == OVERRIDE:
        return "OVERRIDE"
    if metavar in (CONFIG, "KEY") or metavar.startswith(RUN):
        return metavar
    return "FILE" if _FILES & set(metavar.split()) else "NOTHING"


def _add_key(tables: Tables, described: FieldDescription) -> None:
    # NAME is the user's: it goes on from there.
    key, _, named = described.key.partition("NAME")
    key, meaning = (key, "one table per name") if named else (f"{key}=", described.description)
    # Several optimizers may have a key of one name, each with a meaning of its own.
    if key not in (line.partition("\t")[0] for line in tables.lines.get(("keys", ""), [])):
        tables.add("keys", "", key, meaning)
    for value in _values(described.type):
        tables.add("values", described.key, value)


def _values(type_text: str) -> Iterator[str]:
    """The words that a field takes, where there are only some."""
    if type_text == "true or false":
        yield from ("true", "false")
    elif _CHOICES.fullmatch(type_text):
        yield from (word.strip('"') for word in type_text.split(" or "))

"""Pieces of Markdown."""

import re
from collections.abc import Iterable, Sequence

_CODE = re.compile(r"(`[^`]*`)")
_MARKS = re.compile(r"([\\*_<>\[\]|$#~{}])")


def plain(text: str) -> str:
    """Text of a program, where only backticks mean something, on one line."""
    parts = _CODE.split(" ".join(text.split()))
    return "".join(part if part.startswith("`") else _MARKS.sub(r"\\\1", part) for part in parts)


def sentence(text: str) -> str:
    """Text of a program as a paragraph."""
    text = plain(text).strip()
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', ':', '?')) else '.'}\n" if text else ""


def code(text: str) -> str:
    """Text as code in a line."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"


def block(text: str, language: str = "text") -> str:
    """Lines of code."""
    return f"```{language}\n{text.rstrip()}\n```\n"


def directive(name: str, argument: str, body: str, options: Sequence[tuple[str, str]] = ()) -> str:
    """A directive of Sphinx, which may hold others."""
    fence = "`" * (max([3, *(len(run) + 1 for run in re.findall(r"^`{3,}", body, re.MULTILINE))]))
    # Values are YAML.
    head = "".join(f":{key}: {_quoted(value)}".rstrip() + "\n" for key, value in options)
    inside = f"\n{body.rstrip()}\n" if body else ""
    return f"{fence}{{{name}}} {argument}\n{head}{inside}{fence}\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table; columns of `numbers` stand at the right."""
    rules = ("--:" if column in numbers else "---" for column in range(len(head)))
    lines = [head, list(rules), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _quoted(text: str) -> str:
    return f"""'{text.replace("'", "''")}'""" if text else ""

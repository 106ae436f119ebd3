"""The fenced blocks of the documents, and the commands in them."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
# What may stand before a command: a prompt, variables, what starts ranks, a folder.
_BEFORE = r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:(?:mpiexec|mpirun|srun|torchrun|time)(?: -\S+(?: [0-9N]+)?)* )?(?:\S*/)?"
_COMMAND = re.compile(rf"^\s*{_BEFORE}(?:-m )?(lightscale(?: .*)?)$")
# What a reader puts a value for.
_PLACEHOLDERS = {
    "CONFIG": "quickstart",
    "COMMAND": "train",
    "STUDY": "two-cores",
    "N": "1",
    "R": "0",
    "STEP": "100",
    "TIME": "1:00:00",
}


@dataclass(frozen=True)
class Found:
    """A command or a block, and where it stands."""

    page: Path
    line: int
    text: str

    @property
    def place(self) -> str:
        """`docs/how-to/export.md:12`."""
        path = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page
        return f"{path}:{self.line}"


def blocks(page: Path) -> Iterator[tuple[str, Found]]:
    """(language, block) for every fenced block of a page."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        yield match["language"], Found(page, line, textwrap.dedent(match["text"]))


def commands(page: Path) -> Iterator[Found]:
    """Every `lightscale …` line in the fenced blocks of a page, continued lines as one."""
    for language, block in blocks(page):
        if language in ("toml", "python", "text"):
            continue
        lines = block.text.split("\n")
        number = 0
        while number < len(lines):
            first, whole = number, lines[number]
            while whole.endswith("\\") and number + 1 < len(lines):
                number += 1
                whole = whole[:-1] + " " + lines[number].strip()
            number += 1
            if match := _COMMAND.match(whole):
                yield Found(page, block.line + first, match[1])


def words(command: str) -> list[str]:
    """The arguments behind `lightscale`, without comment, pipe and redirection, and with values for placeholders."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    found = []
    for word in list(lexer)[1:]:
        if word and set(word) <= set("|;&<>"):
            break
        name, at, step = word.partition("@")
        found.append(f"{name}@100" if at and step == "STEP" else _PLACEHOLDERS.get(word, word))
    return found

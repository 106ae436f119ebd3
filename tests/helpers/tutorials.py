"""Runs the code of a tutorial as it stands on its page: loaded with runpy, as all of tests/helpers.

What a page is made of, in the order in which it stands there:

    ```bash                 run by bash, in the folder of the page; the first command that fails fails the test
    ```python               run by python; where its first line is `# NAME.py`, written to that file instead
    ```toml, ```yaml        written to the file that its first line names: `# mine.toml`
    ```text                 what the block before it printed; `…` is any text in a line, or, alone, any lines

A comment before a block changes that:

    <!-- not run: REASON -->        a block for the reader alone, and the output below it
    <!-- not compared: REASON -->   of an output: as it was once; another time it is different
    <!-- needs NAME -->             run only where the Python package is installed
    <!-- numbers vary -->           of an output: each number stands for any number
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(
    r"^(?:<!-- (?P<marker>.*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
MARKER = re.compile(r"not (?:run|compared): \S.*|needs (?P<package>\w+)|numbers vary")
COMMENT = re.compile(r"^<!-- (.*?) -->$", re.MULTILINE)
LANGUAGES = ("bash", "python", "toml", "yaml", "text")
FILE = re.compile(r"# (?P<name>[\w./-]+\.[a-z]+)\n")
NUMBER = r"[+-]?\d[\d.,:]*(?:e[+-]?\d+)?"
ANY_NUMBER = re.compile(rf"{NUMBER}[kMG]?\b")
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Block:
    """One fence of a page; `line` is that of its first line of code."""

    page: Path
    line: int
    language: str
    text: str
    marker: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that the block is written to."""
        named = FILE.match(self.text) if self.language in ("python", "toml", "yaml") else None
        return None if named is None else named["name"]

    @property
    def is_left_out(self) -> bool:
        package = MARKER.fullmatch(self.marker)
        needed = None if package is None else package["package"]
        return self.marker.startswith("not ") or bool(needed and importlib.util.find_spec(needed) is None)


def blocks(page: Path) -> list[Block]:
    """All of a page; what is neither code nor output, and what no rule above covers, is refused."""
    source = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(source):
        line = source.count("\n", 0, match.start("text")) + 1
        block = Block(page, line, match["language"], match["text"], match["marker"] or "")
        assert block.language in LANGUAGES, f"{block.place}: no rule for ```{block.language}"
        assert not block.marker or MARKER.fullmatch(block.marker), f"{block.place}: no such marker: {block.marker}"
        if block.language in ("toml", "yaml") and not block.is_left_out:
            assert block.file is not None, f"{block.place}: its first line names no file"
        found.append(block)
    assert source.count("```") == 2 * len(found), f"{page.name}: a fence is not closed"
    used = sum(bool(block.marker) for block in found)
    assert len(COMMENT.findall(source)) == used, f"{page.name}: a comment stands before no block"
    return found


def run_page(page: Path, folder: Path, environment: dict[str, str]) -> list[str]:
    """Run a page in `folder`; returns the places of the blocks that were run. AssertionError names page and line."""
    own = Path(sys.executable).parent
    environment = {**environment, "PATH": f"{own}{os.pathsep}{environment['PATH']}"}
    printed: str | None = None
    last, ran = "", []
    for block in blocks(page):
        if block.language == "text":
            if printed is not None and not block.is_left_out:
                different = difference(block.text, printed, numbers_vary=block.marker == "numbers vary")
                assert different is None, f"{block.place}: {different}\n--- of {last}\n--- printed:\n{printed}"
            continue
        printed, last = None, f"the block at {block.place}:\n{block.text}"
        if block.is_left_out:
            continue
        if block.file is not None:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
            continue
        printed = run_block(block, folder, environment)
        ran.append(block.place)
    return ran


def run_block(block: Block, folder: Path, environment: dict[str, str]) -> str:
    """What it prints, to either stream."""
    programs = {"bash": ["bash", "-euo", "pipefail", "-c", block.text], "python": [sys.executable, "-c", block.text]}
    assert block.language in programs, f"{block.place}: ```{block.language} cannot be run"
    with subprocess.Popen(
        programs[block.language],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=TIMEOUT_S)
        except BaseException as error:
            # Launchers end their ranks when they are asked to; killed, they would leave them.
            os.killpg(process.pid, signal.SIGTERM)
            printed, _ = process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise AssertionError(
                    f"{block.place}: not done after {TIMEOUT_S:.0f} s:\n{block.text}--- printed:\n{printed}"
                ) from None
            raise
    code = process.returncode
    assert code == 0, f"{block.place}: exit code {code} of\n{block.text}--- printed:\n{printed}"
    return printed


def difference(expected: str, printed: str, *, numbers_vary: bool = False) -> str | None:
    """None where `printed` is as expected, or else the first expected line that is not found in its place."""
    wanted = [" ".join(line.split()) for line in expected.splitlines()]
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    # The lines that may be next: several behind a `…`, as any of those that are alike may be meant.
    ends = {0}
    for want in wanted:
        if want == "…":
            ends = set(range(min(ends), len(lines) + 1))
            continue
        pattern = line_pattern(want, numbers_vary=numbers_vary)
        found = {end + 1 for end in ends if end < len(lines) and pattern.fullmatch(lines[end])}
        if not found:
            (*others, last) = sorted(ends)
            return f"expected {want!r}" + ("" if others or last == len(lines) else f", not {lines[last]!r}")
        ends = found
    return None if len(lines) in ends else f"not expected: {lines[max(ends)]!r}"


def line_pattern(want: str, *, numbers_vary: bool) -> re.Pattern[str]:
    parts = []
    for part in want.split("…"):
        if not numbers_vary:
            parts.append(re.escape(part))
            continue
        between = ANY_NUMBER.split(part)
        parts.append(rf"(?:{NUMBER}[kMG]?)".join(re.escape(text) for text in between))
    return re.compile(".*".join(parts))

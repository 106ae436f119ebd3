"""Names and contents of data with control characters, changes of direction and markup, printed by commands."""

import contextlib
import io
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from lightscale.cli import main
from lightscale.config.files import to_toml
from lightscale.config.schema import RunConfig
from lightscale.errors import printable
from lightscale.output import streams
from lightscale.output.html import Column, Html
from lightscale.output.streams import LogStream, TerminalStream, take_over_output
from lightscale.runs.run_directory import RunDirectory

# Sets the title of the window, clears the screen, rings; an 8-bit control sequence; overrides and isolates; markup.
EVIL = "a\x1b]0;b\x07\x1b[2J\x9b31m\u202e\u2066[red]c<b>&\"'"
SPELLED = r"a\x1b]0;b\x07\x1b[2J\x9b31m\u202e\u2066[red]c<b>&" + "\"'"
TEXT = f"one {EVIL} two three four. " * 40


class Terminal(io.StringIO):
    """What a terminal would be given."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Terminal:
    """In which rich writes no control sequences of its own."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("TERM", "dumb"), ("NO_COLOR", "1"), ("COLUMNS", "1000")):
        monkeypatch.setenv(name, value)
    return Terminal()


@pytest.fixture
def on_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Replaces the streams until the end of the test. Not a fixture's part: pytest sets its own before each test."""

    def on_terminal() -> None:
        monkeypatch.setattr("sys.stdout", terminal)
        monkeypatch.setattr("sys.stderr", terminal)

    return on_terminal


def check(screen: Terminal) -> str:
    shown = screen.getvalue()
    obeyed = {one for one in shown if one not in "\n\t" and unicodedata.category(one) in ("Cc", "Cf")}
    assert not obeyed, shown
    screen.seek(0)
    screen.truncate()
    return shown


def test_data_commands(terminal: Terminal, on_terminal: Callable[[], None]) -> None:
    on_terminal()
    Path(f"{EVIL}.jsonl").write_text("".join(json.dumps({"text": TEXT, "id": EVIL}) + "\n" for _ in range(30)))
    commands = [
        ["data", "prepare", f"{EVIL}.jsonl", "--out", "store", "--vocab-size", "300", "--validation", "0.1"],
        ["data", "inspect", "store"],
        ["data", "verify", "store"],
    ]
    for words in commands:
        assert main(words) == 0, check(terminal)
        check(terminal)
    # A file that is not there, and a document that is none.
    Path(f"{EVIL}.jsonl").write_text(EVIL)
    assert main(["data", "prepare", f"{EVIL}.jsonl", "--out", "other", "--vocab-size", "300"]) != 0
    assert SPELLED[:20] in check(terminal)


def test_commands_about_runs(
    terminal: Terminal, on_terminal: Callable[[], None], tiny_config: Callable[..., RunConfig]
) -> None:
    on_terminal()
    run = RunDirectory(f"runs/{EVIL}")
    run.path.mkdir(parents=True)
    run.config.write_text(to_toml(tiny_config(f"data.store={EVIL}")))
    logs = run.logs / "launch-0001"
    logs.mkdir(parents=True)
    (logs / "rank-0.out").write_text(f"{EVIL}\n")
    run.write_status("stopped", reason=EVIL, step=1, tokens=1)
    for words in (["runs", "runs"], ["runs", str(run.path)], ["logs", str(run.path)], ["config", str(run.config)]):
        assert main(words) == 0, check(terminal)
        assert "1b]0;b" in check(terminal), words
    for words in (["checkpoint", "list", str(run.path)], ["generate", str(run.path)], ["train", EVIL], [EVIL]):
        with contextlib.suppress(SystemExit):
            main(words)
        assert r"\x1b]0;b" in terminal.getvalue(), words
        check(terminal)


def test_programs_get_texts_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe or file is no terminal."""
    run = RunDirectory(tmp_path / "run")
    (logs := run.logs / "launch-0001").mkdir(parents=True)
    (logs / "rank-0.out").write_text(f"{EVIL}\n")
    run.config.write_text("")
    assert main(["logs", str(run.path)]) == 0
    assert EVIL in capsys.readouterr().out


def test_streams_of_launchers(terminal: Terminal, on_terminal: Callable[[], None]) -> None:
    """What the launcher shows of its ranks goes through a stream that never blocks, and is spelled out too."""
    on_terminal()
    streams.spell_out_on_terminals()
    streams.spell_out_on_terminals()
    take_over_output()
    out = streams.sys.stdout
    assert isinstance(out, TerminalStream)
    assert isinstance(out.rich_proxied_file, LogStream)
    out.write(f"{EVIL}\n")
    out.writelines([EVIL])
    assert check(terminal) == f"{SPELLED}\n{SPELLED}"
    # Of our own, for the cursor.
    streams.obeyed(out).write("\x1b[?25h")
    assert terminal.getvalue() == "\x1b[?25h"


def test_printable() -> None:
    assert printable(EVIL) == SPELLED
    for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x7F, 0xDC80):
        assert printable(f"a{chr(code)}").isascii()
    # Persian, and a family.
    for harmless in ("می\u200cخواهم", "\U0001f468\u200d\U0001f469", "a\tb\n", "é日本"):
        assert printable(harmless) == harmless


def test_pages() -> None:
    page = Html(EVIL)
    page.heading(EVIL)
    page.paragraph(EVIL)
    page.lines(EVIL, EVIL)
    page.table([EVIL], [[EVIL]])
    page.picture("<svg></svg>", EVIL)
    page.chart([Column(height=1, tick=EVIL, title=EVIL)], EVIL)
    text = page.text()
    assert not {one for one in text if one != "\n" and unicodedata.category(one) in ("Cc", "Cf")}
    assert "<b>" not in text
    escaped = SPELLED.replace("&", "&amp;").replace("<b>", "&lt;b&gt;").replace('"', "&quot;").replace("'", "&#x27;")
    # Twice in the head, and once for each text above.
    assert text.count(escaped) == 12

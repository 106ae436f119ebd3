"""Plain tables and views on terminals."""

import io

import pytest
from rich.console import Console

from lightscale.output import terminal
from lightscale.output.terminal import plain_console, plain_table, watch


def test_words_stand_left_numbers_right_and_notes_alone_are_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    table = plain_table(["name"], ["number"], has_notes=True, title="[title]", caption="caption")
    table.add_row("a", "1", "one two three four five")
    plain_console(least_width=28).print(table)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines == [
        "[title]",
        " name   number",
        " " + "─" * 26,
        " a           1   one two",
        "                 three four",
        "                 five",
        "caption",
    ]


def test_a_view_is_drawn_until_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, waited = [], []

    def view() -> str:
        drawn.append("abc"[len(drawn)] * 9)
        return drawn[-1]

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(terminal.time, "sleep", sleep)
    screen = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        watch(view, 2.5, Console(file=screen, force_terminal=True, width=40))
    assert waited == [2.5] * 3
    assert [screen.getvalue().count(text) for text in drawn] == [1, 1, 2], "the last one stays"

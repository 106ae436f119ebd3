"""Progress on a terminal is one line; in a log every report is one; bars that are not kept leave nothing."""

import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightscale.output.progress import TERMINAL_VARIABLE, start_progress


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The other end of the launcher's terminal."""
    ours, theirs = pty.openpty()
    monkeypatch.setenv(TERMINAL_VARIABLE, os.ttyname(theirs))
    monkeypatch.setenv("COLUMNS", "100")
    yield ours
    os.close(ours)
    os.close(theirs)


def test_in_a_log_every_report_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The terminal of a launcher in another container.
    monkeypatch.setenv(TERMINAL_VARIABLE, str(tmp_path / "gone"))
    progress = start_progress("step", 3, done=1)
    assert not progress.is_live
    progress.show(2, "loss 1.5")
    progress.say("validation")
    progress.close()
    assert capsys.readouterr() == ("", "step 2/3  loss 1.5\nvalidation\n")


@pytest.mark.parametrize("is_kept", [True, False])
def test_on_the_launchers_terminal_one_line_is_redrawn(
    is_kept: bool, terminal: int, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = start_progress("step", 3, done=1, is_kept=is_kept)
    assert progress.is_live
    progress.show(2, "loss [1.5]")
    progress.say("validation [0]")
    progress.show(3, "loss 1.25")
    progress.close()
    shown = ""
    while select.select([terminal], [], [], 0.5)[0]:
        shown += os.read(terminal, 100_000).decode()
    assert "step 2/3" in shown and "loss [1.5]" in shown and "validation [0]\r\n" in shown
    behind = shown[shown.rindex("loss 1.25") :]
    # Erased: the cursor goes up to the line, and the line is cleared.
    assert ("\x1b[1A\x1b[2K" in behind) is not is_kept
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("options", "shown"), [("", True), ("counts='files'", True), ("is_kept=False", False)])
def test_bars_that_are_not_kept_are_for_terminals_alone(options: str, shown: bool) -> None:
    program = (
        "from lightscale.output.progress import progress_bars\n"
        f"with progress_bars({options}) as show:\n"
        "    show('reading', 1, 4)\n"
        "    show('reading', 4, 4)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == ""
    assert ("reading" in ended.stderr) is shown
    assert ("4/4 bytes" in ended.stderr) is (options == "")


def test_without_a_step_nothing_is_printed() -> None:
    program = "from lightscale.output.progress import progress_bars\nwith progress_bars():\n    pass\n"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")

"""``tools/figures/draw_explanations.py``: the kept figures are those that it draws, and pages show all of them."""

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = ROOT / "docs" / "explanation"
TOOL = ROOT / "tools" / "figures" / "draw_explanations.py"


def test_kept_figures_are_those_that_the_command_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(TOOL), str(tmp_path)])
    runpy.run_path(str(TOOL), run_name="__main__")
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (PAGES / "figures").iterdir()}
    assert sorted(drawn) == sorted(kept)
    assert [name for name in drawn if drawn[name] != kept[name]] == [], "python tools/figures/draw_explanations.py"


def test_pages_show_every_figure_and_no_other() -> None:
    shown = {
        name for page in PAGES.glob("*.md") for name in re.findall(r"!\[[^]]+\]\(figures/([^)]+)\)", page.read_text())
    }
    assert shown == {path.name for path in (PAGES / "figures").iterdir()}

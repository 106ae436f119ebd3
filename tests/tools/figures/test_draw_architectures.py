"""``tools/figures/draw_architectures.py``: every architecture has a page, and every page its figure."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = ROOT / "docs" / "reference" / "architectures"
OF_NO_ARCHITECTURE = {"index", "differences"}


def test_every_page_has_its_figure_and_every_figure_its_page() -> None:
    pages = {path.stem for path in PAGES.glob("*.md")} - OF_NO_ARCHITECTURE
    drawn = runpy.run_path(str(ROOT / "tools" / "figures" / "draw_architectures.py"))["FIGURES"]
    assert set(drawn) == {path.stem for path in (PAGES / "figures").iterdir()} == pages

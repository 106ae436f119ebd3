"""The tutorials' pages are run as they stand there, each in an empty folder."""

import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "tutorials"
tutorials = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "helpers" / "tutorials.py")))

# tests/launch/slurm runs this one on its cluster.
ON_SLURM = "slurm"
NAMES = sorted(path.stem for path in PAGES.glob("*.md") if path.stem not in ("index", ON_SLURM))


# Ten minutes of training alone.
SLOW = ("answers",)
PARAMETERS = [pytest.param(name, marks=[pytest.mark.soak] if name in SLOW else []) for name in NAMES]


@pytest.mark.long
@pytest.mark.timeout(1800)  # trainings of several processes, on a machine that may be busy
@pytest.mark.parametrize("name", PARAMETERS)
def test_page(name: str, tmp_path: Path) -> None:
    # Packages go to a folder of the test, and not to the environment that the tests run in.
    site = tmp_path / "site"
    environment = {**os.environ, "PIP_TARGET": str(site), "PYTHONPATH": str(site), "XDG_CONFIG_HOME": str(tmp_path)}
    folder = tmp_path / "empty"
    folder.mkdir()
    assert tutorials.run_page(PAGES / f"{name}.md", folder, environment)


def test_the_index_lists_every_page() -> None:
    text = (PAGES / "index.md").read_text(encoding="utf-8")
    toctree = text.split("```{toctree}")[1].split("```")[0].split()
    listed = [word for word in toctree if not word.startswith(":")]
    assert sorted(word for word in listed if (PAGES / f"{word}.md").exists()) == sorted([*NAMES, ON_SLURM])


# ----- the runner itself ---------------------------------------------------------------------------------------------


def write_page(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def run(folder: Path, text: str) -> list[str]:
    places: list[str] = tutorials.run_page(write_page(folder, text), folder, dict(os.environ))
    return places


def test_blocks_are_run_in_order_and_their_output_is_compared(tmp_path: Path) -> None:
    page = (
        "```toml\n# some/file.toml\nkey = 1\n```\n\n```bash\ncat some/file.toml\nseq 1.5 3; echo end\n```\n\n"
        "<!-- numbers vary -->\n```text\n…\nkey = 1\n…\n7.25\nend\n```\n\n"
        "<!-- not run: it fails -->\n```bash\nfalse\n```\n"
        "```text\nanything\n```\n\n<!-- needs no_such_package -->\n```bash\nfalse\n```\n\n"
        "```python\nprint(open('some/file.toml').read())\n```\n\n```text\n# some/file…\n…\n```\n"
    )
    assert run(tmp_path, page) == ["page.md:7", "page.md:34"]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("one\n\n```bash\necho yes\nfalse\necho no\n```\n", "page.md:4: exit code 1 of\necho yes\nfalse\n"),
        ("```bash\necho 3\n```\n```text\n4\n```\n", "page.md:5: expected '4', not '3'\n--- of the block at page.md:2"),
        ("```bash\necho 3; echo 4\n```\n```text\n3\n```\n", "page.md:5: not expected: '4'"),
        ("```bash\necho 3; echo 5\n```\n```text\n…\n4\n```\n", "page.md:5: expected '4'\n"),
        ("```bash\necho a 3\n```\n<!-- numbers vary -->\n```text\nb 4\n```\n", "page.md:6: expected 'b 4', not 'a 3'"),
        ("```toml\nkey = 1\n```\n", "page.md:2: its first line names no file"),
        ("```bsh\necho\n```\n", "page.md:2: no rule for ```bsh"),
        ("<!-- not run -->\n```bash\necho\n```\n", "page.md:3: no such marker: not run"),
        ("<!-- numbers vary -->\n\n```bash\necho\n```\n", "page.md: a comment stands before no block"),
        ("```bash\necho\n", "page.md: a fence is not closed"),
    ],
)
def test_what_is_wrong_is_named_with_page_and_line(page: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failed:
        run(tmp_path, page)
    assert message in str(failed.value)


def test_a_block_that_does_not_end_is_named_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tutorials.run_page.__globals__, "TIMEOUT_S", 0.5)
    with pytest.raises(AssertionError) as failed:
        run(tmp_path, "```bash\ntrap 'echo asked to end; exit 3' TERM\nsleep 60 & wait\n```\n")
    assert str(failed.value).startswith("page.md:2: not done after")
    assert "asked to end" in str(failed.value)

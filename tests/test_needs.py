"""What becomes of tests that need what a machine lacks: skipped and named, and run again once it is there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.fixture(scope="module")
def shelf(needs):
    needs("sh", "shelf-maker")

def test_shelf(shelf): pass
def test_shelf_again(shelf): pass
def test_both(needs): needs("shelf-maker", "no-such-daemon", "no-such-thing")
def test_nothing(): pass
def test_skipped(): pytest.skip("for another reason")
"""


@pytest.fixture
def folder(tmp_path: Path, root: Path) -> Path:
    """Tests beside our `conftest.py`, and a folder of programs."""
    ours = (root / "tests" / "conftest.py").read_text()
    assert "PACKAGES = {\n" in ours
    named = ours.replace("PACKAGES = {\n", 'PACKAGES = {\n    "no-such-daemon": "daemons",\n')
    (tmp_path / "conftest.py").write_text(named)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_shelf.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("def test_x(): pass\n")
    (tmp_path / "bin").mkdir()
    return tmp_path


def pytest_says(folder: Path, *words: str) -> tuple[int, list[str]]:
    """Exit code and lines of pytest in the folder."""
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "pytest", "-rs", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    return done.returncode, done.stdout.splitlines()


def assert_the_lacking_are_named(folder: Path, *words: str) -> None:
    code, lines = pytest_says(folder, *words)
    assert code == 0
    at = next(number for number, line in enumerate(lines) if " skipped for want of " in line)
    assert lines[at + 1 : at + 4] == ["daemons: 1 test", "no-such-thing: 1 test", "shelf-maker: 3 tests"]
    assert any(line.endswith("Missing: shelf-maker (Debian: apt-get install shelf-maker)") for line in lines)
    assert "2 passed, 4 skipped in" in lines[-1]


@pytest.mark.long
def test_workers_name_what_is_lacking(folder: Path) -> None:
    assert_the_lacking_are_named(folder, "--numprocesses", "2")


@pytest.mark.long
def test_what_is_lacking_is_named_and_tests_run_once_it_is_there(folder: Path) -> None:
    assert_the_lacking_are_named(folder)
    maker = folder / "bin" / "shelf-maker"
    maker.touch(mode=0o755)
    # A file that has none of those tests is not imported.
    (folder / "test_other.py").write_text("raise SystemExit('imported')")
    code, lines = pytest_says(folder, "--skipped")
    assert code == 0
    assert "2 passed, 1 skipped" in lines[-1]
    # Only what is still lacking is left, and nothing when that is gone too.
    (folder / "test_shelf.py").write_text(TESTS.replace("test_both", "test_another"))
    assert pytest_says(folder, "--skipped")[0] == 5


def test_nothing_is_kept_without_a_cache(folder: Path) -> None:
    """As a visit to a GPU runs its tests (`tools/gpu_visit.py`)."""
    assert pytest_says(folder, "-p", "no:cacheprovider", "test_other.py")[0] == 0

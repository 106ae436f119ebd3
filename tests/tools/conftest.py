"""What the tests of tools share."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def tools_path() -> Iterator[Path]:
    """The folder of the tools, on the path as for a script in it; processes that a test starts inherit that."""
    folder = Path(__file__).resolve().parents[2] / "tools"
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def bench_in_process(tools_path: Path) -> ModuleType:
    """bench.py without the seconds of a start."""
    import bench

    return bench

"""What the tests of `tools/texts` share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def texts_path(tools_path: Path) -> Iterator[Path]:
    """`tools/texts`, on the path as for a script in it; processes that a test starts inherit that."""
    folder = tools_path / "texts"
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))

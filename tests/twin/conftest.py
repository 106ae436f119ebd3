"""The twin of this machine; without one its tests are skipped, with what is missing."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def cuda_twin() -> Iterator[ModuleType]:
    """The package of the tools, with a twin installed."""
    folder = str(Path(__file__).resolve().parents[2] / "tools")
    sys.path.insert(0, folder)
    import cuda_twin.computing_cases
    import cuda_twin.null_cases

    if (why := cuda_twin.installation.missing()) is not None:
        sys.path.remove(folder)
        pytest.skip(why)
    yield cuda_twin
    sys.path.remove(folder)

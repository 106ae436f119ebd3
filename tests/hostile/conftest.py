"""The checkpoints that tests of this folder damage and craft."""

import runpy
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HELPER = Path(__file__).parents[1] / "helpers" / "crafted_checkpoints.py"


@pytest.fixture
def traced() -> Iterator[None]:
    """Memory is counted, which makes JSON several times slower."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By contents, "full" and "weights", a ``Victim`` of helpers/crafted_checkpoints.py."""
    # Here, because it imports torch, which most tests of this folder need not wait for.
    crafted = runpy.run_path(str(HELPER))
    victim, write = crafted["Victim"], crafted["write_checkpoint"]
    parent = tmp_path_factory.mktemp("run") / "checkpoints"
    return {contents: victim(write(parent, contents)) for contents in ("full", "weights")}


@pytest.fixture
def victim(victims: dict[str, Any]) -> Iterator[Any]:
    yield victims["full"]
    victims["full"].repair()


@pytest.fixture
def alone(victims: dict[str, Any]) -> Iterator[Any]:
    yield victims["weights"]
    victims["weights"].repair()

"""What the tests of all operators share."""

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lightscale.kernels.common.triton import launch


@pytest.fixture(autouse=True, scope="session")
def faster_interpreter() -> None:
    runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "interpreter.py"))["patch_language_once"]()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Uninitialised tensors are filled with NaN, so that an element that is never written is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def chunks_per_split(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Splits of so many chunks, as on a GPU that has multiprocessors to spare."""
    return lambda chunks: monkeypatch.setattr(launch, "split_chunks", lambda *counts: chunks)

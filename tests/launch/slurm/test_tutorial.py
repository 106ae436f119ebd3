"""The tutorial about SLURM, as it stands on its page."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
tutorials = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "helpers" / "tutorials.py")))


@pytest.fixture
def recovering(cluster: Any) -> Iterator[Any]:
    """The cluster; afterwards no job is left and no node is down."""
    yield cluster
    cluster.client("scancel", "--user=root", "--signal=KILL", "--full", check=False)
    cluster.client("scancel", "--user=root", check=False)
    cluster.recover()


def test_page(recovering: Any, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    environment = {**recovering.environment, "CUDA_VISIBLE_DEVICES": "", "XDG_CONFIG_HOME": str(tmp_path)}
    assert tutorials.run_page(ROOT / "docs" / "tutorials" / "slurm.md", folder, environment)

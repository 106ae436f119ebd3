"""A small share of the bits that tools/damage/flips.py flips in a store: none changes what is opened unnoticed."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

flips = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "tools/damage/flips.py")))
# What a changed bit of them changes is shown to people, or read by nothing.
HARMLESS = {"report.html", "report.json", "tokenizer.json", "zarr.json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flips")


def test_bits_of_a_store(folder: Path) -> None:
    artifact = flips.make_store(folder)
    before = {path: path.read_bytes() for path in artifact.files}
    found = list(flips.flips(artifact, 60, seed=3))
    assert {one["outcome"] for one in found} == {flips.NOTICED, flips.HARMLESS}
    assert {one["file"] for one in found if one["outcome"] == flips.HARMLESS} <= HARMLESS
    assert {path: path.read_bytes() for path in artifact.files} == before


def test_what_is_opened_differently_without_an_error_is_found(folder: Path) -> None:
    path = folder / "number"
    path.write_text("7777")
    artifact = flips.Artifact(name="text", files=(path,), opened=path.read_bytes)
    assert flips.table(flips.flips(artifact, 8, seed=1)) == {"text/number": {flips.UNNOTICED: 8}}

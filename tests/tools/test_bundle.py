"""The bundle has what the named environment lacks, and nothing that it has."""

from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def tool(tools_path: Path) -> ModuleType:
    import bundle

    return bundle


def test_what_is_there_and_its_requirements_stay_out(tool: ModuleType) -> None:
    def one(name: str, *requires: str) -> dict[str, object]:
        return {"metadata": {"name": name, "version": "1.0", "requires_dist": list(requires)}}

    found = [one("torch", "Jinja2", "rich; extra == 'x'"), one("jinja2", "markupsafe"), one("MarkupSafe"), one("rich")]
    assert tool.missing(found, ["torch"]) == ["rich==1.0"]


def test_locks_of_what_is_there_do_not_hold(tool: ModuleType) -> None:
    assert tool.constraints("torch==2.13.0\nzarr==3.1\n", ["torch"]) == "zarr==3.1\n"

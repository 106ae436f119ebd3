"""What is installed, and that the check of it finds faults."""

import importlib.util
import sys
from email.message import Message
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dependencies_tool", ROOT / "tools" / "dependencies.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def installed(tool: ModuleType) -> dict[str, metadata.Distribution]:
    return cast("dict[str, metadata.Distribution]", tool.needed("lightscale", ("dev",)))


def package(version: str = "1.0", **fields: str | list[str]) -> Any:
    data = Message()
    for name, values in fields.items():
        for value in [values] if isinstance(values, str) else values:
            data[name.replace("_", "-")] = value
    return SimpleNamespace(version=version, metadata=data)


def test_all_that_is_needed_is_found(installed: dict[str, metadata.Distribution]) -> None:
    assert {"torch", "megatron-core", "zarr", "sympy", "pytest", "mypy-extensions"} <= installed.keys()
    assert "lightscale" not in installed


@pytest.mark.parametrize(
    ("fields", "licences"),
    [
        ({"License-Expression": "MPL-2.0 AND (Apache-2.0 OR MIT)"}, {"MPL-2.0", "Apache-2.0", "MIT"}),
        ({"Classifier": ["License :: OSI Approved :: BSD License", "Topic :: Text"]}, {"BSD-3-Clause"}),
        ({"License": "Apache 2.0"}, {"Apache-2.0"}),
        ({"License": "mpl-2.0 and MIT"}, {"MPL-2.0", "MIT"}),
        ({"License-Expression": "GPL-3.0-only"}, {"GPL-3.0-only"}),
        ({}, set()),
    ],
)
def test_licences_are_read(tool: ModuleType, fields: dict[str, Any], licences: set[str]) -> None:
    assert tool.licences_of(package(**fields)) == licences


def test_another_licence_or_none_is_a_fault(tool: ModuleType) -> None:
    faults = list(tool.licence_faults({"a": package(License="GPL"), "b": package(), "c": package(License="MIT")}))
    assert len(faults) == 2
    assert faults[0].startswith("a 1.0: licence gpl, which is not allowed")
    assert "has no licence" in faults[1]


def test_versions_outside_a_range_are_faults(
    tool: ModuleType, installed: dict[str, metadata.Distribution], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(tool.range_faults(installed)) == []
    old = {**installed, "zarr": package("2.18")}
    assert any("lightscale needs zarr>=3" in fault and "2.18" in fault for fault in tool.range_faults(old))
    del old["zarr"]
    assert any("not installed" in fault for fault in tool.range_faults(old))


def test_the_lock_file_has_all_packages_and_no_other(
    tool: ModuleType, installed: dict[str, metadata.Distribution]
) -> None:
    locked = tool.read_lock()
    if not locked:
        pytest.skip("the lock file is of another Python or system")
    assert list(tool.lock_faults(installed, locked)) == []
    fault, other = tool.lock_faults(installed, {**{k: v for k, v in locked.items() if k != "zarr"}, "left-pad": "1"})
    assert "lacks zarr" in fault
    assert "left-pad" in other
    # Builds have versions of their own, of which no index but one has each.
    assert "+" not in tool.lock_text(installed)


def test_a_locked_version_for_newer_pythons_is_a_fault(tool: ModuleType) -> None:
    newer, older = (package("1.0", **{"Requires-Python": pythons}) for pythons in (">=3.11.5", ">=3.9,!=3.11.7"))
    (fault,) = tool.lock_faults({"a": newer, "b": older, "c": package("1.0")}, dict.fromkeys("abc", "1.0"))
    assert "has a 1.0, which needs Python >=3.11.5; lightscale runs on 3.11.0" in fault


def test_the_build_of_pytorch_for_gpus_is_no_fault(
    tool: ModuleType, installed: dict[str, metadata.Distribution]
) -> None:
    """What it brings is not in the lock file, and triton, whose version it says itself, can be any there."""
    brought = {"nvidia-cublas": package("13.1"), "cuda-toolkit": package("13.0.3"), "triton": package("3.7.1")}
    locked = tool.read_lock()
    assert locked.keys().isdisjoint(brought)
    assert list(tool.lock_faults({**installed, **brought}, locked)) == []
    assert tool.lock_text({**installed, **brought}) == tool.lock_text(installed)
    of_nvidia = {name: one for name, one in brought.items() if name != "triton"}
    assert list(tool.licence_faults(of_nvidia)) == []

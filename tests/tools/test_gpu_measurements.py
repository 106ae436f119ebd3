"""The measurements of a visit, at small sizes on a CPU; and the idle time of a device by hand."""

import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def tool(tools_path: Path) -> ModuleType:
    import gpu_measurements

    return gpu_measurements


def test_idle_time_by_hand(tool: ModuleType) -> None:
    # Busy from 0 to 12 and from 20 to 30, then from 80 on: 8 and 50 µs of 100 are idle.
    spans = [(20.0, 30.0), (0.0, 10.0), (5.0, 12.0), (80.0, 100.0), (22.0, 25.0)]
    assert tool.idle(spans) == {"idle_share": pytest.approx(0.58), "long_gaps": 1}
    assert tool.idle([]) == {"idle_share": None, "long_gaps": None}


def test_the_environment_names_what_is_there(tool: ModuleType, tmp_path: Path) -> None:
    assert tool.main(["environment", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "environment.json").read_text())
    assert found["failed"] == {} and found["versions"]["torch"] and "card" not in found


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokens are prepared once."""
    return tmp_path_factory.mktemp("visit")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["profile", "run", "losses"])
def test_a_measurement_at_small_sizes(tool: ModuleType, name: str, out: Path) -> None:
    assert tool.main([name, "--small", "--out", str(out)]) == 0
    found = json.loads((out / f"{name}.json").read_text())
    if name == "profile":
        assert found["kernels"] and found["measured"]["planned_memory_bytes"] > 0
    elif name == "run":
        assert found["generated"] and [row["checkpoint_step"] for row in found["saves"]] == [3, 6]
    else:
        assert found["error"] == 0 and all(len(of_device) == 4 for of_device in found["losses"].values())

"""``make gpu-check``: its parts run whatever failed before, it keeps what they found, and its exit code says it all."""

import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
GOOD = {"test": "a::good", "outcome": "passed", "seconds": 1.0, "errors": {"o": 0.001}}
BAD = GOOD | {"test": "a::bad", "outcome": "failed"}
OTHER = {"test": "a::model", "outcome": "passed", "seconds": 1.0}
"""It has no errors of results: only operators' tests do."""
SKIPPED = GOOD | {"test": "a::skipped", "outcome": "skipped"}


@pytest.fixture(scope="module")
def tool(tools_path: Path) -> ModuleType:
    import gpu_check

    return gpu_check


def pytest_part(tool: ModuleType, code: int, *lines: dict[str, Any]) -> Any:
    """Like pytest: writes these lines, and exits with ``code``."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    script = f"import sys; open(sys.argv[1], 'w').write({text!r}); sys.exit({code})"
    return tool.Part(command=(sys.executable, "-c", script, tool.RESULTS))


def benchmark_part(tool: ModuleType, name: str, code: int = 0, **figures: Any) -> Any:
    """Like bench.py: saves these figures."""
    path = tool.saved_as(Path("/tmp"), name, tool.machine()).name
    found = {"verdict": {"missed": []}, "complete": True} | figures
    script = f"import sys; open(sys.argv[1] + '/{path}', 'w').write({json.dumps(found)!r}); sys.exit({code})"
    return tool.Part(command=(sys.executable, "-c", script, tool.FOLDER), benchmark=name)


def check(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, **parts: Any) -> tuple[int, dict[str, Any]]:
    """The exit code and what was saved, of a check of these parts on a machine with a GPU."""
    monkeypatch.setattr(tool, "PARTS", parts)
    monkeypatch.setattr(tool, "check_device", lambda: None)
    code = tool.main(["--save", str(folder), "--limit-s", "30"])
    (saved,) = folder.glob("gpu-check_cpu_*.json")
    assert not list(folder.glob("*.jsonl"))
    return code, json.loads(saved.read_text())["parts"]


def test_a_benchmark_without_a_verdict_fails_alone(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts = {"train": benchmark_part(tool, "train", verdict={}), "models": pytest_part(tool, 0, OTHER)}
    code, found = check(tool, monkeypatch, tmp_path, **parts)
    assert code == 1
    assert found["train"]["missed"] == ["its file has no verdict"]
    assert found["models"]["exit_code"] == 0


def test_everything_well(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = {
        "operators": pytest_part(tool, 0, GOOD, SKIPPED),
        "models": pytest_part(tool, 0, OTHER),
        "train": benchmark_part(tool, "train"),
    }
    code, found = check(tool, monkeypatch, tmp_path, **parts)
    assert code == 0
    assert found["operators"]["tests"] == [GOOD, SKIPPED]
    assert found["models"]["tests"] == [OTHER]
    assert found["train"]["missed"] == []
    assert (tmp_path / found["train"]["saved"]).exists()
    (path,) = tmp_path.glob("gpu-check_cpu_*.md")
    text = path.read_text()
    assert "| operators | ok |" in text and "1 passed<br>0 failed<br>1 skipped" in text
    assert "| `a::good` | 0.001 (o) |" in text


def test_ranks_are_for_nodes_with_several_gpus(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert set(tool.PARTS) - set(tool.possible_parts()) == {"ranks"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert tool.possible_parts() == tool.PARTS


def test_small_adds_to_every_command_and_is_said(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, small = tool.possible_parts(), tool.possible_parts(small=True)
    for name, part in small.items():
        assert part.small
        assert part.command == (*whole[name].command, *part.small)
    monkeypatch.setattr(tool, "PARTS", {"operators": pytest_part(tool, 0, GOOD)})
    monkeypatch.setattr(tool, "check_device", lambda: None)
    assert tool.main(["--save", str(tmp_path), "--small"]) == 0
    (path,) = tmp_path.glob("gpu-check_cpu_*.md")
    text = path.read_text()
    assert f"- sizes: {tool.SMALL}" in text and "- gpus: none" in text
    # On no twin, where figures are not a GPU's.
    assert "Measured by" in text and "twin" not in text


def test_later_parts_run_after_a_failure(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = {
        "operators": pytest_part(tool, 1, GOOD, BAD),
        "kernels": tool.Part(command=(sys.executable, "-c", "raise SystemExit(3)"), benchmark="kernels"),
        "learn": benchmark_part(tool, "learn"),
    }
    code, found = check(tool, monkeypatch, tmp_path, **parts)
    assert code == 1
    assert {name: part["exit_code"] for name, part in found.items()} == {"operators": 1, "kernels": 3, "learn": 0}
    assert found["kernels"]["missed"] == ["nothing was saved"]
    assert [tool.failed(part) for part in found.values()] == [True, True, False]


@pytest.mark.parametrize(
    "part",
    [
        lambda tool: pytest_part(tool, 0, SKIPPED),
        lambda tool: pytest_part(tool, 0),
        lambda tool: benchmark_part(tool, "train", verdict={"missed": ["MFU at 8192: 0.490, target 0.5"]}),
        lambda tool: benchmark_part(tool, "train", complete=False),
    ],
    ids=["all skipped", "no tests", "target missed", "cut off"],
)
def test_what_has_shown_nothing_or_missed_its_target_fails(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: Any
) -> None:
    code, found = check(tool, monkeypatch, tmp_path, only=part(tool))
    assert code == 1
    assert found["only"]["exit_code"] == 0


def test_a_file_of_an_earlier_run_does_not_count(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    earlier = tool.saved_as(tmp_path, "learn", tool.machine())
    earlier.write_text(json.dumps({"verdict": {"missed": []}, "complete": True}))
    time.sleep(0.05)
    idle = tool.Part(command=(sys.executable, "-c", ""), benchmark="learn")
    code, found = check(tool, monkeypatch, tmp_path, learn=idle)
    assert (code, found["learn"]["missed"]) == (1, ["nothing was saved"])


def test_a_part_that_hangs_ends_with_its_limit(tool: ModuleType, tmp_path: Path) -> None:
    part = tool.Part(command=(sys.executable, "-c", "import time; time.sleep(60)"))
    found = tool.run_part(part, tmp_path / "results", tmp_path, limit_s=0.5)
    assert found["exit_code"] == tool.TIMED_OUT
    assert found["seconds"] < 30


def test_without_a_gpu_it_says_what_is_missing(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert tool.main(["--save", str(tmp_path)]) == 78
    assert f"torch {torch.__version__} is built without CUDA" in capsys.readouterr().err
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert tool.main(["--save", str(tmp_path)]) == 78
    assert "finds none; check `nvidia-smi`" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tool, "find_spec", lambda name: None)
    assert tool.main(["--save", str(tmp_path)]) == 78
    assert "the package triton, which is not installed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_parts_are_commands_that_exist(tool: ModuleType) -> None:
    """Correctness first; every benchmark is one of bench.py, every path is there."""
    assert list(tool.PARTS) == ["operators", "models", "ranks", "kernels", "scans", "learn", "fp8", "train"]
    benchmarks: SimpleNamespace = sys.modules["bench"]  # type: ignore[assignment]
    for part in tool.PARTS.values():
        assert part.benchmark is None or part.benchmark in benchmarks.BENCHMARKS
        assert all((ROOT / word).exists() for word in part.command if word.startswith(("tests/", "tools/")))

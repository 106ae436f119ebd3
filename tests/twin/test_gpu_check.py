"""``make gpu-check``'s own code on the computing twin: every part at small sizes, what it keeps and says of it."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.twin, pytest.mark.timeout(3600)]
BENCHMARKS = ("kernels", "scans", "learn", "fp8", "train")


def check(root: Path, folder: Path, *words: str) -> tuple[int, str, dict[str, Any], str]:
    """The exit code, the output, the JSON, and the page."""
    command = [sys.executable, "tools/twin.py", "gpu-check", "--save", str(folder), *words]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=3500, check=False)
    (saved,) = folder.glob("gpu-check_null-device-*.json")
    page = saved.with_suffix(".md").read_text("utf-8")
    return done.returncode, done.stdout + done.stderr, json.loads(saved.read_text("utf-8")), page


def test_all_parts_run_and_none_is_taken_for_a_gpus(cuda_twin: ModuleType, tmp_path: Path, root: Path) -> None:
    code, output, found, page = check(root, tmp_path, "--gpus", "2")
    assert code == 0, output
    assert list(found["parts"]) == ["operators", "models", "ranks", *BENCHMARKS]
    for name, part in found["parts"].items():
        assert f"| {name} | ok |" in page
        assert {test["outcome"] for test in part.get("tests", ())} <= {"passed"}, output
    # They were compared, with something: rounding is not nothing.
    assert all(0 < max(test["errors"].values()) < 1e-5 for test in found["parts"]["operators"]["tests"])
    note = cuda_twin.installation.NOTE
    assert f"**{note}**" in page and "Measured" not in page
    benchmarks = [json.loads((tmp_path / found["parts"][name]["saved"]).read_text("utf-8")) for name in BENCHMARKS]
    for figures in (found, *benchmarks):
        assert (figures["machine"]["note"], figures["machine"]["gpus"]) == (note, "2 x null device of the CUDA twin")
    kernels, scans, learn, fp8, train = benchmarks
    assert kernels["note"].startswith(note)
    assert not kernels["failures"] and len(kernels["lines"]) > 10
    assert scans["note"].startswith(note) and scans["targets"] is None
    # Shares of a GPU's speed there are none.
    assert learn["mfu"] is None
    assert fp8["verdict"] == {"missed": []} and fp8["current"]["tokens_per_s"] > 0
    assert all(row["mfu"] is None for row in train["lengths"].values())


def test_operators_that_compute_nothing_fail(cuda_twin: ModuleType, tmp_path: Path, root: Path) -> None:
    code, output, found, page = check(root, tmp_path, "--gpus", "1", "--broken", "--only", "operators", "ranks")
    assert code == 1, output
    assert "skipped because this machine has one GPU: ranks" in output
    assert [test["outcome"] for test in found["parts"]["operators"]["tests"]] == ["failed"] * 3, output
    assert "| operators | **failed** |" in page


def test_a_visit_to_a_bare_machine(cuda_twin: ModuleType, tmp_path: Path, root: Path) -> None:
    """Without the packages that `make bundle` does not bring; what it found was that tests and benchmarks need them."""
    parts = ("environment", "operators", "tnl", "kernels", "checkpoint")
    command = [sys.executable, "tools/twin.py", "gpu-check", "--gpus", "1", "--bare", "--budget", "3000"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--only", *parts],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=3300,
        check=False,
    )
    found = json.loads((tmp_path / "visit.json").read_text("utf-8"))
    assert {name: found[name]["exit_code"] for name in parts} == dict.fromkeys(parts, 0), done.stdout + done.stderr
    versions = json.loads((tmp_path / "results" / "environment.json").read_text("utf-8"))["versions"]
    assert versions["transformers"] is None and versions["zarr"] is not None

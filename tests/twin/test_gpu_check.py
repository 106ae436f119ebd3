"""``make gpu-check``'s own code on the computing twin: what it asks of a machine, a part of it, and what it keeps."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.twin, pytest.mark.timeout(1800)]

# The part itself; of its tests a few, because the interpreter of Triton takes minutes for a mixer of their size.
GPU_CHECK = """
import dataclasses, sys
import gpu_check
part = gpu_check.PARTS["operators"]
more = ("-p", "cuda_twin.pytest_computing", "-n", "0", "-k", sys.argv[2])
gpu_check.PARTS["operators"] = dataclasses.replace(part, command=(*part.command, *more))
sys.exit(gpu_check.main(["--only", "operators", "ranks", "--save", sys.argv[1]]))
"""
NORMS = "test_equals_the_reference_in_fp64 and norm and float32-1000"


def check(twin: Any, folder: Path, chosen: str, *, works: bool) -> tuple[int, str, dict[str, Any], str]:
    """The exit code, the output, what was found by part, and the page."""
    # Triton's kernels are interpreted, or compiled and launched on a device that does nothing.
    environment = {**twin.environment(computes=True), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": str(int(works))}
    command = [sys.executable, "-c", GPU_CHECK, str(folder), chosen]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    output = done.stdout + done.stderr
    (saved,) = folder.glob("gpu-check_NVIDIA-*.json")
    found = json.loads(saved.read_text("utf-8"))
    return done.returncode, output, found["parts"], saved.with_suffix(".md").read_text("utf-8")


def test_operators_that_are_right_pass(cuda_twin: ModuleType, tmp_path: Path) -> None:
    chosen = f"({NORMS}) or (test_equals_the_reference_in_fp64 and silu-float32)"
    code, output, parts, page = check(cuda_twin.installation.installed(), tmp_path, chosen, works=True)
    assert code == 0, output
    assert "skipped, as this machine has one GPU: ranks" in output
    tests = parts["operators"]["tests"]
    assert [test["outcome"] for test in tests] == ["passed"] * 3, output
    # They were compared, with something: rounding is not nothing.
    assert all(0 < max(test["errors"].values()) < 1e-5 for test in tests)
    assert "| operators | ok |" in page


def test_operators_that_compute_nothing_fail(cuda_twin: ModuleType, tmp_path: Path) -> None:
    code, output, parts, page = check(cuda_twin.installation.installed(), tmp_path, NORMS, works=False)
    assert code == 1, output
    assert [test["outcome"] for test in parts["operators"]["tests"]] == ["failed"] * 2, output
    assert "| operators | **failed** |" in page

"""Every Triton kernel compiled for sm_90, which needs no GPU: spills, tensor cores, shared memory."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightscale.kernels.common.triton.compile import KernelCase, compile_case, faults, operators


def compile_all(root: Path, *arguments: str) -> list[dict[str, Any]]:
    tool = [sys.executable, str(root / "tools" / "compile_kernels.py"), "--json", *arguments]
    done = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    cases: list[dict[str, Any]] = json.loads(done.stdout)["cases"]
    bad = {case["name"]: case["faults"] for case in cases if case["faults"]}
    assert not bad
    assert done.returncode == 0
    # The smallest is the product of a gated linear unit without an activation.
    assert all(case["instructions"] > 40 and case["registers"] > 8 for case in cases)
    return cases


@pytest.mark.timeout(600)
def test_usual_kernels_compile_for_hopper(root: Path) -> None:
    cases = compile_all(root, "--usual")
    assert {case["name"].split()[0] for case in cases} == set(operators())
    assert any(case["wgmma"] for case in cases)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_all_kernels_compile_for_hopper(root: Path) -> None:
    compile_all(root)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_usual_kernels_compile_with_an_older_triton(root: Path) -> None:
    compile_all(root, "--usual", "--triton", "3.6.0")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_all_kernels_compile_with_an_older_triton(root: Path) -> None:
    compile_all(root, "--triton", "3.6.0")


def case(**changes: Any) -> KernelCase:
    kernel = SimpleNamespace(arg_names=["x", "N"], __name__="kernel")
    return KernelCase(**({"name": "case", "kernel": kernel, "arguments": {"x": "*bf16"}} | changes))


@pytest.mark.parametrize(
    ("changes", "figures", "expected"),
    [
        ({}, {}, []),
        ({}, {"spills": 3}, ["3 spills"]),
        ({"may_spill": True}, {"spills": 3}, []),
        ({}, {"shared_bytes": 227 * 1024 + 1}, ["232449 bytes of shared memory, more than 232448"]),
        ({}, {"wgmma": 0}, ["no tensor-core instruction"]),
        ({}, {"wgmma": 0, "mma": 4}, []),
        ({"tensor_cores": False}, {"wgmma": 0}, []),
    ],
)
def test_faults(changes: dict[str, Any], figures: dict[str, int], expected: list[str]) -> None:
    usual = {"spills": 0, "shared_bytes": 227 * 1024, "wgmma": 8, "mma": 0}
    assert list(faults(case(**changes), **(usual | figures))) == expected


def test_a_case_that_does_not_fit_its_kernel_is_named() -> None:
    with pytest.raises(ValueError, match=r"case: arguments \['M', 'N'\] are not those of kernel"):
        compile_case(case(constants={"M": 1}))


def test_an_unknown_operator_is_named(root: Path) -> None:
    tool = [sys.executable, str(root / "tools" / "compile_kernels.py"), "softmax"]
    done = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no Triton kernels of softmax; known: " in done.stderr

"""Every Triton kernel compiled for sm_90, which needs no GPU: spills, tensor cores, shared memory."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from lightscale.kernels.common.triton.compile import KernelCase, cases_of, compile_case, faults, operators

ROOT = Path(__file__).resolve().parents[2]
drawing = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "helpers" / "drawing.py")))


class Build(NamedTuple):
    """What ``tools/compile_kernels.py`` reports."""

    triton: str
    """Its version."""
    names: list[str]
    """Of the cases compiled, sorted."""
    failures: dict[str, list[str]]
    """What is wrong with a case, by its name; only of cases with which something is."""
    wgmma: int
    """Warp-group matrix instructions of all cases together."""


def compile_all(root: Path, *arguments: str) -> Build:
    tool = [sys.executable, str(root / "tools" / "compile_kernels.py"), "--json", *arguments]
    done = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    cases: list[dict[str, Any]] = report["cases"]
    assert done.returncode == any(case["faults"] for case in cases), done.stderr
    failures = {case["name"]: case["faults"] for case in cases if case["faults"]}
    for case in cases:
        # The smallest is the product of a gated linear unit without an activation.
        if case["instructions"] <= 40 or case["registers"] <= 8:
            failures.setdefault(case["name"], []).append(f"{case['instructions']} instructions: nothing is computed")
    return Build(report["triton"], sorted(c["name"] for c in cases), failures, sum(c["wgmma"] for c in cases))


def case_names(*, usual: bool) -> list[str]:
    """Of all cases of all operators, or of the usual ones, sorted."""
    cases = [case for operator in operators() for case in cases_of(operator)]
    return sorted(case.name for case in cases if case.usual or not usual)


@pytest.mark.timeout(600)
def test_drawn_kernels_compile_for_hopper(root: Path) -> None:
    """Of the usual cases 6 that the session's seed draws, of all operators over a few runs; each takes a second."""
    names = drawing.some("kernels for hopper", case_names(usual=True), 4)
    build = compile_all(root, "--cases", *names)
    assert build.names == names
    assert build.failures == {}


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_usual_kernels_compile_for_hopper(root: Path) -> None:
    build = compile_all(root, "--usual")
    assert {name.split()[0] for name in build.names} == set(operators())
    assert build.names == case_names(usual=True)
    assert build.failures == {}
    assert build.wgmma > 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_all_kernels_compile_for_hopper(root: Path) -> None:
    build = compile_all(root)
    assert build.names == case_names(usual=False)
    assert build.failures == {}


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_usual_kernels_compile_with_an_older_triton(root: Path) -> None:
    build = compile_all(root, "--usual", "--triton", "3.6.0")
    assert build.triton == "3.6.0"
    assert build.names == case_names(usual=True)
    assert build.failures == {}


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_all_kernels_compile_with_an_older_triton(root: Path) -> None:
    build = compile_all(root, "--triton", "3.6.0")
    assert build.triton == "3.6.0"
    assert build.names == case_names(usual=False)
    assert build.failures == {}


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

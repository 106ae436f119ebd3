"""Launches of all Triton kernels as a GPU would get them, at sizes that no memory holds, and over a run of batches.

They are recorded on PyTorch's device "meta" by a process that has Triton's compiler: ``helpers/meta_launches.py``.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightscale.kernels.common.triton.compile import cases_of, operators

HELPERS = Path(__file__).parents[1] / "helpers"
index_ranges = SimpleNamespace(**runpy.run_path(str(HELPERS / "index_ranges.py")))

MOST_PROGRAMS = 2**31 - 1, 65_535, 65_535


def recorded(what: str) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(HELPERS / "meta_launches.py"), what]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def fits(x: int, y: int = 1, z: int = 1) -> bool:
    return all(1 <= size <= most for size, most in zip((x, y, z), MOST_PROGRAMS, strict=True))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("forms", ["one", "every"])
def test_four_million_tokens_of_64_heads_of_128(forms: str) -> None:
    found = recorded(forms)
    assert found["elements"] >= 2**35
    assert [grid for grid in found["grids"] if not fits(*grid[1:])] == []
    assert {name: some for name, some in found["wrapped"].items() if some} == {}
    kernels = [case.kernel.fn for name in operators() for case in cases_of(name)]
    known = {f"{kernel.__module__.removeprefix('lightscale.kernels.')}.{kernel.__name__}" for kernel in kernels}
    assert known <= found["wrapped"].keys()
    # The check itself: a kernel whose index wraps.
    assert len(found["seeded"]) == 1 and "arith.muli" in found["seeded"][0]


# Rows in several splits are scanned three times, each in a form of its own; rows in one split once.
MOST_VARIANTS = 4


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("batches", [6, 50])
def test_compiled_variants_do_not_depend_on_lengths_and_documents(batches: int) -> None:
    found = recorded(str(batches))
    assert {name: one["integers"] for name, one in found.items() if one["integers"]} == {}
    more = {
        name: (one["run"], one["batch"]) for name, one in found.items() if one["run"] > one["batch"] + MOST_VARIANTS
    }
    assert more == {}
    assert len(found) > 60


HEAD = "tt.func public @kernel(%arg0: !tt.ptr<f32> {tt.divisibility = 16 : i32}, %arg1: i32) attributes {a = 1} {\n"
PROGRAM = "%0 = tt.get_program_id x : i32\n"


@pytest.mark.parametrize(
    ("body", "wraps"),
    [
        ("%1 = arith.muli %0, %arg1 : i32\n%2 = tt.addptr %arg0, %1 : !tt.ptr<f32>, i32", True),
        (
            "%1 = arith.extsi %0 : i32 to i64\n%2 = arith.extsi %arg1 : i32 to i64\n"
            "%3 = arith.muli %1, %2 : i64\n%4 = tt.addptr %arg0, %3 : !tt.ptr<f32>, i64",
            False,
        ),
        # What wraps by intention, and becomes a number.
        (
            "%1 = arith.muli %0, %arg1 : i32\n%2 = arith.sitofp %1 : i32 to f32\ntt.store %arg0, %2 : !tt.ptr<f32>",
            False,
        ),
        # Of a mask, and the bound of a loop.
        (
            "%c0 = arith.constant 0 : i32\n%1 = arith.addi %0, %arg1 : i32\n%2 = arith.muli %1, %arg1 : i32\n"
            "%3 = arith.cmpi slt, %2, %c0 : i32\n%4 = tt.load %arg0, %3 : !tt.ptr<f32>",
            True,
        ),
        (
            "%c0 = arith.constant 0 : i32\n%c1 = arith.constant 1 : i32\n%1 = arith.muli %0, %arg1 : i32\n"
            "scf.for %arg2 = %c0 to %1 step %c1  : i32 {\n}",
            True,
        ),
        # Within bounds: the remainder, and the least.
        (
            "%1 = arith.remsi %0, %arg1 : i32\n%2 = arith.muli %1, %arg1 : i32\n"
            "%3 = tt.addptr %arg0, %2 : !tt.ptr<f32>, i32",
            False,
        ),
        (
            "%1 = arith.minsi %0, %arg1 : i32\n%2 = arith.muli %1, %arg1 : i32\n"
            "%3 = tt.addptr %arg0, %2 : !tt.ptr<f32>, i32",
            False,
        ),
        # 64 bits cut to 32, and one of two.
        (
            "%1 = arith.extsi %0 : i32 to i64\n%2 = arith.muli %1, %1 : i64\n%3 = arith.trunci %2 : i64 to i32\n"
            "%4 = tt.addptr %arg0, %3 : !tt.ptr<f32>, i32",
            True,
        ),
        (
            "%1 = arith.cmpi slt, %0, %arg1 : i32\n%2 = scf.if %1 -> (i32) {\n%3 = arith.muli %0, %arg1 : i32\n"
            "scf.yield %3 : i32\n} else {\nscf.yield %0 : i32\n}\n%4 = tt.addptr %arg0, %2 : !tt.ptr<f32>, i32",
            True,
        ),
    ],
)
def test_indices_that_wrap(body: str, wraps: bool) -> None:
    found = index_ranges.wrapped_indices(HEAD + PROGRAM + body + "\n}", (2**22,), ("pointer", 2**13), (0, 0))
    assert bool(found) == wraps

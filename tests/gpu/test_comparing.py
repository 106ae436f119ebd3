"""What the tests on GPUs compare with, on a CPU at small sizes: it finds faults, and only those that are there."""

import json
import os
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightscale.errors import UserError
from lightscale.kernels import operators as described

operators = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("operators.py"))))
FULL = torch.float32


def shape(name: str, tokens: int = 20) -> object:
    return operators.Shape(rows=2, tokens=tokens, heads=2, K=8, V=37 if name == "cross entropy" else 4)


@pytest.mark.parametrize("name", operators.OPERATORS)
def test_the_chunked_form_agrees_and_a_wrong_one_does_not(name: str) -> None:
    inputs = operators.draw(name, shape(name), FULL, "cpu", with_state=True)
    cut = torch.tensor([0, 3, 20, 33, 40])
    expected = operators.results(name, inputs, "reference", cut, exact=True)
    assert all(x.dtype == torch.float64 for x in expected.values())
    ratios = operators.errors(operators.results(name, inputs, "chunked", cut), expected)
    assert not operators.wrong(ratios, FULL), ratios
    learned = next(key for key in inputs if key not in operators.FIXED)
    assert f"d{learned}" in ratios
    # Half precision is allowed more, but what is off by a hundredth is wrong in any.
    off = operators.errors({key: x * 1.01 for key, x in expected.items()}, expected)
    assert operators.wrong(off, torch.bfloat16).keys() == off.keys() - operators.DIFFERENCES.keys()
    nothing = operators.errors({key: x * float("nan") for key, x in expected.items()}, expected)
    assert operators.wrong(nothing, torch.bfloat16).keys() == nothing.keys()


@pytest.mark.parametrize("name", operators.OPERATORS)
def test_the_last_document_by_itself(name: str) -> None:
    """As for tensors of more than 2^31 elements: nothing before the last document changes it."""
    inputs = operators.draw(name, shape(name, tokens=30), FULL, "cpu", with_state=False)
    inputs = {key: x[:1] if key in operators.OPERATORS[name].by_token else x for key, x in inputs.items()}
    found = operators.results(name, inputs, "chunked", torch.tensor([0, 18, 30]), last=12)
    alone = operators.results(name, operators.last_tokens(name, inputs, 12), "reference", exact=True, last=12)
    ratios = operators.errors(operators.last_tokens(name, found, 12), alone)
    assert not operators.wrong(ratios, FULL), ratios


@pytest.mark.parametrize("name", [*operators.MIXERS, "tpe", "log sum"])
def test_passes(name: str) -> None:
    inputs = operators.draw(name, shape(name), FULL, "cpu", with_state=True)
    package = import_module(f"lightscale.kernels.{operators.case_of(name).operator}")
    cut = torch.tensor([0, 15, 20, 40])
    expected = operators.passes(name, operators.chunked_passes(name), inputs, cut, exact=True)
    ratios = operators.errors(operators.passes(name, package, inputs, cut), expected)
    assert len(ratios) >= (4 if name == "log sum" else 6)
    assert not operators.wrong(ratios, FULL), ratios


def test_every_described_operator_has_a_case() -> None:
    """Or a GPU would never compute it; what PyTorch computes has no kernels to compare."""
    ours = {name for name in described.operator_names() if "triton" in described.get_operator(name).backend_names}
    assert {case.operator for case in operators.OPERATORS.values()} == ours


def test_unknown_operators_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"no case 'delta' of an operator; known: lightning by token, gla, delta rule, .*norm"
    ):
        operators.draw("delta", shape("gla"), FULL, "cpu", with_state=False)
    known = operators.case_of("gla")
    with pytest.raises(UserError, match=r"no operator 'delta'; use one of .*gla, glu, heads, lightnet"):
        operators.Case(operator="delta", draw=known.draw, form=known.form, by_token=known.by_token)


def test_outcomes_and_errors_are_kept(tmp_path: Path, root: Path) -> None:
    """By the folder's conftest.py, a line for each test."""
    (tmp_path / "conftest.py").write_text((root / "tests" / "gpu" / "conftest.py").read_text())
    (tmp_path / "test_made_up.py").write_text(
        "import pytest\n"
        "def test_good(record_property): record_property('errors', {'o': 0.5})\n"
        "def test_bad(): assert 0\n"
        "def test_left_out(): pytest.skip('no memory')\n"
    )
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", str(tmp_path), "--rootdir", str(tmp_path)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(
        [*command, "--results", str(results)], capture_output=True, timeout=100, check=False, env=environment
    )
    found = {line["test"].split("::")[1]: line for line in map(json.loads, results.read_text().splitlines())}
    assert {name: line["outcome"] for name, line in found.items()} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_left_out": "skipped",
    }
    assert found["test_good"]["errors"] == {"o": 0.5}

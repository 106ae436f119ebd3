"""The benchmark of kernels: what it says without a GPU, and what it counts."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "tools" / "bench_kernels.py"
    spec = importlib.util.spec_from_file_location("bench_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_it_says_so(root: Path) -> None:
    command = [sys.executable, str(root / "tools" / "bench_kernels.py"), "--json", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    figures = json.loads(done.stdout)
    assert figures["device"] == "cpu" and "need a GPU" in figures["note"]
    assert {(x["way"], x["passes"]) for x in figures["lines"]} == {
        (way, passes) for way in ("chunked", "reference") for passes in ("forward", "forward + backward")
    }
    for line in figures["lines"]:
        assert line["ns_per_token_head"] == pytest.approx(line["ms"] * 1e6 / (line["tokens"] * 2))
        assert line["floor_ns"] is None


def test_counts_of_lightning_attention(tool: ModuleType) -> None:
    """Written out for d = 128, chunks of 128: every pass over q, k, v, gradients (256 bytes) and states (256 bytes)."""
    costs = tool.lightning_costs(128, 128)
    scan, products = 2 * 256 + 256, 3 * 256 + 256 + 256  # k, v → S;  q, k, v, S → o
    assert costs["forward"].bytes == scan + products
    assert costs["forward + backward"].bytes == 3 * scan + 4 * products
    # Scores with 96 partners on average, twice (once for each half of the outputs), and their product with v.
    inside = 2 * 96 * 128 * 2 + 2 * 96 * 128
    assert costs["forward"].flops == inside + 2 * 2 * 128 * 128
    assert costs["forward + backward"].flops == 4 * inside + 7 * 2 * 128 * 128


def test_the_tables_have_a_line_for_each_measurement(tool: ModuleType) -> None:
    figures = {"device": "cpu", "dtype": "float32", "heads": 2, "width": 32, **tool.run_on_cpu(1)}
    assert tool.table(figures).row_count == len(figures["lines"]) == 8

"""The benchmark of the mixers: its report, and generous limits on its ratios at a small size."""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

LINEAR = ("tnl", "cosformer2", "hgrn2", "lightnet", "gated-delta-net", "kimi-delta", "tpe")
SHORT, LONG = 512, 4096
REPEATS = 3
OPTIONS = ["--tokens", str(LONG), str(SHORT), "--heads", "2", "--width", "32", "--repeats", str(REPEATS)]


def bench_mixers(root: Path, *arguments: str) -> str:
    """Standard output. One thread and its own clock are the default, because others may share the cores."""
    command = [sys.executable, str(root / "tools" / "bench.py"), "mixers"]
    finished = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=110, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


# Speeds, for minutes.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    root = Path(__file__).resolve().parents[3]
    found: dict[str, Any] = json.loads(bench_mixers(root, "--json", *OPTIONS))
    print(json.dumps(found["mixers"]))
    return found


def test_settings_are_recorded(result: dict[str, Any]) -> None:
    assert result["settings"] == {
        "dtype": "float32", "rows": 1, "tokens": [SHORT, LONG], "heads": 2, "width": 32, "clock": "cpu",
        "repeats": REPEATS,
    }  # fmt: skip
    assert result["targets"] == {"speedup": 4.0, "growth_aim": 1.25, "growth_limit": 1.5}
    assert result["machine"]["threads"] == 1
    assert list(result["mixers"]) == [*LINEAR, "llama"]


def test_ratios_are_those_of_the_medians_of_the_samples(result: dict[str, Any]) -> None:
    for name, found in result["mixers"].items():
        samples = result["samples_s"][name]
        assert {len(taken) for taken in samples.values()} == {REPEATS}
        # A sample of the short row is as many rows as make a long one; the recurrence runs on a single short row.
        short, long = (statistics.median(samples[str(n)]) / LONG for n in (SHORT, LONG))
        assert found["growth"] == pytest.approx(long / short)
        if name == "llama":
            assert "speedup" not in found
            continue
        assert found["speedup"] == pytest.approx(statistics.median(samples["naive"]) / SHORT / short)
        assert found["reached"] == (found["speedup"] >= 4 and found["growth"] <= 1.5)


@pytest.mark.parametrize("mixer", LINEAR)
def test_chunked_forms_are_faster_than_recurrences_and_linear_in_the_length(result: dict[str, Any], mixer: str) -> None:
    found, softmax = result["mixers"][mixer], result["mixers"]["llama"]
    assert found["speedup"] >= 1.5
    assert found["growth"] <= 2
    # Softmax attention's time per token is proportional to the length.
    assert found["growth"] < softmax["growth"]


def test_table_for_people(bench_in_process: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_in_process.main(["mixers", "--tokens", "40", "--heads", "1", "--width", "4", "--repeats", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mixers on ")
    assert "clock cpu" in lines[1]
    assert all(any(name in line for line in lines[2:]) for name in (*LINEAR, "llama", "speed-up", "growth"))

"""The benchmark command: its report, its ratios at a small size, its refusals."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


def bench(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tools" / "bench.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=root)


@pytest.mark.long
def test_chunked_lightning_attention_is_the_fastest(root: Path) -> None:
    """One thread, because the suite's other processes share the cores; they slow a side by less than a few times."""
    options = ["--tokens", "4096", "--heads", "4", "--width", "64", "--repeats", "3", "--threads", "1"]
    finished = bench(root, "lightning", "--json", *options)
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout)
    print(json.dumps(result["ratios"]))
    assert result["settings"] == {
        "dtype": "float32", "rows": 1, "tokens": 4096, "heads": 4, "width": 64, "chunk_size": 64, "repeats": 3,
    }  # fmt: skip
    assert {"cpu", "threads", "date", "torch"} <= result["machine"].keys()
    assert result["machine"]["threads"] == 1
    assert result["median_s"].keys() == result["samples_s"].keys() == {"chunked", "naive", "sdpa"}
    for way, passes in result["samples_s"].items():
        assert passes.keys() == {"forward", "forward_backward"}
        for name, samples in passes.items():
            assert len(samples) == 3
            assert result["median_s"][way][name] == sorted(samples)[1] > 0
    for way in ("naive", "sdpa"):
        expected = result["median_s"][way]["forward_backward"] / result["median_s"]["chunked"]["forward_backward"]
        assert result["ratios"][way]["forward_backward"] == pytest.approx(expected)
        assert result["ratios"][way]["forward_backward"] >= 1.5


def test_report_for_people_names_the_machine_and_the_ways(
    bench_in_process: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["lightning", "--tokens", "70", "--heads", "1", "--width", "8", "--repeats", "1"]
    assert bench_in_process.main(arguments) == 0
    header, settings, *table = capsys.readouterr().out.splitlines()
    assert header.startswith("lightning on ")
    assert "torch" in header
    assert settings == "dtype float32, rows 1, tokens 70, heads 1, width 8, chunk_size 64, repeats 1"
    assert all(any(way in line for line in table) for way in ("chunked", "naive", "sdpa"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lightning", "--tokens", "0"], "--tokens: must be at least 1, not 0"),
        (["lightnin"], "invalid choice: 'lightnin'"),
    ],
)
def test_bad_arguments_are_named(
    bench_in_process: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        bench_in_process.main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


COMMANDS = {
    "sequence": ("sequence", "--ranks", "2", "--tokens", "64", "--rows", "1", "--heads", "2", "--width", "8"),
    "data": ("data", "--only", "loader"),
    "start": ("start", "--ranks", "1"),
}


# The others' commands are run by the tests of their figures.
@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_end_with_their_figures(root: Path, name: str) -> None:
    finished = bench(root, *COMMANDS[name], "--repeats", "1", "--json")
    assert finished.returncode == 0, finished.stderr
    figures = json.loads(finished.stdout)
    assert figures["benchmark"] == name
    assert figures.keys() > {"machine", "settings"}


@pytest.mark.long
def test_an_export_takes_little_memory(root: Path) -> None:
    """Of a small model: the rest is what importing PyTorch takes."""
    finished = bench(root, "export", "--json", "--config", "tnl-tiny", "--repeats", "1")
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout)
    assert 0 < result["peak_bytes"] < result["targets"]["peak_bytes"]
    assert {"copy_s", "fp32_s", "bf16_s", "of_copy"} <= result.keys()

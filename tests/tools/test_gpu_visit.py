"""A visit within a budget: a part that crashes, hangs or runs out of memory does not stop the others."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def tool(tools_path: Path) -> ModuleType:
    import gpu_visit

    return gpu_visit


def part(tool: ModuleType, script: str, limit_s: float = 20.0) -> Any:
    return tool.Part(limit_s=limit_s, command=(sys.executable, "-c", script, tool._FOLDER))


FAKES = {
    "crashes": ("import os; os.abort()", 20.0),
    "hangs": ("import time; time.sleep(60)", 1.0),
    "memory": (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28)); bytearray(2**32)",
        20.0,
    ),
    "good": ("import sys, pathlib; pathlib.Path(sys.argv[1], 'made.json').write_text('{}'); print('all well')", 20.0),
}


def test_a_bad_part_does_not_stop_the_others(tool: ModuleType, tmp_path: Path) -> None:
    parts = {name: part(tool, *fake) for name, fake in FAKES.items()}
    assert tool.Visit(tmp_path, 120).run(parts) == 1
    found = json.loads((tmp_path / tool.STATE).read_text())
    codes = {name: one["exit_code"] for name, one in found.items()}
    assert codes == {"crashes": -6, "hangs": tool.TIMED_OUT, "memory": 1, "good": 0}
    page = (tmp_path / tool.PAGE).read_text()
    assert "| good | 0 |" in page and "MemoryError" in page
    with tarfile.open(tmp_path / tool.ARCHIVE) as archive:
        assert {tool.STATE, tool.PAGE, "results/made.json", "results/good.log"} <= set(archive.getnames())


def test_the_next_visit_runs_new_parts_then_failures(tool: ModuleType, tmp_path: Path) -> None:
    order = tmp_path / "order"
    note = "open({!r}, 'a').write({!r} + '\\n'); raise SystemExit({})"
    parts = {name: part(tool, note.format(str(order), name, code)) for name, code in (("bad", 3), ("good", 0))}
    assert tool.Visit(tmp_path / "out", 60).run(parts) == 1
    parts["new"] = part(tool, note.format(str(order), "new", 0))
    assert tool.Visit(tmp_path / "out", 60).run(parts) == 1
    assert order.read_text().split() == ["bad", "good", "new", "bad"]


def test_what_has_no_time_is_left_for_the_next_visit(tool: ModuleType, tmp_path: Path) -> None:
    parts = {"late": part(tool, "")}
    assert tool.Visit(tmp_path, tool.RESERVE_S).run(parts) == 1
    assert "| late | - | 0 | no time |" in (tmp_path / tool.PAGE).read_text()
    assert tool.Visit(tmp_path, 60).run(parts) == 0


def test_the_archive_is_there_while_later_parts_run(tool: ModuleType, tmp_path: Path) -> None:
    script = f"import tarfile; tarfile.open({str(tmp_path / tool.ARCHIVE)!r}).getmember('results/first.log')"
    assert tool.Visit(tmp_path, 60).run({"first": part(tool, ""), "second": part(tool, script)}) == 0


def test_each_operator_is_a_process(tool: ModuleType) -> None:
    tests = ["a.py::t[norm-bf16]", "a.py::t[norm-fp32]", "a.py::t[gla-bf16]", "a.py::big[gla-x]", "a.py::alone"]
    assert tool.groups(tests, "big") == {"norm": tests[:2], "gla": [tests[2]], "alone": [tests[4]]}


def test_paths_and_benchmarks_of_parts_exist(tool: ModuleType) -> None:
    words = [word for one in tool.PARTS.values() for word in (*one.command, *one.full, *one.small)]
    paths = [word for word in words if word.startswith(("tests/", "tools/", "configs/"))]
    assert paths and all((tool.ROOT / path).exists() for path in paths)


def test_the_check_starts_without_what_a_bundle_does_not_bring(tools_path: Path) -> None:
    """On a machine of PyTorch and Triton: an import of an extra at the top of any benchmark would end the visit."""
    # As torch does in some processes; its copies of packages are then found beside those that are installed.
    import setuptools  # noqa: F401

    from cuda_twin import bare_packages

    hidden = bare_packages.lacking()
    assert {"transformers", "tokenizers", "matplotlib"} <= hidden
    path = os.pathsep.join(map(str, (tools_path / "cuda_twin" / "everywhere", tools_path, tools_path.parent)))
    script = "import bench, gpu_check, gpu_visit, importlib.util; assert importlib.util.find_spec('tokenizers') is None"
    environment = {**os.environ, "PYTHONPATH": path, "TWIN_HIDES": ",".join(sorted(hidden))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""Every reader of what others wrote, on a few mutations of valid inputs; `tools/readers` has what does more."""

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "readers"
# Inputs that once ended in a traceback, a hang or too much memory, as FOLDER/findings has them.
KEPT = Path(__file__).with_name("reader_inputs")
MOST_INPUTS, MOST_S = 40, 0.7

pytest.importorskip("pyarrow")
pytest.importorskip("warcio")


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    sys.path.insert(0, str(TOOLS))
    import fuzz_readers

    yield fuzz_readers
    sys.path.remove(str(TOOLS))


def names() -> list[str]:
    """Without an import of all that reads, which each worker would do when it collects."""
    text = (TOOLS / "reader_targets.py").read_text("utf-8")
    lines = text[text.index("TARGETS: dict") :].splitlines()
    return [line.split('"')[1] for line in lines if line.startswith('    "')]


@pytest.mark.xdist_group("readers")
@pytest.mark.parametrize("name", names())
def test_a_reader_reads_or_refuses_by_name(tool: Any, tmp_path: Path, name: str) -> None:
    # Always the same: what others have not touched does not fail. `make fuzz` looks for more.
    reader, generator = tool.Reader(name, tmp_path), random.Random(name)
    for data in reader.valid:
        assert reader.fault(data) is None
    assert reader.outcomes == {"read": len(reader.valid)}
    for path in sorted((KEPT / name).glob("*")):
        assert reader.fault(path.read_bytes()) is None, path
    end = time.process_time() + MOST_S
    for _ in range(MOST_INPUTS):
        data = reader.changed(generator.choice(reader.valid), generator, reader.valid)
        found = reader.fault(data)
        (tmp_path / "last").write_bytes(data)
        assert found is None, f"{found}: {tmp_path / 'last'}"
        if time.process_time() > end:
            break


def test_all_that_is_kept_belongs_to_a_reader() -> None:
    assert {path.name for path in KEPT.iterdir()} <= set(names())


def faulty(tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, read: Any) -> Any:
    """A reader that has a fault."""
    import reader_targets

    target = reader_targets.Target(file="a.txt", valid=lambda folder: [b"right"], read=read)
    monkeypatch.setitem(reader_targets.TARGETS, "faulty", target)
    return tool.Reader("faulty", tmp_path)


def test_what_would_be_found(tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lightscale.errors import UserError

    def read(path: Path) -> None:
        match path.read_bytes():
            case b"traceback":
                raise KeyError("x")
            case b"nameless":
                raise UserError("a file is wrong")
            case b"named":
                raise UserError(f"{path}: wrong")
            case b"hang":
                while True:
                    time.sleep(0.01)
            case b"memory":
                bytearray(100 * 2**20).count(b"a")
            case data if b"!" in data:
                raise ZeroDivisionError

    monkeypatch.setattr(tool, "_MOST_S", 3.0)
    reader = faulty(tool, monkeypatch, tmp_path, read)
    kinds = {data: reader.fault(data) for data in (b"right", b"named", b"traceback", b"nameless", b"hang", b"memory")}
    assert {data: kind and kind[0].split()[0] for data, kind in kinds.items()} == {
        b"right": None,
        b"named": None,
        b"traceback": "KeyError",
        b"nameless": "no",
        b"hang": "time",
        b"memory": "memory",
    }
    folder = SimpleNamespace(path=tmp_path / "out")
    findings = tool.Findings(folder.path, reader)
    findings.look(b"abcdefgh!ijkl")
    (path,) = [one for one in (folder.path / "findings/faulty").iterdir() if not one.suffix]
    assert path.read_bytes() == b"!"
    assert "ZeroDivisionError" in path.with_name(f"{path.name}.txt").read_text()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_program_counts(tool: Any, tmp_path: Path) -> None:
    out = tmp_path / "counts.json"
    assert tool.main(["points", "curve", "--runs", "50", "--folder", str(tmp_path / "f"), "--out", str(out)]) == 0
    counts = json.loads(out.read_text())["readers"]
    assert {name: one["runs"] for name, one in counts.items()} == {"points": 50, "curve": 50}
    assert all(sum(one["outcomes"].values()) >= 50 for one in counts.values())

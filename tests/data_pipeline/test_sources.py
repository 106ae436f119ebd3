import json
import os
from pathlib import Path

import pytest

from lightscale.data_pipeline.sources import (
    DIRECTORY_LOOP,
    EMPTY,
    INVALID_UTF8,
    LONE_SURROGATE,
    NO_TEXT,
    NOT_JSON,
    READ_TWICE,
    UNREADABLE,
    Document,
    Problems,
    list_files,
    list_stdlib,
    read_documents,
)
from lightscale.errors import UserError


def read(*roots: Path, strict: bool = False) -> tuple[list[Document], Problems]:
    problems = Problems(strict=strict)
    return list(read_documents(list_files(roots, problems), problems)), problems


def test_a_directory_is_read_by_name_and_suffix(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    for name in ("b.txt", "a/z.md", "a/b.py", "c.rst", "image.png", ".git/config.txt", "__pycache__/x.py"):
        path = corpus / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")
    documents, problems = read(corpus)
    assert [(document.id, document.text) for document in documents] == [
        (f"corpus/{name}", f"text of {name}") for name in ("a/b.py", "a/z.md", "b.txt", "c.rst")
    ]
    assert not problems.counts
    only_images = list_files([corpus], problems, suffixes=[".png"])
    assert [file.id for file in only_images] == ["corpus/image.png"]


def test_a_given_file_is_read_whatever_its_suffix(tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes("a\r\nb\0\t字\n".encode())
    documents, _ = read(tmp_path / "notes")
    assert [(document.id, document.text) for document in documents] == [("notes", "a\r\nb\0\t字\n")]
    assert documents[0].read_bytes == 10


def test_jsonl_lines_are_documents_and_bad_lines_are_counted_by_number(tmp_path: Path) -> None:
    lines = [
        b'\xef\xbb\xbf{"text": "after a byte order mark"}',
        b"{broken",
        b"",
        b'["text"]',
        b'{"body": "x", "text": 3}',
        b'{"text": "caf\xe9"}',
        json.dumps({"text": "half \ud800 a character"}).encode(),
        json.dumps({"text": "a whole one \U0001f600"}).encode(),
        b'{"text": ""}',
        b'{"text": "last, without a newline"}',
    ]
    (tmp_path / "d.jsonl").write_bytes(b"\n".join(lines))
    documents, problems = read(tmp_path / "d.jsonl")
    assert [(document.id, document.text) for document in documents] == [
        ("d.jsonl:1", "after a byte order mark"),
        ("d.jsonl:6", "caf\ufffd"),
        ("d.jsonl:7", "half \ufffd a character"),
        ("d.jsonl:8", "a whole one \U0001f600"),
        ("d.jsonl:10", "last, without a newline"),
    ]
    assert problems.counts == {NOT_JSON: 2, NO_TEXT: 1, INVALID_UTF8: 1, LONE_SURROGATE: 1, EMPTY: 1}
    assert [place.split(": ")[0] for place in problems.examples[NOT_JSON]] == ["d.jsonl:2", "d.jsonl:4"]
    assert problems.examples[NO_TEXT] == ["d.jsonl:5: no string 'text' (found body: str, text: int)"]
    assert problems.examples[INVALID_UTF8] == ["d.jsonl:6: byte 0xe9 at offset 13"]


def test_another_field_can_hold_the_text(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"content": "here"}\n')
    problems = Problems()
    files = list_files([tmp_path / "d.jsonl"], problems)
    assert [document.text for document in read_documents(files, problems, text_field="content")] == ["here"]


def test_what_cannot_be_read_is_counted_by_name_and_the_rest_goes_on(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    (corpus / "sub").mkdir(parents=True)
    (corpus / "good.txt").write_text("good")
    (corpus / "dangling.txt").symlink_to("nowhere")
    (corpus / "itself.txt").symlink_to("itself.txt")
    (corpus / "sub" / "up").symlink_to(corpus, target_is_directory=True)
    (corpus / "directory.txt").mkdir()
    os.mkfifo(corpus / "pipe.txt")  # opening it would wait for a writer
    documents, problems = read(corpus)
    assert [document.text for document in documents] == ["good"]
    assert problems.counts == {UNREADABLE: 3, DIRECTORY_LOOP: 1}
    assert [place.split(":")[0] for place in problems.examples[UNREADABLE]] == [
        "corpus/dangling.txt",
        "corpus/itself.txt",
        "corpus/pipe.txt",
    ]
    assert problems.examples[DIRECTORY_LOOP][0].startswith("corpus/sub/up:")


def test_a_file_that_vanishes_or_becomes_a_directory_is_counted(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text(name)
    problems = Problems()
    files = list_files([tmp_path], problems)
    (tmp_path / "a.txt").unlink()
    (tmp_path / "b.txt").unlink()
    (tmp_path / "b.txt").mkdir()
    assert [document.text for document in read_documents(files, problems)] == ["c.txt"]
    assert [place.split(": ")[1] for place in problems.examples[UNREADABLE]] == [
        "No such file or directory",
        "Is a directory",
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "a.txt").chmod(0)
    _, problems = read(tmp_path / "a.txt")
    assert problems.counts == {UNREADABLE: 1}


def test_invalid_utf8_is_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xff\xfecd\xe5\xad")
    documents, problems = read(tmp_path / "a.txt")
    assert documents[0].text == "ab\ufffd\ufffdcd\ufffd"
    assert problems.examples == {INVALID_UTF8: ["a.txt: byte 0xff at offset 2"]}


@pytest.mark.parametrize("content", [b"\xff", b"{", b'{"no": "text"}', b'{"text": "\\udc00"}'])
def test_strict_stops_at_the_first_problem_and_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "good"}\n' + content)
    with pytest.raises(UserError, match=r"/d\.jsonl:2.*--strict"):
        read(tmp_path, strict=True)


def test_strict_stops_at_an_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "gone.txt").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"unreadable file: .*/gone\.txt: No such file or directory"):
        read(tmp_path, strict=True)


def test_a_root_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: No such file or directory"):
        read(tmp_path / "nowhere")


def test_a_file_under_two_roots_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "link.txt").symlink_to("a.txt")
    documents, problems = read(tmp_path, tmp_path / "a.txt", strict=True)
    assert [document.text for document in documents] == ["a"]
    assert problems.counts == {READ_TWICE: 2}


def test_a_name_that_is_not_utf8_gives_a_printable_id(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("a")
    documents, _ = read(tmp_path)
    assert documents[0].id == f"{tmp_path.name}/caf\\xe9.txt"


def test_only_the_first_places_of_a_problem_are_kept() -> None:
    problems = Problems(max_examples=2)
    for number in range(5):
        problems.add(NOT_JSON, f"line {number}")
    assert problems.counts[NOT_JSON] == 5
    assert problems.examples[NOT_JSON] == ["line 0", "line 1"]


def test_the_standard_library_without_its_tests() -> None:
    problems = Problems()
    files = list_stdlib(problems)
    ids = [file.id for file in files]
    assert {"abc.py", "asyncio/base_events.py", "json/decoder.py"} <= set(ids)
    assert all(name.endswith(".py") for name in ids)
    assert not [name for name in ids if {"test", "tests", "idle_test", "site-packages"} & set(name.split("/"))]
    assert ids == [file.id for file in list_stdlib(problems)]
    assert len(set(ids)) == len(ids) > 300
    assert not problems.counts

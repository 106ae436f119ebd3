"""Documents out of files of every kind: whole, in ranges, and damaged."""

import bz2
import gzip
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.data_pipeline.preparation.normalise import INVALID_UTF8
from lightscale.data_pipeline.preparation.readers import RawDocument, cut_into_ranges, jsonl, read, streams
from lightscale.data_pipeline.preparation.readers.inputs import (
    CHANGED,
    NO_TEXT,
    NOT_JSON,
    TOO_LONG,
    TRUNCATED,
    UNREADABLE,
    Problems,
    ReadOptions,
)
from lightscale.data_pipeline.preparation.sources import FileLister
from lightscale.errors import UserError

pyarrow = pytest.importorskip("pyarrow", reason="parquet is read by pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard", reason="zst files are read by zstandard")

OPTIONS = ReadOptions()


def read_file(
    path: Path, *, range_bytes: int = 10**9, options: ReadOptions = OPTIONS, strict: bool = False
) -> tuple[list[RawDocument], Problems]:
    """All documents; every byte of the file is reported as progress exactly once, but for lines across ranges."""
    problems = Problems(strict=strict)
    (file,) = FileLister(problems).files([str(path)])
    documents: list[RawDocument] = []
    for file_range in cut_into_ranges(file, range_bytes, problems, options=options):
        documents += read(file_range, problems, options=options, advance=lambda num_bytes: None)
    return documents, problems


def texts(documents: list[RawDocument]) -> list[str]:
    return [item.data.decode() if isinstance(item.data, bytes) else item.data for item in documents]


def as_lines(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def random_records(num: int) -> list[dict[str, str]]:
    generator = random.Random(3)
    return [{"text": f"{number}: " + "字 word\n" * generator.randrange(0, 60)} for number in range(num)]


def test_a_text_file_is_one_document_of_its_bytes(tmp_path: Path) -> None:
    raw = "a\r\nb\0\t字\n".encode() + b"\xff"
    (tmp_path / "notes").write_bytes(raw)
    documents, problems = read_file(tmp_path / "notes")
    assert documents == [RawDocument(id="notes", data=raw, num_bytes=len(raw))]
    assert not problems.counts


@pytest.mark.parametrize("fast", [True, False])
def test_jsonl_lines_are_documents_and_bad_lines_are_counted_by_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    if not fast:
        monkeypatch.setattr(jsonl, "orjson", None)
    lines = [
        b'\xef\xbb\xbf{"text": "after a byte order mark"}',
        b"{broken",
        b"",
        b'["text"]',
        b'{"body": "x", "text": 3}',
        b'{"text": "caf\xe9"}',
        json.dumps({"text": "half \ud800 a character"}).encode(),
        json.dumps({"text": "a whole one \U0001f600"}).encode(),
        b'{"text": "", "x": NaN}',
        b'{"text": "last, without a newline"}',
    ]
    offsets = [sum(len(line) + 1 for line in lines[:index]) for index in range(len(lines))]
    (tmp_path / "d.jsonl").write_bytes(b"\n".join(lines))
    documents, problems = read_file(tmp_path / "d.jsonl")
    assert documents == [
        RawDocument(id=f"d.jsonl@{offsets[index]}", data=text, begin=offsets[index], num_bytes=len(lines[index]))
        for index, text in [
            (0, "after a byte order mark"),
            (5, "caf\ufffd"),
            (6, "half \ud800 a character"),
            (7, "a whole one \U0001f600"),
            (8, ""),
            (9, "last, without a newline"),
        ]
    ]
    assert problems.counts == {NOT_JSON: 2, NO_TEXT: 1, INVALID_UTF8: 1}
    places = [place.split(": ")[0] for place in problems.examples[NOT_JSON]]
    assert places == [f"d.jsonl@{offsets[1]}", f"d.jsonl@{offsets[3]}"]
    assert problems.examples[NO_TEXT] == [f"d.jsonl@{offsets[4]}: no string 'text' (found body: str, text: int)"]
    assert problems.examples[INVALID_UTF8] == [f"d.jsonl@{offsets[5]}: byte 0xe9 at byte 13 of the line"]


@pytest.mark.parametrize("range_bytes", [1, 7, 100, 1000, 4096])
def test_ranges_of_a_jsonl_file_have_every_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, range_bytes: int
) -> None:
    monkeypatch.setattr(streams, "_READ_BYTES", 64)
    records = random_records(12 if range_bytes < 100 else 60)
    (tmp_path / "d.jsonl").write_bytes(as_lines(records))
    whole, _ = read_file(tmp_path / "d.jsonl")
    assert texts(whole) == [record["text"] for record in records]
    in_ranges, problems = read_file(tmp_path / "d.jsonl", range_bytes=range_bytes)
    assert in_ranges == whole
    assert not problems.counts


def pack_zst(raw: bytes) -> bytes:
    return b"".join(
        zstandard.ZstdCompressor(write_checksum=True).compress(part)
        for part in (raw[: len(raw) // 2], raw[len(raw) // 2 :])
    )


def pack_gz(raw: bytes) -> bytes:
    """Two members and padding, as some tools write it."""
    return gzip.compress(raw[: len(raw) // 2]) + gzip.compress(raw[len(raw) // 2 :]) + bytes(100)


def pack_bz2(raw: bytes) -> bytes:
    return bz2.compress(raw[: len(raw) // 2], 1) + bz2.compress(raw[len(raw) // 2 :], 1)


PACKERS = {".jsonl.gz": pack_gz, ".jsonl.zst": pack_zst, ".jsonl.bz2": pack_bz2}


@pytest.mark.parametrize("suffix", PACKERS)
def test_packed_files_read_like_plain_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setattr(streams, "_COMPRESSED_READ_BYTES", 50)
    raw = as_lines(random_records(40))
    (tmp_path / "d.jsonl").write_bytes(raw)
    (tmp_path / f"d{suffix}").write_bytes(PACKERS[suffix](raw))
    plain, _ = read_file(tmp_path / "d.jsonl")
    packed, problems = read_file(tmp_path / f"d{suffix}", range_bytes=10)
    assert texts(packed) == texts(plain)
    assert [item.id.split("@")[1] for item in packed] == [item.id.split("@")[1] for item in plain]
    assert not problems.counts


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_truncated_file_gives_what_is_there_and_names_the_position(tmp_path: Path, suffix: str) -> None:
    generator = random.Random(1)
    records = [{"text": "".join(generator.choices("abcdefghij", k=500))} for _ in range(2000)]
    packed = PACKERS[suffix](as_lines(records)).rstrip(b"\0")
    cut_at = len(packed) * 3 // 4
    path = tmp_path / f"d{suffix}"
    path.write_bytes(packed[:cut_at])
    documents, problems = read_file(path)
    whole = [record["text"] for record in records]
    assert len(documents) >= 1000
    assert texts(documents) == whole[: len(documents)]
    assert problems.counts[TRUNCATED] == 1
    (place,) = problems.examples[TRUNCATED]
    assert place.startswith(f"d{suffix}: at byte {cut_at} (")
    with pytest.raises(UserError, match=r"too early: d\.jsonl.*--strict"):
        read_file(path, strict=True)


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_damaged_file_gives_what_comes_before(tmp_path: Path, suffix: str) -> None:
    packed = bytearray(PACKERS[suffix](as_lines(random_records(40))))
    packed[len(packed) // 2 + 60 :] = b"no packed data" * 20
    (tmp_path / f"d{suffix}").write_bytes(packed)
    documents, problems = read_file(tmp_path / f"d{suffix}")
    assert texts(documents) == [record["text"] for record in random_records(40)][: len(documents)]
    assert problems.counts[UNREADABLE] == 1
    assert "damaged after byte" in problems.examples[UNREADABLE][0]


def write_parquet(path: Path, columns: dict[str, Any], rows: int = 7) -> None:
    parquet.write_table(pyarrow.table(columns), path, row_group_size=rows)


@pytest.mark.parametrize("range_bytes", [1, 2000, 10**9])
def test_parquet_rows_are_documents_in_any_ranges(tmp_path: Path, range_bytes: int) -> None:
    found: list[str | None] = [record["text"] for record in random_records(50)]
    found[20] = None
    write_parquet(tmp_path / "d.parquet", {"id": list(range(50)), "text": found})
    documents, problems = read_file(tmp_path / "d.parquet", range_bytes=range_bytes)
    assert texts(documents) == [text for text in found if text is not None]
    assert [item.id for item in documents] == [f"d.parquet@{row}" for row in range(50) if row != 20]
    assert problems.as_json() == {NO_TEXT: {"count": 1, "examples": ["d.parquet@20: null in 'text'"]}}


def test_parquet_strings_that_are_no_utf8_are_left_to_the_normaliser(tmp_path: Path) -> None:
    raw = [b"good", b"caf\xe9", b"after"]
    array = pyarrow.array(raw, type=pyarrow.binary()).view(pyarrow.string())
    write_parquet(tmp_path / "d.parquet", {"text": array})
    assert [item.data for item in read_file(tmp_path / "d.parquet")[0]] == raw


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"], "id": [1]}, "no column 'text' (found body: string, id: int64)"),
        ({"text": [1, 2]}, "column 'text' is int64, not string (found text: int64)"),
    ],
)
def test_wrong_columns_are_named_with_those_there_are(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    write_parquet(tmp_path / "d.parquet", columns)
    documents, problems = read_file(tmp_path / "d.parquet")
    assert documents == []
    assert problems.as_json() == {NO_TEXT: {"count": 1, "examples": [f"d.parquet: {message}"]}}


def test_another_field_can_hold_the_text(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"content": "here"}\n')
    write_parquet(tmp_path / "d.parquet", {"content": ["there"]})
    assert texts(read_file(tmp_path / "d.jsonl", options=ReadOptions(text_field="content"))[0]) == ["here"]
    assert texts(read_file(tmp_path / "d.parquet", options=ReadOptions(text_field="content"))[0]) == ["there"]


def test_a_truncated_parquet_file_is_counted(tmp_path: Path) -> None:
    write_parquet(tmp_path / "d.parquet", {"text": ["a" * 1000] * 100})
    raw = (tmp_path / "d.parquet").read_bytes()
    (tmp_path / "d.parquet").write_bytes(raw[: len(raw) // 2])
    documents, problems = read_file(tmp_path / "d.parquet")
    assert (documents, problems.counts) == ([], {UNREADABLE: 1})
    assert problems.examples[UNREADABLE][0].startswith("d.parquet: ")


def test_a_parquet_file_damaged_inside_names_the_row(tmp_path: Path) -> None:
    rows = [f"{number} " * 200 for number in range(40)]
    write_parquet(tmp_path / "d.parquet", {"text": rows}, rows=10)
    start = parquet.read_metadata(tmp_path / "d.parquet").row_group(2).column(0).dictionary_page_offset
    raw = bytearray((tmp_path / "d.parquet").read_bytes())
    raw[start : start + 40] = b"\xff" * 40
    (tmp_path / "d.parquet").write_bytes(raw)
    documents, problems = read_file(tmp_path / "d.parquet")
    # What is damaged costs the rows of its group, in whatever ranges the file is read.
    assert texts(documents) == rows[:20] + rows[30:]
    assert problems.counts == {UNREADABLE: 1}
    assert problems.examples[UNREADABLE][0].startswith("d.parquet: after row 20: ")
    in_ranges, same = read_file(tmp_path / "d.parquet", range_bytes=1)
    assert (in_ranges, same.as_json()) == (documents, problems.as_json())


@pytest.mark.parametrize("name", ["d.txt", "d.jsonl", "d.jsonl.gz", "d.parquet"])
def test_enormous_documents_are_counted_and_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(streams, "_READ_BYTES", 64)
    wanted = ["a" * 100, "b" * 101, "字" * 34, "c" * 1000, "after"]
    raw = as_lines([{"text": text} for text in wanted])
    write: dict[str, Callable[[], object]] = {
        "d.txt": lambda: (tmp_path / name).write_bytes(b"b" * 101),
        "d.jsonl": lambda: (tmp_path / name).write_bytes(raw),
        "d.jsonl.gz": lambda: (tmp_path / name).write_bytes(gzip.compress(raw)),
        "d.parquet": lambda: write_parquet(tmp_path / name, {"text": wanted}),
    }
    write[name]()
    documents, problems = read_file(tmp_path / name, options=ReadOptions(max_document_bytes=100))
    assert texts(documents) == ([] if name == "d.txt" else ["a" * 100, "after"])
    assert problems.counts == {TOO_LONG: 1 if name == "d.txt" else 3}
    assert all(
        "more than max_document_bytes = 100" in where or "400 bytes" in where for where in problems.examples[TOO_LONG]
    )
    documents, problems = read_file(tmp_path / name, options=ReadOptions(max_document_bytes=1000))
    assert texts(documents) == (["b" * 101] if name == "d.txt" else wanted)
    assert not problems.counts


def test_a_file_that_changes_or_vanishes_after_listing_is_counted(tmp_path: Path) -> None:
    names = ("a.txt", "b.txt", "c.txt")
    for name in names:
        (tmp_path / name).write_text(name)
    problems = Problems()
    ranges = [
        file_range
        for file in FileLister(problems).files([str(tmp_path)])
        for file_range in cut_into_ranges(file, 100, problems, options=OPTIONS)
    ]
    (tmp_path / "a.txt").write_text("longer than before")
    (tmp_path / "b.txt").unlink()
    documents = [
        item for file_range in ranges for item in read(file_range, problems, options=OPTIONS, advance=lambda _: None)
    ]
    assert texts(documents) == ["c.txt"]
    assert problems.counts == {CHANGED: 1, UNREADABLE: 1}
    assert "18 bytes, 5 when the corpus was listed" in problems.examples[CHANGED][0]
    assert "b.txt: No such file" in problems.examples[UNREADABLE][0]


def test_a_long_line_is_read_once_beside_looking_for_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_READ_BYTES", 64)
    records = [{"text": "before"}, {"text": "x" * 20_000}, {"text": "after"}]
    (tmp_path / "d.jsonl").write_bytes(as_lines(records))
    size = (tmp_path / "d.jsonl").stat().st_size
    num_read = 0

    def count(num_bytes: int) -> None:
        nonlocal num_read
        num_read += num_bytes

    problems = Problems()
    (file,) = FileLister(problems).files([str(tmp_path / "d.jsonl")])
    ranges = list(cut_into_ranges(file, 500, problems, options=OPTIONS))
    documents = [item for one in ranges for item in read(one, problems, options=OPTIONS, advance=count)]
    assert texts(documents) == [record["text"] for record in records]
    # By the range that it begins in, and by each of the others up to their own ends; a buffer more in each.
    assert len(ranges) > 40
    assert num_read <= 2 * size + 2 * 64 * len(ranges)


@pytest.mark.parametrize("name", ["D.JSONL", "d.Jsonl.GZ", "D.PARQUET"])
def test_names_in_capitals_are_of_the_same_kind(tmp_path: Path, name: str) -> None:
    records = random_records(5)
    if "PARQUET" in name:
        write_parquet(tmp_path / name, {"text": [record["text"] for record in records]})
    else:
        (tmp_path / name).write_bytes(gzip.compress(as_lines(records)) if "GZ" in name else as_lines(records))
    documents, problems = read_file(tmp_path / name, range_bytes=100)
    assert texts(documents) == [record["text"] for record in records]
    assert not problems.counts
    assert [file.id for file in FileLister(problems).files([str(tmp_path)])] == [f"{tmp_path.name}/{name}"]


@pytest.mark.parametrize("name", ["d.txt.gz", "d.zip", "d.jsonl.xz", "d.parquet.gz", "D.AVRO"])
def test_files_of_other_kinds_are_no_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    documents, problems = read_file(tmp_path / name)
    assert (documents, problems.counts) == ([], {UNREADABLE: 1})


def test_a_format_that_is_asked_for_is_read_whatever_the_suffix(tmp_path: Path) -> None:
    (tmp_path / "d.CSV").write_bytes(b"a,b")
    assert texts(read_file(tmp_path / "d.CSV", options=ReadOptions(format="text"))[0]) == ["a,b"]
    (tmp_path / "d.dump.gz").write_bytes(gzip.compress(b'{"text": "in a line"}\n'))
    assert texts(read_file(tmp_path / "d.dump.gz", options=ReadOptions(format="jsonl"))[0]) == ["in a line"]
    assert read_file(tmp_path / "d.dump.gz", options=ReadOptions(format="parquet"))[1].counts == {UNREADABLE: 1}


@pytest.mark.parametrize("content", [b"{", b'{"no": "text"}', b'{"text": "caf\xe9"}'])
def test_strict_stops_at_the_first_problem_and_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "good"}\n' + content)
    with pytest.raises(UserError, match=r"d\.jsonl@17.*--strict"):
        read_file(tmp_path / "d.jsonl", strict=True)


@pytest.mark.parametrize(("package", "name"), [("pyarrow", "d.parquet"), ("zstandard", "d.jsonl.zst")])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str) -> None:
    monkeypatch.setattr(streams, "zstandard", None)
    for module in (package, *(f"{streams.__package__}.{format}" for format in ("parquet", "columns"))):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=rf"{package} is needed .*lightscale\[corpus\]"):
        read_file(tmp_path / name)

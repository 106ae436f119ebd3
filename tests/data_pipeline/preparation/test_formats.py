"""Formats beside text, jsonl and plain columns of parquet: what is read, with which places, and what is counted."""

import csv
import gzip
import io
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightscale.data_pipeline.preparation.corpus import make_corpus
from lightscale.data_pipeline.preparation.readers import RawDocument, cut_into_ranges, read, streams
from lightscale.data_pipeline.preparation.readers.inputs import (
    INVALID_UTF8,
    NO_CHECKSUM,
    NO_DOCUMENT,
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

pyarrow = pytest.importorskip("pyarrow", reason="arrow files are read by pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard", reason="zst files are read by zstandard")


def read_file(path: Path, *, range_bytes: int = 10**9, **options: Any) -> tuple[list[RawDocument], Problems]:
    problems = Problems()
    (file,) = FileLister(problems).files([str(path)])
    found: list[RawDocument] = []
    wanted = ReadOptions(**options)
    for file_range in cut_into_ranges(file, range_bytes, problems, options=wanted):
        found += read(file_range, problems, options=wanted, advance=lambda num_bytes: None)
    return found, problems


def texts(documents: list[RawDocument]) -> list[str]:
    return [item.data.decode() if isinstance(item.data, bytes) else item.data for item in documents]


def hostile_records(num: int) -> list[dict[str, Any]]:
    """Texts of what JSON and CSV are written with."""
    generator = random.Random(7)
    signs = ['"', "\\", "{", "}", "[", "]", ",", "\n", "\t", "字", "a", " ", "\\u0022"]
    return [
        {"n": [number, {"x": "]"}], "text": "".join(generator.choices(signs, k=generator.randrange(1, 60)))}
        for number in range(num)
    ]


@pytest.mark.parametrize("read_bytes", [1, 7, 2**20])
@pytest.mark.parametrize(
    "write",
    [
        json.dumps,
        lambda records: json.dumps(records, indent=2, ensure_ascii=False),
        lambda records: "\ufeff" + "\n".join(json.dumps(record) for record in records),
        lambda records: "".join(json.dumps(record, indent=1) for record in records),
    ],
    ids=["array", "indented array", "lines", "objects without anything between"],
)
def test_json_in_any_form_gives_its_objects_with_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, read_bytes: int
) -> None:
    monkeypatch.setattr(streams, "_READ_BYTES", read_bytes)
    records = hostile_records(40)
    raw = write(records).encode()
    (tmp_path / "d.json").write_bytes(raw)
    documents, problems = read_file(tmp_path / "d.json")
    assert not problems.counts
    assert texts(documents) == [record["text"] for record in records]
    for document, record in zip(documents, records, strict=True):
        assert json.loads(raw[document.begin : document.begin + document.num_bytes]) == record
        assert document.id == f"d.json@{document.begin}"
    (tmp_path / "e.json.gz").write_bytes(gzip.compress(raw))
    packed, _ = read_file(tmp_path / "e.json.gz")
    assert [(item.data, item.begin) for item in packed] == [(item.data, item.begin) for item in documents]


def test_what_is_wrong_in_json_costs_itself_only(tmp_path: Path) -> None:
    long = json.dumps({"text": "x" * 500})
    raw = (
        f'[{{"text": "one"}}, 3, "{{", [1], {{"text": tru}}, {long}, {{"text": "half \\ud800"}}, {{"body": 1}}, '
        '{"text": "caf\xe9"}, {"text": "last"}, {"text": "cut'
    ).encode("latin-1")
    (tmp_path / "d.json").write_bytes(raw)
    documents, problems = read_file(tmp_path / "d.json", max_document_bytes=100)
    assert texts(documents[:1] + documents[2:]) == ["one", "caf\ufffd", "last"]
    assert documents[1].data == "half \ud800"
    assert problems.counts[TOO_LONG] == problems.counts[NO_TEXT] == problems.counts[TRUNCATED] == 1
    assert problems.counts[INVALID_UTF8] == 1
    assert f"d.json@{raw.index(b'{' + chr(34).encode() + b'text' + chr(34).encode() + b': tru}')}: " in "".join(
        problems.examples[NOT_JSON]
    )
    assert problems.counts[NOT_JSON] >= 2


@pytest.mark.parametrize("read_bytes", [3, 2**20])
def test_records_of_csv_may_hold_lines_and_have_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(streams, "_READ_BYTES", read_bytes)
    records = hostile_records(30)
    for name, dialect in (("d.csv", csv.excel), ("d.tsv", csv.excel_tab)):
        out = io.StringIO(newline="")
        writer = csv.writer(out, dialect=dialect)
        writer.writerow(["id", "text"])
        writer.writerows([f"n{number}", record["text"]] for number, record in enumerate(records))
        raw = out.getvalue().encode()
        (tmp_path / name).write_bytes(raw)
        documents, problems = read_file(tmp_path / name, id_field="id")
        assert not problems.counts
        assert texts(documents) == [record["text"] for record in records]
        assert [item.own_id for item in documents] == [f"n{number}" for number in range(30)]
        for document in documents:
            own = raw[document.begin : document.begin + document.num_bytes].decode()
            assert next(csv.reader(io.StringIO(own, newline=""), dialect=dialect))[1] == document.data


def test_what_is_wrong_in_csv_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"body,n\nx,1\n")
    assert read_file(tmp_path / "a.csv")[1].examples[NO_TEXT] == ["a.csv: no column 'text' (found body, n)"]
    (tmp_path / "b.csv").write_bytes(b'n,text\n1,"good"\n2\n3,caf\xe9\n4,"' + b"never closed\n" * 50)
    documents, problems = read_file(tmp_path / "b.csv", max_document_bytes=100)
    assert texts(documents) == ["good", "caf\ufffd"]
    assert problems.counts == {NO_TEXT: 1, INVALID_UTF8: 1, TOO_LONG: 1}
    assert problems.examples[TOO_LONG][0].startswith("b.csv@25: ")


TABLE = {
    "meta": [{"body": text, "url": f"u{number}"} for number, text in enumerate(["one", "two", "three"] * 3)],
    "a.b": ["dotted"] * 9,
}


def write_arrow(path: Path, table: Any, *, is_stream: bool) -> None:
    make = pyarrow.ipc.new_stream if is_stream else pyarrow.ipc.new_file
    with make(path, table.schema) as out:
        out.write_table(table, max_chunksize=2)


@pytest.mark.parametrize("kind", ["file", "stream", "parquet"])
def test_tables_have_fields_in_fields_and_columns_of_any_type_of_text(tmp_path: Path, kind: str) -> None:
    plain = ["one", "字", None, "three"] * 3
    table = pyarrow.table(
        {
            **{key: values + values[:3] for key, values in TABLE.items()},
            "binary": pyarrow.array([None if text is None else text.encode() for text in plain], pyarrow.binary()),
            "words": pyarrow.array(plain).dictionary_encode(),
            "large": pyarrow.array(plain, pyarrow.large_string()),
            "number": list(range(12)),
        }
    )
    path = tmp_path / ("d.parquet" if kind == "parquet" else "d.arrow")
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=2)
    else:
        write_arrow(path, table, is_stream=kind == "stream")
    expected = [text for text in plain if text is not None]
    for field in ("binary", "words", "large"):
        for range_bytes in (1, 10**9):
            documents, problems = read_file(path, text_field=field, id_field="meta.url", range_bytes=range_bytes)
            assert texts(documents) == expected
            assert [item.begin for item in documents] == [row for row in range(12) if plain[row] is not None]
            assert [item.own_id for item in documents][:3] == ["u0", "u1", "u3"]
            assert problems.counts == {NO_TEXT: 3}
    assert texts(read_file(path, text_field="meta.body")[0])[:4] == ["one", "two", "three", "one"]
    assert texts(read_file(path, text_field="a.b")[0]) == ["dotted"] * 12
    for field in ("number", "meta", "meta.none"):
        documents, problems = read_file(path, text_field=field, range_bytes=1)
        assert (documents, problems.counts) == ([], {NO_TEXT: 1})


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_damaged_arrow_file_is_counted(tmp_path: Path, is_stream: bool) -> None:
    table = pyarrow.table({"text": [f"{number} " * 50 for number in range(20)]})
    write_arrow(tmp_path / "d.arrow", table, is_stream=is_stream)
    raw = (tmp_path / "d.arrow").read_bytes()
    (tmp_path / "d.arrow").write_bytes(raw[: len(raw) // 2])
    documents, problems = read_file(tmp_path / "d.arrow")
    assert texts(documents) == table["text"].to_pylist()[: len(documents)]
    assert bool(documents) == is_stream
    assert problems.counts == {UNREADABLE: 1}


def test_fields_in_fields_of_objects(tmp_path: Path) -> None:
    lines = [{"meta": {"body": "inside", "id": 4}}, {"meta.body": "by its name", "meta": {}}, {"meta": "none"}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    documents, problems = read_file(tmp_path / "d.jsonl", text_field="meta.body", id_field="meta.id")
    assert [(item.data, item.own_id) for item in documents] == [("inside", "4"), ("by its name", None)]
    assert problems.counts == {NO_TEXT: 1}


def test_a_missing_checksum_is_said(tmp_path: Path) -> None:
    raw = b'{"text": "a"}\n'
    for name, with_checksum in (("with", True), ("without", False)):
        packed = zstandard.ZstdCompressor(write_checksum=with_checksum).compress(raw)
        (tmp_path / f"{name}.jsonl.zst").write_bytes(packed)
        documents, problems = read_file(tmp_path / f"{name}.jsonl.zst")
        assert texts(documents) == ["a"]
        assert problems.counts == ({} if with_checksum else {NO_CHECKSUM: 1})


def warc_file(records: list[tuple[str, str, bytes]], *, packed: bool) -> bytes:
    """Of (type, content type, content) of records; responses begin with their HTTP headers."""
    warcio = pytest.importorskip("warcio.warcwriter", reason="WARC files are read by warcio")
    from warcio.statusandheaders import StatusAndHeaders

    out = io.BytesIO()
    writer = warcio.WARCWriter(out, gzip=packed)
    for number, (kind, media, content) in enumerate(records):
        http = None
        if kind == "response":
            status = "404 Not Found" if media.startswith("404 ") else "200 OK"
            http = StatusAndHeaders(status, [("Content-Type", media.removeprefix("404 "))], protocol="HTTP/1.1")
        record = writer.create_warc_record(
            f"http://x/{number}",
            kind,
            payload=io.BytesIO(content),
            http_headers=http,
            warc_content_type=media if http is None else "",
        )
        writer.write_record(record)
    return out.getvalue()


@pytest.mark.parametrize("packed", [False, True])
def test_extracted_texts_of_crawls_are_documents_as_they_are(tmp_path: Path, packed: bool) -> None:
    records = [
        ("warcinfo", "application/warc-fields", b"software: x\r\n"),
        ("conversion", "text/plain", "first\n字\n".encode()),
        ("response", "image/png", b"\x89PNG"),
        ("response", "404 text/plain", b"not there"),
        ("response", "text/plain; charset=utf-8", b"a plain page"),
        ("conversion", "text/plain", b"x" * 200),
        ("conversion", "text/plain", b"last"),
    ]
    raw = warc_file(records, packed=packed)
    path = tmp_path / ("d.wet.gz" if packed else "d.warc")
    path.write_bytes(raw)
    documents, problems = read_file(path, id_field="WARC-Target-URI", max_document_bytes=100)
    assert texts(documents) == ["first\n字\n", "a plain page", "last"]
    assert [item.own_id for item in documents] == ["http://x/1", "http://x/4", "http://x/6"]
    assert problems.counts == {NO_DOCUMENT: 3, TOO_LONG: 1}
    content = warc_file(records, packed=False)
    if not packed:
        for document in documents:
            own = content[document.begin : document.begin + document.num_bytes]
            assert own.startswith(b"WARC/1.0\r\n")
            assert document.data in own


def test_a_damaged_warc_file_gives_what_comes_before(tmp_path: Path) -> None:
    raw = warc_file([("conversion", "text/plain", b"one"), ("conversion", "text/plain", b"two" * 99)], packed=False)
    (tmp_path / "d.warc").write_bytes(raw[:-30])
    documents, problems = read_file(tmp_path / "d.warc")
    assert texts(documents) == ["one"]
    assert problems.examples == {TRUNCATED: [f"d.warc@{raw.rindex(b'WARC/1')}: 26 bytes of the record are missing"]}
    (tmp_path / "d.wet.gz").write_bytes(gzip.compress(raw)[:-9])
    documents, problems = read_file(tmp_path / "d.wet.gz")
    assert texts(documents)[:1] == ["one"]
    assert problems.counts[TRUNCATED] >= 1


def test_texts_of_crawls_are_in_the_character_set_that_their_headers_name(tmp_path: Path) -> None:
    text = "清晨的港口，café"
    said = [
        ("text/plain; charset=GB2312", "清晨镕".encode("gbk"), "清晨镕"),  # as browsers do: GBK has what it lacks
        ('text/plain; Charset="iso-8859-1"', "café – “été”".encode("cp1252"), "café – “été”"),
        ("text/plain; charset=gbk", text.encode(), text),  # what is UTF-8 is read as such
        ("text/plain; charset=big5", b"\xff\xfe", b"\xff\xfe"),  # not of this set: the normaliser counts it
        ("text/plain; charset=martian", b"caf\xe9", b"caf\xe9"),
        ("text/plain; charset=hex", b"caf\xe9", b"caf\xe9"),
        ("text/plain; charset=unicode_escape", b"caf\xe9\\n", b"caf\xe9\\n"),  # Python's, and no set of a page
        ("text/plain; charset=Shift_JIS", "①".encode("cp932"), "①"),
        ("text/plain", b"caf\xe9", b"caf\xe9"),
    ]
    raw = warc_file([("response", media, content) for media, content, _ in said], packed=True)
    (tmp_path / "d.warc.gz").write_bytes(raw)
    documents, problems = read_file(tmp_path / "d.warc.gz")
    assert not problems.counts
    for document, (media, _, expected) in zip(documents, said, strict=True):
        found = (
            document.data if isinstance(expected, bytes) or isinstance(document.data, str) else document.data.decode()
        )
        assert found == expected, media


PARAGRAPH = "<p>Le café était fermé, et les bateaux de l'été ne sont pas revenus au port de la vieille ville.</p>"
PAGE = f"<html><body><nav>menu</nav><article>{PARAGRAPH * 9}</article></body></html>"


@pytest.fixture
def page_file(tmp_path: Path) -> Path:
    """A page in Latin-1, as only its HTTP headers say, and one without text."""
    pages = [("text/html; charset=iso-8859-1", PAGE.encode("latin-1")), ("text/html", b"<html></html>")]
    (tmp_path / "d.warc").write_bytes(warc_file([("response", *page) for page in pages], packed=False))
    return tmp_path / "d.warc"


def test_of_pages_in_html_trafilatura_finds_the_texts(page_file: Path) -> None:
    """Where it is installed, which it is not by default: by hand with trafilatura 2.3.1, 2026-11-25."""
    pytest.importorskip("trafilatura", reason="trafilatura is not installed: lightscale[web]")
    ((document,), problems) = read_file(page_file)
    assert isinstance(document.data, str)
    assert "Le café était fermé" in document.data
    assert "menu" not in document.data
    assert problems.counts == {NO_TEXT: 1}


def test_what_trafilatura_says_is_the_document_and_its_absence_is_said(
    page_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def extract(page: bytes | str) -> str | None:
        given.append(page)
        return "its text" if len(page) > 100 else None

    monkeypatch.setitem(sys.modules, "trafilatura", SimpleNamespace(extract=extract))
    ((document,), problems) = read_file(page_file)
    assert given == [PAGE, b"<html></html>"]
    assert document.data == "its text"
    assert problems.counts == {NO_TEXT: 1}
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    with pytest.raises(UserError, match=r"trafilatura is needed .*\(import of trafilatura .*lightscale\[web\]"):
        read_file(page_file)


def test_a_source_says_its_format() -> None:
    corpus = make_corpus({"sources": {"a": {"paths": ["x"], "format": "json"}}}, origin="c.toml")
    assert corpus.read_options("a").format == "json"
    assert corpus.sources["a"].suffixes == [".json", ".json.gz", ".json.zst", ".json.bz2"]
    with pytest.raises(
        UserError, match=(r'sources\.a\.format: "jsn" is not a format; use one of text, jsonl, json, csv')
    ):
        make_corpus({"sources": {"a": {"paths": ["x"], "format": "jsn"}}}, origin="c.toml")

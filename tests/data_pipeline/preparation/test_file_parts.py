"""Large compressed files: read in parts, an interruption costs one part, and nothing else is to be seen of them."""

import bz2
import csv
import gzip
import io
import json
import os
import random
import signal
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightscale.data_pipeline.preparation import unit_parts, units
from lightscale.data_pipeline.preparation.corpus import load_corpus
from lightscale.data_pipeline.preparation.prepare import PrepareOptions, prepare
from lightscale.data_pipeline.preparation.readers import (
    FIRST,
    FilePart,
    PartBegin,
    RawDocument,
    cut_into_ranges,
    read,
    streams,
)
from lightscale.data_pipeline.preparation.readers.access_points import AccessPoint, GzipMember
from lightscale.data_pipeline.preparation.readers.inputs import TRUNCATED, UNREADABLE, Problems, ReadOptions
from lightscale.data_pipeline.preparation.sources import FileLister

zstandard = pytest.importorskip("zstandard", reason="zst files are read by zstandard")

READ_BYTES, PART_BYTES = 2**11, 2**13


def lines(num: int, seed: int = 5) -> bytes:
    """Of jsonl, whose deflate blocks begin at all bits; some that are no documents, and a long one."""
    generator = random.Random(seed)
    words = ["".join(generator.choices("abcdefghijklmnop", k=generator.randint(2, 9))) for _ in range(3000)]
    kinds = ["news", "law", "verse"]
    found = []
    for number in range(num):
        text = " ".join(generator.choices(words, k=12000 if number == num // 3 + 1 else generator.randint(1, 120)))
        record = {"text": text if number % 50 else None, "id": f"n{number}", "kind": kinds[number * 3 // num]}
        found.append(json.dumps(record) if number % 70 else "no object")
    return "\n".join(found).encode()


RAW = lines(900)
IN_LONG_LINE = sum(len(line) + 1 for line in RAW.split(b"\n")[:301]) + 2**15
HALVES = (RAW[: len(RAW) // 2], RAW[len(RAW) // 2 :])


def pack_gz(raw: bytes) -> bytes:
    """In small blocks."""
    packer = zlib.compressobj(wbits=31, memLevel=4)
    return packer.compress(raw) + packer.flush()


def pack_flushed(raw: bytes) -> bytes:
    """As programs do that flush behind each line: many short blocks, of which most have fixed codes."""
    packer = zlib.compressobj(wbits=31)
    lines = (packer.compress(line) + packer.flush(zlib.Z_SYNC_FLUSH) for line in raw.splitlines(keepends=True))
    return b"".join(lines) + packer.flush()


def pack_fixed(raw: bytes) -> bytes:
    """With fixed codes alone."""
    packer = zlib.compressobj(wbits=31, strategy=zlib.Z_FIXED)
    return packer.compress(raw) + packer.flush()


def pack_frame(raw: bytes) -> bytes:
    packed: bytes = zstandard.ZstdCompressor(write_checksum=True).compress(raw)
    return packed


def pack_stored(raw: bytes) -> bytes:
    return gzip.compress(raw, 0)


def pack_stream(raw: bytes) -> bytes:
    """Of bzip2, in its smallest blocks."""
    return bz2.compress(raw, 1)


def one_by_one(raw: bytes, pack: Callable[[bytes], bytes], size: int = 2**14) -> bytes:
    return b"".join(pack(raw[begin : begin + size]) for begin in range(0, len(raw), size))


def texts(num: int) -> list[str]:
    """With what a format writes in a way of its own."""
    generator = random.Random(6)
    words = [*(f"{generator.getrandbits(40):x}" for _ in range(2000)), '"', "\\", "\n", ",", "{", "]"]
    return [" ".join([*generator.choices(words, k=generator.randint(1, 60)), "字"]) for _ in range(num)]


def short_lines(num: int) -> bytes:
    """Some of them make blocks with codes of their own if each is one, and most do not."""
    generator = random.Random(1)
    words = [f"{generator.getrandbits(28):x}" for _ in range(3000)]
    lines = ({"text": " ".join(generator.choices(words, k=generator.randint(8, 20)))} for _ in range(num))
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def array_of_json(num: int) -> bytes:
    """Some elements are no objects."""
    values = [{"id": f"n{number}", "text": text} if number % 9 else text for number, text in enumerate(texts(num))]
    return json.dumps({"between": 1}).encode() + json.dumps(values, indent=1, ensure_ascii=False).encode()


def table_of_csv(num: int) -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out).writerows([("id", "text"), *((f"n{number}", text) for number, text in enumerate(texts(num)))])
    return out.getvalue().encode().replace("字".encode(), b"\xff")


def crawl(num: int) -> bytes:
    warcio = pytest.importorskip("warcio.warcwriter", reason="WARC files are read by warcio")
    out = io.BytesIO()
    writer = warcio.WARCWriter(out, gzip=False)
    for number, text in enumerate(texts(num)):
        kind = ("text/plain", "image/png")[number % 7 == 6]
        payload = io.BytesIO(text.encode())
        writer.write_record(writer.create_warc_record(f"u{number}", "conversion", payload, warc_content_type=kind))
    return out.getvalue()


PACKED: dict[str, tuple[str, Callable[[], bytes]]] = {
    "gzip, small blocks": ("jsonl.gz", lambda: pack_gz(RAW)),
    "gzip, two members and padding": ("jsonl.gz", lambda: b"".join(map(pack_gz, HALVES)) + bytes(100)),
    "gzip, many members": ("jsonl.gz", lambda: one_by_one(RAW, gzip.compress, 9000)),
    "gzip, flushed lines": ("jsonl.gz", lambda: pack_flushed(short_lines(6000))),
    "gzip, fixed codes": ("jsonl.gz", lambda: pack_fixed(RAW)),
    "gzip, stored": ("jsonl.gz", lambda: pack_stored(RAW[: 2**17])),
    "zst, frames": (
        "jsonl.zst",
        lambda: one_by_one(RAW[:IN_LONG_LINE], pack_frame, 2**12) + pack_frame(RAW[IN_LONG_LINE:]),
    ),
    "zst, one frame": ("jsonl.zst", lambda: pack_frame(RAW)),
    "bz2, streams": ("jsonl.bz2", lambda: one_by_one(RAW, bz2.compress)),
    "bz2, one stream": ("jsonl.bz2", lambda: pack_stream(RAW)),
    "json": ("json.zst", lambda: zstandard.ZstdCompressor().compress(array_of_json(1500))),
    "csv": ("csv.gz", lambda: pack_gz(table_of_csv(800))),
    "warc": ("warc.zst", lambda: pack_frame(crawl(1000))),
    "warc, members": ("warc.gz", lambda: one_by_one(crawl(400), gzip.compress, 3000)),
}
ONE_POINT = ("gzip, fixed codes", "gzip, stored", "zst, one frame", "bz2, one stream", "json", "warc")
"""Where nothing but the beginning of the file is an access point."""


def read_parts(
    path: Path, least_bytes: int, *, is_kept_open: bool = False
) -> tuple[list[RawDocument], dict[str, Any], list[tuple[PartBegin | None, dict[str, Any]]]]:
    """Documents and problems; and of each part, which are read one after the other, its end and problems.

    ``is_kept_open``: with what is open; else each from what is kept as JSON.
    """
    is_table = path.name.startswith("d.jsonl")
    options = ReadOptions(id_field="id", label_field="kind" if is_table else None)
    (file,) = FileLister(Problems()).files([str(path)])
    (file_range,) = cut_into_ranges(file, 10**9, Problems(), options=options)
    documents: list[RawDocument] = []
    found, part, advanced = Problems(), FilePart(FIRST, least_bytes), list[int]()
    parts: list[tuple[PartBegin | None, dict[str, Any]]] = []
    while True:
        problems = Problems()
        documents += read(file_range, problems, options=options, advance=advanced.append, part=part)
        found.merge(problems.as_part())
        parts.append((part.end, problems.as_part()))
        if part.end is None:
            assert sum(advanced) == file.size_bytes or UNREADABLE in found.counts
            return documents, found.as_json(), parts
        if is_kept_open:
            part = part.next()
        else:
            part = FilePart(PartBegin.from_json(json.loads(json.dumps(part.end.as_json()))), least_bytes)
            advanced = [part.begin.packed]


def damage(packed: bytes, kind: str) -> bytes:
    damaged = bytearray(packed)
    match kind:
        case "truncated":
            del damaged[len(packed) * 7 // 8 :]
        case "a byte in the middle":
            damaged[len(packed) * 5 // 8] ^= 0x10
        case "checksum":
            damaged[-8 if packed[:2] == b"\x1f\x8b" else -3] ^= 1
        case "length":
            damaged[-4] ^= 1
        case "other bytes behind":
            damaged += b"no compressed data"
    return bytes(damaged)


KINDS = ("whole", "truncated", "a byte in the middle", "checksum", "length", "other bytes behind")


@pytest.mark.parametrize("name", PACKED)
def test_parts_have_what_the_file_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Documents, their places, and what is said of damage: the same as where the file is read as a whole.

    So are the parts, whether the file is kept open from one to the next or not.
    """
    monkeypatch.setattr(streams, "_COMPRESSED_READ_BYTES", READ_BYTES)
    ending, pack = PACKED[name]
    path, packed = tmp_path / f"d.{ending}", pack()
    for kind in KINDS if ending.startswith("jsonl") else ("whole", "truncated"):
        path.write_bytes(damage(packed, kind))
        whole, problems, parts = read_parts(path, 10**9)
        assert len(parts) == 1
        assert (UNREADABLE in problems or TRUNCATED in problems) == (kind != "whole"), kind
        opened = read_parts(path, PART_BYTES, is_kept_open=True)
        assert opened[0] == whole, kind
        assert opened[1] == problems, kind
        assert read_parts(path, PART_BYTES) == opened, kind
        points = [end.point for end, _ in opened[2] if end is not None]
        assert len(points) > 1, kind
        assert (set(points) == {FIRST.point}) == (name in ONE_POINT), kind


def test_records_that_come_byte_by_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a part begins, its first buffer may have a single byte, which warcio took for the begin of gzip."""
    raw, path = crawl(20), tmp_path / "d.warc.gz"
    path.write_bytes(gzip.compress(raw))
    whole = read_parts(path, 10**9)[0]
    header = 15  # of gzip and of its first stored block
    path.write_bytes(gzip.compress(raw, compresslevel=0))
    for size in (header, header + 1, header + 2):
        monkeypatch.setattr(streams, "_COMPRESSED_READ_BYTES", size)
        assert read_parts(path, 10**9)[0] == whole, size


def test_what_another_process_has_finished_is_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part ends elsewhere than the one that this process has just read: nothing comes twice or is left out."""
    monkeypatch.setattr(streams, "_COMPRESSED_READ_BYTES", READ_BYTES)
    monkeypatch.setattr(unit_parts, "PART_BYTES", PART_BYTES)
    path, options = tmp_path / "d.jsonl.gz", ReadOptions()
    path.write_bytes(pack_gz(RAW))
    (file,) = FileLister(Problems()).files([str(path)])
    (file_range,) = cut_into_ranges(file, 10**9, Problems(), options=options)

    def begins(part: FilePart | None) -> list[int]:
        documents = read(file_range, Problems(), options=options, advance=lambda _: None, part=part)
        return [document.begin for document in documents]

    def write(new: Path, part: FilePart, before: Sequence[Path]) -> None:
        (new / "begins").write_text(json.dumps(begins(part)))
        if len(before) == 1:
            other, theirs = FilePart(part.begin, 3 * PART_BYTES), tmp_path / "unit-000001"
            theirs.mkdir()
            (theirs / "begins").write_text(json.dumps(begins(other)))
            assert other.end is not None
            (theirs / "end.json").write_text(json.dumps(other.end.as_json()))

    parts = unit_parts.write_parts(tmp_path, "unit", write, lambda _: None)
    assert len(parts) > 3
    assert [begin for part in parts for begin in json.loads((part / "begins").read_text())] == begins(None)


def test_a_member_goes_on_at_each_of_its_points() -> None:
    """At every even bit; the content is that of zlib, and so is what is said of a wrong checksum or length."""
    packed, bits = pack_gz(RAW), set()
    member, unpacked = GzipMember(), 0
    for begin in range(0, len(packed), READ_BYTES):
        content, point = member.decompress_and_find(packed[begin : begin + READ_BYTES], packed=begin, unpacked=unpacked)
        unpacked += len(content)
        if point is None:
            continue
        bits.add(point.bit)
        rest = GzipMember(AccessPoint.from_json(json.loads(json.dumps(point.as_json()))))
        # Byte after byte at the end: its eight bytes may come in any parts.
        data = packed[point.packed :] + b"rest"
        contents = [rest.decompress(data[:-20])]
        contents += [rest.decompress(data[at : at + 1]) for at in range(len(data) - 20, len(data) - 4)]
        assert b"".join(contents) == RAW[point.unpacked :]
        assert rest.eof
        for place, fault in ((-8, "incorrect data check"), (-1, "incorrect length check")):
            wrong = bytearray(packed)
            wrong[place] ^= 1
            with pytest.raises(zlib.error, match=fault) as expected:
                zlib.decompressobj(31).decompress(wrong)
            with pytest.raises(zlib.error) as raised:
                GzipMember(point).decompress(bytes(wrong[point.packed :]))
            assert str(raised.value) == str(expected.value)
    assert member.eof
    assert unpacked == len(RAW)
    assert bits == {0, 2, 4, 6}


CORPUS = """
tokenizer = "{tokenizer}"
validation = 0.1
shard_tokens = 1048576
chunk_tokens = 65536

[sources.lines]
paths = ["d.jsonl.{ending}"]
id_field = "id"
label_field = "kind"
language = "other"
filters = [{{size = {{min = 30}}}}]
"""


class Counted(io.FileIO):
    """A compressed file: how much is read of it, and where reading it ends the process."""

    num_read = 0
    last = 10**9
    after: Path | None = None
    """It must be there before."""

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() >= Counted.last and (Counted.after is None or Counted.after.exists()):
            os.kill(os.getpid(), signal.SIGKILL)
        data = super().read(-1 if size is None else size)
        Counted.num_read += len(data)
        return data


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    opened = Path.open

    def open_counted(path: Path, *args: Any, **options: Any) -> Any:
        is_corpus = path.name.startswith("d.jsonl.") and options == {"buffering": 0}
        return Counted(path) if is_corpus else opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", open_counted)
    return Counted


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def pack_wrong_frame(raw: bytes) -> bytes:
    return damage(pack_frame(raw), "checksum")


@pytest.mark.parametrize(
    ("ending", "pack", "tokenizer"),
    [
        ("gz", pack_gz, "ascii"),
        ("zst", pack_wrong_frame, "ascii"),
        pytest.param("gz", pack_stored, "ascii", marks=pytest.mark.long),
        pytest.param("bz2", pack_stream, "ascii", marks=pytest.mark.long),
        pytest.param("zst", pack_frame, "sentencepiece", marks=pytest.mark.long),
    ],
)
def test_a_kill_costs_a_part_and_not_the_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    counted: type[Counted],
    ending: str,
    pack: Callable[[bytes], bytes],
    tokenizer: str,
) -> None:
    """Killed in the last part of each pass: the rest is prepared, and the store is that of a file read in one go.

    What comes before an access point is unpacked again then, and otherwise nothing is read twice.
    """
    packed = pack(lines(1200))
    (tmp_path / f"d.jsonl.{ending}").write_bytes(packed)
    (tmp_path / "corpus.toml").write_text(CORPUS.format(ending=ending, tokenizer=tokenizer))
    corpus = load_corpus(tmp_path / "corpus.toml")
    num_passes = 2 if tokenizer == "sentencepiece" else 1
    prepared: list[int] = []
    normalise = units.normalise
    monkeypatch.setattr(units, "normalise", lambda data: prepared.append(1) or normalise(data))

    def run(out: str) -> tuple[int, int]:
        """How many documents are prepared in it, and how many bytes of the file read."""
        counted.num_read = 0
        prepared.clear()
        prepare(corpus, tmp_path / out, PrepareOptions(keep_removed=tmp_path / f"{out}-removed"))
        return len(prepared), counted.num_read

    def kill(after: Path | None = None) -> None:
        if (child := os.fork()) == 0:
            counted.last, counted.after = int(0.9 * len(packed)), after
            try:
                run("parts")
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL

    monkeypatch.setattr(streams, "_COMPRESSED_READ_BYTES", READ_BYTES)
    num_documents, num_bytes = run("whole")
    assert num_bytes == num_passes * len(packed)
    monkeypatch.setattr(unit_parts, "PART_BYTES", len(packed) // 6)
    assert run("open") == (num_documents, num_bytes), "nothing is unpacked or prepared twice"

    work = tmp_path / "parts.work"
    kill()
    finished = sorted(work.glob("parts/000000/*-00000?"))
    if num_passes == 1:
        counts = [json.loads((one / "counts.json").read_bytes())["stages"]["read"]["documents"] for one in finished]
        begin = json.loads((finished[-1] / "end.json").read_bytes())["point"]["packed"]
        assert sum(counts) > 0.35 * num_documents
        assert run("parts") == (num_documents - sum(counts), len(packed) - begin)
        assert (begin == 0) == (pack is not pack_gz)
    else:
        # Of the texts that train the tokenizer, and then of the others.
        assert not (work / "tokenizer").exists()
        kill(after=work / "tokenizer")
        num_prepared, num_bytes = run("parts")
        assert num_bytes == len(packed)
        assert num_prepared < 0.65 * num_documents / 2
    for out in ("open", "parts"):
        assert contents(tmp_path / out) == contents(tmp_path / "whole"), out
    problems = json.loads((tmp_path / "parts/report.json").read_bytes())["problems"]
    assert problems.get(UNREADABLE, {"count": 0})["count"] == (pack is pack_wrong_frame)
    removed = [(tmp_path / f"{out}-removed/lines.jsonl.zst").read_bytes() for out in ("whole", "parts")]
    whole, parts = (zstandard.ZstdDecompressor().stream_reader(one, read_across_frames=True).read() for one in removed)
    assert whole == parts != b""
    assert not work.exists()

"""Large compressed files: read in parts, an interruption costs one part, and nothing else is to be seen of them."""

import bz2
import gzip
import io
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.data_pipeline.preparation import unit_parts
from lightscale.data_pipeline.preparation.corpus import load_corpus
from lightscale.data_pipeline.preparation.prepare import PrepareOptions, prepare
from lightscale.data_pipeline.preparation.readers import FilePart, RawDocument, cut_into_ranges, read, streams
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
        text = " ".join(generator.choices(words, k=12000 if number == num // 3 else generator.randint(1, 120)))
        record = {"text": text if number % 50 else None, "id": f"n{number}", "kind": kinds[number * 3 // num]}
        found.append(json.dumps(record) if number % 70 else "no object")
    return "\n".join(found).encode()


RAW = lines(900)
HALVES = (RAW[: len(RAW) // 2], RAW[len(RAW) // 2 :])


def pack_gz(raw: bytes) -> bytes:
    """In small blocks."""
    packer = zlib.compressobj(wbits=31, memLevel=4)
    return packer.compress(raw) + packer.flush()


def pack_frame(raw: bytes) -> bytes:
    packed: bytes = zstandard.ZstdCompressor(write_checksum=True).compress(raw)
    return packed


def one_by_one(raw: bytes, pack: Callable[[bytes], bytes], size: int = 2**14) -> bytes:
    return b"".join(pack(raw[begin : begin + size]) for begin in range(0, len(raw), size))


PACKED: dict[str, tuple[str, bytes]] = {
    "gzip": (".gz", gzip.compress(RAW)),
    "gzip, small blocks": (".gz", pack_gz(RAW)),
    "gzip, two members and padding": (".gz", b"".join(map(pack_gz, HALVES)) + bytes(100)),
    "gzip, many members": (".gz", one_by_one(RAW, gzip.compress, 9000)),
    "gzip, stored": (".gz", gzip.compress(RAW[: 2**17], 0)),
    "zst, frames": (".zst", one_by_one(RAW, pack_frame)),
    "zst, one frame": (".zst", pack_frame(RAW)),
    "bz2, streams": (".bz2", one_by_one(RAW, bz2.compress)),
}


def read_parts(path: Path, least_bytes: int) -> tuple[list[RawDocument], dict[str, Any], int]:
    """Documents, problems and the number of parts, which are read one after the other from what is kept as JSON."""
    options = ReadOptions(id_field="id", label_field="kind")
    (file,) = FileLister(Problems()).files([str(path)])
    (file_range,) = cut_into_ranges(file, 10**9, Problems(), options=options)
    documents: list[RawDocument] = []
    found, part, num_parts = Problems(), FilePart(None, least_bytes), 1
    while True:
        problems = Problems()
        documents += read(file_range, problems, options=options, advance=lambda _: None, part=part)
        found.merge(problems.as_part())
        if part.end is None:
            return documents, found.as_json(), num_parts
        kept = json.loads(json.dumps(part.end.as_json()))
        part, num_parts = FilePart(type(part.end).from_json(kept), least_bytes), num_parts + 1


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
    """Documents, their places, and what is said of damage: the same as where the file is read as a whole."""
    monkeypatch.setattr(streams, "_COMPRESSED_READ_BYTES", READ_BYTES)
    ending, packed = PACKED[name]
    path = tmp_path / f"d.jsonl{ending}"
    for kind in KINDS:
        path.write_bytes(damage(packed, kind))
        whole, problems, num_parts = read_parts(path, 10**9)
        assert num_parts == 1
        assert (UNREADABLE in problems or TRUNCATED in problems) == (kind != "whole"), kind
        documents, problems_of_parts, num_parts = read_parts(path, PART_BYTES)
        assert documents == whole, kind
        assert problems_of_parts == problems, kind
        assert (num_parts > 1) == (name not in ("gzip, stored", "zst, one frame")), kind


def test_a_member_goes_on_at_each_of_its_points() -> None:
    """At every even bit; the content is that of zlib, and so is what is said of a wrong checksum or length."""
    packed, bits = PACKED["gzip, small blocks"][1], set()
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
paths = ["d.jsonl{ending}"]
id_field = "id"
label_field = "kind"
language = "other"
filters = [{{size = {{min = 30}}}}]
"""


class StopReading(Exception):
    """In place of a signal that ends the process."""


class Counted(io.FileIO):
    """A compressed file: how much is read of it, and whether reading is stopped at a byte of it."""

    num_read = 0
    is_over: Callable[[int], bool]

    def read(self, size: int | None = -1) -> bytes:
        if Counted.is_over(self.tell()):
            raise StopReading
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


@pytest.mark.parametrize(
    ("ending", "pack", "tokenizer"),
    [
        (".gz", pack_gz, "ascii"),
        pytest.param(
            ".zst", lambda raw: one_by_one(raw, pack_frame, 2**12), "sentencepiece", marks=pytest.mark.long, id="zst"
        ),
    ],
)
def test_an_interruption_costs_a_part_and_not_the_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    counted: type[Counted],
    ending: str,
    pack: Callable[[bytes], bytes],
    tokenizer: str,
) -> None:
    """Stopped when four fifths of a MB are read, in each pass: the store is that of a file that is read in one go."""
    packed = pack(lines(5000))
    (tmp_path / f"d.jsonl{ending}").write_bytes(packed)
    (tmp_path / "corpus.toml").write_text(CORPUS.format(ending=ending, tokenizer=tokenizer))
    corpus = load_corpus(tmp_path / "corpus.toml")
    has_two_passes = tokenizer == "sentencepiece"

    work = tmp_path / "parts.work"

    def run(out: str, is_over: Callable[[int], bool] = lambda byte: False) -> dict[str, Any]:
        counted.num_read, counted.is_over = 0, staticmethod(is_over)
        return prepare(corpus, tmp_path / out, PrepareOptions(keep_removed=tmp_path / f"{out}-removed"))

    def stop_late() -> None:
        with pytest.raises(StopReading):
            run("parts", lambda byte: byte >= 0.8 * len(packed))
        assert counted.num_read > 0.8 * len(packed)

    assert run("whole")["units"] == 1
    assert counted.num_read == (1 + has_two_passes) * len(packed)
    monkeypatch.setattr(streams, "_COMPRESSED_READ_BYTES", READ_BYTES)
    monkeypatch.setattr(unit_parts, "PART_BYTES", 50_000)
    stop_late()
    if has_two_passes:
        with pytest.raises(StopReading):
            run("parts", lambda byte: (work / "tokenizer").exists())
        assert 0 < counted.num_read < 0.3 * len(packed)
        stop_late()
    run("parts")
    assert 0 < counted.num_read < 0.3 * len(packed)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    removed = [(tmp_path / f"{out}-removed/lines.jsonl.zst").read_bytes() for out in ("whole", "parts")]
    whole, parts = (zstandard.ZstdDecompressor().stream_reader(one, read_across_frames=True).read() for one in removed)
    assert whole == parts != b""
    assert not work.exists()

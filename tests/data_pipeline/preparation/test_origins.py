"""Where the documents of a prepared store came from: every place leads back to the text."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lightscale.cli import main
from lightscale.config.files import to_toml
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.loading.samples import run_loader, step_content
from lightscale.data_pipeline.preparation.corpus import make_corpus
from lightscale.data_pipeline.preparation.prepare import PrepareOptions, prepare
from lightscale.data_pipeline.store.origins import Origin
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.store.verify import verify_store
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer, load_tokenizer


@pytest.fixture
def corpus(tmp_path: Path, byte_tokenizer: TiktokenTokenizer, random_texts: Callable[..., list[str]]) -> dict[str, Any]:
    """Plain, compressed, parquet and text files in two sources, with ids and without; near copies are dropped."""
    (tmp_path / "bytes/tokenizer").mkdir(parents=True)
    byte_tokenizer.save(tmp_path / "bytes/tokenizer")
    texts = random_texts(60, seed=3, max_words=80)
    records = [{"text": text, "url": f"https://example.org/{number}"} for number, text in enumerate(texts)]
    del records[4]["url"]
    records[5]["url"] = 17  # type: ignore[assignment]
    lines = [json.dumps(record).encode() + b"\n" for record in records]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "plain.jsonl").write_bytes(b"".join([*lines[:20], b"\n{broken\n", *lines[3:5]]))
    (tmp_path / "a" / "字.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[20:40])))
    table = pyarrow.table({key: [str(record.get(key)) for record in records[40:50]] for key in ("text", "url")})
    pyarrow.parquet.write_table(table, tmp_path / "a" / "table.parquet", row_group_size=3)
    (tmp_path / "b").mkdir()
    for number, text in enumerate(texts[50:]):
        (tmp_path / "b" / f"{number}.txt").write_text(text)
    return {
        "tokenizer": str(tmp_path / "bytes"),
        "validation": 0.2,
        "shard_tokens": 1024,
        "chunk_tokens": 64,
        "sources": {
            "a": {"paths": [str(tmp_path / "a")], "id_field": "url"},
            "b": {"paths": [str(tmp_path / "b")]},
        },
    }


def text_at(tmp_path: Path, origin: Origin) -> tuple[str, Any]:
    """(text, id) in a file of the corpus, read without the pipeline."""
    path = tmp_path / origin.file
    if origin.first_byte is None or origin.num_bytes is None:
        record = pyarrow.parquet.read_table(path).to_pylist()[origin.row]
    else:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        raw = raw[origin.first_byte : origin.first_byte + origin.num_bytes]
        record = {"text": raw.decode()} if path.suffix == ".txt" else json.loads(raw)
    return record["text"], record.get("url")


@pytest.mark.parametrize("unit_bytes", [500, None])
def test_every_document_is_found_in_its_file_by_its_place(
    corpus: dict[str, Any], tmp_path: Path, unit_bytes: int | None
) -> None:
    prepare(make_corpus(corpus, origin="test"), tmp_path / "store", PrepareOptions(unit_bytes=unit_bytes))
    assert verify_store(tmp_path / "store", lambda step, done, total: None).faults == []
    store, tokenizer = TokenStore(tmp_path / "store"), load_tokenizer(tmp_path / "store")
    assert set(store.sources) == {"a", "a-validation", "b", "b-validation"}
    kinds = set()
    for name, source in store.sources.items():
        for document in range(source.num_documents):
            origin = source.origin(document)
            assert origin is not None
            start, stop = source.document(document)
            text, own_id = text_at(tmp_path, origin)
            assert tokenizer.decode(source.read(start + 1, stop)) == text.replace("\r", "\n")
            expected = str(own_id) if name.startswith("a") and own_id is not None else None
            assert origin.id == expected
            kinds.add((Path(origin.file).suffix, origin.id is None))
    assert kinds == {(".jsonl", False), (".jsonl", True), (".gz", False), (".parquet", False), (".txt", True)}


def test_room_that_origins_take(tmp_path: Path, byte_tokenizer: TiktokenTokenizer) -> None:
    """16 bytes a document and a file's name once, beside an index, and zarr chunks that are not full."""
    (tmp_path / "bytes/tokenizer").mkdir(parents=True)
    byte_tokenizer.save(tmp_path / "bytes/tokenizer")
    with (tmp_path / "many.jsonl").open("w") as file:
        for number in range(4096):
            file.write(json.dumps({"text": f"document {number} " + "word " * 20}) + "\n")
    table = {
        "tokenizer": str(tmp_path / "bytes"),
        "duplicates": {"exact": False, "near": False},
        "sources": {"a": {"paths": [str(tmp_path / "many.jsonl")]}},
    }
    prepare(make_corpus(table, origin="test"), tmp_path / "store")
    assert TokenStore(tmp_path / "store").source("a").num_documents == 4096

    def size(name: str) -> int:
        files = [path for path in (tmp_path / "store" / name).rglob("*") if path.is_file()]
        return sum(path.stat().st_size for path in files if path.name != "zarr.json")

    index = 16 * 1024 + 4
    assert size("a/origins") == 16 * 4096 + index
    assert size("input_files/names") == 2**16 + index  # one zarr chunk
    # At 1,000 tokens a document: less than half a percent of its tokens.
    assert 16 / (1000 * 4) < 0.005


def test_the_samples_of_a_step_are_named_by_file_and_place(
    corpus: dict[str, Any],
    tmp_path: Path,
    tiny_config: Callable[..., RunConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepare(make_corpus(corpus, origin="test"), tmp_path / "store")
    (tmp_path / "run").mkdir()
    config = tiny_config(f"data.store={tmp_path / 'store'}", "data.sequence_length=32", "train.steps=9")
    (tmp_path / "run" / "config.toml").write_text(to_toml(config))
    store = TokenStore(tmp_path / "store")
    files = set()
    for step in range(1, 10):
        for sample in step_content(run_loader(tmp_path / "run")[1], step).samples:
            for one in sample.documents:
                assert one.origin is not None
                files.add(one.origin.file)
                start, _ = store.source(sample.source).document(one.document)
                tokens = store.source(sample.source).read(start + max(one.start, 1), start + one.stop)
                assert bytes(tokens.tolist()) in text_at(tmp_path, one.origin)[0].encode()  # a token is a byte
    assert {Path(file).suffix for file in files} == {".jsonl", ".gz", ".parquet", ".txt"}
    assert main(["data", "samples", str(tmp_path / "run"), "--step", "2"]) == 0
    shown = capsys.readouterr().out
    for sample in step_content(run_loader(tmp_path / "run")[1], 2).samples:
        for one in sample.documents:
            assert one.origin is not None
            line = next(line for line in shown.splitlines() if f" {one.start} to {one.stop} " in line)
            assert one.origin.file in shown
            assert one.origin.place in shown
            assert line.count("│") == 9

"""A handmade corpus through all steps: what is in the store, what is not and why, and that executors leave no trace."""

import dataclasses
import functools
import gzip
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightscale.data_pipeline.executors import ProcessPool
from lightscale.data_pipeline.preparation.corpus import make_corpus
from lightscale.data_pipeline.preparation.prepare import PrepareOptions, prepare
from lightscale.data_pipeline.preparation.readers.inputs import NO_TEXT, NOT_JSON, OTHER_KIND, UNREADABLE
from lightscale.data_pipeline.preparation.report import unigram_entropy
from lightscale.data_pipeline.preparation.units import split_of
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.tokenizers import SentencePieceTokenizer, TiktokenTokenizer, load_tokenizer
from lightscale.errors import UserError

LAYOUT = {"shard_tokens": 2**9, "chunk_tokens": 2**6}
NO_DUPLICATES = {"exact": False, "near": False}
SMALL_UNITS = PrepareOptions(unit_bytes=3000)


def write_corpus(directory: Path, random_texts: Callable[..., list[str]]) -> Path:
    directory.mkdir()
    texts = random_texts(60, seed=4, max_words=120)
    for number, text in enumerate(texts[:20]):
        (directory / f"{number:02}.txt").write_bytes(text.encode())
    lines = [json.dumps({"text": text}) for text in texts[20:40]]
    (directory / "lines.jsonl").write_text("\n".join([*lines, "not json"]))
    packed = [json.dumps({"text": text}) for text in texts[40:]]
    (directory / "packed.jsonl.gz").write_bytes(gzip.compress("\n".join(packed).encode()))
    (directory / "broken.txt").write_bytes(b"\xff broken")
    (directory / "gone.txt").symlink_to("nowhere")
    return directory


@pytest.fixture
def words(tmp_path: Path, random_texts: Callable[..., list[str]]) -> Path:
    """60 texts of code-like and Chinese words in files of all kinds, and what is not text."""
    return write_corpus(tmp_path / "corpus", random_texts)


@pytest.fixture(scope="module")
def prepared(
    tmp_path_factory: pytest.TempPathFactory, random_texts: Callable[..., list[str]]
) -> tuple[Path, dict[str, Any]]:
    """The directory of a corpus as ``words`` and its store, ``prepare_words`` with nothing else; and the report."""
    directory = tmp_path_factory.mktemp("prepared")
    corpus = write_corpus(directory / "corpus", random_texts)
    return directory, prepare_words(corpus, directory / "store")


@pytest.fixture
def byte_tokens(tmp_path: Path, byte_tokenizer: TiktokenTokenizer) -> str:
    """The path of a tokenizer whose tokens are bytes."""
    directory = tmp_path / "bytes" / "tokenizer"
    directory.mkdir(parents=True)
    byte_tokenizer.save(directory)
    return str(directory.parent)


def prepare_words(corpus: Path, out: Path, options: PrepareOptions = SMALL_UNITS, **keys: Any) -> dict[str, Any]:
    table: dict[str, Any] = {"vocab_size": 400, "validation": 0.2, "duplicates": NO_DUPLICATES, **LAYOUT}
    table |= {"sources": {"words": {"paths": [str(corpus)]}}} | keys
    table = {key: value for key, value in table.items() if value is not None}
    return prepare(make_corpus(table, origin="test"), out, options)


def documents_of(store: TokenStore, source: str) -> list[str]:
    tokenizer, opened = load_tokenizer(store.path), store.source(source)
    bounds = [opened.document(index) for index in range(opened.num_documents)]
    assert all(opened.read(start, start + 1)[0] == tokenizer.eot_id for start, _ in bounds)
    return [tokenizer.decode(opened.read(start, stop)) for start, stop in bounds]


def expected_texts(corpus: Path) -> dict[str, str]:
    """Document id to text in the order of the files, without the modules under test."""
    texts = {}
    for path in sorted(corpus.iterdir()):
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            raw = path.read_bytes()
            offset = 0
            for line in (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines(keepends=True):
                if line != b"not json":
                    texts[f"corpus/{path.name}@{offset}"] = json.loads(line)["text"]
                offset += len(line)
        elif path.exists():
            texts[f"corpus/{path.name}"] = path.read_bytes().decode(errors="replace")
    return {name: text for name, text in texts.items() if text.strip()}


def test_every_document_is_in_the_store_once_unchanged_and_in_order(prepared: tuple[Path, dict[str, Any]]) -> None:
    directory, report = prepared
    store = TokenStore(directory / "store")
    by_split: dict[str, list[str]] = {"train": [], "validation": []}
    for name, text in expected_texts(directory / "corpus").items():
        by_split[split_of(name, 0.2)].append(text)
    assert all(by_split.values())
    for name, split in (("words", "train"), ("words-validation", "validation")):
        source = store.source(name)
        assert source.split == split
        assert documents_of(store, name) == by_split[split]
        num_bytes = sum(len(text.encode()) for text in by_split[split])
        assert report["sources"][name] == {
            "documents": source.num_documents,
            "bytes": num_bytes,
            "tokens": source.num_tokens,
            "bytes_per_token": num_bytes / source.num_tokens,
        }
    assert len(list((directory / "store/words/tokens/c").iterdir())) > 3
    assert sorted(path.name for path in directory.iterdir()) == ["corpus", "store"]


def test_problems_are_counted_once_and_reported(prepared: tuple[Path, dict[str, Any]]) -> None:
    directory, report = prepared
    assert {reason: problem["count"] for reason, problem in report["problems"].items()} == {
        "invalid UTF-8 replaced": 1,
        "line is not a JSON object": 1,
        "unreadable file": 1,
    }
    assert TokenStore(directory / "store").report() == report


def same_files(first: Path, second: Path) -> bool:
    names = sorted(path.relative_to(first) for path in first.rglob("*"))
    if names != sorted(path.relative_to(second) for path in second.rglob("*")):
        return False
    files = [name for name in names if (first / name).is_file()]
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in files)


def without(report: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key not in keys}


@pytest.mark.long
def test_neither_workers_nor_units_leave_a_trace(words: Path, tmp_path: Path) -> None:
    (words / "copy.txt").write_bytes((words / "07.txt").read_bytes())
    duplicates = {"exact": True, "near": True}
    prepare_words(words, tmp_path / "one", duplicates=duplicates)
    # Two workers: ``test_the_command_with_workers_goes_on_where_it_was_killed``.
    three = dataclasses.replace(SMALL_UNITS, make_executor=functools.partial(ProcessPool, num_workers=3))
    prepare_words(words, tmp_path / "by three", three, duplicates=duplicates)
    assert same_files(tmp_path / "one", tmp_path / "by three")
    reports = []
    for unit_bytes in (500, 10**9):
        out = tmp_path / f"units of {unit_bytes}"
        reports.append(prepare_words(words, out, PrepareOptions(unit_bytes=unit_bytes), duplicates=duplicates))
        assert TokenStore(out).fingerprint() == TokenStore(tmp_path / "one").fingerprint()
    few, many = reports[1]["units"], reports[0]["units"]
    assert few == 1 < 20 < many
    assert without(reports[0], "units") == without(reports[1], "units")


def test_what_is_wrong_with_files_is_reported_alike_in_units_of_any_size(tmp_path: Path, byte_tokens: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    files = tmp_path / "files"
    files.mkdir()
    rows = [f"row {number} " * 30 for number in range(40)]
    parquet.write_table(table({"other": rows}), files / "no-column.parquet", row_group_size=10)
    parquet.write_table(table({"text": rows}), files / "damaged.parquet", row_group_size=10)
    start = parquet.read_metadata(files / "damaged.parquet").row_group(1).column(0).dictionary_page_offset
    with (files / "damaged.parquet").open("r+b") as file:
        file.seek(start)
        file.write(b"\xff" * 40)
    lines = [json.dumps({"text": f"line {number} " * (1 + number % 50)}) for number in range(60)]
    (files / "bad.jsonl").write_text("\n".join([*lines, *["{"] * 30, "[1]", '{"text": 3}', *lines[:9]]))
    (files / "notes.json").write_text("{}")
    corpus = {"tokenizer": byte_tokens, "max_document_bytes": 400, "sources": {"s": {"paths": [str(files)]}}}
    reports = []
    for unit_bytes in (150, 1000, 10**9):
        out = tmp_path / f"units of {unit_bytes}"
        reports.append(prepare(make_corpus(corpus, origin="test"), out, PrepareOptions(unit_bytes=unit_bytes)))
    assert reports[0]["units"] > reports[1]["units"] > reports[2]["units"] == 1
    first = without(reports[0], "units")
    assert first == without(reports[1], "units") == without(reports[2], "units")
    counts = {reason: problem["count"] for reason, problem in first["problems"].items()}
    assert counts[NOT_JSON] == 31 and counts[NO_TEXT] == 2 and counts[UNREADABLE] == counts[OTHER_KIND] == 1


def test_reported_entropy_is_that_of_the_tokens(prepared: tuple[Path, dict[str, Any]]) -> None:
    directory, report = prepared
    entropy = report["unigram_entropy_nats"]
    store = TokenStore(directory / "store")
    streams = {source.split: source.read(0, source.num_tokens).tolist() for source in store.sources.values()}
    frequencies = Counter(streams["train"])
    total = len(streams["train"])
    own = -sum(math.log(frequencies[token] / total) for token in streams["train"]) / total
    assert entropy["train"] == pytest.approx(own, rel=1e-12)
    learned = [math.log((frequencies[token] + 1) / (total + 400)) for token in streams["validation"]]
    assert entropy["validation_under_train"] == pytest.approx(-sum(learned) / len(learned), rel=1e-12)
    assert entropy["validation"] < entropy["validation_under_train"]


def test_unigram_entropy_of_known_distributions() -> None:
    assert unigram_entropy(np.full(8, 5)) == pytest.approx(math.log(8))
    assert unigram_entropy(np.array([7, 0, 0])) == 0
    assert unigram_entropy(np.array([1, 3])) == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3))
    # Never seen while learning: one of (3 + 1) counts after one is added to each of the two.
    assert unigram_entropy(np.array([0, 1]), np.array([2, 0])) == pytest.approx(math.log(4))


def test_the_split_is_a_function_of_the_id_and_grows_with_the_share() -> None:
    names = [f"corpus/{number}.txt" for number in range(5000)]
    held_out = {share: {name for name in names if split_of(name, share) == "validation"} for share in (0.0, 0.02, 0.5)}
    assert not held_out[0.0]
    assert 60 < len(held_out[0.02]) < 140
    assert held_out[0.02] < held_out[0.5]


PROSE = (
    "The ship that the captain of the harbour had been waiting for came in with the evening tide, and all of the "
    "people who lived near the quay went down to see what it had brought from the islands of the south.",
    "When the first snow of the winter had fallen on the roofs, the children were sent to the mill with a sledge, "
    "because the miller had promised to grind the last of the barley for them before the river was frozen.",
    "It is said that the old road over the pass was built by soldiers, and that the stones at the side of it were "
    "set up to tell the way in fog; but nobody has found a letter or a date on any of them so far.",
    "A clock that stops at the same hour every day is not broken in the common sense of the word, the watchmaker "
    "explained, since whatever makes it stop keeps better time than the clock itself has ever been able to.",
)
CODE = "def add(first, second):\n    return first + second\n\n\nprint(add(1, 2))\n"


@pytest.fixture
def handmade(tmp_path: Path) -> dict[str, Any]:
    """Two sources in which every stage leaves something out. PROSE[0] and [1] are copied over units and sources."""
    records = [
        {"text": PROSE[0]},
        {"text": ""},
        {"text": " \n\t\n"},
        {"text": "too short"},
        {"text": PROSE[1].replace("miller", "old miller")},
        {"text": "bad \ud800 half. " + PROSE[2]},
        {"body": "no text"},
        {"text": PROSE[0]},
    ]
    (tmp_path / "prose.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "more.txt").write_text(PROSE[1] + "\r\n")
    (tmp_path / "last.txt").write_text(PROSE[3])
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text(CODE)
    (tmp_path / "code" / "b.py").write_text(CODE)
    (tmp_path / "code" / "c.txt").write_text(PROSE[0])
    return {
        "prose": {
            "paths": [str(tmp_path / name) for name in ("prose.jsonl", "more.txt", "last.txt")],
            "language": "en",
            "filters": {"size": {"min": 20}, "terminal_punctuation": False, "replacement_characters": False},
            "weight": 0.9,
        },
        "code": {
            "paths": [str(tmp_path / "code")],
            "language": "code",
            "filters": {"size": {"min": 3}, "mean_line_length": False},
            "weight": 0.1,
        },
    }


def length(*texts: str) -> int:
    return sum(len(text.encode(errors="surrogatepass")) for text in texts)


def test_every_step_counts_what_it_drops(handmade: dict[str, Any], tmp_path: Path, byte_tokens: str) -> None:
    table = {"tokenizer": byte_tokens, "sources": handmade, **LAYOUT}
    report = prepare(make_corpus(table, origin="test"), tmp_path / "store", PrepareOptions(unit_bytes=200))
    assert report["units"] > 8
    near, broken = PROSE[1].replace("miller", "old miller"), "bad \ufffd half. " + PROSE[2]
    prose = report["corpus"]["prose"]["stages"]
    empty, short = {"documents": 2, "bytes": 4}, {"documents": 1, "bytes": 9}
    assert flow(prose) == {
        "read": {
            "documents": 9,
            "bytes": length(*PROSE, PROSE[0], near, "bad \ud800 half. ", "\r\n \n\t\n too short") - 1,
        },
        "normalise": {"documents": 7, "bytes": length(*PROSE, PROSE[0], near, "bad \ufffd half. ", "\n") + 9},
        "filter": {"documents": 6, "bytes": length(*PROSE, PROSE[0], near, "bad \ufffd half. ", "\n")},
        "deduplicate": {"documents": 4, "bytes": length(PROSE[0], near, broken, PROSE[3])},
        "tokenize": {
            "documents": 4,
            "bytes": length(PROSE[0], near, broken, PROSE[3]),
            "tokens": length(PROSE[0], near, broken, PROSE[3]) + 4,
        },
    }
    assert dropped(prose) == {
        ("normalise", "empty document skipped"): empty,
        ("filter", "size"): short,
        ("deduplicate", "exact duplicate"): {"documents": 1, "bytes": length(PROSE[0])},
        ("deduplicate", "near duplicate"): {"documents": 1, "bytes": length(PROSE[1]) + 1},
    }
    assert prose["normalise"]["changed"] == {
        "line end made LF": {"documents": 1, "times": 1},
        "lone surrogate replaced": {"documents": 1, "times": 1},
    }
    code = report["corpus"]["code"]["stages"]
    assert dropped(code) == {
        ("deduplicate", "exact duplicate"): {"documents": 2, "bytes": length(CODE, PROSE[0])},
    }
    examples = code["deduplicate"]["dropped"]["exact duplicate"]["examples"]
    assert examples == [
        {"id": "code/b.py", "text": CODE, "like": "code/a.py"},
        {"id": "code/c.txt", "text": PROSE[0][:100], "like": "prose.jsonl@0"},
    ]
    near_example = prose["deduplicate"]["dropped"]["near duplicate"]["examples"][0]
    assert near_example["id"] == "more.txt"
    assert near_example["like"].startswith("prose.jsonl@")
    assert {reason: found["count"] for reason, found in report["problems"].items()} == {
        "lone surrogate replaced": 1,
        "no text in the field": 1,
    }
    store = TokenStore(tmp_path / "store")
    assert documents_of(store, "prose") == [PROSE[0], near, broken, PROSE[3]]
    assert documents_of(store, "code") == [CODE]
    assert store.weights == {"prose": 0.9, "code": 0.1}
    lengths = report["corpus"]["code"]["lengths"]
    assert lengths[6] == sum(lengths) == 1  # 64 to 127 tokens
    check_page((tmp_path / "store/report.html").read_text(), report)


def flow(stages: dict[str, Any]) -> dict[str, Any]:
    kept = {
        name: {key: counts[key] for key in ("documents", "bytes")} for name, counts in stages.items() if name != "write"
    }
    kept["tokenize"]["tokens"] = stages["tokenize"]["tokens"]
    return kept


def dropped(stages: dict[str, Any]) -> dict[tuple[str, str], Any]:
    return {
        (stage, reason): {key: found[key] for key in ("documents", "bytes")}
        for stage, counts in stages.items()
        for reason, found in counts.get("dropped", {}).items()
    }


def check_page(page: str, report: dict[str, Any]) -> None:
    """All that a reader looks for is on it, and nothing from elsewhere."""
    for word in (
        "prose",
        "filter: size",
        "near duplicate",
        "is a duplicate of prose.jsonl@0",
        "90%",
        "no text in the field",
    ):
        assert word in page, word
    assert "def add(first, second)" in page
    assert f"{sum(source['tokens'] for source in report['sources'].values()):,} tokens" in page
    assert not [word for word in ("<script", "http:", "https:", "src=") if word in page]


def test_the_page_shows_text_as_text(tmp_path: Path, byte_tokens: str) -> None:
    (tmp_path / "<b>.txt").write_text("<script>alert(1)</script> & so on")
    (tmp_path / "good.txt").write_text("good")
    sources = {
        "a": {"paths": [str(tmp_path / "*.txt")], "language": "other", "filters": {"size": {"min": 2, "max": 3}}}
    }
    sources["b"] = {"paths": [str(tmp_path / "bytes/tokenizer")], "suffixes": [".json"], "format": "text"}
    table = {"tokenizer": byte_tokens, "sources": sources, **LAYOUT}
    prepare(make_corpus(table, origin="test"), tmp_path / "store")
    page = (tmp_path / "store/report.html").read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; so on" in page
    assert "&lt;b&gt;.txt" in page
    assert "<script" not in page


def test_duplicates_are_found_over_units_and_the_first_stays(tmp_path: Path, byte_tokens: str) -> None:
    directory = tmp_path / "many"
    directory.mkdir()
    numbers = [index * 7 % 30 for index in range(200)]
    for index, number in enumerate(numbers):
        (directory / f"{index:03}.txt").write_text(f"This is text number {number}, {hash_words(number)}")
    table = {"tokenizer": byte_tokens, "duplicates": {"near": False}, **LAYOUT}
    table |= {"sources": {"many": {"paths": [str(directory)]}}}
    report = prepare(make_corpus(table, origin="test"), tmp_path / "store", PrepareOptions(unit_bytes=1000))
    assert report["units"] > 20
    stage = report["corpus"]["many"]["stages"]["deduplicate"]["dropped"]
    assert stage["exact duplicate"]["documents"] == 170
    assert documents_of(TokenStore(tmp_path / "store"), "many") == [
        f"This is text number {number}, {hash_words(number)}" for number in numbers[:30]
    ]


def hash_words(number: int) -> str:
    return " ".join(str(number * factor) for factor in range(1, 30))


@pytest.mark.parametrize("from_model", [False, True])
def test_the_tokenizer_of_another_store_can_be_taken(
    words: Path, tmp_path: Path, sentencepiece_tokenizer: SentencePieceTokenizer, from_model: bool
) -> None:
    prepare_words(words, tmp_path / "first")
    path = tmp_path / "first" / ("tokenizer/sentencepiece.model" if from_model else "")
    report = prepare_words(words, tmp_path / "second", tokenizer=str(path), vocab_size=None, validation=0.0)
    first, second = TokenStore(tmp_path / "first"), TokenStore(tmp_path / "second")
    assert first.tokenizer == second.tokenizer
    assert second.tokenizer.sha256 != sentencepiece_tokenizer.sha256
    # Without validation there is one source.
    assert list(second.sources) == ["words"]
    assert list(report["unigram_entropy_nats"]) == ["train"]


def test_progress_goes_through_the_steps_up_to_the_whole(words: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    table = {"vocab_size": 400, "sources": {"words": {"paths": [str(words)]}}, **LAYOUT}
    prepare(make_corpus(table, origin="test"), tmp_path / "store", SMALL_UNITS, lambda *step: seen.append(step))
    steps = list(dict.fromkeys(name for name, _, _ in seen))
    assert steps == [
        "sample for the tokenizer",
        "read, filter, tokenize",
        "find exact duplicates",
        "unite exact duplicates",
        "find near duplicates",
        "unite near duplicates",
        "count kept documents",
        "write shards",
    ]
    total = sum(path.stat().st_size for path in words.iterdir() if path.exists())
    for step in steps[:2]:
        done = [count for name, count, whole in seen if name == step and whole == total]
        assert done[0] == 0
        assert done == sorted(done)
        assert done[-1] == total
        assert len(set(done)) > 10


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokenizer": "no/such/path", "vocab_size": None}, r"tokenizer no/such/path: no such file; use sentencepiece"),
        ({"tokenizer": "tiktoken:cl99", "vocab_size": None}, "cl99"),
        ({"vocab_size": 100_000}, "vocabulary size 100000: the corpus is too small"),
        ({"sources": {"a": {"paths": ["no/such/directory"]}}}, "no/such/directory: No such file"),
        ({"strict": True}, "unreadable file"),
    ],
)
def test_mistakes_leave_nothing_behind(words: Path, tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    options = PrepareOptions(strict=bool(keys.pop("strict", False)))
    with pytest.raises(UserError, match=message):
        prepare_words(words, tmp_path / "store", options, **keys)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


@pytest.mark.parametrize("tokenizer", ["sentencepiece", "given"])
def test_a_corpus_with_nothing_in_it_says_what_was_seen(tmp_path: Path, byte_tokens: str, tokenizer: str) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.jsonl").write_text('{}\n[]\n{"text": "short"}\n')
    (corpus / "empty.txt").write_text("")
    table: dict[str, Any] = {"tokenizer": byte_tokens} if tokenizer == "given" else {}
    table |= {"sources": {"a": {"paths": [str(corpus)], "language": "en"}}}
    with pytest.raises(UserError, match="no training document remains: ") as caught:
        prepare(make_corpus(table, origin="test"), tmp_path / "store")
    for words in ("2 files read", "1 × no text in the field", "1 × line is not", "1 × size", "1 × empty document"):
        assert words in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes", "corpus"]


@pytest.mark.parametrize("tokenizer", ["sentencepiece", "given"])
def test_a_corpus_without_a_file_to_read_is_empty(tmp_path: Path, byte_tokens: str, tokenizer: str) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.pdf").write_bytes(b"%PDF")
    (tmp_path / "one.PNG").write_bytes(b"\x89PNG")
    for path, seen in {
        tmp_path / "corpus": r"a\.pdf",
        tmp_path / "corpus" / "a.pdf": r"a\.pdf",
        tmp_path / "one.PNG": r"one\.PNG: an image; .*--images",
    }.items():
        table: dict[str, Any] = {"tokenizer": byte_tokens} if tokenizer == "given" else {}
        table |= {"sources": {"a": {"paths": [str(path)]}}}
        with pytest.raises(UserError, match=rf"no training document remains: 0 files read, 1 × .*{seen}"):
            prepare(make_corpus(table, origin="test"), tmp_path / "store")
    assert not (tmp_path / "store.work").exists()


def test_an_existing_store_is_refused_before_any_work(words: Path, tmp_path: Path) -> None:
    prepare_words(words, tmp_path / "store")
    before = (tmp_path / "store/zarr.json").stat().st_mtime_ns
    with pytest.raises(UserError, match="never overwritten"):
        prepare_words(words, tmp_path / "store")
    assert (tmp_path / "store/zarr.json").stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "store"]

"""Classes of documents, from a field of the corpus's files into the store: right, the same bytes always, or refused."""

import functools
import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lightscale.cli import main
from lightscale.config.files import to_toml
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.executors import ProcessPool
from lightscale.data_pipeline.preparation import assemble
from lightscale.data_pipeline.preparation.corpus import make_corpus
from lightscale.data_pipeline.preparation.labels import in_order
from lightscale.data_pipeline.preparation.prepare import PrepareOptions, prepare
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.store.verify import verify_store
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer, load_tokenizer
from lightscale.errors import UserError

TOPICS = ("sport", "art", "science fiction", "字")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def corpus(tmp_path: Path, byte_tokenizer: TiktokenTokenizer, random_texts: Callable[..., list[str]]) -> dict[str, Any]:
    """Two labelled sources in files of three kinds, one without labels; copies with other labels are dropped."""
    (tmp_path / "bytes/tokenizer").mkdir(parents=True)
    byte_tokenizer.save(tmp_path / "bytes/tokenizer")
    # Numbered, so that no text is there twice by chance.
    texts = [f"{number}: {text}" for number, text in enumerate(random_texts(90, seed=5, max_words=40))]
    records = [{"text": text, "topic": TOPICS[number**3 % 11 % 4]} for number, text in enumerate(texts)]
    copies = [{"text": text, "topic": "of a copy"} for text in texts[:3]]
    lines = [json.dumps(record).encode() + b"\n" for record in [*records, *copies]]
    (tmp_path / "a").mkdir()
    # An empty document is skipped, whatever else it lacks.
    (tmp_path / "a" / "plain.jsonl").write_bytes(b"".join([*lines[:30], b'{"text": " "}\n', *lines[90:]]))
    (tmp_path / "a" / "packed.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[30:50])))
    columns = {key: [record[key] for record in records[50:70]] for key in ("topic", "text")}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "b.parquet", row_group_size=6)
    (tmp_path / "c.txt").write_text(texts[80])
    return {
        "tokenizer": str(tmp_path / "bytes"),
        "validation": 0.2,
        "shard_tokens": 1024,
        "chunk_tokens": 64,
        "duplicates": {"near": False},
        "sources": {
            "a": {"paths": [str(tmp_path / "a")], "label_field": "topic"},
            "b": {"paths": [str(tmp_path / "b.parquet")], "label_field": "topic"},
            "c": {"paths": [str(tmp_path / "c.txt")], "validation": 0.0},
        },
    }


def test_every_document_has_the_class_that_its_file_says(corpus: dict[str, Any], tmp_path: Path) -> None:
    report = prepare(make_corpus(corpus, origin="test"), tmp_path / "store", PrepareOptions(unit_bytes=700))
    assert verify_store(tmp_path / "store", lambda step, done, total: None).faults == []
    store, tokenizer = TokenStore(tmp_path / "store"), load_tokenizer(tmp_path / "store")
    assert store.classes == {"label": sorted(TOPICS)}, "the class that only dropped copies have is none"
    expected = {}
    for line in [
        *(tmp_path / "a/plain.jsonl").read_bytes().splitlines()[:30],
        *gzip.decompress((tmp_path / "a/packed.jsonl.gz").read_bytes()).splitlines(),
    ]:
        record = json.loads(line)
        expected[record["text"].replace("\r", "\n")] = record["topic"]
    for record in pyarrow.parquet.read_table(tmp_path / "b.parquet").to_pylist():
        expected[record["text"].replace("\r", "\n")] = record["topic"]
    found = {}
    for name, source in store.sources.items():
        counts: Counter[str] = Counter()
        for document in range(source.num_documents):
            start, stop = source.document(document)
            label = store.label(name, document)
            if name != "c":
                assert label is not None
                found[tokenizer.decode(source.read(start + 1, stop))] = label
                counts[label] += 1
        if name == "c":
            assert label is None
            assert "classes" not in report["sources"][name]
        else:
            assert report["sources"][name]["classes"] == {topic: counts[topic] for topic in sorted(TOPICS)}
            assert list(report["sources"][name]["classes"]) == sorted(TOPICS), "in the order of their numbers"
    assert found == expected
    assert len(set(found.values())) == len(TOPICS)
    page = (tmp_path / "store/report.html").read_text()
    assert "<td>science fiction</td>" in page


@pytest.mark.long
def test_workers_units_and_interruptions_leave_no_trace(
    corpus: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = make_corpus(corpus, origin="test")
    small = PrepareOptions(unit_bytes=2000)
    prepare(typed, tmp_path / "one", small)
    two = PrepareOptions(unit_bytes=2000, make_executor=functools.partial(ProcessPool, num_workers=2))
    prepare(typed, tmp_path / "two", two)
    whole = contents(tmp_path / "one")
    assert contents(tmp_path / "two") == whole
    for step in ("count_kept", "write_shard"):
        calls, task = 0, getattr(assemble, step)

        def stopping(*args: Any, task: Any = task) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise KeyboardInterrupt
            task(*args)

        with monkeypatch.context() as patched:
            patched.setattr(assemble, step, stopping)
            with pytest.raises(KeyboardInterrupt):
                prepare(typed, tmp_path / step, small)
        prepare(typed, tmp_path / step, small)
        assert contents(tmp_path / step) == whole
    prepare(typed, tmp_path / "in one unit", PrepareOptions(unit_bytes=10**9))
    assert TokenStore(tmp_path / "in one unit").fingerprint() == TokenStore(tmp_path / "one").fingerprint()


def test_listed_classes_have_the_numbers_of_the_list(
    tmp_path: Path, corpus: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus["classes"] = ["unused", *reversed(TOPICS), "of a copy"]
    prepare(make_corpus(corpus, origin="test"), tmp_path / "listed")
    store = TokenStore(tmp_path / "listed")
    assert store.classes["label"] == corpus["classes"]
    assert {store.label("a", document) for document in range(store.source("a").num_documents)} == set(TOPICS)
    assert main(["data", "inspect", str(tmp_path / "listed"), "--sample", "3"]) == 0
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if "science fiction │" in line]
    assert [cell.strip() for cell in line.strip("│").split("│")][:3] == [
        "2",
        "science fiction",
        str(store.report()["sources"]["a"]["classes"]["science fiction"]),
    ]
    assert f", label {store.label('a', 0)}" in shown


def test_whole_numbers_are_classes_in_the_order_of_their_values(
    tmp_path: Path, corpus: dict[str, Any], tiny_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"text": f"text {number} " * 9, "class": (7, 10, -2)[number % 3]}) for number in range(30)]
    (tmp_path / "numbers.jsonl").write_text("\n".join(lines))
    numbers = str(tmp_path / "numbers.jsonl")
    arguments = ["--label-field", "class", "--tokenizer", corpus["tokenizer"], "--out", str(tmp_path / "store")]
    assert main(["data", "prepare", numbers, *arguments]) == 0
    assert "in numbers" in capsys.readouterr().out
    assert TokenStore(tmp_path / "store").classes == {"label": ["-2", "7", "10"]}
    assert in_order(["10", "x", "9", "10"]) == ["10", "9", "x"]
    # And a step's samples show them.
    (tmp_path / "run").mkdir()
    config = tiny_config(f"data.store={tmp_path / 'store'}", "data.sequence_length=32")
    (tmp_path / "run" / "config.toml").write_text(to_toml(config))
    assert main(["data", "samples", str(tmp_path / "run"), "--step", "1", "--json"]) == 0
    documents = [one for sample in json.loads(capsys.readouterr().out)["samples"] for one in sample["documents"]]
    for one in documents:
        first = one["origin"]["first_byte"]
        line = (tmp_path / "numbers.jsonl").read_bytes()[first : first + one["origin"]["num_bytes"]]
        assert one["label"] == str(json.loads(line)["class"])
    assert main(["data", "samples", str(tmp_path / "run"), "--step", "1"]) == 0
    assert "┃ label ┃" in capsys.readouterr().out


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no field": ({}, r'x\.jsonl@33: label_field = "topic": the document has no such field'),
    "null": ({"topic": None}, r"the class is null; it must be a whole number, or a string"),
    "fraction": ({"topic": 1.5}, r"the class is 1\.5; it must be a whole number"),
    "truth": ({"topic": True}, r"the class is true; it must be"),
    "lines": ({"topic": "a\nb"}, r'the class is "a\\nb"; it must be .* printable'),
    "half a character": ({"topic": "\ud800"}, r"the class is .*printable"),
    "none of the list": ({"topic": "chess"}, r"the class chess is not in classes = art, sport; add it there"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_documents_without_a_class_are_refused_by_file_and_place(
    tmp_path: Path, corpus: dict[str, Any], name: str
) -> None:
    record, message = REFUSED[name]
    lines = [{"text": "good", "topic": "art"}, {"text": "bad", **record}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    corpus |= {"sources": {"x": {"paths": [str(tmp_path / "x.jsonl")], "label_field": "topic"}}}
    corpus["classes"] = ["art", "sport"]
    before = set(tmp_path.iterdir())
    with pytest.raises(UserError, match=message):
        prepare(make_corpus(corpus, origin="test"), tmp_path / "store")
    assert set(tmp_path.iterdir()) == before
    # The plan says so before.
    (tmp_path / "corpus.toml").write_text("classes = ['art', 'sport']\n" + toml_of(corpus))
    assert main(["data", "plan", str(tmp_path / "corpus.toml")]) == 78


def toml_of(corpus: dict[str, Any]) -> str:
    (path,) = corpus["sources"]["x"]["paths"]
    return f"tokenizer = '{corpus['tokenizer']}'\n[sources.x]\npaths = ['{path}']\nlabel_field = 'topic'\n"


def test_a_text_file_has_no_class(tmp_path: Path, corpus: dict[str, Any]) -> None:
    corpus["sources"]["c"]["label_field"] = "topic"
    with pytest.raises(UserError, match=r"c\.txt: label_field = .topic.: the document has no such field"):
        prepare(make_corpus(corpus, origin="test"), tmp_path / "store")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"classes": ["a"]}, r"classes, but no source has a label_field"),
        ({"classes": ["a", "a"], "label_field": "x"}, r'classes: "a" is listed twice'),
        ({"classes": [1, "1"], "label_field": "x"}, r'classes: "1" is listed twice'),
        ({"classes": ["a", ""], "label_field": "x"}, r'classes: "" must be a whole number, or a string'),
        ({"classes": [], "label_field": "x"}, r"classes = \[\]: must be .*, not empty"),
        ({"classes": [True], "label_field": "x"}, r"classes"),
        ({"label_field": "text"}, r'label_field = "text" is also text_field'),
    ],
)
def test_mistakes_in_the_corpus_file(keys: dict[str, Any], message: str) -> None:
    source = {"paths": ["a"], **({"label_field": keys.pop("label_field")} if "label_field" in keys else {})}
    with pytest.raises(UserError, match=message):
        make_corpus({"sources": {"a": source}, **keys}, origin="corpus.toml")


def test_too_many_classes_are_none(tmp_path: Path, corpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightscale.data_pipeline.preparation.labels.MOST_CLASSES", 3)
    with pytest.raises(UserError, match=r"sources.*: label_field has more than 3 different values"):
        prepare(make_corpus(corpus, origin="test"), tmp_path / "store", PrepareOptions(unit_bytes=300))

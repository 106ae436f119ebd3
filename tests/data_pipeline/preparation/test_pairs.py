"""Pairs of texts with one label: from files of several kinds into the store, kept, held out, cut and dropped as one."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lightscale.cli import main
from lightscale.data_pipeline.preparation.corpus import make_corpus
from lightscale.data_pipeline.preparation.prepare import PrepareOptions, prepare
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.store.verify import verify_store
from lightscale.data_pipeline.tokenizers import load_tokenizer
from lightscale.errors import UserError

MOST = 12
COLUMNS = ["label", "id1", "id2", "text1", "text2"]
FIELDS = {"text_field": "text1", "text_pair_field": "text2", "label_field": "label"}


def pair(number: int) -> dict[str, str]:
    """Shorter and longer ones; texts recur, pairs do not."""
    return {"label": f"{number % 2}.0", "text1": f'"{number % 5}' * (number % 9 + 1), "text2": f"ä {number}"}


def row(record: dict[str, str]) -> str:
    return "\t".join([record["label"], "P1", "P2", record["text1"], record["text2"]])


def corpus(folder: Path, **more: Any) -> dict[str, Any]:
    """The first twenty pairs without a header, with wrong rows; others as JSON and in a table."""
    rows = [row(pair(number)) for number in range(20)]
    wrong = ["1.0\tP1\tP2\tonly one", row(pair(3)), row({**pair(4), "text2": " "})]
    (folder / "train.tsv").write_text("\n".join([*rows[:10], *wrong, *rows[10:]]) + "\n", encoding="utf-8")
    records = [json.dumps(pair(number)) for number in range(20, 30)]
    lines = [*records, '{"label": "0.0", "text1": "a"}', '{"label": "0.0", "text1": "a", "text2": 7}']
    (folder / "more.jsonl").write_text("\n".join(lines), encoding="utf-8")
    table = [pair(number) for number in range(30, 40)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), folder / "table.parquet")
    return {
        "tokenizer": "bytes",
        "shard_tokens": 1024,
        "chunk_tokens": 64,
        "sources": {
            "rows": {"paths": [str(folder / "train.tsv")], "columns": COLUMNS, "max_tokens": MOST, **FIELDS},
            "others": {"paths": [str(folder / "more.jsonl"), str(folder / "table.parquet")], **FIELDS},
        },
        **more,
    }


def pairs_in(store: TokenStore, name: str) -> list[tuple[str, str, str]]:
    """(label, text, text) of each; both documents have the label."""
    source, tokenizer, found = store.source(name), load_tokenizer(store.path), []
    assert source.holds_pairs and source.has_text_pairs and not source.has_preferences
    for number in range(0, source.num_documents, 2):
        texts = []
        for document in (number, number + 1):
            start, stop = source.document(document)
            texts.append(tokenizer.decode(source.read(start + 1, stop)))
        labels = {store.label(name, document) for document in (number, number + 1)}
        assert len(labels) == 1
        found.append((str(labels.pop()), texts[0], texts[1]))
    return found


def expected(numbers: range, most_bytes: int = 1000) -> list[tuple[str, str, str]]:
    return [
        (one["label"], one["text1"].encode()[:most_bytes].decode(), one["text2"].encode()[:most_bytes].decode())
        for one in map(pair, numbers)
    ]


def test_pairs_are_in_the_store_and_wrong_rows_are_named(tmp_path: Path) -> None:
    report = prepare(make_corpus(corpus(tmp_path), origin="test"), tmp_path / "store", PrepareOptions(unit_bytes=300))
    store = TokenStore(tmp_path / "store")
    assert verify_store(store.path, lambda step, done, total: None).faults == []
    assert pairs_in(store, "rows") == expected(range(20), MOST - 1)
    assert pairs_in(store, "others") == expected(range(20, 40))
    assert store.classes == {"label": ["0.0", "1.0"]}
    assert store.source("rows").longest_pair() <= 2 * MOST
    assert store.source("rows").num_bytes == sum(len((a + b).encode()) for _, a, b in pairs_in(store, "rows"))
    dropped = report["corpus"]["rows"]["stages"]["deduplicate"]["dropped"]
    assert {reason: one["documents"] for reason, one in dropped.items()} == {"exact duplicate": 2}
    problems = report["problems"]
    (where,) = problems["row with another number of fields"]["examples"]
    assert where.startswith("train.tsv@") and where.endswith(": 4 fields, not label, id1, id2, text1, text2")
    stages = report["corpus"]["rows"]["stages"]
    assert stages["normalise"]["dropped"]["empty document skipped"]["documents"] == 2, "with the text that has words"
    texts = problems["no text in the field"]["examples"]
    assert len(texts) == 2 and all("no string 'text2'" in one and "more.jsonl@" in one for one in texts)
    strict, typed = PrepareOptions(unit_bytes=300, strict=True), make_corpus(corpus(tmp_path), origin="test")
    with pytest.raises(UserError, match=r"row with another number of fields: train.tsv@\d+: 4 fields"):
        prepare(typed, tmp_path / "strict", strict)


def test_both_texts_are_held_out_together(tmp_path: Path) -> None:
    held = make_corpus(corpus(tmp_path, validation=0.4), origin="test")
    prepare(held, tmp_path / "store", PrepareOptions(unit_bytes=300))
    store = TokenStore(tmp_path / "store")
    training, validation = pairs_in(store, "others"), pairs_in(store, "others-validation")
    assert len(validation) > 2
    assert sorted(training + validation) == sorted(expected(range(20, 40)))


def test_a_store_of_pairs_is_extended_by_pairs(tmp_path: Path) -> None:
    prepare(make_corpus(corpus(tmp_path), origin="test"), tmp_path / "store", PrepareOptions())
    (tmp_path / "new.jsonl").write_text("\n".join(json.dumps(pair(number)) for number in (25, 40, 41)))
    new = {"tokenizer": "bytes", "sources": {"others": {"paths": [str(tmp_path / "new.jsonl")], **FIELDS}}}
    base = PrepareOptions(base=tmp_path / "store")
    prepare(make_corpus(new, origin="test"), tmp_path / "longer", base)
    longer = TokenStore(tmp_path / "longer")
    assert pairs_in(longer, "others") == [*expected(range(20, 40)), *expected(range(40, 42))]
    assert pairs_in(longer, "rows") == expected(range(20), MOST - 1)
    del new["sources"]["others"]["text_pair_field"]  # type: ignore[index]
    with pytest.raises(
        UserError, match=r"sources.others.text_pair_field: the source others in .* holds pairs of texts"
    ):
        prepare(make_corpus(new, origin="test"), tmp_path / "other", base)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"language": "en"}, "filters read single texts, not pairs; remove language and filters"),
        ({"filters": {"size": {"min": 3}}, "language": "other"}, "remove language and filters"),
        ({"format": "chat"}, 'format = "chat" reads conversations; remove text_pair_field'),
        ({"format": "text"}, 'files of format = "text" hold one text each; use one of jsonl'),
        ({"text_pair_field": "text1"}, 'text_pair_field = "text1" is also text_field'),
        ({"label_field": "text2"}, 'label_field = "text2" is also text_field'),
        ({"columns": ["label", "text1"]}, 'columns: "text2" is none of label, text1; add it'),
        ({"columns": COLUMNS, "format": "jsonl"}, 'columns: format = "jsonl" names its fields; remove columns'),
        ({"text_pair_field": None, "max_tokens": 9}, "max_tokens cuts the texts of pairs; set text_pair_field"),
        ({"max_tokens": 1}, "max_tokens = 1"),
    ],
)
def test_what_has_no_meaning_for_pairs_is_refused(source: dict[str, Any], message: str) -> None:
    own = {key: value for key, value in {"paths": ["a"], **FIELDS, **source}.items() if value is not None}
    with pytest.raises(UserError) as error:
        make_corpus({"tokenizer": "bytes", "sources": {"a": own}}, origin="test")
    assert message in str(error.value)


def test_the_command_prepares_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text("\n".join(json.dumps(pair(number)) for number in range(9)), encoding="utf-8")
    words = ["--text-field", "text1", "--text-pair-field", "text2", "--label-field", "label", "--max-tokens", str(MOST)]
    command = ["data", "prepare", "pairs.jsonl", "--tokenizer", "bytes", "--validation", "0", *words]
    assert main([*command, "--out", "store"]) == 0, capsys.readouterr().err
    assert pairs_in(TokenStore(Path("store")), "pairs") == expected(range(9), MOST - 1)
    Path("pairs.jsonl").write_text(json.dumps({"text1": "a", "text2": "b"}))
    assert main([*command, "--out", "other"]) != 0
    assert 'pairs.jsonl@0: label_field = "label": the document has no such field' in capsys.readouterr().err
    Path("book.txt").write_text("One text.")
    assert main(["data", "prepare", "book.txt", *command[3:], "--out", "other"]) != 0
    assert "pairs of texts are records of jsonl" in capsys.readouterr().err

"""Bytes as tokens, and shades of grey: ids, and what a corpus and a store make of them."""

import json
from pathlib import Path

import pytest

from lightscale.cli import main
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.tokenizers import load_tokenizer
from lightscale.data_pipeline.tokenizers.symbols import SHADES, byte_tokenizer, shade_tokenizer

TEXT = "na\u00efve \U0001f600\x00 <|endoftext|>"


def test_ids_of_bytes_are_their_values() -> None:
    tokenizer = byte_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (257, 256)
    assert tokenizer.encode(TEXT) == list(TEXT.encode())
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_ids_of_shades_are_their_values_behind_the_bytes() -> None:
    tokenizer = shade_tokenizer("pixels")
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (513, 512)
    assert tokenizer.encode("".join(SHADES)) == list(range(256, 512))
    assert tokenizer.encode("a" + SHADES[7]) == [97, 263]


@pytest.mark.parametrize("given", ["aclImdb/train", "pos neg"])
def test_folders_of_texts_become_classes_by_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """The usual files of Long Range Arena's text classification, aclImdb; or its folders by names alone."""
    reviews = {"pos/0_9.txt": "Good \u2014 very.", "pos/1_8.txt": "Yes", "neg/0_2.txt": "No.\n"}
    for name, text in reviews.items():
        path = tmp_path / "aclImdb/train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path if given == "aclImdb/train" else tmp_path / "aclImdb/train")
    words = ["data", "prepare", *given.split(), "--tokenizer", "bytes", "--label-field", "folder"]
    assert main([*words, "--name", "imdb", "--validation", "0", "--out", str(tmp_path / "store"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["sources"]["imdb"]["classes"] == {"neg": 1, "pos": 2}
    store = TokenStore(tmp_path / "store")
    source, found, first = store.source("imdb"), {}, 0
    for number, end in enumerate(source.document_ends(0, 3).tolist()):
        tokens = source.read(first, end)
        assert tokens[0] == store.tokenizer.eot_id
        found[bytes(tokens[1:].tolist()).decode()] = store.label("imdb", number)
        first = end
    assert found == {text: name[:3] for name, text in reviews.items()}
    assert load_tokenizer(tmp_path / "store").sha256 == byte_tokenizer().sha256


def test_a_text_without_a_folder_of_its_class_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another format the field is one of its records."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    monkeypatch.chdir(tmp_path)
    words = ["data", "prepare", "a.jsonl", "--tokenizer", "bytes", "--label-field", "folder", "--out", "store"]
    assert main(words) == 78
    assert 'label_field = "folder": the document has no such field' in capsys.readouterr().err

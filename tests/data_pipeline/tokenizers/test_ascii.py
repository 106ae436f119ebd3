"""Characters as tokens: ids are those of ASCII, nothing forges the end of a text, and a store keeps the tokenizer."""

from pathlib import Path

import pytest

from lightscale.data_pipeline.preparation.corpus import make_corpus
from lightscale.data_pipeline.preparation.prepare import given_tokenizer
from lightscale.data_pipeline.tokenizers import AsciiTokenizer, files_sha256, load_tokenizer
from lightscale.errors import UserError

EVERY = "".join(map(chr, range(1, 128)))


def test_ids_are_ascii() -> None:
    tokenizer = AsciiTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (128, 0)
    assert tokenizer.encode(EVERY) == list(range(1, 128))
    # SUB stands for what is not ASCII.
    assert tokenizer.decode(range(128)) == EVERY.replace("\x1a", "\ufffd")
    assert [x.tolist() for x in tokenizer.encode_batch(["ab", ""])] == [[97, 98], []]


def test_other_characters_are_replaced_one_by_one() -> None:
    tokenizer = AsciiTokenizer()
    ids = tokenizer.encode("na\u00efve \U0001f600\x00")
    assert ids == [110, 97, 26, 118, 101, 32, 26, 26]
    assert tokenizer.eot_id not in ids and tokenizer.decode(ids) == "na\ufffdve \ufffd\ufffd"


def test_a_corpus_names_it_and_a_store_keeps_it(tmp_path: Path) -> None:
    corpus = make_corpus({"tokenizer": "ascii", "sources": {"one": {"paths": ["a.txt"]}}}, origin="test")
    tokenizer = given_tokenizer(corpus)
    assert isinstance(tokenizer, AsciiTokenizer)
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(tmp_path / "tokenizer")
    assert load_tokenizer(tmp_path).sha256 == tokenizer.sha256 == files_sha256(tmp_path / "tokenizer")
    with pytest.raises(UserError, match="vocab_size = 90"):
        make_corpus({"tokenizer": "ascii", "vocab_size": 90, "sources": {"one": {"paths": ["a.txt"]}}}, origin="test")

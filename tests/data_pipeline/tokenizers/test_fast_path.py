import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lightscale.data_pipeline.tokenizers import (
    CheckedTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    fast_path_notes,
    load_tokenizer,
    with_fast_path,
)

Ids = list[NDArray[np.uint32]]
TEXTS = [f"document {number} " * (number % 7 + 1) for number in range(500)]


class Encoder:
    """The reference's ids, wrong from a call on if asked for; counts its calls."""

    def __init__(self, reference: Tokenizer, fault: str = "") -> None:
        self.reference, self.fault, self.num_calls = reference, fault, 0

    def __call__(self, texts: Sequence[str]) -> Ids:
        self.num_calls += 1
        ids = self.reference.encode_batch(texts)
        if self.num_calls == 1:  # the hard texts at the beginning are right
            return ids
        if self.fault == "raises":
            raise RuntimeError("no more")
        if self.fault == "short":
            return ids[:-1]
        if self.fault == "one token":
            return [np.append(document[:-1], np.uint32(65)) for document in ids]
        if self.fault == "longer":
            return [np.append(document, np.uint32(65)) for document in ids]
        return ids


def same(first: Ids, second: Ids) -> bool:
    return [ids.tolist() for ids in first] == [ids.tolist() for ids in second]


def test_while_it_agrees_the_fast_encoder_encodes(byte_tokenizer: TiktokenTokenizer, tmp_path: Path) -> None:
    encoder = Encoder(byte_tokenizer)
    checked = CheckedTokenizer(byte_tokenizer, encoder, "fast 1.0")
    assert same(checked.encode_batch(TEXTS), byte_tokenizer.encode_batch(TEXTS))
    assert same(checked.encode_batch([]), [])
    assert encoder.num_calls == 3
    assert checked.num_compared == 7 + 8  # the texts at the beginning, and of 500 the least number
    assert same(checked.encode_batch(TEXTS * 4), byte_tokenizer.encode_batch(TEXTS * 4))
    assert checked.num_compared == 7 + 8 + 20  # 1 in 100 of 2000
    assert fast_path_notes(checked) == ["fast 1.0 encodes; a sample of every batch matched bytes"]
    same_things = ("name", "vocab_size", "eot_id", "sha256")
    assert [getattr(checked, name) for name in same_things] == [getattr(byte_tokenizer, name) for name in same_things]
    assert checked.decode(checked.encode("a字")) == "a字"
    (tmp_path / "tokenizer").mkdir()
    checked.save(tmp_path / "tokenizer")
    assert load_tokenizer(tmp_path).sha256 == byte_tokenizer.sha256


@pytest.mark.parametrize(
    ("fault", "note"),
    [
        ("one token", "it differed in a document of"),
        ("longer", "it differed in a document of"),
        ("short", "it returned 499 results for 500 documents"),
        ("raises", "it failed (RuntimeError('no more'))"),
    ],
)
def test_at_the_first_difference_it_is_off(byte_tokenizer: TiktokenTokenizer, fault: str, note: str) -> None:
    encoder = Encoder(byte_tokenizer, fault)
    checked = CheckedTokenizer(byte_tokenizer, encoder, "fast 1.0")
    expected = byte_tokenizer.encode_batch(TEXTS)
    assert same(checked.encode_batch(TEXTS), expected)  # the whole batch again, by the reference
    assert encoder.num_calls == 2
    assert same(checked.encode_batch(TEXTS), expected)
    assert encoder.num_calls == 2  # never asked again
    (line,) = fast_path_notes(checked)
    assert line.startswith(f"fast 1.0 is disabled, bytes encodes: {note}")


def test_an_encoder_that_is_wrong_from_the_beginning_never_encodes(byte_tokenizer: TiktokenTokenizer) -> None:
    def forged(texts: Sequence[str]) -> Ids:  # takes what spells a special token for it
        ids = [[256] if "<|endoftext|>" in text else byte_tokenizer.encode(text) for text in texts]
        return [np.array(one, dtype=np.uint32) for one in ids]

    checked = CheckedTokenizer(byte_tokenizer, forged, "fast 1.0")
    assert " is disabled" in fast_path_notes(checked)[0]
    assert checked.encode_batch(["<|endoftext|>"])[0].max() < 256


def test_what_has_no_fast_path_stays_as_it_is(
    byte_tokenizer: TiktokenTokenizer, sentencepiece_tokenizer: SentencePieceTokenizer
) -> None:
    assert with_fast_path(byte_tokenizer) is byte_tokenizer  # its name is none of tiktoken's
    assert with_fast_path(sentencepiece_tokenizer) is sentencepiece_tokenizer
    assert fast_path_notes(byte_tokenizer) == []


def test_without_the_package_tiktoken_encodes(
    byte_tokenizer: TiktokenTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    monkeypatch.setattr(byte_tokenizer, "name", "cl100k_base")
    assert with_fast_path(byte_tokenizer) is byte_tokenizer


def test_a_vocabulary_that_only_has_the_name_is_found_out(
    byte_tokenizer: TiktokenTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes with another splitting pattern and other ranks behind the name cl100k_base: the ids must be right."""
    pytest.importorskip("gigatoken", reason="gigatoken, the optional fast path, is not installed")
    monkeypatch.setattr(byte_tokenizer, "name", "cl100k_base")
    tokenizer = with_fast_path(byte_tokenizer)
    assert same(tokenizer.encode_batch(TEXTS[:50]), byte_tokenizer.encode_batch(TEXTS[:50]))

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightscale.data_pipeline.tokenizers import HuggingFaceTokenizer, load_tokenizer
from lightscale.errors import UserError

hf = pytest.importorskip("tokenizers", reason="the package tokenizers (extra corpus) is not installed")

SPECIAL = ["<|endoftext|>", "<|pad|>", "</s>"]
MakeFile = Callable[..., bytes]


def train(normalizer: Any = None, special: list[str] = SPECIAL, added: list[str] | None = None) -> bytes:
    """A byte-level tokenizer of 320 pieces, as published ones are made."""
    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat and the dog see the other cat " * 20], trainer)
    tokenizer.add_tokens(added or [])
    if special:  # as many files do: every text would get one in front
        first = special[0]
        tokenizer.post_processor = hf.processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
        )
    tokenizer.enable_truncation(10)
    tokenizer.enable_padding(length=30)
    return str(tokenizer.to_str()).encode()


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(train(added=["    "]), origin="test.json")


@given(
    text=st.text()
    | st.lists(st.sampled_from([*SPECIAL, "the", " ", "    ", "\0", "\u2581", "e\u0301", "\r\n"])).map("".join)
)
def test_it_loses_nothing_and_text_makes_no_special_token(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    ids, (batched,) = tokenizer.encode(text), tokenizer.encode_batch([text])
    assert {type(number) for number in ids} <= {int}
    assert batched.dtype == np.uint32 and batched.tolist() == ids
    assert tokenizer.decode(ids) == text
    assert not {0, 1, 2} & set(ids)


def test_ids_are_those_of_the_package(tokenizer: HuggingFaceTokenizer) -> None:
    text = "the dog, the other dog    and 字"
    plain = hf.Tokenizer.from_str(train(added=["    "]).decode())
    plain.no_truncation()
    plain.no_padding()
    assert tokenizer.encode(text) == plain.encode(text, add_special_tokens=False).ids
    assert [ids.tolist() for ids in tokenizer.encode_batch([text, "", "the"])] == [
        plain.encode(part, add_special_tokens=False).ids for part in (text, "", "the")
    ]
    assert tokenizer.vocab_size == plain.get_vocab_size()
    assert tokenizer.eot_id == plain.token_to_id("<|endoftext|>") == 0
    assert len(tokenizer.encode("word " * 100)) > 30  # the file's truncation and padding do not count


def test_special_ids_decode_to_nothing(tokenizer: HuggingFaceTokenizer) -> None:
    ids = np.concatenate([[tokenizer.eot_id], tokenizer.encode("the a"), [1, 2], tokenizer.encode(" b")])
    assert tokenizer.decode(ids) == "the a b"
    assert tokenizer.decode([]) == ""
    everything = [tokenizer.decode([index]) for index in range(tokenizer.vocab_size)]
    assert [index for index, text in enumerate(everything) if text == ""] == [0, 1, 2]


def test_saved_and_loaded_it_is_the_same_and_another_is_refused(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    tokenizer.save(directory)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.name, loaded.sha256, loaded.eot_id) == ("huggingface", tokenizer.sha256, tokenizer.eot_id)
    assert loaded.encode("the 字 <|endoftext|>") == tokenizer.encode("the 字 <|endoftext|>")
    (directory / "huggingface.json").write_bytes(train())
    with pytest.raises(UserError, match="changed after the store was written"):
        load_tokenizer(tmp_path)


def test_a_file_is_found_by_its_ending(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(train(special=["<unk>", "</s>"]))
    tokenizer = load_tokenizer(path)
    assert tokenizer.eot_id == 1
    path.write_text("{}")
    with pytest.raises(UserError, match=r"other\.json: not a Hugging Face tokenizer file"):
        load_tokenizer(path)


def test_the_end_of_text_is_part_of_the_identity() -> None:
    file = train()
    other = HuggingFaceTokenizer(file, origin="x", end_of_text="</s>")
    assert other.eot_id == 2
    assert other.sha256 != HuggingFaceTokenizer(file, origin="x").sha256


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (lambda: train(special=["<pad>"]), r"x: no special token <\|endoftext\|> or .* special tokens: <pad>"),
        (lambda: train(special=[]), "special tokens: none"),
        (lambda: train(hf.normalizers.Lowercase()), "x: the tokenizer loses text"),
        (lambda: train(hf.normalizers.NFKC()), "x: the tokenizer loses text"),
        (lambda: b"\xff", "x: not a Hugging Face tokenizer file"),
    ],
)
def test_what_cannot_be_used_is_refused(file: Callable[[], bytes], message: str) -> None:
    with pytest.raises(UserError, match=message):
        HuggingFaceTokenizer(file(), origin="x")


def test_composed_characters_are_accepted() -> None:
    tokenizer = HuggingFaceTokenizer(train(hf.normalizers.NFC()), origin="x")
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


def test_a_vocabulary_whose_special_tokens_can_be_spelled_is_refused() -> None:
    """A unigram model that has </s> among its pieces takes it from text, also where added tokens are switched off."""
    description = json.loads(train(special=["</s>"]))
    pieces = [["</s>", -0.1], *[[chr(code), -5.0] for code in range(256)]]
    description["model"] = {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}
    description["pre_tokenizer"] = None
    with pytest.raises(UserError, match="x: a text that spells </s> encodes to that special token"):
        HuggingFaceTokenizer(json.dumps(description).encode(), origin="x")


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"needs the package tokenizers; pip install 'lightscale\[corpus\]'"):
        HuggingFaceTokenizer(b"{}", origin="x")

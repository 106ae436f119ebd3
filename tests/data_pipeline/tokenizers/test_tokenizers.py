import hashlib
import io
import re
import socket
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tiktoken.load
import tiktoken.registry
from hypothesis import example, given
from hypothesis import strategies as st

from lightscale.data_pipeline.tokenizers import (
    SentencePieceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    load_tiktoken,
    load_tokenizer,
    train_sentencepiece,
)
from lightscale.errors import UserError

SPECIAL_STRINGS = ("<s>", "</s>", "<unk>", "<pad>", "<0x41>", "<|endoftext|>", "<|fim_prefix|>", "▁")
# Characters that tokenizers like to lose, and the pieces of the special strings.
HARD = "\u2581\0\t\r\n \u3000\u00a0\u2028\ufeff\ufffd\uff21\ufb01\u0301\u2585\ue000\ufdd0\U0010ffff字😀"
HELLO_ALPHABET = "the hat of the cat " * 20 + string.ascii_letters
TEXTS = st.lists(st.one_of(st.text(), st.text(alphabet=HARD), st.sampled_from(SPECIAL_STRINGS))).map("".join)


@pytest.fixture(params=["sentencepiece", "tiktoken"])
def tokenizer(
    request: pytest.FixtureRequest,
    sentencepiece_tokenizer: SentencePieceTokenizer,
    merging_tokenizer: TiktokenTokenizer,
) -> Tokenizer:
    return sentencepiece_tokenizer if request.param == "sentencepiece" else merging_tokenizer


@pytest.fixture(scope="session")
def merging_tokenizer() -> TiktokenTokenizer:
    ranks = {bytes([byte]): byte for byte in range(256)}
    for pair in (b"th", b"e ", b"the ", b"<|", b"|>", "字".encode()[:2], "字".encode(), b"\r\n"):
        ranks[pair] = len(ranks)
    special_tokens = {"<|endoftext|>": 300, "<|fim_prefix|>": 301}
    return TiktokenTokenizer(name="small", pat_str=r"\s+|\S+", mergeable_ranks=ranks, special_tokens=special_tokens)


@given(text=TEXTS)
@example(text="a\u2581b \u2581\u2581")
@example(text="x" * 20_000 + "\n" + " " * 20_000 + "\u2581" * 1000)
def test_sentencepiece_loses_nothing(sentencepiece_tokenizer: SentencePieceTokenizer, text: str) -> None:
    ids, (batched,) = sentencepiece_tokenizer.encode(text), sentencepiece_tokenizer.encode_batch([text])
    assert {type(number) for number in ids} <= {int}
    assert batched.dtype == np.uint32 and batched.tolist() == ids
    assert sentencepiece_tokenizer.decode(ids) == text
    assert not {0, sentencepiece_tokenizer.eot_id} & set(ids)  # neither <unk> nor end of text


@given(text=TEXTS)
def test_tiktoken_loses_nothing(merging_tokenizer: TiktokenTokenizer, text: str) -> None:
    ids, (batched,) = merging_tokenizer.encode(text), merging_tokenizer.encode_batch([text])
    assert {type(number) for number in ids} <= {int}
    assert batched.dtype == np.uint32 and batched.tolist() == ids
    assert merging_tokenizer.decode(ids) == text
    assert max(ids, default=0) < 300  # no special token, whatever the text spells


def test_special_tokens_decode_to_nothing(tokenizer: Tokenizer) -> None:
    ids = np.concatenate([[tokenizer.eot_id], tokenizer.encode("the a"), [tokenizer.eot_id], tokenizer.encode(" b")])
    assert tokenizer.decode(ids) == "the a b"
    assert tokenizer.decode([]) == ""


def test_every_id_decodes_also_those_that_no_text_gives(tokenizer: Tokenizer) -> None:
    hello = tokenizer.encode("hello")
    everything = "".join(tokenizer.decode([index]) for index in range(tokenizer.vocab_size))
    assert "\u2047" not in everything  # sentencepiece's sign for the unknown piece
    no_text = [index for index in range(tokenizer.vocab_size) if tokenizer.decode([index]) == ""]
    assert tokenizer.decode([*no_text, *hello, *no_text]) == "hello"


def test_a_character_cut_in_two_decodes_to_the_replacement_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\U0001f9ff")
    assert tokenizer.decode(ids[:-1]).startswith("a\ufffd")


def test_ids_are_below_vocab_size(tokenizer: Tokenizer) -> None:
    assert max(tokenizer.encode(string.printable + HARD)) < tokenizer.vocab_size
    assert 0 <= tokenizer.eot_id < tokenizer.vocab_size


def test_saved_and_loaded_it_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path)
    assert (loaded.name, loaded.sha256, loaded.vocab_size, loaded.eot_id) == (
        tokenizer.name,
        tokenizer.sha256,
        tokenizer.vocab_size,
        tokenizer.eot_id,
    )
    text = "the 字 <|endoftext|>\r\n" + HARD
    assert loaded.encode(text) == tokenizer.encode(text)


def test_a_changed_file_is_refused(tokenizer: Tokenizer, byte_tokenizer: TiktokenTokenizer, tmp_path: Path) -> None:
    other_tokenizers: dict[str, Tokenizer] = {
        "sentencepiece": train_sentencepiece(["the cat and the dog"], vocab_size=280),
        "small": byte_tokenizer,
    }
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    tokenizer.save(directory)
    (model,) = [path for path in directory.iterdir() if path.suffix != ".json"]
    description = (directory / "tokenizer.json").read_bytes()
    other_tokenizers[tokenizer.name].save(directory)
    (directory / "tokenizer.json").write_bytes(description)
    with pytest.raises(UserError, match="changed after the store was written"):
        load_tokenizer(tmp_path)
    model.write_bytes(b"no model at all")
    with pytest.raises(UserError, match=r"damaged|not a sentencepiece model"):
        load_tokenizer(tmp_path)
    model.unlink()
    with pytest.raises(UserError, match=f"{model.name}: No such file"):
        load_tokenizer(tmp_path)
    (directory / "tokenizer.json").write_text('{"kind": "runes"}')
    with pytest.raises(UserError, match="damaged"):
        load_tokenizer(tmp_path)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json: No such file"):
        load_tokenizer(tmp_path)


def test_identity_of_a_sentencepiece_model_is_that_of_its_file(
    sentencepiece_tokenizer: SentencePieceTokenizer, tmp_path: Path
) -> None:
    sentencepiece_tokenizer.save(tmp_path)
    model = tmp_path / "sentencepiece.model"
    assert sentencepiece_tokenizer.sha256 == hashlib.sha256(model.read_bytes()).hexdigest()
    assert load_tokenizer(model).sha256 == sentencepiece_tokenizer.sha256


def test_identity_of_tiktoken_changes_with_ranks_pattern_and_special_tokens() -> None:
    def identity(**changes: Any) -> str:
        ranks = {bytes([byte]): byte for byte in range(256)}
        arguments: dict[str, Any] = {"name": "x", "pat_str": r"\S+|\s+", "mergeable_ranks": ranks}
        arguments |= {"special_tokens": {"<|endoftext|>": 260}} | changes
        return TiktokenTokenizer(**arguments).sha256

    more_ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256}
    same = {identity(), identity(name="y")}
    others = {
        identity(pat_str="."),
        identity(mergeable_ranks=more_ranks),
        identity(special_tokens={"<|endoftext|>": 261}),
    }
    assert len(same) == 1
    assert len(others | same) == 4


def test_training_is_deterministic_and_takes_hard_text(random_texts: Callable[..., list[str]]) -> None:
    texts = [*random_texts(30, seed=1), "a\0b\u2581c" * 50, "one long line without an end " * 1000]
    first, second = (train_sentencepiece(iter(texts), vocab_size=350) for _ in range(2))
    assert first.sha256 == second.sha256
    assert first.vocab_size == 350
    # The long line was not skipped: its words are pieces.
    assert len(first.encode(" without")) == 1


@pytest.mark.parametrize("text", ["alpha,beta\n" * 200, "字典里没有空格" * 500 + " "])
def test_a_corpus_with_hardly_a_space_gives_a_tokenizer_that_knows_it(text: str) -> None:
    tokenizer = train_sentencepiece([text], vocab_size=268)
    assert len(tokenizer.encode(" ")) == 1
    assert tokenizer.decode(tokenizer.encode(" a \u2581 b ")) == " a \u2581 b "


def test_all_of_a_long_line_is_trained_on() -> None:
    tokenizer = train_sentencepiece(["the cat and the dog " * 500 + "sees a bird " * 500], vocab_size=300)
    assert len(tokenizer.encode(" bird")) == 1


def test_a_space_mark_in_the_text_does_not_train_as_a_space() -> None:
    tokenizer = train_sentencepiece(["\u2581bird" * 100 + " the cat and the dog" * 100], vocab_size=290)
    assert len(tokenizer.encode("bird")) == 1
    assert len(tokenizer.encode(" cat")) == 1
    assert len(tokenizer.encode(" bird")) == 2


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        (["hello world"] * 3, 4096, r"vocabulary size 4096: the corpus is too small, use at most 284"),
        ([HELLO_ALPHABET], 270, r"vocabulary size 270: too small for the corpus, use at least 311"),
        ([], 300, "no text"),
    ],
)
def test_a_vocabulary_that_cannot_be_made(texts: list[str], vocab_size: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_sentencepiece(texts, vocab_size=vocab_size)
    if possible := re.search(r"at (?:most|least) (\d+)", message):
        assert train_sentencepiece(texts, vocab_size=int(possible[1])).vocab_size == int(possible[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalization_rule_name": "nmt_nfkc"}, "loses text"),
        ({"add_dummy_prefix": True}, "loses text"),
        ({"remove_extra_whitespaces": True}, "loses text"),
        ({"byte_fallback": False, "vocab_size": 40}, "loses text"),
        ({"eos_id": -1}, "no end-of-sentence token"),
    ],
)
def test_a_model_that_loses_text_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    model = io.BytesIO()
    lossless: dict[str, Any] = {
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
        "vocab_size": 280,
        "bos_id": -1,
        "pad_id": -1,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat and the dog saw another cat"] * 20),
        model_writer=model,
        model_type="bpe",
        minloglevel=2,
        **(lossless | options),
    )
    path = tmp_path / "other.model"
    path.write_bytes(model.getvalue())
    with pytest.raises(UserError, match=rf"other\.model: the model.*{message}|other\.model.*{message}"):
        load_tokenizer(path)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.model").write_bytes(b"no model at all")
    with pytest.raises(UserError, match=r"other\.model: not a sentencepiece model"):
        load_tokenizer(tmp_path / "other.model")


def test_an_encoding_without_end_of_text_is_refused() -> None:
    with pytest.raises(UserError, match=r"<\|endoftext\|>"):
        TiktokenTokenizer(name="x", pat_str=".", mergeable_ranks={b"a": 0}, special_tokens={})


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        pytest.fail("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An encoding of tiktoken whose ranks are to be had at an address."""
    url = "https://ranks.invalid/published.tiktoken"

    def constructor() -> dict[str, Any]:
        return {
            "name": "published",
            "explicit_n_vocab": 258,
            "pat_str": r"\S+|\s+",
            "mergeable_ranks": tiktoken.load.load_tiktoken_bpe(url),
            "special_tokens": {"<|endoftext|>": 257},
        }

    tiktoken.list_encoding_names()  # fills the table
    monkeypatch.setitem(tiktoken.registry.ENCODING_CONSTRUCTORS or {}, "published", constructor)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    return url


@pytest.mark.usefixtures("no_network")
def test_tiktoken_comes_from_its_cache(published: str, tmp_path: Path, byte_tokenizer: TiktokenTokenizer) -> None:
    byte_tokenizer.save(tmp_path)
    (tmp_path / "ranks.tiktoken").rename(tmp_path / hashlib.sha1(published.encode()).hexdigest())
    tokenizer = load_tiktoken("published")
    assert tokenizer.encode("ab<|endoftext|>") == list(b"ab<|endoftext|>")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot_id) == ("published", 258, 257)


@pytest.mark.usefixtures("no_network")
def test_without_the_cached_file_the_error_says_what_to_put_where(published: str) -> None:
    original = tiktoken.load.read_file
    key = hashlib.sha1(published.encode()).hexdigest()
    with pytest.raises(UserError, match=rf"Save {published} under the name {key} .*TIKTOKEN_CACHE_DIR"):
        load_tiktoken("published")
    assert tiktoken.load.read_file is original


@pytest.mark.usefixtures("no_network")
def test_cl100k_base_without_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    match = r"tiktoken:cl100k_base.*pip install --no-deps llama-index-core.*9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
    with pytest.raises(UserError, match=match):
        load_tiktoken("cl100k_base")


def test_an_unknown_encoding_names_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"'cl99'.*cl100k_base"):
        load_tiktoken("cl99")


def test_cl100k_base() -> None:
    try:
        tokenizer = load_tiktoken("cl100k_base")
    except UserError as error:
        pytest.skip(f"no cached ranks: {error}")
    text = "Hello, 世界! <|endoftext|> def f(x):\n\treturn x"
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (100_277, 100_257)
    assert tokenizer.encode(text) == tiktoken.get_encoding("cl100k_base").encode_ordinary(text)
    assert tokenizer.encode("Hello, world") == [9906, 11, 1917]
    assert tokenizer.decode(tokenizer.encode(text)) == text

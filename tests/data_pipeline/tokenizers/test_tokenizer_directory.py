"""A tokenizer's files: their hash without the package that runs it, and copies that are whole or not there."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lightscale.data_pipeline.tokenizers import (
    HuggingFaceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    copy_tokenizer,
    files_sha256,
    load_tokenizer,
    train_sentencepiece,
)
from lightscale.errors import UserError


def huggingface() -> Tokenizer:
    package = pytest.importorskip("tokenizers")
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    alphabet = package.pre_tokenizers.ByteLevel.alphabet()
    trainer = package.trainers.BpeTrainer(
        vocab_size=270, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat and the dog"], trainer)
    return HuggingFaceTokenizer(str(tokenizer.to_str()).encode(), origin="test")


def sentencepiece() -> Tokenizer:
    return train_sentencepiece(["the hat of the cat " * 20], vocab_size=270)


def tiktoken() -> Tokenizer:
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256}
    special = {"<|endoftext|>": 300}
    return TiktokenTokenizer(name="small", pat_str=r"\s+|\S+", mergeable_ranks=ranks, special_tokens=special)


@pytest.mark.parametrize("make", [sentencepiece, tiktoken, huggingface])
def test_a_copy_is_the_same_tokenizer(tmp_path: Path, make: Callable[[], Tokenizer]) -> None:
    tokenizer, source = make(), tmp_path / "store" / "tokenizer"
    source.mkdir(parents=True)
    tokenizer.save(source)
    assert files_sha256(source) == tokenizer.sha256
    (tmp_path / "run").mkdir()
    target = tmp_path / "run" / "tokenizer"
    # What a kill leaves of an earlier copy.
    (tmp_path / "run" / "tokenizer.host-7.tmp").mkdir()
    copy_tokenizer(source, target, sha256=tokenizer.sha256)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokenizer"]
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }
    shutil.rmtree(tmp_path / "store")
    loaded = load_tokenizer(tmp_path / "run")
    assert loaded.sha256 == tokenizer.sha256
    assert loaded.encode("the cat") == tokenizer.encode("the cat")
    # One bit of any file but the description, which is not what decides the ids, changes the hash.
    for path in target.iterdir():
        if path.name != "tokenizer.json":
            content = path.read_bytes()
            path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
            assert files_sha256(target) != tokenizer.sha256
            path.unlink()
            with pytest.raises(UserError, match=str(path)):
                files_sha256(target)


def test_what_is_not_the_tokenizer_replaces_nothing(tmp_path: Path) -> None:
    for name, tokenizer in (("source", sentencepiece()), ("target", tiktoken())):
        (tmp_path / name).mkdir()
        tokenizer.save(tmp_path / name)
    before = files_sha256(tmp_path / "target")
    with pytest.raises(UserError, match=f"{tmp_path / 'source'}: expected the tokenizer with sha256 {before}, found"):
        copy_tokenizer(tmp_path / "source", tmp_path / "target", sha256=before)
    assert files_sha256(tmp_path / "target") == before
    copy_tokenizer(tmp_path / "source", tmp_path / "target", sha256=sentencepiece().sha256)
    assert files_sha256(tmp_path / "target") == sentencepiece().sha256
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=f"{tmp_path / 'target'}: damaged tokenizer files"):
        files_sha256(tmp_path / "target")

"""Tokenizer files whose ids no vocabulary has: refused by name, before anything as large as they are is made."""

import base64
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from lightscale.data_pipeline.tokenizers import HuggingFaceTokenizer, load_tokenizer
from lightscale.errors import UserError

BYTES = {bytes([byte]): byte for byte in range(256)}


def tiktoken_files(folder: Path, ranks: list[tuple[bytes, object]], special: dict[str, Any]) -> Path:
    """A store's folder with a tokenizer of these ranks; its hash is not looked at before they are."""
    directory = folder / "tokenizer"
    directory.mkdir()
    lines = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks)
    (directory / "ranks.tiktoken").write_text(lines)
    description = {"kind": "tiktoken", "name": "t", "pattern": ".", "special_tokens": special, "sha256": ""}
    (directory / "tokenizer.json").write_text(json.dumps(description))
    return folder


@pytest.mark.parametrize(
    ("more", "special", "words"),
    [
        ([], {"<|endoftext|>": 2**32 - 1}, "has the id 4294967295: must be a whole number from 0 to 16_777_215"),
        ([], {"<|endoftext|>": -1}, "has the id -1: must be a whole number"),
        ([], {"<|endoftext|>": True}, "has the id True: must be a whole number"),
        ([], {"<|endoftext|>": 1.5}, "has the id 1.5: must be a whole number"),
        ([], {"<|endoftext|>": 7}, "both have the id 7"),
        ([(b"ab", 7)], {"<|endoftext|>": 300}, "both have the id 7"),
        ([(b"ab", 10**9)], {"<|endoftext|>": 256}, "has the id 1000000000: must be"),
        ([(b"ab", 10**6)], {"<|endoftext|>": 256}, "ids are unused; use at most"),
        ([(b"a", 256)], {"<|endoftext|>": 257}, "a token occurs twice"),
        ([(b"ab", "9" * 5000)], {"<|endoftext|>": 256}, "damaged tokenizer files"),
    ],
)
def test_ranks_that_no_encoding_has(tmp_path: Path, more: list[Any], special: dict[str, Any], words: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError) as caught:
        load_tokenizer(tiktoken_files(tmp_path, [*BYTES.items(), *more], special))
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_an_encoding_without_a_byte(tmp_path: Path) -> None:
    ranks: list[tuple[bytes, object]] = [(bytes([byte]), byte) for byte in range(255)]
    with pytest.raises(UserError, match="no rank for the byte 0xff"):
        load_tokenizer(tiktoken_files(tmp_path, ranks, {"<|endoftext|>": 255}))


@pytest.mark.parametrize(
    ("vocabulary", "added", "words"),
    [
        ({"a": 0, "b": 2**32 - 1}, 1, "'b' has the id 4294967295"),
        ({"a": 0, "b": -1}, 1, "'b' has the id -1"),
        ({"a": 0, "b": 0}, 1, "both have the id 0"),
        ({"a": 0, "b": 10**6}, 1, "ids are unused; use at most"),
        ({"a": 0}, 2**32 - 1, "has the id 4294967295"),
        ({"a": 0}, 7, "but the package tokenizers gives it 1"),
    ],
)
def test_huggingface_ids_that_no_vocabulary_has(vocabulary: dict[str, int], added: int, words: str) -> None:
    pytest.importorskip("tokenizers")
    token = {"id": added, "content": "<|endoftext|>", "special": True, "single_word": False, "lstrip": False}
    token |= {"rstrip": False, "normalized": False}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
    file = json.dumps({"version": "1.0", "added_tokens": [token], "model": model}).encode()
    with pytest.raises(UserError) as caught:
        HuggingFaceTokenizer(file, origin="t.json")
    assert "t.json: " in str(caught.value)
    assert words in str(caught.value)


def test_what_is_no_tokenizer_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    os.mkfifo(tmp_path / "tokenizer" / "tokenizer.json")
    with pytest.raises(UserError, match="a named pipe; a file of a tokenizer is a regular file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="damaged tokenizer files"):
        load_tokenizer(tmp_path)

"""Exported tokenizers against the originals: every id, and every text back."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lightscale.data_pipeline.tokenizers import (
    AsciiTokenizer,
    HuggingFaceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    load_tiktoken,
    train_sentencepiece,
)
from lightscale.errors import UserError
from lightscale.exchange.files.tokenizer_files import CONFIG, FILE, comparison_texts, write_tokenizer

tokenizers = pytest.importorskip("tokenizers")

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "lightscale/kernels").rglob("*.py"))[:30]]
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)


def tiktoken_like(**special: int) -> TiktokenTokenizer:
    """cl100k's pattern; bytes, and what pairs of them in `SOURCES` there are most of."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    counts: dict[bytes, int] = {}
    for text in SOURCES:
        data = text.encode()
        for width in (2, 3, 4):
            for start in range(0, len(data) - width, width):
                counts[data[start : start + width]] = counts.get(data[start : start + width], 0) + 1
    for token in sorted(counts, key=lambda token: (len(token), -counts[token]))[:600]:
        if any(token[:at] in ranks and token[at:] in ranks for at in range(1, len(token))):
            ranks[token] = len(ranks)
    by_name = {name.replace("_", "|"): len(ranks) + offset for name, offset in special.items()}
    return TiktokenTokenizer(name="small", pat_str=CL100K, mergeable_ranks=ranks, special_tokens=by_name)


def differing(tokenizer: Tokenizer, directory: Path, texts: Iterable[str]) -> list[str]:
    exported = tokenizers.Tokenizer.from_file(str(directory / FILE))
    exported.encode_special_tokens = True
    found = []
    for text in texts:
        expected = tokenizer.encode(text)
        ids = exported.encode(text, add_special_tokens=False).ids
        if ids != expected or exported.decode(ids, skip_special_tokens=False) != tokenizer.decode(expected):
            found.append(text)
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tiktoken", "sentencepiece", "huggingface", "ascii"])
def test_every_id_and_every_text(tmp_path: Path, kind: str) -> None:
    tokenizer: Tokenizer
    if kind == "sentencepiece":
        tokenizer = train_sentencepiece(SOURCES, vocab_size=700)
    elif kind == "ascii":
        tokenizer = AsciiTokenizer()
    else:
        tokenizer = tiktoken_like(**{"<_endoftext_>": 1, "<_fim_>": 20})
        if kind == "huggingface":
            write_tokenizer(tokenizer, tmp_path, max_tokens=64)
            tokenizer = HuggingFaceTokenizer((tmp_path / FILE).read_bytes(), origin="here")
    write_tokenizer(tokenizer, tmp_path, max_tokens=64)
    assert differing(tokenizer, tmp_path, SOURCES) == []
    assert differing(tokenizer, tmp_path, comparison_texts(10_000, seed=1)) == []
    content = json.loads((tmp_path / FILE).read_text(encoding="utf-8"))
    exported = tokenizers.Tokenizer.from_file(str(tmp_path / FILE))
    assert exported.encode("the").ids == [tokenizer.eot_id, *tokenizer.encode("the")]
    settings = json.loads((tmp_path / CONFIG).read_text(encoding="utf-8"))
    eot = settings["eos_token"]
    assert {token["content"]: token["id"] for token in content["added_tokens"]}[eot] == tokenizer.eot_id
    if kind == "tiktoken":
        special = {token["content"]: token["id"] for token in content["added_tokens"]}
        assert special.items() >= tokenizer.special_tokens.items()  # type: ignore[attr-defined]
        assert exported.get_vocab_size() == tokenizer.vocab_size


def test_a_pattern_that_another_engine_reads_otherwise_is_refused(tmp_path: Path) -> None:
    """There a possessive + behind {2} is a repetition."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"aa": 256, b"aaaa": 257}
    tokenizer = TiktokenTokenizer(
        name="odd", pat_str=r"a{2}+|.|\s", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 258}
    )
    with pytest.raises(UserError, match="the tokenizer odd cannot be exported: 'aaa"):
        write_tokenizer(tokenizer, tmp_path, max_tokens=64)
    assert list(tmp_path.iterdir()) == []


def test_a_pattern_that_another_engine_does_not_read_is_refused(tmp_path: Path) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    how: dict[str, Any] = {"mergeable_ranks": ranks, "special_tokens": {"<|endoftext|>": 256}}
    with pytest.raises(UserError, match="lines cannot be exported: the package tokenizers cannot read it"):
        write_tokenizer(TiktokenTokenizer(name="lines", pat_str="(?R).|\\s", **how), tmp_path, max_tokens=64)
    whole = TiktokenTokenizer(name="whole", pat_str="(?s:.+)", **how)
    write_tokenizer(whole, tmp_path, max_tokens=64)
    assert differing(whole, tmp_path, comparison_texts(300, seed=3)) == []


def test_special_ids_among_the_ranks_are_refused(tmp_path: Path) -> None:
    ranks = {bytes([byte]): byte if byte < 200 else byte + 1 for byte in range(256)}
    tokenizer = TiktokenTokenizer(
        name="mixed", pat_str=".", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 200}
    )
    with pytest.raises(UserError, match="followed by all special tokens"):
        write_tokenizer(tokenizer, tmp_path, max_tokens=64)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["cl100k_base", "o200k_base"])
def test_published_encodings(tmp_path: Path, name: str) -> None:
    try:
        tokenizer = load_tiktoken(name)
    except UserError as error:  # its ranks come from the network, or with another package
        pytest.skip(str(error))
    write_tokenizer(tokenizer, tmp_path, max_tokens=64)
    assert differing(tokenizer, tmp_path, [*SOURCES, *comparison_texts(10_000, seed=2)]) == []
    content: Any = json.loads((tmp_path / FILE).read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    assert special.items() >= tokenizer.special_tokens.items()

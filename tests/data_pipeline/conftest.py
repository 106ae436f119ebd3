"""Corpora and tokenizers that the tests of the data pipeline share."""

import string
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.tokenizers import (
    SentencePieceTokenizer,
    TiktokenTokenizer,
    train_sentencepiece,
)

EOT = 256
WORDS = ("def", "return", "self", "value", "==", "    ", "\n", "字", "tensor", "(x)", "\t", "e\u0301", " ", ".")

WriteStore = Callable[..., TokenStore]


@pytest.fixture(scope="session")
def byte_tokenizer() -> TiktokenTokenizer:
    """A token is a byte: what a text becomes is known without a tokenizer."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    return TiktokenTokenizer(
        name="bytes", pat_str=r"(?s:.+)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": EOT}
    )


def _random_texts(num_texts: int, *, seed: int = 0, max_words: int = 60) -> list[str]:
    generator = np.random.default_rng(seed)
    return ["".join(generator.choice(WORDS, generator.integers(1, max_words + 1))) for _ in range(num_texts)]


@pytest.fixture(scope="session")
def random_texts() -> Callable[..., list[str]]:
    """``random_texts(num_texts, *, seed=0, max_words=60)``: texts of code-like and Chinese words."""
    return _random_texts


@pytest.fixture(scope="session")
def sentencepiece_tokenizer() -> SentencePieceTokenizer:
    texts = [*_random_texts(200), string.printable, "the end of the text, the start of the next " * 20]
    return train_sentencepiece(texts, vocab_size=420)


@pytest.fixture
def write_store(tmp_path: Path, byte_tokenizer: TiktokenTokenizer) -> WriteStore:
    """``write_store({source: [ids without end of text, …]}, name="store", shards=64)``: values in a shard.

    Sources whose name ends with "validation" are validation sources.
    """

    def write(documents: dict[str, list[list[int]]], name: str = "store", shards: int = 64) -> TokenStore:
        path = tmp_path / name
        with StoreWriter(path, byte_tokenizer, shard_tokens=shards, chunk_tokens=8) as store:
            for source, texts in documents.items():
                writer = store.source(source, "validation" if source.endswith("validation") else "train")
                for ids in texts:
                    writer.append(np.array(ids, dtype=np.uint32), num_bytes=len(ids))
            store.finish({})
        return TokenStore(path)

    return write

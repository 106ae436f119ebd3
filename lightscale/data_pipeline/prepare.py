"""From documents to a token store: read ▸ split ▸ train the tokenizer ▸ tokenize ▸ write, each step on its
own.

Nothing depends on the time, the machine or the order in which a directory lists its entries: the same corpus,
options and versions give the same store, byte for byte.
"""

import copy
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightscale.data_pipeline.sources import Document, Problems, SourceFile, read_documents
from lightscale.data_pipeline.store import (
    CHUNK_TOKENS,
    SHARD_TOKENS,
    SourceWriter,
    Split,
    StoreWriter,
    require_absent,
)
from lightscale.data_pipeline.tokenizers import (
    Tokenizer,
    load_tiktoken,
    load_tokenizer,
    train_sentencepiece,
)
from lightscale.errors import UserError

DEFAULT_VOCAB_SIZE = 4096
VALIDATION_SUFFIX = "-validation"
_SAMPLE_BYTES = 8_000_000
_SAMPLE_BLOCK_CHARACTERS = 2**16
# Which documents are held out and which blocks train the tokenizer must not depend on each other.
_SPLIT_SEED, _SAMPLE_SEED = 1, 2

Progress = Callable[[str, int, int], None]
"""(step, bytes of the corpus done, bytes in all)."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What makes a store."""

    files: Sequence[SourceFile]
    out: Path
    """The store; must not exist."""
    name: str
    """Of the training source; the held-out documents become the source ``name-validation``."""
    tokenizer: str = "sentencepiece"
    """``sentencepiece`` (trained here), ``tiktoken:ENCODING``, or the path of a store or ``.model`` file."""
    vocab_size: int | None = None
    """Ids of a tokenizer that is trained here, special ones included; none: 4096."""
    validation: float = 0.02
    """Share of the documents to hold out, 0 ≤ share < 1."""
    text_field: str = "text"
    """Field of the text in jsonl files."""
    shard_tokens: int = SHARD_TOKENS
    chunk_tokens: int = CHUNK_TOKENS


def prepare_store(
    preparation: Preparation, problems: Problems, progress: Progress = lambda step, done, total: None
) -> dict[str, Any]:
    """Write the store and return the report that is also its ``report.json``.

    ``problems`` counts what was wrong in the corpus. Raises ``UserError`` for mistakes in the options, a
    corpus with nothing to train on, a path that exists and a full disk; the path is then as it was before.
    """
    if not 0 <= preparation.validation < 1:
        raise UserError(f"validation {preparation.validation}: it is a share of the documents, 0 ≤ share < 1")
    require_absent(preparation.out)
    # The tokenizer's pass over the corpus meets the same problems as the one that writes: they count once.
    tokenizer = _make_tokenizer(preparation, copy.deepcopy(problems), progress)
    layout = {"shard_tokens": preparation.shard_tokens, "chunk_tokens": preparation.chunk_tokens}
    with StoreWriter(preparation.out, tokenizer, **layout) as store:
        writers: dict[Split, SourceWriter] = {
            "train": store.source(preparation.name, "train"),
            "validation": store.source(preparation.name + VALIDATION_SUFFIX, "validation"),
        }
        for document in _documents(preparation, problems, progress, "tokenize"):
            num_bytes = len(document.text.encode())
            split = split_of(document.id, preparation.validation)
            writers[split].append(tokenizer.encode(document.text), num_bytes=num_bytes)
        _require_documents(writers["train"].num_documents, preparation, problems)
        for writer in writers.values():
            writer.flush()
        report = _report(preparation.name, tokenizer, writers, problems)
        store.finish(report)
    return report


def split_of(document_id: str, validation: float) -> Split:
    """The split of a document: a pure function of its id, so it stays when the corpus grows."""
    share = xxhash.xxh3_64_intdigest(document_id.encode(), seed=_SPLIT_SEED) / 2**64
    return "validation" if share < validation else "train"


def sample_blocks(documents: Iterable[Document], limit_bytes: int) -> list[str]:
    """About ``limit_bytes`` of text, spread evenly over ``documents``, in memory bounded by that.

    The texts are cut into blocks of 65,536 characters, and the blocks with the lowest hashes of (document,
    number) are kept: the same blocks whatever order the documents come in.
    """
    heap: list[tuple[int, str, str]] = []  # (-hash, name, text): the block with the highest hash is on top
    kept_bytes, ceiling = 0, 2**64
    for document in documents:
        for start in range(0, len(document.text), _SAMPLE_BLOCK_CHARACTERS):
            name = f"{document.id}#{start}"
            digest = xxhash.xxh3_64_intdigest(name.encode(), seed=_SAMPLE_SEED)
            if digest >= ceiling:
                continue
            text = document.text[start : start + _SAMPLE_BLOCK_CHARACTERS]
            heapq.heappush(heap, (-digest, name, text))
            kept_bytes += len(text.encode())
            while kept_bytes > limit_bytes and len(heap) > 1:
                highest, _, dropped = heapq.heappop(heap)
                ceiling = -highest
                kept_bytes -= len(dropped.encode())
    return [text for _, _, text in sorted(heap, reverse=True)]


def unigram_entropy(counts: NDArray[np.int64], under: NDArray[np.int64] | None = None) -> float:
    """Nats per token that a model pays which knows nothing but how often each token is.

    ``counts``: (vocab_size,) occurrences in the text to be coded. ``under``: those in the text that the
    frequencies were learned from, one added to each so that none is impossible; none: ``counts`` themselves,
    the entropy proper.
    """
    present = counts > 0
    shares = counts[present] / counts.sum()
    if under is None:
        return float(-(shares * np.log(shares)).sum())
    learned = (under[present] + 1) / (under.sum() + len(under))
    return float(-(shares * np.log(learned)).sum())


def _make_tokenizer(preparation: Preparation, problems: Problems, progress: Progress) -> Tokenizer:
    choice = preparation.tokenizer
    if choice == "sentencepiece":
        documents = _documents(preparation, problems, progress, "sample for the tokenizer")
        training = (doc for doc in documents if split_of(doc.id, preparation.validation) == "train")
        blocks = sample_blocks(training, _SAMPLE_BYTES)
        _require_documents(len(blocks), preparation, problems)
        return train_sentencepiece(blocks, vocab_size=preparation.vocab_size or DEFAULT_VOCAB_SIZE)
    if preparation.vocab_size is not None:
        raise UserError(f"vocab size {preparation.vocab_size}: tokenizer {choice} has its own; give only one")
    if choice.startswith("tiktoken:"):
        return load_tiktoken(choice.removeprefix("tiktoken:"))
    path = Path(choice)
    if not path.exists():
        raise UserError(
            f"tokenizer {choice}: it is neither sentencepiece, nor tiktoken:ENCODING (tiktoken:cl100k_base), "
            "nor the path of a store or a sentencepiece model"
        )
    return load_tokenizer(path)


def _documents(preparation: Preparation, problems: Problems, progress: Progress, step: str) -> Iterator[Document]:
    total = sum(file.size_bytes for file in preparation.files)
    done = 0
    progress(step, 0, total)
    for document in read_documents(preparation.files, problems, text_field=preparation.text_field):
        yield document
        done += document.read_bytes
        progress(step, done, total)
    progress(step, total, total)


def _require_documents(num_documents: int, preparation: Preparation, problems: Problems) -> None:
    if num_documents:
        return
    seen = ", ".join(f"{count} × {reason}" for reason, count in problems.counts.items())
    places = [place for examples in problems.examples.values() for place in examples][:3]
    raise UserError(
        f"no document is left to train on: {len(preparation.files)} files read"
        + (f", {seen} ({'; '.join(places)})" if seen else "")
        + (f"; {preparation.validation:.0%} of the documents are held out" if preparation.validation else "")
    )


def _report(name: str, tokenizer: Tokenizer, writers: dict[Split, SourceWriter], problems: Problems) -> dict[str, Any]:
    train, validation = writers["train"], writers["validation"]
    entropy: dict[str, float | None] = {"train": unigram_entropy(train.token_counts)}
    if validation.num_documents:
        entropy["validation"] = unigram_entropy(validation.token_counts)
        entropy["validation_under_train"] = unigram_entropy(validation.token_counts, train.token_counts)
    sources = {name: train, name + VALIDATION_SUFFIX: validation}
    return {
        "tokenizer": {
            "name": tokenizer.name,
            "sha256": tokenizer.sha256,
            "eot_id": tokenizer.eot_id,
            "vocab_size": tokenizer.vocab_size,
        },
        "sources": {
            name: {
                "documents": writer.num_documents,
                "bytes": writer.num_bytes,
                "tokens": writer.num_tokens,
                "bytes_per_token": writer.num_bytes / writer.num_tokens,
            }
            for name, writer in sources.items()
            if writer.num_documents
        },
        "unigram_entropy_nats": entropy,
        "problems": {
            reason: {"count": count, "examples": problems.examples[reason]}
            for reason, count in sorted(problems.counts.items())
        },
    }

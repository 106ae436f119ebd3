"""The store that a preparation adds to, as the preparation sees it.

Its documents come before all new ones and stay as they are: of duplicates the earlier is kept. To the search for
duplicates they are one document, ``KNOWN``, that has all of their keys. Its full shards become files of the new store
by a second name (a hard link), or by a copy where the file system has none; the last shard of an array that grows is
written anew.
"""

import itertools
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.chat.prepared import Chat
from lightscale.data_pipeline.preparation.corpus import TRAINED_TOKENIZER, Corpus, DuplicatesConfig
from lightscale.data_pipeline.store.array_group import ArrayGroup
from lightscale.data_pipeline.store.document_keys import DocumentKeys
from lightscale.data_pipeline.store.format import (
    DOCUMENTS_PREFIX,
    HASHES_DIR,
    ID_ENDS,
    IDS,
    LABEL,
    LOSS_MASK,
    ORIGINS,
    VALIDATION_SUFFIX,
)
from lightscale.data_pipeline.store.origins import InputFiles
from lightscale.data_pipeline.store.shards import ShardHashes, ShardLayout, read_metadata
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError

KNOWN = 0
"""The document that stands for all of the store: below those of all units with documents, which begin with unit 1."""
_ARRAYS = frozenset({"tokens", "doc_ends", ORIGINS, IDS, ID_ENDS, DOCUMENTS_PREFIX + LABEL, LOSS_MASK})
_READ_VALUES = 2**21


@dataclass(frozen=True, kw_only=True)
class BaseCounts:
    """Content of a source before the addition."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    """Of text, and"""
    id_bytes: int = 0
    """of the documents' own ids."""


NOTHING = BaseCounts()


class BaseStore:
    """A store that was prepared before."""

    def __init__(self, path: Path) -> None:
        """``UserError`` for a store that cannot be added to."""
        self.path = path
        self.store = TokenStore(path)
        self.store.check_sizes()
        if self.store.image_shape is not None:
            raise UserError(
                f"{path} has images, and `data add` reads texts; prepare the new images with `data prepare --images`, "
                "and train on both stores (data.stores)"
            )
        self.keys = DocumentKeys(path)
        self.groups = {name: ArrayGroup(path / name, is_checked=True) for name in self.store.sources}
        for name, group in self.groups.items():
            others = sorted(group.arrays.keys() - _ARRAYS)
            if LOSS_MASK in group.arrays and self.chat(name) is None:
                others.append(LOSS_MASK)
            if others:
                raise UserError(
                    f"{path}: source {name} has {others[0]}, which `data prepare` does not write; it cannot be extended"
                )
        self.files = InputFiles(path)

    @cached_property
    def known_files(self) -> frozenset[tuple[str, int]]:
        """(name, size in bytes) of the files that it was made of."""
        return frozenset(self.files.names_and_sizes())

    @property
    def classes(self) -> list[str]:
        """The names of its classes, by number."""
        return self.store.classes.get(LABEL, [])

    def fitted(self, corpus: Corpus) -> Corpus:
        """``corpus`` with the settings that the store decides: tokenizer, duplicates, classes, shards.

        Raises ``UserError`` if the corpus file has other settings.
        """
        duplicates = DuplicatesConfig(exact="exact" in self.keys.files, near="near" in self.keys.files)
        given = (corpus.duplicates.exact, corpus.duplicates.near)
        if given not in ((True, True), (duplicates.exact, duplicates.near)):
            raise UserError(
                f"duplicates: exact = {given[0]}, near = {given[1]}, but {self.path} was prepared with "
                f"{duplicates.exact} and {duplicates.near}; remove the table"
            )
        if corpus.classes is not None and corpus.classes != self.classes:
            raise UserError(f"classes: {self.path} has {', '.join(self.classes) or 'none'}; remove the key")
        for (name, source), suffix in itertools.product(corpus.sources.items(), ("", VALIDATION_SUFFIX)):
            group = self.groups.get(name + suffix)
            if group and (source.label_field is not None) != (DOCUMENTS_PREFIX + LABEL in group.arrays):
                has = "has no labels" if source.label_field is not None else "has labels"
                raise UserError(f"sources.{name}.label_field: the source {name + suffix} in {self.path} {has}")
            if group and source.has_text_pairs != self.store.source(name + suffix).has_text_pairs:
                holds = "single texts" if source.has_text_pairs else "pairs of texts"
                raise UserError(
                    f"sources.{name}.text_pair_field: the source {name + suffix} in {self.path} holds {holds}; use "
                    "another name for the new source"
                )
        layout = self.layout(next(iter(self.groups)), "tokens")
        has_labels = any(source.label_field is not None for source in corpus.sources.values())
        return corpus.model_copy(
            update={
                "tokenizer": str(self.path),
                "vocab_size": None,
                "duplicates": duplicates,
                "classes": (self.classes or None) if has_labels else None,
                "shard_tokens": layout.shard_length,
                "chunk_tokens": layout.chunk_length,
            }
        )

    def chat(self, source: str) -> dict[str, Any] | None:
        """Of a source of conversations: all that decided their texts and loss masks."""
        return self.store.sources[source].chat if source in self.store.sources else None

    def require_chats(self, chats: Mapping[str, Chat], corpus: Corpus) -> None:
        """``UserError`` where a source of ``corpus`` has other conversations than its namesake in the store, or none.

        ``chats``: by source, those of ``corpus``.
        """
        for name, suffix in itertools.product(corpus.sources, ("", VALIDATION_SUFFIX)):
            # All documents of a source may have been held out.
            given, own = chats[name].description() if name in chats else None, self.chat(name + suffix)
            if name + suffix not in self.groups or own == given:
                continue
            if own is None or given is None:
                fault = "conversations" if own else "no conversations"
            else:
                fault = f"conversations with another {', '.join(key for key in given if own.get(key) != given[key])}"
            raise UserError(
                f"sources.{name}.chat: the source {name + suffix} in {self.path} has {fault}; use another name "
                "for the new source"
            )

    def require_tokenizer(self, corpus: Corpus, sha256: str | None) -> None:
        """``UserError`` where the tokenizer of ``corpus``, of that hash, is another one than the store's."""
        if corpus.tokenizer != TRAINED_TOKENIZER and sha256 != self.store.tokenizer.sha256:
            own = self.store.tokenizer
            raise UserError(
                f"tokenizer = {corpus.tokenizer}: {self.path} uses another tokenizer ({own.name}, sha256 "
                f"{own.sha256[:16]}…); remove the key"
            )

    def weights(self, corpus: Corpus, training: list[str]) -> Mapping[str, float]:
        """Those of the store to write, whose ``training`` sources are given; none: by their tokens."""
        if corpus.weights:
            if missing := [name for name in training if name not in corpus.weights]:
                raise UserError(
                    f"weight: {', '.join(missing)} of {self.path} has no weight in the corpus file; list all sources "
                    f"with weights (files in the store are not read again), or set no weights"
                )
            return {name: corpus.weights[name] for name in training}
        own = self.store.weights or {}
        return own if own.keys() == set(training) else {}

    def layout(self, source: str, array: str) -> ShardLayout:
        """Of an array that the source has."""
        return read_metadata(self.path / source / array / "zarr.json")[1]

    def counts(self, source: str) -> "BaseCounts":
        """Content of a source; zeros if no source has that name."""
        if source not in self.groups:
            return NOTHING
        opened, group = self.store.source(source), self.groups[source]
        return BaseCounts(
            documents=opened.num_documents,
            tokens=opened.num_tokens,
            bytes=opened.num_bytes,
            id_bytes=group.open(IDS).length if IDS in group.arrays else 0,
        )

    def classes_of(self, source: str) -> Counter[str]:
        """Number of documents of a source in each class."""
        found: Counter[str] = Counter()
        group = self.groups.get(source)
        if group is None or DOCUMENTS_PREFIX + LABEL not in group.arrays:
            return found
        array = group.open(DOCUMENTS_PREFIX + LABEL)
        for first in range(0, array.length, _READ_VALUES):
            numbers, counts = np.unique(array.read(first, min(first + _READ_VALUES, array.length)), return_counts=True)
            found.update({self.classes[n]: c for n, c in zip(numbers.tolist(), counts.tolist(), strict=True)})
        return found

    def values(self, source: str, array: str, first: int, stop: int) -> Iterator[NDArray[Any]]:
        """Values ``first`` … ``stop`` - 1 of an array; zeros of ``id_ends`` that it has not."""
        group = self.groups[source]
        if array not in group.arrays:
            yield np.zeros(stop - first, dtype=np.uint64)
            return
        opened = group.open(array)
        for begin in range(first, stop, _READ_VALUES):
            yield opened.read(begin, min(begin + _READ_VALUES, stop))

    def link_shard(self, source: str, array: str, number: int, target: Path) -> ShardHashes:
        """Shard ``number`` of an array, and the hashes of its blocks, also in the source's directory ``target``."""
        layout, own = self.layout(source, array), self.path / source
        _link(layout.path(own / array, number), layout.path(target / array, number))
        blocks = layout.hashes
        _link(blocks.path(own / HASHES_DIR / array, number), blocks.path(target / HASHES_DIR / array, number))
        return self.groups[source].hashes_of_shard(array, number)

    def description(self) -> dict[str, Any]:
        """Its content and its own report, for the report of the new store."""
        sources = {
            name: {"documents": one.num_documents, "bytes": one.num_bytes, "tokens": one.num_tokens}
            for name, one in self.store.sources.items()
        }
        return {"fingerprint": self.store.fingerprint(), "sources": sources, "report": self.store.report()}


def _link(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)  # of an interrupted attempt
    try:
        os.link(file, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, target)

"""tiktoken: published byte-pair vocabularies, read from its cache on disk or a package that carries them."""

import binascii
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import tiktoken.load
import tiktoken.registry
from numpy.typing import NDArray

from lightscale.data_pipeline.tokenizers.interface import (
    DESCRIPTION_FILE,
    END_OF_TEXT,
    check_ids,
    read_file,
    write_description,
)
from lightscale.errors import UserError

RANKS_FILE = "ranks.tiktoken"
PACKAGE = "llama-index-core"
"""A package (MIT) that carries files of tiktoken's cache, so that a package index is enough to get them."""
_PACKAGE_FOLDER = "llama_index/core/_static/tiktoken_cache"
_PACKAGED = ("cl100k_base", "o200k_base")


class TiktokenTokenizer:
    """A byte-pair encoding of tiktoken: byte sequences with ranks, and the pattern that splits text first."""

    def __init__(
        self, *, name: str, pat_str: str, mergeable_ranks: dict[bytes, int], special_tokens: dict[str, int]
    ) -> None:
        """The arguments of ``tiktoken.Encoding``; ``special_tokens`` must have ``<|endoftext|>``."""
        if END_OF_TEXT not in special_tokens:
            raise UserError(f"tiktoken encoding {name}: it has no {END_OF_TEXT} to start documents")
        self.name = name
        self._encoding = tiktoken.Encoding(
            name, pat_str=pat_str, mergeable_ranks=mergeable_ranks, special_tokens=special_tokens
        )
        self.pattern, self.mergeable_ranks = pat_str, mergeable_ranks
        self.special_tokens = special_tokens
        self._token_ids = np.fromiter(mergeable_ranks.values(), dtype=np.int64)
        self.ranks = b"".join(
            b"%b %d\n" % (binascii.b2a_base64(token, newline=False), rank)
            for token, rank in sorted(mergeable_ranks.items(), key=lambda item: item[1])
        )
        self.sha256 = _sha256(pat_str, special_tokens, self.ranks)
        self.vocab_size = self._encoding.n_vocab
        self.eot_id = special_tokens[END_OF_TEXT]

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        return self._encoding.encode(text, allowed_special=set(), disallowed_special=())

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """See ``Tokenizer``."""
        encode = self._encoding.encode_to_numpy
        return [encode(text, allowed_special=set(), disallowed_special=()) for text in texts]

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """See ``Tokenizer``."""
        # Some ids below n_vocab stand for nothing: no text gives them, but a model that is hardly trained may.
        array = np.asarray(ids, dtype=np.int64)
        return self._encoding.decode(array[np.isin(array, self._token_ids)].tolist(), errors="replace")

    def save(self, directory: Path) -> None:
        """See ``Tokenizer``."""
        (directory / RANKS_FILE).write_bytes(self.ranks)
        rules = {"kind": "tiktoken", "pattern": self.pattern, "special_tokens": self.special_tokens}
        write_description(directory, self, rules)


def load_tiktoken(encoding: str) -> TiktokenTokenizer:
    """A published encoding of tiktoken (``cl100k_base``, ``o200k_base``, …), never from the network: from tiktoken's
    cache on disk, else from ``PACKAGE`` if that is installed. tiktoken's own hash is checked in both cases.

    Raises ``UserError`` for an unknown name, and where neither has the file, saying how to get it.
    """
    names = tiktoken.list_encoding_names()
    if encoding not in names:
        raise UserError(f"tiktoken has no encoding {encoding!r}; use one of {', '.join(sorted(names))}")
    constructors: dict[str, Callable[[], dict[str, Any]]] = tiktoken.registry.ENCODING_CONSTRUCTORS or {}
    with _offline(encoding):
        arguments = constructors[encoding]()
    arguments.pop("explicit_n_vocab", None)
    return TiktokenTokenizer(**arguments)


def load_saved_tiktoken(directory: Path, description: dict[str, Any]) -> TiktokenTokenizer:
    """Load the tokenizer that ``TiktokenTokenizer.save`` wrote."""
    path = directory / RANKS_FILE
    lines = [line.split() for line in read_file(path).splitlines()]
    ranks = [(binascii.a2b_base64(token), int(rank)) for token, rank in lines]
    special: dict[str, int] = description["special_tokens"]
    if END_OF_TEXT not in special:
        raise UserError(
            f"{directory / DESCRIPTION_FILE}: special_tokens has no {END_OF_TEXT} to start documents; add it"
        )
    # tiktoken makes what is as large as the largest id, and ends the process where a byte or rank is missing.
    check_ids([*ranks, *special.items()], origin=str(path))
    mergeable = dict(ranks)
    if len(mergeable) < len(ranks):
        raise UserError(f"{path}: a token occurs twice")
    if missing := [byte for byte in range(256) if bytes([byte]) not in mergeable]:
        raise UserError(f"{path}: no rank for the byte {missing[0]:#04x}; every byte needs a rank")
    return TiktokenTokenizer(
        name=description["name"], pat_str=description["pattern"], mergeable_ranks=mergeable, special_tokens=special
    )


def tiktoken_sha256(directory: Path, description: dict[str, Any]) -> str:
    """The ``sha256`` of the tokenizer that ``TiktokenTokenizer.save`` wrote."""
    return _sha256(description["pattern"], description["special_tokens"], read_file(directory / RANKS_FILE))


def _sha256(pattern: str, special_tokens: dict[str, int], ranks: bytes) -> str:
    rules = json.dumps([pattern, special_tokens], sort_keys=True).encode()
    return hashlib.sha256(rules + b"\n" + ranks).hexdigest()


class _NotCached(Exception):
    """tiktoken turned to the network."""


@contextmanager
def _offline(encoding: str) -> Iterator[None]:
    """While it lasts, tiktoken reads files on disk only: without a network it would wait for a long time."""
    load = tiktoken.load
    original, original_cached = load.read_file, load.read_file_cached

    def refuse(blobpath: str) -> bytes:
        raise _NotCached

    def read_cached(blobpath: str, expected_hash: str | None = None) -> bytes:
        try:
            return original_cached(blobpath, expected_hash)
        except _NotCached:
            key = hashlib.sha1(blobpath.encode()).hexdigest()
        data = _packaged(key)
        if data is None or (expected_hash is not None and not load.check_hash(data, expected_hash)):
            raise _missing(encoding, blobpath, key)
        return data

    load.read_file, load.read_file_cached = refuse, read_cached
    try:
        yield
    finally:
        load.read_file, load.read_file_cached = original, original_cached


def _packaged(key: str) -> bytes | None:
    """The file of tiktoken's cache that the package `PACKAGE` carries, if that is installed and has it."""
    try:
        # By its files: importing it takes seconds, and needs what else it depends on.
        path = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(f"{_PACKAGE_FOLDER}/{key}")))
        return path.read_bytes()
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None


def _missing(encoding: str, blobpath: str, key: str) -> UserError:
    package = f"`pip install --no-deps {PACKAGE}`, which contains it; or save" if encoding in _PACKAGED else "Save"
    return UserError(
        f"tiktoken:{encoding}: its file is missing or damaged in tiktoken's cache, and lightscale downloads nothing. "
        f"{package} {blobpath} under the name {key} in a directory, and set TIKTOKEN_CACHE_DIR to that "
        "directory"
    )

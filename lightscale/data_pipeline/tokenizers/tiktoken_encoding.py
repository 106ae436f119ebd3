"""tiktoken: published byte-pair vocabularies, read from its cache on disk."""

import binascii
import hashlib
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

from lightscale.data_pipeline.tokenizers.interface import END_OF_TEXT, read_file, write_description
from lightscale.errors import UserError

RANKS_FILE = "ranks.tiktoken"


class TiktokenTokenizer:
    """A byte-pair encoding of tiktoken: byte sequences with ranks, and the pattern that splits text first."""

    def __init__(
        self, *, name: str, pat_str: str, mergeable_ranks: dict[bytes, int], special_tokens: dict[str, int]
    ) -> None:
        """The arguments of ``tiktoken.Encoding``; ``special_tokens`` must have ``<|endoftext|>``."""
        if END_OF_TEXT not in special_tokens:
            raise UserError(f"tiktoken encoding {name}: it has no {END_OF_TEXT}, which would begin documents")
        self.name = name
        self._encoding = tiktoken.Encoding(
            name, pat_str=pat_str, mergeable_ranks=mergeable_ranks, special_tokens=special_tokens
        )
        self._pat_str = pat_str
        self.special_tokens = special_tokens
        self._token_ids = np.fromiter(mergeable_ranks.values(), dtype=np.int64)
        self.ranks = b"".join(
            b"%b %d\n" % (binascii.b2a_base64(token, newline=False), rank)
            for token, rank in sorted(mergeable_ranks.items(), key=lambda item: item[1])
        )
        self.sha256 = _sha256(pat_str, special_tokens, self.ranks)
        self.vocab_size = self._encoding.n_vocab
        self.eot_id = special_tokens[END_OF_TEXT]

    def encode(self, text: str) -> NDArray[np.uint32]:
        """See ``Tokenizer``."""
        return self._encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """See ``Tokenizer``."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """See ``Tokenizer``."""
        # Some ids below n_vocab stand for nothing: no text gives them, but a model that is hardly trained may.
        array = np.asarray(ids, dtype=np.int64)
        return self._encoding.decode(array[np.isin(array, self._token_ids)].tolist(), errors="replace")

    def save(self, directory: Path) -> None:
        """See ``Tokenizer``."""
        (directory / RANKS_FILE).write_bytes(self.ranks)
        rules = {"kind": "tiktoken", "pattern": self._pat_str, "special_tokens": self.special_tokens}
        write_description(directory, self, rules)


def load_tiktoken(encoding: str) -> TiktokenTokenizer:
    """A published encoding of tiktoken (``cl100k_base``, ``o200k_base``, …) from its cache on disk, never
    from the network.

    Raises ``UserError`` for an unknown name, and where the cache lacks the file, saying which file must be
    put where.
    """
    names = tiktoken.list_encoding_names()
    if encoding not in names:
        raise UserError(f"tiktoken has no encoding {encoding!r}; it has {', '.join(sorted(names))}")
    constructors: dict[str, Callable[[], dict[str, Any]]] = tiktoken.registry.ENCODING_CONSTRUCTORS or {}
    with _offline(encoding):
        arguments = constructors[encoding]()
    arguments.pop("explicit_n_vocab", None)
    return TiktokenTokenizer(**arguments)


def load_saved_tiktoken(directory: Path, description: dict[str, Any]) -> TiktokenTokenizer:
    """What ``TiktokenTokenizer.save`` wrote."""
    ranks = [line.split() for line in read_file(directory / RANKS_FILE).splitlines()]
    return TiktokenTokenizer(
        name=description["name"],
        pat_str=description["pattern"],
        mergeable_ranks={binascii.a2b_base64(token): int(rank) for token, rank in ranks},
        special_tokens=description["special_tokens"],
    )


def tiktoken_sha256(directory: Path, description: dict[str, Any]) -> str:
    """The ``sha256`` of what ``TiktokenTokenizer.save`` wrote."""
    return _sha256(description["pattern"], description["special_tokens"], read_file(directory / RANKS_FILE))


def _sha256(pattern: str, special_tokens: dict[str, int], ranks: bytes) -> str:
    rules = json.dumps([pattern, special_tokens], sort_keys=True).encode()
    return hashlib.sha256(rules + b"\n" + ranks).hexdigest()


@contextmanager
def _offline(encoding: str) -> Iterator[None]:
    """While it lasts, tiktoken reads its cache only: without a network it would wait for a long time."""

    def refuse(blobpath: str) -> bytes:
        key = hashlib.sha1(blobpath.encode()).hexdigest()
        raise UserError(
            f"tiktoken:{encoding}: its file is not in tiktoken's cache (or is damaged there), and nothing is "
            f"fetched from the network. Save {blobpath} under the name {key} in a directory, and set "
            "TIKTOKEN_CACHE_DIR to that directory"
        )

    original = tiktoken.load.read_file
    tiktoken.load.read_file = refuse
    try:
        yield
    finally:
        tiktoken.load.read_file = original

"""Interface of all tokenizers, and the common parts of their files."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightscale.config.section import MOST_IDS
from lightscale.errors import UserError, shortened
from lightscale.files import read_regular

END_OF_TEXT = "<|endoftext|>"
DESCRIPTION_FILE = "tokenizer.json"
# Ten times the largest that are published.
_MOST_BYTES = 2**28
# Published vocabularies have gaps between their pieces and their special tokens, of up to 256 ids.
_MOST_UNUSED = 1024
SPACE_MARK = "\u2581"
"""Character that sentencepiece and compatible files write for a space."""
PROBES = (
    " a  b ",
    "\t\r\n\n\x00",
    "\u2581 \uff21\u3000\u00e9e\u0301\ufb01",
    "</s><unk><0x41><|endoftext|>",
    "\U0001f600\ufffd",
)
"""Texts that tokenizers often change: spaces, control characters, compatibility forms, spelled special tokens."""


class Tokenizer(Protocol):
    """Tokenizer interface for stores, training and generation."""

    name: str
    """For messages: ``sentencepiece``, ``huggingface`` or the name of tiktoken's encoding."""
    vocab_size: int
    """Number of ids, special ones included. Ids are 0 ... vocab_size - 1."""
    eot_id: int
    """The end-of-text token, written before every document. No text encodes to it."""
    sha256: str
    """Identity: the hash of everything that decides which ids a text becomes."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` (valid Unicode), without special ids."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """``encode`` of each of ``texts``, (n,) each."""

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """Text of ``ids``. Special ids decode to nothing, incomplete characters to U+FFFD."""

    def save(self, directory: Path) -> None:
        """Write the files for ``load_tokenizer``; the same tokenizer always gives the same bytes."""


def write_description(directory: Path, tokenizer: Tokenizer, rules: dict[str, Any]) -> None:
    """Write the description that ``load_tokenizer`` reads first: common facts, and ``rules`` with its kind."""
    description = {
        "name": tokenizer.name,
        "sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "eot_id": tokenizer.eot_id,
        **rules,
    }
    text = json.dumps(description, indent=2, sort_keys=True) + "\n"
    (directory / DESCRIPTION_FILE).write_text(text, encoding="utf-8")


def check_ids(ids: Iterable[tuple[object, object]], *, origin: str) -> None:
    """UserError that begins with ``origin``, unless the ``ids``, (token, id), can be those of a vocabulary.

    They are whole numbers from 0 on, each of one token, with few unused ones between them. Checked before anything is
    made that is as large as the largest of them.
    """
    tokens: dict[int, object] = {}
    for token, number in ids:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < MOST_IDS:
            raise UserError(
                f"{origin}: the token {_shown(token)} has the id {_shown(number)}: must be a whole number from 0 to "
                f"{MOST_IDS - 1:_}"
            )
        if tokens.setdefault(number, token) != token:
            raise UserError(
                f"{origin}: the tokens {_shown(tokens[number])} and {_shown(token)} both have the id {number}; every "
                "token needs its own id"
            )
    if not tokens:
        raise UserError(f"{origin}: the vocabulary has no tokens")
    if (unused := max(tokens) + 1 - len(tokens)) > _MOST_UNUSED:
        raise UserError(
            f"{origin}: the largest id is {max(tokens)}, of {_shown(tokens[max(tokens)])}, but there are "
            f"{len(tokens)} tokens: {unused} ids are unused; use at most {_MOST_UNUSED}"
        )


def _shown(value: object) -> str:
    try:
        return shortened(repr(value), 60)
    except ValueError:
        return "of thousands of digits"  # which Python does not write


def read_file(path: Path) -> bytes:
    """Content of a tokenizer file; ``UserError`` if it cannot be read."""
    try:
        # Links are followed: model hubs keep the files of a tokenizer as links into their cache.
        return read_regular(path, what="a file of a tokenizer", most_bytes=_MOST_BYTES, follow_links=True)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; expected a tokenizer file") from error

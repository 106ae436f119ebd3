"""Characters as tokens: the 128 of ASCII, for character-level language models.

("Linear-Time Sequence Modeling with MLPs", section 4.3: a vocabulary of 128.) NUL, which no text has, ends texts. Every
character beyond ASCII, and NUL itself, becomes SUBSTITUTE: this tokenizer alone does not give back every text.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.tokenizers.interface import write_description

ASCII = "ascii"
_SYMBOLS = 128
_END, _SUBSTITUTE = 0, 0x1A
_OTHERS = re.compile("[^\x01-\x7f]")


class AsciiTokenizer:
    """One token for each character; see ``Tokenizer``."""

    name = ASCII
    vocab_size = _SYMBOLS
    eot_id = _END

    def __init__(self) -> None:
        rules = f"{ASCII} {_SYMBOLS} end {_END} others {_SUBSTITUTE}"
        self.sha256 = hashlib.sha256(rules.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        return list(_known(text))

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """See ``Tokenizer``."""
        return [np.frombuffer(_known(text), dtype=np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """See ``Tokenizer``. Replaced characters decode to U+FFFD."""
        array = np.asarray(ids, dtype=np.int64)
        text = array[(array > _END) & (array < _SYMBOLS)].astype(np.uint8).tobytes().decode("ascii")
        return text.replace(chr(_SUBSTITUTE), "\ufffd")

    def save(self, directory: Path) -> None:
        """See ``Tokenizer``: the description alone."""
        write_description(directory, self, {"kind": ASCII})


def _known(text: str) -> bytes:
    return _OTHERS.sub(chr(_SUBSTITUTE), text).encode("ascii")


def load_ascii(directory: Path, description: dict[str, Any]) -> AsciiTokenizer:
    """Load the tokenizer that ``AsciiTokenizer.save`` wrote."""
    return AsciiTokenizer()


def ascii_sha256(directory: Path, description: dict[str, Any]) -> str:
    """The ``sha256`` of the tokenizer that ``AsciiTokenizer.save`` wrote."""
    return AsciiTokenizer().sha256

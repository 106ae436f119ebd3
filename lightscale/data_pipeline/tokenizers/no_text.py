"""The tokenizer of stores without texts, such as stores of images: the end-of-text token alone."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.tokenizers.interface import write_description
from lightscale.errors import UserError

NO_TEXT = "none"


class NoText:
    """See ``Tokenizer``; no text has tokens."""

    name = NO_TEXT
    vocab_size = 1
    eot_id = 0

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256(NO_TEXT.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``. Raises UserError for any text but an empty one."""
        if text:
            raise UserError("this tokenizer has no tokens for texts: it belongs to images; use another tokenizer")
        return []

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """See ``Tokenizer``."""
        return [np.array(self.encode(text), dtype=np.uint32) for text in texts]

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """See ``Tokenizer``."""
        return ""

    def save(self, directory: Path) -> None:
        """See ``Tokenizer``: the description alone."""
        write_description(directory, self, {"kind": NO_TEXT})


def load_no_text(directory: Path, description: dict[str, Any]) -> NoText:
    """Load the tokenizer that ``NoText.save`` wrote."""
    return NoText()


def no_text_sha256(directory: Path, description: dict[str, Any]) -> str:
    """The ``sha256`` of the tokenizer that ``NoText.save`` wrote."""
    return NoText().sha256

"""Which tokens go on with the word of the token before, by the characters that they stand for.

A token goes on with a word where it begins with a letter or digit and the one before ends with one; a space, or
punctuation, begins another. Part of a character, of a tokenizer that cuts them, goes on with a word too. Ideographs are
separate words, as in BERT's tokenizer. The end-of-text token and others without text belong to no word.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.tokenizers.interface import Tokenizer

_CUT_CHARACTER = "\ufffd"
_IDEOGRAPHS = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2FA1F))


@dataclass(frozen=True, eq=False)
class WordEdges:
    """Of a vocabulary, (ids,) bool each: whether tokens begin, and end, with a character of a word."""

    begins: NDArray[np.bool_]
    ends: NDArray[np.bool_]

    def word_starts(self, tokens: NDArray[np.int32]) -> NDArray[np.int64]:
        """(b, n) token ids -> (b, n) the slot in the row where the word of each begins."""
        slots = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        goes_on = np.zeros(tokens.shape, dtype=bool)
        goes_on[:, 1:] = self.begins[tokens[:, 1:]] & self.ends[tokens[:, :-1]]
        starts: NDArray[np.int64] = np.maximum.accumulate(np.where(goes_on, 0, slots), axis=1)
        return starts


def word_edges(tokenizer: Tokenizer) -> WordEdges:
    """Those of all ids of ``tokenizer``."""
    # Behind another token: some tokenizers drop the space at the beginning of a text.
    anchor = tokenizer.encode("a")
    skip = len(tokenizer.decode(anchor))
    texts = [tokenizer.decode([*anchor, number])[skip:] for number in range(tokenizer.vocab_size)]
    begins, ends = (np.array([_is_of_word(text[which : which + 1 or None]) for text in texts]) for which in (0, -1))
    return WordEdges(begins, ends)


def _is_of_word(character: str) -> bool:
    if not character:
        return False
    if any(first <= ord(character) <= last for first, last in _IDEOGRAPHS):
        return False
    return character.isalnum() or character in ("_", _CUT_CHARACTER)

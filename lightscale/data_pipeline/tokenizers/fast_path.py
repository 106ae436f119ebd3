"""An encoder that is several times faster than tiktoken, used as long as it agrees with tiktoken.

A sample of every batch is encoded by both. At the first difference, or error, the batch is encoded again by tiktoken,
the fast encoder is off for the rest of the process, and the report notes it.
"""

import functools
import importlib
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.tokenizers.interface import PROBES, Tokenizer
from lightscale.data_pipeline.tokenizers.tiktoken_encoding import TiktokenTokenizer

EncodeBatch = Callable[[Sequence[str]], list[NDArray[np.uint32]]]

# Which splitting pattern of gigatoken each of tiktoken's encodings uses.
_GIGATOKEN_PATTERNS = {"gpt2": "gpt2", "r50k_base": "gpt2", "cl100k_base": "cl100k", "o200k_base": "o200k"}
# gigatoken 0.10 caches every word that it met without a limit; after so many characters it is made again.
_CACHE_CHARACTERS = 2**28
# At least so many documents of a batch are compared, and one in so many.
_MIN_SAMPLE, _SAMPLE_EVERY = 8, 100
# Of Unicode, that have characters: of its 17 the others take time to look at and have none.
_PLANES = (0, 1, 2, 3, 14, 15, 16)
_FIRST_TEXTS = (
    *PROBES,
    "the 字 it's 12345 \u0130\u017f\n\n  def f(x):\r\n\treturn x  \u3000",
    "a" * 300 + " " * 300 + "é" * 300,
)


@functools.cache
def _unassigned() -> NDArray[np.bool_]:
    """(0x110000,): whether Unicode, in this Python's version, has no such character."""
    found = np.ones(sys.maxunicode + 1, dtype=bool)
    for plane in _PLANES:
        codes = range(plane << 16, (plane + 1) << 16)
        found[codes.start : codes.stop] = [unicodedata.category(chr(code)) == "Cn" for code in codes]
    return found


def has_unassigned(text: str) -> bool:
    """Whether ``text`` has a character that is unassigned in the Unicode version of this Python."""
    if text.isascii():
        return False
    codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
    return bool(_unassigned()[codes].any())


class CheckedTokenizer:
    """``reference`` in everything, but batches are encoded by another encoder that is compared with it."""

    def __init__(self, reference: Tokenizer, encode_fast: EncodeBatch, encoder: str) -> None:
        """``encoder`` names ``encode_fast`` in notes. Some hard texts are compared at once."""
        self._reference = reference
        self._encode_fast: EncodeBatch | None = encode_fast
        self._encoder = encoder
        self.num_compared = 0
        """Documents that both encoded."""
        self._fault = ""
        self.name, self.vocab_size = reference.name, reference.vocab_size
        self.eot_id, self.sha256 = reference.eot_id, reference.sha256
        self.encode_batch(_FIRST_TEXTS)

    @property
    def notes(self) -> list[str]:
        """The line of a report about the fast encoder; independent of the division of the work."""
        if self._fault:
            return [f"{self._encoder} is disabled, {self._reference.name} encodes: {self._fault}"]
        return [f"{self._encoder} encodes; a sample of every batch matched {self._reference.name}"]

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``; never by the fast encoder."""
        return self._reference.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """See ``Tokenizer``. At least 8 of ``texts`` and 1 in 100, spread evenly, are compared."""
        if self._encode_fast is None:
            return self._reference.encode_batch(texts)
        try:
            encoded = self._encode_fast(texts)
        except Exception as error:  # noqa: BLE001 - whatever it is, the reference can do the work
            self._switch_off(f"it failed ({error!r})")
            return self._reference.encode_batch(texts)
        if len(encoded) != len(texts):
            self._switch_off(f"it returned {len(encoded)} results for {len(texts)} documents")
            return self._reference.encode_batch(texts)
        # A sample and not all, which would cost what the fast encoder saves. Every batch has one, because a fault may
        # depend on what the encoder met before.
        for index in _sample(len(texts)):
            if encoded[index].tolist() != self._reference.encode(texts[index]):
                self._switch_off(f"it differed in a document of {len(texts[index])} characters, {texts[index][:40]!r}")
                return self._reference.encode_batch(texts)
            self.num_compared += 1
        return encoded

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """See ``Tokenizer``."""
        return self._reference.decode(ids)

    def save(self, directory: Path) -> None:
        """See ``Tokenizer``: the same files as the reference's."""
        self._reference.save(directory)

    def _switch_off(self, fault: str) -> None:
        self._encode_fast = None
        self._fault = fault


def _sample(num_texts: int) -> list[int]:
    size = min(num_texts, max(_MIN_SAMPLE, num_texts // _SAMPLE_EVERY))
    return [number * num_texts // size for number in range(size)]


def with_fast_path(tokenizer: Tokenizer) -> Tokenizer:
    """``tokenizer`` with gigatoken for its batches, if that is installed and has the encoding; else as it is.

    The identity stays the same. Make it in the process that uses it: it cannot be pickled.
    """
    if not isinstance(tokenizer, TiktokenTokenizer) or tokenizer.name not in _GIGATOKEN_PATTERNS:
        return tokenizer
    try:
        encoder = _Gigatoken(tokenizer)
    except (ImportError, ValueError, OSError):
        return tokenizer
    return CheckedTokenizer(tokenizer, encoder, f"gigatoken {version('gigatoken')}")


def fast_path_notes(tokenizer: Tokenizer) -> list[str]:
    """The lines of a report about the fast path of ``tokenizer``: one, or none without a fast path."""
    return tokenizer.notes if isinstance(tokenizer, CheckedTokenizer) else []


class _Gigatoken:
    """gigatoken with the ranks of a tokenizer and no special tokens, so that none can be spelled.

    Texts with characters that are newer than this Python's Unicode are encoded by the tokenizer itself: whether those
    are letters depends on the version of Unicode that each of the two was built with.
    """

    def __init__(self, tokenizer: TiktokenTokenizer) -> None:
        self._package: Any = importlib.import_module("gigatoken")
        self._reference = tokenizer
        self._pattern = _GIGATOKEN_PATTERNS[tokenizer.name]
        self._ranks = tokenizer.ranks
        self._start()

    def __call__(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        if self._num_characters > _CACHE_CHARACTERS:
            self._start()
        self._num_characters += sum(map(len, texts))
        # One thread: processes are what scales.
        layout = self._encoder.encode_batch(list(texts), parallel=False).layout
        ids, ends = np.asarray(layout.content.data, dtype=np.uint32), np.asarray(layout.offsets.data)
        encoded = [ids[start:end] for start, end in pairwise(ends)]
        for number, text in enumerate(texts):
            if has_unassigned(text) and number < len(encoded):
                (encoded[number],) = self._reference.encode_batch([text])
        return encoded

    def _start(self) -> None:
        with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
            file.write(self._ranks)
            file.flush()
            self._encoder: Any = self._package.Tokenizer.from_tiktoken(
                file.name, pretokenizer=self._pattern, special_tokens={}
            )
        self._num_characters = 0

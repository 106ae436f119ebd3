"""Hugging Face: a ``tokenizer.json`` file, run by the package ``tokenizers``."""

import functools
import hashlib
import importlib
import json
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.tokenizers.interface import (
    END_OF_TEXT,
    PROBES,
    SPACE_MARK,
    check_ids,
    read_file,
    write_description,
)
from lightscale.errors import UserError, shortened

_FILE = "huggingface.json"
# What published files call the token between documents, in the order in which they are looked for.
_ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "[SEP]")


class HuggingFaceTokenizer:
    """A tokenizer file whose special tokens no text can spell.

    Published files may compose characters (NFC) or take U+2581 for a space; those come back so. Files that lose
    anything else, letter case for example, are refused. Added tokens that the file does not call special are text.
    """

    name = "huggingface"

    def __init__(self, file: bytes, *, origin: str, end_of_text: str | None = None) -> None:
        """``file``: content of a ``tokenizer.json``; ``origin`` names it in a ``UserError``.

        ``end_of_text``: its token between documents; none: the first of the usual ones that the file has.
        """
        self.file = file
        self._tokenizer, special = _parse(file, origin)
        self._end_of_text = end_of_text or next((name for name in _ENDS_OF_TEXT if name in special), "")
        if self._end_of_text not in special:
            raise UserError(
                f"{origin}: no special token {end_of_text or ' or '.join(_ENDS_OF_TEXT)} to start documents; special "
                f"tokens: {', '.join(special) or 'none'}"
            )
        self.eot_id = special[self._end_of_text]
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids) + 1
        self._is_text = np.zeros(self.vocab_size, dtype=bool)
        self._is_text[list(ids)] = True
        self._is_text[list(special.values())] = False
        self.sha256 = _sha256(file, self._end_of_text)
        self._require_no_forgery(special, origin)
        self._require_lossless(origin)

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """See ``Tokenizer``."""
        return [np.array(self.encode(text), dtype=np.uint32) for text in texts]

    def encode_markup(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        """(n,) ids of the text of a chat template, which spells special tokens, and (n,) 1 for the tokens of ``spans``.

        ``spans``: (first character, one behind the last). Both are those of transformers' ``apply_chat_template``.
        """
        encoding = self._markup_tokenizer.encode(text, add_special_tokens=False)
        mask = np.zeros(len(encoding.ids), dtype=np.uint8)
        for begin, end in spans:
            if begin == end:
                continue
            first, last = encoding.char_to_token(begin), encoding.char_to_token(end - 1)
            if first is None:
                break  # behind the last token
            mask[first : None if last is None else last + 1] = 1
        return np.array(encoding.ids, dtype=np.uint32), mask

    def decode_markup(self, ids: NDArray[np.integer[Any]]) -> str:
        """Text of (n,) ``ids``, special tokens spelled."""
        text: str = self._markup_tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return text

    @functools.cached_property
    def _markup_tokenizer(self) -> Any:
        """The package's tokenizer that makes special tokens of their spelling."""
        tokenizer = importlib.import_module("tokenizers").Tokenizer.from_str(self.file.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """See ``Tokenizer``."""
        array = np.asarray(ids, dtype=np.int64)
        text: str = self._tokenizer.decode(array[self._is_text[array]].tolist(), skip_special_tokens=False)
        return text

    def save(self, directory: Path) -> None:
        """See ``Tokenizer``."""
        (directory / _FILE).write_bytes(self.file)
        write_description(directory, self, {"kind": "huggingface", "end_of_text": self._end_of_text})

    def _require_no_forgery(self, special: dict[str, int], origin: str) -> None:
        # Tried and not read from the file: normalizers, added tokens and the model can each make a special token.
        for spelling in special:
            if not self._is_text[self.encode(f"a{spelling} {spelling}b")].all():
                raise UserError(
                    f"{origin}: a text that spells {spelling} encodes to that special token, so documents could forge "
                    "boundaries; use a byte-level tokenizer"
                )

    def _require_lossless(self, origin: str) -> None:
        for probe in PROBES:
            back = self.decode(self.encode(probe))
            composed = unicodedata.normalize("NFC", probe)
            if back not in {text for form in (probe, composed) for text in (form, form.replace(SPACE_MARK, " "))}:
                raise UserError(f"{origin}: the tokenizer loses text ({probe!r} comes back as {back!r})")


def load_huggingface(directory: Path, description: dict[str, Any]) -> HuggingFaceTokenizer:
    """Load the tokenizer that ``HuggingFaceTokenizer.save`` wrote."""
    path = directory / _FILE
    return HuggingFaceTokenizer(read_file(path), origin=str(path), end_of_text=description["end_of_text"])


def huggingface_sha256(directory: Path, description: dict[str, Any]) -> str:
    """The ``sha256`` of the tokenizer that ``HuggingFaceTokenizer.save`` wrote."""
    return _sha256(read_file(directory / _FILE), description["end_of_text"])


def _sha256(file: bytes, end_of_text: str) -> str:
    return hashlib.sha256(file + b"\n" + end_of_text.encode()).hexdigest()


def _parse(file: bytes, origin: str) -> tuple[Any, dict[str, int]]:
    """The package's tokenizer, and the ids of the special tokens by their spelling."""
    try:
        package = importlib.import_module("tokenizers")
    except ImportError as error:
        raise UserError(f"{origin}: needs the package tokenizers; pip install 'lightscale[corpus]'") from error
    try:
        content = json.loads(file)
        added = content.get("added_tokens") or []
        # Before the package reads it, which makes what is as large as the largest id.
        check_ids([*_vocabulary(content), *((token["content"], token["id"]) for token in added)], origin=origin)
        special = {token["content"]: token["id"] for token in added if token["special"]}
        tokenizer = package.Tokenizer.from_str(file.decode())
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{origin}: not a Hugging Face tokenizer file ({shortened(repr(error))})") from error
    if wrong := [token for token in special if tokenizer.token_to_id(token) != special[token]]:
        raise UserError(
            f"{origin}: the special token {shortened(wrong[0])!r} has the id {special[wrong[0]]}, but the package "
            f"tokenizers gives it {tokenizer.token_to_id(wrong[0])}; list added tokens in the order of their ids, "
            "after the tokens of the model"
        )
    tokenizer.encode_special_tokens = True  # means: their spelling is text like any other
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, special


def _vocabulary(content: dict[str, Any]) -> Iterable[tuple[object, object]]:
    """(token, id) of the file's model: a table of ids, or a list of (token, score) whose ids are their places."""
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary.items()
    return ((token, number) for number, (token, _) in enumerate(vocabulary))

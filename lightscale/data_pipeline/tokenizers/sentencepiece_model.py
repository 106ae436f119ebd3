"""sentencepiece: byte-pair encoding that is trained on the corpus, set up so that it loses nothing."""

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from lightscale.data_pipeline.tokenizers.interface import (
    END_OF_TEXT,
    PROBES,
    SPACE_MARK,
    read_file,
    write_description,
)
from lightscale.errors import UserError

_MODEL_FILE = "sentencepiece.model"
_SENTENCE_CHARACTERS = 1000  # the trainer skips sentences of more than 4192 bytes


class SentencePieceTokenizer:
    """A sentencepiece model that loses nothing: identity normalisation, byte fallback, no dummy prefix.

    sentencepiece writes a space as U+2581 and reads U+2581 as a space, so a real U+2581 is written as its UTF-8 bytes.
    """

    name = "sentencepiece"

    def __init__(self, model: bytes, *, origin: str) -> None:
        """``model``: a serialized ModelProto; ``origin`` names it in a ``UserError`` where it loses text."""
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        # Its messages quote the file, which need not be UTF-8.
        except (RuntimeError, UnicodeDecodeError) as error:
            raise UserError(f"{origin}: not a sentencepiece model ({error})") from error
        self.model = model
        self.sha256 = _sha256(model)
        self.vocab_size: int = self._processor.vocab_size()
        self.eot_id: int = self._processor.eos_id()
        if self.eot_id < 0:
            raise UserError(f"{origin}: the model has no end-of-sentence token to start documents")
        mark_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        self._space_mark_ids = mark_ids
        lost = [probe for probe in PROBES if self.decode(self.encode(probe)) != probe]
        if lost:
            raise UserError(
                f"{origin}: the model loses text ({lost[0]!r} comes back as "
                f"{self.decode(self.encode(lost[0]))!r}); train it with normalization_rule_name=identity "
                "and byte_fallback, without add_dummy_prefix and remove_extra_whitespaces"
            )

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        # Between real marks the model may encode as it likes; a mark itself must not become a space.
        first, *others = text.split(SPACE_MARK)
        ids: list[int] = self._processor.encode(first)
        for part in others:
            ids += [*self._space_mark_ids, *self._processor.encode(part)]
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """See ``Tokenizer``."""
        return [np.array(self.encode(text), dtype=np.uint32) for text in texts]

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """See ``Tokenizer``."""
        # The unknown piece comes from no text, but a model that is hardly trained may give it.
        known = [int(index) for index in ids if int(index) != self._processor.unk_id()]
        text: str = self._processor.decode(known)
        return text

    def save(self, directory: Path) -> None:
        """See ``Tokenizer``."""
        (directory / _MODEL_FILE).write_bytes(self.model)
        write_description(directory, self, {"kind": "sentencepiece"})


def train_sentencepiece(texts: Iterable[str], *, vocab_size: int) -> SentencePieceTokenizer:
    """Train byte-pair encoding on ``texts``: the same texts give the same model, byte for byte.

    The ids are <unk> (never used, because of byte fallback), the end-of-text token, 256 bytes, then pieces.
    Raises ``UserError`` where the texts are too few or have too many characters for ``vocab_size`` ids.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_training_sentences(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            eos_piece=END_OF_TEXT,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            character_coverage=0.9995,
            required_chars=SPACE_MARK,  # a space in bytes would come back as U+2581
            num_threads=1,  # part of the model's bytes
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(_training_mistake(str(error), vocab_size)) from error
    return SentencePieceTokenizer(model.getvalue(), origin="the trained model")


def load_sentencepiece(directory: Path, description: dict[str, Any]) -> SentencePieceTokenizer:
    """Load the tokenizer that ``SentencePieceTokenizer.save`` wrote."""
    path = directory / _MODEL_FILE
    return SentencePieceTokenizer(read_file(path), origin=str(path))


def sentencepiece_sha256(directory: Path, description: dict[str, Any]) -> str:
    """The ``sha256`` of the tokenizer that ``SentencePieceTokenizer.save`` wrote."""
    return _sha256(read_file(directory / _MODEL_FILE))


def _sha256(model: bytes) -> str:
    return hashlib.sha256(model).hexdigest()


def _training_sentences(texts: Iterable[str]) -> Iterator[str]:
    """Sentences that the trainer takes: no NUL, no U+2581 (it would count as a space), none too long."""
    for text in texts:
        for part in re.split("[\0\u2581]+", text):
            for start in range(0, len(part), _SENTENCE_CHARACTERS):
                yield part[start : start + _SENTENCE_CHARACTERS]


def _training_mistake(message: str, vocab_size: int) -> str:
    if too_high := re.search(r"value <= (\d+)", message):
        return f"vocabulary size {vocab_size}: the corpus is too small, use at most {too_high[1]}"
    if too_low := re.search(r"(\d+) vs (\d+)", message):
        return f"vocabulary size {vocab_size}: too small for the corpus, use at least {too_low[2]}"
    if "sentences_.empty()" in message:
        return "the corpus has no text to train a tokenizer on"
    return f"training the sentencepiece tokenizer failed: {message}"

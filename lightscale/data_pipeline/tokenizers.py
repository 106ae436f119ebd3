"""Text to token ids and back, without loss: sentencepiece trained on the corpus, or tiktoken's published
vocabularies.

Both keep every character of every text (``decode(encode(text)) == text``), and a text that spells a special
token ("<|endoftext|>", "</s>") becomes ordinary tokens: nobody can forge a document boundary.
"""

import base64
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import sentencepiece
import tiktoken
import tiktoken.load
import tiktoken.registry
from numpy.typing import NDArray

from lightscale.errors import UserError

END_OF_TEXT = "<|endoftext|>"
DESCRIPTION_FILE = "tokenizer.json"
_SENTENCEPIECE_FILE = "sentencepiece.model"
_TIKTOKEN_FILE = "ranks.tiktoken"
# sentencepiece writes a space as U+2581 and reads U+2581 as a space, so a real U+2581 is written as its UTF-8
# bytes.
_SPACE_MARK = "\u2581"
_BLOCK_CHARACTERS = 1000  # the trainer passes over sentences of more than 4192 bytes
_PROBES = (
    " a  b ",
    "\t\r\n\n\x00",
    "\u2581 \uff21\u3000\u00e9e\u0301\ufb01",
    "</s><unk><0x41><|endoftext|>",
    "\U0001f600\ufffd",
)


class Tokenizer(Protocol):
    """What a store, the trainer and generation need of a tokenizer."""

    name: str
    """For people: ``sentencepiece`` or the name of tiktoken's encoding."""
    vocab_size: int
    """Number of ids, special ones included. Ids are 0 ... vocab_size - 1."""
    eot_id: int
    """The end-of-text token, written before every document. No text encodes to it."""
    sha256: str
    """Identity: the hash of everything that decides which ids a text becomes."""

    def encode(self, text: str) -> NDArray[np.uint32]:
        """``text``, valid Unicode, as (n,) ids without special ones."""

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """The text of ``ids``. Special ids decode to nothing, a character cut in two to U+FFFD."""

    def save(self, directory: Path) -> None:
        """Write what ``load_tokenizer`` needs, byte for byte the same for the same tokenizer."""


class SentencePieceTokenizer:
    """A sentencepiece model that loses nothing: identity normalisation, byte fallback, no dummy prefix."""

    name = "sentencepiece"

    def __init__(self, model: bytes, *, origin: str) -> None:
        """``model``: a serialized ModelProto; ``origin`` names it in a ``UserError`` where it loses text."""
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise UserError(f"{origin}: not a sentencepiece model ({error})") from error
        self._model = model
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        self.eot_id: int = self._processor.eos_id()
        if self.eot_id < 0:
            raise UserError(f"{origin}: the model has no end-of-sentence token to begin documents with")
        pieces = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_MARK.encode()]
        self._space_mark_ids = np.array(pieces, dtype=np.uint32)
        lost = [probe for probe in _PROBES if self.decode(self.encode(probe)) != probe]
        if lost:
            raise UserError(
                f"{origin}: the model loses text ({lost[0]!r} comes back as "
                f"{self.decode(self.encode(lost[0]))!r}); train it with normalization_rule_name=identity "
                "and byte_fallback, without add_dummy_prefix and remove_extra_whitespaces"
            )

    def encode(self, text: str) -> NDArray[np.uint32]:
        """See ``Tokenizer``."""
        texts = text.split(_SPACE_MARK)
        parts = [np.asarray(self._processor.encode(part), dtype=np.uint32) for part in texts]
        if len(parts) == 1:
            return parts[0]
        marks = [self._space_mark_ids] * len(parts)
        return np.concatenate([ids for pair in zip(parts, marks, strict=True) for ids in pair][:-1])

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """See ``Tokenizer``."""
        # The unknown piece comes from no text, but a model that is hardly trained may give it.
        known = [int(index) for index in ids if int(index) != self._processor.unk_id()]
        text: str = self._processor.decode(known)
        return text

    def save(self, directory: Path) -> None:
        """See ``Tokenizer``."""
        (directory / _SENTENCEPIECE_FILE).write_bytes(self._model)
        _write_description(directory, self, {"kind": "sentencepiece"})


class TiktokenTokenizer:
    """A byte-pair encoding of tiktoken: byte sequences with ranks, and the pattern that splits text first."""

    def __init__(
        self, *, name: str, pat_str: str, mergeable_ranks: dict[bytes, int], special_tokens: dict[str, int]
    ) -> None:
        """The arguments of ``tiktoken.Encoding``; ``special_tokens`` must have ``<|endoftext|>``."""
        if END_OF_TEXT not in special_tokens:
            raise UserError(f"tiktoken encoding {name}: it has no {END_OF_TEXT} to begin documents with")
        self.name = name
        self._encoding = tiktoken.Encoding(
            name, pat_str=pat_str, mergeable_ranks=mergeable_ranks, special_tokens=special_tokens
        )
        self._pat_str = pat_str
        self._special_tokens = special_tokens
        self._token_ids = np.fromiter(mergeable_ranks.values(), dtype=np.int64)
        self._ranks = b"".join(
            base64.b64encode(token) + b" %d\n" % rank
            for token, rank in sorted(mergeable_ranks.items(), key=lambda item: item[1])
        )
        rules = json.dumps([pat_str, special_tokens], sort_keys=True).encode()
        self.sha256 = hashlib.sha256(rules + b"\n" + self._ranks).hexdigest()
        self.vocab_size = self._encoding.n_vocab
        self.eot_id = special_tokens[END_OF_TEXT]

    def encode(self, text: str) -> NDArray[np.uint32]:
        """See ``Tokenizer``."""
        return np.asarray(self._encoding.encode_ordinary(text), dtype=np.uint32)

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """See ``Tokenizer``."""
        # Some ids below n_vocab stand for nothing: no text gives them, but a model that is hardly trained may.
        array = np.asarray(ids, dtype=np.int64)
        return self._encoding.decode(array[np.isin(array, self._token_ids)].tolist(), errors="replace")

    def save(self, directory: Path) -> None:
        """See ``Tokenizer``."""
        (directory / _TIKTOKEN_FILE).write_bytes(self._ranks)
        rules = {"kind": "tiktoken", "pattern": self._pat_str, "special_tokens": self._special_tokens}
        _write_description(directory, self, rules)


def train_sentencepiece(texts: Iterable[str], *, vocab_size: int) -> SentencePieceTokenizer:
    """Train byte-pair encoding on ``texts``: the same texts give the same model, byte for byte.

    The ids are <unk> (never used, because of byte fallback), the end-of-text token, 256 bytes, then pieces.
    Raises ``UserError`` where the texts are too few or have too many characters for ``vocab_size`` ids.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_training_blocks(texts),
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
            required_chars=_SPACE_MARK,  # a space in bytes would come back as U+2581
            num_threads=1,  # part of the model's bytes
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(_training_mistake(str(error), vocab_size)) from error
    return SentencePieceTokenizer(model.getvalue(), origin="the trained model")


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


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a store, or of a sentencepiece ``.model`` file.

    Raises ``UserError`` naming the file that is missing, or is not the one that the store was written with.
    """
    if path.is_file():
        return SentencePieceTokenizer(_read(path), origin=str(path))
    directory = path / "tokenizer"
    try:
        description = json.loads(_read(directory / DESCRIPTION_FILE))
        tokenizer = _LOADERS[description["kind"]](directory, description)
        sha256 = description["sha256"]
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{directory}: damaged tokenizer files ({error!r})") from error
    if tokenizer.sha256 != sha256:
        raise UserError(
            f"{directory}: the files have sha256 {tokenizer.sha256}, {DESCRIPTION_FILE} says {sha256}; "
            "they were changed after the store was written"
        )
    return tokenizer


def _load_sentencepiece(directory: Path, description: dict[str, Any]) -> Tokenizer:
    path = directory / _SENTENCEPIECE_FILE
    return SentencePieceTokenizer(_read(path), origin=str(path))


def _load_tiktoken(directory: Path, description: dict[str, Any]) -> Tokenizer:
    ranks = [line.split() for line in _read(directory / _TIKTOKEN_FILE).splitlines()]
    return TiktokenTokenizer(
        name=description["name"],
        pat_str=description["pattern"],
        mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in ranks},
        special_tokens=description["special_tokens"],
    )


_LOADERS = {"sentencepiece": _load_sentencepiece, "tiktoken": _load_tiktoken}


def _write_description(directory: Path, tokenizer: Tokenizer, rules: dict[str, Any]) -> None:
    description = {
        "name": tokenizer.name,
        "sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "eot_id": tokenizer.eot_id,
        **rules,
    }
    text = json.dumps(description, indent=2, sort_keys=True) + "\n"
    (directory / DESCRIPTION_FILE).write_text(text, encoding="utf-8")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; a tokenizer was expected there") from error


def _training_blocks(texts: Iterable[str]) -> Iterator[str]:
    """Blocks that the trainer takes: no NUL, no U+2581 (it would count as a space), none too long."""
    for text in texts:
        for part in re.split("[\0\u2581]+", text):
            for start in range(0, len(part), _BLOCK_CHARACTERS):
                yield part[start : start + _BLOCK_CHARACTERS]


def _training_mistake(message: str, vocab_size: int) -> str:
    if too_high := re.search(r"value <= (\d+)", message):
        return f"vocabulary size {vocab_size}: the corpus is too small, at most {too_high[1]} is possible"
    if too_low := re.search(r"(\d+) vs (\d+)", message):
        return f"vocabulary size {vocab_size}: too small for the corpus, at least {too_low[2]} is needed"
    if "sentences_.empty()" in message:
        return "the corpus has no text to train a tokenizer on"
    return f"training the sentencepiece tokenizer failed: {message}"


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

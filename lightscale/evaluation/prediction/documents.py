"""Documents to predict from, out of a file of JSON lines; without torch.

    {"text": "The [MASK] sat on the mat.", "id": "a"}

Only the text is required, and of pairs ``text_pair``; other fields of a line, as in files of a corpus, are ignored.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.errors import UserError
from lightscale.evaluation.inference.requests import Encoder, Ids
from lightscale.evaluation.texts import json_lines
from lightscale.files import read_regular

MOST_BYTES = 2**32
"""Of a file, which is read whole."""
MASK_TEXT = "[MASK]"
_SHOWN_CHARACTERS = 100
_EXAMPLE = '{"text": "some text"}'


@dataclass(frozen=True, eq=False, kw_only=True)
class TextDocument:
    """A line of the file."""

    line: int
    """Its number, from 1."""
    id: Any
    """Its ``id`` in the file; None: unset."""
    text: str
    pair: str | None = None
    """The second text of a pair."""
    ids: Ids
    """(n + 1,) the end-of-text token, then the text with its masks; of a pair then those of the second text."""

    def record(self) -> dict[str, Any]:
        """What names it beside its prediction."""
        of_pair = {} if self.pair is None else {"text_pair": self.pair}
        return {**({} if self.id is None else {"id": self.id}), "line": self.line, "text": self.text, **of_pair}

    def heading(self) -> str:
        """Its line for people."""
        text = " ".join([*self.text.split(), *(() if self.pair is None else ("|", *self.pair.split()))])
        return f"{self.line}: {text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + '…'}"


@dataclass(frozen=True, kw_only=True)
class MaskWriting:
    """How masks stand in texts, and in tokens."""

    text: str
    id: int
    """The token; no text encodes to it."""


def read_documents(
    path: Path,
    tokenizer: Tokenizer,
    *,
    text_field: str,
    text_pair_field: str | None = None,
    masks: MaskWriting | None,
    most_tokens: int | None,
) -> list[TextDocument]:
    """The documents of a file, one in each line.

    Args:
        path: JSON lines.
        tokenizer: of the run.
        text_field: under which the text is.
        text_pair_field: under which the second text of a pair is; None: lines are single texts.
        masks: of which each text has at least one; None: their text is no mask.
        most_tokens: of a document; None: any number.

    Raises:
        UserError: names file and line.
    """
    try:
        data = read_regular(path, what="a file of documents", most_bytes=MOST_BYTES, follow_links=True)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    found = list(_documents(path, data, tokenizer, text_field, text_pair_field, masks))
    if not found:
        raise UserError(f"{path}: the file is empty; each line is an object like {_EXAMPLE}")
    for document in found:
        if most_tokens is not None and len(document.ids) > most_tokens:
            raise UserError(
                f"{path}:{document.line}: {len(document.ids):,} tokens exceed the {most_tokens:,} of the longest "
                f"training sequence; use a shorter text, or --context {len(document.ids)} to predict anyway"
            )
    return found


def _documents(
    path: Path,
    data: bytes,
    tokenizer: Tokenizer,
    text_field: str,
    text_pair_field: str | None,
    masks: MaskWriting | None,
) -> Iterator[TextDocument]:
    for number, record in json_lines(path, data):
        where = f"{path}:{number}"
        text = _text(record, where, text_field, "--text-field")
        pair = None if text_pair_field is None else _text(record, where, text_pair_field, "--text-pair-field")
        if masks is not None and masks.text not in text:
            raise UserError(
                f"{where}: no mask in the text; write {masks.text} for each token to predict (--mask TEXT sets "
                "another spelling; --embed computes a vector of the document instead)"
            )
        ids = Encoder(tokenizer).document(text) if masks is None else with_masks(tokenizer, text, masks)
        if pair is not None:
            ids = np.concatenate([ids, Encoder(tokenizer).document(pair)])
        yield TextDocument(line=number, id=record.get("id"), text=text, pair=pair, ids=ids)


def _text(record: dict[str, Any], where: str, field: str, option: str) -> str:
    """The text in ``field`` of a line; UserError for none, an empty one, and one that is no UTF-8."""
    text = record.get(field)
    if not isinstance(text, str):
        names = ", ".join(map(repr, list(record)[:8])) or "nothing"
        raise UserError(f'{where}: no text in the field "{field}"; it has {names}; set another field with {option}')
    if not text.strip():
        raise UserError(f"{where}: the text is empty; remove the line")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: not valid UTF-8 at character {error.start}") from error
    return text


def space_joins(tokenizer: Tokenizer) -> bool:
    """Whether words begin with a space in the tokenizer's vocabulary."""
    return len(tokenizer.encode(" a")) == 1


def with_masks(tokenizer: Tokenizer, text: str, masks: MaskWriting) -> Ids:
    """(n + 1,) the end-of-text token, and ``text``, in which a mask stands for one token.

    Where words begin with a space in the tokenizer's vocabulary, the space before a mask is part of the mask: the text
    of what was hidden there had it too.
    """
    joins = space_joins(tokenizer)
    *before, last = text.split(masks.text)
    ids = [tokenizer.eot_id]
    for part in before:
        own = part.removesuffix(" ") if joins else part
        ids += [*(tokenizer.encode(own) if own else ()), masks.id]
    return np.array([*ids, *(tokenizer.encode(last) if last else ())], dtype=np.int32)

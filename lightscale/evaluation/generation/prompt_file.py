"""Prompts from a file of JSON lines, each with its own settings; without torch.

    {"prompt": "def ", "id": "a", "tokens": 50, "temperature": 0, "stop": ["\n\n"]}

Only ``prompt`` is required; the other fields have defaults.
"""

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.errors import UserError, shortened
from lightscale.evaluation.inference.prompts import Prompt, Sampling, seed_of
from lightscale.evaluation.inference.written_text import encode_prompt
from lightscale.evaluation.texts import json_lines
from lightscale.files import read_regular

MOST_BYTES = 2**32
"""Of a file, which is read whole."""


@dataclass(frozen=True, kw_only=True)
class PromptText:
    """A text to be continued, and how."""

    text: str
    """Empty: the model begins a document."""
    id: str | int | float | None = None
    """Its ``id`` in the file."""
    max_tokens: int
    stop: tuple[str, ...] = ()
    sampling: Sampling
    origin: str = "the prompt"
    """Where it stands, for messages."""

    def encoded(self, tokenizer: Tokenizer) -> Prompt:
        """In token ids. UserError where the text cannot be encoded, or for settings that cannot be."""
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{self.origin}: not valid UTF-8 at character {error.start}") from error
        ids = encode_prompt(tokenizer, self.text)
        try:
            return Prompt(ids=ids, max_tokens=self.max_tokens, stop=self.stop, sampling=self.sampling)
        except UserError as error:
            raise UserError(f"{self.origin}: {error}") from error


def _is_number(value: Any) -> bool:
    # JSON has integers that no float can hold.
    return isinstance(value, float) or (_is_integer(value) and abs(value) <= sys.float_info.max)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))


class _Key(NamedTuple):
    """What may stand under a key of a line."""

    fits: Callable[[Any], bool]
    what: str


_NUMBER, _INTEGER = _Key(_is_number, "a number"), _Key(_is_integer, "a whole number")
_SAMPLING = {
    "temperature": _NUMBER,
    "top_k": _INTEGER,
    "top_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "seed": _INTEGER,
}
_KEYS = {
    "prompt": _Key(lambda value: isinstance(value, str), "a text"),
    "id": _Key(lambda value: isinstance(value, str) or _is_number(value), "a text or a number"),
    "tokens": _INTEGER,
    "stop": _Key(_is_stop, "a text or a list of texts"),
    **_SAMPLING,
}


def read_prompts(path: Path, default: PromptText) -> list[PromptText]:
    """The prompts of a file, one in each line.

    Args:
        path: JSON lines.
        default: whose settings stand for what a line does not say. A line without a seed has a seed of its own, made
            of the default's and the number of the prompt (``seed_of``).

    Raises:
        UserError: names file, line, key and value.
    """
    try:
        data = read_regular(path, what="a file of prompts", most_bytes=MOST_BYTES, follow_links=True)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    found = list(_prompts(path, data, default))
    if not found:
        raise UserError(f'{path}: the file is empty; each line is an object like {{"prompt": "some text"}}')
    return found


def _prompts(path: Path, data: bytes, default: PromptText) -> Iterator[PromptText]:
    for index, (number, record) in enumerate(json_lines(path, data)):
        where = f"{path}:{number}"
        _check(where, record)
        sampling = {"seed": seed_of(default.sampling.seed, index)}
        sampling |= {name: record[name] for name in _SAMPLING if name in record}
        stop = record.get("stop", default.stop)
        try:
            yield replace(
                default,
                text=record["prompt"],
                id=record.get("id"),
                max_tokens=record.get("tokens", default.max_tokens),
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                sampling=replace(default.sampling, **sampling),
                origin=where,
            )
        except UserError as error:
            raise UserError(f"{where}: {error}") from error


def _check(where: str, record: Mapping[str, Any]) -> None:
    """UserError unless a line has the keys that it may have, with values of their kinds."""
    for name, value in record.items():
        if name not in _KEYS:
            near = difflib.get_close_matches(name, _KEYS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"{where}: {shortened(name)}: no such key; {hint}use {', '.join(_KEYS)}")
        if not _KEYS[name].fits(value):
            raise UserError(f"{where}: {name} = {shortened(repr(value), 80)}: must be {_KEYS[name].what}")
    if "prompt" not in record:
        raise UserError(f'{where}: no "prompt"; each line is an object like {{"prompt": "some text"}}')

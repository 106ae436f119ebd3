"""Text from and to tokens during generation: complete characters only, up to a stop string."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from lightscale.data_pipeline.tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_OPEN_BYTES = 3
"""A character that is not complete yet has at most three of its UTF-8 bytes."""


class TokenDecoder(Protocol):
    """What makes text of tokens: a tokenizer, or one that spells special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; incomplete characters are U+FFFD."""


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a document that begins with ``text``."""
    return [tokenizer.eot_id, *tokenizer.encode(text)]


class WrittenText:
    """The text of tokens that come one by one, up to the first of ``stop``.

    What is given away is never taken back: characters that are not complete, and what may be the beginning of a stop
    string, wait for the next token.
    """

    def __init__(self, tokenizer: TokenDecoder, stop: Sequence[str] = ()) -> None:
        assert all(stop), "a stop string has a character"
        self._decoder, self._stops = _Characters(tokenizer), tuple(stop)
        self.text = ""
        """All that was given away."""
        self.stopped_by: str | None = None
        """The stop string that has come; nothing follows."""
        self._held = ""

    def add(self, token: int) -> str:
        """The final part so far."""
        return self._certain(self._decoder.add(token))

    def finish(self) -> str:
        """The rest of the text, if no token follows."""
        certain = self._certain(self._decoder.finish())
        rest = "" if self.stopped_by else self._held
        self._held = ""
        self.text += rest
        return certain + rest

    def _certain(self, new: str) -> str:
        assert self.stopped_by is None, "nothing follows a stop string"
        held = self._held + new
        found = [(held.index(stop), stop) for stop in self._stops if stop in held]
        if found:
            end, self.stopped_by = min(found, key=lambda one: one[0])
            certain, self._held = held[:end], ""
        else:
            end = len(held) - max((_common(held, stop) for stop in self._stops), default=0)
            certain, self._held = held[:end], held[end:]
        self.text += certain
        return certain


def _common(text: str, stop: str) -> int:
    """Characters at the end of ``text`` with which ``stop`` begins, not all of it."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))


class _Characters:
    """The text of tokens that come one by one, in whole characters."""

    # Tokens may end within a character: its bytes decode to replacement characters until the last one has come. They
    # are held back, at most as many as a character may lack, because a text may also hold a real replacement character.

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._waiting: list[int] = []
        self._shown, self._text = 0, ""

    def add(self, token: int) -> str:
        self._waiting.append(token)
        self._text = self._tokenizer.decode(self._waiting)
        num_open = min(len(self._text) - len(self._text.rstrip(_REPLACEMENT)), _MAX_OPEN_BYTES)
        final = max(self._shown, len(self._text) - num_open)
        part, self._shown = self._text[self._shown : final], final
        if not num_open:
            self._waiting, self._shown, self._text = [], 0, ""
        return part

    def finish(self) -> str:
        part = self._text[self._shown :]
        self._waiting, self._shown, self._text = [], 0, ""
        return part


def decode_stream(tokenizer: Tokenizer, ids: Iterable[int], stop: Sequence[str] = ()) -> Iterator[str]:
    """The text of ``ids`` in parts, each as soon as it is final; joined they are ``decode(ids)`` up to ``stop``.

    No token is asked for behind a stop string.
    """
    written = WrittenText(tokenizer, stop)
    for token in ids:
        if part := written.add(token):
            yield part
        if written.stopped_by is not None:
            return
    if part := written.finish():
        yield part

"""A chat template and a tokenizer: from messages to the ids that a model reads, and the ends of its answers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.chat.prepared import Chat, ChatText, MarkupTokenizer, encode_text
from lightscale.data_pipeline.chat.shapes import ASSISTANT, USER, ChatFault, Conversation
from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.errors import UserError

Message = dict[str, Any]
# An answer that templates neither trim nor contain.
_ANSWER = "lightscale\u2063answer"


class Markup:
    """A chat template with a tokenizer.

    Raises ``UserError`` for a template that does not write a question and its answer.
    """

    def __init__(self, chat: Chat, tokenizer: Tokenizer) -> None:
        self.chat, self.tokenizer = chat, tokenizer
        end = self._end()
        self.end_ids: frozenset[int] = frozenset()
        """Tokens that end an answer, beside the end-of-text token."""
        self.stop: tuple[str, ...] = ()
        """Texts that end an answer: end markers that are no special tokens."""
        first = self._encoded(ChatText(end, []))[:1]
        if len(first) and not tokenizer.decode(first):
            self.end_ids = frozenset(first)
        elif end:
            self.stop = (end.rstrip() or end,)

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text of ``messages`` and of the beginning of an answer. Raises ``UserError``."""
        try:
            return self.chat.prompt(Conversation(messages=list(messages)))
        except ChatFault as error:
            raise UserError(str(error)) from error

    def ids(self, messages: Sequence[Message], prompt: str, *, behind: int = 0) -> list[int]:
        """Ids of ``prompt``, the text of ``messages``, from character ``behind`` on; as a store has them.

        ``behind`` is 0, or where an answer ends.
        """
        counted = [] if isinstance(self.tokenizer, MarkupTokenizer) else self._counted(messages, prompt)
        moved = [(max(begin - behind, 0), end - behind) for begin, end in counted if end > behind]
        ids = self._encoded(ChatText(prompt[behind:], moved))
        # The document has it already.
        return ids[1:] if not behind and ids[:1] == [self.tokenizer.eot_id] else ids

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """Text of ``ids``, with special tokens spelled where the template can spell them."""
        if isinstance(self.tokenizer, MarkupTokenizer):
            return self.tokenizer.decode_markup(np.asarray(ids, dtype=np.int64))
        return self.tokenizer.decode(ids)

    def _encoded(self, text: ChatText) -> list[int]:
        ids: list[int] = encode_text(self.tokenizer, text)[0].tolist()
        return ids

    def _counted(self, messages: Sequence[Message], prompt: str) -> list[tuple[int, int]]:
        """The spans of ``prompt`` at whose edges a store divides the text."""
        answered = [*messages, {"role": ASSISTANT, "content": _ANSWER}]
        try:
            text = self.chat.counted(Conversation(messages=answered))
        except ChatFault:
            return []
        *others, (begin, _) = text.counted
        return others if text.text[:begin] == prompt else []

    def _end(self) -> str:
        """The text that ends an answer."""
        messages = [{"role": USER, "content": "a"}, {"role": ASSISTANT, "content": _ANSWER}]
        try:
            text = self.chat.counted(Conversation(messages=messages))
        except ChatFault as error:
            raise UserError(str(error)) from error
        begin, end = text.counted[-1]
        _, found, marker = text.text[begin:end].rpartition(_ANSWER)
        if not found:
            raise UserError(f"{self.chat.files.origin}: the template does not write the text of an answer; correct it")
        return marker

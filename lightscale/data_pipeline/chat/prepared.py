"""From a record of a file to tokens and loss mask, by the settings of one source of a corpus."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.chat.counted import Loss, counted_spans
from lightscale.data_pipeline.chat.files import DEFAULT, TOOL_USE, TemplateFiles
from lightscale.data_pipeline.chat.sandbox import Span
from lightscale.data_pipeline.chat.shapes import ChatFault, Conversation, conversation_of, preference_of
from lightscale.data_pipeline.chat.template import ChatTemplate
from lightscale.data_pipeline.tokenizers import Tokenizer


class ChatText(NamedTuple):
    """A conversation as text, and the characters whose tokens count."""

    text: str
    counted: Sequence[Span]


@runtime_checkable
class MarkupTokenizer(Protocol):
    """A tokenizer whose special tokens a chat template can spell."""

    def encode_markup(self, text: str, spans: Sequence[Span]) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        """(n,) ids of ``text``, special tokens included, and (n,) 1 for tokens of ``spans``."""

    def decode_markup(self, ids: NDArray[np.integer[Any]]) -> str:
        """Text of (n,) ``ids``, special tokens spelled."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Makes texts of records and of conversations."""

    files: TemplateFiles
    loss: Loss = "assistant"
    fields: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    most_characters: int = 2**24
    """Of a rendering."""
    has_pairs: bool = False
    """Whether records are preferences; their last answers count."""

    def text_of(self, record: Mapping[str, Any]) -> ChatText:
        """The conversation in ``record``. Raises ``ChatFault``."""
        return self.counted(conversation_of(record, self.fields, self.roles))

    def texts_of(self, record: Mapping[str, Any]) -> tuple[ChatText, ...]:
        """The conversation in ``record``, or of a preference the chosen and the rejected one. Raises ``ChatFault``."""
        if not self.has_pairs:
            return (self.text_of(record),)
        return tuple(map(self.counted, preference_of(record, self.fields, self.roles)))

    def counted(self, conversation: Conversation) -> ChatText:
        """The text of ``conversation``, and what counts. Raises ``ChatFault``."""
        template = self._template_for(conversation)
        rendered = template.render(conversation)
        return ChatText(rendered.text, counted_spans(template, conversation, rendered, self.loss))

    def prompt(self, conversation: Conversation) -> str:
        """The text of ``conversation`` and of the beginning of an answer. Raises ``ChatFault``."""
        return self._template_for(conversation).render(conversation, add_generation_prompt=True).text

    def description(self) -> dict[str, Any]:
        """All that decides its texts and masks, but names in files: the attribute ``chat`` of a source."""
        return {
            "templates": self.files.templates,
            "special_tokens": self.files.special_tokens,
            "variables": dict(self.variables),
            "loss": self.loss,
            **({"pairs": True} if self.has_pairs else {}),
        }

    def _template_for(self, conversation: Conversation) -> ChatTemplate:
        return self._templates[TOOL_USE if conversation.tools and TOOL_USE in self._templates else DEFAULT]

    def names(self, template: str) -> set[str]:
        """Of the variables that ``template`` of ``files.templates`` reads and does not set."""
        return self._templates[template].names()

    @cached_property
    def _templates(self) -> dict[str, ChatTemplate]:
        """Compiled when first used."""
        return {
            name: ChatTemplate(
                text,
                origin=self.files.origin if name == DEFAULT else f"{self.files.origin} ({name})",
                variables={**self.files.special_tokens, **self.variables},
                most_characters=self.most_characters,
            )
            for name, text in self.files.templates.items()
        }

    def check(self) -> None:
        """``UserError`` for a template with a fault."""
        assert self._templates


def encode_text(tokenizer: Tokenizer, chat: ChatText) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """(n,) ids of ``chat`` and its (n,) loss mask: of a whole conversation or a part of it.

    A tokenizer without special tokens for markup takes the markup as text, and the text in parts: each span that counts
    begins and ends with a token.
    """
    if isinstance(tokenizer, MarkupTokenizer):
        return tokenizer.encode_markup(chat.text, chat.counted)
    return _in_parts(tokenizer, chat)


def encode(
    tokenizer: Tokenizer, chat: ChatText, *, most_tokens: int | None, is_cut: bool
) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """(n,) ids of a conversation and its (n,) loss mask, by ``encode_text``.

    An end-of-text token that the template writes first is skipped: a store has one before every document.
    ``most_tokens``: of a conversation, its end-of-text token included; ``is_cut``: longer ones are cut. Raises
    ``ChatFault`` for a longer one that is not, and where no token counts.
    """
    ids, mask = encode_text(tokenizer, chat)
    if len(ids) and ids[0] == tokenizer.eot_id:
        ids, mask = ids[1:], mask[1:]
    length = len(ids) + 1
    if most_tokens is not None and length > most_tokens:
        if not is_cut:
            raise ChatFault(
                f"the conversation has {length:,} tokens with end of text, more than chat.max_tokens = "
                f'{most_tokens:,}; raise it, set chat.too_long = "cut", or remove the conversation'
            )
        ids, mask = ids[: most_tokens - 1], mask[: most_tokens - 1]
    if not mask.any():
        of = f" of its first {most_tokens:,}" if length > len(ids) + 1 else ""
        raise ChatFault(
            f"no token{of} counts for the loss; remove the conversation"
            + (", or raise chat.max_tokens" if of else ', or set chat.loss = "all"')
        )
    return ids, mask


def _in_parts(tokenizer: Tokenizer, chat: ChatText) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    edges, parts = 0, []
    for begin, end in chat.counted:
        parts += [(chat.text[edges:begin], 0), (chat.text[begin:end], 1)]
        edges = end
    parts = [(text, counts) for text, counts in [*parts, (chat.text[edges:], 0)] if text]
    ids = tokenizer.encode_batch([text for text, _ in parts])
    masks = [np.full(len(one), counts, np.uint8) for one, (_, counts) in zip(ids, parts, strict=True)]
    return np.concatenate([np.zeros(0, np.uint32), *ids]), np.concatenate([np.zeros(0, np.uint8), *masks])

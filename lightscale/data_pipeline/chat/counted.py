"""The characters of a conversation whose tokens count for the loss.

    assistant   all that the assistant generates
    last        of that the last message
    all         that, and what users write: text and end marker of their messages, without the header

Messages of the system and of tools, descriptions of tools, and headers never count. What the assistant generates stands
in the template's ``{% generation %}`` blocks; in a template without them, prefixes of the conversation tell it.
"""

import itertools
from dataclasses import replace
from typing import Any, Literal

from lightscale.data_pipeline.chat.sandbox import Span
from lightscale.data_pipeline.chat.shapes import ASSISTANT, USER, ChatFault, Conversation
from lightscale.data_pipeline.chat.template import ChatTemplate, Rendered

Loss = Literal["assistant", "all", "last"]
# In place of a message's text, to see where the text begins: a character that no text begins with.
_OTHER_TEXT = "\uf8ff"


def counted_spans(template: ChatTemplate, conversation: Conversation, rendered: Rendered, loss: Loss) -> list[Span]:
    """The spans of ``rendered`` that count, ascending. Raises ``ChatFault`` where the template does not tell."""
    if template.marks_generation:
        spans = rendered.generated
    else:
        of_assistant = _numbers(conversation, ASSISTANT)
        chosen = of_assistant[-1:] if loss == "last" else of_assistant
        spans = [_answer(template, conversation, rendered.text, number) for number in chosen]
    if loss == "last":
        return spans[-1:]
    if loss == "all":
        asked = (_question(template, conversation, rendered.text, number) for number in _numbers(conversation, USER))
        return sorted([*spans, *asked])
    return spans


def _numbers(conversation: Conversation, role: str) -> list[int]:
    return [number for number, message in enumerate(conversation.messages) if message["role"] == role]


def _answer(template: ChatTemplate, conversation: Conversation, text: str, number: int) -> Span:
    """The span of message ``number``, behind the generation prompt."""
    before = _first(conversation, number)
    begin = template.render(before, add_generation_prompt=True).text if before.messages else ""
    return _require_begins(template, text, begin, number), _end(template, conversation, text, number)


def _question(template: ChatTemplate, conversation: Conversation, text: str, number: int) -> Span:
    """The span of message ``number`` from its own text on."""
    end = _end(template, conversation, text, number)
    content = conversation.messages[number]["content"]
    if not isinstance(content, str) or not content.strip():
        return end, end
    messages = [*conversation.messages[:number], {**conversation.messages[number], "content": _OTHER_TEXT}]
    other = template.render(replace(conversation, messages=messages)).text
    same = (one == another for one, another in zip(text[:end], other, strict=False))
    return sum(itertools.takewhile(bool, same)), end


def _end(template: ChatTemplate, conversation: Conversation, text: str, number: int) -> int:
    if number == len(conversation.messages) - 1:
        return len(text)
    return _require_begins(template, text, template.render(_first(conversation, number + 1)).text, number)


def _require_begins(template: ChatTemplate, text: str, beginning: str, number: int) -> int:
    if not text.startswith(beginning):
        raise ChatFault(
            f"{template.origin}: the template renders message {number} of a whole conversation otherwise than as the "
            "last message, so its tokens cannot be found; enclose what the assistant generates in {% generation %} and "
            '{% endgeneration %} in the template, with chat.loss = "assistant" or "last"'
        )
    return len(beginning)


def _first(conversation: Conversation, count: int) -> Conversation:
    messages: list[dict[str, Any]] = conversation.messages[:count]
    return replace(conversation, messages=messages)

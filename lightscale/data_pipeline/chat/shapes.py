"""The shapes of conversations in files: a record becomes messages with roles, and tools.

    messages        [{"role": "user", "content": "Hi"}, …]: OpenAI; messages may have tool_calls, name and other keys
    conversations   [{"from": "human", "value": "Hi"}, …]: ShareGPT
    instruction     with input and output: Alpaca; the user's message is the instruction, an empty line, the input
    prompt          with completion: two texts, or two lists of messages

The first field that a record has decides. ``system``, a text beside them, becomes the first message.

Preferences have ``chosen`` and ``rejected``: two texts or lists of messages that answer ``prompt``, or without it two
whole conversations.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightscale.errors import shortened

USUAL_FIELDS = (
    *("messages", "role", "content", "conversations", "from", "value", "instruction", "input", "output"),
    *("prompt", "completion", "system", "tools", "chosen", "rejected"),
)
"""Names of fields that a corpus file can replace."""
USUAL_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles by the names that ShareGPT's files have for them; all other roles keep their names."""
ASSISTANT, USER, SYSTEM = "assistant", "user", "system"


class ChatFault(ValueError):
    """A fault of a conversation or of its template, with a remedy, without the place of the conversation."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The inputs of a chat template."""

    messages: list[dict[str, Any]]
    """At least one; each has a role."""
    tools: list[dict[str, Any]] | None = None
    """Descriptions of the functions that the assistant can call."""


def conversation_of(record: Mapping[str, Any], fields: Mapping[str, str], roles: Mapping[str, str]) -> Conversation:
    """The conversation in ``record``.

    ``fields``: names in place of ``USUAL_FIELDS``; ``roles``: roles by their names in the file, beside ``USUAL_ROLES``.
    Raises ``ChatFault``.
    """
    names = {usual: fields.get(usual, usual) for usual in USUAL_FIELDS}
    known = {**USUAL_ROLES, **roles}
    if (found := _value(record, names["messages"])) is not None:
        messages = _messages(found, names["messages"], names["role"], names["content"], roles)
    elif (found := _value(record, names["conversations"])) is not None:
        messages = _messages(found, names["conversations"], names["from"], names["value"], known)
    elif (instruction := _value(record, names["instruction"])) is not None:
        more = _text(record, names["input"], is_optional=True)
        asked = _string(instruction, names["instruction"])
        messages = _pair(f"{asked}\n\n{more}" if more else asked, _text(record, names["output"]))
    elif (prompt := _value(record, names["prompt"])) is not None:
        messages = _completed(prompt, record, names, roles)
    else:
        shapes = ", ".join(names[usual] for usual in ("messages", "conversations", "instruction", "prompt"))
        raise ChatFault(
            f"no conversation: found {shortened(', '.join(record), 200) or 'no fields'}, expected one of {shapes}; "
            "name the fields by chat.fields"
        )
    system = _text(record, names["system"], is_optional=True)
    if system and messages[0]["role"] != SYSTEM:
        messages = [{"role": SYSTEM, "content": system}, *messages]
    return Conversation(messages=messages, tools=_tools(_value(record, names["tools"]), names["tools"]))


def preference_of(
    record: Mapping[str, Any], fields: Mapping[str, str], roles: Mapping[str, str]
) -> tuple[Conversation, Conversation]:
    """The conversations with the chosen and with the rejected answer in ``record``; arguments as of
    ``conversation_of``."""
    names = {usual: fields.get(usual, usual) for usual in USUAL_FIELDS}
    prompt = _value(record, names["prompt"])
    found = []
    for side in ("chosen", "rejected"):
        answer = _value(record, names[side])
        if answer is None:
            raise ChatFault(
                f"no {names[side]} answer (found {shortened(', '.join(record), 200) or 'no fields'}); add it, or name "
                f"its field by chat.fields.{side}"
            )
        if isinstance(answer, str) and prompt is None:
            raise ChatFault(f"the answer {names[side]} has no {names['prompt']}; name its field by chat.fields.prompt")
        messages = _value_messages(prompt, names["prompt"], USER, names, roles) if prompt is not None else []
        messages += _value_messages(answer, names[side], ASSISTANT, names, roles)
        if messages[-1]["role"] != ASSISTANT:
            raise ChatFault(
                f"{names[side]} ends with a message of the role {messages[-1]['role']}, not with an answer; correct "
                "or remove the pair"
            )
        system = _text(record, names["system"], is_optional=True)
        if system and messages[0]["role"] != SYSTEM:
            messages = [{"role": SYSTEM, "content": system}, *messages]
        found.append(Conversation(messages=messages, tools=_tools(_value(record, names["tools"]), names["tools"])))
    chosen, rejected = found
    if chosen == rejected:
        raise ChatFault(f"{names['chosen']} and {names['rejected']} are equal; remove the pair")
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise ChatFault(
            f"{names['chosen']} and {names['rejected']} differ before their last answers; a pair answers one prompt"
        )
    return chosen, rejected


def _value_messages(
    found: Any, field: str, role: str, names: Mapping[str, str], roles: Mapping[str, str]
) -> list[dict[str, Any]]:
    """A text as a message of ``role``, or a list of messages."""
    if isinstance(found, str):
        return [{"role": role, "content": found}]
    return _messages(found, field, names["role"], names["content"], roles)


def _completed(
    prompt: Any, record: Mapping[str, Any], names: Mapping[str, str], roles: Mapping[str, str]
) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return _pair(prompt, _text(record, names["completion"]))
    completion = _value(record, names["completion"])
    return [
        message
        for found, name in ((prompt, names["prompt"]), (completion, names["completion"]))
        for message in _messages(found, name, names["role"], names["content"], roles)
    ]


def _pair(asked: str, answered: str) -> list[dict[str, Any]]:
    return [{"role": USER, "content": asked}, {"role": ASSISTANT, "content": answered}]


def _messages(found: Any, field: str, role: str, content: str, roles: Mapping[str, str]) -> list[dict[str, Any]]:
    items = _parsed(found, field)
    if not isinstance(items, list) or not items:
        raise ChatFault(f"{field} must be a list of messages, not {_shown(found)}; correct or remove the conversation")
    return [_message(item, f"{field}[{number}]", role, content, roles) for number, item in enumerate(items)]


def _message(item: Any, where: str, role: str, content: str, roles: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise ChatFault(f"{where} must be an object, not {_shown(item)}; correct or remove the conversation")
    found = item.get(role)
    if not isinstance(found, str) or not found:
        raise ChatFault(
            f"{where} has no {role} (found {shortened(', '.join(item), 200) or 'no fields'}); add it, or name "
            f"its field by chat.fields.{'from' if role == 'from' else 'role'}"
        )
    said = item.get(content)
    if said is None and not item.get("tool_calls"):
        raise ChatFault(
            f"{where} has no {content} (found {shortened(', '.join(item), 200)}); add it, or name its field by "
            f"chat.fields.{'value' if content == 'value' else 'content'}"
        )
    if said is not None and not isinstance(said, (str, list)):
        raise ChatFault(f"{where}.{content} must be a text, not {_shown(said)}; correct or remove the conversation")
    more = {key: value for key, value in item.items() if key not in (role, content) and value is not None}
    return {"role": roles.get(found, found), "content": said, **more}


def _tools(found: Any, field: str) -> list[dict[str, Any]] | None:
    tools = _parsed(found, field) if found else None
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ChatFault(f"{field} must be a list of objects, not {_shown(found)}; correct it, or remove the field")
    return tools or None


def _parsed(found: Any, field: str) -> Any:
    """``found``, or the value of the JSON that it is: tables of texts write lists so."""
    if not isinstance(found, str):
        return found
    try:
        return json.loads(found)
    except (ValueError, RecursionError) as error:
        raise ChatFault(f"{field} is a text without JSON ({error}); correct or remove the conversation") from error


def _value(record: Mapping[str, Any], name: str) -> Any:
    """The field ``name``, or for ``a.b`` field b of field a; None: it is missing."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _text(record: Mapping[str, Any], name: str, *, is_optional: bool = False) -> str:
    value = _value(record, name)
    return "" if is_optional and value is None else _string(value, name)


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        found = "missing" if value is None else _shown(value)
        raise ChatFault(f"the field {name} must be a text, but it is {found}; correct it, or name it by chat.fields")
    return value


def _shown(value: Any) -> str:
    return shortened(json.dumps(value, ensure_ascii=False, default=str), 80)

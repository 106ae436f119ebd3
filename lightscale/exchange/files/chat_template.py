"""The chat template of an export, as transformers renders it: chat_template.jinja.

``AutoTokenizer.from_pretrained(EXPORT).apply_chat_template(messages)`` gives the tokens of the document that
``lightscale data prepare`` makes of the messages. So what decides a text and is no part of the template is written
before it: the end-of-text token that begins every document, special tokens, and variables of the corpus file. Special
tokens that transformers sets and the corpus lacked are unset.
"""

import json
from pathlib import Path

from lightscale.data_pipeline.chat.files import DEFAULT, SPECIAL_TOKENS, TEMPLATE_FILE, extra_template
from lightscale.data_pipeline.chat.prepared import Chat, MarkupTokenizer
from lightscale.data_pipeline.chat.recorded import FILE
from lightscale.data_pipeline.chat.shapes import USER, ChatFault, Conversation
from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.data_pipeline.whole_files import write_json

# What transformers gives to every template, and a store never does.
_OF_TRANSFORMERS = (*SPECIAL_TOKENS, "strftime_now")


def write_chat_template(chat: Chat, tokenizer: Tokenizer, eot: str, directory: Path) -> str | None:
    """Write chat.json and, for transformers, the template to ``directory``; why transformers gets none, or None.

    ``eot``: spelling of the end-of-text token.
    """
    write_json(directory / FILE, chat.description())
    if not has_markup(tokenizer):
        return (
            f"{TEMPLATE_FILE} is not written: the tokenizer {tokenizer.name} has no special tokens for the markup of "
            "the chat template, and transformers would divide it into other tokens; for one prepare with a "
            "tokenizer.json that has them"
        )
    for name in chat.files.templates:
        path = directory / (TEMPLATE_FILE if name == DEFAULT else extra_template(name))
        path.parent.mkdir(exist_ok=True)
        path.write_text(_template(chat, name, eot), encoding="utf-8")
    return None


def has_markup(tokenizer: Tokenizer) -> bool:
    """Whether ``tokenizer`` makes special tokens of their spelling in a chat template."""
    return isinstance(tokenizer, MarkupTokenizer)


def _template(chat: Chat, name: str, eot: str) -> str:
    """Template ``name``, with what decides its text before it."""
    names, special, variables = chat.names(name), chat.files.special_tokens, chat.variables
    set_ = [f"{{% set {one} = {_literal(text)} %}}" for one, text in special.items() if one in names - {*variables}]
    # A caller can still give another value, as to any template.
    set_ += [
        f"{{% set {one} = {one} | default({_literal(value)}) %}}"
        if one not in _OF_TRANSFORMERS
        else f"{{% set {one} = {_literal(value)} %}}"
        for one, value in variables.items()
        if one in names
    ]
    # No name that templates read: its value is undefined.
    unset = [one for one in _OF_TRANSFORMERS if one in names - {*special, *variables}]
    set_ += [f"{{% set {one} = undefined %}}" for one in unset]
    first = "" if _begins_with(chat, eot) else f"{{{{ {_literal(eot)} }}}}"
    # Jinja drops the line end behind a comment, so that the template begins a line, as by itself.
    before = f"{first}{''.join(set_)}{{# documents begin with the end-of-text token #}}\n" if first or set_ else ""
    return before + chat.files.templates[name]


def _begins_with(chat: Chat, eot: str) -> bool:
    """Whether the template itself writes ``eot`` first."""
    user = {"role": USER, "content": "a"}
    for messages in ([user], [{"role": "system", "content": "a"}, user]):
        try:
            return chat.prompt(Conversation(messages=messages)).startswith(eot)
        except ChatFault:
            continue
    return False


def _literal(value: str | bool | float) -> str:
    """``value`` in Jinja, whose literals are those of JSON."""
    return json.dumps(value, ensure_ascii=False)

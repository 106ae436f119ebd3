"""Conversations in all shapes, what counts of them, and faults of conversations and templates, each with its remedy."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightscale.data_pipeline.chat.files import TemplateFiles, find_template
from lightscale.data_pipeline.chat.named import NAMED
from lightscale.data_pipeline.chat.prepared import Chat, ChatText, encode
from lightscale.data_pipeline.chat.shapes import ChatFault, conversation_of
from lightscale.data_pipeline.chat.template import ChatTemplate
from lightscale.data_pipeline.tokenizers import AsciiTokenizer
from lightscale.errors import UserError

PAIR = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def chat_of(template: str = NAMED["chatml"], **options: Any) -> Chat:
    files = TemplateFiles(origin="t.jinja", templates={"default": template})
    return Chat(files=files, **{"fields": {}, "roles": {}, "variables": {}, "most_characters": 1000, **options})


def counted(chat: Chat, record: dict[str, Any]) -> list[str]:
    text = chat.text_of(record)
    return [text.text[begin:end] for begin, end in text.counted]


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        ({"messages": PAIR}, {}),
        ({"messages": '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": null}]'}, {}),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, {}),
        ({"instruction": "a", "input": "", "output": "b"}, {}),
        ({"instruction": "a", "output": "b", "input": None}, {}),
        ({"prompt": "a", "completion": "b"}, {}),
        ({"prompt": PAIR[:1], "completion": PAIR[1:]}, {}),
        ({"data": {"turns": PAIR}}, {"messages": "data.turns"}),
        ({"talk": [{"who": "client", "said": "a"}, {"who": "gpt", "said": "b"}]},
         {"conversations": "talk", "from": "who", "value": "said"}),
        ({"q": "a", "a": "b"}, {"instruction": "q", "output": "a"}),
    ],
)  # fmt: skip
def test_every_shape_is_the_same_conversation(record: dict[str, Any], fields: dict[str, str]) -> None:
    assert conversation_of(record, fields, {"client": "user"}).messages == PAIR


def test_systems_inputs_and_tools_of_the_other_shapes() -> None:
    alpaca = conversation_of({"instruction": "do", "input": "x", "output": "y", "system": "s"}, {}, {})
    assert [one["content"] for one in alpaca.messages] == ["s", "do\n\nx", "y"]
    turns = [{"from": role, "value": role} for role in ("system", "human", "function_call", "observation", "gpt")]
    called = conversation_of({"conversations": turns, "system": "unused", "tools": '[{"name": "f"}]'}, {}, {})
    assert [one["role"] for one in called.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert called.messages[0]["content"] == "system"
    assert called.tools == [{"name": "f"}]


def test_what_counts() -> None:
    turns = [
        *({"role": "system", "content": "S"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "1"}),
        *({"role": "tool", "content": "T"}, {"role": "user", "content": " u "}, {"role": "assistant", "content": "2"}),
    ]
    record = {"messages": turns}
    assert counted(chat_of(), record) == ["1<|im_end|>", "2<|im_end|>"]
    assert counted(chat_of(loss="last"), record) == ["2<|im_end|>"]
    every = ["q<|im_end|>\n", "1<|im_end|>", " u <|im_end|>\n", "2<|im_end|>"]
    assert counted(chat_of(loss="all"), record) == every
    # A system's text inside the first question counts no more than elsewhere.
    folded = "{% for m in messages %}{% if m.role == 'user' %}[{{ messages[0].content ~ m.content }}]{% elif m.role =="
    folded += " 'assistant' %}{{ m.content }};{% endif %}{% endfor %}"
    assert counted(chat_of(folded, loss="all"), record) == ["q]", "1;", " u ]", "2;"]


def test_a_tokenizer_without_markup_takes_it_as_text_in_parts() -> None:
    ids, mask = encode(AsciiTokenizer(), chat_of().text_of({"messages": PAIR}), most_tokens=None, is_cut=False)
    text = AsciiTokenizer().decode(ids)
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert "".join(np.array(list(text))[mask == 1]) == "b<|im_end|>"
    cut, cut_mask = encode(AsciiTokenizer(), ChatText("abcdef", [(1, 4)]), most_tokens=4, is_cut=True)
    assert (AsciiTokenizer().decode(cut), cut_mask.tolist()) == ("abc", [0, 1, 1])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "no conversation: found no fields, expected one of messages, conversations, instruction, prompt; name"),
        ({"messages": []}, "messages must be a list of messages, not []; correct or remove"),
        ({"messages": "x"}, "messages is a text without JSON"),
        ({"messages": [PAIR[0], {"content": "b"}]}, "messages[1] has no role (found content); add it, or name its "
         "field by chat.fields.role"),
        ({"conversations": [{"value": "b"}]}, "conversations[0] has no from (found value); add it"),
        ({"messages": [{"role": "user", "text": "b"}]}, "messages[0] has no content (found role, text); add it, or"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content must be a text, not 3"),
        ({"messages": ["hi"]}, 'messages[0] must be an object, not "hi"'),
        ({"instruction": "a"}, "the field output must be a text, but it is missing; correct it, or name it by chat.f"),
        ({"messages": PAIR, "tools": ["f"]}, 'tools must be a list of objects, not ["f"]'),
    ],
)  # fmt: skip
def test_faults_of_conversations(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ChatFault) as caught:
        conversation_of(record, {}, {})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "t.jinja: the template fails (roles must alternate);"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'); correct it, or set the variable by chat."),
        ("{{ strftime_now('%d') }}", "'strftime_now' is undefined"),
        ("{{ 1 / 0 }}", "the template fails (ZeroDivisionError: division by zero)"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}", "more than 200,000 loop"),
        ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", "loop items"),
        ("{% set n = namespace(s='a') %}{% for x in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "1,000 char"),
        ("{% set n = namespace(s='a') %}{% for x in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}", "1,000 char"),
        ("{{ 'a' * 10 ** 12 }}", "makes more than 1,000 characters; correct its loops, or raise max_document_bytes"),
        ("{{ 10 ** (10 ** 9) }}", "a number of more than 8,192 bits"),
        ("{% for x in range(999) %}{{ x }}{% endfor %}", "makes more than 1,000 characters"),
        ("{{ 'x' | center(10 ** 9) }}{{ 1 }}", "makes more than 1,000 characters"),
        ("{{ 'x'.ljust(10 ** 9) }}", "makes more than 1,000 characters"),
        ("{{ '%01000000000d' % 1 }}", "makes more than 1,000 characters"),
        ("{{ '%01000000000d' | format(1) }}", "makes more than 1,000 characters"),
        ("{{ '%*d' % (10 ** 9, 1) }}", "makes more than 1,000 characters"),
        ("{{ '{:1000000000}'.format(1) }}", "makes more than 1,000 characters"),
        ("{{ '{:{}}'.format(1, 10 ** 9) }}", "makes more than 1,000 characters"),
        ("{{ 'x\\nx' | indent(900) }}", "makes more than 1,000 characters"),
        ("{{ [1] | slice(999999) | list }}", "makes more than 1,000 characters"),
        ("{{ {'a': 1} | tojson(indent=900) }}", "an indent of 900; use at most 64"),
        ("{{ ('x' * 900) | replace('', 'y' * 900) }}", "makes more than 1,000 characters"),
        ("{{ ('x' * 900).replace('', 'y' * 900) }}", "makes more than 1,000 characters"),
        ("{{ ([1] * 900) | join('y' * 900) }}", "makes more than 1,000 characters"),
        ("{{ ('y' * 900).join('x' * 900) }}", "makes more than 1,000 characters"),
        ("{{ 'a'.translate({97: 'y' * 999}) }}", "makes more than 1,000 characters"),
        ("{% set n = namespace(x=[]) %}{% for i in range(30) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}", "1,0"),
        ("{% set n = namespace(x=7) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}", "8,192 bits"),
        ("{{ [[1], [2]] | sum(start=[]) }}", "sums up lists; use +"),
        ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "RecursionError"),
    ],
)  # fmt: skip
def test_templates_that_fail_or_loop(template: str, message: str) -> None:
    chat, begin = chat_of(template), time.process_time()
    with pytest.raises(ChatFault) as caught:
        chat.text_of({"messages": PAIR})
    assert message in str(caught.value)
    assert time.process_time() - begin < 30


def test_a_template_that_renders_messages_by_what_follows_needs_blocks() -> None:
    drops = "{% for m in messages %}{{ m.role }}{% if loop.last %}({{ m.content }}){% endif %};{% endfor %}"
    with pytest.raises(ChatFault, match=r"message 1 of a whole conversation otherwise .* enclose .*\{% generation %\}"):
        chat_of(drops).text_of({"messages": [*PAIR, *PAIR]})


def test_faults_of_template_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"t.jinja, line 2: not a Jinja template \(.*end of template.*\); correct it"):
        ChatTemplate("x\n{% if a %}", origin="t.jinja")
    with pytest.raises(UserError, match=r"chat.template = nowhere: no such file; use chatml, llama3, qwen or the path"):
        find_template("nowhere", None)
    with pytest.raises(UserError, match="the tokenizer has no file with a chat template; use chatml, llama3, qwen"):
        find_template(None, None)
    with pytest.raises(UserError, match=r"no chat template: neither chat_template.jinja nor tokenizer_config.json"):
        find_template(None, tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(UserError, match=r"tokenizer_config.json: not JSON"):
        find_template("chatml", tmp_path / "tokenizer.json")
    named = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ tools }}"}]
    (tmp_path / "tokenizer_config.json").write_text(str({"chat_template": named}).replace("'", '"'))
    found = find_template(str(tmp_path), None)
    assert found.templates == {"default": "{{ 1 }}", "tool_use": "{{ tools }}"}
    tools = Chat(files=found, fields={}, roles={}, variables={}, most_characters=99)
    assert tools._templates["tool_use"].origin.endswith("(tool_use)")


@pytest.mark.parametrize(
    ("chat", "options", "message"),
    [
        (ChatText("abc", []), {}, 'no token counts for the loss; remove the conversation, or set chat.loss = "all"'),
        (ChatText("abc", [(2, 3)]), {"most_tokens": 3, "is_cut": True}, "no token of its first 3 counts for the loss"),
        (
            ChatText("abc", [(0, 3)]),
            {"most_tokens": 3},
            "has 4 tokens with end of text, more than chat.max_tokens = 3;",
        ),
    ],
)
def test_conversations_that_are_too_long_or_count_nothing(
    chat: ChatText, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ChatFault) as caught:
        encode(AsciiTokenizer(), chat, **{"most_tokens": None, "is_cut": False, **options})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "step", ["m.content + 'b'", "m.content | upper", "m.content == y", "m.content[1:]", "'b' in y"]
)
def test_loops_over_long_strings_end(step: str) -> None:
    """Each step takes a moment, and all together hours."""
    loops = "{% for m in messages %}{% for i in range(900) %}"
    source = f"{{% set y = 'a' ~ messages[0].content %}}{loops}{{% set x = {step} %}}"
    template = ChatTemplate(f"{source}{{% endfor %}}{{% endfor %}}", origin="t.jinja")
    begin = time.process_time()
    with pytest.raises(ChatFault, match=r"t\.jinja: the template looks at long strings too often"):
        template.render(conversation_of({"messages": [{"role": "user", "content": "a" * 10_000_000}] * 200}, {}, {}))
    assert time.process_time() - begin < 10


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for a in [1] %}" * 25 + "{% endfor %}" * 25, "too many statically nested blocks"),
        ("{{ " + "9" * 5000 + " }}", "4300 digits"),
        ("{% macro f(a, a) %}{% endmacro %}", "duplicate argument"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion"),
    ],
)
def test_what_jinja_reads_and_python_does_not_compile(source: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"t\.jinja: not a Jinja template \(.*{message}"):
        ChatTemplate(source, origin="t.jinja")

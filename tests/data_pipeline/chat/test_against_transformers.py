"""Texts, tokens and masks of conversations against transformers' ``apply_chat_template``, in six families."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lightscale.data_pipeline.chat.files import find_template
from lightscale.data_pipeline.chat.named import NAMED
from lightscale.data_pipeline.chat.prepared import Chat, encode
from lightscale.data_pipeline.preparation.corpus import make_corpus
from lightscale.data_pipeline.preparation.prepare import prepare
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.store.verify import verify_store
from lightscale.data_pipeline.tokenizers.huggingface_file import HuggingFaceTokenizer

# Mistral's form: no generation prompt, tools before the last question, answers end with end of text.
MISTRAL = """\
{{- bos_token }}
{%- set system = namespace(text="") %}
{%- for message in messages %}
    {%- if message.role == "system" %}
        {%- set system.text = message.content ~ "\\n\\n" %}
    {%- elif message.role == "user" %}
        {%- if tools is not none and tools and loop.index0 <= 1 %}
            {{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " ~ (system.text if loop.index0 <= 1 else "") ~ message.content ~ "[/INST]" }}
    {%- elif message.role == "tool" %}
        {{- "[TOOL_RESULTS] " ~ {"content": message.content} | tojson ~ "[/TOOL_RESULTS]" }}
    {%- elif message.role == "assistant" %}
        {%- if message.tool_calls %}
            {{- "[TOOL_CALLS] " ~ message.tool_calls | map(attribute="function") | list | tojson }}
        {%- endif %}
        {{- (" " ~ message.content if message.content else "") ~ eos_token }}
    {%- endif %}
{%- endfor %}
"""
# Gemma's form: the assistant is "model", the system's text goes to the first question, texts are trimmed.
GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set before = messages[0]['content'] | trim + '\\n\\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set before = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
<start_of_turn>{{ role }}
{% if role == 'model' %}{% generation %}{{ message['content'] | trim if message['content'] else '' }}
{%- for call in message.get('tool_calls') or [] %}

{{ call | tojson(indent=2) }}
{%- endfor %}<end_of_turn>
{% endgeneration %}{% else %}{{ before if loop.first else '' }}{{ message['content'] | trim }}<end_of_turn>
{% endif %}
{%- endfor -%}
{%- if add_generation_prompt -%}
<start_of_turn>model
{% endif -%}
"""
# Zephyr's form, the reasoning of a message before its text.
ZEPHYR = """\
{% for message in messages %}
{% if message['role'] != 'assistant' %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}
{% else %}
<|assistant|>
{% generation %}
{% if message.reasoning_content %}
<think>{{ message.reasoning_content }}</think>
{% endif %}
{{ (message['content'] or '') + eos_token }}
{% endgeneration %}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""
FAMILIES = {**NAMED, "mistral": MISTRAL, "gemma": GEMMA, "zephyr": ZEPHYR}
SPECIAL = (
    *("<|endoftext|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"),
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": "Das Wetter <heute> & morgen",
            "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}, "required": ["ort"]},
        },
    }
]
CALL = {"type": "function", "function": {"name": "wetter", "arguments": {"ort": "Zürich 字"}}}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "two turns": {
        "messages": [
            {"role": "user", "content": "How many?"},
            {"role": "assistant", "content": "Three,  I think.\n"},
            {"role": "user", "content": " And now? "},
            {"role": "assistant", "content": "Four 🎉"},
        ]
    },
    "system, unicode": {
        "messages": [
            {"role": "system", "content": "Antworte kurz: e\u0301, 字, \u2581, \u3000."},
            {"role": "user", "content": "{{ x }} <|im_end|> [/INST] 👩‍👩‍👧\r\n\ttab"},
            {"role": "assistant", "content": "字🎉", "reasoning_content": "Hm, 😀?"},
        ]
    },
    "empty turns": {
        "messages": [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y"},
        ]
    },
    "tools": {
        "messages": [
            {"role": "system", "content": "You have tools."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": '{"grad": 3}'},
            {"role": "tool", "content": "none"},
            {"role": "assistant", "content": "3 °C"},
            {"role": "user", "content": "Thanks"},
            {"role": "assistant", "content": "Bye"},
        ],
        "tools": TOOLS,
    },
    "no answer": {"messages": [{"role": "user", "content": "Hello?"}]},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with the special tokens of all families."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([json.dumps(one, ensure_ascii=False) for one in CONVERSATIONS.values()], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "chat_template": "of the file"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_tokens_and_masks_are_those_of_transformers(files: Path, family: str, tmp_path: Path) -> None:
    own = HuggingFaceTokenizer((files / "tokenizer.json").read_bytes(), origin="test")
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(files / "tokenizer.json"), bos_token="<s>", eos_token="</s>", chat_template=FAMILIES[family]
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((files / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(FAMILIES[family])
    found = find_template(None, tmp_path / "tokenizer.json")
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    chat = Chat(files=found, fields={}, roles={}, variables={}, most_characters=10_000)
    for name, one in CONVERSATIONS.items():
        for arguments in ({}, {"tools": None}) if "tools" in one else ({},):
            record = {**one, **arguments}
            text = chat.text_of(record)
            expected = theirs.apply_chat_template(
                record["messages"],
                tools=record.get("tools"),
                return_dict=True,
                return_assistant_tokens_mask="{% generation" in FAMILIES[family] or family in NAMED,
            )
            assert text.text == theirs.apply_chat_template(
                record["messages"], tools=record.get("tools"), tokenize=False
            ), name
            ids, mask = own.encode_markup(text.text, text.counted)
            assert ids.tolist() == expected["input_ids"], name
            if family != "mistral":
                assert mask.tolist() == expected["assistant_masks"], name
            answers = [message["content"].strip() for message in one["messages"] if message["role"] == "assistant"]
            if answers:
                again = encode(own, text, most_tokens=None, is_cut=False)
                assert np.array_equal(again[0], ids)
                assert np.array_equal(again[1], mask)
            for answer, (begin, end) in zip(answers, text.counted, strict=True):
                assert answer in text.text[begin:end], name


def test_spans_at_the_first_token_count_it_alone(files: Path) -> None:
    """Where transformers takes token 0 for none, and counts everything behind it."""
    tokenizer = HuggingFaceTokenizer((files / "tokenizer.json").read_bytes(), origin="test")
    text = "<s>one two three"
    ids, mask = tokenizer.encode_markup(text, [(0, len("<s>"))])
    assert len(ids) > 2
    assert mask.tolist() == [1] + [0] * (len(ids) - 1)
    assert not tokenizer.encode_markup(text, [(0, 0), (4, 4)])[1].any()


def test_a_template_that_ends_answers_with_end_of_text_makes_a_store(files: Path, tmp_path: Path) -> None:
    """The token stands inside of documents then, where it counts; without ``template`` the file's own is used."""
    (tmp_path / "tokenizer.json").write_bytes((files / "tokenizer.json").read_bytes())
    config = {"eos_token": "<|endoftext|>", "chat_template": ZEPHYR}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    chosen = [one for name, one in CONVERSATIONS.items() if name != "no answer"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(one) for one in chosen))
    source = {"paths": [str(tmp_path / "a.jsonl")], "format": "chat"}
    corpus = {"tokenizer": str(tmp_path / "tokenizer.json"), "sources": {"a": source}}
    prepare(make_corpus(corpus, origin="test"), tmp_path / "store")
    assert verify_store(tmp_path / "store", lambda step, done, total: None).faults == []
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(files / "tokenizer.json"), eos_token="<|endoftext|>", chat_template=ZEPHYR
    )
    store = TokenStore(tmp_path / "store")
    opened, eot = store.source("a"), store.tokenizer.eot_id
    assert opened.num_documents == len(chosen)
    for number, one in enumerate(chosen):
        expected = theirs.apply_chat_template(one["messages"], return_dict=True, return_assistant_tokens_mask=True)
        span = opened.document(number)
        tokens, mask = opened.read(*span).tolist(), opened.loss_mask(*span).tolist()
        assert tokens == [eot, *expected["input_ids"]]
        assert mask == [0, *expected["assistant_masks"]]
        assert any(token == eot and counts for token, counts in zip(tokens, mask, strict=True))


@pytest.mark.parametrize("family", NAMED)
def test_prefixes_find_what_the_blocks_enclose(files: Path, family: str) -> None:
    """Without its blocks a template counts the same, and the markup that follows an answer."""
    template = NAMED[family]
    for tag in ("{%- generation -%}", "{%- endgeneration -%}"):
        assert tag in template
        template = template.replace(tag, "")
    (files / f"{family}.jinja").write_text(template)
    marked, plain = (
        Chat(files=find_template(choice, files / "x"), fields={}, roles={}, variables={}, most_characters=10_000)
        for choice in (family, str(files / f"{family}.jinja"))
    )
    for name, one in CONVERSATIONS.items():
        first, second = marked.text_of(one), plain.text_of(one)
        assert first.text == second.text
        assert [begin for begin, _ in first.counted] == [begin for begin, _ in second.counted], name
        for (_, one_end), (_, other_end) in zip(first.counted, second.counted, strict=True):
            assert first.text[one_end:other_end] in ("", "\n"), name

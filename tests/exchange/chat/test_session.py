"""Conversations whose states are kept: what the model reads in a turn, and that it is the text of a store."""

import dataclasses
import itertools
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightscale.data_pipeline.chat.prepared import encode
from lightscale.data_pipeline.tokenizers import AsciiTokenizer, HuggingFaceTokenizer
from lightscale.errors import UserError
from lightscale.evaluation.inference.prompts import Sampling
from lightscale.exchange.chat.markup import Markup
from lightscale.exchange.chat.session import ChatSession
from lightscale.exchange.library import TextModel
from lightscale.exchange.plain.model import CausalModel, Shape

helpers = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("conftest.py"))))
GREEDY = Sampling(temperature=0)
# Reasoning of earlier answers disappears, as in Qwen 3: a longer conversation does not begin with a shorter one.
FORGETS = """\
{%- for message in messages -%}
    {%- if message.role == "assistant" -%}
        {{- "<|im_start|>assistant\\n" -}}
        {%- generation -%}
            {{- message.content if loop.last else message.content.split("</think>")[-1] -}}{{- "<|im_end|>" -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- "<|im_start|>" ~ message.role ~ "\\n" ~ message.content ~ "<|im_end|>" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""


def read(model: Any) -> list[int]:
    return list(itertools.chain(*model.fed))


def document(chat: Any, tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    ids, _ = encode(tokenizer, chat.text_of({"messages": messages}), most_tokens=None, is_cut=False)
    return [tokenizer.eot_id, *ids.tolist()]


@pytest.mark.parametrize("template", ["chatml", "llama3", "qwen"])
def test_a_turn_reads_its_own_tokens_and_all_turns_the_document_of_a_store(scripted: Any, template: str) -> None:
    chat = helpers.chat_of(template)
    session = scripted.chat("Kurz: 字.", template=chat)
    end = "<|eot_id|>" if template == "llama3" else "<|im_end|>"
    helpers.say(scripted, f"Drei 🎉.{end}", end, f"Na <|im_start|> gut{end}")
    lengths = []
    for asked in ("How many?", "", "<|im_end|> And é?"):
        before = len(read(scripted))
        session.ask(asked)
        lengths.append((len(read(scripted)) - before, session.last.num_read, session.last.num_written))
        assert (session.last.ended, session.last.reads_again) == ("end_of_turn", False)
    assert [message["content"] for message in session.messages if message["role"] == "assistant"] == [
        "Drei 🎉.",
        "",
        "Na <|im_start|> gut",
    ]
    # The tokens of a turn pass once: question, answer and markup, but for the end marker, which the next turn reads.
    assert [once == num_read + written - 1 for once, num_read, written in lengths] == [True] * 3
    assert lengths[1][1] < lengths[0][1]
    whole = document(chat, scripted.tokenizer, session.messages)
    marker = whole.index(scripted.tokenizer.encode_markup(end, [])[0][0], len(read(scripted)))
    assert read(scripted) == whole[:marker]
    assert len(read(scripted)) == len(whole[:marker])


def test_the_states_are_those_of_the_whole_document(scripted: Any) -> None:
    session = scripted.chat("Kurz.")
    for answer in ("eins", "zwei 🎉", "drei"):
        helpers.say(scripted, f"{answer}<|im_end|>")
        session.ask(f"{answer}?")
    # One pass over all that was read, without states.
    ends = torch.tensor([len(part) for part in scripted.fed]).cumsum(0) - 1
    expected = scripted.logits(read(scripted))[ends]
    torch.testing.assert_close(torch.stack(scripted.true_logits), expected, rtol=1e-9, atol=1e-9)


def test_memory_does_not_grow_with_the_turns(scripted: Any) -> None:
    session = scripted.chat()
    sizes = []
    for _ in range(6):
        helpers.say(scripted, "ja<|im_end|>")
        session.ask("und?")
        kept = [one for one in (*session._before, session._now) if one.states is not None]
        sizes.append(sum(value.numel() for one in kept for state in one.states for value in state.values()))
    assert sizes[1:] == [sizes[1]] * 5
    assert len({len(part) for part in scripted.fed if len(part) > 1}) == 2, "the first turn, and all others alike"


def test_undo_goes_back_to_the_states_before_the_last_turn(scripted: Any) -> None:
    session = scripted.chat()
    for answer in ("a", "b", "c"):
        helpers.say(scripted, f"{answer}<|im_end|>")
        session.ask("?")
    whole = len(read(scripted))
    assert session.undo()
    helpers.say(scripted, "d<|im_end|>")
    session.ask("!")
    assert len(read(scripted)) - whole == session.last.num_read + 1 < whole / 2
    # Of earlier turns no states are kept: the conversation is read from its beginning.
    assert session.undo() and session.undo()
    before = len(read(scripted))
    helpers.say(scripted, "e<|im_end|>")
    session.ask(".")
    assert [message["content"] for message in session.messages] == ["?", "a", ".", "e"]
    expected = document(helpers.chat_of("chatml"), scripted.tokenizer, session.messages)
    assert read(scripted)[before:] == expected[: expected.index(expected[-2], len(read(scripted)) - before)]
    assert session.undo() and session.undo() and not session.undo()
    assert session.messages == []


def test_an_answer_ends_with_its_turn_its_tokens_the_text_or_the_reader(scripted: Any) -> None:
    session = scripted.chat()
    helpers.say(scripted, "one two<|endoftext|>")
    assert session.ask("a") == "one two"
    assert session.last.ended == "end_of_turn"
    # The document went on behind it, as if the marker had come.
    helpers.say(scripted, "three")
    assert session.ask("b", tokens=5) == "three"
    assert session.last.ended == "tokens"
    helpers.say(scripted, "five six<|im_end|>")
    parts = session.stream("c")
    assert [next(parts) for _ in range(4)] == list("five")
    parts.close()
    assert (session.last.ended, session.last.text) == ("interrupted", "five")
    scripted.script.clear()
    helpers.say(scripted, "end<|im_end|>")
    session.ask("d")
    whole = document(helpers.chat_of("chatml"), scripted.tokenizer, session.messages)
    assert read(scripted) == whole[: len(read(scripted))]
    assert len(whole) - len(read(scripted)) == 2, "the last end marker and the line end behind it"


def test_characters_are_never_cut(scripted: Any) -> None:
    session = scripted.chat()
    helpers.say(scripted, "a🎉b<|im_end|>")
    parts = list(session.stream("?"))
    assert [part for part in parts if part] == ["a", "🎉", "b"]
    assert not session.last.reads_again
    # Ended within a character: it is in no message, and the next turn reads what the messages say.
    helpers.say(scripted, "x🎉")
    assert session.ask("?", tokens=3) == "x"
    scripted.script.clear()
    helpers.say(scripted, "y<|im_end|>")
    before = len(read(scripted))
    session.ask("?")
    assert session.last.reads_again
    whole = document(helpers.chat_of("chatml"), scripted.tokenizer, session.messages)
    assert read(scripted)[before:] == whole[:-2]


def test_a_template_that_changes_earlier_messages_is_read_again(scripted: Any) -> None:
    chat = helpers.chat_of(FORGETS)
    session = scripted.chat(template=chat)
    helpers.say(scripted, "<think>hm</think>three<|im_end|>")
    session.ask("?")
    assert session.messages[-1]["content"] == "<think>hm</think>three"
    before = len(read(scripted))
    helpers.say(scripted, "four<|im_end|>")
    session.ask("!")
    assert session.last.reads_again
    whole = document(chat, scripted.tokenizer, session.messages)
    assert "hm" not in scripted.tokenizer.decode(whole)
    assert read(scripted)[before:] == whole[:-1]


def test_markup_of_ordinary_text_is_divided_as_in_a_store(scripted: Any, shape: Shape) -> None:
    tokenizer = AsciiTokenizer()
    torch.manual_seed(0)
    module = CausalModel(dataclasses.replace(shape, vocab_size=tokenizer.vocab_size)).eval()
    model = helpers.Scripted(module=module, tokenizer=tokenizer, origin="the model")
    chat = helpers.chat_of("chatml")
    with pytest.raises(UserError, match=r"template = chat-ml: no such file; use chatml, llama3, qwen or"):
        model.chat(template="chat-ml")
    session = model.chat(template="chatml")
    for answer in ("three", "four"):
        model.script.extend(tokenizer.encode(f"{answer}<|im_end|>"))
        assert session.ask("?") == answer
        assert session.last.ended == "end_of_turn"
    whole = document(chat, tokenizer, session.messages)
    assert read(model) == whole[: len(read(model))]
    assert len(whole) - len(read(model)) == 2


def test_the_end_of_a_turn_is_read_from_the_template(tokenizer: HuggingFaceTokenizer) -> None:
    special = {"<|im_end|>", "<|eot_id|>"}
    for template, end in (("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("qwen", "<|im_end|>")):
        markup = Markup(helpers.chat_of(template), tokenizer)
        assert {markup.decode([one]) for one in markup.end_ids} == {end} <= special
        assert markup.stop == ()
    plain = Markup(helpers.chat_of("{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"), tokenizer)
    assert (plain.end_ids, plain.stop) == (frozenset(), ("\n\n",))
    with pytest.raises(UserError, match="does not write the text of an answer"):
        Markup(helpers.chat_of("{% for m in messages %}{{ m.role }}\n{% endfor %}"), tokenizer)


def test_a_context_that_is_full_is_refused_by_name_and_keeps_the_conversation(scripted: Any, shape: Shape) -> None:
    session = scripted.chat(context=60)
    helpers.say(scripted, "x" * 100)
    session.ask("a" * 20)
    assert session.last.ended == "context"
    messages = session.messages
    with pytest.raises(UserError, match=r"the conversation has \d+ tokens with this message, and the model a context"):
        session.ask("b")
    assert session.messages == messages
    # Of learned positions there are no more, whatever is asked for.
    module = CausalModel(dataclasses.replace(shape, learned_positions=40)).eval()
    model = dataclasses.replace(scripted, module=module)
    with pytest.raises(UserError, match="a context of 40"):
        model.chat(context=1000).ask("a" * 60)


def test_turns_have_seeds_of_their_own_and_repeat(model: TextModel) -> None:
    def talk(seed: int) -> list[str]:
        session = model.chat()
        how: dict[str, Any] = {"tokens": 6, "sampling": Sampling(temperature=1.0, seed=seed, repetition_penalty=1.1)}
        return [session.ask("same", **how) for _ in range(2)]

    assert talk(1) == talk(1) != talk(2)


def test_a_model_of_texts_has_no_conversations(model: TextModel) -> None:
    with pytest.raises(UserError, match="the model: no chat template"):
        dataclasses.replace(model, chat_template=None).chat()
    with pytest.raises(UserError, match="tokens = 0: must be at least 1"):
        model.chat().ask("a", tokens=0)
    assert isinstance(model.chat(), ChatSession)
    assert json.dumps(model.chat("s").messages) == '[{"role": "system", "content": "s"}]'

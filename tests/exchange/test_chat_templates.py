"""Chat templates of runs: exported for transformers, read back, and the same tokens everywhere."""

import json
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lightscale
from lightscale.cli import main
from lightscale.data_pipeline.chat.files import DEFAULT, TOOL_USE, TemplateFiles, find_template
from lightscale.data_pipeline.chat.named import NAMED
from lightscale.data_pipeline.chat.prepared import Chat, encode
from lightscale.data_pipeline.chat.recorded import FILE, kept_template
from lightscale.data_pipeline.tokenizers import AsciiTokenizer, HuggingFaceTokenizer
from lightscale.errors import UserError
from lightscale.evaluation.inference.prompts import Sampling
from lightscale.exchange.files.chat_template import write_chat_template
from lightscale.exchange.files.tokenizer_files import write_tokenizer
from lightscale.exchange.imported import import_model

ROOT = Path(__file__).resolve().parents[2]
cases = SimpleNamespace(
    **runpy.run_path(str(ROOT / "tests/data_pipeline/chat/test_against_transformers.py"), run_name="cases")
)
helpers = SimpleNamespace(**runpy.run_path(str(ROOT / "tests/exchange/chat/conftest.py"), run_name="helpers"))
EOT = "<|endoftext|>"
# Reads what transformers sets and the corpus may lack. Jinja drops the spaces before its first tag.
READS_ALL = """\
   {% if bos_token is defined %}[{{ bos_token }}]{% endif %}
{{- eos_token | default("none") }}{{ "a clock" if strftime_now is defined else "" }}
  {% for message in messages %}
{{ "<|im_start|>" + message.role + "\\n" + (message.content or "") + "<|im_end|>" + greeting | default("") }}
  {% endfor %}
{% if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}
"""
TEMPLATES = {**cases.FAMILIES, "reads all": READS_ALL}


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(helpers.byte_level_file(), origin="test")


def written(chat: Chat, tokenizer: Any, directory: Path) -> str | None:
    """The files of an export that decide texts and tokens."""
    directory.mkdir()
    eot = write_tokenizer(tokenizer, directory, max_tokens=64, reads_markup=not isinstance(tokenizer, AsciiTokenizer))
    note: str | None = write_chat_template(chat, tokenizer, eot, directory)
    return note


def document(chat: Chat, tokenizer: Any, conversation: dict[str, Any]) -> list[int]:
    """Of a store: its end-of-text token and the conversation."""
    counts_all = Chat(**{**vars_of(chat), "loss": "all"}) if not chat.text_of(conversation).counted else chat
    ids, _ = encode(tokenizer, counts_all.text_of(conversation), most_tokens=None, is_cut=False)
    return [tokenizer.eot_id, *ids.tolist()]


def vars_of(chat: Chat) -> dict[str, Any]:
    return {"files": chat.files, "variables": chat.variables, "loss": chat.loss}


@pytest.mark.parametrize("special", [{}, {"bos_token": EOT, "eos_token": "<|im_end|>"}], ids=["none", "special"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_transformers_gives_the_tokens_of_the_store(
    name: str, special: dict[str, str], tokenizer: HuggingFaceTokenizer, tmp_path: Path, transformers: Any
) -> None:
    if name in ("mistral", "gemma", "zephyr") and not special:
        special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    files = TemplateFiles(origin=name, templates={DEFAULT: TEMPLATES[name]}, special_tokens=special)
    variables = {"greeting": 'é"\\n🎉'} if name == "reads all" else {}
    chat = Chat(files=files, variables=variables)
    assert written(chat, tokenizer, tmp_path / "export") is None
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    num_compared = 0
    for conversation in cases.CONVERSATIONS.values():
        if conversation["messages"][-1]["role"] != "assistant":
            continue
        try:
            expected = document(chat, tokenizer, conversation)
        except ValueError:
            continue  # the template refuses it
        messages, tools = conversation["messages"], conversation.get("tools")
        # A tool's arguments and reasoning are read by all templates alike.
        found = theirs.apply_chat_template(messages, tools=tools, return_dict=False)
        assert found == expected
        num_compared += 1
        # What is written by transformers again is still the same.
        assert theirs(theirs.apply_chat_template(messages, tools=tools, tokenize=False)).input_ids[1:] == expected
    assert num_compared >= 3
    theirs.save_pretrained(tmp_path / "again")
    again = kept_template(tmp_path / "again")
    assert again is not None
    talk = cases.CONVERSATIONS["two turns"]
    assert document(again, tokenizer, talk) == document(chat, tokenizer, talk)
    # And the file of the export prepares other conversations alike.
    shutil.copy(tmp_path / "export/chat_template.jinja", tmp_path / "copied.jinja")
    copied = Chat(files=find_template(str(tmp_path / "copied.jinja"), None))
    assert document(copied, tokenizer, talk) == document(chat, tokenizer, talk)


def test_a_template_of_conversations_with_tools_is_written_beside(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, transformers: Any
) -> None:
    templates = {DEFAULT: NAMED["chatml"], TOOL_USE: NAMED["qwen"]}
    chat = Chat(files=TemplateFiles(origin="two", templates=templates))
    written(chat, tokenizer, tmp_path / "export")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    for name in ("two turns", "tools"):
        one = cases.CONVERSATIONS[name]
        found = theirs.apply_chat_template(one["messages"], tools=one.get("tools"), return_dict=False)
        assert found == document(chat, tokenizer, one)


def test_variables_of_the_corpus_are_defaults(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, transformers: Any
) -> None:
    files = TemplateFiles(origin="all", templates={DEFAULT: READS_ALL})
    chat = Chat(files=files, variables={"greeting": " Hi"})
    written(chat, tokenizer, tmp_path / "export")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    messages = [{"role": "user", "content": "x"}]
    assert " Hi" in theirs.apply_chat_template(messages, tokenize=False)
    assert " Bye" in theirs.apply_chat_template(messages, tokenize=False, greeting=" Bye")


def test_markup_of_ordinary_text_is_kept_and_not_written_for_transformers(tmp_path: Path) -> None:
    chat = Chat(files=TemplateFiles(origin="chatml", templates={DEFAULT: NAMED["chatml"]}))
    note = written(chat, AsciiTokenizer(), tmp_path / "export")
    assert note is not None and "ascii has no special tokens for the markup" in note
    assert not (tmp_path / "export/chat_template.jinja").exists()
    kept = kept_template(tmp_path / "export")
    assert kept is not None and kept.description() == chat.description()


def llama(folder: Path, transformers: Any) -> Path:
    """A tiny model that transformers has written, with the tokenizer of ``helpers``, without a template."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=263, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(helpers.byte_level_file())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": EOT, "eos_token": EOT})
    )
    return folder


@pytest.mark.timeout(300)
def test_a_template_travels_from_an_import_to_an_export_and_back(
    tmp_path: Path, transformers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = llama(tmp_path / "published", transformers)
    import_model(model, tmp_path / "texts")
    assert not (tmp_path / "texts" / FILE).exists()
    assert main(["chat", str(tmp_path / "texts")]) == 78
    assert f"{tmp_path / 'texts'}: no chat template: the model was not trained on" in capsys.readouterr().err
    (model / "chat_template.jinja").write_text(NAMED["chatml"])
    import_model(model, tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "export"), "--dtype", "fp32"]) == 0
    import_model(tmp_path / "export", tmp_path / "back")
    assert (tmp_path / "back" / FILE).read_bytes() == (tmp_path / "run" / FILE).read_bytes()
    assert "chat_template.jinja" in (tmp_path / "export/XXH128SUMS").read_text()
    generation = json.loads((tmp_path / "export/generation_config.json").read_text())
    assert generation["eos_token_id"] == [256, 258], "end of text, and <|im_end|>"
    how: dict[str, Any] = {"tokens": 5}
    answers = [
        lightscale.load(tmp_path / name).chat().ask("How many?", **how)  # type: ignore[union-attr]
        for name in ("run", "export", "back", "published")
    ]
    assert len(set(answers)) == 1
    assert lightscale.load(tmp_path / "run").context == 64
    # transformers answers alike, with no word about templates or ends.
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    asked = theirs.apply_chat_template(
        [{"role": "user", "content": "How many?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    expected = loaded.generate(**asked, max_new_tokens=5, do_sample=False)[0, asked["input_ids"].size(1) :]
    session = lightscale.load(tmp_path / "export").chat()  # type: ignore[union-attr]
    found = session.ask("How many?", tokens=5, sampling=Sampling(temperature=0))
    assert found == theirs.decode(expected, skip_special_tokens=True).rstrip("\ufffd")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "damaged"),
        ("[]", "expected tables templates, special_tokens, variables and loss"),
        ('{"templates": {"default": 3}, "special_tokens": {}, "variables": {}, "loss": "all"}', "expected tables"),
        ('{"templates": {"other": ""}, "special_tokens": {}, "variables": {}, "loss": "all"}', "expected tables"),
        ('{"templates": {"default": ""}, "special_tokens": {}, "variables": {}, "loss": "some"}', "expected tables"),
        ('{"templates": {"default": "{% if"}, "special_tokens": {}, "variables": {}, "loss": "all"}', "not a Jinja"),
    ],
)
def test_a_damaged_record_is_refused_by_name(content: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(UserError, match=fault) as raised:
        kept_template(tmp_path)
    assert str(tmp_path / FILE) in str(raised.value)

"""The chat template that a store records and a run keeps: one, the same as before, and mended when damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.chat.prepared import encode
from lightscale.data_pipeline.chat.recorded import FILE, read_template, template_of
from lightscale.data_pipeline.preparation.corpus import make_corpus
from lightscale.data_pipeline.preparation.prepare import prepare
from lightscale.data_pipeline.store.several_stores import SeveralStores
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError
from lightscale.launch.commands.checks import check_inputs
from lightscale.runs.journal import Journal
from lightscale.runs.run_directory import RunDirectory, read_lines
from lightscale.training.run_tokenizer import keep_template

ALONE: Any = SimpleNamespace(on_first=lambda action: action())


def write_store(folder: Path, name: str, **sources: dict[str, Any]) -> Path:
    """A store of one conversation in each of ``sources``, by their tables of chat; none: of texts."""
    file = folder / f"{name}.jsonl"
    tables = {}
    for source, chat in sources.items():
        # Others than those of the other sources, which would be their duplicates.
        talk = [{"role": "user", "content": name}, {"role": "assistant", "content": source * 20}]
        file = folder / f"{name}-{source}.jsonl"
        file.write_text(json.dumps({"messages": talk, "text": f"{source} {name * 20}"}) + "\n")
        more = {"format": "chat", "chat": chat} if chat else {}
        tables[source] = {"paths": [str(file)], **more}
    prepare(make_corpus({"tokenizer": "ascii", "sources": tables}, origin="test"), folder / name)
    return folder / name


@pytest.fixture
def stores(tmp_path: Path) -> dict[str, TokenStore]:
    kinds: dict[str, dict[str, dict[str, Any]]] = {
        "one": {"talks": {"template": "chatml"}, "texts": {}},
        "same": {"others": {"template": "chatml", "loss": "all"}},
        "other": {"talks": {"template": "qwen"}},
        "texts": {"texts": {}},
        "mixed": {"a": {"template": "chatml", "variables": {"x": 1}}, "b": {"template": "chatml"}},
    }
    return {name: TokenStore(write_store(tmp_path, name, **sources)) for name, sources in kinds.items()}


def test_the_template_of_a_store_is_that_of_all_its_conversations(stores: dict[str, TokenStore]) -> None:
    found = template_of(stores["one"])
    assert found is not None
    assert found.description() == stores["one"].source("talks").chat
    assert template_of(stores["texts"]) is None
    assert template_of(stores["one"], ["texts"]) is None
    with pytest.raises(UserError) as raised:
        template_of(stores["mixed"])
    message = str(raised.value)
    assert f"{stores['mixed'].title}: the conversations of source b have another chat template" in message
    assert "those of source a (different: variables)" in message and "chat.template" in message
    assert template_of(stores["mixed"], ["b"]) is not None
    # Several stores; another rule of the loss is no other template.
    paths = {name: stores[name].path for name in ("one", "same", "other")}
    assert template_of(SeveralStores({"one": paths["one"], "same": paths["same"]})) is not None
    with pytest.raises(
        UserError, match=r"source other/talks have another .* source one/talks \(different: templates\)"
    ):
        template_of(SeveralStores({"one": paths["one"], "other": paths["other"]}))


def test_two_templates_are_refused_before_a_run_begins(
    stores: dict[str, TokenStore], tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    def config(store: TokenStore, **sources: float) -> RunConfig:
        plain = tiny_config().model_dump()
        plain["data"] |= {"store": store.path, "sources": sources, "sequence_length": 16}
        plain["model"]["vocab_size"] = 512
        return RunConfig.model_validate(plain)

    run = RunDirectory(tmp_path / "run")
    with pytest.raises(UserError, match="source b have another chat template than those of source a"):
        check_inputs(config(stores["mixed"]), run)
    check_inputs(config(stores["mixed"], a=1.0), run)


def test_a_run_keeps_its_template(
    stores: dict[str, TokenStore],
    tmp_path: Path,
    tiny_config: Callable[..., RunConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create_or_open(tiny_config())
    journal = Journal(run, enabled=True)
    journal.begin_attempt()

    def keep(name: str, allow: tuple[str, ...] = ()) -> None:
        keep_template(run, template_of(stores[name]), journal, ALONE, allow)

    keep("texts")
    assert not run.chat.exists()
    keep("one")
    assert run.chat == run.path / FILE
    assert json.loads(run.chat.read_text()) == stores["one"].source("talks").chat
    before = run.chat.stat().st_ino
    keep("one")
    keep("texts")
    assert run.chat.stat().st_ino == before, "it is written once, and kept"
    with pytest.raises(UserError, match=r"chat.json is another chat template .*different: templates.*--allow-change"):
        keep("other")
    assert json.loads(run.chat.read_text()) == stores["one"].source("talks").chat
    keep("other", ("data",))
    kept = read_template(run.chat)
    assert kept is not None and kept.description() == stores["other"].source("talks").chat
    (event,) = [one for one in read_lines(run.events) if one["event"] == "chat_template_changed"]
    assert (event["before"]["templates"], event["now"]["templates"]) == (
        stores["one"].source("talks").chat["templates"],  # type: ignore[index]
        stores["other"].source("talks").chat["templates"],  # type: ignore[index]
    )
    run.chat.write_text("{")
    keep("other")
    assert "chat.json: damaged" in capsys.readouterr().err
    assert json.loads(run.chat.read_text()) == stores["other"].source("talks").chat


def test_an_end_of_text_that_the_template_writes_first_is_in_the_document_once(tmp_path: Path) -> None:
    from lightscale.data_pipeline.chat.files import DEFAULT, TemplateFiles
    from lightscale.data_pipeline.chat.named import NAMED
    from lightscale.data_pipeline.chat.prepared import Chat
    from lightscale.data_pipeline.tokenizers import HuggingFaceTokenizer

    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    own = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={one: n for n, one in enumerate(alphabet)}, merges=[]))
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    own.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = HuggingFaceTokenizer(str(own.to_str()).encode(), origin="test")
    record = {"prompt": "a", "completion": "<|endoftext|>b"}
    found = [
        encode(
            tokenizer,
            Chat(files=TemplateFiles(origin="t", templates={DEFAULT: first + NAMED["chatml"]})).text_of(record),
            most_tokens=None,
            is_cut=False,
        )
        for first in ("", "<|endoftext|>")
    ]
    assert [ids.tolist() for ids, _ in found] == [found[0][0].tolist()] * 2
    assert [mask.tolist() for _, mask in found] == [found[0][1].tolist()] * 2
    assert tokenizer.eot_id in found[0][0], "inside a conversation it stays"

"""Conversations from files into a store: tokens and masks, formats, workers and interruptions, additions, faults."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lightscale.cli import main
from lightscale.data_pipeline.chat.prepared import encode
from lightscale.data_pipeline.preparation import assemble
from lightscale.data_pipeline.preparation.corpus import load_corpus, make_corpus
from lightscale.data_pipeline.preparation.estimates.estimate import estimate
from lightscale.data_pipeline.preparation.prepare import PrepareOptions, prepare
from lightscale.data_pipeline.store.token_store import TokenSource, TokenStore
from lightscale.data_pipeline.store.verify import verify_store
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer
from lightscale.errors import UserError

EOT = 256


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def record(number: int) -> dict[str, Any]:
    text = f"{number}: " + "字 \r\n" * (number % 7)
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"<{number}>" * 3}]}


@pytest.fixture
def corpus(tmp_path: Path, byte_tokenizer: TiktokenTokenizer) -> dict[str, Any]:
    """Conversations in files of three kinds, one of them twice, and a source of texts."""
    (tmp_path / "bytes/tokenizer").mkdir(parents=True)
    byte_tokenizer.save(tmp_path / "bytes/tokenizer")
    (tmp_path / "talks").mkdir()
    lines = [json.dumps(record(number)) for number in (*range(40), 3)]
    (tmp_path / "talks/a.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "talks/b.json").write_text(json.dumps([record(number) for number in range(40, 50)]))
    rows = {"messages": [record(number)["messages"] for number in range(50, 60)], "more": [1.5] * 10}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "talks/c.parquet")
    (tmp_path / "text.txt").write_text("a text")
    return {
        "tokenizer": str(tmp_path / "bytes"),
        "validation": 0.2,
        "shard_tokens": 1024,
        "chunk_tokens": 64,
        "sources": {
            "talks": {"paths": [str(tmp_path / "talks")], "format": "chat", "chat": {"template": "chatml"}},
            "text": {"paths": [str(tmp_path / "text.txt")], "validation": 0.0},
        },
    }


def conversations(*sources: TokenSource) -> list[tuple[list[int], list[int]]]:
    """Tokens and mask of every document, ends of text included."""
    spans = [(source, *source.document(number)) for source in sources for number in range(source.num_documents)]
    return [(source.read(*span).tolist(), source.loss_mask(*span).tolist()) for source, *span in spans]


def expected(corpus: dict[str, Any], numbers: range, tokenizer: TiktokenTokenizer) -> list[tuple[list[int], list[int]]]:
    chat = make_corpus(corpus, origin="test").chats()["talks"]
    both = (encode(tokenizer, chat.text_of(record(number)), most_tokens=None, is_cut=False) for number in numbers)
    return [([EOT, *ids.tolist()], [0, *mask.tolist()]) for ids, mask in both]


def test_a_store_has_every_conversation_once_with_its_mask(
    corpus: dict[str, Any], tmp_path: Path, byte_tokenizer: TiktokenTokenizer
) -> None:
    made = make_corpus(corpus, origin="test")
    assert estimate(made).sources["talks"].documents >= 60
    report = prepare(made, tmp_path / "store", PrepareOptions(unit_bytes=1500))
    assert verify_store(tmp_path / "store", lambda step, done, total: None).faults == []
    store = TokenStore(tmp_path / "store")
    talks, held_out = store.source("talks"), store.source("talks-validation")
    assert sorted(conversations(talks, held_out)) == sorted(expected(corpus, range(60), byte_tokenizer))
    assert 5 < held_out.num_documents < 25
    assert talks.chat == held_out.chat is not None
    assert talks.chat["loss"] == "assistant"
    assert "<|im_start|>" in talks.chat["templates"]["default"]
    assert (store.source("text").has_loss_mask, store.source("text").chat) == (False, None)
    assert report["corpus"]["talks"]["stages"]["deduplicate"]["dropped"]["exact duplicate"]["documents"] == 1
    attributes = tmp_path / "store/talks/zarr.json"
    whole = attributes.read_text()
    attributes.write_text(
        json.dumps({**json.loads(whole), "attributes": {**json.loads(whole)["attributes"], "chat": 1}})
    )
    with pytest.raises(UserError, match=r"talks/zarr.json: damaged attributes \(chat: must be a table\)"):
        TokenStore(tmp_path / "store")
    attributes.write_text(whole)
    # A shard of the mask is verified like one of the tokens.
    shard = tmp_path / "store/talks/loss_mask/c/0"
    shard.write_bytes(b"\1" + shard.read_bytes()[1:])
    (fault,) = verify_store(tmp_path / "store", lambda step, done, total: None).faults
    assert "talks/loss_mask/c/0" in fault


def test_inspection_shows_what_counts(
    corpus: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(make_corpus(corpus, origin="test"), tmp_path / "store")
    assert main(["data", "inspect", str(tmp_path / "store"), "--sample", "3", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["sources"]["talks"]["token_arrays"] == {"loss_mask": "uint8"}
    for sample in content["samples"]:
        ((begin, end),) = sample["counted"]
        assert sample["text"][begin:end] == f"<{number_of(sample)}>" * 3 + "<|im_end|>"
    monkeypatch.setenv("FORCE_COLOR", "1")
    for no_color, style in (("", "\x1b[1;32m"), ("1", "\x1b[1;4m")):
        monkeypatch.setenv("NO_COLOR", no_color)
        assert main(["data", "inspect", str(tmp_path / "store")]) == 0
        assert f"{style}<{number_of(content['samples'][0])}>" in capsys.readouterr().out


def number_of(sample: dict[str, Any]) -> str:
    return str(sample["text"].split("user\n")[1].split(":")[0])


def test_interruptions_leave_no_trace(corpus: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del corpus["sources"]["text"]
    made, small = make_corpus(corpus, origin="test"), PrepareOptions(unit_bytes=1500)
    prepare(made, tmp_path / "one", small)
    calls, task = 0, assemble.write_shard

    def stopping(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        task(*args)

    monkeypatch.setattr(assemble, "write_shard", stopping)
    with pytest.raises(KeyboardInterrupt):
        prepare(made, tmp_path / "two", small)
    monkeypatch.undo()
    # With another template, or another rule, it would be another store.
    for change in ({"loss": "all"}, {"template": "qwen"}):
        changed = {**corpus["sources"]["talks"], "chat": {"template": "chatml", **change}}
        with pytest.raises(UserError, match=r"it holds part of a different store .*chat"):
            prepare(make_corpus({**corpus, "sources": {"talks": changed}}, origin="test"), tmp_path / "two", small)
    prepare(made, tmp_path / "two", small)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_additions_continue_mask_and_tokens(
    corpus: dict[str, Any], tmp_path: Path, byte_tokenizer: TiktokenTokenizer
) -> None:
    prepare(make_corpus(corpus, origin="test"), tmp_path / "store")
    before = TokenStore(tmp_path / "store")
    (tmp_path / "talks/d.jsonl").write_text("".join(json.dumps(record(number)) + "\n" for number in range(55, 70)))
    add = PrepareOptions(base=tmp_path / "store")
    more = {**corpus, "tokenizer": "sentencepiece"}
    prepare(make_corpus(more, origin="test"), tmp_path / "more", add)
    assert verify_store(tmp_path / "more", lambda step, done, total: None).faults == []
    store = TokenStore(tmp_path / "more")
    talks = store.source("talks")
    found = conversations(talks)
    assert found[: before.source("talks").num_documents] == conversations(before.source("talks"))
    assert sorted([*found, *conversations(store.source("talks-validation"))]) == sorted(
        expected(corpus, range(70), byte_tokenizer)
    )
    assert talks.chat == before.source("talks").chat
    more["sources"]["talks"]["chat"] = {"template": "chatml", "loss": "all"}
    with pytest.raises(UserError, match=r"sources.talks.chat: the source talks in .* another loss; use another name"):
        prepare(make_corpus(more, origin="test"), tmp_path / "other", add)
    more["sources"]["talks"] = {"paths": more["sources"]["talks"]["paths"], "text_field": "messages"}
    with pytest.raises(UserError, match=r"sources.talks.chat: the source talks in .* has conversations; use another"):
        prepare(make_corpus(more, origin="test"), tmp_path / "other", add)


def test_additions_to_held_out_conversations_alone_have_their_rule_too(corpus: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps(record(0)) + "\n")
    talks = {**corpus["sources"]["talks"], "paths": [str(tmp_path / "one.jsonl")], "validation": 0.999}
    made = {**corpus, "sources": {**corpus["sources"], "talks": talks}}
    prepare(make_corpus(made, origin="test"), tmp_path / "store")
    assert TokenStore(tmp_path / "store").sources.keys() == {"talks-validation", "text"}
    (tmp_path / "one.jsonl").write_text(json.dumps(record(1)) + "\n")
    add = PrepareOptions(base=tmp_path / "store")
    for change, fault in (
        ({"chat": {"template": "chatml", "loss": "all"}}, "conversations with another loss"),
        ({"format": "jsonl", "chat": {}, "text_field": "messages"}, "conversations"),
    ):
        more = {**made, "sources": {"talks": {**talks, **change}}}
        with pytest.raises(UserError, match=rf"sources.talks.chat: the source talks-validation in .* has {fault}; use"):
            prepare(make_corpus(more, origin="test"), tmp_path / "more", add)


FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no role": ('{"messages": [{"content": "x"}]}', {}, "messages[0] has no role (found content); add it"),
    "no shape": ('{"text": "x"}', {}, "no conversation: found text, expected one of messages"),
    "nothing counts": ('{"messages": [{"role": "user", "content": "x"}]}', {}, "no token counts for the loss; remove"),
    "too long": (json.dumps(record(1)), {"max_tokens": 20}, "more than chat.max_tokens = 20; raise it, set ch"),
    "cut to nothing": (
        json.dumps(record(1)), {"max_tokens": 20, "too_long": "cut"}, "no token of its first 20 counts for the loss",
    ),
    "template fails": (json.dumps(record(1)), {"template": "t.jinja"}, "t.jinja: the template fails (not like this)"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_name_file_line_key_and_remedy(name: str, tmp_path: Path, byte_tokenizer: TiktokenTokenizer) -> None:
    line, chat, message = FAULTS[name]
    (tmp_path / "bytes/tokenizer").mkdir(parents=True)
    byte_tokenizer.save(tmp_path / "bytes/tokenizer")
    (tmp_path / "t.jinja").write_text("{{ raise_exception('not like this') }}")
    filler = [] if chat else [json.dumps(record(0)), ""]
    (tmp_path / "a.jsonl").write_text("\n".join([*filler, line]))
    keys = "\n".join(f"{key} = {json.dumps(value)}" for key, value in {"template": "chatml", **chat}.items())
    (tmp_path / "corpus.toml").write_text(
        f'tokenizer = "bytes"\n[sources.a]\npaths = ["a.jsonl"]\nformat = "chat"\n[sources.a.chat]\n{keys}\n'
    )
    with pytest.raises(UserError) as caught:
        prepare(load_corpus(tmp_path / "corpus.toml"), tmp_path / "store")
    assert f"{tmp_path}/a.jsonl, line {len(filler) + 1}: sources.a: " in str(caught.value)
    assert message in str(caught.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"format": "jsonl", "chat": {"loss": "all"}}, 'sources.a: chat: the table is for conversations; set fo'),
        ({"format": "chat", "language": "en"}, 'format = "chat": filters read texts, not conversations; remove langu'),
        ({"format": "chat", "chat": {"too_long": "cut"}}, 'too_long = "cut" needs max_tokens'),
        ({"format": "chat", "chat": {"fields": {"text": "t"}}}, '"text" is not a usual name; use one of messages'),
        ({"format": "chat", "chat": {"loss": "some"}}, 'sources.a.chat.loss = "some": must be "assistant" or "all" or'),
        ({"format": "chat", "chat": {"losses": "all"}}, "unknown key sources.a.chat.losses; did you mean loss?"),
    ],
)  # fmt: skip
def test_impossible_keys(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_corpus({"sources": {"a": {"paths": ["x"], **keys}}}, origin="test")
    assert message in str(caught.value)


def test_texts_are_no_conversations(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    source = {"paths": [str(tmp_path / "a.txt")], "format": "chat", "chat": {"template": "chatml"}}
    with pytest.raises(UserError, match="conversations are records of jsonl, json, csv, tsv, parquet, arrow files"):
        prepare(make_corpus({"tokenizer": "ascii", "sources": {"a": source}}, origin="test"), tmp_path / "store")


def test_a_trained_tokenizer_learns_from_the_texts_of_conversations(
    tmp_path: Path, random_texts: Callable[..., list[str]]
) -> None:
    texts = random_texts(60)
    lines = [json.dumps({"prompt": text, "completion": text[::-1] or "x"}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = {"paths": [str(tmp_path / "a.jsonl")], "format": "chat", "chat": {"template": "llama3"}}
    prepare(make_corpus({"vocab_size": 400, "sources": {"a": source}}, origin="test"), tmp_path / "store")
    store = TokenStore(tmp_path / "store").source("a")
    assert store.has_loss_mask
    assert verify_store(tmp_path / "store", lambda step, done, total: None).faults == []

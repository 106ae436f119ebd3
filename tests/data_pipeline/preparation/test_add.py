"""`data add`: a store with more files is the store of all files, and the store that it began with stays as it was."""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightscale.data_pipeline.commands.data import add_arguments
from lightscale.data_pipeline.executors import ProcessPool
from lightscale.data_pipeline.loading.loader import TokenLoader
from lightscale.data_pipeline.preparation import deduplication
from lightscale.data_pipeline.preparation.corpus import make_corpus
from lightscale.data_pipeline.preparation.prepare import PrepareOptions, prepare
from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.store.verify import verify_store
from lightscale.data_pipeline.tokenizers import AsciiTokenizer, TiktokenTokenizer, load_tokenizer
from lightscale.errors import UserError

UNIT_BYTES = 3000
LAYOUT = {"shard_tokens": 2048, "chunk_tokens": 64, "tokenizer": "ascii", "validation": 0.1}
GENERATOR = random.Random(0)
WORDS = ["".join(GENERATOR.choices("abcdefgh", k=GENERATOR.randint(2, 8))) for _ in range(400)]


def text(number: int) -> str:
    return " ".join(random.Random(number).choices(WORDS, k=60))


def near(number: int) -> str:
    """All but the last word of ``text``."""
    return text(number).rsplit(" ", 1)[0] + " zz"


def write_lines(path: Path, texts: list[str]) -> None:
    lines = [json.dumps({"text": one, "id": f"{path.stem}/{n}", "kind": "xy"[n % 2]}) for n, one in enumerate(texts)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


OLD_TEXTS = [text(n) for n in range(40)] + [near(3), text(4)]
# Like a document that was dropped for being like another; of what was there; of each other; and new ones.
NEW_TEXTS = [near(3) + " yy", text(7), near(8), text(100), text(101), near(100), text(101)]
NEW_TEXTS += [text(n) for n in range(102, 130)]


def old_files(directory: Path) -> None:
    write_lines(directory / "lines" / "0.jsonl", OLD_TEXTS[:25])
    write_lines(directory / "lines" / "1.jsonl", OLD_TEXTS[25:])
    write_lines(directory / "rest" / "0.jsonl", [text(n) for n in range(50, 60)])


def new_files(directory: Path) -> None:
    write_lines(directory / "lines" / "2.jsonl", NEW_TEXTS[:20])
    write_lines(directory / "more" / "0.jsonl", [*NEW_TEXTS[20:], text(55), text(2000)])


def corpus(directory: Path, *sources: str, **keys: Any) -> Any:
    tables = {
        name: {"paths": [str(directory / name)], "id_field": "id", "label_field": "kind"}
        | ({"weight": keys["weights"][name]} if "weights" in keys else {})
        for name in sources
    }
    keys.pop("weights", None)
    return make_corpus({**LAYOUT, "sources": tables} | keys, origin="test")


def options(base: Path | None = None, **more: Any) -> PrepareOptions:
    return PrepareOptions(unit_bytes=UNIT_BYTES, base=base, **more)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with old and new files, the store ``old`` of the former, and ``whole`` of all, from nothing."""
    directory = tmp_path_factory.mktemp("made")
    old_files(directory)
    prepare(corpus(directory, "rest", "lines"), directory / "old", options())
    new_files(directory)
    prepare(corpus(directory, "rest", "lines", "more"), directory / "whole", options())
    return directory


def contents(store: Path) -> dict[str, bytes]:
    """All but what was counted on the way."""
    files = (path for path in store.rglob("*") if path.is_file() and path.suffix != ".html")
    return {str(path.relative_to(store)): path.read_bytes() for path in files if path.name != "report.json"}


def texts_of(store: Path) -> set[str]:
    opened, tokenizer = TokenStore(store), load_tokenizer(store)
    sources = opened.sources.values()
    return {
        tokenizer.decode(source.read(source.document(n)[0] + 1, source.document(n)[1]))
        for source in sources
        for n in range(source.num_documents)
    }


@pytest.mark.parametrize("in_processes", [False, True])
def test_it_is_the_store_of_all_files_and_only_new_files_are_read(
    made: Path, tmp_path: Path, in_processes: bool
) -> None:
    opened: list[str] = []
    counting = [True]
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if counting[0] and event == "open" else None)
    engine = {"make_executor": lambda make: ProcessPool(make, num_workers=2)} if in_processes else {}
    before = contents(made / "old")
    report = prepare(
        corpus(made, "rest", "lines", "more", tokenizer="sentencepiece"),
        tmp_path / "new",
        options(made / "old", **engine),
    )
    counting[0] = False
    assert contents(tmp_path / "new") == contents(made / "whole")
    assert contents(made / "old") == before
    assert TokenStore(tmp_path / "new").fingerprint() == TokenStore(made / "whole").fingerprint()
    assert not verify_store(tmp_path / "new", lambda *_: None).faults
    assert text(100) in texts_of(tmp_path / "new") and near(3) + " yy" not in texts_of(tmp_path / "new")
    if not in_processes:
        read = {Path(path).relative_to(made) for path in opened if path.endswith(".jsonl") and str(made) in path}
        assert {str(path) for path in read} == {"lines/2.jsonl", "more/0.jsonl"}
        # One reading from front to back for each of its units, and none for the shards that both stores share.
        shared = [file for file in (made / "old").rglob("c/*") if file.stat().st_nlink > 1]
        assert len(shared) > 10
    # near(3) + " yy", text(7), near(8), text(55) are of what was there; near(100), text(101) of what is new.
    assert report["known"] == {"files": 3, "documents": 4}
    dropped = [source["stages"]["deduplicate"]["dropped"] for source in report["corpus"].values()]
    assert sum(one["documents"] for reasons in dropped for one in reasons.values()) == 6
    assert report["base"]["sources"]["lines"]["documents"] == TokenStore(made / "old").source("lines").num_documents
    assert "old" in {one["like"] for one in dropped[1]["exact duplicate"]["examples"]}


def test_adding_twice_is_adding_all(made: Path, tmp_path: Path) -> None:
    prepare(corpus(made, "lines"), tmp_path / "first", options(made / "old"))
    prepare(corpus(made, "more"), tmp_path / "second", options(tmp_path / "first"))
    assert contents(tmp_path / "second") == contents(made / "whole")
    shutil.rmtree(tmp_path / "first")
    assert not verify_store(tmp_path / "second", lambda *_: None).faults, "what is shared stays while one has it"


@pytest.mark.long
def test_several_ranges_of_keys_a_task(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the ranges of either store; also stopped between the keys of some ranges and what they show."""
    found: list[deduplication.DedupTask] = []
    find, write = deduplication.find_in_ranges, deduplication.write_array
    left = [2]

    def watched(context: Any, item: deduplication.DedupTask, advance: Any) -> None:
        found.append(item)
        find(context, item, advance)

    def stopping(path: Path, array: Any) -> None:
        left[0] -= "pairs-0" in str(path)
        if left[0] == 0:
            raise KeyboardInterrupt
        write(path, array)

    def content(store: Path) -> dict[str, bytes]:
        """All, the keys of a kind in one piece."""
        together = dict.fromkeys(("exact", "near"), b"")
        files = contents(store)
        for name in sorted(name for name in files if name.startswith("document_keys/")):
            if (kind := Path(name).parent.name) in together:
                together[kind] += files.pop(name)
        del files["document_keys/keys.json"]
        return files | together

    monkeypatch.setattr(deduplication, "find_in_ranges", watched)
    monkeypatch.setattr(deduplication, "write_array", stopping)
    monkeypatch.setattr(deduplication, "_RANGE_BYTES", 1000)
    monkeypatch.setattr(deduplication, "_RANGE_TASKS", 1)
    monkeypatch.setattr(deduplication, "_RANGES_AT_ONCE", 3)
    all_files = corpus(made, "rest", "lines", "more")
    with pytest.raises(KeyboardInterrupt):
        prepare(all_files, tmp_path / "new", options(made / "old"))
    assert [item.count for item in found] == [3, 3] and (tmp_path / "new.work/store/document_keys/near").exists()
    left[0], found[:] = -1, []
    prepare(all_files, tmp_path / "new", options(made / "old"))
    assert [item.count for item in found if item.kind == "near"][:5] == [3] * 5
    assert content(tmp_path / "new") == content(made / "whole")
    assert len(list((tmp_path / "new/document_keys/near").iterdir())) == found[-1].num_ranges
    # From files of many ranges to other ones.
    monkeypatch.setattr(deduplication, "_RANGE_BYTES", 7000)
    prepare(corpus(made, "lines"), tmp_path / "first", options(made / "old"))
    monkeypatch.setattr(deduplication, "_RANGE_BYTES", 1000)
    prepare(corpus(made, "more"), tmp_path / "second", options(tmp_path / "first"))
    assert content(tmp_path / "second") == content(made / "whole")


def test_a_source_without_ids_gets_them(tmp_path: Path) -> None:
    def plain(name: str, first: int) -> None:
        (tmp_path / "a").mkdir(exist_ok=True)
        lines = [{"text": text(n), **({"id": f"i{n}"} if first else {})} for n in range(first, first + 12)]
        (tmp_path / "a" / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def of() -> Any:
        return make_corpus({**LAYOUT, "sources": {"a": {"paths": [str(tmp_path / "a")], "id_field": "id"}}}, origin="")

    plain("0.jsonl", 0)
    prepare(of(), tmp_path / "old", options())
    plain("1.jsonl", 500)
    prepare(of(), tmp_path / "new", options(tmp_path / "old"))
    prepare(of(), tmp_path / "whole", options())
    assert contents(tmp_path / "new") == contents(tmp_path / "whole")


def test_what_joins_two_old_documents_leaves_them(tmp_path: Path) -> None:
    """From nothing a chain of likenesses is one cluster; a document that is in a store stays there."""
    first, middle, last = (" ".join(WORDS[n : n + 60]) for n in (0, 12, 24))
    write_lines(tmp_path / "a" / "0.jsonl", [first, last])
    prepare(corpus(tmp_path, "a", validation=0.0), tmp_path / "old", options())
    write_lines(tmp_path / "a" / "1.jsonl", [middle, text(1)])
    prepare(corpus(tmp_path, "a", validation=0.0), tmp_path / "new", options(tmp_path / "old"))
    prepare(corpus(tmp_path, "a", validation=0.0), tmp_path / "whole", options())
    assert {first, last, text(1)} <= texts_of(tmp_path / "new")
    assert texts_of(tmp_path / "whole") <= texts_of(tmp_path / "new")


def test_killed_anywhere_it_is_done_by_repeating(made: Path, tmp_path: Path) -> None:
    """SIGKILL before or after one of the calls that change the disk; the old store is whole at every instant."""
    names = ("rename", "replace", "fsync", "unlink", "mkdir", "link")
    before, generator, attempts = contents(made / "old"), random.Random(3), 0
    while True:
        attempts += 1
        assert attempts < 100
        if (child := os.fork()) == 0:
            left = [generator.randint(1, 1200)]

            def deadly(call: Callable[..., Any], left: list[int] = left) -> Callable[..., Any]:
                def wrapped(*args: Any, **kwargs: Any) -> Any:
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return call(*args, **kwargs)

                return wrapped

            for name in names:
                setattr(os, name, deadly(getattr(os, name)))
            status = 1
            try:
                prepare(corpus(made, "rest", "lines", "more"), tmp_path / "new", options(made / "old"))
                status = 0
            finally:
                os._exit(status)
        generator.random()  # the child has its own copy
        status = os.waitpid(child, 0)[1]
        assert contents(made / "old") == before
        if status == 0:
            break
        assert os.WIFSIGNALED(status), "it ended by itself"
    assert attempts > 3
    assert contents(tmp_path / "new") == contents(made / "whole")
    assert not (tmp_path / "new.work").exists()


def test_a_run_goes_on_in_the_old_store_and_not_unasked_in_the_new_one(made: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"sequence_length": 32, "global_batch_size": 4, "micro_batch_size": 2}
    uninterrupted = TokenLoader(TokenStore(made / "old"), **arguments)
    expected = [[batch.tokens.tolist() for batch in uninterrupted.next_step()] for _ in range(6)]
    running = TokenLoader(TokenStore(made / "old"), **arguments)
    found = [[batch.tokens.tolist() for batch in running.next_step()] for _ in range(2)]
    prepare(corpus(made, "rest", "lines", "more"), tmp_path / "new", options(made / "old"))
    found += [[batch.tokens.tolist() for batch in running.next_step()] for _ in range(2)]
    resumed = TokenLoader(TokenStore(made / "old"), **arguments)
    resumed.load_state_dict(running.state_dict())
    found += [[batch.tokens.tolist() for batch in resumed.next_step()] for _ in range(2)]
    assert found == expected
    with pytest.raises(UserError, match=r"new: the data differs from the data of the earlier steps \(store: "):
        TokenLoader(TokenStore(tmp_path / "new"), **arguments).load_state_dict(running.state_dict())


def test_room_of_the_keys(made: Path) -> None:
    """16 bytes for a text that differs and 8 for each of 14 bands that differ: 128 a document at most."""
    source = TokenStore(made / "old")
    num_texts = len(set(OLD_TEXTS)) + 10
    sizes = {
        kind: sum(f.stat().st_size for f in (made / "old/document_keys" / kind).iterdir()) for kind in ("exact", "near")
    }
    assert sizes["exact"] == 16 * num_texts
    kept = sum(one.num_documents for one in source.sources.values())
    assert 112 * kept <= sizes["near"] <= 112 * num_texts


def test_damaged_keys_are_named(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "old", tmp_path / "old")
    file = tmp_path / "old/document_keys/near/000000"
    content = bytearray(file.read_bytes())
    content[3] ^= 4
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"near/000000: hash .* the file is damaged; duplicates of the store's"):
        prepare(corpus(made, "more"), tmp_path / "new", options(tmp_path / "old"))
    assert any("near/000000: hash" in fault for fault in verify_store(tmp_path / "old", lambda *_: None).faults)
    file.write_bytes(content[:-8])
    with pytest.raises(UserError, match=r"near/000000: it has \d+ bytes instead of"):
        prepare(corpus(made, "more"), tmp_path / "other", options(tmp_path / "old"))


def test_mistakes(made: Path, tmp_path: Path, byte_tokenizer: TiktokenTokenizer) -> None:
    def refused(message: str, given: Any, base: Path = made / "old") -> None:
        with pytest.raises(UserError, match=message):
            prepare(given, tmp_path / "new", options(base))
        assert not (tmp_path / "new").exists() and not (tmp_path / "new.work").exists()

    with StoreWriter(tmp_path / "keyless", AsciiTokenizer()) as writer:
        writer.source("a").append(np.arange(9, dtype=np.uint32), num_bytes=9)
        writer.finish({})
    refused("keyless: it stores no keys of its documents.*prepare it again", corpus(made, "more"), tmp_path / "keyless")
    prepare(corpus(made, "more", duplicates={"keep_keys": False}), tmp_path / "lean", options())
    assert not (tmp_path / "lean/document_keys").exists()
    refused("lean: it stores no keys", corpus(made, "lines"), tmp_path / "lean")
    refused("no new document remains: 0 files read.*; 1 file is in .*old already", corpus(made, "rest"))
    refused("near = False, but .*old was prepared with True and True", corpus(made, "more", duplicates={"near": False}))
    bytes_of = tmp_path / "tokenizer"
    bytes_of.mkdir()
    byte_tokenizer.save(bytes_of)
    refused("tokenizer = .*: .*old uses another tokenizer", corpus(made, "more", tokenizer=str(tmp_path)))
    refused("classes: .*old has x, y; remove the key", corpus(made, "more", classes=["y", "x"]))
    refused("weight: .*rest.* of .*old has no weight in the corpus file", corpus(made, "more", weights={"more": 1.0}))
    table = {**LAYOUT, "sources": {"lines": {"paths": [str(made / "lines")]}}}
    refused("sources.lines.label_field: the source lines in .*has labels", make_corpus(table, origin=""))
    held_out = {**LAYOUT, "sources": {"lines": {"paths": [str(made / "lines")], "label_field": "kind"}}}
    held_out["sources"]["lines"]["validation"] = 0.999
    held_out["sources"]["rest"] = {"paths": [str(made / "rest")]}
    prepare(make_corpus(held_out, origin=""), tmp_path / "held-out", options())
    refused(
        "label_field: the source lines-validation in .*has labels", make_corpus(table, origin=""), tmp_path / "held-out"
    )
    write_lines(tmp_path / "odd" / "0.jsonl", [text(9000)])
    (tmp_path / "odd/0.jsonl").write_text((tmp_path / "odd/0.jsonl").read_text().replace('"x"', '"z"'))
    with pytest.raises(UserError, match="z"):
        prepare(corpus(tmp_path, "odd"), tmp_path / "new", options(made / "old"))


def test_the_command_counts(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "corpus.toml").write_text(
        "".join(
            f'[sources.{name}]\npaths = ["{made / name}"]\nid_field = "id"\nlabel_field = "kind"\nvalidation = 0.1\n'
            for name in ("rest", "lines", "more")
        )
    )
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["add", str(made / "old"), str(tmp_path / "corpus.toml"), "--out", str(tmp_path / "new")])
    assert args.run_data(args) == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    old = sum(one.num_documents for one in TokenStore(made / "old").sources.values())
    assert f"{old} old documents; 31 new of 37 read in 2 files; duplicates: 4 of old documents" in said
    assert "2 of each other; 3 old files skipped" in said

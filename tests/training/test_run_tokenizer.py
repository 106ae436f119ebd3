"""The tokenizer in a run's directory: from the first start on, the same at every later one, and mended when damaged."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.tokenizers import Tokenizer, files_sha256, load_tokenizer, train_sentencepiece
from lightscale.errors import UserError
from lightscale.runs.journal import Journal
from lightscale.runs.run_directory import RunDirectory, read_lines
from lightscale.training.run_tokenizer import keep_tokenizer

ALONE: Any = SimpleNamespace(on_first=lambda action: action())
TEXT = "the hat of the cat " * 20


def write_store(path: Path, vocab_size: int) -> TokenStore:
    tokenizer: Tokenizer = train_sentencepiece([TEXT], vocab_size=vocab_size)
    with StoreWriter(path, tokenizer) as writer:
        writer.source("text").append(tokenizer.encode(TEXT), num_bytes=len(TEXT))
        writer.finish({})
    return TokenStore(path)


def contents(path: Path) -> dict[str, tuple[bytes, int]]:
    return {one.name: (one.read_bytes(), one.stat().st_ino) for one in path.iterdir()}


def test_it_is_kept_compared_and_mended(
    tmp_path: Path, tiny_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    store, other = write_store(tmp_path / "store", 270), write_store(tmp_path / "other", 271)
    run = RunDirectory(tmp_path / "run")
    run.create_or_open(tiny_config())
    journal = Journal(run, enabled=True)
    journal.begin_attempt()

    def keep(from_store: TokenStore = store, allow: tuple[str, ...] = ()) -> None:
        keep_tokenizer(run, from_store, journal, ALONE, allow)

    keep()
    assert load_tokenizer(run.path).sha256 == store.tokenizer.sha256
    before = contents(run.tokenizer)
    assert {name: data for name, (data, _) in before.items()} == {
        name: data for name, (data, _) in contents(store.path / "tokenizer").items()
    }
    keep()
    assert contents(run.tokenizer) == before, "it is written once"

    # Damaged: the store has it still.
    (run.tokenizer / "sentencepiece.model").unlink()
    keep()
    assert "sentencepiece.model: No such file or directory" in capsys.readouterr().err
    assert files_sha256(run.tokenizer) == store.tokenizer.sha256

    # Another store: refused, unless its data are accepted.
    with pytest.raises(UserError, match=f"sha256 {store.tokenizer.sha256[:16]}….*--allow-change data"):
        keep(other)
    assert files_sha256(run.tokenizer) == store.tokenizer.sha256
    keep(other, ("data",))
    assert files_sha256(run.tokenizer) == other.tokenizer.sha256
    (event,) = [event for event in read_lines(run.events) if event["event"] == "tokenizer_changed"]
    assert (event["before"], event["now"]) == (store.tokenizer.sha256, other.tokenizer.sha256)


def test_a_store_whose_tokenizer_was_changed_is_refused(tmp_path: Path, tiny_config: Callable[..., RunConfig]) -> None:
    store = write_store(tmp_path / "store", 270)
    run = RunDirectory(tmp_path / "run")
    run.create_or_open(tiny_config())
    model = tmp_path / "store" / "tokenizer" / "sentencepiece.model"
    model.write_bytes(model.read_bytes() + b"x")
    with pytest.raises(UserError, match=f"{model.parent}: expected the tokenizer with sha256 {store.tokenizer.sha256}"):
        keep_tokenizer(run, store, Journal(run, enabled=True), ALONE, ())
    assert [path.name for path in run.path.iterdir()] == ["config.toml"]

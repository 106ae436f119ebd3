"""``tools/texts/needle_corpus.py``: every answer is in the text before it; a model learns to find needles from it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightscale.config.files import load
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.tokenizers import load_tokenizer
from lightscale.evaluation.inference.requests import Encoder, LogLikelihood
from lightscale.evaluation.registry import find_tasks

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
FACT = re.compile(r" ([aeiou][a-z]) (\d\d) (\d\d)\.")
QUESTION = re.compile(r"\n\? ([aeiou][a-z])$")


@pytest.fixture(scope="module")
def corpus(texts_path: Path) -> ModuleType:
    import needle_corpus

    return needle_corpus


@pytest.fixture(scope="module")
def folder(corpus: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "needles"
    assert corpus.main([str(folder), "--tokens", "20000"]) == 0
    return folder


def test_what_counts_is_a_value_that_was_there_before(folder: Path) -> None:
    source, answers = TokenStore(folder / "store").source("needles"), 0
    tokenizer = load_tokenizer(folder / "store")
    lengths = []
    for index in range(source.num_documents):
        begin, end = source.document(index)
        ids, mask = source.read(begin, end), source.loss_mask(begin, end)
        lengths.append(len(ids))
        text = ""
        for token, counts in zip(ids[1:], mask[1:], strict=True):
            word = tokenizer.decode([token])
            if counts and (question := QUESTION.search(text)):
                wanted = next(match.groups()[1:] for match in FACT.finditer(text) if match[1] == question[1])
                first = word
            elif counts:
                assert (first, word) == tuple(f" {number}" for number in wanted)
                answers += 1
            text += word
    # Of some 20000 tokens, six for each question.
    assert answers > 600
    assert 16 <= min(lengths) < 32
    assert 200 < max(lengths) <= 256


def test_each_word_is_a_token(corpus: ModuleType, folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "store")
    assert all(len(tokenizer.encode(f" {word}")) == 1 for word in (*corpus.FILLER, *corpus.KEYS, *corpus.VALUES))
    config = load(CONFIGS / "needle-tiny.toml")
    assert config.model.vocab_size == tokenizer.vocab_size
    assert str(config.data.store) == "data/needles/store"


def test_the_same_seed_gives_the_same_text(corpus: ModuleType, folder: Path, tmp_path: Path) -> None:
    assert corpus.main([str(tmp_path / "again"), "--tokens", "20000"]) == 0
    assert corpus.main([str(tmp_path / "other"), "--tokens", "20000", "--seed", "1"]) == 0
    hashes = [TokenStore(path / "store").source("needles").content_hash for path in (folder, tmp_path / "again")]
    assert hashes[0] == hashes[1] != TokenStore(tmp_path / "other" / "store").source("needles").content_hash
    assert (folder / "haystack.txt").read_bytes() == (tmp_path / "again" / "haystack.txt").read_bytes()


@pytest.mark.parametrize("mode", ["easy", "standard"])
def test_the_task_files(folder: Path, mode: str) -> None:
    """A prompt reads like a document: filler, a needle in it, a question at the end."""
    (task,) = find_tasks([str(folder / f"{mode}.toml")], folder)
    tokenizer = load_tokenizer(folder / "store")
    request = task.requests(Encoder(tokenizer))[0]
    assert isinstance(request, LogLikelihood)
    text = tokenizer.decode(request.context[1:])
    ((key, *value),) = (match.groups() for match in FACT.finditer(text))
    assert text.endswith(f"\n? {key}")
    assert text.count(f"\n? {key}") == (2 if mode == "easy" else 1)
    assert tokenizer.decode(request.continuation) == f" {value[0]}"
    assert "".join(re.findall("[0-9]", text)) == "".join(value)


def test_mistakes(corpus: ModuleType, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert corpus.main([str(folder)]) == 2
    assert str(folder / "store") in capsys.readouterr().err
    assert corpus.main([str(tmp_path / "none"), "--longest", "8"]) == 2
    assert "--longest must be at least 32" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_a_small_model_learns_to_find_needles(texts_path: Path, tmp_path: Path) -> None:
    """The whole way of `configs/needle-tiny.toml`, minutes on two quiet cores."""

    def run(*command: str) -> None:
        subprocess.run([sys.executable, *command], check=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})

    run(str(texts_path / "needle_corpus.py"), "data/needles")
    run("-m", "lightscale", "train", "needle-tiny", "--processes", "2")
    tasks = "data/needles/easy.toml,data/needles/standard.toml"
    run("-m", "lightscale", "evaluate", "needle-tiny", "--tasks", tasks, "--context", "1024")
    config = load(CONFIGS / "needle-tiny.toml")
    (results,) = (tmp_path / "runs" / "needle-tiny" / "evaluation").iterdir()
    for mode in ("easy", "standard"):
        result = json.loads((results / f"{mode}.json").read_text(encoding="utf-8"))
        of_length: dict[int, Any] = {one["length"]: one for one in result["details"]["by_length"]}
        assert of_length[config.data.sequence_length]["exact"] >= 0.95, mode
        assert (results / f"{mode}.png").exists()
    shutil.rmtree(tmp_path / "runs")

"""``lightscale data plan``: estimates beside what is there, and what a preparation gives."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale import cli
from lightscale.data_pipeline.preparation.corpus import load_corpus
from lightscale.data_pipeline.preparation.estimates.estimate import estimate
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer
from lightscale.errors import UserError


def texts(number: int, *, seed: int) -> list[str]:
    """Documents that the rules for code keep, of 200 to 1,800 bytes; each third one has too few words for them."""
    draw = random.Random(seed)
    found = []
    for index in range(number):
        words = [f"{draw.getrandbits(48):012x}" for _ in range(draw.randint(15, 138))]
        lines = [" ".join(words[start : start + 5]) for start in range(0, 5 if index % 3 == 0 else len(words), 5)]
        found.append("".join(f"{line}\n" for line in lines))
    return found


def truth(own: list[str]) -> tuple[int, int]:
    """Documents and tokens, ends of text included, of what is kept; a token is a byte."""
    kept = [text for text in own if len(text.split()) > 5]
    return len(kept), sum(len(text) + 1 for text in kept)


def jsonl(own: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in own).encode()


@pytest.fixture
def corpus(tmp_path: Path, byte_tokenizer: TiktokenTokenizer) -> Path:
    """A corpus file whose tokens are bytes, without a source."""
    (tmp_path / "bytes" / "tokenizer").mkdir(parents=True)
    byte_tokenizer.save(tmp_path / "bytes" / "tokenizer")
    path = tmp_path / "corpus.toml"
    path.write_text(
        'tokenizer = "bytes"\nduplicates = {exact = false, near = false}\nchunk_tokens = 1024\nshard_tokens = 65536\n'
    )
    return path


def add_source(corpus: Path, name: str, files: dict[str, bytes]) -> None:
    for file, content in files.items():
        path = corpus.parent / name / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    with corpus.open("a") as file:
        file.write(f'[sources.{name}]\npaths = ["{name}"]\nlanguage = "code"\n')


def write_zst(own: list[str]) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return bytes(zstandard.ZstdCompressor().compress(jsonl(own)))


Format = Callable[[list[str]], dict[str, bytes]]
FORMATS: dict[str, Format] = {
    # Longer than a buffer, so that only a part is read.
    "jsonl": lambda own: {"a.jsonl": jsonl(own[:2500]), "b.jsonl": jsonl(own[2500:])},
    "gz": lambda own: {f"{part}.jsonl.gz": gzip.compress(jsonl(own[part::3])) for part in range(3)},
    "zst": lambda own: {"all.jsonl.zst": write_zst(own)},
    "text": lambda own: {f"{number:04}.txt": text.encode() for number, text in enumerate(own[:900])},
}


@pytest.mark.parametrize("kind", FORMATS)
def test_estimates_are_near_what_is_there(corpus: Path, kind: str) -> None:
    own = texts(4000, seed=1)
    add_source(corpus, "own", FORMATS[kind](own))
    found = estimate(load_corpus(corpus), sample=150)
    source = found.sources["own"]
    documents, tokens = truth(own[:900] if kind == "text" else own)
    assert source.sampled == 150
    assert source.files == len(list((corpus.parent / "own").iterdir()))
    assert source.file_bytes == sum(path.stat().st_size for path in (corpus.parent / "own").iterdir())
    assert source.documents == pytest.approx(documents, rel=0.1)
    assert source.tokens == pytest.approx(tokens, rel=0.1)
    assert source.bytes_per_token == 1
    # Texts are chosen, lines are the first of each file.
    assert source.dropped["size"] == pytest.approx(50, abs=15 if kind == "text" else 2)
    assert set(source.dropped) == {"size"}
    assert found.seconds > 0


def test_estimates_of_parquet_go_by_its_rows(corpus: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    own = texts(3000, seed=2)
    add_source(corpus, "rows", {})
    (corpus.parent / "rows").mkdir()
    for part in range(2):
        parquet.write_table(pyarrow.table({"text": own[part::2]}), corpus.parent / "rows" / f"{part}.parquet")
    source = estimate(load_corpus(corpus), sample=300).sources["rows"]
    documents, tokens = truth(own)
    assert source.sampled == 300
    assert source.documents == pytest.approx(documents, rel=0.02)
    assert source.tokens == pytest.approx(tokens, rel=0.1)


def test_a_sample_of_everything_is_exact(corpus: Path) -> None:
    own = texts(60, seed=3)
    add_source(corpus, "own", {"a.jsonl": jsonl(own)})
    add_source(corpus, "same", {"x.txt": b"a b c d e f g h i j k l m\n"})
    found = estimate(load_corpus(corpus), sample=1000)
    assert (round(found.sources["own"].documents), round(found.sources["own"].tokens)) == truth(own)
    assert found.sources["same"].tokens == 27


def test_the_store_is_as_large_as_said(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_source(corpus, "own", {"a.jsonl": jsonl(texts(600, seed=4))})
    before = sorted(corpus.parent.rglob("*"))
    assert cli.main(["data", "plan", str(corpus), "--json"]) == 0
    planned: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert sorted(corpus.parent.rglob("*")) == before, "it wrote something"
    store = corpus.parent / "store"
    assert cli.main(["data", "prepare", str(corpus), "--out", str(store), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert planned["tokens"] == pytest.approx(report["sources"]["own"]["tokens"], rel=0.1)
    # Beside the reports and the tokenizer, which do not grow with the corpus.
    size = sum(path.stat().st_size for path in (store / "own").rglob("*") if path.is_file())
    assert planned["store_bytes"] == pytest.approx(size, rel=0.1)


def test_people_see_each_source(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_source(corpus, "own", {"a.jsonl": jsonl(texts(90, seed=5)) + b"no json\n"})
    assert cli.main(["data", "plan", str(corpus), "--sample", "30"]) == 0
    shown = capsys.readouterr().out
    assert "own: 10 of 30 documents dropped: size\n" in shown
    assert "own: warning: line is not a JSON object: 1\n    own/a.jsonl@" in shown
    assert "tokens; store " in shown
    (row,) = [line.split() for line in shown.splitlines() if line.strip().startswith("own ")]
    assert row[1:2] + row[4:5] == ["1", "30"]


def test_a_tokenizer_that_is_to_be_trained_is_trained_on_the_sample(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_source(corpus, "own", {"a.jsonl": jsonl(texts(300, seed=6))})
    corpus.write_text("vocab_size = 300\n" + corpus.read_text().replace('tokenizer = "bytes"\n', ""))
    assert cli.main(["data", "plan", str(corpus)]) == 0
    assert "tokenizer sentencepiece, trained on the sample" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "the sample keeps no document: 1 file; no documents"), (jsonl(["a"]), "1 file; 1 × size")],
)
def test_a_corpus_of_which_nothing_is_kept(corpus: Path, content: bytes, message: str) -> None:
    add_source(corpus, "own", {"a.jsonl": content})
    with pytest.raises(UserError, match=message):
        estimate(load_corpus(corpus))


def test_a_wrong_sample(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "plan", str(corpus), "--sample", "0"]) == 78
    assert "--sample 0: must be at least 1" in capsys.readouterr().err

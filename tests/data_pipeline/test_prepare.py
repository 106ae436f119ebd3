import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightscale.data_pipeline.prepare import (
    Preparation,
    prepare_store,
    sample_blocks,
    split_of,
    unigram_entropy,
)
from lightscale.data_pipeline.sources import Document, Problems, list_files
from lightscale.data_pipeline.store import TokenStore
from lightscale.data_pipeline.tokenizers import SentencePieceTokenizer, load_tokenizer
from lightscale.errors import UserError


@pytest.fixture
def corpus(tmp_path: Path, random_texts: Callable[..., list[str]]) -> Path:
    directory = tmp_path / "corpus"
    directory.mkdir()
    texts = random_texts(60, seed=4, max_words=120)
    for number, text in enumerate(texts[:40]):
        (directory / f"{number:02}.txt").write_bytes(text.encode())
    lines = [json.dumps({"text": text}) for text in texts[40:]]
    (directory / "lines.jsonl").write_text("\n".join([*lines, "not json"]))
    (directory / "broken.txt").write_bytes(b"\xff broken")
    (directory / "gone.txt").symlink_to("nowhere")
    return directory


def prepare(corpus: Path, out: Path, **changes: Any) -> dict[str, Any]:
    problems = Problems(strict=changes.pop("strict", False))
    options: dict[str, Any] = {"name": "words", "vocab_size": 400, "validation": 0.2}
    options |= {"shard_tokens": 2**10, "chunk_tokens": 2**6}
    files = list_files([corpus], problems)
    return prepare_store(Preparation(files=files, out=out, **(options | changes)), problems)


def expected_texts(corpus: Path) -> dict[str, str]:
    """Document id to text, without the module under test."""
    texts = {}
    for path in sorted(corpus.glob("*.txt")):
        if path.exists():
            texts[f"corpus/{path.name}"] = path.read_bytes().decode(errors="replace")
    for number, line in enumerate((corpus / "lines.jsonl").read_text().splitlines()[:-1], start=1):
        texts[f"corpus/lines.jsonl:{number}"] = json.loads(line)["text"]
    return texts


def test_every_document_is_in_the_store_once_and_unchanged(corpus: Path, tmp_path: Path) -> None:
    report = prepare(corpus, tmp_path / "store")
    store, tokenizer = TokenStore(tmp_path / "store"), load_tokenizer(tmp_path / "store")
    by_split: dict[str, list[str]] = {"train": [], "validation": []}
    for name, text in expected_texts(corpus).items():
        by_split[split_of(name, 0.2)].append(text)
    assert all(by_split.values())
    for name, split in (("words", "train"), ("words-validation", "validation")):
        source = store.source(name)
        assert source.split == split
        spans = [source.document(index) for index in range(source.num_documents)]
        assert [source.read(start, start + 1)[0] for start, _ in spans] == [tokenizer.eot_id] * len(spans)
        assert sorted(tokenizer.decode(source.read(*span)) for span in spans) == sorted(by_split[split])
        num_bytes = sum(len(text.encode()) for text in by_split[split])
        assert report["sources"][name] == {
            "documents": len(spans),
            "bytes": num_bytes,
            "tokens": source.num_tokens,
            "bytes_per_token": num_bytes / source.num_tokens,
        }


def test_problems_are_counted_once_and_reported(corpus: Path, tmp_path: Path) -> None:
    report = prepare(corpus, tmp_path / "store")
    assert {reason: problem["count"] for reason, problem in report["problems"].items()} == {
        "invalid UTF-8 replaced": 1,
        "line is not a JSON object": 1,
        "unreadable file": 1,
    }
    assert TokenStore(tmp_path / "store").report() == report


def test_two_runs_give_the_same_store_byte_for_byte(corpus: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "elsewhere" / "second"
    prepare(corpus, first)
    prepare(corpus, second)
    names = sorted(path.relative_to(first) for path in first.rglob("*"))
    assert names == sorted(path.relative_to(second) for path in second.rglob("*"))
    files = [name for name in names if (first / name).is_file()]
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)
    assert sorted(path.name for path in second.parent.iterdir()) == ["second"]


def test_reported_entropy_is_that_of_the_tokens(corpus: Path, tmp_path: Path) -> None:
    entropy = prepare(corpus, tmp_path / "store")["unigram_entropy_nats"]
    store = TokenStore(tmp_path / "store")
    streams = {source.split: source.read(0, source.num_tokens).tolist() for source in store.sources.values()}
    frequencies = Counter(streams["train"])
    total = len(streams["train"])
    own = -sum(math.log(frequencies[token] / total) for token in streams["train"]) / total
    assert entropy["train"] == pytest.approx(own, rel=1e-12)
    learned = [math.log((frequencies[token] + 1) / (total + 400)) for token in streams["validation"]]
    assert entropy["validation_under_train"] == pytest.approx(-sum(learned) / len(learned), rel=1e-12)
    assert entropy["validation"] < entropy["validation_under_train"]


def test_unigram_entropy_of_known_distributions() -> None:
    assert unigram_entropy(np.full(8, 5)) == pytest.approx(math.log(8))
    assert unigram_entropy(np.array([7, 0, 0])) == 0
    assert unigram_entropy(np.array([1, 3])) == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3))
    # Never seen while learning: one of (3 + 1) counts after one is added to each of the two.
    assert unigram_entropy(np.array([0, 1]), np.array([2, 0])) == pytest.approx(math.log(4))


def test_the_split_is_a_function_of_the_id_and_grows_with_the_share() -> None:
    names = [f"corpus/{number}.txt" for number in range(5000)]
    held_out = {share: {name for name in names if split_of(name, share) == "validation"} for share in (0.0, 0.02, 0.5)}
    assert not held_out[0.0]
    assert 60 < len(held_out[0.02]) < 140
    assert held_out[0.02] < held_out[0.5]


def test_sampled_blocks_do_not_depend_on_the_order_of_the_documents() -> None:
    documents = [
        Document(id=str(number), text=str(number % 10) * length, read_bytes=0)
        for number, length in enumerate([100, 200_000, 5, 70_000, 1000, 66_000, 3, 300])
    ]
    orders = itertools.islice(itertools.permutations(documents), 0, None, 997)
    samples = [sample_blocks(order, 150_000) for order in orders]
    assert len(samples) > 30
    assert all(sample == samples[0] for sample in samples)
    assert sum(map(len, samples[0])) <= 150_000
    everything = sample_blocks(documents, 10**9)
    assert Counter("".join(everything)) == Counter("".join(document.text for document in documents))


def test_a_sample_is_never_empty_and_spreads_over_one_large_document() -> None:
    text = "".join(chr(0x4E00 + number) * 65_536 for number in range(20))
    document = Document(id="large", text=text, read_bytes=0)
    assert len(sample_blocks([document], 10)) == 1
    blocks = sample_blocks([document], 5 * 3 * 65_536)
    assert len(blocks) == len(set(blocks)) == 5
    assert sample_blocks([], 10) == []


def test_without_validation_there_is_one_source(corpus: Path, tmp_path: Path) -> None:
    report = prepare(corpus, tmp_path / "store", validation=0.0)
    assert list(TokenStore(tmp_path / "store").sources) == ["words"]
    assert list(report["unigram_entropy_nats"]) == ["train"]


@pytest.mark.parametrize("from_model", [False, True])
def test_the_tokenizer_of_another_store_can_be_taken(
    corpus: Path, tmp_path: Path, sentencepiece_tokenizer: SentencePieceTokenizer, from_model: bool
) -> None:
    prepare(corpus, tmp_path / "first")
    path = tmp_path / "first" / ("tokenizer/sentencepiece.model" if from_model else "")
    prepare(corpus, tmp_path / "second", tokenizer=str(path), vocab_size=None, validation=0.0)
    first, second = TokenStore(tmp_path / "first"), TokenStore(tmp_path / "second")
    assert first.tokenizer == second.tokenizer
    assert second.tokenizer.sha256 != sentencepiece_tokenizer.sha256


def test_progress_goes_through_the_steps_up_to_the_whole(corpus: Path, tmp_path: Path) -> None:
    files = list_files([corpus], Problems())
    seen: list[tuple[str, int, int]] = []
    preparation = Preparation(files=files, out=tmp_path / "store", name="words", vocab_size=400)
    prepare_store(preparation, Problems(), lambda *step: seen.append(step))
    total = sum(path.stat().st_size for path in corpus.iterdir() if path.exists())
    for step in ("sample for the tokenizer", "tokenize"):
        done = [count for name, count, whole in seen if name == step and whole == total]
        assert done[0] == 0
        assert done == sorted(done)
        assert done[-1] == total
        assert len(done) > 60


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation": 1.0}, r"validation 1\.0: .* share < 1"),
        ({"validation": -0.1}, r"validation -0\.1"),
        ({"tokenizer": "no/such/path"}, r"tokenizer no/such/path: .* neither"),
        ({"tokenizer": "tiktoken:cl99", "vocab_size": None}, "cl99"),
        ({"tokenizer": "tiktoken:cl100k_base"}, "vocab size 400: tokenizer tiktoken:cl100k_base has its own"),
        ({"vocab_size": 100_000}, "vocabulary size 100000: the corpus is too small"),
        ({"strict": True}, "unreadable file"),
        ({"name": "a name"}, "source name 'a name'"),
    ],
)
def test_mistakes_leave_nothing_behind(corpus: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    if "tokenizer" in changes and "no/such" in changes["tokenizer"]:
        changes = changes | {"vocab_size": None}
    with pytest.raises(UserError, match=message):
        prepare(corpus, tmp_path / "store", **changes)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


@pytest.mark.parametrize("tokenizer", ["sentencepiece", "given"])
def test_a_corpus_with_nothing_in_it_says_what_was_seen(
    tmp_path: Path, sentencepiece_tokenizer: SentencePieceTokenizer, tokenizer: str
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.jsonl").write_text("{}\n[]\n")
    (corpus / "empty.txt").write_text("")
    given = tmp_path / "given" / "tokenizer"
    given.mkdir(parents=True)
    sentencepiece_tokenizer.save(given)
    options = {} if tokenizer == "sentencepiece" else {"tokenizer": str(tmp_path / "given"), "vocab_size": None}
    with pytest.raises(UserError, match=r"no document is left to train on: 2 files read, .*without a text field"):
        prepare(corpus, tmp_path / "store", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "given"]


def test_an_existing_store_is_refused_before_any_work(corpus: Path, tmp_path: Path) -> None:
    prepare(corpus, tmp_path / "store")
    steps: list[str] = []
    preparation = Preparation(files=[], out=tmp_path / "store", name="words")
    with pytest.raises(UserError, match="never overwritten"):
        prepare_store(preparation, Problems(), lambda step, done, total: steps.append(step))
    assert not steps

import json
import math
import os
from pathlib import Path

import pytest

from lightscale.cli import main
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.tokenizers import load_tokenizer


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    directory = tmp_path / "my corpus"
    directory.mkdir()
    for number in range(30):
        (directory / f"{number:02}.txt").write_text(f"document {number}: [bold]not markup[/bold]\n" * 20)
    return directory


def prepare(corpus: Path, out: Path, *options: str) -> int:
    return main(["data", "prepare", str(corpus), "--out", str(out), "--vocab-size", "300", *options])


def test_prepare_then_inspect(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (corpus / "bad.txt").write_bytes(b"\xff")
    assert prepare(corpus, tmp_path / "store", "--validation", "0.2") == 0
    printed = capsys.readouterr().out
    assert "my-corpus-validation" in printed
    assert "warning: invalid UTF-8 replaced: 1\n    my corpus/bad.txt\n" in printed
    assert f"wrote {tmp_path / 'store'} in" in printed
    assert main(["data", "inspect", str(tmp_path / "store")]) == 0
    shown = capsys.readouterr().out
    store = TokenStore(tmp_path / "store")
    assert store.fingerprint() in shown
    for source in store.sources.values():
        assert f"{source.num_documents:,}" in shown
        assert f"{source.num_tokens:,}" in shown
    assert "300 ids" in shown
    assert "format 2: every block is verified when it is read" in shown
    assert "my-corpus: every label counts; no document arrays; files and positions of its documents" in shown
    assert "my-corpus, document 0, my corpus/" in shown
    assert "[bold]not markup[/bold]" in shown
    assert main(["data", "inspect", str(tmp_path / "store"), "--sample", "0"]) == 0
    without_sample = capsys.readouterr().out
    assert store.fingerprint() in without_sample
    assert "not markup" not in without_sample


def test_small_weights_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = ""
    for name, weight in (("rare", 0.00001), ("common", 0.99999)):
        (tmp_path / f"{name}.txt").write_text(f"some {name} text")
        sources += f'[sources.{name}]\npaths = ["{name}.txt"]\nweight = {weight}\n'
    (tmp_path / "corpus.toml").write_text(f'tokenizer = "ascii"\n{sources}')
    assert main(["data", "prepare", str(tmp_path / "corpus.toml"), "--out", str(tmp_path / "store")]) == 0
    assert main(["data", "inspect", str(tmp_path / "store")]) == 0
    assert capsys.readouterr().out.count("weights: rare 1e-05, common 0.99999\n") == 2
    assert "0.001%" in (tmp_path / "store" / "report.html").read_text()


def test_json_is_one_object_on_stdout(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(corpus, tmp_path / "store", "--json", "--name", "docs", "--validation", "0.2") == 0
    prepared = json.loads(capsys.readouterr().out)
    assert main(["data", "inspect", str(tmp_path / "store"), "--json", "--sample", "3"]) == 0
    inspected = json.loads(capsys.readouterr().out)
    store, tokenizer = TokenStore(tmp_path / "store"), load_tokenizer(tmp_path / "store")
    assert set(prepared["sources"]) == set(inspected["sources"]) == {"docs", "docs-validation"}
    assert inspected["fingerprint"] == store.fingerprint()
    assert inspected["tokenizer"]["sha256"] == tokenizer.sha256
    assert inspected["sources"]["docs"]["content_hash"] == store.source("docs").content_hash
    assert inspected["sources"]["docs"]["bytes_per_token"] == prepared["sources"]["docs"]["bytes_per_token"]
    assert inspected["format_version"] == 2
    extras = {"loss_mask": False, "token_arrays": {}, "document_arrays": {}, "origins": True}
    assert inspected["sources"]["docs"].items() >= extras.items()
    assert len(inspected["samples"]) == 3
    for sample in inspected["samples"]:
        start, stop = store.source(sample["source"]).document(sample["document"])
        whole = tokenizer.decode(store.source(sample["source"]).read(start, stop))
        assert whole.startswith(sample["text"])
        assert sample["text"].startswith("document ")
        assert (corpus.parent / sample["origin"]["file"]).read_text().startswith(sample["text"])


def test_a_source_whose_share_held_nothing_out_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("small", "later"):
        (tmp_path / f"{name}.txt").write_text(f"some {name} text")
    sources = '[sources.small]\npaths = ["small.txt"]\n[sources.later]\npaths = ["later.txt"]\nvalidation = 0.9999\n'
    (tmp_path / "corpus.toml").write_text(f'tokenizer = "ascii"\nvalidation = 0.01\n{sources}')
    assert main(["data", "prepare", str(tmp_path / "corpus.toml"), "--out", str(tmp_path / "store")]) == 0
    note = "note: no document of small was held out; use more documents or a larger validation share\n"
    assert note in capsys.readouterr().out
    (tmp_path / "corpus.toml").write_text(f'tokenizer = "ascii"\n{sources}')
    assert main(["data", "prepare", str(tmp_path / "corpus.toml"), "--out", str(tmp_path / "other")]) == 0
    assert "note:" not in capsys.readouterr().out


def test_suffixes_choose_the_files(corpus: Path, tmp_path: Path) -> None:
    (corpus / "table.csv").write_text('n,text\n1,"' + "alpha,beta,gamma\n" * 2000 + '"\n')
    assert prepare(corpus, tmp_path / "store", "--suffixes", ".csv", "--validation", "0", "--vocab-size", "270") == 0
    assert TokenStore(tmp_path / "store").source("my-corpus").num_documents == 1


def test_a_corpus_file(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "corpus.toml").write_text(
        'vocab_size = 300\n[sources.numbered]\npaths = ["my corpus"]\nlanguage = "code"\nfilters = {size = {min = 5}}\n'
    )
    (corpus / "short.txt").write_text("too short")
    arguments = ["data", "prepare", str(tmp_path / "corpus.toml"), "--out", str(tmp_path / "store")]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "numbered: filter dropped 1 documents (0.00 MB): size" in printed
    assert "numbered: deduplicate dropped" in printed  # the documents differ in their numbers only
    assert f"see {tmp_path / 'store'}/report.html" in printed
    assert TokenStore(tmp_path / "store").source("numbered").split == "train"


def test_of_paths_every_document_stays_unless_a_language_is_given(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (corpus / "table.txt").write_text("0x00, 0x01, 0xff,\n" * 2000)
    counts = []
    for options in ([], ["--language", "code"]):
        assert prepare(corpus, tmp_path / f"store{len(counts)}", "--json", "--validation", "0", *options) == 0
        counts.append(json.loads(capsys.readouterr().out)["sources"]["my-corpus"]["documents"])
    assert counts[0] == 31
    assert counts[1] < 31


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "--out", "{tmp}/store"], "the corpus is one CORPUS.toml, or PATHs, or --corpus stdlib"),
        (
            ["prepare", "{tmp}", "--corpus", "stdlib", "--out", "{tmp}/store"],
            "the corpus is one CORPUS.toml, or PATHs, or",
        ),
        (["prepare", "{tmp}/nowhere", "--out", "{tmp}/store"], "nowhere: No such file or directory"),
        (["prepare", "{tmp}", "--out", "{tmp}/store"], "no training document remains: 0 files read, 1 × unreadable"),
        (["prepare", "{tmp}", "--out", "{tmp}"], "never overwritten"),
        (["prepare", "{tmp}", "--out", "{tmp}/store", "--strict"], "unreadable file"),
        (["prepare", "{tmp}/none.toml", "--out", "{tmp}/store"], "cannot read the corpus file {tmp}/none.toml"),
        (["prepare", "{tmp}/none.toml", "{tmp}", "--out", "{tmp}/store"], "use exactly one of these"),
        (
            ["prepare", "{tmp}/a.toml", "--name", "x", "--out", "{tmp}/s"],
            "--name: not possible with a corpus file; set the key in {tmp}/a.toml",
        ),
        (["prepare", "{tmp}", "--out", "{tmp}/store", "--validation", "1"], "validation = 1.0: must be a number >= 0"),
        (["prepare", "{tmp}", "--out", "{tmp}/store", "--name", "a b"], "source name 'a b'"),
        (["prepare", "{tmp}", "--out", "{tmp}/store", "--language", "fr"], 'language = "fr": must be "en" or "zh"'),
        (["prepare", "{tmp}", "--out", "{tmp}/store", "--workers", "0"], "--workers 0: use at least 1"),
        (["prepare", "{tmp}", "--out", "{tmp}/store", "--workers", "2", "--mpi"], "--workers and --executor mpi"),
        (["prepare", "{tmp}", "--out", "{tmp}/store", "--workers", "2", "--executor", "ray"], "executor ray: use only"),
        (["verify", "{tmp}/nowhere"], "no token store"),
        (["inspect", "{tmp}/nowhere"], "no token store"),
        (["inspect", "{tmp}"], "it has no zarr.json"),
    ],
)
def test_mistakes_end_with_78_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "gone.txt").symlink_to("nowhere at all")
    code = main(["data", *(argument.format(tmp=tmp_path) for argument in arguments)])
    captured = capsys.readouterr()
    assert code == 78
    (line,) = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert message.format(tmp=tmp_path) in line
    assert captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["gone.txt"]


@pytest.mark.long
def test_the_standard_library_within_a_minute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Of this process and its children on the cores: other tests run beside this one.
    started = sum(os.times()[:4])
    assert main(["data", "prepare", "--corpus", "stdlib", "--out", str(tmp_path / "store"), "--json"]) == 0
    seconds = sum(os.times()[:4]) - started
    report = json.loads(capsys.readouterr().out)
    assert seconds < 60
    assert report["tokenizer"]["vocab_size"] == 4096
    assert set(report["sources"]) == {"stdlib", "stdlib-validation"}
    assert report["sources"]["stdlib"]["tokens"] > 1_000_000
    assert report["sources"]["stdlib"]["bytes_per_token"] > 3
    entropy = report["unigram_entropy_nats"]
    assert 5 < entropy["validation"] < entropy["validation_under_train"] < math.log(4096)
    store, tokenizer = TokenStore(tmp_path / "store"), load_tokenizer(tmp_path / "store")
    source = store.source("stdlib")
    start, stop = source.document(source.num_documents // 2)
    compile(tokenizer.decode(source.read(start, stop)), "document", "exec")

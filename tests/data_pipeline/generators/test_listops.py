"""ListOps: answers by an independent evaluator, documents as they were asked for, the same bytes for the same seed."""

import argparse
import json
import re
import statistics
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, Self

import numpy as np
import pytest

from lightscale.cli import main
from lightscale.data_pipeline.generators.interface import (
    GENERATORS,
    Generator,
    MadeDocument,
    integer,
)
from lightscale.data_pipeline.generators.listops import ListOps
from lightscale.data_pipeline.generators.write import write_made_store
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.store.verify import verify_store
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer, load_tokenizer
from lightscale.data_pipeline.tokenizers.symbols import symbol_tokenizer

INNERMOST = re.compile(r"\[(MAX|MIN|MED|SM)((?: \d)+) \]")
RULES = {
    "MAX": max,
    "MIN": min,
    "MED": lambda digits: int(statistics.median(digits)),
    "SM": lambda digits: int(str(sum(digits))[-1]),
}


def evaluated(text: str) -> tuple[int, int, list[int]]:
    """(value, depth, numbers of arguments): by putting values in the place of innermost operations, all at once."""
    depth, sizes = 0, []
    while not text.isdigit():
        depth += 1
        sizes += [len(found[2].split()) for found in INNERMOST.finditer(text)]
        text, count = INNERMOST.subn(lambda found: str(RULES[found[1]]([*map(int, found[2].split())])), text)
        assert count, f"no operation in {text}"
    return int(text), depth, sizes


def texts(store: TokenStore, name: str) -> list[str]:
    tokenizer, source = load_tokenizer(store.path), store.source(name)
    bounds = [source.document(number) for number in range(source.num_documents)]
    return [tokenizer.decode(source.read(start + 1, stop)) for start, stop in bounds]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_the_evaluator_agrees_with_examples_by_hand() -> None:
    # The first is the paper's own.
    assert evaluated("[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]") == (5, 2, [2, 5, 6])
    assert evaluated("[SM 9 9 [MED 1 2 ] ]")[0] == 9
    assert evaluated("[MED 3 8 ]")[0] == 5


@pytest.mark.parametrize(
    ("generator", "documents"),
    [
        (ListOps(max_depth=3, max_arguments=4, min_tokens=4, max_tokens=40), 600),
        (ListOps(max_depth=1, max_arguments=9, min_tokens=4, max_tokens=11), 300),
        (ListOps(), 40),
    ],
    ids=["small", "flat", "as published"],
)
def test_every_label_is_the_value_of_its_document(tmp_path: Path, generator: ListOps, documents: int) -> None:
    report = write_made_store(
        tmp_path / "store", "listops", generator, documents=documents, validation=documents // 4, seed=3
    )
    assert verify_store(tmp_path / "store", lambda step, done, total: None).faults == []
    store = TokenStore(tmp_path / "store")
    assert store.classes == {"label": list("0123456789")}
    deepest = most = 0
    for name in ("listops", "listops-validation"):
        source, found = store.source(name), texts(store, name)
        labels = source.document_values("label", 0, source.num_documents).tolist()
        for number, text in enumerate(found):
            value, depth, sizes = evaluated(text)
            assert labels[number] == value, text
            deepest, most = max(deepest, depth), max(most, *sizes)
            assert min(sizes) >= 2
            length = len(text.split())
            assert generator.min_tokens <= length <= generator.max_tokens
            # A symbol is a token, brackets too.
            start, stop = source.document(number)
            assert stop - start == length + 1
        counts = Counter(map(str, labels))
        assert report["sources"][name]["classes"] == {digit: counts[digit] for digit in "0123456789"}
        assert report["sources"][name]["documents"] == len(found)
    assert deepest == generator.max_depth
    assert most <= generator.max_arguments
    train = texts(store, "listops")
    assert len(set(train)) > 0.9 * len(train)
    assert train[: documents // 4] != texts(store, "listops-validation")


def test_a_seed_makes_the_same_bytes_and_more_documents_are_further_ones(tmp_path: Path) -> None:
    small = ListOps(max_depth=3, max_arguments=4, min_tokens=6, max_tokens=30)
    for name, documents, seed in (("one", 70, 5), ("again", 70, 5), ("more", 100, 5), ("other", 70, 6)):
        write_made_store(tmp_path / name, "listops", small, documents=documents, validation=9, seed=seed)
    assert contents(tmp_path / "one") == contents(tmp_path / "again")
    one, more, other = (texts(TokenStore(tmp_path / name), "listops") for name in ("one", "more", "other"))
    assert more[:70] == one
    assert not set(one[:20]) & set(other[:20])
    # Written down once: other versions make these too.
    assert one[:2] == ["[MAX [MED 7 1 6 ] 6 2 ]", "[MAX 7 [MIN [MED 7 4 ] 4 4 [MED 7 8 ] ] 5 0 ]"]


def test_the_command_writes_and_shows_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "listops", "--out", str(tmp_path / "store"), "--documents", "120", "--seed", "5"]
    words += ["--max-depth", "3", "--max-arguments", "4", "--min-tokens", "6", "--max-tokens", "30"]
    assert main(words) == 0
    assert "in listops-validation" in capsys.readouterr().out
    report = TokenStore(tmp_path / "store").report()
    assert report["sources"]["listops-validation"]["documents"] == 3
    assert report["generator"] == {
        "name": "listops",
        "seed": 5,
        "max_depth": 3,
        "max_arguments": 4,
        "min_tokens": 6,
        "max_tokens": 30,
        "operation_share": 0.25,
    }
    assert main(["data", "inspect", str(tmp_path / "store"), "--json"]) == 0
    sample = json.loads(capsys.readouterr().out)["samples"][0]
    assert sample["label"] == str(evaluated(sample["text"])[0])
    assert main(["data", "verify", str(tmp_path / "store")]) == 0
    # What is there stays.
    before = contents(tmp_path / "store")
    assert main(words) == 78
    assert "never overwritten" in capsys.readouterr().err
    assert contents(tmp_path / "store") == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--documents", "0"], "--documents 0: must be at least 1"),
        (["--validation", "-1"], "--validation -1: must be at least 0"),
        (["--max-depth", "0"], "--max-depth 0: must be 1 to 100"),
        (["--max-arguments", "1"], "--max-arguments 1: must be 2 to"),
        (["--min-tokens", "3"], "--min-tokens 3: must be 4 to"),
        (["--min-tokens", "50", "--max-tokens", "40"], "--min-tokens 50: above --max-tokens 40"),
        (
            ["--max-depth", "2", "--max-arguments", "3"],
            "--max-arguments 3 give at most 17 symbols; use a smaller minimum",
        ),
        (["--max-depth", "1", "--max-arguments", "2", "--min-tokens", "4", "--max-tokens", "4"], None),
        (
            ["--max-depth", "9", "--max-arguments", "2", "--min-tokens", "1000", "--max-tokens", "1001"],
            "none of 20,000 expressions of --max-depth 9 and --max-arguments 2 fits",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str | None
) -> None:
    code = main(["data", "listops", "--out", str(tmp_path / "store"), "--documents", "2", *words])
    assert code == (0 if message is None else 78)
    if message is not None:
        assert message in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


class Copying(Generator):
    """Another one, with what ListOps has not: only the second half counts, and there are no classes."""

    help = "copy letters"
    has_loss_mask = True

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--length", type=int, default=4)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        made = cls()
        made.length = args.length
        return made

    def tokenizer(self) -> TiktokenTokenizer:
        return symbol_tokenizer("copying", (), "[a-z]")

    def settings(self) -> dict[str, Any]:
        return {"length": self.length}

    def make(self, random: Random) -> MadeDocument:
        text = "".join(chr(integer(random, ord("a"), ord("z"))) for _ in range(self.length))
        counts = np.repeat(np.array([0, 1], dtype=np.uint8), self.length + 1)[: 2 * self.length + 1]
        return MadeDocument(text=f"{text}|{text}", counts=counts)


def test_another_generator_is_one_class_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(GENERATORS, "copying", f"{__name__}:Copying")
    assert main(["data", "copying", "--out", str(tmp_path / "store"), "--documents", "9", "--length", "3"]) == 0
    store = TokenStore(tmp_path / "store")
    assert store.classes == {}
    source = store.source("copying")
    for number, text in enumerate(texts(store, "copying")):
        assert re.fullmatch(r"([a-z]{3})\|\1", text)
        start, stop = source.document(number)
        assert source.loss_mask(start + 1, stop).tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert main(["data", "inspect", str(tmp_path / "store")]) == 0
    assert "a loss mask selects the labels that count" in capsys.readouterr().out


def test_every_generator_has_a_command_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    for name in GENERATORS:
        with pytest.raises(SystemExit):
            main(["data", name, "--help"])
        assert "--seed" in capsys.readouterr().out

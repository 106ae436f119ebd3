import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lightscale.config.fields import toml_value
from lightscale.data_pipeline.preparation.corpus import Corpus, DuplicatesConfig, SourceConfig, load_corpus, make_corpus
from lightscale.errors import UserError

GOOD = """
tokenizer = "tiktoken:cl100k_base"
validation = 0.01
duplicates = {near = false}

[sources.wiki]
paths = ["wiki/*.jsonl", "/elsewhere/b.parquet", "python:stdlib"]
language = "en"
weight = 0.75
filters = {size = {min = 200}, stop_words = false}

[sources.novels]
paths = ["novels"]
language = "zh"
weight = 0.25
validation = 0.0
"""


def test_a_corpus_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(GOOD)
    corpus = load_corpus(tmp_path / "c.toml")
    assert list(corpus.sources) == ["wiki", "novels"]
    assert corpus.sources["wiki"].paths == [f"{tmp_path}/wiki/*.jsonl", "/elsewhere/b.parquet", "python:stdlib"]
    assert corpus.weights == {"wiki": 0.75, "novels": 0.25}
    assert (corpus.validation_of("wiki"), corpus.validation_of("novels")) == (0.01, 0.0)
    assert (corpus.duplicates.exact, corpus.duplicates.near) == (True, False)
    # What the work directory keeps of it is all of it.
    assert Corpus.model_validate(corpus.model_dump(mode="json")) == corpus


def test_the_example_in_the_reference_has_every_key_with_its_default(tmp_path: Path, root: Path) -> None:
    page = (root / "docs/reference/corpus-file.md").read_text(encoding="utf-8")
    found = re.search(r"^```toml\n(# corpus\.toml\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    text = found[1]
    (tmp_path / "corpus.toml").write_text(text)
    assert list(load_corpus(tmp_path / "corpus.toml").sources) == ["wiki", "novels", "papers"]
    table = tomllib.loads(text)
    first = table["sources"]["wiki"] | table["sources"]["papers"]
    for section, shown in ((Corpus, table), (DuplicatesConfig, table["duplicates"]), (SourceConfig, first)):
        assert set(shown) == set(section.model_fields)
        for name, field in section.model_fields.items():
            # The key's line, and the lines of comments behind it.
            line = re.search(rf"^(?:{name} =.*|\[{name}\].*)(?:\n +#.*)*", text, re.MULTILINE)
            # [sources.NAME] needs no such line.
            assert name == "sources" or (line is not None and "#" in line[0]), name
            if line is not None and isinstance(field.default, str | int | float):
                assert f"default: {toml_value(field.default)}" in line[0], name


def test_without_weights_there_are_none() -> None:
    corpus = make_corpus({"sources": {"a": {"paths": ["a"]}, "b": {"paths": ["b"]}}}, origin="x")
    assert corpus.weights is None


def test_thirds_are_a_whole() -> None:
    sources = {
        name: {"paths": ["x"], "weight": weight} for name, weight in zip("abc", (0.333, 0.333, 0.334), strict=True)
    }
    assert make_corpus({"sources": sources}, origin="x").weights == {"a": 0.333, "b": 0.333, "c": 0.334}


def with_source(**keys: Any) -> dict[str, Any]:
    return {"sources": {"a": {"paths": ["x"], **keys}}}


def with_weights(**weights: float | None) -> dict[str, Any]:
    return {
        "sources": {
            name: {"paths": ["x"], **({} if weight is None else {"weight": weight})} for name, weight in weights.items()
        }
    }


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            with_weights(a=0.5, b=0.3),
            "weight: 0.5 + 0.3 is 0.8, but weights must add up to 1; use a = 0.625, b = 0.375",
        ),
        (with_weights(a=0.5, b=None), "weight: a has a weight, b not; set it for all sources or for none"),
        (with_weights(a=2.0), "weight: 2 is 2, but weights must add up"),
        (with_source(weight=0.0), "sources.a.weight = 0.0: must be a number > 0"),
        ({}, "sources is missing; it must be a table of NAME = a table"),
        ({"sources": {}}, "sources = {}: must be a table of NAME = a table, not empty"),
        ({"sources": {"a": {}}}, "sources.a.paths is missing; it must be a list of text"),
        (with_source(paths=[]), "sources.a.paths = []: must be a list of text, not empty"),
        (with_source(paths="x"), 'sources.a.paths = "x": must be a list of text'),
        (with_source(langauge="en"), "unknown key sources.a.langauge; did you mean language?"),
        (with_source() | {"tokeniser": "x"}, "unknown key tokeniser; did you mean tokenizer?"),
        (with_source() | {"duplicates": {"fuzzy": True}}, "unknown key duplicates.fuzzy; use one of exact, near"),
        (with_source(language="fr"), 'sources.a.language = "fr": must be "en" or "zh" or "code" or "other"'),
        (with_source(validation=1.0), "sources.a.validation = 1.0: must be a number >= 0 and < 1"),
        (with_source(filters={"size": False}), "sources.a: filters = {size = false}: the table changes"),
        (with_source(language="en", filters={"sice": False}), "sources.a: filter rule 'sice': did you mean 'size'?"),
        (with_source() | {"validation": -0.1}, "validation = -0.1: must be a number >= 0 and < 1"),
        (with_source() | {"tokenizer": "tiktoken:x", "vocab_size": 5}, "vocab_size = 5: tokenizer"),
        (
            with_source() | {"shard_tokens": 100, "chunk_tokens": 64},
            "shard_tokens = 100 is not a multiple of chunk_tokens = 64; use 128",
        ),
        ({"sources": {"a b": {"paths": ["x"]}}}, "source name 'a b'"),
        (
            {"sources": {"a": {"paths": ["x"]}, "a-validation": {"paths": ["y"]}}},
            "sources.a-validation: this name is reserved for the held-out documents of a; use another",
        ),
    ],
)
def test_a_mistake_is_named_by_key_with_what_would_be_right(table: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"^c\.toml: {re.escape(message)}") as caught:
        make_corpus(table, origin="c.toml")
    assert "\n" not in str(caught.value)


def test_every_mistake_gets_a_line() -> None:
    with pytest.raises(UserError) as caught:
        make_corpus(with_source(weight=-1.0, language="xx", text=1), origin="c.toml")
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"sources = [", "not valid TOML"), (b"\xff", "not UTF-8 text"), (None, "cannot read the corpus file .*No such")],
)
def test_a_file_that_is_no_corpus_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "c.toml").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_corpus(tmp_path / "c.toml")

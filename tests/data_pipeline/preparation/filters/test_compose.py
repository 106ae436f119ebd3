"""Filters in a corpus file: what can be listed, in which order they act, and what becomes of a changed text."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from lightscale.data_pipeline.preparation.corpus import make_corpus
from lightscale.data_pipeline.preparation.filters import compose
from lightscale.data_pipeline.preparation.prepare import prepare
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer, load_tokenizer
from lightscale.errors import UserError

LINES = "".join(f"It was the {n}th boat to be seen that year [12] by men of the town.\n" for n in range(6))
PAGE = f"Home\n{LINES}Menu\n"


def judged(filters: Any, text: str, language: str | None = None) -> Any:
    chain = compose(filters, language)
    assert chain is not None
    return pickle.loads(pickle.dumps(chain)).judge(text)


def test_filters_act_in_their_order_on_what_the_one_before_leaves() -> None:
    assert judged("c4", PAGE).text == PAGE.replace("Home\n", "").replace("Menu\n", "").replace("[12]", "").strip()
    assert judged("c4", PAGE).changes == {"c4: line removed": 2, "c4: citation mark removed": 6}
    long = {"mean_line_length": {"min": 55}}
    assert judged([long, "c4"], PAGE).rule == "mean_line_length"
    assert judged(["c4", long], PAGE).rule is None
    assert judged(["c4", long], PAGE + "{ you and me }.").rule == "c4.curly_bracket"
    assert judged(["c4", long], PAGE + "{ you and me }.").text.endswith("}.")  # of a dropped one the text as it was
    assert judged([{"c4": {"min_sentences": 0}}], "Home\nMenu").rule == "c4.nothing_left"
    assert judged([{"c4": {"min_sentences": 7}}], PAGE).score == 6


def test_languages_presets_and_single_rules_are_filters() -> None:
    assert compose({}, None) is None
    assert judged({}, "x", "en").rule == judged(["en"], "x").rule == judged("en", "x").rule == "size"
    assert judged({"size": False, "alphabetic_words": False}, "9", "en").rule == "mean_word_length"
    assert judged([{"en": {"size": False, "alphabetic_words": False}}], "9").rule == "mean_word_length"
    assert judged([{"size": {"min": 3}}], "one two").rule == "size"
    assert judged([{"size": {"min": 3}}], "一二三", "zh").rule is None  # in the units of the language
    assert (
        judged(
            [{"gopher_quality": {"words": {"min": 3}, "stop_words": False, "alphabetic_words": False}}],
            "one boat, gone",
        ).rule
        is None
    )
    verdict = judged("gopher", "one boat")
    assert (verdict.rule, verdict.score) == ("gopher.top_ngrams", None)
    assert judged("gopher_quality", "one boat").score == 2


@pytest.mark.parametrize(
    ("filters", "language", "message"),
    [
        ({"size": False}, None, r"the table changes the rules of a language, and none is set"),
        ("gofer", None, r"filter 'gofer': did you mean 'gopher'\?"),
        ([], None, r"must be a table of rules, a filter's name, or a list of both"),
        ([3], None, r"filters: 3: must be a filter's name or a table NAME = options"),
        ([{"c4": {"min_sentence": 3}}], None, r"filter c4\.min_sentence: did you mean 'min_sentences'\?"),
        ([{"c4": {"min_sentences": "x"}}], None, r'filter c4\.min_sentences = "x": '),
        ([{"gopher": {"size": {"min": 3}}}], None, r"filter rule 'size': "),
        ([{"gopher": 3}], None, r"filter gopher = 3: must be a table"),
        ([{"size": True}, {"xml": True}], None, r"filter rule xml = true: en has no default limits"),
    ],
)
def test_mistakes_are_named(filters: Any, language: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose(filters, language)
    table = {"paths": ["x"], "filters": filters} | ({"language": language} if language else {})
    with pytest.raises(UserError, match=r"^c\.toml: .*" + message):
        make_corpus({"sources": {"a": table}}, origin="c.toml")


def test_a_store_has_the_changed_text_and_the_report_says_so(tmp_path: Path, byte_tokenizer: TiktokenTokenizer) -> None:
    (tmp_path / "bytes" / "tokenizer").mkdir(parents=True)
    byte_tokenizer.save(tmp_path / "bytes" / "tokenizer")
    pages = [PAGE, "Home\nMenu", PAGE + "More [3] of the same.\n"]
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps({"text": page}) + "\n" for page in pages))
    source = {"paths": [str(tmp_path / "pages.jsonl")], "filters": ["c4"]}
    table = {"tokenizer": str(tmp_path / "bytes"), "duplicates": {"near": False}, "sources": {"web": source}}
    report = prepare(make_corpus(table, origin="test"), tmp_path / "store")
    step = report["corpus"]["web"]["stages"]["filter"]
    assert step["dropped"]["c4.sentences"]["examples"] == [{"id": "pages.jsonl@427", "text": "Home\nMenu"}]
    assert step["changed"] == {
        "c4: citation mark removed": {"documents": 2, "times": 13},
        "c4: line removed": {"documents": 2, "times": 4},
    }
    store = TokenStore(tmp_path / "store")
    source_of_store = store.source("web")
    start, stop = source_of_store.document(1)
    text = load_tokenizer(store.path).decode(source_of_store.read(start + 1, stop))
    assert text == judged("c4", pages[2]).text
    assert step["bytes"] == sum(len(judged("c4", pages[index]).text) for index in (0, 2))
    origin = source_of_store.origin(1)
    assert origin is not None
    line = (tmp_path / "pages.jsonl").read_bytes()[origin.first_byte :].splitlines()[0]
    assert json.loads(line)["text"] == pages[2]  # of the whole text

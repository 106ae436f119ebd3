"""The presets beside datatrove's filters: its recorded decisions on small texts; on real ones itself, where it is.

``datatrove_decisions.jsonl`` has texts of five kinds and what datatrove 0.10.1 with spaCy 3.8.18 says of each: none for
kept, else its reason; of what C4's filter keeps a hash of the text.
"""

import hashlib
import importlib.util
import json
import random
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightscale.data_pipeline.preparation.filters import Step, compose
from lightscale.data_pipeline.preparation.filters.field_words import num_sentences, words_of
from lightscale.data_pipeline.preparation.normalise import normalise

DECISIONS = Path(__file__).with_name("datatrove_decisions.jsonl")
FILTERS = ("gopher_quality", "gopher_repetition", "c4", "fineweb")
# What datatrove calls our rules; n-grams have n in their name.
REASONS = {
    "gopher_quality": {
        "gopher_short_doc": "words",
        "gopher_long_doc": "words",
        "gopher_below_avg_threshold": "word_length",
        "gopher_above_avg_threshold": "word_length",
        "gopher_too_many_hashes": "hashes",
        "gopher_too_many_ellipsis": "ellipses",
        "gopher_too_many_bullets": "bullet_lines",
        "gopher_too_many_end_ellipsis": "ellipsis_lines",
        "gopher_below_alpha_threshold": "alphabetic_words",
        "gopher_enough_stop_words": "stop_words",
    },
    "gopher_repetition": {
        "dup_para_frac": "duplicate_paragraphs",
        "dup_para_char_frac": "duplicate_paragraphs",
        "dup_line_frac": "duplicate_lines",
        "dup_line_char_frac": "duplicate_lines",
        **{f"top_{n}_gram": "top_ngrams" for n in (2, 3, 4)},
        **{f"duplicated_{n}_n_grams": "repeated_ngrams" for n in range(5, 11)},
    },
    "c4": {"too_few_sentences": "sentences", "curly_bracket": "curly_bracket", "lorem_ipsum": "lorem_ipsum"},
    "fineweb": {
        "line_punct_ratio": "terminal_punctuation",
        "short_line_ratio": "short_lines",
        "char_dup_ratio": "duplicate_characters",
        "list_ratio": "line_breaks",
    },
}


def made(name: str) -> Step:
    chain = compose([name], None)
    assert chain is not None
    return chain


def recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in DECISIONS.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", FILTERS)
def test_the_presets_decide_as_datatrove_did_and_for_its_reasons(name: str) -> None:
    keep, seen = made(name), Counter[str | None]()
    for document in recorded():
        verdict, theirs = keep.judge(document["text"]), document["datatrove"][name]
        expected = None if theirs is None else f"{name}.{REASONS[name][theirs]}"
        assert verdict.rule == expected, document["id"]
        seen[expected] += 1
        if name == "c4" and theirs is None:
            assert hashlib.sha256(verdict.text.encode()).hexdigest()[:16] == document["c4_sha256"], document["id"]
    assert len(seen) >= 3  # both ways, and for more than one reason
    assert seen[None] > 20


def test_gopher_is_both_of_its_filters() -> None:
    both, repetition, quality = (made(name) for name in ("gopher", "gopher_repetition", "gopher_quality"))
    for document in recorded():
        apart = repetition.judge(document["text"]).rule or quality.judge(document["text"]).rule
        rule = both.judge(document["text"]).rule
        assert (rule is None) == (apart is None)
        assert rule is None or apart is None or rule.split(".")[1] == apart.split(".")[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, world! It's $5.00.", ["Hello", ",", "world", "!", "It", "'s", "$", "5.00", "."]),
        ("don't can't cannot we'll", ["do", "n't", "ca", "n't", "can", "not", "we", "'ll"]),
        ("a well-known thing...", ["a", "well", "-", "known", "thing", "..."]),
        ("U.S. (e.g. Mr. Smith) etc.", ["U.S.", "(", "e.g.", "Mr.", "Smith", ")", "etc", "."]),
        ("see www.example.com/foo?a=b. foo.Bar", ["see", "www.example.com/foo?a=b", ".", "foo", ".", "Bar"]),
        ("f(x):  10km 3.5% <p>", ["f(x", "):", "10", "km", "3.5", "%", "<", "p", ">"]),
        ("中文，测试。 文字！", ["中文，测试", "。", "文字", "！"]),
        ("CANNOT a,b x=y 2-3 12:30", ["CANNOT", "a", ",", "b", "x", "=", "y", "2", "-", "3", "12:30"]),
    ],
)
def test_words_are_those_of_spacy(text: str, words: list[str]) -> None:
    assert words_of(text) == words


@pytest.mark.parametrize(
    ("line", "number"), [("One. Two! Three?", 3), ("e.g. one", 1), ('"One." Two.', 2), ("3.5 of it.", 1), ("a...", 1)]
)
def test_sentences_end_at_marks(line: str, number: int) -> None:
    assert num_sentences(line) == number


def real_documents(folder: Path) -> Iterator[tuple[str, str]]:
    """(kind, text): up to 110 of each of five kinds that this machine has, or Debian's archive."""
    paths = sysconfig.get_paths()
    places = {
        "prose": sorted(Path("/usr/share").glob("doc/*/copyright"))
        + sorted(Path("/usr/share/common-licenses").glob("*")),
        "docs": sorted({Path(str(entry)) for entry in sys.path for entry in Path(entry).glob("*.dist-info/METADATA")}),
        "code": sorted(Path(paths["stdlib"]).glob("*.py")) + sorted(Path(paths["stdlib"]).glob("*/*.py")),
    }
    draw = random.Random(4)
    for kind, found in places.items():
        for path in draw.sample(found, min(110, len(found))):
            text = path.read_text(encoding="utf-8", errors="replace")
            yield kind, text.partition("\n\n")[2] if kind == "docs" else text
    location = Path(__file__).resolve().parents[4] / "tools" / "texts" / "real_text.py"
    spec = importlib.util.spec_from_file_location("real_text", location)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for kind, language in (("web", "en"), ("chinese", "zh")):
        try:
            pages = tool.fetch(language, folder).read_text(encoding="utf-8").splitlines()
        except tool.UnavailableError:
            continue
        for page in draw.sample(pages, 110):
            yield kind, json.loads(page)["text"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_presets_agree_with_datatrove_on_real_text(tmp_path: Path) -> None:
    pytest.importorskip("spacy", reason="datatrove's English words")
    filters = pytest.importorskip("datatrove.pipeline.filters", reason="datatrove is not installed")
    data = pytest.importorskip("datatrove.data")
    theirs = {
        "gopher_quality": filters.GopherQualityFilter(),
        "gopher_repetition": filters.GopherRepetitionFilter(),
        "c4": filters.C4QualityFilter(),
        "fineweb": filters.FineWebQualityFilter(),
    }
    texts = [
        (kind, text)
        for kind, raw in real_documents(tmp_path)
        if 80 < len(text := normalise(raw).text) < 60_000 and text.strip()
    ]
    assert len(texts) > 250
    agreed, kept = Counter[str](), Counter[str]()
    for name in FILTERS:
        own = made(name)
        for _, text in texts:
            document = data.Document(text=text, id="0")
            decision = theirs[name].filter(document) is True
            verdict = own.judge(text)
            kept[name] += decision
            agreed[name] += decision == (verdict.rule is None) and (not decision or verdict.text == document.text)
    shares = {name: agreed[name] / len(texts) for name in FILTERS}
    print(f"{len(texts)} documents {dict(Counter(kind for kind, _ in texts))}: {shares}, kept {dict(kept)}")
    assert all(0.05 * len(texts) < kept[name] < 0.95 * len(texts) for name in FILTERS)
    assert min(shares.values()) >= 0.99, shares

"""Languages, personal data, parts of evaluation sets: what is found, what is not, and what a preparation says of it."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from lightscale.data_pipeline.preparation.corpus import load_corpus, make_corpus
from lightscale.data_pipeline.preparation.filters import compose
from lightscale.data_pipeline.preparation.filters.languages import language_of
from lightscale.data_pipeline.preparation.prepare import PrepareOptions, prepare
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer
from lightscale.errors import UserError

ENGLISH = "The harbour of the old town has changed in many ways since the railway came to it, and so have its boats."
CHINESE = "清晨的港口笼罩着一层薄雾，渔船缓缓驶出码头，发动机的声音在水面上回荡，老城区的街道狭窄而弯曲。"
GERMAN = "Der Hafen der alten Stadt hat sich verändert, seit die Eisenbahn gekommen ist und die Schiffe fort sind."


def judged(filters: Any, text: str) -> Any:
    chain = compose(filters, None)
    assert chain is not None
    return chain.judge(text)


def test_languages_are_told_apart() -> None:
    for text, language in ((ENGLISH, "en"), (CHINESE, "zh"), (GERMAN, "de")):
        assert judged([{"languages": [language]}], text).rule is None
        others = [code for code in ("en", "zh", "de") if code != language]
        dropped = judged([{"languages": others}], text)
        assert dropped.rule == f"languages.{language}"
        assert 0.5 < dropped.score <= 1
    # Of a long text beginning, middle and end are looked at, whichever language has most of them.
    assert judged([{"languages": ["zh"]}], ENGLISH + CHINESE * 400).rule is None
    language, probability = language_of("a port")
    above = {"languages": {"keep": [language], "min_probability": probability + 0.001}}
    assert judged([above], "a port").rule == "languages.uncertain"
    assert judged([above], "a port").score == probability
    with pytest.raises(UserError, match=r'language "english" cannot be detected; use some of .*en'):
        judged([{"languages": ["english"]}], ENGLISH)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("to joe.doe+x@mail.example.com.", "to <EMAIL>."),
        ("请发邮件至joe@example.cn，谢谢", "请发邮件至<EMAIL>，谢谢"),
        ("@decorator x@y user@localhost", None),
        ("from 8.8.8.8, and 93.184.216.34:80", "from <IPV4>, and <IPV4>:80"),
        ("192.168.0.1 127.0.0.1 10.1.2.3 999.1.1.1 1.2.3 1.2.3.4.5", None),
        ("at 2001:4860:4860::8888!", "at <IPV6>!"),
        ("12:30:45 std::vector fe80::1 2024:01:02", None),
        ("+49 30 1234567, (555) 123-4567, 555-123-4567", "<PHONE>, <PHONE>, <PHONE>"),
        ("电话13812345678联系", "电话<PHONE>联系"),
        ("1234567 3.1415926535 2024-01-02 12345678901 x+123456789", None),
        ("card 4111 1111 1111 1111 or 5500-0000-0000-0004", "card <CARD> or <CARD>"),
        ("4111 1111 1111 1112", None),  # another checksum
        ("身份证11010519491231002X号", "身份证<RESIDENT_ID>号"),
        ("110105194912310021", None),
    ],
)
def test_personal_data_is_masked_by_its_form(text: str, masked: str | None) -> None:
    judgement = judged("mask", text)
    assert judgement.rule is None
    assert judgement.text == (text if masked is None else masked)
    assert sum(judgement.changes.values()) == (masked or "").count("<")
    assert judged("mask", judgement.text).text == judgement.text
    assert judged([{"mask": ["ipv6"]}], "a@example.com").text == "a@example.com"


def test_masking_a_long_run_takes_little_time() -> None:
    for run in ("1" * 200_000, "a" * 200_000 + "@", "1 " * 100_000, "2001:" * 40_000, "+1-" * 60_000, "a." * 100_000):
        judged("mask", run)


def test_parts_of_evaluation_sets_are_found(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(40)]
    question = {"q": " ".join(words[:20]), "choices": ["yes it is", " ".join(words[20:33])], "n": 3}
    (tmp_path / "first.jsonl.gz").write_bytes(gzip.compress(f"\n{json.dumps(question)}\n".encode()))
    (tmp_path / "second.txt").write_text(CHINESE)
    filters = [
        {"decontaminate": {"sets": {"one": str(tmp_path / "first.jsonl.gz"), "zh": str(tmp_path / "second.txt")}}}
    ]
    assert judged(filters, "before, " + ", ".join(words[3:16]).upper() + "! after").rule == "decontaminate.one"
    assert judged(filters, " ".join(words[3:18])).score == 3
    assert judged(filters, " ".join(words[3:15])).rule is None  # twelve
    assert judged(filters, " ".join(words[12:24])).rule is None  # over the end of a string
    assert judged(filters, " ".join(words[20:33])).rule == "decontaminate.one"
    assert judged(filters, "他说：" + CHINESE[5:22]).rule == "decontaminate.zh"  # marks are no words
    assert judged(filters, "yes it is " * 20).rule is None
    filters[0]["decontaminate"]["min_ngrams"] = 4
    assert judged(filters, " ".join(words[3:18])).rule is None
    with pytest.raises(UserError, match=r"gone\.json: cannot read the evaluation set"):
        judged([{"decontaminate": {"sets": {"a": "gone.json"}}}], " ".join(words))


def test_a_preparation_accounts_for_all_of_it(tmp_path: Path, byte_tokenizer: TiktokenTokenizer) -> None:
    (tmp_path / "bytes" / "tokenizer").mkdir(parents=True)
    byte_tokenizer.save(tmp_path / "bytes" / "tokenizer")
    (tmp_path / "eval.txt").write_text(ENGLISH)
    texts = [
        GERMAN,
        f"Write to a@example.com. {CHINESE} {CHINESE}",
        f"“{ENGLISH}”",
        "The men of the town have seen it, and it was not the boat that they had.",
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    filters = '["mask", {languages = ["en", "zh"]}, {decontaminate = {sets = {harbour = "eval.txt"}}}]'
    (tmp_path / "corpus.toml").write_text(
        f'tokenizer = "bytes"\nduplicates = {{near = false}}\n[sources.a]\npaths = ["a.jsonl"]\nfilters = {filters}\n'
    )
    corpus = load_corpus(tmp_path / "corpus.toml")
    options = PrepareOptions(keep_removed=tmp_path / "removed", unit_bytes=150)
    step = prepare(corpus, tmp_path / "store", options)["corpus"]["a"]["stages"]["filter"]
    assert {rule: drop["documents"] for rule, drop in step["dropped"].items()} == {
        "decontaminate.harbour": 1,
        "languages.de": 1,
    }
    assert step["documents"] == 2
    assert step["changed"] == {"mask: email": {"documents": 1, "times": 1}}
    with zstandard.ZstdDecompressor().stream_reader(
        (tmp_path / "removed" / "a.jsonl.zst").open("rb"), read_across_frames=True
    ) as packed:
        removed = [json.loads(line) for line in io.TextIOWrapper(packed, encoding="utf-8")]
    assert [(record["rule"], record["text"]) for record in removed] == [
        ("languages.de", texts[0]),
        ("decontaminate.harbour", texts[2]),
    ]
    assert removed[1]["score"] == len(ENGLISH.split()) - 12
    with pytest.raises(UserError, match=r"--keep-removed .*removed: the directory exists"):
        prepare(corpus, tmp_path / "other", options)
    assert not (tmp_path / "other.work").exists()
    # Another evaluation set is another corpus; a missing one is said before anything is written.
    before = corpus.filter_files()
    (tmp_path / "eval.txt").write_text("another")
    assert corpus.filter_files() != before
    (tmp_path / "eval.txt").unlink()
    with pytest.raises(UserError, match=r"eval\.txt: a filter needs this file"):
        prepare(corpus, tmp_path / "other")
    with pytest.raises(UserError, match=r"filter mask\.kinds\.0 = \"mail\""):
        make_corpus({"sources": {"a": {"paths": ["x"], "filters": [{"mask": ["mail"]}]}}}, origin="c.toml")

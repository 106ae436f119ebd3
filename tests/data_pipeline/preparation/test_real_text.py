"""Real English and Chinese pages, from Debian packages, through the whole pipeline."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightscale.data_pipeline.preparation.corpus import make_corpus
from lightscale.data_pipeline.preparation.normalise import normalise
from lightscale.data_pipeline.preparation.prepare import prepare
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.store.verify import verify_store
from lightscale.data_pipeline.tokenizers import load_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
NUM_PAGES = 2000


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with en.jsonl and zh.jsonl."""
    tool = _tool("real_text")
    folder = tmp_path_factory.mktemp("pages")
    for language in ("en", "zh"):
        try:
            tool.fetch(language, folder)
        except tool.UnavailableError as error:
            pytest.skip(f"no real text: {error}")
    return folder


def _tool(name: str) -> ModuleType:
    path = Path(__file__).resolve().parents[3] / "tools" / "texts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepare_pages(pages: Path, out: Path, languages: dict[str, str], **keys: Any) -> dict[str, Any]:
    sources = {name: {"paths": [str(pages / f"{name}.jsonl")], "language": rules} for name, rules in languages.items()}
    return prepare(make_corpus({"vocab_size": 6000, "sources": sources, **keys}, origin="test"), out)


def test_both_languages_pass_by_their_own_rules(pages: Path, tmp_path: Path) -> None:
    report = prepare_pages(pages, tmp_path / "store", {"en": "en", "zh": "zh"})
    store, tokenizer = TokenStore(tmp_path / "store"), load_tokenizer(tmp_path / "store")
    for name in ("en", "zh"):
        stages = report["corpus"][name]["stages"]
        read, written = stages["read"]["documents"], stages["write"]["train"]["documents"]
        lost = [drop["documents"] for stage in stages.values() for drop in stage.get("dropped", {}).values()]
        assert read > NUM_PAGES
        assert read == written + sum(lost)  # every page is accounted for
        assert written > 0.4 * read
        # What is left is a page, from its first to its last character, and the order is that of the file.
        lines = (pages / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        texts = iter([normalise(json.loads(line)["text"]).text for line in lines])
        source = store.source(name)
        for index in range(source.num_documents):
            document = tokenizer.decode(source.read(*source.document(index)))
            assert document in texts  # moves on: what is found later must stand later
    assert 2 < report["sources"]["zh"]["bytes_per_token"] < 6
    assert verify_store(tmp_path / "store", lambda step, done, total: None).faults == []


def is_chinese(text: str) -> bool:
    return sum("\u4e00" <= character <= "\u9fff" for character in text) > 0.3 * len(text)


def test_by_the_rules_of_english_few_chinese_pages_would_pass(pages: Path, tmp_path: Path) -> None:
    """What passes is mostly what nobody has translated yet."""
    kept = {}
    for rules in ("zh", "en"):
        prepare_pages(pages, tmp_path / rules, {"zh": rules})
        source, tokenizer = TokenStore(tmp_path / rules).source("zh"), load_tokenizer(tmp_path / rules)
        documents = [tokenizer.decode(source.read(*source.document(index))) for index in range(source.num_documents)]
        kept[rules] = sum(map(is_chinese, documents))
    assert kept["zh"] > 1000
    assert kept["en"] < 0.1 * kept["zh"]


def test_a_page_in_two_sources_stays_once(pages: Path, tmp_path: Path) -> None:
    (tmp_path / "again.jsonl").write_bytes((pages / "en.jsonl").read_bytes())
    sources = {
        "first": {"paths": [str(pages / "en.jsonl")], "language": "en"},
        "again": {"paths": [str(tmp_path / "again.jsonl")], "language": "en"},
    }
    report = prepare(make_corpus({"vocab_size": 6000, "sources": sources}, origin="test"), tmp_path / "store")
    assert list(report["sources"]) == ["first"]
    stages = report["corpus"]["again"]["stages"]
    assert stages["deduplicate"]["dropped"]["exact duplicate"]["documents"] == stages["filter"]["documents"] > 1000

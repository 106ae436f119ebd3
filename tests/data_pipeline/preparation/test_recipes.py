"""The shipped corpus files, each by `data plan` on a small made-up set of the form that it is for."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lightscale import cli
from lightscale.data_pipeline.preparation.corpus import load_corpus

FOLDER = Path(__file__).parents[3] / "lightscale/configs/corpus"
NUM = 12
ENGLISH = (
    "The {n}th boat came back to the harbour of the old town, and all the men that it had with it were glad.\n"
    "They have seen storms on the way, of which the eldest of them told until the lamps went out.\n"
    "No ship of the line was ever so late as this one, and few have brought more salt and rope with it."
)
CHINESE = (
    "清晨的港口笼罩着一层薄雾，第{n}艘渔船缓缓驶出码头，发动机的声音在水面上回荡。老城区的街道狭窄而弯曲，"
    "两旁的店铺卖着面包、茶叶和各种干货。每逢周末，附近村庄的农民会带着蔬菜水果来到广场，热闹非凡。"
    "灯塔早已拆除，只有那盏旧灯仍然保存在教堂后面的小博物馆里。"
)
CODE = "def boat_{n}(sea, men):\n    for man in men:\n        sea.add(man, {n})\n    return sea\n"


def rows(text: str) -> list[str]:
    return [text.replace("{n}", str(number)) for number in range(NUM)]


def parquet(path: Path, **columns: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def web(folder: Path) -> None:
    ids = [f"<urn:uuid:{number}>" for number in range(NUM)]
    parquet(
        folder / "fineweb-edu/CC-MAIN-2024-10/000_00000.parquet",
        text=[f"Write to a{number}@example.com.\n{text}" for number, text in enumerate(rows(ENGLISH))],
        id=ids, url=ids, language=["en"] * NUM, score=[3.1] * NUM,
    )  # fmt: skip


def skypile(folder: Path) -> None:
    (folder / "skypile").mkdir()
    texts = [*rows(CHINESE), "首页 下一页", ENGLISH]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    (folder / "skypile" / "2020-40_zh_head_0000.jsonl").write_text(lines, encoding="utf-8")


def the_stack(folder: Path) -> None:
    for lang in ("python", "c"):
        hashes = [f"{number:040x}" for number in range(NUM)]
        sizes = list(map(len, rows(CODE)))
        path = folder / f"the-stack/data/{lang}/train-00000-of-00001.parquet"
        parquet(path, content=rows(CODE), hexsha=hashes, lang=[lang] * NUM, size=sizes)


def wikipedia(folder: Path) -> None:
    for language, text in (("en", ENGLISH), ("zh", CHINESE)):
        numbers = [str(number) for number in range(NUM + 1)]
        path = folder / f"wikipedia/20231101.{language}/train-00000-of-00001.parquet"
        parquet(path, id=numbers, url=numbers, title=numbers, text=[*rows(text), "A stub."])


def bilingual(folder: Path) -> None:
    web(folder)
    skypile(folder)


def reviews(folder: Path) -> None:
    for split, label in itertools.product(("train", "test"), ("neg", "pos")):
        own = folder / "aclImdb" / split / label
        own.mkdir(parents=True)
        for number, text in enumerate(rows(ENGLISH)):
            (own / f"{number}_1.txt").write_text(text, encoding="utf-8")


def papers(folder: Path) -> None:
    """Without a header and with quotes that are text, as in the release."""
    (folder / "tsv_data").mkdir()
    for split in ("train", "eval", "test"):
        texts = rows(ENGLISH.replace("\n", " "))
        lines = [f'{number % 2}.0\ta\tb\t"{text}\t{text}"' for number, text in enumerate(texts)]
        (folder / f"tsv_data/new_aan_pairs.{split}.tsv").write_text("\n".join(lines), encoding="utf-8")


# What makes the set, and by source how many documents are sampled and which are dropped.
Found = Mapping[str, tuple[int, Mapping[str, int]]]
ZH = (NUM + 2, {"size": 2})  # a menu, and an English page
SETS: dict[str, tuple[Any, Found]] = {
    "fineweb-edu": (web, {"fineweb-edu": (NUM, {})}),
    "skypile": (skypile, {"skypile": ZH}),
    "the-stack": (the_stack, {"the-stack": (2 * NUM, {})}),
    "wikipedia": (wikipedia, {"wikipedia-en": (NUM + 1, {"size": 1}), "wikipedia-zh": (NUM + 1, {"size": 1})}),
    "bilingual": (bilingual, {"english": (NUM, {}), "chinese": ZH}),
    "lra-text": (reviews, {"imdb": (2 * NUM, {}), "imdb-test": (2 * NUM, {})}),
    "lra-retrieval": (papers, {"aan": (NUM, {}), "aan-eval": (NUM, {}), "aan-test": (NUM, {})}),
}


def test_every_shipped_corpus_file_has_a_set() -> None:
    assert set(SETS) == {path.stem for path in FOLDER.glob("*.toml")}
    assert load_corpus(FOLDER / "bilingual.toml").weights == {"english": 0.666667, "chinese": 0.333333}


@pytest.mark.parametrize("name", SETS)
def test_a_plan_reads_the_form_that_it_is_for(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, expected = SETS[name]
    make(tmp_path)
    text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    # Not every machine has the file of the other one.
    assert 'tokenizer = "tiktoken:cl100k_base"' in text or 'tokenizer = "bytes"' in text
    (tmp_path / "corpus.toml").write_text(text.replace("tiktoken:cl100k_base", "bytes"), encoding="utf-8")
    assert cli.main(["data", "plan", str(tmp_path / "corpus.toml"), "--json"]) == 0
    sources = json.loads(capsys.readouterr().out)["sources"]
    found = {source: (own["sampled_documents"], own["dropped"]) for source, own in sources.items()}
    assert found == {source: (number, dict(dropped)) for source, (number, dropped) in expected.items()}
    assert all(own["problems"] == {} and own["tokens"] > 100 for own in sources.values())

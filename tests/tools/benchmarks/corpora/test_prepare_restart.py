"""The benchmark of restarts: it skips all but the last document, and prepares all of them."""

import json
import random
from pathlib import Path

import pytest


def test_each_way_is_timed_over_the_same_text(tools_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("zstandard", reason="zst files are written by zstandard")
    from benchmarks.corpora import prepare_restart

    documents = tmp_path / "texts.jsonl"
    draw = random.Random(1)
    words = ["the", "of", "and", "to", "in", "that", *("".join(draw.choices("abcdefgh", k=5)) for _ in range(500))]
    texts = ("\n".join(" ".join(draw.choices(words, k=20)) + "." for _ in range(9)) for _ in range(50))
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    *_, figures = prepare_restart.run(documents, repeats=1, tokenizer="ascii")
    assert figures["text_bytes"] == documents.stat().st_size
    assert list(figures["ways"]) == ["zst", "bz2", "gz"]
    for found in figures["ways"].values():
        assert 0 < found["skip_s"][0] < found["prepare_s"][0]
        assert found["skip_megabytes_per_s"] == pytest.approx(figures["text_bytes"] / found["skip_s"][0] / 1e6)
    assert prepare_restart.table(figures).row_count == 3

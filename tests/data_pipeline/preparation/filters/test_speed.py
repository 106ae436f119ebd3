"""How fast the filters are, beside splitting the same text at spaces: printed, and held by a generous limit."""

import pydoc_data.topics
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import pytest

from lightscale.data_pipeline.preparation.filters import make_filter
from lightscale.data_pipeline.preparation.normalise import normalise


def median_s(stage: Callable[[str], object], texts: Sequence[str]) -> float:
    """Processor time over all ``texts``, the median of five."""
    times = []
    for _ in range(5):
        start = time.thread_time()
        for text in texts:
            stage(text)
        times.append(time.thread_time() - start)
    return median(times)


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    """Python's own manual (English), its sources, and the manual with each word made a Chinese character."""
    english = [text for text in pydoc_data.topics.topics.values() if len(text) > 1500]
    code = [path.read_text(encoding="utf-8") for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    chinese = ["".join(chinese_of(word) for word in text.split()) for text in english]
    return {"en": english, "other": english, "code": code, "zh": chinese}


def chinese_of(word: str) -> str:
    """A character for a word; the marks of the sentence stay."""
    character = chr(0x4E00 + int.from_bytes(word.encode()[:6], "little") % 3000)
    return character + {",": "，", ".": "。\n"}.get(word[-1], "")


@pytest.mark.long
@pytest.mark.parametrize("language", ["en", "other", "code", "zh"])
def test_the_whole_filter_is_no_bottleneck(texts: dict[str, list[str]], language: str) -> None:
    own = texts[language]
    num_bytes = sum(len(text.encode()) for text in own)
    keep = make_filter(language)
    split_s, filter_s, normalise_s = (median_s(stage, own) for stage in (str.split, keep, normalise))
    assert sum(keep(text) is None for text in own) > 0.7 * len(own)  # most texts meet all rules
    print(
        f"\n{language}: {num_bytes / len(own):,.0f} bytes a document; filter {num_bytes / filter_s / 1e6:.0f} MB/s, "
        f"{filter_s / split_s:.1f} times str.split; normalise {num_bytes / normalise_s / 1e6:.0f} MB/s"
    )
    # Chinese has no spaces to split at.
    assert language == "zh" or filter_s < 25 * split_s

"""Texts of evaluation sets in a corpus: documents that share n consecutive words with one are dropped.

Words are compared in lower case and without marks; of Chinese each character is a word. GPT-3 (arXiv 2005.14165,
appendix C) compares 13 words.
"""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import Field

from lightscale.config.section import MOST_ENTRIES, Count
from lightscale.data_pipeline.preparation.filters.judgement import FileSection, Judgement
from lightscale.data_pipeline.preparation.filters.repetition import Ngrams
from lightscale.errors import UserError
from lightscale.files import read_regular, unpacked_gzip

_CHINESE = "\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CHINESE}]|[^\W_{_CHINESE}]+")
_CACHED_WORDS = 2**16
_MOST_BYTES = 2**32
"""Of an evaluation set, which is read whole."""


class ContaminationFilter(FileSection):
    """Drops documents that hold a part of an evaluation set; rule: name of the set, score: number of shared n-grams."""

    sets: Annotated[dict[str, str], Field(min_length=1, max_length=MOST_ENTRIES)]
    """Files of the sets, by name: every string in records of .jsonl, .jsonl.gz and .json; other files as one text."""
    n: Annotated[int, Field(ge=2, le=100)] = 13
    """Number of consecutive words to compare. Strings of fewer words are not compared."""
    min_ngrams: Count = 1
    """Drop documents with at least this many n-grams of one set."""

    def files(self) -> list[str]:
        """See ``FileSection``."""
        return list(self.sets.values())

    def with_base(self, base: Path) -> Self:
        """See ``FileSection``."""
        return self.model_copy(update={"sets": {name: str(base / Path(path)) for name, path in self.sets.items()}})

    def judge(self, text: str) -> Judgement:
        """See ``Step``. The first set that a document has a part of is named."""
        hashes = _ngrams(text, self.n)
        for name, path in self.sets.items():
            known = _known(path, self.n)
            found = np.searchsorted(known, hashes)
            found[found == len(known)] = 0
            count = int(np.count_nonzero(known[found] == hashes)) if len(known) else 0
            if count >= self.min_ngrams:
                return Judgement(text, rule=name, score=count)
        return Judgement(text)


def _ngrams(text: str, n: int) -> NDArray[np.uint64]:
    """(words - n + 1,) hashes."""
    words = _WORD.findall(text.lower())
    if len(words) < n:
        return np.empty(0, dtype=np.uint64)
    ngrams = Ngrams(np.array(list(map(_hash, words)), dtype=np.uint64), None)
    ngrams.grow(n)
    return ngrams.hashes


@lru_cache(maxsize=_CACHED_WORDS)
def _hash(word: str) -> int:
    return xxhash.xxh3_64_intdigest(word.encode())


@lru_cache(maxsize=64)
def _known(path: str, n: int) -> NDArray[np.uint64]:
    """(different n-grams,) of a set, sorted."""
    hashes = [_ngrams(text, n) for text in _texts(Path(path))]
    return np.unique(np.concatenate(hashes)) if hashes else np.empty(0, dtype=np.uint64)


def _texts(path: Path) -> Iterator[str]:
    try:
        raw = read_regular(path, what="an evaluation set", most_bytes=_MOST_BYTES, follow_links=True)
    except OSError as error:
        raise UserError(f"{path}: cannot read the evaluation set: {error}") from error
    data = (unpacked_gzip(raw, path, most_bytes=_MOST_BYTES) if path.suffix == ".gz" else raw).decode(errors="replace")
    name = path.name.removesuffix(".gz")
    if not name.endswith((".jsonl", ".json")):
        yield data
        return
    lines = data.splitlines() if name.endswith(".jsonl") else [data]
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield from _strings(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}: line {number} of the evaluation set is not JSON: {error}") from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)

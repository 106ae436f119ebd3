"""The field's English filters, deciding as datatrove's do: Gopher's quality and repetition, FineWeb's.

Their words are those of ``field_words.py``; the README lists differences from the rules of ``rules.py``. ``c4.py`` has
the filter that also removes lines.
"""

import math
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Final

import numpy as np

from lightscale.data_pipeline.preparation.filters.field_words import PUNCTUATION, TERMINAL_PUNCTUATION, words_of
from lightscale.data_pipeline.preparation.filters.repetition import (
    Ngrams,
    passed_ngrams_share,
    top_ngram_share,
)
from lightscale.data_pipeline.preparation.filters.rules import FINEWEB, GOPHER, N_GRAMS, Limits, Outside, Rule

_ENDS = tuple(TERMINAL_PUNCTUATION)
_STOP_WORDS = frozenset(["the", "be", "to", "of", "and", "that", "have", "with"])
_PARAGRAPHS, _LINES = re.compile(r"\n{2,}"), re.compile(r"\n+")
_IDS = np.uint64(0x9E3779B97F4A7C15)


class FieldView:
    """A text as these filters see it. Everything is worked out when a rule first asks for it."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def words(self) -> list[str]:
        """Marks are words."""
        return words_of(self.text)

    @cached_property
    def proper_words(self) -> list[str]:
        """Words that are not all marks."""
        return [word for word in self.words if not PUNCTUATION.issuperset(word)]

    @cached_property
    def lines(self) -> list[str]:
        """All lines, split at every line end of Unicode."""
        return self.text.splitlines()

    @cached_property
    def filled_lines(self) -> list[str]:
        """Lines that are not blank, with the spaces around them."""
        return [line for line in self.text.split("\n") if line.strip()]

    def ngrams(self) -> Ngrams:
        """Of all words, from n = 1 on."""
        numbers: dict[str, int] = {}
        ids = np.array([numbers.setdefault(word, len(numbers)) for word in self.words], dtype=np.uint64)
        # Small numbers would meet in sums of products; spread, they do so with a chance of 2^-64.
        ids = (ids + np.uint64(1)) * _IDS
        return Ngrams(ids ^ (ids >> np.uint64(29)), np.array(list(map(len, self.words)), dtype=np.int64))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.inf


def _repeated(parts: list[str], text: str) -> tuple[float, float]:
    """Shares of ``parts`` that came before: of their number, and of the characters of ``text``."""
    different = set(parts)
    characters = sum(map(len, parts)) - sum(map(len, different))
    return (len(parts) - len(different)) / len(parts), _share(characters, len(text))


def _drops_repeated(parts: Callable[[FieldView], list[str]]) -> Callable[[FieldView, Limits], bool]:
    def drops(view: FieldView, limits: Limits) -> bool:
        share, characters = _repeated(parts(view), view.text)
        return share > limits["max"] or characters > limits["max_characters"]

    return drops


def _top_ngrams(view: FieldView, limits: Limits) -> bool:
    ngrams, characters = view.ngrams(), len(view.text)
    return any(top_ngram_share(ngrams, int(n), characters) > limits[n] for n in sorted(limits, key=int))


def _repeated_ngrams(view: FieldView, limits: Limits) -> bool:
    ngrams, characters = view.ngrams(), len(view.text)
    return any(passed_ngrams_share(ngrams, int(n), characters, limits[n]) > limits[n] for n in sorted(limits, key=int))


def _line_share(view: FieldView, fits: Callable[[str], bool]) -> float:
    return _share(sum(map(fits, view.lines)), len(view.lines))


def _alphabetic_share(view: FieldView) -> float:
    return _share(sum(any(map(str.isalpha, word)) for word in view.words), len(view.words))


def _short_lines(view: FieldView, limits: Limits) -> bool:
    short = sum(len(line) <= limits["characters"] for line in view.filled_lines)
    return _share(short, len(view.filled_lines)) > limits["max"]


_QUALITY: tuple[Rule[FieldView], ...] = (
    Rule(
        name="words",
        drops=Outside[FieldView](lambda view: len(view.proper_words)),
        effect="with fewer or more words that are not all punctuation",
        source=GOPHER,
        limits=("min", "max"),
    ),
    Rule(
        name="word_length",
        drops=Outside[FieldView](lambda view: _share(sum(map(len, view.proper_words)), len(view.proper_words))),
        effect="whose words that are not all punctuation have fewer or more characters on average",
        source=GOPHER,
        limits=("min", "max"),
    ),
    Rule(
        name="hashes",
        drops=Outside[FieldView](lambda view: _share(view.text.count("#"), len(view.words))),
        effect="with more `#` per word, where punctuation marks are words",
        source=GOPHER,
        limits=("max",),
    ),
    Rule(
        name="ellipses",
        drops=Outside[FieldView](lambda view: _share(view.text.count("...") + view.text.count("…"), len(view.words))),
        effect="with more ellipses per word",
        source=GOPHER,
        limits=("max",),
    ),
    Rule(
        name="bullet_lines",
        drops=Outside[FieldView](lambda view: _line_share(view, lambda line: line.lstrip().startswith(("•", "-")))),
        effect="with a larger share of lines, blank ones too, that begin with `•` or `-`",
        source=GOPHER,
        limits=("max",),
    ),
    Rule(
        name="ellipsis_lines",
        drops=Outside[FieldView](lambda view: _line_share(view, lambda line: line.rstrip().endswith(("...", "…")))),
        effect="with a larger share of lines, blank ones too, that end with an ellipsis",
        source=GOPHER,
        limits=("max",),
    ),
    Rule(
        name="alphabetic_words",
        drops=Outside[FieldView](_alphabetic_share),
        effect="with a smaller share of words that have a letter, where punctuation marks are words",
        source=GOPHER,
        limits=("min",),
    ),
    Rule(
        name="stop_words",
        drops=Outside[FieldView](lambda view: len(_STOP_WORDS.intersection(view.words))),
        effect="with fewer different words of: the, be, to, of, and, that, have, with",
        source=GOPHER,
        limits=("min",),
    ),
)
_REPETITION: tuple[Rule[FieldView], ...] = (
    Rule(
        name="duplicate_paragraphs",
        drops=_drops_repeated(lambda view: _PARAGRAPHS.split(view.text.strip())),
        effect="with a larger share of paragraphs that came before, or of characters in them",
        source=GOPHER,
        limits=("max", "max_characters"),
    ),
    Rule(
        name="duplicate_lines",
        drops=_drops_repeated(lambda view: _LINES.split(view.text)),
        effect="with a larger share of lines that came before, or of characters in them",
        source=GOPHER,
        limits=("max", "max_characters"),
    ),
    Rule(
        name="top_ngrams",
        drops=_top_ngrams,
        effect="whose most frequent n-gram, its spaces too, holds a larger share of all characters, for any n",
        source=GOPHER,
        limits=N_GRAMS,
    ),
    Rule(
        name="repeated_ngrams",
        drops=_repeated_ngrams,
        effect="with a larger share of all characters in n-grams that came before, passed one after the other",
        source=GOPHER,
        limits=N_GRAMS,
    ),
)
_FINEWEB: tuple[Rule[FieldView], ...] = (
    Rule(
        name="terminal_punctuation",
        drops=Outside[FieldView](
            lambda view: _share(sum(line.endswith(_ENDS) for line in view.filled_lines), len(view.filled_lines))
        ),
        effect="with a smaller share of lines that end with a mark that ends sentences, in any script",
        source=FINEWEB,
        limits=("min",),
    ),
    Rule(
        name="short_lines",
        drops=_short_lines,
        effect="with a larger share of lines of at most `characters`",
        source=FINEWEB,
        limits=("characters", "max"),
    ),
    Rule(
        name="duplicate_characters",
        drops=Outside[FieldView](lambda view: _repeated(view.filled_lines, view.text.replace("\n", ""))[1]),
        effect="with a larger share of characters in lines that came before",
        source=FINEWEB,
        limits=("max",),
    ),
    Rule(
        name="line_breaks",
        drops=Outside[FieldView](lambda view: _share(view.text.count("\n"), len(view.words))),
        effect="with more line breaks per word, where punctuation marks are words",
        source=FINEWEB,
        limits=("max",),
    ),
)

_QUALITY_LIMITS: Mapping[str, Limits] = {
    "words": {"min": 50, "max": 100_000},
    "word_length": {"min": 3, "max": 10},
    "hashes": {"max": 0.1},
    "ellipses": {"max": 0.1},
    "bullet_lines": {"max": 0.9},
    "ellipsis_lines": {"max": 0.3},
    "alphabetic_words": {"min": 0.8},
    "stop_words": {"min": 2},
}
_REPETITION_LIMITS: Mapping[str, Limits] = {
    "duplicate_paragraphs": {"max": 0.3, "max_characters": 0.2},
    "duplicate_lines": {"max": 0.3, "max_characters": 0.2},
    "top_ngrams": {"2": 0.20, "3": 0.18, "4": 0.16},
    "repeated_ngrams": {"5": 0.15, "6": 0.14, "7": 0.13, "8": 0.12, "9": 0.11, "10": 0.10},
}
_FINEWEB_LIMITS: Mapping[str, Limits] = {
    "terminal_punctuation": {"min": 0.12},
    "short_lines": {"characters": 30, "max": 0.67},
    "duplicate_characters": {"max": 0.01},
    "line_breaks": {"max": 0.3},
}

PRESETS: Final[Mapping[str, tuple[tuple[Rule[FieldView], ...], Mapping[str, Limits]]]] = {
    "gopher_quality": (_QUALITY, _QUALITY_LIMITS),
    "gopher_repetition": (_REPETITION, _REPETITION_LIMITS),
    # Repetition first, as those do who use both: most of what it drops is not looked at twice.
    "gopher": ((*_REPETITION, *_QUALITY), {**_REPETITION_LIMITS, **_QUALITY_LIMITS}),
    "fineweb": (_FINEWEB, _FINEWEB_LIMITS),
}
"""Rules in the order in which they are tried, and their limits."""

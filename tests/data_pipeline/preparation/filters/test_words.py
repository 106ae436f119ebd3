"""Words and n-grams as arrays, against strings, counters and loops."""

import re
from collections import Counter

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from lightscale.data_pipeline.preparation.filters.document import DocumentView
from lightscale.data_pipeline.preparation.filters.repetition import repeated_ngrams_exceed, top_ngram_exceeds
from lightscale.data_pipeline.preparation.filters.words import Words
from lightscale.data_pipeline.preparation.normalise import normalise

TEXTS = st.one_of(
    st.text(max_size=80),
    st.text(alphabet="ab \n字é-1\u3000", max_size=80),
    # Words that differ in one byte near the borders of what is compared together.
    st.lists(st.sampled_from(["x" * 7, "x" * 8, "x" * 9, "x" * 15 + "y", "x" * 16, "x" * 17, "x" * 30 + "y"])).map(
        " ".join
    ),
).map(lambda text: normalise(text).text)


def plain_words(text: str) -> list[str]:
    return [word for word in re.split("[ \t\n\f]+", text) if word]


@given(text=TEXTS)
@example(text="")
@example(text=" \n ")
@example(text="a")
def test_words_are_what_stands_between_spaces(text: str) -> None:
    expected = plain_words(text)
    words = Words(text)
    assert len(words) == len(expected)
    assert words.characters.tolist() == [len(word) for word in expected]
    assert words.num_with_letter == sum(any(map(str.isalpha, word)) for word in expected)
    ids = words.ids.tolist()
    assert len(set(ids)) == len(set(expected))
    assert len(set(zip(ids, expected, strict=True))) == len(set(expected))


def test_a_word_has_the_same_id_wherever_it_stands() -> None:
    for word in ("a", "x" * 8, "x" * 9, "x" * 16, "x" * 40, "字" * 20):
        alone = Words(word).ids[0]
        for before in ("", "b ", "\n\n字 ", "y" * 31 + " "):
            assert Words(f"{before}{word} after").ids[len(before.split())] == alone


@given(text=TEXTS)
def test_chinese_characters_are_found(text: str) -> None:
    characters = DocumentView(text, "Chinese character").chinese_characters
    assert "".join(map(chr, characters.tolist())) == "".join(
        re.findall("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U000323af]", text)
    )


WORDS = st.lists(st.sampled_from(["a", "bb", "ccc", "d", "ee"]), max_size=40)
LIMITS = st.floats(0, 1)


@given(words=WORDS, limits=st.dictionaries(st.integers(1, 5), LIMITS, min_size=1))
def test_the_top_ngram_is_that_of_a_counter(words: list[str], limits: dict[int, float]) -> None:
    def exceeds(n: int, limit: float) -> bool:
        counts = Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))
        most = max(counts.values(), default=0)
        longest = max((len("".join(gram)) for gram, count in counts.items() if count == most), default=0)
        return most > 1 and most * longest > limit * len("".join(words))

    ngrams = DocumentView(" ".join(words), "word").ngrams()
    assert top_ngram_exceeds(ngrams, limits) == any(exceeds(n, limit) for n, limit in limits.items())


@given(words=WORDS, limits=st.dictionaries(st.integers(1, 8), LIMITS, min_size=1))
def test_repeated_ngrams_are_those_of_a_loop(words: list[str], limits: dict[int, float]) -> None:
    def exceeds(n: int, limit: float) -> bool:
        seen: set[tuple[str, ...]] = set()
        covered: set[int] = set()
        for start in range(len(words) - n + 1):
            gram = tuple(words[start : start + n])
            if gram in seen:
                covered |= set(range(start, start + n))
            seen.add(gram)
        return sum(len(words[place]) for place in covered) > limit * len("".join(words))

    ngrams = DocumentView(" ".join(words), "word").ngrams()
    assert repeated_ngrams_exceed(ngrams, limits) == any(exceeds(n, limit) for n, limit in limits.items())


@given(text=st.text(alphabet="一二三", max_size=40), limits=st.dictionaries(st.integers(1, 6), LIMITS, min_size=1))
def test_characters_count_like_words_of_one_character(text: str, limits: dict[int, float]) -> None:
    characters = DocumentView("，".join(text), "Chinese character")
    words = DocumentView(" ".join(text), "word")
    assert top_ngram_exceeds(characters.ngrams(), limits) == top_ngram_exceeds(words.ngrams(), limits)
    assert repeated_ngrams_exceed(characters.ngrams(), limits) == repeated_ngrams_exceed(words.ngrams(), limits)
    assert characters.num_units == words.num_units == len(text)


def test_a_long_text_is_judged_by_its_own_characters() -> None:
    generator = np.random.default_rng(0)
    words = [f"w{number}" for number in generator.integers(0, 10**6, 50_000)]
    assert not repeated_ngrams_exceed(DocumentView(" ".join(words), "word").ngrams(), {5: 0.0001})
    twice = words + words[:10_000]
    assert repeated_ngrams_exceed(DocumentView(" ".join(twice), "word").ngrams(), {5: 0.16, 10: 0.16})
    assert not repeated_ngrams_exceed(DocumentView(" ".join(twice), "word").ngrams(), {5: 0.18, 10: 0.18})

"""MinHash on pairs of real text, against its formula, an oracle written plainly, and datasketch."""

import re
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import datasketch
import numpy as np
import pytest
from numpy.typing import NDArray

from lightscale.data_pipeline.preparation.dedup import NUM_BANDS, NUM_HASHES, ROWS_PER_BAND, band_keys, signatures
from lightscale.data_pipeline.preparation.dedup import minhash as minhash_module

NUM_PAIRS = 6000
WINDOW_TOKENS = 300
Ids = NDArray[np.uint32]


def shingles(ids: Ids) -> set[tuple[int, ...]]:
    values = ids.tolist()
    return {tuple(values[start : start + 5]) for start in range(len(values) - 4)}


def jaccard(first: Ids, second: Ids) -> float:
    a, b = shingles(first), shingles(second)
    return len(a & b) / len(a | b)


def caught_with(similarity: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 - (1 - similarity**8) ** 14


@dataclass(frozen=True, kw_only=True)
class Pairs:
    first: list[Ids]
    second: list[Ids]
    similarity: NDArray[np.float64]
    """True Jaccard similarity of the sets of 5-grams."""


@pytest.fixture(scope="module")
def windows() -> list[Ids]:
    """Parts of the standard library's sources, a word or a sign a token."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    ids: list[Ids] = []
    for path in paths:
        tokens = re.findall(r"\w+|[^\w\s]", path.read_text(encoding="utf-8", errors="replace"))
        hashed = np.array([zlib.crc32(token.encode()) >> 1 for token in tokens], dtype=np.uint32)
        ids += [hashed[start : start + WINDOW_TOKENS] for start in range(0, len(hashed) - 99, WINDOW_TOKENS)]
    return ids


@pytest.fixture(scope="module")
def pairs(windows: list[Ids]) -> Pairs:
    """Windows, and the same with tokens of another window in places: few to nearly all of it."""
    generator = np.random.default_rng(20)
    first, second = [], []
    for number in range(NUM_PAIRS):
        original, other = (windows[index] for index in generator.integers(0, len(windows), 2))
        edited = original.copy()
        # Mostly few edits, so that all similarities come about.
        num_edits = int(len(edited) * generator.random() ** 3 / 4) if number % 4 else 1
        for place in generator.integers(0, len(edited), num_edits):
            edited[place] = other[place % len(other)]
        if number % 3 == 0:
            edited = edited[: int(len(edited) * generator.uniform(0.1, 1))]
        first.append(original)
        second.append(edited)
    similarity = [jaccard(a, b) for a, b in zip(first, second, strict=True)]
    return Pairs(first=first, second=second, similarity=np.array(similarity))


@pytest.fixture(scope="module")
def agreements(pairs: Pairs) -> NDArray[np.bool_]:
    """(pairs, 112): where the two signatures agree."""
    agree: NDArray[np.bool_] = signatures(pairs.first) == signatures(pairs.second)
    return agree


@pytest.fixture(scope="module")
def caught(pairs: Pairs) -> NDArray[np.bool_]:
    """(pairs,): whether one band or more agrees."""
    same = band_keys(signatures(pairs.first)) == band_keys(signatures(pairs.second))
    result: NDArray[np.bool_] = same.any(axis=1)
    return result


def test_near_duplicates_are_found(pairs: Pairs, caught: NDArray[np.bool_]) -> None:
    near = (pairs.similarity >= 0.87) & (pairs.similarity < 1)
    assert near.sum() > 500
    assert caught[near].mean() >= 0.98
    assert caught[pairs.similarity == 1].all()


def test_different_texts_are_kept_apart(windows: list[Ids], pairs: Pairs, caught: NDArray[np.bool_]) -> None:
    far = pairs.similarity <= 0.25
    assert far.sum() > 500
    assert caught[far].mean() <= 0.001
    # Every window with every other: what they merge must be alike.
    keys = band_keys(signatures(windows))
    num_merged_wrongly, num_far = 0, 0
    for band in range(NUM_BANDS):
        order = np.argsort(keys[:, band])
        for one, next_one in pairwise(order):
            if keys[one, band] == keys[next_one, band]:
                num_merged_wrongly += jaccard(windows[one], windows[next_one]) <= 0.25
    for one in range(0, len(windows) - 1, 7):
        num_far += jaccard(windows[one], windows[one + 1]) <= 0.25
    assert num_far > 100  # the windows are different texts, so the pairs are millions
    assert num_merged_wrongly <= 0.001 * len(windows)


def test_the_curve_is_that_of_the_formula(pairs: Pairs, caught: NDArray[np.bool_]) -> None:
    edges = np.linspace(0, 1, 11)
    seen = 0
    for low, high in pairwise(edges):
        within = (pairs.similarity >= low) & (pairs.similarity < high)
        expected = caught_with(pairs.similarity[within])
        deviation = np.sqrt((expected * (1 - expected)).sum())
        assert abs(caught[within].sum() - expected.sum()) <= 4 * deviation + 0.5, (low, high, within.sum())
        seen += int(within.sum() >= 100)
    assert seen >= 8  # no bin is right by being empty


def test_agreements_are_independent_coin_throws(pairs: Pairs, agreements: NDArray[np.bool_]) -> None:
    similarity = pairs.similarity
    counts = agreements.sum(axis=1)
    variance = NUM_HASHES * similarity * (1 - similarity)
    some = variance > 1
    normal = (counts[some] - NUM_HASHES * similarity[some]) / np.sqrt(variance[some])
    num = int(some.sum())
    assert num > 2000
    assert abs(normal.mean()) < 4 / np.sqrt(num) + 0.02
    assert abs(normal.var() - 1) < 4 * np.sqrt(2 / num) + 0.02


def test_datasketch_finds_as_many_with_the_same_bands(pairs: Pairs, agreements: NDArray[np.bool_]) -> None:
    some = np.flatnonzero((pairs.similarity > 0.4) & (pairs.similarity < 0.95))[:500]
    theirs = np.array(
        [[minhash.hashvalues for minhash in map(_datasketch, (pairs.first[pair], pairs.second[pair]))] for pair in some]
    )
    their_agreements = theirs[:, 0] == theirs[:, 1]
    our_errors = agreements[some].mean(axis=1) - pairs.similarity[some]
    their_errors = their_agreements.mean(axis=1) - pairs.similarity[some]
    assert np.sqrt((our_errors**2).mean()) < 1.15 * np.sqrt((their_errors**2).mean())

    def found(agree: NDArray[np.bool_]) -> NDArray[np.bool_]:
        result: NDArray[np.bool_] = agree.reshape(-1, NUM_BANDS, ROWS_PER_BAND).all(axis=2).any(axis=1)
        return result

    # Two samples of the same chances differ by the square root of twice their variance.
    expected = caught_with(pairs.similarity[some])
    deviation = np.sqrt(2 * (expected * (1 - expected)).sum())
    assert abs(int(found(agreements[some]).sum()) - int(found(their_agreements).sum())) <= 4 * deviation


def _datasketch(ids: Ids) -> datasketch.MinHash:
    minhash = datasketch.MinHash(num_perm=NUM_HASHES, seed=3)
    minhash.update_batch([np.array(shingle, dtype=np.uint32).tobytes() for shingle in sorted(shingles(ids))])
    return minhash


def plain_signature(ids: Sequence[int]) -> list[int]:
    """The definition, number by number."""
    padded = [*ids, *[2**32 - 1] * (5 - len(ids))]
    mask = 2**64 - 1
    hashes = set()
    for start in range(len(padded) - 4):
        value = minhash_module._SEED
        for token in padded[start : start + 5]:
            value = (value * 0x9E3779B97F4A7C15 + token) & mask
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
        hashes.add((value ^ value >> 31) >> 32)
    functions = zip(minhash_module._FACTORS.tolist(), minhash_module._OFFSETS.tolist(), strict=True)
    return [min((a * value + b) % 2**32 for value in hashes) for a, b in functions]


@pytest.mark.parametrize("block", [7, 64, 2**16])
def test_signatures_are_what_their_definition_says(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(minhash_module, "_SHINGLES_AT_ONCE", block)
    generator = np.random.default_rng(3)
    lengths = [*range(9), 200, 0, 63, 64, 65, 5, 30]
    documents = [generator.integers(0, 2**32 - 1, length, dtype=np.uint32) for length in lengths]
    assert signatures(documents).tolist() == [plain_signature(ids.tolist()) for ids in documents]


def test_signatures_do_not_depend_on_what_else_is_in_the_list(windows: list[Ids]) -> None:
    some = [windows[0], *windows[:200], windows[1][:3], np.concatenate(windows[:300]), windows[2]]
    together = signatures(some)
    assert together.shape == (len(some), NUM_HASHES)
    for index in (0, 1, 150, 201, 202, 203):
        np.testing.assert_array_equal(together[index], signatures([some[index]])[0])
    assert signatures([]).shape == (0, NUM_HASHES)
    assert band_keys(signatures([])).shape == (0, NUM_BANDS)


def test_documents_of_fewer_than_five_tokens_agree_with_their_equals_only() -> None:
    documents = [[], [1], [1, 2], [1, 2, 0], [1, 2, 3, 4], [2, 1], [1, 2, 3, 4, 5], [1, 2], []]
    keys = band_keys(signatures([np.array(ids, dtype=np.uint32) for ids in documents]))
    agree = (keys[:, None] == keys[None, :]).any(axis=2)
    expected = np.array([[one == other for other in documents] for one in documents])
    np.testing.assert_array_equal(agree, expected)


def test_repeating_a_text_changes_only_the_seam(windows: list[Ids]) -> None:
    once, often = windows[5], np.concatenate([windows[5]] * 40)
    assert jaccard(once, often) > 0.98
    assert (signatures([once]) == signatures([often])).mean() > 0.9


def test_a_band_key_stands_for_its_rows_and_its_band() -> None:
    rows = np.zeros((3, NUM_HASHES), dtype=np.uint32)
    rows[1, 0] = 1  # the first row of band 0
    rows[2, -1] = 1  # the last row of band 13
    keys = band_keys(rows)
    assert len(np.unique(keys[0])) == NUM_BANDS  # equal rows in other bands have other keys
    assert ((keys[0] != keys[1]) == (np.arange(NUM_BANDS) == 0)).all()
    assert ((keys[0] != keys[2]) == (np.arange(NUM_BANDS) == 13)).all()
    swapped = np.zeros((1, NUM_HASHES), dtype=np.uint32)
    swapped[0, 1] = 1
    assert band_keys(swapped)[0, 0] != keys[1, 0]


def test_keys_are_the_same_for_ever() -> None:
    """Work that was begun with one version continues with the next, so this number may not change."""
    documents = [np.arange(start, start + 50, dtype=np.uint32) for start in range(20)]
    assert zlib.crc32(band_keys(signatures(documents)).astype("<u8").tobytes()) == 899_176_685


def test_keys_are_spread_evenly(windows: list[Ids]) -> None:
    keys = band_keys(signatures(windows))
    shares = np.bincount((keys >> np.uint64(60)).ravel().astype(np.int64), minlength=16) / keys.size
    np.testing.assert_allclose(shares, 1 / 16, atol=0.01)

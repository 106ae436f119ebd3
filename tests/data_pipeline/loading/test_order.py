import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightscale.data_pipeline.loading.order import RESOLUTIONS, Mixture, Permutation
from lightscale.errors import UserError


def whole_order(n: int, *, seed: int = 0, epoch: int = 0, source: str = "s") -> list[int]:
    windows: list[int] = Permutation(n, seed=seed, epoch=epoch, source=source)(np.arange(n)).tolist()
    return windows


def plain_window(index: int, n: int, *, seed: int, epoch: int, source: str) -> int:
    """The Feistel network of ``Permutation`` in Python's own integers."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{source}".encode(), digest_size=48).digest()
    base, image = math.isqrt(n - 1) + 1, index
    while True:
        left, right = divmod(image, base)
        for start in range(0, 48, 8):
            bits = right ^ int.from_bytes(digest[start : start + 8], "little")
            bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
            left, right = right, (left + ((bits ^ bits >> 31) >> 32)) % base
        image = left * base + right
        if image < n:
            return image


def samples_of(mixture: Mixture, samples: Iterable[int]) -> list[tuple[str, int]]:
    """(source, how many samples it gave before) of each."""
    sources, counts = mixture(np.array(list(samples)))
    return list(zip([mixture.names[source] for source in sources.tolist()], counts.tolist(), strict=True))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 10, 99, 100, 101, 1000, 65_536, 65_537])
@pytest.mark.parametrize("seed", [0, 1, 2**70])
def test_every_window_comes_exactly_once(n: int, seed: int) -> None:
    assert sorted(whole_order(n, seed=seed)) == list(range(n))


@given(n=st.integers(1, 2**62), seed=st.integers(0, 2**64), indices=st.lists(st.integers(0, 2**62), min_size=1))
def test_large_numbers_of_windows_are_shuffled_too(n: int, seed: int, indices: list[int]) -> None:
    chosen = list({index % n for index in indices})
    windows = Permutation(n, seed=seed, epoch=3, source="s")(np.array(chosen)).tolist()
    assert all(0 <= window < n for window in windows)
    assert len(set(windows)) == len(chosen)
    assert windows == [plain_window(index, n, seed=seed, epoch=3, source="s") for index in chosen]


def test_the_order_is_the_same_in_every_version() -> None:
    """Runs resume with these: a change here changes the data of every run that exists."""
    assert whole_order(10) == [2, 3, 4, 1, 8, 5, 9, 7, 0, 6]
    # A square: its root is the base, and the base of one more number is the next.
    assert whole_order(9) == [1, 2, 8, 7, 3, 5, 6, 0, 4]
    order = Permutation(36_600_000, seed=17, epoch=3, source="stdlib")
    assert order(np.array([0, 1, 2, 36_599_999])).tolist() == [9261296, 17940833, 30604813, 10060207]


def test_seed_epoch_and_source_each_give_another_order() -> None:
    orders = [
        whole_order(50),
        whole_order(50, seed=1),
        whole_order(50, epoch=1),
        whole_order(50, source="t"),
    ]
    assert all(first != second for first, second in itertools.combinations(orders, 2))


def test_all_orders_of_four_windows_are_about_equally_frequent() -> None:
    counts = Counter(tuple(whole_order(4, seed=seed)) for seed in range(4800))
    assert len(counts) == 24
    # 200 expected of each; the standard deviation is 14.
    assert max(abs(count - 200) for count in counts.values()) < 75


def test_neighbours_are_scattered() -> None:
    order = np.array(whole_order(10_000))
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 0.05  # five standard deviations of a random order
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05


def test_indices_outside_are_refused() -> None:
    order = Permutation(10, seed=0, epoch=0, source="s")
    for index in (-1, 10):
        with pytest.raises(IndexError):
            order(np.array([3, index]))
    with pytest.raises(ValueError, match="at least 1"):
        Permutation(0, seed=0, epoch=0, source="s")


WEIGHTS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=3),
    st.one_of(st.integers(1, 9).map(float), st.floats(1e-3, 1e6)),
    min_size=1,
    max_size=8,
)


@given(weights=WEIGHTS, num_samples=st.integers(1, 300))
def test_every_source_stays_within_one_sample_of_its_share(weights: dict[str, float], num_samples: int) -> None:
    mixture = Mixture(weights, resolutions=RESOLUTIONS[:1])
    shares = {name: Fraction(part, mixture.period) for name, part in zip(mixture.names, mixture.parts, strict=True)}
    for name, weight in weights.items():
        # Half a part of rounding, and what the smallest sources are raised to one part takes from the others.
        exact = weight / sum(weights.values())
        assert abs(float(shares[name]) - exact) <= (len(weights) + 1) / RESOLUTIONS[0]
    seen: Counter[str] = Counter()
    for sample, (name, count) in enumerate(samples_of(mixture, range(num_samples))):
        assert count == seen[name]
        seen[name] += 1
        assert mixture.counts(sample + 1) == {name: seen[name] for name in mixture.names}
        assert all(abs(seen[other] - shares[other] * (sample + 1)) < 1 for other in mixture.names)


@given(weights=WEIGHTS, start=st.integers(0, 10**12))
def test_far_samples_are_found_without_the_ones_before(weights: dict[str, float], start: int) -> None:
    mixture = Mixture(weights, resolutions=RESOLUTIONS[:1])
    counts = mixture.counts(start)
    for name, count in samples_of(mixture, range(start, start + 20)):
        assert count == counts[name]
        counts[name] += 1


def test_the_bound_holds_for_a_whole_long_period() -> None:
    mixture = Mixture({"a": 0.9, **{f"small {number}": 0.1 / 37 for number in range(37)}, "odd": 0.0123456})
    sources, _ = mixture(np.arange(mixture.period))
    assert mixture.period > 1_000_000
    samples = np.arange(1, mixture.period + 1)
    for source, part in enumerate(mixture.parts):
        counts = np.cumsum(sources == source)
        assert (np.abs(counts * mixture.period - part * samples) < mixture.period).all()


@pytest.mark.parametrize("small", [1e-5, 1e-6, 3.14159e-3])
def test_weights_hold_to_a_millionth(small: float) -> None:
    mixture = Mixture({"a": 0.6 - small, "b": 0.4, "small": small})
    counts = mixture.counts(10**9)
    assert abs(counts["small"] / 10**9 - small) < 1e-6
    assert abs(counts["b"] / 10**9 - 0.4) < 1e-6


def test_shares_that_are_whole_anyway_keep_the_short_period() -> None:
    assert Mixture({"a": 0.99, "b": 0.01}).period == 100
    assert Mixture({"a": 1, "b": 1, "c": 5}).period == 7


def test_mixing_is_the_same_in_every_version() -> None:
    mixture = Mixture({"zh": 3, "code": 1, "en": 6})
    expected = "en0 en1 zh0 en2 zh1 en3 en4 code0 en5 zh2"
    assert " ".join(f"{name}{count}" for name, count in samples_of(mixture, range(10))) == expected
    assert (mixture(np.arange(10, 14))[1] - mixture(np.arange(4))[1]).tolist() == [6, 6, 3, 6]


def test_the_order_of_the_weights_and_their_unit_do_not_matter() -> None:
    first = Mixture({"a": 0.2, "b": 0.5, "c": 0.3})
    second = Mixture({"c": 3, "a": 2, "b": 5})
    assert samples_of(first, range(40)) == samples_of(second, range(40))


def test_one_source_needs_no_table() -> None:
    mixture = Mixture({"a": 123.456})
    assert (mixture.period, samples_of(mixture, [10**15])) == (1, [("a", 10**15)])


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_that_make_no_sense_are_refused(weight: float) -> None:
    with pytest.raises(UserError, match="source zh: the weight is"):
        Mixture({"en": 1.0, "zh": weight})
    with pytest.raises(UserError, match="at least one"):
        Mixture({})

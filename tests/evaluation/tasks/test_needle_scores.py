"""Scores of needles over lengths and depths, against the paper's definitions and numbers worked out by hand."""

import math

import numpy as np
import pytest

from lightscale.evaluation.tasks.needle_scores import (
    accuracy_at,
    accuracy_up_to,
    niah_score,
    penalty,
    rank,
    weighted_accuracy,
    weights,
    word_recall,
)

# Depths down, lengths across; the needle of the last row is behind the end of the first prompt.
GRADES = np.array([[1.0, 1.0, 0.5], [1.0, 0.0, 1.0], [math.nan, 1.0, 1.0]])


def test_accuracies_of_lengths() -> None:
    assert accuracy_at(GRADES) == pytest.approx([1, 2 / 3, 2.5 / 3])
    assert accuracy_up_to(GRADES) == pytest.approx([1, 4 / 5, 6.5 / 8])


def test_weights_grow_with_depth_and_length() -> None:
    weight = weights(3, 2, depth_ratio=2, length_ratio=10)
    assert weight.tolist() == [[1, 10], [2, 20], [4, 40]]


def test_weighted_accuracy() -> None:
    weight = weights(3, 3, depth_ratio=2, length_ratio=3)
    expected = (1 * 1 + 1 * 3 + 0.5 * 9 + 1 * 2 + 1 * 18 + 1 * 12 + 1 * 36) / (1 + 3 + 9 + 2 + 6 + 18 + 12 + 36)
    assert weighted_accuracy(GRADES, weight) == pytest.approx(expected)
    even = weights(3, 3, depth_ratio=1, length_ratio=1)
    assert weighted_accuracy(GRADES, even) == pytest.approx(6.5 / 8)


@pytest.mark.parametrize(
    ("successes", "expected"),
    [("0000", 0), ("1111", 1), ("1", 1), ("0", 0), ("0111", 2**-0.5), ("1101", 0.5), ("10101", 0.25), ("010", 0.5)],
)
def test_the_penalty_of_a_length(successes: str, expected: float) -> None:
    assert penalty([one == "1" for one in successes]) == expected


def test_the_score_combines_penalty_and_weight() -> None:
    weight = weights(3, 3, depth_ratio=2, length_ratio=3)
    # Of the lengths: all succeed; 1, 0, 1; 0, 1, 1.
    of_lengths = [1, 0.5, 2**-0.5]
    rows = [1 * 1 * of_lengths[0], 1 * 3 * of_lengths[1], 0.5 * 9 * of_lengths[2]]
    rows += [1 * 2 * of_lengths[0], 0, 1 * 18 * of_lengths[2], 1 * 12 * of_lengths[1], 1 * 36 * of_lengths[2]]
    total = 1 + 3 + 9 + 2 + 6 + 18 + 12 + 36
    assert niah_score(GRADES, weight, success=1) == pytest.approx(sum(rows) / total)
    # A half is enough: the last length succeeds everywhere.
    rows[2], rows[5], rows[7] = 0.5 * 9, 18, 36
    assert niah_score(GRADES, weight, success=0.5) == pytest.approx(sum(rows) / total)


def test_means_of_thirds_succeed_at_one() -> None:
    grades = np.full((1, 1), (1 / 3 + 1 / 3 + 1 / 3) * 0.9999999)
    assert niah_score(grades, np.ones((1, 1)), success=1) == pytest.approx(1)


def test_word_recall() -> None:
    assert word_recall(["bell", "river", "lamp"], "River? The bell, and a river.") == pytest.approx(2 / 3)
    assert word_recall(["bell"], "bells") == 0


def test_the_rank() -> None:
    assert rank(-1.0, [-2.0, -3.0]) == 1
    assert rank(-2.5, [-2.0, -3.0]) == 2
    assert rank(-2.0, [-2.0, -2.0, -3.0]) == 3
    assert rank(math.nan, [-1.0, -2.0]) == 3

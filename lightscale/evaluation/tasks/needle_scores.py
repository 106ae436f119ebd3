"""The scores of needles over lengths and depths: those of the paper (arXiv 2406.16690, B.1) and a rank.

A cell's grade is from 0 to 1, as (score - 1) / 9 of the paper's scores of 1 to 10. Depths and lengths rise. Where a
needle would stand behind the end of its prompt, the cell is NaN, and counts nowhere.
"""

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

Heatmap = NDArray[np.float64]
"""(depths, lengths)"""


def accuracy_at(grades: Heatmap) -> NDArray[np.float64]:
    """(lengths,) the mean over the depths, at each length."""
    return np.array([_mean(column) for column in grades.T])


def accuracy_up_to(grades: Heatmap) -> NDArray[np.float64]:
    """(lengths,) the mean over all cells of this length and shorter ones."""
    return np.array([_mean(grades[:, : index + 1]) for index in range(grades.shape[1])])


def weights(num_depths: int, num_lengths: int, *, depth_ratio: float, length_ratio: float) -> Heatmap:
    """w = αd^i · αc^j of the i-th depth and the j-th length: deeper and longer counts more."""
    return np.outer(depth_ratio ** np.arange(num_depths), length_ratio ** np.arange(num_lengths))


def weighted_accuracy(grades: Heatmap, weight: Heatmap) -> float:
    """Σ w·grade / Σ w"""
    there = ~np.isnan(grades)
    return float((weight[there] * grades[there]).sum() / weight[there].sum())


def penalty(successes: Sequence[bool]) -> float:
    """p of one length, whose depths succeed or fail.

    0 where none succeeds, 1 where all do, else 2^((1 - n) / 2) with n the number of runs of successes and of failures:
    a model that finds needles at some depths, and at others in between does not, is trusted less.
    """
    if not any(successes):
        return 0.0
    num_runs = sum(1 for _ in groupby(successes))
    return 1.0 if num_runs == 1 else 2 ** ((1 - num_runs) / 2)


def niah_score(grades: Heatmap, weight: Heatmap, *, success: float) -> float:
    """Σ w·p·grade / Σ w, with the penalty p of each length; a grade of at least ``success`` succeeds.

    The paper names the weighted accuracy and the penalty, and states that the score combines them.
    """
    # A grade is a ratio of small numbers: 1/3 is not less than 0.3333.
    of_lengths = [
        penalty([bool(one >= success - 1e-6) for one in column if not math.isnan(one)]) for column in grades.T
    ]
    return weighted_accuracy(grades * np.array(of_lengths), weight)


def word_recall(words: Sequence[str], text: str) -> float:
    """The share of ``words`` that are in ``text``, whatever signs stand around them and in whatever order."""
    there = {word.strip(".,;:!?\"'()") for word in text.split()}
    return sum(word in there for word in words) / len(words)


def rank(true: float, others: Sequence[float]) -> int:
    """The place of the ``true`` answer's log-likelihood among those of ``others``: 1 is the best.

    Equal ones come first, so that a model which cannot distinguish them has the last place.
    """
    return 1 + sum(not other < true for other in others)


def _mean(values: Heatmap) -> float:
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else math.nan

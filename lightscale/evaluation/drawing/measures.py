"""How near drawn images are to real ones, by features and classes that a classifier finds in each; in fp64.

The classifier was trained on the same images. Published FID, sFID and IS take Inception's weights: numbers of one
classifier are comparable with one another alone.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Features = NDArray[np.float64]
"""(m, d), a row for each image."""


class Coverage(NamedTuple):
    """Improved precision and recall (arXiv 1904.06991)."""

    precision: float
    """Share of the drawn images within the real ones' neighbourhoods."""
    recall: float
    """Share of the real images within the drawn ones' neighbourhoods."""


def frechet_distance(first: Features, second: Features) -> float:
    """Between normal distributions with the means and covariances of both (arXiv 1706.08500, eq. 6).

    |m_1 - m_2|² + tr(C_1 + C_2 - 2 (C_1^½ C_2 C_1^½)^½); at least 2 rows each.
    """
    means = first.mean(0) - second.mean(0)
    one, two = (np.atleast_2d(np.cov(features, rowvar=False)) for features in (first, second))
    root = _root(one)
    # Symmetric, so that a singular covariance leaves no imaginary parts.
    product = np.linalg.eigvalsh(root @ two @ root)
    cross = np.sqrt(np.clip(product, 0, None)).sum()
    return float(means @ means + np.trace(one) + np.trace(two) - 2 * cross)


def spatial_channels(tokens: int, hidden_size: int) -> int:
    """Channels of each of ``tokens`` that spatial features have: together as many numbers as a mean of states has.

    At least 1. sFID (arXiv 2103.03841, section 5) so takes 7 channels of 17 x 17 places beside 2048 pooled numbers.
    """
    return max(1, hidden_size // tokens)


def classifier_score(log_probabilities: Features) -> float:
    """exp of the mean of KL(p(y | x) ‖ p(y)) over all rows x, p(y) their mean (IS, arXiv 1606.03498, section 4).

    From 1, where no class is told from another, to the number of classes.

    Args:
        log_probabilities: (m, classes), in nats, of m images.
    """
    probabilities = np.exp(log_probabilities)
    marginal = probabilities.mean(0)
    # 0 log 0 = 0; a class with a probability has one in the mean.
    ratios = np.where(probabilities > 0, log_probabilities - np.log(np.where(marginal > 0, marginal, 1)), 0)
    return float(np.exp((probabilities * ratios).sum(1).mean()))


def _root(covariance: Features) -> Features:
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray((vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T)


def coverage(real: Features, drawn: Features, *, neighbours: int = 3) -> Coverage:
    """Of features with the ball to the ``neighbours``-th nearest of their own kind as their neighbourhood."""
    return Coverage(precision=_covered(real, drawn, neighbours), recall=_covered(drawn, real, neighbours))


def _covered(these: Features, others: Features, neighbours: int) -> float:
    """Share of ``others`` in a neighbourhood of ``these``."""
    own = _distances(these, these)
    # The nearest of all is the image itself.
    radius = np.sort(own, axis=1)[:, min(neighbours, len(these) - 1)]
    return float((_distances(others, these) <= radius).any(axis=1).mean())


def _distances(rows: Features, columns: Features) -> Features:
    """(m, k) distances, a row at a time: no product of vectors, whose rounding would make equal images differ."""
    return np.stack([np.sqrt(np.square(columns - row).sum(axis=1)) for row in rows])

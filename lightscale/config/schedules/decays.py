"""Shapes of decays: the share of the way that is left, from 1 at the start of a decay to 0 at its end.

A new shape is one function and one line in `DECAYS`. The learning rate is lowest + (highest - lowest) · shape.
"""

import math
from collections.abc import Callable

Shape = Callable[[float, float], float]
"""(done, power) to the share that is left; ``done``: of the decay's steps, 0 … 1."""


def linear(done: float, power: float) -> float:
    """1 - x"""
    return 1 - done


def cosine(done: float, power: float) -> float:
    """(1 + cos πx) / 2 (arXiv 1608.03983, equation 5, without restarts)"""
    return 0.5 * (1 + math.cos(math.pi * done))


def minus_sqrt(done: float, power: float) -> float:
    """1 - √x (arXiv 2405.18392, section 3.1, "1-sqrt")"""
    return 1 - math.sqrt(done)


def polynomial(done: float, power: float) -> float:
    """(1 - x)^p, as PyTorch's PolynomialLR"""
    return float((1 - done) ** power)


DECAYS: dict[str, Shape] = {
    "linear": linear,
    "cosine": cosine,
    "minus_sqrt": minus_sqrt,
    "polynomial": polynomial,
}

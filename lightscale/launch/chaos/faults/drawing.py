"""How faults are drawn from a seed."""

import random
from collections.abc import Sequence
from itertools import cycle, islice
from typing import TypeVar

_Value = TypeVar("_Value")

LATEST_S = 2.0
"""A fault at an instant comes at most so long after the attempt's first step. Longer only costs time."""


def shuffled_cycle(generator: random.Random, values: Sequence[_Value], number: int) -> list[_Value]:
    """`number` values, each as often as the others, beginning anywhere."""
    return list(islice(cycle(generator.sample(values, len(values))), number))

"""Draws of faults from a seed."""

import random
from collections.abc import Sequence
from itertools import cycle, islice
from typing import TypeVar

_Value = TypeVar("_Value")

LATEST_S = 2.0
"""Longest time from the attempt's first step to a fault at any instant; more would only cost time."""


def shuffled_cycle(generator: random.Random, values: Sequence[_Value], number: int) -> list[_Value]:
    """`number` values, each equally often, from a random start."""
    return list(islice(cycle(generator.sample(values, len(values))), number))

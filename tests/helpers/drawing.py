"""Which cases of a product run: each run draws enough of them that all pairs of values occur, or all values.

Triples that a run drops come in another one, as the seed changes; the session prints it, and ``LIGHTSCALE_TEST_SEED``
repeats it. ``LIGHTSCALE_TEST_SEED=all`` drops nothing, and ``make test-soak`` runs it so. What a seed drops::

    diff <(LIGHTSCALE_TEST_SEED=all pytest --collect-only -q) <(LIGHTSCALE_TEST_SEED=7 pytest --collect-only -q)
"""

import itertools
import os
import random
from collections.abc import Sequence
from typing import Any, TypeVar

SEED = "LIGHTSCALE_TEST_SEED"
ALL = "all"
_CANDIDATES = 50

Value = TypeVar("Value")


def generator(name: str) -> random.Random:
    """Of the session's seed, and alike wherever ``name`` is drawn."""
    return random.Random(f"{os.environ.get(SEED, '0')} {name}")


def some(name: str, values: Sequence[Value], count: int) -> list[Value]:
    """``count`` of ``values``, in their order."""
    if os.environ.get(SEED) == ALL:
        return list(values)
    chosen = set(generator(name).sample(range(len(values)), min(count, len(values))))
    return [value for number, value in enumerate(values) if number in chosen]


def covering(name: str, *axes: Sequence[Any], strength: int = 2) -> list[tuple[Any, ...]]:
    """Cases of the product of ``axes`` in which all combinations of ``strength`` values of different axes occur.

    Few, but not the fewest: each time the best of some random cases is taken.
    """
    product = list(itertools.product(*map(range, map(len, axes))))
    if os.environ.get(SEED) != ALL:
        drawing = generator(name)
        places = list(itertools.combinations(range(len(axes)), strength))
        missing = {combination for case in product for combination in _combinations(case, places)}
        left, product = product, []
        while missing:
            candidates = drawing.sample(left, min(_CANDIDATES, len(left)))
            best = max(candidates, key=lambda case: len(missing.intersection(_combinations(case, places))))
            left.remove(best)
            if found := missing.intersection(_combinations(best, places)):
                product.append(best)
                missing -= found
    return [tuple(axis[index] for axis, index in zip(axes, case, strict=True)) for case in sorted(product)]


def _combinations(case: tuple[int, ...], places: list[tuple[int, ...]]) -> list[tuple[tuple[int, int], ...]]:
    return [tuple((place, case[place]) for place in chosen) for chosen in places]

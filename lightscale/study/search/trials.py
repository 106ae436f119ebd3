"""The values of the trials of a search.

A drawn value is a function of the seed, the trial and the key alone. More trials, or another key beside it, change no
value that exists.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from lightscale.errors import UserError
from lightscale.study.search.section import MOST_TRIALS, ParameterSection, SearchSection, Value

_DIGITS = 4
"""Significant digits of drawn numbers: a table shows the trained value."""
_MOST_DRAWS = 1000
"""Draws of a trial until it differs from all before."""


@dataclass(frozen=True, kw_only=True)
class SearchTrial:
    """One choice of values."""

    number: int
    """From 0."""
    values: dict[str, Value]
    """By key of the configuration."""


def make_trials(search: SearchSection) -> list[SearchTrial]:
    """All trials of `search`, in order. Raises `UserError` where the parameters have too few different values."""
    found = _combinations(search) if search.is_grid else _draws(search)
    return [SearchTrial(number=number, values=values) for number, values in enumerate(found)]


def _combinations(search: SearchSection) -> list[dict[str, Value]]:
    lists = [parameter.values or [] for parameter in search.parameters.values()]
    if (number := math.prod(map(len, lists))) > MOST_TRIALS:
        raise UserError(f"search.parameters: {number:,} combinations; use at most {MOST_TRIALS:,}")
    return [dict(zip(search.parameters, values, strict=True)) for values in itertools.product(*lists)]


def _draws(search: SearchSection) -> Iterator[dict[str, Value]]:
    seen: set[tuple[Value, ...]] = set()
    for trial in range(search.trials or 0):
        for draw in range(_MOST_DRAWS):
            values = {
                key: _value(parameter, _uniform(search.seed, trial, draw, key))
                for key, parameter in search.parameters.items()
            }
            if (drawn := tuple(values.values())) not in seen:
                seen.add(drawn)
                yield values
                break
        else:
            raise UserError(
                f"search.trials = {search.trials}: the parameters have about {len(seen)} different values; use fewer "
                "trials or wider ranges"
            )


def _uniform(seed: int, trial: int, draw: int, key: str) -> float:
    """A number in [0, 1), from a hash: generators of random numbers differ between versions of their libraries."""
    hashed = hashlib.sha256(f"{seed} {trial} {draw} {key}".encode()).digest()
    return int.from_bytes(hashed[:8], "big") / 2**64


def _value(parameter: ParameterSection, share: float) -> Value:
    """The value at `share` of the way through the values or the range."""
    if parameter.values is not None:
        return parameter.values[min(int(share * len(parameter.values)), len(parameter.values) - 1)]
    low, high = parameter.min, parameter.max
    assert low is not None and high is not None
    is_whole = isinstance(low, int) and isinstance(high, int)
    # Each whole number has an equal share, the last one too.
    end = high + 1 if is_whole else high
    found = low * (end / low) ** share if parameter.log else low + (end - low) * share
    return min(math.floor(found), high) if is_whole else min(max(float(f"{found:.{_DIGITS}g}"), low), high)

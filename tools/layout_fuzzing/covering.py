"""Pairs of an option's value and an axis: which were covered, which validation refuses, and draws towards the others.

Rows are all values that ``options`` lists and those of kept cases, columns all axes of the schema: a new option is
there, uncovered, before any case has it.
"""

import random
import string
import typing
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from layout_fuzzing.configuration import refusal
from layout_fuzzing.drawing import Drawer, Drawn, with_value
from layout_fuzzing.options import options
from lightscale.config.schema import DataConfig, ParallelConfig, TrainConfig

Pair = tuple[str, str]
"""Row and column: "model.norm = rmsnorm", "tensor"."""

_LITERALS: dict[str, tuple[type[BaseModel], str]] = {
    "parallel.exchange": (ParallelConfig, ""),
    "parallel.attention": (ParallelConfig, "attention "),
    "train.recompute": (TrainConfig, "recompute "),
    "data.packing": (DataConfig, "packing "),
}
"""Keys whose values are columns: their section, and what precedes the value in the column's name."""
_TRIES = 250
"""Draws of a pair that validation refuses until it counts as impossible."""
_REPAIRS = 12
"""The first of them, which are tried again with each option of the same table."""
_DRAWS = 5000
"""Draws in which a pair must come about at all."""


def columns() -> dict[str, tuple[dict[str, Any], str | None]]:
    """Names of columns, with the keys that each fixes and the axis that it needs."""
    axes = ("data", "pipeline", "sequence", "tensor", "uneven")
    found: dict[str, tuple[dict[str, Any], str | None]] = {axis: ({}, axis) for axis in axes}
    found["virtual stages"] = {"parallel.virtual_stages": 2}, "virtual stages"
    for key, (kind, prefix) in _LITERALS.items():
        for value in typing.get_args(kind.model_fields[key.rpartition(".")[2]].annotation):
            found[f"{prefix}{value}"] = {key: value}, "sequence" if kind is ParallelConfig else None
    return dict(sorted(found.items()))


_WITHOUT_RANKS = ("train.recompute", "data.packing")
"""Keys of columns that need no ranks."""


def axes_of(drawn: Drawn) -> list[str]:
    """The columns of a case."""
    keys, axes = drawn.keys, [axis for axis, ranks in drawn.axes().items() if ranks > 1]
    shared = keys if "sequence" in axes else {key: keys[key] for key in _WITHOUT_RANKS if key in keys}
    axes += [f"{prefix}{shared[key]}" for key, (_, prefix) in _LITERALS.items() if key in shared]
    return axes + [axis for axis in ("uneven", "virtual stages") if drawn.uses(axis)]


def values_of_case(drawn: Drawn) -> Iterator[tuple[str, Any]]:
    """The keys of a case that are rows, with their values; every mixer of a pattern."""
    for key, value in drawn.keys.items():
        if not key.startswith("parallel.") and key not in _LITERALS:
            each = value if key == "model.mixer" and isinstance(value, list) else [value]
            yield from ((key, one) for one in each)


def pairs_of(drawn: Drawn) -> set[Pair]:
    """The pairs of one case."""
    axes = axes_of(drawn)
    return {(_row(key, value), axis) for key, value in values_of_case(drawn) for axis in axes}


def pairs(cases: Iterable[Drawn]) -> Counter[Pair]:
    """In how many cases each value of an option met each axis."""
    return Counter(pair for drawn in cases for pair in pairs_of(drawn))


class Coverage:
    """Pairs that ``cases`` cover, and what validation says against others."""

    def __init__(self, cases: Iterable[Drawn], stores: str = "stores") -> None:
        cases = list(cases)
        self.stores, self.num_cases = stores, len(cases)
        self.found = pairs(cases)
        listed = [one for one in options() if not one[0].startswith("parallel.") and one[0] not in _LITERALS]
        held = [one for drawn in cases for one in values_of_case(drawn)]
        self.rows = dict(sorted((_row(*one), one) for one in [*listed, *held]))
        self.columns = columns()
        self.refused: dict[Pair, str] = {}

    def add(self, drawn: Drawn) -> None:
        """Count one case more."""
        self.num_cases += 1
        self.found.update(pairs_of(drawn))

    def uncovered(self) -> list[Pair]:
        """Pairs that no case covers and that are not known to be refused."""
        every = ((row, column) for row in self.rows for column in self.columns)
        return [pair for pair in every if not self.found[pair] and pair not in self.refused]

    def draws(self, drawer: Drawer, pair: Pair) -> Iterator[Drawn]:
        """Cases of ``pair``, the rest drawn from the schema; validation may refuse them."""
        (key, value), (fixed, axis) = self.rows[pair[0]], self.columns[pair[1]]
        mixer = {"model.mixer": key.split(".")[2]} if key.startswith("model.mixer_options.") else {}
        for _ in range(_DRAWS):
            drawn = drawer.draw({**mixer, **fixed, key: value}, axis=axis)
            if pair in pairs_of(drawn):
                yield drawn

    def valid_draws(self, drawer: Drawer, pair: Pair) -> Iterator[Drawn]:
        """Those that validation takes. If it refuses all, ``refused`` has the pair and the most frequent reason."""
        reasons: Counter[str] = Counter()
        is_possible = False
        for drawn in self.draws(drawer, pair):
            reason = refusal(drawn, self.stores)
            if reason is not None and reasons.total() < _REPAIRS and not is_possible:
                drawn, reason = self._repaired(drawn, pair, reason)
            if reason is None:
                is_possible = True
                yield drawn
            else:
                reasons[reason] += 1
                if reasons.total() == _TRIES:
                    break
        if not is_possible:
            self.refused[pair] = reasons.most_common(1)[0][0] if reasons else "never drawn together"

    def _repaired(self, drawn: Drawn, pair: Pair, reason: str) -> tuple[Drawn, str | None]:
        """The case with one more option of the same table, if validation then takes it: options need each other."""
        key, _ = self.rows[pair[0]]
        for other, value in self.rows.values():
            if other != key and other.rpartition(".")[0] == key.rpartition(".")[0] and other != "model.mixer":
                changed = replace(drawn, keys=with_value(drawn.keys, other, value))
                if pair in pairs_of(changed) and refusal(changed, self.stores) is None:
                    return changed, None
        return drawn, reason

    def towards_uncovered(self, drawer: Drawer) -> Iterator[Drawn]:
        """Valid cases, each from a pair that no case before it has, until no possible pair is left."""
        while (drawn := self._next(drawer)) is not None:
            yield drawn
            self.add(drawn)

    def _next(self, drawer: Drawer, choices: int = 3) -> Drawn | None:
        """A valid case with many uncovered pairs.

        Of ``choices`` draws that begin from one uncovered pair the one that covers most, with more options changed to
        values that its axes have not met.
        """
        left = self.uncovered()
        drawer.rng.shuffle(left)
        missing = set(left)
        for pair in left:
            found = [drawn for _, drawn in zip(range(choices), self.valid_draws(drawer, pair), strict=False)]
            if found:
                return self._filled(max(found, key=lambda drawn: len(pairs_of(drawn) & missing)), missing)
        return None

    def _filled(self, drawn: Drawn, missing: set[Pair]) -> Drawn:
        axes, most = axes_of(drawn), len(pairs_of(drawn) & missing)
        for row in sorted({row for row, column in missing if column in axes}):
            key, value = self.rows[row]
            if key == "model.mixer":
                continue
            changed = replace(drawn, keys=with_value(drawn.keys, key, value))
            more = len(pairs_of(changed) & missing)
            if more > most and refusal(changed, self.stores) is None:
                drawn, most = changed, more
        return drawn

    def find_refused(self) -> None:
        """Try every pair that is not covered; ``uncovered`` are then those that a case can cover."""
        for pair in self.uncovered():
            # Few other options, so that it is the pair which is refused.
            drawer = Drawer(random.Random(f"{pair}"), share=0.05)
            next(self.valid_draws(drawer, pair), None)

    def table(self) -> str:
        """Rows of values, columns of axes: in how many cases they met, or the letter of a reason beneath."""
        marks = {reason: _letters(number) for number, reason in enumerate(dict.fromkeys(self.refused.values()))}
        lines = ["| | " + " | ".join(self.columns) + " |", "|---" * (len(self.columns) + 1) + "|"]
        for row in self.rows:
            met = [(row, column) for column in self.columns]
            cells = [str(self.found[pair] or marks.get(self.refused.get(pair, ""), "")) for pair in met]
            lines.append(f"| {row} | " + " | ".join(cells) + " |")
        left, every = len(self.uncovered()), len(self.rows) * len(self.columns)
        covered = every - left - len(self.refused)
        lines.append(f"\n{self.num_cases} cases: {covered} of {every} pairs are covered, {left} are left.")
        if self.refused:
            lines.append(f"{len(self.refused)} are impossible: validation refused all of {_TRIES} draws, because\n")
        return "\n".join(lines + [f"- {mark}: {reason}" for reason, mark in marks.items()])


def _row(key: str, value: Any) -> str:
    return f"{key} = {value}"


def _letters(number: int) -> str:
    """a … z, aa, ab, …"""
    more, last = divmod(number, len(string.ascii_lowercase))
    return (_letters(more - 1) if more else "") + string.ascii_lowercase[last]

"""What goes wrong for a while: alone, or while another fault happens."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard

from lightscale.launch.chaos.faults.drawing import shuffled_cycle
from lightscale.launch.chaos.faults.links import LINKS
from lightscale.launch.chaos.faults.links import LONGEST_S as LONGEST_LINK_S
from lightscale.launch.chaos.faults.processes import draw_limit, draw_slow_rank
from lightscale.launch.chaos.faults.surroundings import SURROUNDINGS, draw_surrounding
from lightscale.launch.chaos.harness.trial import Bound, Condition, Fault, Runner

Draw = Callable[[random.Random, int, int], Iterable[Fault]]
"""Draws a number of faults of one sort for a number of ranks."""
# Of one kind, for a number of ranks.
_Draw = Callable[[random.Random, int], Condition]


def _surrounding(name: str) -> _Draw:
    return lambda generator, processes: draw_surrounding(generator, name, processes)


CONDITIONS: dict[str, _Draw] = {
    **{name: _surrounding(name) for name in SURROUNDINGS},
    "slow rank": draw_slow_rank,
    "limit": draw_limit,
}
# By the names of a condition and of a fault's kind, why they are not tried together.
EXCLUDED = {
    ("slow rank", "rank stopped (SIGSTOP)"): "what slows a rank lets it go on",
}
_SHORTEST_S, _LONGEST_S = 2.0, 16.0
_LONGEST_PAIR_S = 600.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Alone:
    """A condition by itself."""

    second: Condition
    seconds: float

    @property
    def kind(self) -> str:
        """What it is, for the table."""
        return self.second.kind

    @property
    def bound(self) -> Bound:
        """The most that it may cost."""
        return self.second.bound

    def inject(self, run: Runner) -> None:
        """Let it begin, and wait for its end."""
        run.wait_for_first_step()
        run.begin(self.second, self.seconds)
        run.wait_until_over()


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """A condition, and a fault or condition that comes while it lasts."""

    first: Condition
    seconds: float
    delay_s: float
    """From the beginning of the first to that of the second."""
    second: Fault | Condition
    second_seconds: float = 0.0
    """Of a condition."""

    @property
    def kind(self) -> str:
        """What it is, for the table."""
        return f"{self.second.kind} during {self.first.kind}"

    @property
    def bound(self) -> Bound:
        """The most that it may cost: both."""
        first, second = self.first.bound, self.second.bound
        return Bound(saves=first.saves + second.saves, seconds=first.seconds + second.seconds)

    def inject(self, run: Runner) -> None:
        """Let both happen, and wait until both are over."""
        run.wait_for_first_step()
        # On a loaded machine the second one may take minutes, and the first one must last until it has happened. What
        # stops the run would keep it from happening.
        run.begin(self.first, self.seconds if self.first.stops_the_run else _LONGEST_PAIR_S)
        run.pause(self.delay_s)
        if is_fault(self.second):
            self.second.inject(run)
            run.end_conditions(lambda condition: condition is self.first)
        elif is_condition(self.second):
            run.begin(self.second, self.second_seconds)
            run.pause(self.seconds)
            run.end_conditions(lambda condition: condition is self.first)
        run.wait_until_over()


def is_fault(one: Fault | Condition) -> TypeGuard[Fault]:
    """Whether `one` happens once, and has no end of its own."""
    return hasattr(one, "inject")


def is_condition(one: Fault | Condition) -> TypeGuard[Condition]:
    """Whether `one` lasts until it is ended."""
    return hasattr(one, "begin")


def draw_conditions(generator: random.Random, number: int, processes: int) -> Iterator[Alone]:
    """Draw each kind equally often."""
    return _draw_alone(generator, number, processes, CONDITIONS, _LONGEST_S)


def draw_links(generator: random.Random, number: int, processes: int) -> Iterator[Alone]:
    """Draw each kind equally often."""
    return _draw_alone(generator, number, processes, LINKS, LONGEST_LINK_S)


def _draw_alone(
    generator: random.Random, number: int, processes: int, conditions: Mapping[str, _Draw], longest_s: float
) -> Iterator[Alone]:
    for name in shuffled_cycle(generator, tuple(conditions), number):
        condition = conditions[name](generator, processes)
        yield Alone(second=condition, seconds=generator.uniform(_SHORTEST_S, longest_s))


def draw_pairs(
    generator: random.Random,
    number: int,
    processes: int,
    others: Mapping[str, Draw],
    conditions: Mapping[str, _Draw] = CONDITIONS,
) -> Iterator[Pair]:
    """Draw pairs of one of `conditions` with any of `others`, by the name of their sort, or another condition.

    Conditions and others come equally often, each in an order of its own; a condition is the second one in a quarter
    of the pairs.
    """
    firsts = shuffled_cycle(generator, tuple(conditions), number)
    every = {**CONDITIONS, **conditions}
    seconds: list[str | None] = [*shuffled_cycle(generator, tuple(others), number - number // 4)] if others else []
    seconds += [None] * (number - len(seconds))
    generator.shuffle(seconds)
    for name, sort in zip(firsts, seconds, strict=True):
        seconds_s = generator.uniform(_SHORTEST_S, _LONGEST_S)
        delay_s = generator.uniform(0, min(seconds_s, 3.0))
        first = every[name](generator, processes)
        if sort is not None:
            second: Fault | Condition = next(iter(others[sort](generator, 1, processes)))
        if sort is None or (name, second.kind) in EXCLUDED:
            other = generator.choice([one for one in every if one != name])
            second = every[other](generator, processes)
        yield Pair(
            first=first,
            seconds=seconds_s,
            delay_s=delay_s,
            second=second,
            second_seconds=generator.uniform(_SHORTEST_S, _LONGEST_S),
        )

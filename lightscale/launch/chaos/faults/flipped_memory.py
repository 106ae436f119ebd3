"""A bit that flips in a number of the model, its gradient or the optimizer, in the memory of a running rank."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from lightscale.launch.chaos.faults.drawing import shuffled_cycle
from lightscale.launch.chaos.faults.memory import GRADIENT, PLACES, MemoryOrder, not_named
from lightscale.launch.chaos.harness.trial import Bound, Runner
from lightscale.launch.chaos.harness.verify import Lines


@dataclass(frozen=True, kw_only=True)
class Flip(MemoryOrder):
    """Flips one bit in the memory of `rank`: the step must be refused, and the rank named."""

    bit: int
    """Modulo the number of bits."""
    bound: ClassVar[Bound] = Bound(saves=2, seconds=120)

    @property
    def kind(self) -> str:
        """What it is, for the table."""
        return f"bit flipped in a {self.place}"

    def inject(self, run: Runner) -> None:
        """Write the order, and wait until the run has started again."""
        self.change(run, self, self._missed)
        run.wait_for_steps(1)

    def _missed(self, events: Lines) -> str | None:
        return not_named(self.rank, events)


def draw_flips(generator: random.Random, number: int, processes: int) -> Iterator[Flip]:
    """Draw each place equally often, on any rank, and any bit."""
    for place in shuffled_cycle(generator, (*PLACES, GRADIENT), number):
        yield Flip(
            place=place,
            rank=generator.randrange(processes),
            tensor=generator.randrange(1 << 30),
            element=generator.randrange(1 << 30),
            bit=generator.randrange(64),
            steps=generator.randint(0, 12),
        )

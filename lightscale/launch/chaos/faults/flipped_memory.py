"""A bit that flips in a number of the model or the optimizer, in the memory of a running rank."""

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import ClassVar

from lightscale.launch.chaos.faults.drawing import shuffled_cycle
from lightscale.launch.chaos.faults.not_finite import PLACES, order_file, went_back
from lightscale.launch.chaos.harness.trial import PATIENCE_SAVES, SLOW_POLL_S, Bound, Runner


@dataclass(frozen=True, kw_only=True)
class Flip:
    """Flips one bit in the memory of `rank`: the step must be refused, and the rank named."""

    place: str
    """One of `PLACES`."""
    rank: int
    tensor: int
    """Index of the tensor of the place, and of its element, modulo their numbers."""
    element: int
    bit: int
    """Modulo the number of bits."""
    steps: int
    """Steps before it."""
    bound: ClassVar[Bound] = Bound(saves=2, seconds=120)

    @property
    def kind(self) -> str:
        """What it is, for the table."""
        return f"bit flipped in a {self.place}"

    def inject(self, run: Runner) -> None:
        """Write the order, and wait until the run has started again."""
        run.wait_for_first_step()
        run.wait_for_steps(self.steps)
        file = order_file(run.training.faults_folder, self.rank)
        before = len(run.training.events())

        def missed() -> str | None:
            found = [one for one in run.training.events()[before:] if one["event"] == "silent_corruption"]
            if not found:
                return "the run did not go back"
            named = found[0]["ranks"]
            return None if self.rank in named else f"ranks {named} were named, not {self.rank}"

        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self)), encoding="utf-8")
        draft.rename(file)
        try:
            run.wait(lambda: not file.exists())
        finally:
            if file.exists():
                file.unlink()
            else:
                run.happened(self, lambda since: missed())
        last = run.num_steps + PATIENCE_SAVES * run.every
        run.wait(lambda: went_back(run.training.events()[before:]) or run.num_steps > last, poll_s=SLOW_POLL_S)
        run.wait_for_steps(1)


def draw_flips(generator: random.Random, number: int, processes: int) -> Iterator[Flip]:
    """Draw each place equally often, on any rank, and any bit."""
    for place in shuffled_cycle(generator, PLACES, number):
        yield Flip(
            place=place,
            rank=generator.randrange(processes),
            tensor=generator.randrange(1 << 30),
            element=generator.randrange(1 << 30),
            bit=generator.randrange(64),
            steps=generator.randint(0, 12),
        )

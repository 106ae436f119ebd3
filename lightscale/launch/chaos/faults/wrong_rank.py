"""A rank that computes slightly wrong, from a step on until its host is mended."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lightscale.launch.chaos.faults.memory import not_named, went_back
from lightscale.launch.chaos.harness.trial import PATIENCE_SAVES, SLOW_POLL_S, Bound, Runner
from lightscale.launch.chaos.harness.verify import Lines

# Relative errors of products: the loss stays where it is, and every spike passes the guard.
_LEAST_ERROR, _MOST_ERROR = 1e-5, 1e-2


@dataclass(frozen=True, kw_only=True)
class WrongRank:
    """The products of `rank` have a relative error: the step must be refused, and the rank be among those named."""

    rank: int
    error: float
    steps: int
    """Steps before it."""
    kind: ClassVar[str] = "rank that computes slightly wrong"
    bound: ClassVar[Bound] = Bound(saves=2, seconds=120)

    def inject(self, run: Runner) -> None:
        """Write the order, wait until the run has gone back, and mend it."""
        run.wait_for_first_step()
        run.wait_for_steps(self.steps)
        before, first = len(run.training.events()), run.num_steps

        def events() -> Lines:
            return run.training.events()[before:]

        file = wrong_file(run.training.faults_folder, self.rank)
        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps({"error": self.error}), encoding="utf-8")
        draft.rename(file)
        last = first + PATIENCE_SAVES * run.every
        try:
            run.wait(lambda: went_back(events()) or run.num_steps > last, poll_s=SLOW_POLL_S)
        finally:
            file.unlink()
            # The step that was on its way may have read no order.
            if went_back(events()) or run.num_steps > first + 1:
                run.happened(self, lambda since: not_named(self.rank, events()))
        run.wait_for_steps(1)


def wrong_file(folder: Path, rank: int) -> Path:
    """File with the order to a rank of `poisoned_training.py`, which computes wrong for as long as it is there."""
    return folder / f"wrong-{rank}"


def draw_wrong_ranks(generator: random.Random, number: int, processes: int) -> Iterator[WrongRank]:
    """Draw any rank, and any error."""
    for _ in range(number):
        yield WrongRank(
            rank=generator.randrange(processes),
            error=generator.choice((-1, 1)) * generator.uniform(_LEAST_ERROR, _MOST_ERROR),
            steps=generator.randint(0, 12),
        )

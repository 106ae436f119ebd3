"""A missing directory of checkpoints, as with an unmounted file system."""

import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lightscale.launch.chaos.faults.drawing import shuffled_cycle
from lightscale.launch.chaos.harness.trial import Bound, Runner
from lightscale.launch.chaos.harness.verify import GIVEN_UP
from lightscale.runs.run_directory import RunDirectory, read_lines

EXIT_LOST = 74
FLAG = "--allow-change=lost-checkpoints"
WAYS = (
    "no directory, put back",
    "empty directory, put back",
    "no directory, begun again",
    "empty directory, begun again",
)


@dataclass(frozen=True, kw_only=True)
class MissingCheckpoints:
    """Kills everything and removes the checkpoints: the next start must refuse."""

    way: str
    """One of `WAYS`."""
    bound: ClassVar[Bound] = Bound(saves=2, seconds=120)

    @property
    def kind(self) -> str:
        """What it is, for the table."""
        return f"lost checkpoints, {self.way.rpartition(', ')[2]}"

    def inject(self, run: Runner) -> None:
        """Move them away, try to start, and restore them or start again."""
        directory = run.training.run
        run.bring_down(lambda: newest_recorded(directory) is not None)
        newest, checkpoints = newest_recorded(directory), directory.checkpoints
        assert newest is not None
        taken = checkpoints.with_name("checkpoints.taken")
        checkpoints.rename(taken)
        if self.way.startswith("empty"):
            checkpoints.mkdir()
        missed = run.refused(EXIT_LOST, re.escape(newest), r"--allow-change lost-checkpoints")
        if self.way.endswith("put back"):
            # What a start that was not refused has saved would hide what was put back.
            shutil.rmtree(checkpoints, ignore_errors=True)
            taken.rename(checkpoints)
            run.happened(self, lambda since: missed)
        else:
            shutil.rmtree(taken)
            run.happened(self, lambda since: missed)
            run.training.start(FLAG)
            run.wait_for_first_step()


def newest_recorded(run: RunDirectory) -> str | None:
    """Name of the newest checkpoint in the events, if it exists."""
    newest = None
    for event in read_lines(run.events):
        if event["event"] == "checkpoint":
            newest = event.get("checkpoint")
        elif event["event"] == GIVEN_UP:
            newest = None
    return newest if newest is not None and (run.checkpoints / Path(newest).name).is_dir() else None


def draw_lost_checkpoints(generator: random.Random, number: int, processes: int) -> Iterator[MissingCheckpoints]:
    """Draw each way equally often."""
    for way in shuffled_cycle(generator, WAYS, number):
        yield MissingCheckpoints(way=way)

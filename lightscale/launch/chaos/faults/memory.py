"""What changes in the memory of a running rank: an order to `poisoned_training.py`, and what must follow it."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from lightscale.launch.chaos.harness.trial import PATIENCE_SAVES, SLOW_POLL_S, Fault, Runner
from lightscale.launch.chaos.harness.verify import Lines

PLACES = ("weight", "first moment", "second moment", "copy of a weight")
"""Those that stay from step to step."""
GRADIENT = "gradient"
"""The place of a rank's own gradients, between its last backward pass and their sum over ranks."""


@dataclass(frozen=True, kw_only=True)
class MemoryOrder:
    """One element of a tensor in the memory of a rank, which is to change."""

    place: str
    """One of `PLACES`, or `GRADIENT`."""
    rank: int
    tensor: int
    """Index of the tensor of the place, and of its element, modulo their numbers."""
    element: int
    steps: int
    """Steps before it."""

    def change(self, run: Runner, fault: Fault, missed: Callable[[Lines], str | None]) -> None:
        """Let it change, and wait until the run goes back; `missed` is asked with the events since then."""
        run.wait_for_first_step()
        run.wait_for_steps(self.steps)
        file = order_file(run.training.faults_folder, self.rank)
        before = len(run.training.events())

        def events() -> Lines:
            # Not only since it was seen to be done: the run may have noticed before.
            return run.training.events()[before:]

        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self)), encoding="utf-8")
        draft.rename(file)
        try:
            run.wait(lambda: not file.exists())
        finally:
            if file.exists():
                file.unlink()
            else:
                run.happened(fault, lambda since: missed(events()))
        last = run.num_steps + PATIENCE_SAVES * run.every
        run.wait(lambda: went_back(events()) or run.num_steps > last, poll_s=SLOW_POLL_S)


def order_file(folder: Path, rank: int) -> Path:
    """File with the order to a rank of `poisoned_training.py`: the number that is to change."""
    return folder / f"nan-{rank}"


def went_back(events: Lines) -> bool:
    """Whether the run went back to a checkpoint, by a rollback or a new start."""
    return any(event["event"] in ("rollback", "silent_corruption") for event in events)


def not_named(rank: int, events: Lines) -> str | None:
    """Evidence that the run did not stop for a rank that is at fault; None: the first stop names it."""
    found = [one["ranks"] for one in events if one["event"] == "silent_corruption"]
    if not found:
        return "the run did not go back"
    return None if rank in found[0] else f"ranks {found[0]} were named, not {rank}"

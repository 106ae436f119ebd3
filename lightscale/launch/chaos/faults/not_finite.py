"""NaN in a number of the model or the optimizer, in the memory of a running rank."""

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from lightscale.launch.chaos.faults.drawing import shuffled_cycle
from lightscale.launch.chaos.harness.trial import PATIENCE_SAVES, SLOW_POLL_S, Bound, Runner
from lightscale.launch.chaos.harness.verify import Lines
from lightscale.training.checkpoints.header import read_header
from lightscale.training.checkpoints.reading import DamagedCheckpoint

PLACES = ("weight", "first moment", "second moment", "copy of a weight")
# Of a number format: the unsigned integers of its size, and the bits of the exponent, all 1 in NaN and infinities.
_EXPONENTS = {
    "F64": ("<u8", 0x7FF << 52),
    "F32": ("<u4", 0xFF << 23),
    "BF16": ("<u2", 0xFF << 7),
    "F16": ("<u2", 0x1F << 10),
}


@dataclass(frozen=True, kw_only=True)
class NaN:
    """Sets one element to NaN in the memory of `rank`: it must reach no checkpoint, and the run must go back."""

    place: str
    """One of `PLACES`."""
    rank: int
    tensor: int
    """Index of the tensor of the place, and of its element, modulo their numbers."""
    element: int
    steps: int
    """Steps before it."""
    bound: ClassVar[Bound] = Bound(saves=4, seconds=120)

    @property
    def kind(self) -> str:
        """What it is, for the table."""
        return f"NaN in a {self.place}"

    def inject(self, run: Runner) -> None:
        """Write the order, and wait until the run has gone back."""
        self.poison(run)
        # Of the attempt that went back.
        run.wait_for_steps(1)

    def poison(self, run: Runner) -> None:
        """Write the order, and wait until the run goes back."""
        run.wait_for_first_step()
        run.wait_for_steps(self.steps)
        file = order_file(run.training.faults_folder, self.rank)
        before, published = len(run.training.events()), list[str]()

        def sign(since: Lines) -> str | None:
            # Not only `since` it was seen to be done: the run may have noticed before.
            return _missed(run.training.events()[before:], published + not_finite(run.training.run.checkpoints))

        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self)), encoding="utf-8")
        draft.rename(file)
        try:
            run.wait(lambda: not file.exists())
        finally:
            if file.exists():
                file.unlink()
            else:
                run.happened(self, sign)
        last = run.num_steps + PATIENCE_SAVES * run.every
        run.wait(lambda: went_back(run.training.events()[before:]) or run.num_steps > last, poll_s=SLOW_POLL_S)
        # Now, before retention removes it.
        published += not_finite(run.training.run.checkpoints)


@dataclass(frozen=True, kw_only=True)
class LossDuringRollback:
    """A NaN makes the run go back, and while it does, one rank or everything is killed."""

    nan: NaN
    everything: bool
    delay_s: float
    """Time after the event of the rollback."""
    kind: ClassVar[str] = "loss of ranks during a rollback"
    bound: ClassVar[Bound] = Bound(saves=6, seconds=120)

    def inject(self, run: Runner) -> None:
        """Poison, and kill."""
        self.nan.poison(run)
        run.pause(self.delay_s)
        ranks = run.training.ranks()
        if self.everything:
            run.kill_everything()
        elif self.nan.rank in ranks:
            run.training.kill([ranks[self.nan.rank]], launcher=False)
        run.happened(self)
        run.wait_for_steps(1)


def order_file(folder: Path, rank: int) -> Path:
    """File with the order to a rank of `poisoned_training.py`: the number to set to NaN."""
    return folder / f"nan-{rank}"


def went_back(events: Lines) -> bool:
    """Whether the run went back to a checkpoint, by a rollback or a new start."""
    return any(event["event"] in ("rollback", "silent_corruption") for event in events)


def _missed(since: Lines, published: list[str]) -> str | None:
    if published:
        return f"it was published: {published[0]}"
    return None if went_back(since) else "the run did not go back"


def not_finite(checkpoints: Path) -> list[str]:
    """The tensors with NaN or infinity in all checkpoints of a directory, including those set aside."""
    found = []
    for path in sorted(checkpoints.glob("step-*/*.safetensors")):
        # Unfinished ones are no checkpoints.
        if path.parent.suffix != ".tmp":
            found += [f"{path.parent.name}/{path.name}: {key}" for key in _not_finite_tensors(path)]
    return found


def _not_finite_tensors(path: Path) -> Iterator[str]:
    try:
        entries, data = read_header(path), np.memmap(path, dtype=np.uint8, mode="r")
    except (FileNotFoundError, DamagedCheckpoint):
        # Retention was faster.
        return
    for entry in entries:
        if entry.dtype in _EXPONENTS and entry.num_bytes:
            dtype, exponent = _EXPONENTS[entry.dtype]
            bits = np.frombuffer(data[entry.first_byte : entry.first_byte + entry.num_bytes], dtype=dtype)
            if ((bits & bits.dtype.type(exponent)) == exponent).any():
                yield entry.box.key


def draw_rollback_losses(generator: random.Random, number: int, processes: int) -> Iterator[LossDuringRollback]:
    """Draw half of them with the launcher."""
    for count, nan in enumerate(draw_nans(generator, number, processes)):
        yield LossDuringRollback(nan=nan, everything=count % 2 == 0, delay_s=generator.uniform(0, 1.0))


def draw_nans(generator: random.Random, number: int, processes: int) -> Iterator[NaN]:
    """Draw each place equally often, on any rank."""
    for place in shuffled_cycle(generator, PLACES, number):
        yield NaN(
            place=place,
            rank=generator.randrange(processes),
            tensor=generator.randrange(1 << 30),
            element=generator.randrange(1 << 30),
            steps=generator.randint(0, 12),
        )

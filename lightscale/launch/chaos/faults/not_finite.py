"""NaN in a number of the model or the optimizer, in the memory of a running rank."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from lightscale.launch.chaos.faults.drawing import shuffled_cycle
from lightscale.launch.chaos.faults.memory import PLACES, MemoryOrder, went_back
from lightscale.launch.chaos.harness.trial import Bound, Runner
from lightscale.launch.chaos.harness.verify import Lines
from lightscale.training.checkpoints.header import read_header
from lightscale.training.checkpoints.reading import DamagedCheckpoint

# Of a number format: the unsigned integers of its size, and the bits of the exponent, all 1 in NaN and infinities.
_EXPONENTS = {
    "F64": ("<u8", 0x7FF << 52),
    "F32": ("<u4", 0xFF << 23),
    "BF16": ("<u2", 0xFF << 7),
    "F16": ("<u2", 0x1F << 10),
}


@dataclass(frozen=True, kw_only=True)
class NaN(MemoryOrder):
    """Sets one element to NaN in the memory of `rank`: it must reach no checkpoint, and the run must go back."""

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
        published: list[str] = []
        self.change(run, self, lambda events: _missed(events, published + not_finite(run.training.run.checkpoints)))
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

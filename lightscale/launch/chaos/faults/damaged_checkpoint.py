"""Damage to the files of a checkpoint, and its detection before anything is read from them."""

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from lightscale.errors import UserError
from lightscale.launch.chaos.faults.drawing import shuffled_cycle
from lightscale.launch.chaos.harness.trial import Bound, Runner
from lightscale.launch.chaos.harness.verify import DamagedStep, missed_damage
from lightscale.training.checkpoints.manifest import Manifest, read_manifest, verify_files
from lightscale.training.checkpoints.reading import DamagedCheckpoint

DAMAGE_KINDS = ("bit flipped", "truncated", "emptied", "removed", "page zeroed", "replaced by another file")

_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Kills everything and damages a file of the newest checkpoint before the next start."""

    how: str
    """One of `DAMAGE_KINDS`."""
    seed: int
    bound: ClassVar[Bound] = Bound(saves=3, seconds=120)

    @property
    def kind(self) -> str:
        """What it is, for the table."""
        return f"newest checkpoint: {self.how}"

    def inject(self, run: Runner) -> None:
        """Damage it, and wait for an attempt to read it."""
        # The run must have an older one to go back to.
        run.bring_down(lambda: len(checkpoint_directories(run.training.run.checkpoints)) > 1)
        newest = checkpoint_directories(run.training.run.checkpoints)[-1]
        file = damage(newest, self.how, random.Random(self.seed))
        step, events = int(newest.name.removeprefix("step-")), len(run.training.events())
        damaged = DamagedStep(step=step, directory=newest.name, file=file.name, after_events=events)
        run.trial.damaged.append(damaged)
        run.happened(self, lambda since: missed_damage(since, damaged))
        # A process that is killed before it recorded what it refused leaves no record of it.
        run.wait_for_first_step()


def draw_damages(generator: random.Random, number: int, processes: int) -> Iterator[Damage]:
    """Draw each kind equally often."""
    for how in shuffled_cycle(generator, DAMAGE_KINDS, number):
        yield Damage(how=how, seed=generator.randrange(1 << 30))


@dataclass(kw_only=True)
class DamageCheck:
    """Numbers of damaged copies tried, and the undetected ones."""

    flips: int = 0
    others: int = 0
    undetected: list[str] = field(default_factory=list)


def checkpoint_directories(checkpoints: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    # step-N.tmp is not finished, step-N.bad was refused, and step-N-weights is never read by the run.
    return sorted(path for path in checkpoints.glob("step-*") if path.name.removeprefix("step-").isdecimal())


def damage(checkpoint: Path, how: str, generator: random.Random) -> Path:
    """Damage one non-empty file of `checkpoint`; returns its path."""
    # An empty file has no bits to flip, and emptying it is no damage.
    files = [path for path in sorted(checkpoint.iterdir()) if path.stat().st_size]
    path = generator.choice(files)
    damage_file(path, how, generator)
    return path


def damage_file(path: Path, how: str, generator: random.Random) -> None:
    """Damage the non-empty file `path` in one of `DAMAGE_KINDS`."""
    data = bytearray(path.read_bytes())
    if how == "removed":
        path.unlink()
        return
    if how == "bit flipped":
        bit = generator.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
    elif how == "truncated":
        del data[generator.randrange(len(data)) :]
    elif how == "emptied":
        data.clear()
    elif how == "page zeroed":
        # A page of zeros would stay as it is, which is no damage.
        pages = [start for start in range(0, len(data), _PAGE_BYTES) if any(data[start : start + _PAGE_BYTES])]
        start = generator.choice(pages)
        end = min(start + _PAGE_BYTES, len(data))
        data[start:end] = bytes(end - start)
    else:
        assert how == "replaced by another file", how
        others = [other for other in sorted(path.parent.iterdir()) if other != path and other.read_bytes() != data]
        data = bytearray(generator.choice(others).read_bytes())
    path.write_bytes(data)


def check_detection(checkpoints: Path, scratch: Path, *, flips: int, seed: int) -> DamageCheck:
    """Flip bits of all files of the newest checkpoint, and damage each in every other way, on a copy in `scratch`.

    Each time, the verification before a read must refuse the checkpoint and name the file.
    """
    generator = random.Random(f"{seed} flips")
    found = DamageCheck()
    newest = checkpoint_directories(checkpoints)[-1]
    copy = scratch / newest.name
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(newest, copy)
    whole = _verify(copy)
    files = [path for path in sorted(copy.iterdir()) if path.stat().st_size]
    # In turn, not by size: nearly all flips would otherwise hit weights, and none the manifest.
    cases = [("bit flipped", files[number % len(files)]) for number in range(flips)]
    if flips:
        cases += [(how, path) for how in DAMAGE_KINDS if how != "bit flipped" for path in files]
    for how, path in cases:
        damage_file(path, how, generator)
        if how == "bit flipped":
            found.flips += 1
        else:
            found.others += 1
        if reason := _fault(copy, path, whole):
            found.undetected.append(f"{path.name} {how}: {reason}")
        # Repaired, so that each damage is met alone.
        shutil.copyfile(newest / path.name, path)
    # Otherwise refusals may have been because of a case before.
    assert _verify(copy) == whole
    shutil.rmtree(scratch)
    return found


def _verify(checkpoint: Path) -> Manifest:
    """What the ranks do together before they read a checkpoint."""
    manifest = read_manifest(checkpoint)
    verify_files(checkpoint, manifest, sorted(manifest.files))
    return manifest


def _fault(checkpoint: Path, damaged: Path, whole: Manifest) -> str | None:
    """What is wrong in how the checkpoint with the `damaged` file is met; None: nothing."""
    try:
        manifest = _verify(checkpoint)
    except DamagedCheckpoint as error:
        return None if str(damaged) in str(error) else f"refused, but the file is not named: {error}"
    except UserError as error:
        return f"refused for another reason: {error}"
    # Nothing is lost if the manifest says the same in other bytes.
    return None if manifest == whole and damaged.name not in manifest.files else "accepted"

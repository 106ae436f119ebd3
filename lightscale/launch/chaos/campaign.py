"""A campaign: the undisturbed run, then the same run under faults, again and again until all faults have happened.

DIR/reference/       the undisturbed run; used again by a campaign with the same configuration
    round-0001/      the runs under faults, each of the same steps
    round-0001.log   the output of their commands
    disk/            the run whose disk fills up
"""

import contextlib
import dataclasses
import datetime
import itertools
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightscale.config.files import difference, load
from lightscale.errors import UserError
from lightscale.launch.chaos.damage import DamageCheck, check_detection, checkpoint_directories
from lightscale.launch.chaos.schedule import Amounts, Fault, full_disks, schedule
from lightscale.launch.chaos.training import Training
from lightscale.launch.chaos.trial import Runner, Trial
from lightscale.launch.chaos.verify import Verdict, judge
from lightscale.runs.run_directory import RunDirectory, read_lines

# A start, a step and a save take far less. How long a rank may be silent differs from phase to phase.
# A save or a start may be silent for 10 hang time-outs (`training/health/heartbeat.py`); 12 are more.
_PATIENCE_S, _PATIENCE_HANG_TIMEOUTS = 180.0, 12
# Room for the checkpoints that are kept, one that is written, and what a save asks for beyond them.
_DISK_CHECKPOINTS, _DISK_SPARE_BYTES, _LARGEST_DISK_BYTES = 6, 32 << 20, 2 << 30


@dataclass(kw_only=True)
class CampaignResult:
    """What happened in all rounds."""

    reference_s: float = 0.0
    """Time of the undisturbed run, from its first event to its last."""
    trials: list[Trial] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    finished_s: list[float] = field(default_factory=list)
    """The same of each run that finished under faults."""
    detection: DamageCheck = field(default_factory=DamageCheck)
    skipped: list[str] = field(default_factory=list)
    """Faults that could not be tried, and why."""


class Campaign:
    """Runs of `config` with `overrides`, as `lightscale train` takes them, in `directory`.

    `report` is called with a line of text and the result so far: before each part, and after each fault.
    """

    def __init__(
        self,
        config: Path,
        overrides: Sequence[str],
        directory: Path,
        *,
        processes: int,
        seed: int,
        report: Callable[[str, CampaignResult], None],
    ) -> None:
        self.directory, self.processes, self.seed, self._report = directory, processes, seed, report
        self._command = [sys.executable, "-m", "lightscale", "train", str(config), *overrides]
        self.config = load(config, overrides)
        self.result = CampaignResult()
        self._reference = RunDirectory(directory / "reference")

    def run(self, amounts: Amounts, *, flips: int) -> CampaignResult:
        """Everything, in turn."""
        self._report("undisturbed run", self.result)
        self._run_reference()
        # A round of an earlier campaign would be resumed instead of begun.
        for old in [*self.directory.glob("round-*"), self.directory / "disk", self.directory / "disk.log"]:
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        self._report("damage to copies of a checkpoint", self.result)
        self.result.detection = check_detection(
            self._reference.checkpoints, self.directory / "damaged", flips=flips, seed=self.seed
        )
        queue = deque(schedule(amounts, processes=self.processes, seed=self.seed))
        for number in itertools.count(1):
            if not queue:
                break
            before = len(queue)
            self._round(f"round-{number:04d}", queue)
            # A run that ends before any fault could happen would do so again, and one that was given up does not
            # recover.
            if len(queue) == before or not self.result.trials[-1].finished:
                break
        self.result.skipped += [f"{one.kind}: the runs had ended, or were given up, before it" for one in queue]
        if amounts.full_disks:
            self._disk_round(amounts.full_disks)
        return self.result

    def _run_reference(self) -> None:
        reference = self._reference
        if reference.path.exists() and not self._is_undisturbed():
            shutil.rmtree(reference.path)
        if not reference.path.exists():
            training = self._training(reference)
            training.start()
            try:
                while not training.has_ended:
                    time.sleep(0.05)
            finally:
                # Also after Ctrl-C, which does not reach the command: it is in a session of its own.
                training.end()
            # Exit code 0 alone is not enough: the launcher may have restarted its ranks on the way.
            if not training.is_finished or not self._is_undisturbed():
                tail = "\n".join(training.log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
                raise UserError(f"the undisturbed run ended with {training.exit_code} ({training.log}):\n{tail}")
        self.result.reference_s = _duration_s(reference)

    def _is_undisturbed(self) -> bool:
        """Whether the reference was finished in one go, with this configuration and layout."""
        reference = self._reference
        starts = [event for event in read_lines(reference.events) if event["event"] == "start"]
        return (
            # A run that was itself resumed proves nothing about resuming.
            len(starts) == 1
            and starts[0]["world_size"] == self.processes
            and reference.is_finished(self.config)
            and difference(load(reference.config), self.config) == []
        )

    def _round(self, name: str, queue: deque[Fault]) -> None:
        run = RunDirectory(self.directory / name)
        disk_bytes = self._checkpoint_bytes()

        def report(trial: Trial, fault: Fault) -> None:
            self._report(f"{name}: {fault.kind}", dataclasses.replace(self.result, trials=[*self.result.trials, trial]))

        runner = Runner(
            self._training(run),
            queue,
            every=self.config.checkpoint.every or 1,
            disk_bytes=disk_bytes,
            patience_s=_PATIENCE_S + _PATIENCE_HANG_TIMEOUTS * self.config.restart.hang_timeout_s,
            report=report,
        )
        trial = runner.run()
        reference, lines, events = (read_lines(path) for path in (self._reference.metrics, run.metrics, run.events))
        self.result.trials.append(trial)
        if trial.finished:
            self.result.finished_s.append(_duration_s(run))
        self.result.verdicts.append(judge(reference, lines, events, trial.damaged, finished=trial.finished))

    def _disk_round(self, number: int) -> None:
        run = RunDirectory(self.directory / "disk")
        size = _DISK_CHECKPOINTS * self._checkpoint_bytes() + _DISK_SPARE_BYTES
        if size > _LARGEST_DISK_BYTES:
            self.result.skipped.append(f"full disk: checkpoints of {self._checkpoint_bytes():,} bytes are too large")
            return
        # Before the mount, whose mount point is in the directory of the run: a run is created only where nothing is
        # yet.
        run.create_or_open(self.config)
        with _small_disk(run.checkpoints, size) as problem:
            if problem is not None:
                self.result.skipped.append(f"full disk: {problem}")
                return
            queue = deque(full_disks(number, seed=self.seed))
            self._round("disk", queue)
            self.result.skipped += [f"{one.kind}: the run had ended before it" for one in queue]

    def _checkpoint_bytes(self) -> int:
        newest = checkpoint_directories(self._reference.checkpoints)[-1]
        return sum(path.stat().st_size for path in newest.iterdir())

    def _training(self, run: RunDirectory) -> Training:
        command = [*self._command, "--run", str(run.path), "--processes", str(self.processes)]
        self.directory.mkdir(parents=True, exist_ok=True)
        log = self.directory / f"{run.path.name}.log"
        log.unlink(missing_ok=True)
        return Training(command, run, faults_folder=self.directory / f"{run.path.name}.faults", log=log)


def _duration_s(run: RunDirectory) -> float:
    """From the first attempt's start to the newest event."""
    times = [datetime.datetime.fromisoformat(event["time"]) for event in read_lines(run.events)]
    return (times[-1] - times[0]).total_seconds()


@contextlib.contextmanager
def _small_disk(directory: Path, size: int) -> Iterator[str | None]:
    """Mount a file system of `size` bytes; the problem where that is not possible."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if not sys.platform.startswith("linux") or mount is None or umount is None:
        yield "needs Linux and mount"
        return
    directory.mkdir(parents=True, exist_ok=True)
    # A tmpfs of a given size needs no device, and reports ENOSPC as a disk does.
    command = [mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"a small file system cannot be mounted ({done.stderr.strip()}); root can"
        return
    try:
        yield None
    finally:
        subprocess.run([umount, str(directory)], check=True)

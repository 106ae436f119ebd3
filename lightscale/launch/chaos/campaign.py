"""A campaign: the undisturbed run, then the same run under faults, repeated until all faults have happened.

DIR/reference/       the undisturbed run; reused by a campaign with the same configuration
    round-0001/      the runs under faults, each of the same steps
    round-0001.log   the output of their commands
    disk/            the run with a full disk
            poisoned-0001/   the runs with NaN, which go back and jump over data
            peaceful-0001/   undisturbed runs with the same jumps
            store/           the copy of the store for all runs, if tokens change; other-store/ differs
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightscale.config.files import difference, load
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError
from lightscale.launch.chaos.faults.damaged_checkpoint import DamageCheck, check_detection, checkpoint_directories
from lightscale.launch.chaos.harness.training import Training
from lightscale.launch.chaos.harness.trial import Fault, Runner, Subject, Trial
from lightscale.launch.chaos.harness.verify import SKIPPED, Lines, Verdict, judge, jumps, undone
from lightscale.launch.chaos.schedule import schedule
from lightscale.launch.chaos.stores import LARGEST_STORE_BYTES, copy_store, num_bytes, write_other_store
from lightscale.runs.run_directory import RunDirectory, read_lines

# A start, a step and a save take far less. How long a rank may be silent differs from phase to phase.
# A save or a start may be silent for 10 hang time-outs (`training/health/heartbeat.py`); 12 are more.
_PATIENCE_S, _PATIENCE_HANG_TIMEOUTS = 180.0, 12
# Room for the checkpoints that are kept, one that is written, and what a save asks for beyond them.
_DISK_CHECKPOINTS, _DISK_SPARE_BYTES, _LARGEST_DISK_BYTES = 6, 32 << 20, 2 << 30


@dataclass(kw_only=True)
class CampaignResult:
    """Results of all rounds."""

    reference_s: float = 0.0
    """Duration of the undisturbed run, from its first event to its last."""
    trials: list[Trial] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    finished_s: list[float] = field(default_factory=list)
    """Duration of each run that finished under faults."""
    detection: DamageCheck = field(default_factory=DamageCheck)
    skipped: list[str] = field(default_factory=list)
    """Faults that could not be injected, with reasons."""


class Campaign:
    """Runs of `config` with `overrides`, as for `lightscale train`, in `directory`.

    `report` is called with a line of text and the result so far, before each part and after each fault. `keep` is
    called with the judged result, after each run.
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
        keep: Callable[[CampaignResult], None],
    ) -> None:
        self.directory, self.processes, self.seed = directory, processes, seed
        self._report, self._keep = report, keep
        self._arguments = ["train", str(config), *overrides]
        self.config = load(config, overrides)
        self.result = CampaignResult()
        self._reference = RunDirectory(directory / "reference")

    def run(self, amounts: Mapping[str, int], *, flips: int) -> CampaignResult:
        """Run all parts; `amounts` by the names in `SORTS`."""
        amounts = self._with_stores(amounts)
        self._report("undisturbed run", self.result)
        self._run_reference()
        # A round of an earlier campaign would be resumed instead of begun.
        for pattern in ("round-*", "disk*", "poisoned-*", "peaceful-*"):
            for old in self.directory.glob(pattern):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        self._report("damage to copies of a checkpoint", self.result)
        self.result.detection = check_detection(
            self._reference.checkpoints, self.directory / "damaged", flips=flips, seed=self.seed
        )
        ordinary, disk, poisoned = (
            deque(schedule(amounts, processes=self.processes, seed=self.seed, where=where))
            for where in ("ordinary", "small disk", "poisoned")
        )
        self._rounds("poisoned", poisoned, self._poisoned_round)
        self._rounds("round", ordinary, self._round)
        if disk:
            self._disk_round(disk)
        return self.result

    def _rounds(self, name: str, queue: deque[Fault], one: Callable[[str, deque[Fault]], None]) -> None:
        """Runs until all faults of `queue` have happened."""
        for number in itertools.count(1):
            if not queue:
                break
            before = len(queue)
            one(f"{name}-{number:04d}", queue)
            # A run that ends before any fault could happen would do so again, and one that was given up does not
            # recover.
            if len(queue) == before or not self.result.trials[-1].finished:
                break
        self.result.skipped += [f"{one.kind}: the runs had ended or were given up before it" for one in queue]

    def _with_stores(self, amounts: Mapping[str, int]) -> Mapping[str, int]:
        """Make the stores that faults of `amounts` need; returns the amounts that can be tried."""
        needed = [name for name in ("changed-tokens", "disagreements") if amounts.get(name)]
        if not needed:
            return amounts
        if self.config.data.store is None:
            self.result.skipped += [f"{name}: it changes data.store, and the run has data.stores" for name in needed]
            return {**amounts, **dict.fromkeys(needed, 0)}
        # Opened, because a copy of what is no store would be one more mistake.
        store = TokenStore(self.config.data.store).path
        if (size := num_bytes(store)) > LARGEST_STORE_BYTES:
            self.result.skipped += [f"{name}: {store} of {size:,} bytes is too large to copy" for name in needed]
            return {**amounts, **dict.fromkeys(needed, 0)}
        copy = (self.directory / "store").absolute()
        copy_store(store, copy)
        write_other_store(store, self._other_store)
        self._arguments.append(f"data.store={copy}")
        self.config = load(Path(self._arguments[1]), self._arguments[2:])
        return amounts

    @property
    def _other_store(self) -> Path:
        return (self.directory / "other-store").absolute()

    def _run_reference(self) -> None:
        reference = self._reference
        if reference.path.exists() and not self._is_undisturbed():
            shutil.rmtree(reference.path)
        if not reference.path.exists():
            self._train_in_peace(reference)
            # Exit code 0 alone is not enough: the launcher may have restarted its ranks on the way.
            if not self._is_undisturbed():
                raise UserError(f"the undisturbed run was disturbed ({self.directory / 'reference.log'})")
        self.result.reference_s = _duration_s(read_lines(reference.events))

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

    def _train_in_peace(self, run: RunDirectory) -> None:
        training = self._training(run)
        training.start()
        try:
            while not training.has_ended:
                time.sleep(0.05)
        finally:
            # Also after Ctrl-C, which does not reach the command: it is in a session of its own.
            training.end()
        if not training.is_finished:
            tail = "\n".join(training.output().splitlines()[-5:])
            raise UserError(f"the undisturbed run ended with {training.exit_code} ({training.log}):\n{tail}")

    def _round(self, name: str, queue: deque[Fault]) -> None:
        runner = self._runner(name, queue)
        try:
            runner.run()
        finally:
            # What was tried until Ctrl-C is kept.
            self._judge(runner, read_lines(self._reference.metrics))

    def _poisoned_round(self, name: str, queue: deque[Fault]) -> None:
        runner = self._runner(name, queue, program="lightscale.launch.chaos.poisoned_training")
        trial = runner.run()
        # Going back jumps over data, so that what comes then is compared with a run that has these jumps from its
        # beginning. What was undone has no counterpart there.
        peaceful = RunDirectory(self.directory / name.replace("poisoned", "peaceful"))
        self._report(
            f"{name}: the same jumps, undisturbed",
            dataclasses.replace(self.result, trials=[*self.result.trials, trial]),
        )
        peaceful.create_or_open(self.config)
        for at_tokens, skip_tokens in jumps(runner.training.events()):
            peaceful.event(SKIPPED, attempt=0, at_tokens=at_tokens, skip_tokens=skip_tokens)
        self._train_in_peace(peaceful)
        self._judge(runner, read_lines(peaceful.metrics))

    def _runner(self, name: str, queue: deque[Fault], program: str = "lightscale") -> Runner:
        """Of a run under faults of `queue`, started as `program`."""

        def report(trial: Trial, fault: Fault) -> None:
            self._report(f"{name}: {fault.kind}", dataclasses.replace(self.result, trials=[*self.result.trials, trial]))

        return Runner(
            self._training(RunDirectory(self.directory / name), program),
            queue,
            Subject(
                config=self.config,
                processes=self.processes,
                checkpoint_bytes=self._checkpoint_bytes(),
                other_store=self._other_store,
            ),
            patience_s=_PATIENCE_S + _PATIENCE_HANG_TIMEOUTS * self.config.restart.hang_timeout_s,
            report=report,
        )

    def _judge(self, runner: Runner, reference: Lines) -> None:
        trial, lines, events = runner.trial, runner.training.lines(), runner.training.events()
        skip = undone(lines, events)
        verdict = judge(reference, lines, events, trial.damaged, finished=trial.finished, skip=skip)
        self.result.trials.append(trial)
        self.result.verdicts.append(verdict)
        if trial.finished:
            self.result.finished_s.append(_duration_s(events))
        self._keep(self.result)

    def _disk_round(self, queue: deque[Fault]) -> None:
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
            self._round("disk", queue)
            self.result.skipped += [f"{one.kind}: the run had ended before it" for one in queue]

    def _checkpoint_bytes(self) -> int:
        newest = checkpoint_directories(self._reference.checkpoints)[-1]
        return sum(path.stat().st_size for path in newest.iterdir())

    def _training(self, run: RunDirectory, program: str = "lightscale") -> Training:
        command = [sys.executable, "-m", program, *self._arguments, "--run", str(run.path)]
        command += ["--processes", str(self.processes)]
        self.directory.mkdir(parents=True, exist_ok=True)
        log = self.directory / f"{run.path.name}.log"
        log.unlink(missing_ok=True)
        return Training(command, run, faults_folder=self.directory / f"{run.path.name}.faults", log=log)


def _duration_s(events: Lines) -> float:
    """From the first attempt's start to the newest event."""
    times = [datetime.datetime.fromisoformat(event["time"]) for event in events if "time" in event]
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
        yield f"cannot mount a small file system ({done.stderr.strip()}); run as root"
        return
    try:
        yield None
    finally:
        subprocess.run([umount, str(directory)], check=True)

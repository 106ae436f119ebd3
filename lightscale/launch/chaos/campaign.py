"""A campaign: the undisturbed run, then the same run under faults, repeated until all faults have happened.

DIR/reference/       the undisturbed run; reused by a campaign with the same configuration
    round-0001/      the runs under faults, each of the same steps
    round-0001.log   the output of their commands; of further hosts round-0001.node-b.log
    disk-0001/       the runs with a full disk
    guarded-0001/    the runs with flipped bits and wrong ranks, which compare weights, moments and gradients
    poisoned-0001/   the runs with NaN, which go back and jump over data
    peaceful-0001/   undisturbed runs with the same jumps
    store/           the copy of the store for all runs, if tokens change; other-store/ differs
    preload/         the library through which surroundings go wrong
    progress.json    the judged runs of a campaign that is not complete: the same command goes on after them
"""

import contextlib
import dataclasses
import datetime
import shutil
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightscale.config.files import difference, load
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError
from lightscale.launch.chaos.faults.damaged_checkpoint import DamageCheck, check_detection, checkpoint_directories
from lightscale.launch.chaos.faults.replaced import aside_of
from lightscale.launch.chaos.harness.costs import over_bound
from lightscale.launch.chaos.harness.hosts import Host, namespace_hosts, stem_of
from lightscale.launch.chaos.harness.keeping import CampaignProgress, Judged
from lightscale.launch.chaos.harness.training import Training
from lightscale.launch.chaos.harness.trial import Fault, Runner, Subject, Trial
from lightscale.launch.chaos.harness.verify import SKIPPED, Lines, Verdict, judge, jumps, undone
from lightscale.launch.chaos.preload.control import Control, problem
from lightscale.launch.chaos.schedule import WITH_DATA_RANKS, WITH_LIBRARY, WITH_STORES, Where, schedule
from lightscale.launch.chaos.stores import LARGEST_STORE_BYTES, copy_store, num_bytes, write_other_store
from lightscale.launch.commands.checks import num_gpus
from lightscale.runs.run_directory import RunDirectory, read_lines

# A start, a step and a save take far less. How long a rank may be silent differs from phase to phase.
# A save or a start may be silent for 10 hang time-outs (`training/health/heartbeat.py`); 12 are more.
_PATIENCE_S, _PATIENCE_HANG_TIMEOUTS = 180.0, 12
# Room for the checkpoints that are kept, one that is written, and what a save asks for beyond them.
_ROUNDS: dict[str, Where] = {
    "poisoned": "poisoned",
    "guarded": "guarded",
    "round": "ordinary",
    "disk": "small disk",
}
# How these are started: with ranks whose memory changes on order, and arguments more.
_POISONED = "lightscale.launch.chaos.poisoned_training"
_PROGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "poisoned": (_POISONED, ()),
    "guarded": (_POISONED, ("guard.compare_replicas_every=1", "guard.compare_gradients_every=1")),
}
_MOST_GIVEN_UP = 5
_DISK_CHECKPOINTS, _DISK_SPARE_BYTES, _LARGEST_DISK_BYTES = 6, 32 << 20, 2 << 30


@dataclass(kw_only=True)
class CampaignResult:
    """Results of all rounds."""

    reference_s: float = 0.0
    """Duration of the undisturbed run, from its first event to its last."""
    trials: list[Trial] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    over_bound: list[str] = field(default_factory=list)
    """Losses of steps beyond what the faults before them may cost."""
    finished_s: list[float] = field(default_factory=list)
    """Duration of each run that finished under faults."""
    detection: DamageCheck = field(default_factory=DamageCheck)
    skipped: list[str] = field(default_factory=list)
    """Faults that could not be injected, with reasons."""


class Campaign:
    """Runs of `config` with `overrides`, as for `lightscale train`, in `directory`.

    Runs under faults are on `hosts`; undisturbed ones always on this machine, which the others must equal.

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
        hosts: int = 1,
        seed: int,
        report: Callable[[str, CampaignResult], None],
        keep: Callable[[CampaignResult], None],
    ) -> None:
        self.directory, self.processes, self.num_hosts, self.seed = directory, processes, hosts, seed
        self._report, self._keep = report, keep
        self._arguments = ["train", str(config), *overrides]
        self.config = load(config, overrides)
        self.result = CampaignResult()
        self._reference = RunDirectory(directory / "reference")
        self._control: Control | None = None
        self._hosts: Sequence[Host] = ()

    def run(self, amounts: Mapping[str, int], *, flips: int) -> CampaignResult:
        """Run all parts, or go on where the same campaign was ended; `amounts` by the names in `SORTS`.

        Raises UserError where the hosts cannot be made, before anything is written.
        """
        with self._network() as self._hosts:
            return self._run(amounts, flips)

    def _run(self, amounts: Mapping[str, int], flips: int) -> CampaignResult:
        question = {"amounts": dict(amounts), "flips": flips, "seed": self.seed, "processes": self.processes}
        question |= {"hosts": self.num_hosts, "arguments": self._arguments}
        progress = CampaignProgress(self.directory / "progress.json", question)
        amounts = self._with_data_ranks(self._with_library(self._with_stores(amounts)))
        self._report("undisturbed run", self.result)
        self._run_reference()
        self._clear({f"{one.name}-{number:04d}" for one, number in _numbered(progress.judged)})
        for one in progress.judged:
            self._count(one)
        self._report("damage to copies of a checkpoint", self.result)
        self.result.detection = check_detection(
            self._reference.checkpoints, self.directory / "damaged", flips=flips, seed=self.seed
        )
        for name, where in _ROUNDS.items():
            queue = deque(schedule(amounts, processes=self.processes, seed=self.seed, where=where))
            self._rounds(name, queue, progress)
        progress.finish()
        return self.result

    def _network(self) -> contextlib.AbstractContextManager[Sequence[Host]]:
        """The hosts of runs under faults; of this machine nothing has to be made."""
        if self.num_hosts == 1:
            return contextlib.nullcontext(())
        if num_gpus(self.config):
            raise UserError(
                f"--hosts {self.num_hosts}: they would share the GPUs of this machine; set train.device=cpu"
            )
        # The same name for the next campaign in this directory, which removes what a killed one has left.
        return namespace_hosts(stem_of(self.directory), self.num_hosts)

    def _clear(self, kept: Collection[str]) -> None:
        """Remove the runs of an earlier campaign, which would be resumed instead of begun."""
        for name in (*_ROUNDS, "peaceful"):
            for old in self.directory.glob(f"{name}-*"):
                if old.name.partition(".")[0] not in kept:
                    if (checkpoints := RunDirectory(old).checkpoints).is_mount():
                        # A killed campaign leaves its small disk.
                        subprocess.run(["umount", str(checkpoints)], check=True)
                    shutil.rmtree(old) if old.is_dir() else old.unlink()

    def _rounds(self, name: str, queue: deque[Fault], progress: CampaignProgress) -> None:
        """Runs until all faults of `queue` have happened."""
        taken = progress.taken(name)
        # A campaign that goes on draws the same faults.
        for _ in range(min(taken, len(queue))):
            queue.popleft()
        number = sum(one.name == name for one in progress.judged)
        given_up = without_faults = 0
        while queue and max(given_up, without_faults) < _MOST_GIVEN_UP:
            number += 1
            with self._place(name, number, bool(queue)) as problem:
                if problem is not None:
                    self.result.skipped.append(problem)
                    return
                self._round(name, number, queue, progress)
            trial = self.result.trials[-1]
            given_up += not trial.finished
            # In a row: the runs end before any fault could happen.
            without_faults = without_faults + 1 if trial.too_late else 0
        self.result.skipped += [f"{one.kind}: the runs had ended or were given up before it" for one in queue]

    def _with_stores(self, amounts: Mapping[str, int]) -> Mapping[str, int]:
        """Make the stores that faults of `amounts` need; returns the amounts that can be tried."""
        needed = [name for name in WITH_STORES if amounts.get(name)]
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
        # Of a campaign that was killed while another store was in its place.
        shutil.rmtree(aside_of(copy), ignore_errors=True)
        copy_store(store, copy)
        write_other_store(store, self._other_store)
        self._arguments.append(f"data.store={copy}")
        self.config = load(Path(self._arguments[1]), self._arguments[2:])
        return amounts

    def _with_library(self, amounts: Mapping[str, int]) -> Mapping[str, int]:
        """Build the library that faults of `amounts` need; returns the amounts that can be tried."""
        needed = [name for name in WITH_LIBRARY if amounts.get(name)]
        if not needed:
            return amounts
        reason = problem() or ("the run has data.stores" if self.config.data.store is None else None)
        if reason is not None:
            self.result.skipped += [f"{name}: {reason}" for name in needed]
            return {**amounts, **dict.fromkeys(needed, 0)}
        assert self.config.data.store is not None, "asked before"
        self._control = Control(self.directory / "preload", self.config.data.store)
        return amounts

    def _with_data_ranks(self, amounts: Mapping[str, int]) -> Mapping[str, int]:
        """The amounts that can be tried on the data ranks of the run."""
        needed = [name for name in WITH_DATA_RANKS if amounts.get(name)]
        parallel = self.config.parallel
        if not needed or self.processes > parallel.tensor * parallel.pipeline * parallel.sequence:
            return amounts
        self.result.skipped += [f"{name}: one data rank has no other to compare with" for name in needed]
        return {**amounts, **dict.fromkeys(needed, 0)}

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
            tail = "\n".join(training.outputs()[0].splitlines()[-5:])
            raise UserError(f"the undisturbed run ended with {training.end_text} ({training.log}):\n{tail}")

    def _round(self, name: str, number: int, queue: deque[Fault], progress: CampaignProgress) -> None:
        before = len(queue)
        program, more = _PROGRAMS.get(name, ("lightscale", ()))
        runner = self._runner(f"{name}-{number:04d}", queue, program, more)
        try:
            trial = runner.run()
        except KeyboardInterrupt:
            # What was tried until Ctrl-C is kept; the jumps of these runs would take another one to compare with.
            if name != "poisoned":
                self._judge(name, before - len(queue), runner, read_lines(self._reference.metrics), progress)
            raise
        reference = self._reference
        if name == "poisoned":
            reference = self._train_with_jumps(f"peaceful-{number:04d}", runner, trial)
        taken = before - len(queue)
        if queue and not taken:
            # What was too much for a run that was given up, or came too late for one that is finished, would be that
            # again: the next run begins behind it.
            fault = queue.popleft()
            taken = 1
            if trial.finished:
                trial.too_late.append(fault.kind)
        self._judge(name, taken, runner, read_lines(reference.metrics), progress)

    def _train_with_jumps(self, name: str, runner: Runner, trial: Trial) -> RunDirectory:
        """An undisturbed run with the jumps of `runner` from its beginning. Undone steps have no counterpart there."""
        peaceful = RunDirectory(self.directory / name)
        self._report(f"{name}: undisturbed", dataclasses.replace(self.result, trials=[*self.result.trials, trial]))
        peaceful.create_or_open(self.config)
        for at_tokens, skip_tokens in jumps(runner.training.events()):
            peaceful.event(SKIPPED, attempt=0, at_tokens=at_tokens, skip_tokens=skip_tokens)
        self._train_in_peace(peaceful)
        return peaceful

    def _runner(self, name: str, queue: deque[Fault], program: str, more: Sequence[str]) -> Runner:
        """Of a run under faults of `queue`, started as `program` with the arguments `more`."""

        def report(trial: Trial, fault: Fault) -> None:
            self._report(f"{name}: {fault.kind}", dataclasses.replace(self.result, trials=[*self.result.trials, trial]))

        if self._control is not None:
            # A campaign that was killed may have left numbers.
            self._control.clear()
        return Runner(
            self._training(RunDirectory(self.directory / name), program, more, self._control, self._hosts),
            queue,
            Subject(
                config=self.config,
                processes=self.processes,
                checkpoint_bytes=self._checkpoint_bytes(),
                other_store=self._other_store,
                control=self._control,
            ),
            patience_s=_PATIENCE_S + _PATIENCE_HANG_TIMEOUTS * self.config.restart.hang_timeout_s,
            report=report,
        )

    def _judge(self, name: str, taken: int, runner: Runner, reference: Lines, progress: CampaignProgress) -> None:
        trial, lines, events = runner.trial, runner.training.lines(), runner.training.events()
        skip = undone(lines, events)
        judged = Judged(
            name=name,
            taken=taken,
            trial=trial,
            verdict=judge(reference, lines, events, trial.damaged, finished=trial.finished, skip=skip),
            over_bound=over_bound(trial, lines, events, runner.every),
        )
        progress.add(judged)
        self._count(judged)
        self._keep(self.result)

    def _count(self, judged: Judged) -> None:
        self.result.trials.append(judged.trial)
        self.result.verdicts.append(judged.verdict)
        self.result.over_bound += judged.over_bound
        self.result.skipped += [f"{kind}: all steps were done before it" for kind in judged.trial.too_late]
        if judged.trial.finished:
            # Not by the events: their clock may have jumped.
            self.result.finished_s.append(judged.trial.seconds)

    @contextlib.contextmanager
    def _place(self, name: str, number: int, needed: bool) -> Iterator[str | None]:
        """Where a run has its checkpoints: for "disk" a small file system. Gives the problem where there is none."""
        if name != "disk" or not needed:
            yield None
            return
        run = RunDirectory(self.directory / f"{name}-{number:04d}")
        size = _DISK_CHECKPOINTS * self._checkpoint_bytes() + _DISK_SPARE_BYTES
        if size > _LARGEST_DISK_BYTES:
            yield f"full disk: checkpoints of {self._checkpoint_bytes():,} bytes are too large"
            return
        # Before the mount, whose mount point is in the directory of the run: a run is created only where nothing is
        # yet.
        run.create_or_open(self.config)
        with _small_disk(run.checkpoints, size) as reason:
            yield None if reason is None else f"full disk: {reason}"

    def _checkpoint_bytes(self) -> int:
        newest = checkpoint_directories(self._reference.checkpoints)[-1]
        return sum(path.stat().st_size for path in newest.iterdir())

    def _training(
        self,
        run: RunDirectory,
        program: str = "lightscale",
        more: Sequence[str] = (),
        control: Control | None = None,
        hosts: Sequence[Host] = (),
    ) -> Training:
        command = [sys.executable, "-m", program, *self._arguments, *more, "--run", str(run.path)]
        command += ["--processes", str(self.processes // max(1, len(hosts)))]
        self.directory.mkdir(parents=True, exist_ok=True)
        log = self.directory / f"{run.path.name}.log"
        log.unlink(missing_ok=True)
        variables = {} if control is None else control.environment(run.path)
        if hosts:
            # Ranks of several hosts leave their output here when they fail.
            output = (self.directory / f"{run.path.name}.output").absolute()
            output.mkdir(exist_ok=True)
            variables["TMPDIR"] = str(output)
        folder = self.directory / f"{run.path.name}.faults"
        return Training(command, run, faults_folder=folder, log=log, variables=variables, hosts=hosts)


def _numbered(judged: Sequence[Judged]) -> Iterator[tuple[Judged, int]]:
    """Each with its number among those of its name."""
    counts: Counter[str] = Counter()
    for one in judged:
        counts[one.name] += 1
        yield one, counts[one.name]


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

"""Commands beside the training that are killed midway, and then given again."""

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lightscale.config.optimizers import optimizer_class
from lightscale.config.schedules.registry import schedule_of
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.launch.chaos.faults.damaged_checkpoint import checkpoint_directories
from lightscale.launch.chaos.faults.drawing import shuffled_cycle
from lightscale.launch.chaos.harness.training import own_environment
from lightscale.launch.chaos.harness.trial import POLL_S, Bound, Runner
from lightscale.parallel.optimizer_spec import AveragedSpec

# Of a command on a loaded machine.
_LATEST_S = 8.0
_DECAY_STEPS = 2


def _export(run: Runner, out: Path) -> list[str]:
    return ["export", str(run.training.run.path), "--to", str(out)]


def _evaluate(run: Runner, out: Path) -> list[str]:
    task = out.with_name("perplexity.toml")
    task.write_text(f'kind = "perplexity"\npaths = ["{_text(out)}"]\n', encoding="utf-8")
    return ["evaluate", str(run.training.run.path), "--tasks", str(task), "--processes", "1", "--again"]


def _prune(run: Runner, out: Path) -> list[str]:
    return ["checkpoint", "prune", str(run.training.run.path), "--keep", "2"]


def _anneal(run: Runner, out: Path) -> list[str]:
    words = ["train", str(run.training.run.path), "--anneal", str(_DECAY_STEPS), "--run", str(out)]
    return [*words, "--processes", str(run.subject.processes)]


def _has_branches(config: RunConfig) -> bool:
    optimizer = config.optimizer
    is_averaged = issubclass(optimizer_class(optimizer.name), AveragedSpec)
    return not is_averaged and schedule_of(optimizer).stable_steps(optimizer, config.total_steps) is not None


def _add(run: Runner, out: Path) -> list[str]:
    store = run.subject.config.data.store
    assert store is not None, "the campaign tries this on one store"
    return ["data", "add", str(store), str(_text(out)), "--out", str(out)]


def _text(out: Path) -> Path:
    text = out.with_name("more.txt")
    text.write_text("A document that the store does not have.\n" * 50, encoding="utf-8")
    return text


@dataclass(frozen=True, kw_only=True)
class SideCommand:
    """A command and when it can be given."""

    words: Callable[[Runner, Path], list[str]]
    """Its arguments; what it makes is the folder, if it makes one."""
    needs_the_run: bool = False
    """Whether it is refused while the run trains."""
    works: Callable[[RunConfig], bool] = lambda config: True
    """Whether it does its work on a run of this configuration; else it must be refused."""
    is_made_once: bool = False
    """Whether it refuses to make again what is there."""


COMMANDS = {
    "export": SideCommand(words=_export, is_made_once=True),
    "evaluate": SideCommand(words=_evaluate),
    "checkpoint prune": SideCommand(words=_prune, needs_the_run=True),
    "train --anneal": SideCommand(words=_anneal, works=_has_branches),
    "data add": SideCommand(words=_add, is_made_once=True),
}


@dataclass(frozen=True, kw_only=True)
class KilledCommand:
    """A command reads the run or its store, is killed, and must do its work when it is given again."""

    name: str
    """One of `COMMANDS`."""
    delay_s: float

    @property
    def bound(self) -> Bound:
        """The most that it may cost."""
        # Where the run is in its way, training is killed.
        return Bound(saves=2 if COMMANDS[self.name].needs_the_run else 0, seconds=60)

    @property
    def kind(self) -> str:
        """What it is, for the table."""
        return f"{self.name} killed"

    def inject(self, run: Runner) -> None:
        """Start it beside the training, kill it, and give it again."""
        chosen, checkpoints = COMMANDS[self.name], run.training.run.checkpoints
        run.wait(lambda: bool(checkpoint_directories(checkpoints)))
        if chosen.needs_the_run:
            run.bring_down(lambda: len(checkpoint_directories(checkpoints)) > 1)
            run.mend_for_start()
        folder = (run.training.faults_folder / "command").absolute()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        out, log = folder / "out", folder / "log"
        words = chosen.words(run, out)
        first = _start(run, words, log)
        try:
            self._wait(run, first, self.delay_s, chosen)
        finally:
            _kill(first)
        # Killed behind its work, or not in time: what is there must be whole.
        if chosen.is_made_once and out.exists():
            words = ["verify", str(out)]
        # The second time training may have ended, or saved: it is no other question to the command.
        second = _start(run, words, log)
        try:
            self._wait(run, second, run.patience_s, chosen)
        finally:
            _kill(second)
        missed, required = None, 0 if chosen.works(run.subject.config) else UserError.EXIT_CODE
        if second.returncode != required:
            tail = " / ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])
            missed = f"`lightscale {' '.join(words)}` behind it ended with {second.returncode}, not {required}: {tail}"
        run.happened(self, lambda since: missed)
        run.wait_for_steps(1)

    def _wait(self, run: Runner, process: subprocess.Popen[bytes], seconds: float, chosen: SideCommand) -> None:
        """Until it ends, at most so long."""
        deadline = time.monotonic() + seconds
        if not chosen.needs_the_run:
            run.wait(lambda: process.poll() is not None or time.monotonic() > deadline)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _start(run: Runner, words: list[str], log: Path) -> subprocess.Popen[bytes]:
    # Where the lock of a run that was killed shows it to be so.
    command = run.training.hosts[0].inside([sys.executable, "-m", "lightscale", *words])
    with log.open("wb") as file:
        return subprocess.Popen(
            command, env=own_environment(), stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()


def draw_killed_commands(generator: random.Random, number: int, processes: int) -> Iterator[KilledCommand]:
    """Draw each command equally often."""
    for name in shuffled_cycle(generator, tuple(COMMANDS), number):
        yield KilledCommand(name=name, delay_s=generator.uniform(0, _LATEST_S))

"""A corpus, the stores made of it, and the real command on them."""

import dataclasses
import json
import random
import runpy
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lightscale.cli import main
from lightscale.launch.launcher.rank import rank_of
from lightscale.runs.run_directory import RunDirectory, read_lines

ROOT = Path(__file__).resolve().parents[2]
warm_commands = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "helpers" / "warm_commands.py")))

RUN = f"""
extends = ["{ROOT}/configs/arch/tnl.toml", "{ROOT}/configs/size/tiny.toml"]

[model]
vocab_size = 320

[data]
store = "store"
sequence_length = 64

[data.validation.held]
source = "words-validation"
sequences = 5

[data.validation.other]
source = "other"
store = "other"
sequences = 4

[optimizer]
lr = 1e-3
schedule = "cosine"
warmup_steps = 5

[train]
steps = 40
global_batch_size = 4
micro_batch_size = 2
validate_every = 20

[checkpoint]
every = 20
keep_every = 20

[metrics]
position_buckets = 4
"""


def write_corpus(path: Path, *, seed: int) -> None:
    """Documents of invented words that follow one another in a few ways, so that there is something to learn."""
    generator = random.Random(seed)
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(2, 6))) for _ in range(60)]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(80):
            start = generator.randrange(len(words))
            text = " ".join(words[(start + 7 * step) % len(words)] for step in range(generator.randint(20, 200)))
            file.write(json.dumps({"text": text}) + "\n")


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run.toml, and two stores with one tokenizer: ``store`` (words, words-validation) and ``other`` (other)."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "run.toml").write_text(RUN, encoding="utf-8")
    for name, out, options in (
        ("words", "store", ["--vocab-size", "300", "--validation", "0.1"]),
        ("other", "other", ["--tokenizer", str(folder / "store"), "--validation", "0"]),
    ):
        write_corpus(folder / f"{name}.jsonl", seed=len(out))
        command = ["data", "prepare", str(folder / f"{name}.jsonl"), "--out", str(folder / out), *options, "--json"]
        assert main(command) == 0
    return folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        return self.stderr.splitlines()[-1]


class Running:
    """``lightscale train`` under way."""

    def __init__(self, folder: Path, words: tuple[str, ...], env: Mapping[str, str] | None = None) -> None:
        self.process = warm_commands.Command(["train", *words], cwd=folder, env=env)

    def wait_for_step(self, run: RunDirectory, step: int, timeout_s: float = 200.0, attempt: int | None = None) -> None:
        """Until ``step`` was taken, by ``attempt`` if that is given."""
        deadline = time.monotonic() + timeout_s

        def is_taken() -> bool:
            if attempt is None:
                return run.progress()[0] >= step
            return any(line["step"] >= step and line["attempt"] == attempt for line in read_lines(run.metrics))

        while not is_taken():
            assert self.process.poll() is None, self.end().stderr
            assert time.monotonic() < deadline, f"step {step} was not reached"
            time.sleep(0.005)

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks, by rank."""
        ranks = {rank_of(child): child for child in psutil.Process(self.process.pid).children()}
        return [ranks[rank] for rank in sorted(rank for rank in ranks if rank is not None)]

    def end(self, timeout_s: float = 200.0) -> Ended:
        stdout, stderr = self.process.communicate(timeout=timeout_s)
        return Ended(code=self.process.returncode, stdout=stdout, stderr=stderr)


@pytest.fixture
def start(workplace: Path) -> Iterator[Callable[..., Running]]:
    """``start("run.toml", …)``: ``lightscale train …`` in the background; what is left at the end is killed."""
    started: list[Running] = []

    def start(*words: str, env: Mapping[str, str] | None = None) -> Running:
        started.append(Running(workplace, words, env))
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.process.communicate()


@pytest.fixture(scope="session")
def train(workplace: Path) -> Callable[..., Ended]:
    """``train("run.toml", …)``: ``lightscale train …`` to its end."""
    return lambda *words: Running(workplace, words).end()


@pytest.fixture(scope="session")
def whole(workplace: Path, train: Callable[..., Ended]) -> tuple[RunDirectory, Ended]:
    """A run of 40 steps in one go, on two sequence ranks."""
    words = ["run.toml", "parallel.sequence=2", "train.profile_steps=[2, 3]", "--run", "runs/whole", "--processes", "2"]
    ended = train(*words)
    assert ended.code == 0, ended.stderr
    return RunDirectory(workplace / "runs/whole"), ended


def trajectory(lines: list[dict[str, Any]]) -> dict[int, tuple[Any, ...]]:
    """Step to what must be the same, bit by bit, in an interrupted run."""
    return {
        line["step"]: (line["tokens"], line["loss"], line["grad_norm"], line["lr"], line.get("validation"))
        for line in lines
    }


@pytest.fixture(scope="session")
def steps_of() -> Callable[[list[dict[str, Any]]], dict[int, tuple[Any, ...]]]:
    return trajectory

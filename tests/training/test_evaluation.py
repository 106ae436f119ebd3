"""`[evaluation]`: a run in training is measured between steps, and trains as if it were not."""

import json
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.runs.followers import Follower
from lightscale.runs.goodput import run_goodput
from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics
from lightscale.training.checkpoints.directories import list_steps

ROOT = Path(__file__).resolve().parents[2]
warm_commands = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "helpers" / "warm_commands.py")))

# Several starts of several processes, on a machine that may be busy.
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STEPS = ["train.steps=9", "train.validate_every=0", "checkpoint.every=6", "metrics.parameter_norms_every=0"]
EVALUATION = ['evaluation.tasks=["held.toml"]', "evaluation.every_steps=4"]
LAYOUTS = {
    "alone": [],
    "data": ["--processes", "2"],
    "tensor": ["parallel.tensor=2", "--processes", "2"],
    "sequence": ["parallel.sequence=2", "--processes", "2"],
}
# A task of a package that is installed here. What TROUBLE says happens to it; random numbers it draws in any case.
TROUBLE = """
import os, random, signal
from pathlib import Path
import numpy, torch
from lightscale.evaluation.inference.forward import Forward
from lightscale.evaluation.registry import TaskEntry
from lightscale.evaluation.results import PartialAnswers
from lightscale.evaluation.task import Score, Scores, Task

append, forward, what = PartialAnswers.append, Forward.score, os.environ["TROUBLE"]

def stopping(kept, answers):
    append(kept, answers)
    if what == "stop" and not Path("stopped").exists():
        Path("stopped").write_text("")
        os.kill(os.getpid(), signal.SIGTERM)

def failing(self, batches):
    if what == "rank 1" and os.environ["RANK"] == "1":
        raise RuntimeError("the sun was in its eyes")
    yield from forward(self, batches)

PartialAnswers.append, Forward.score = stopping, failing

class Trouble(Task):
    def check(self, tokenizer):
        pass

    def requests(self, encoder):
        draw()
        # Longer than the first block.
        return [encoder.rolling("abc def ghij " * (200 + number)) for number in range(6)]

    def score(self, answers):
        draw()
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return Scores(scores={"answers": Score(value=float(len(answers)))})

def draw():
    return random.random(), numpy.random.rand(), torch.rand(3)

TASK = TaskEntry(cls="trouble:Trouble", preset={"name": "trouble"})
"""


@pytest.fixture
def trouble(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """The words of a run with the task `trouble`, to which something happens."""
    package = workplace / "package"
    (package / "trouble-1.dist-info").mkdir(parents=True, exist_ok=True)
    (package / "trouble.py").write_text(TROUBLE)
    (package / "trouble-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: trouble\nVersion: 1\n")
    (package / "trouble-1.dist-info" / "entry_points.txt").write_text(
        "[lightscale.evaluation_tasks]\ntrouble = trouble:TASK\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(package))

    def words(what: str) -> list[str]:
        monkeypatch.setenv("TROUBLE", what)
        return ["run.toml", *STEPS, "evaluation.every_steps=4", 'evaluation.tasks=["trouble", "held.toml"]']

    return words


@pytest.fixture(scope="module")
def tasks(workplace: Path) -> Path:
    (workplace / "held.toml").write_text('kind = "perplexity"\nstore = "store"\nsource = "words-validation"\n')
    return workplace


def losses(run: RunDirectory) -> list[tuple[Any, ...]]:
    return [(line["step"], line["tokens"], line["loss"], line["grad_norm"]) for line in read_metrics(run.metrics)]


def result(run: RunDirectory, step: int, task: str = "held") -> dict[str, Any]:
    text = (run.evaluation / f"step-{step:08d}" / f"{task}.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def plain(folder: Path, train: Callable[..., Any], layout: str) -> RunDirectory:
    """A run that is not evaluated; there is one of each layout."""
    run = RunDirectory(folder / f"runs/plain-{layout}")
    if not run.path.exists():
        ended = train("run.toml", *STEPS, *LAYOUTS[layout], "--run", str(run.path))
        assert ended.code == 0, ended.stderr
    return run


SLOW = [pytest.param(layout, marks=pytest.mark.long) for layout in ("alone", "data", "tensor")]


@pytest.fixture(scope="module", params=["sequence", *SLOW])
def evaluated(
    request: pytest.FixtureRequest, tasks: Path, train: Callable[..., Any]
) -> tuple[RunDirectory, RunDirectory]:
    """A run on each layout that is evaluated, and one that is not."""
    layout = request.param
    run = tasks / f"runs/evaluated-{layout}"
    ended = train("run.toml", *STEPS, *LAYOUTS[layout], *EVALUATION, "--run", str(run))
    assert ended.code == 0, ended.stderr
    assert "step 9/9  evaluation  held word_perplexity " in ended.stderr
    return RunDirectory(run), plain(tasks, train, layout)


def test_losses_and_checkpoints_are_bitwise_those_of_a_run_without(
    evaluated: tuple[RunDirectory, RunDirectory],
) -> None:
    one, other = evaluated
    assert losses(one) == losses(other)
    assert_equal_checkpoints(one, other)


def assert_equal_checkpoints(one: RunDirectory, other: RunDirectory) -> None:
    for file in ("rank-00000.safetensors", "rank-00000.json"):
        first, second = (run.checkpoints / "step-00000009" / file for run in (one, other))
        assert first.read_bytes() == second.read_bytes(), "weights, moments and random states"


def test_the_scores_are_those_of_the_checkpoint(evaluated: tuple[RunDirectory, RunDirectory]) -> None:
    run = evaluated[0]
    during = result(run, 9)
    assert main(["evaluate", f"{run.path}@9", "--tasks", str(run.path.parents[1] / "held.toml")]) == 0
    after = result(run, 9)
    assert (during["checkpoint"], after["checkpoint"]) == (None, "step-00000009")
    assert during["data"] == after["data"] and during["identity"] != after["identity"]
    for name, score in after["scores"].items():
        assert during["scores"][name]["value"] == pytest.approx(score["value"], rel=2e-5), name
        assert during["scores"][name]["standard_error"] == pytest.approx(score["standard_error"], rel=1e-3), name


def test_the_records(evaluated: tuple[RunDirectory, RunDirectory]) -> None:
    run = evaluated[0]
    lines = {line["step"]: line for line in read_metrics(run.metrics)}
    assert [step for step, line in lines.items() if "evaluation" in line] == [4, 8, 9]
    for step in (4, 8):
        scores = {name: score["value"] for name, score in result(run, step)["scores"].items()}
        assert lines[step]["evaluation"] == {"held": scores}
    shown = curves(run.tensorboard)
    assert [step for step, _ in shown["evaluation/held/bits_per_byte"]] == [4, 8, 9]
    assert dict(shown["evaluation/held/bits_per_byte"])[4] == pytest.approx(scores_of(run, 4)["bits_per_byte"])
    goodput = run_goodput(run)
    assert goodput is not None
    spent = [event["seconds"] for event in read_lines(run.events) if event["event"] == "evaluation"]
    assert len(spent) == 3 and goodput.evaluation_s == pytest.approx(sum(spent))
    assert goodput.other_s + goodput.evaluation_s + goodput.effective_s < goodput.wall_s


def scores_of(run: RunDirectory, step: int, task: str = "held") -> dict[str, float]:
    return {name: score["value"] for name, score in result(run, step, task)["scores"].items()}


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    board.Reload()
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_what_fails_on_one_rank_is_reported_and_stops_nothing(
    tasks: Path, train: Callable[..., Any], trouble: Callable[[str], list[str]]
) -> None:
    run = RunDirectory(tasks / "runs/failing")
    ended = train(*trouble("rank 1"), *LAYOUTS["data"], "--run", str(run.path))
    assert ended.code == 0, ended.stderr
    failures = [event for event in read_lines(run.events) if event["event"] == "evaluation_failed"]
    assert [(event["step"], event["task"]) for event in failures] == [
        (step, task) for step in (4, 8, 9) for task in ("trouble", "held")
    ]
    assert {event["reason"] for event in failures} == {"RuntimeError: rank 1: RuntimeError: the sun was in its eyes"}
    assert "WARNING: the evaluation of held after step 4 failed: RuntimeError: rank 1: " in ended.stderr
    assert [line["step"] for line in read_metrics(run.metrics)] == list(range(1, 10))
    assert not list(run.evaluation.glob("*/*.json"))


def test_a_stopped_evaluation_goes_on_with_what_is_left(
    tasks: Path, train: Callable[..., Any], trouble: Callable[[str], list[str]]
) -> None:
    (tasks / "stopped").unlink(missing_ok=True)
    run = RunDirectory(tasks / "runs/evaluation-stopped")
    words = [*trouble("stop"), *LAYOUTS["sequence"], "--run", str(run.path)]
    ended = train(*words)
    assert ended.code == 75, ended.stderr
    assert run.read_status() is not None and run.progress()[0] == 4
    (kept,) = (run.evaluation / "step-00000004").iterdir()
    before = len(kept.read_text(encoding="utf-8").splitlines()) - 1
    assert kept.name.endswith(".partial.jsonl") and 0 < before < 6
    (event,) = (event for event in read_lines(run.events) if event["event"] == "evaluation")
    assert (event["step"], event["tasks"], event["is_complete"]) == (4, [], False)

    ended = train(*words)
    assert ended.code == 0, ended.stderr
    assert sorted(path.name for path in (run.evaluation / "step-00000004").glob("*.json*")) == [
        "held.json",
        "trouble.json",
    ]
    whole, rest = result(run, 8, "trouble"), result(run, 4, "trouble")
    assert whole["scores"] == rest["scores"] == {"answers": {"value": 6.0, "standard_error": None}}
    assert 0 < rest["took"]["asked_tokens"] < whole["took"]["asked_tokens"]
    assert [step for step, _ in curves(run.tensorboard)["evaluation/trouble/answers"]] == [4, 8, 9]
    other = plain(tasks, train, "sequence")
    assert losses(run) == losses(other)
    # Python's generator, NumPy's and PyTorch's, from which the task has drawn.
    assert_equal_checkpoints(run, other)


@pytest.mark.long
def test_a_run_that_is_stopped_in_its_last_evaluation_is_finished_later(
    tasks: Path, train: Callable[..., Any], trouble: Callable[[str], list[str]]
) -> None:
    (tasks / "stopped").unlink(missing_ok=True)
    run = RunDirectory(tasks / "runs/last")
    words = [*trouble("stop"), "train.steps=6", "evaluation.every_steps=6", "--run", str(run.path)]
    ended = train(*words)
    assert ended.code == 75, ended.stderr
    assert run.progress()[0] == 6 and list_steps(run.checkpoints) == [6]
    ended = train(*words)
    assert ended.code == 0, ended.stderr
    assert scores_of(run, 6, "trouble") == {"answers": 6.0}
    assert train(*words).stderr.endswith("is finished: all 6 steps are done\n")


@pytest.mark.long
def test_an_evaluation_that_the_ranks_do_not_survive_is_left_out(
    tasks: Path, train: Callable[..., Any], trouble: Callable[[str], list[str]]
) -> None:
    run = RunDirectory(tasks / "runs/evaluation-killed")
    ended = train(*trouble("kill"), "train.steps=7", "checkpoint.every=1", "--run", str(run.path))
    assert ended.code == 0, ended.stderr
    kinds = [(event["event"], event["step"]) for event in read_lines(run.events) if "evaluation" in event["event"]]
    assert kinds == [
        (kind, step)
        for step in (4, 7)
        for kind in ("evaluation_begun", "evaluation_begun", "evaluation_failed", "evaluation")
    ]
    assert [line["step"] for line in read_metrics(run.metrics)] == list(range(1, 8))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (['evaluation.tasks=["perplexty"]'], "did you mean perplexity?"),
        (['evaluation.tasks=["lambada"]'], "data/evaluation/lambada/lambada_test.jsonl"),
        (['evaluation.tasks=["none.toml"]'], "none.toml: cannot read the task file"),
    ],
)
def test_tasks_are_checked_before_anything_is_written(
    tasks: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tasks)
    assert main(["train", "run.toml", "evaluation.every_steps=4", *words, "--run", "runs/evaluation-never"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs/evaluation-never").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluation.every_steps=4"], "evaluation.tasks is empty"),
        (
            ["evaluation.every_steps=4", 'evaluation.tasks=["held.toml"]', "parallel.virtual_stages=2"],
            "--follow",
        ),
    ],
)
def test_what_the_configuration_refuses(
    tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tasks)
    assert main(["train", "run.toml", *words, "--run", "runs/evaluation-never"]) == 78
    assert message in capsys.readouterr().err


def follow(folder: Path, run: RunDirectory) -> Any:
    """``lightscale evaluate RUN --follow`` in the background."""
    return warm_commands.Command(["evaluate", str(run.path), "--tasks", "held.toml", "--follow", "--json"], cwd=folder)


def test_a_run_is_followed_by_another_job(
    tasks: Path, train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tasks)
    run = RunDirectory(tasks / "runs/followed")
    words = ["train.steps=8", "train.validate_every=0", "checkpoint.every=2", "checkpoint.keep_every=none"]
    run.create_or_open(load("run.toml", words))
    process = follow(tasks, run)
    try:
        deadline = time.monotonic() + 200
        while not list(run.evaluation.glob("followers/*.json")):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
            time.sleep(0.05)
        ended = train("run.toml", *words, "--run", str(run.path))
        assert ended.code == 0, ended.stderr
        stdout, stderr = process.communicate(timeout=200)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, stderr
    # A save that is due while the one before is still being written is skipped: on a slow disk.
    skipped = [event["step"] for event in read_lines(run.events) if event["event"] == "checkpoint_skipped"]
    saved = [step for step in (2, 4, 6, 8) if step not in skipped]
    # Two are kept; the first ones were not removed before they had been evaluated.
    assert saved[-1] == 8 and list_steps(run.checkpoints)[-2:] == saved[-2:]
    results = json.loads(stdout)
    evaluated = [(one["step"], one["checkpoint"]) for one in results]
    assert evaluated == [(step, f"step-{step:08d}") for step in saved], (stderr, ended.stderr)
    assert results[0] == result(run, 2)
    assert not list(run.evaluation.glob("followers/*.json"))
    shown = curves(run.tensorboard / "evaluation")["evaluation/held/bits_per_byte"]
    assert shown == [(one["step"], pytest.approx(one["scores"]["bits_per_byte"]["value"])) for one in results]
    # The same command again finds all of it.
    assert main(["evaluate", "runs/followed", "--tasks", "held.toml", "--follow"]) == 0
    assert result(run, 8) == results[-1]


def test_what_a_follower_needs_is_not_removed(
    tasks: Path, train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tasks)
    run = RunDirectory(tasks / "runs/needed")
    words = ["train.steps=8", "train.validate_every=0", "checkpoint.every=2", "checkpoint.keep_every=none"]
    run.create_or_open(load("run.toml", words))
    with Follower(run, ["held"]) as follower:
        follower.set_done([4])
        ended = train("run.toml", *words, "--run", str(run.path))
        assert ended.code == 0, ended.stderr
        # Two are kept, and what the follower needs. A save is skipped where the one before takes as long as two steps.
        steps = list_steps(run.checkpoints)
        assert steps[0] == 2 and steps[-1] == 8, steps
        assert main(["checkpoint", "prune", str(run.path)]) == 0
        assert list_steps(run.checkpoints) == steps
    assert main(["checkpoint", "prune", str(run.path)]) == 0
    assert list_steps(run.checkpoints) == steps[-2:]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs/one@3", "--follow"], "--follow evaluates every checkpoint; remove the step"),
        (["runs/one", "runs/one", "--follow"], "--follow takes one run, not 2"),
        (["runs/evaluation-none", "--follow"], "runs/evaluation-none"),
    ],
)
def test_what_cannot_be_followed(
    tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tasks)
    RunDirectory("runs/one").create_or_open(load("run.toml"))
    assert main(["evaluate", *words, "--tasks", "held.toml"]) == 2
    assert message in capsys.readouterr().err

"""Runs with bad numbers: skipped steps, going back to a checkpoint, jumps over data, and changed weights.

Several runs in one process. What is bad goes with the data, so that a run that comes there again finds it again: only
then can an interrupted run be compared with one that was not.
"""

import json
import math
import os
import runpy
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.data_pipeline.loading.prefetch import Prefetcher
from lightscale.data_pipeline.loading.samples import SKIP_EVENT, run_loader, step_content
from lightscale.launch.chaos.poisoned_training import WrongProducts
from lightscale.parallel.engine import Engine
from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics
from lightscale.training.checkpoints.directories import list_steps
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.health.replicas import SilentCorruption

commands = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "rank_commands.py"))["commands"]

# Several runs, on a machine that may be busy.
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

RunRanks = Callable[..., list[Any]]
StepsOf = Callable[[list[dict[str, Any]]], dict[int, tuple[Any, ...]]]
STEP_TOKENS = 256
WORDS = (
    "train.validate_every=0",
    "checkpoint.asynchronous=false",
    "checkpoint.keep_every=none",
    "optimizer.schedule=constant",
)


class Crash(RuntimeError):
    """The process ends here."""


@dataclass(frozen=True)
class Plan:
    """One start of a run, and what goes wrong in it."""

    run: str
    words: tuple[str, ...]
    bad: dict[int, str] = field(default_factory=dict)
    """By the number of a step's data, from 1 in the order of a run without jumps: nan, loss or gradient."""
    rank: int | None = None
    """The rank that has it; none: all."""
    crash: str | int | None = None
    """Behind put_aside, or behind the event of that name, or before a step."""
    flip: int | None = None
    """The last rank's weights change before this step."""
    poison: int | None = None
    """Before this step, once, a moment of the optimizer becomes NaN on the last rank."""
    wrong: int | None = None
    """From this step on, the last rank's products of matrices have a relative error."""


def starts(rank: int, world_size: int, init_method: str, folder: str, plans: list[dict[str, Any]]) -> list[Any]:
    """How each start ended, (exit code, stderr) or the crash's name, and the tokens of its steps."""
    found = []
    for number, plan in enumerate(Plan(**fields) for fields in plans):
        trained: dict[int, Tensor] = {}
        end: Any
        with disturbed(plan, rank, world_size, trained):
            try:
                ((code, text),) = commands(
                    rank, world_size, f"{init_method}-{number}", folder, [["train", *plan.words, "--run", plan.run]]
                )
                end = (code, text)
            except (Crash, SilentCorruption) as error:
                end = str(error)
        found.append((end, trained))
    return found


@contextmanager
def disturbed(plan: Plan, rank: int, world_size: int, trained: dict[int, Tensor]) -> Iterator[None]:
    """Engine, loader and run directory as ``plan`` says; ``trained``: gets the tokens (b, n) of each step."""
    next_step, sum_losses, put_aside = Prefetcher.next_step, Engine._sum_losses, Checkpoints.put_aside
    forward_backward, event = Engine.forward_backward, RunDirectory.event
    bad: list[str | None] = [None]
    poisoned: list[int] = []

    def next_or_crash(self: Prefetcher) -> Any:
        tokens = self._loader.tokens
        step, data = tokens // STEP_TOKENS + 1, self._loader.skips.position(tokens) // STEP_TOKENS + 1
        if plan.crash == step:
            raise Crash(f"before step {step}")
        bad[0] = plan.bad.get(data) if plan.rank in (None, rank) else None
        batches = next_step(self)
        trained[step] = torch.cat([batch.tokens for batch in batches])
        return batches

    def flip_and_go(self: Engine, batches: Any, **how: Any) -> Any:
        if plan.flip == max(trained) and rank == world_size - 1:
            words = next(self.flat_weights())[0].view(torch.int32)
            words[7] ^= 1 << 20
        if plan.poison == max(trained) and rank == world_size - 1 and not poisoned:
            poisoned.append(max(trained))
            moment = next(shard for shard in self.owned_shards() if shard.box.key.startswith("exp_avg_sq."))
            moment.data.view(-1)[3] = float("nan")
        is_wrong = plan.wrong is not None and max(trained) >= plan.wrong and rank == world_size - 1
        with WrongProducts(1e-4) if is_wrong else nullcontext():
            return forward_backward(self, batches, **how)

    def disturb(self: Engine, batch: Any, losses: Tensor) -> Any:
        changes = {
            None: lambda: losses,
            "nan": lambda: losses * float("nan"),
            "loss": lambda: losses + 3.0,
            "gradient": lambda: losses + 1e4 * (losses - losses.detach()),
        }
        return sum_losses(self, batch, changes[bad[0]]())

    def put_aside_and_crash(self: Checkpoints, paths: Any) -> None:
        put_aside(self, paths)
        if plan.crash == "put_aside" and paths:
            raise Crash("put_aside")

    def record_and_crash(self: RunDirectory, name: str, **fields: Any) -> None:
        event(self, name, **fields)
        if plan.crash == name:
            raise Crash(name)

    with ExitStack() as stack:
        for owner, name, replacement in (
            (Prefetcher, "next_step", next_or_crash),
            (Engine, "forward_backward", flip_and_go),
            (Engine, "_sum_losses", disturb),
            (Checkpoints, "put_aside", put_aside_and_crash),
            (RunDirectory, "event", record_and_crash),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def new_run(workplace: Path, name: str, words: tuple[str, ...], *, at_tokens: int, skip_tokens: int) -> RunDirectory:
    """A run that has not begun, with a jump on record."""
    run = RunDirectory(workplace / name)
    with inside(workplace):
        assert run.create_or_open(load(workplace / words[0], words[1:]))
    run.event(SKIP_EVENT, attempt=0, at_tokens=at_tokens, skip_tokens=skip_tokens)
    return run


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def events(run: RunDirectory, *names: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(run.events) if event["event"] in names]


def data_of(run: RunDirectory, first: int, last: int) -> list[int]:
    """The numbers of the data, as in ``Plan.bad``, that the steps were trained on."""
    with inside(run.path.parent):
        _, loader = run_loader(run.path)
    return [loader.skips.position((step - 1) * STEP_TOKENS) // STEP_TOKENS + 1 for step in range(first, last + 1)]


# ----- going back to a checkpoint ------------------------------------------------------------------------------------

KEEP_WEIGHTS = "checkpoint.keep_weights_every=5"
BACK = ("run.toml", *WORDS, "train.steps=16", "checkpoint.every=3", "checkpoint.keep_every=9", KEEP_WEIGHTS)
# Steps 10 … 13; the checkpoint of step 12 is put aside, and steps 10 … 16 go on with the data of 14 … 20.
BAD = {11: "nan", 12: "nan", 13: "nan"}


@pytest.fixture(scope="module")
def back(workplace: Path, run_ranks: RunRanks) -> list[Any]:
    """The runs back-0 … of the same words: whole, again, and with a crash after each part of going back."""
    plans = [Plan("back-0", BACK, BAD), Plan("back-1", BACK, BAD)]
    for number, crash in enumerate(("put_aside", SKIP_EVENT, "rollback"), start=2):
        plans += [Plan(f"back-{number}", BACK, BAD, crash=crash), Plan(f"back-{number}", BACK, BAD)]
    (found,) = run_ranks(starts, 1, str(workplace), [asdict(plan) for plan in plans])
    return list(found)


def test_going_back_jumps_over_the_data(back: list[Any], workplace: Path, steps_of: StepsOf) -> None:
    run = RunDirectory(workplace / "back-0")
    (code, text), _ = back[0]
    assert code == 0, text
    assert "step 11 is skipped: the loss is nan" in text
    assert "steps 11 to 13 were skipped; rolling back to step 9 and skipping the data since then" in text
    skipped = events(run, "step_skipped")
    assert [(event["step"], event["in_a_row"], event["reason"]) for event in skipped] == [
        (11, 1, "the loss is nan"),
        (12, 2, "the loss is nan"),
        (13, 3, "the loss is nan"),
    ]
    jump, rollback, resume = events(run, SKIP_EVENT, "rollback", "resume")
    assert (jump["at_tokens"], jump["skip_tokens"]) == (9 * STEP_TOKENS, 4 * STEP_TOKENS)
    assert (rollback["attempt"], rollback["step"], rollback["put_aside"]) == (
        2,
        9,
        ["step-00000010-weights", "step-00000012"],
    )
    assert resume["step"] == 9
    # The weights of step 10 are those of the run as it is now.
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "step-00000005-weights",
        "step-00000009",
        "step-00000010-weights",
        "step-00000010-weights.bad",
        "step-00000012.bad",
        "step-00000015",
        "step-00000015-weights",
        "step-00000016",
    ]
    lines = [line for line in read_lines(run.metrics) if "loss" in line]
    first = [line for line in lines if line["attempt"] == 1]
    assert [line["step"] for line in first] == list(range(1, 14))
    assert [line.get("skipped") for line in first] == [None] * 10 + ["the loss is nan"] * 3
    assert [line["loss"] is None for line in first] == [False] * 10 + [True] * 3
    assert [(line["step"], line["attempt"]) for line in lines[13:]] == [(step, 2) for step in range(10, 17)]
    whole = read_metrics(run.metrics)
    assert [line["step"] for line in whole] == list(range(1, 17))
    assert [line["tokens"] for line in whole] == [step * STEP_TOKENS for step in range(1, 17)]
    assert not any("skipped" in line for line in whole)
    board = EventAccumulator(str(run.tensorboard), size_guidance={"scalars": 0})
    board.Reload()
    shown = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert shown == [(line["step"], pytest.approx(line["loss"], rel=1e-6)) for line in whole]


def test_it_is_repeatable(back: list[Any], workplace: Path, steps_of: StepsOf) -> None:
    expected, found = (steps_of(read_metrics(workplace / f"back-{number}" / "metrics.jsonl")) for number in (0, 1))
    assert found == expected


@pytest.mark.parametrize(("number", "crash"), [(2, "put_aside"), (3, SKIP_EVENT), (4, "rollback")])
def test_a_crash_while_going_back_leads_to_the_same_run(
    back: list[Any], workplace: Path, steps_of: StepsOf, number: int, crash: str
) -> None:
    (crashed, _), (ended, _) = back[2 * number - 2 : 2 * number]
    assert crashed == crash
    assert ended[0] == 0, ended[1]
    run = RunDirectory(workplace / f"back-{number}")
    assert steps_of(read_metrics(run.metrics)) == steps_of(read_metrics(workplace / "back-0" / "metrics.jsonl"))
    assert len(events(run, SKIP_EVENT)) == 1
    assert list_steps(run.checkpoints) == [9, 15, 16]


def test_afterwards_it_is_the_run_from_that_checkpoint_with_the_jump(
    back: list[Any], workplace: Path, run_ranks: RunRanks, steps_of: StepsOf
) -> None:
    run = RunDirectory(workplace / "fresh")
    shutil.copytree(workplace / "back-0", run.path)
    for path in (run.metrics, run.events, run.status):
        path.unlink()
    for step in (15, 16):
        shutil.rmtree(run.checkpoints / f"step-{step:08d}")
    run.event(SKIP_EVENT, attempt=0, at_tokens=9 * STEP_TOKENS, skip_tokens=4 * STEP_TOKENS)
    (((code, text), _),) = run_ranks(starts, 1, str(workplace), [asdict(Plan("fresh", BACK))])[0]
    assert code == 0, text
    assert "resuming after step 9" in text
    expected = steps_of(read_metrics(workplace / "back-0" / "metrics.jsonl"))
    assert steps_of(read_metrics(run.metrics)) == {step: expected[step] for step in range(10, 17)}


def test_the_samples_of_such_a_run_are_named(
    back: list[Any], workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    run = RunDirectory(workplace / "back-0")
    assert data_of(run, 1, 16) == [*range(1, 10), *range(14, 21)]
    _, trained = back[0]
    _, loader = run_loader(run.path)
    for step in range(1, 17):
        rows = []
        for sample in step_content(loader, step).samples:
            source = loader.store.source(sample.source)
            parts = []
            for one in sample.documents:
                start = source.document(one.document)[0]
                parts.append(source.read(start + one.start, start + one.stop))
            rows.append([int(token) for part in parts for token in part])
        assert rows == trained[step].tolist(), step
    assert main(["data", "samples", "back-0", "--step", "10", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [one["sample"] for one in printed["samples"]] == [13 * 4 + number for number in range(4)]


def test_as_printed_nothing_is_skipped_or_undone(back: list[Any], workplace: Path, run_ranks: RunRanks) -> None:
    """``recipe/as-printed``: a step with NaN is taken as torch's own Adam takes it, saved, and gone on from."""
    (workplace / "printed.toml").write_text('extends = ["run.toml", "recipe/as-printed"]')
    words = ("printed.toml", *WORDS, "train.steps=5", "checkpoint.every=3", "checkpoint.keep_every=3")
    with inside(workplace):
        config = load(Path(words[0]), words[1:])
    assert (config.optimizer.name, config.optimizer.grad_clip, config.guard.enabled) == ("adam", 0, False)
    plans = [Plan("as-printed", words, {4: "nan"}), Plan("guarded", (*words, "guard.enabled=true"), {4: "nan"})]
    for (code, text), _ in run_ranks(starts, 1, str(workplace), [asdict(plan) for plan in plans])[0]:
        assert code == 0, text
    run = RunDirectory(workplace / "as-printed")
    assert not events(run, "step_skipped", "rollback", "state_not_finite")
    lines = [line for line in read_lines(run.metrics) if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert not any("skipped" in line for line in lines)
    assert [line["loss"] is None for line in lines] == [False, False, False, True, True]
    before, after = (weights_of(run, step) for step in (3, 5))
    parameters = {name: torch.nn.Parameter(weight) for name, weight in before.items()}
    adam = torch.optim.Adam(parameters.values(), weight_decay=config.optimizer.weight_decay)
    for parameter in parameters.values():
        assert parameter.isfinite().all()
        parameter.grad = torch.full_like(parameter, math.nan)
    adam.step()
    for name, parameter in parameters.items():
        torch.testing.assert_close(after[name], parameter.detach(), equal_nan=True, rtol=0, atol=0)
    guarded = RunDirectory(workplace / "guarded")
    assert [event["step"] for event in events(guarded, "step_skipped")] == [4]
    assert all(weight.isfinite().all() for weight in weights_of(guarded, 5).values())


def weights_of(run: RunDirectory, step: int) -> dict[str, Tensor]:
    """Those of a checkpoint, from its files."""
    found: dict[str, Tensor] = {}
    for path in sorted((run.checkpoints / f"step-{step:08d}").glob("*.safetensors")):
        found |= {name: x for name, x in load_file(path).items() if name.startswith("model.")}
    assert found
    return found


# ----- going back to the beginning, and giving up --------------------------------------------------------------------

START = ("run.toml", *WORDS, "train.steps=8", "checkpoint.every=100")


def test_going_back_to_the_beginning(back: list[Any], workplace: Path, run_ranks: RunRanks, steps_of: StepsOf) -> None:
    bad = dict.fromkeys((3, 4, 5), "nan")
    tuned = (*START, "train.init_from=back-0@9")
    names = ["begun", "begun-there", "tuned", "tuned-there"]
    for name, words in ((names[1], START), (names[3], tuned)):
        new_run(workplace, name, words, at_tokens=0, skip_tokens=5 * STEP_TOKENS)
    plans = [Plan(names[0], START, bad), Plan(names[1], START), Plan(names[2], tuned, bad), Plan(names[3], tuned)]
    for (code, text), _ in run_ranks(starts, 1, str(workplace), [asdict(plan) for plan in plans])[0]:
        assert code == 0, text
    found = [steps_of(read_metrics(workplace / name / "metrics.jsonl")) for name in names]
    assert found[0] == found[1] != found[2] == found[3]
    assert sorted(found[0]) == list(range(1, 9))
    assert data_of(RunDirectory(workplace / "begun"), 1, 8) == list(range(6, 14))


def test_other_weights_are_no_beginning(back: list[Any], workplace: Path, run_ranks: RunRanks) -> None:
    words = (*START, "train.init_from=back-0@9")
    run = new_run(workplace, "other-weights", words, at_tokens=0, skip_tokens=STEP_TOKENS)
    run.event("init_from", attempt=0, checkpoint="back-0/checkpoints/step-00000009", manifest="another")
    (((code, text), _),) = run_ranks(starts, 1, str(workplace), [asdict(Plan("other-weights", words))])[0]
    assert code == 78
    assert "is not the checkpoint that other-weights started from" in text


# ----- states that are not finite ------------------------------------------------------------------------------------


def test_no_checkpoint_has_nan_and_the_run_goes_back(back: list[Any], workplace: Path, run_ranks: RunRanks) -> None:
    """At the last step, whose loss is good; before a checkpoint in the middle; and with saves in the background."""
    background = tuple(word.replace("asynchronous=false", "asynchronous=true") for word in BACK)
    plans = [
        Plan("nan-16", BACK, poison=16),
        Plan("nan-12", BACK, poison=12),
        Plan("nan-12-background", background, poison=12),
    ]
    (ends,) = run_ranks(starts, 1, str(workplace), [asdict(plan) for plan in plans])
    for plan, ((code, text), _) in zip(plans, ends, strict=True):
        assert code == 0, text
        run = RunDirectory(workplace / plan.run)
        found = events(run, "state_not_finite")
        (rollback,) = events(run, "rollback")
        # In the background a save may have been skipped for the one before it: then skipped steps showed it first.
        if plan.run != "nan-12-background":
            assert f"the state after step {plan.poison} is not finite: " in found[0]["reason"]
            assert rollback["step"] == (15 if plan.poison == 16 else 9)
        assert run.read_status().status == "finished"
        assert list_steps(run.checkpoints)[-1] == 16
        for file in run.checkpoints.glob("step-*/*.safetensors"):
            tensors = load_file(file)
            assert all(tensor.isfinite().all() for tensor in tensors.values()), file
        assert all(math.isfinite(line["loss"]) for line in read_metrics(run.metrics))
        # The poisoned step and what came after it, until it was found, was trained on other data.
        assert data_of(run, 16, 16)[0] >= 17


# ----- checkpoints that are gone -------------------------------------------------------------------------------------


def test_lost_checkpoints_are_no_new_run(back: list[Any], workplace: Path, run_ranks: RunRanks) -> None:
    run = RunDirectory(workplace / "lost")
    shutil.copytree(workplace / "back-0", run.path)
    run.status.unlink()
    # As of a file system that is not mounted: the directory is there, and empty.
    shutil.rmtree(run.checkpoints)
    run.checkpoints.mkdir()
    afresh = (*BACK, "--allow-change", "lost-checkpoints")
    plans = [Plan("lost", BACK), Plan("lost", afresh, crash=3), Plan("lost", BACK)]
    (refused, _), (begun, _), (again, _) = run_ranks(starts, 1, str(workplace), [asdict(p) for p in plans])[0]
    assert refused[0] == 74
    assert refused[1].splitlines()[-1].startswith("error: lost/checkpoints has no checkpoint to resume from, ")
    assert "step-00000016" in refused[1]
    assert "step-00000012" not in refused[1]
    assert "--allow-change lost-checkpoints" in refused[1]
    assert begun == "before step 3"
    # Given up once, and nothing saved since: no second question.
    assert again[0] == 0, again[1]
    (given_up,) = events(run, "checkpoints_given_up")
    assert given_up["step"] == 16


def test_a_run_that_goes_back_too_often_is_stopped(workplace: Path, run_ranks: RunRanks) -> None:
    # Three checkpoints, and two more while steps are skipped: the third must not be removed for those.
    words = ("run.toml", *WORDS, "train.steps=20", "checkpoint.every=1", "guard.max_rollbacks=2")
    bad = dict.fromkeys(range(4, 30), "nan")
    plans = [
        Plan("endless", words, bad, crash="rollback"),
        Plan("endless", words, bad),
        Plan("endless", (*words, "guard.max_rollbacks=3"), bad),
    ]
    (crashed, _), *ends = run_ranks(starts, 1, str(workplace), [asdict(plan) for plan in plans])[0]
    run = RunDirectory(workplace / "endless")
    assert crashed == "rollback"
    for ((code, text), _), rollbacks in zip(ends, (2, 3), strict=True):
        assert code == 78
        assert "Traceback" not in text
        message = text.splitlines()[-1]
        assert message.startswith("error: steps 4 to 6 were skipped, after")
        assert f"after {rollbacks} rollbacks (guard.max_rollbacks = {rollbacks})" in message
        assert 'train.init_from = "endless@3"' in message
    jumps = [(event["at_tokens"], event["skip_tokens"]) for event in events(run, SKIP_EVENT)]
    assert jumps == [(3 * STEP_TOKENS, 3 * STEP_TOKENS)] * 3
    assert len(events(run, "rollback")) == 3


# ----- skipped steps, and resumed runs --------------------------------------------------------------------------------

GUARDED = ("run.toml", *WORDS, "train.steps=16", "checkpoint.every=5", "guard.window=8", "metrics.log_every=8")


def test_a_resumed_run_judges_as_the_uninterrupted_one(workplace: Path, run_ranks: RunRanks, steps_of: StepsOf) -> None:
    bad = {5: "nan", 12: "loss", 13: "gradient"}
    resumed_plans = [Plan("judged-resumed", GUARDED, bad, crash=crash) for crash in (8, 13, None)]
    plans = [Plan("judged", GUARDED, bad), *resumed_plans]
    ends = [end for end, _ in run_ranks(starts, 1, str(workplace), [asdict(plan) for plan in plans])[0]]
    assert [ends[1], ends[2]] == ["before step 8", "before step 13"]
    assert ends[0][0] == ends[3][0] == 0, ends
    whole, resumed = RunDirectory(workplace / "judged"), RunDirectory(workplace / "judged-resumed")
    assert [event["step"] for event in events(resumed, "resume")] == [5, 10], "5 was skipped itself"
    expected, found = ([line for line in read_metrics(run.metrics) if "loss" in line] for run in (whole, resumed))
    assert steps_of(found) == steps_of(expected)
    assert [line["step"] for line in expected] == [5, 8, 12, 13, 16], "what is skipped is always recorded"
    reasons = {line["step"]: line["skipped"] for line in expected if "skipped" in line}
    assert reasons == {line["step"]: line["skipped"] for line in found if "skipped" in line}
    assert reasons[5] == "the loss is nan"
    assert "at least 1 above the median" in reasons[12]
    assert "at least 20 times the median" in reasons[13]
    assert events(whole, "rollback") == []


def test_nan_on_one_rank_and_a_changed_bit(workplace: Path, run_ranks: RunRanks, steps_of: StepsOf) -> None:
    """Two ranks, as data and as tensor ranks."""
    for axis in ("data", "tensor"):
        words = (*START, f"parallel.{axis}=2", "checkpoint.every=3", "guard.compare_replicas_every=4")
        names = [f"{axis}-{number}" for number in range(3)]
        plans = [
            Plan(names[0], words, {4: "nan"}, rank=1),
            Plan(names[1], words, {4: "nan"}, rank=0),
            Plan(names[2], words, {4: "nan"}, flip=7),
            Plan(names[2], words, {4: "nan"}),
        ]
        both = run_ranks(starts, 2, str(workplace), [asdict(plan) for plan in plans])
        assert [end for end, _ in both[0]][2:3] == [end for end, _ in both[1]][2:3]
        ends = [end for end, _ in both[0]]
        assert [end[0] for end in (ends[0], ends[1], ends[3])] == [0, 0, 0], ends
        runs = [RunDirectory(workplace / name) for name in names]
        lines = [read_metrics(run.metrics) for run in runs]
        for found in lines:
            assert [line["step"] for line in found if "skipped" in line] == [4]
            assert steps_of(found) == {**steps_of(lines[0]), 4: steps_of(found)[4]}
        # The checkpoint of step 6 is from before the change.
        assert "silent corruption after step 6 and before the end of step 8: rank 1 (" in ends[2]
        (event,) = events(runs[2], "silent_corruption")
        assert (event["step"], event["since"], event["ranks"]) == (8, 6, [1])
        assert [event["step"] for event in events(runs[2], "resume")] == [6]


def test_wrong_products_reach_no_checkpoint(workplace: Path, run_ranks: RunRanks, steps_of: StepsOf) -> None:
    """Two data ranks, of which one computes wrong from step 5 on."""
    words = (*START, "parallel.data=2", "checkpoint.every=3")
    checked = (*words, "guard.compare_gradients_every=4")
    plans = [
        Plan("right", words),
        Plan("wrong", words, wrong=5),
        Plan("checked", checked, wrong=5),
        # Without a step that is due, the check before a checkpoint remains.
        Plan("seldom", (*words, "guard.compare_gradients_every=100"), wrong=5),
        Plan("checked", (*checked, "checkpoint.every=4")),
    ]
    ends = [end for end, _ in run_ranks(starts, 2, str(workplace), [asdict(plan) for plan in plans])[0]]
    assert [end[0] for end in (ends[0], ends[1], ends[4])] == [0, 0, 0], ends
    right, wrong, checked_run, seldom = (
        RunDirectory(workplace / name) for name in ("right", "wrong", "checked", "seldom")
    )
    expected, found = (steps_of(read_metrics(run.metrics)) for run in (right, wrong))
    assert all(found[step] == expected[step] for step in range(1, 5)) and found[8] != expected[8]
    assert "silent corruption after step 4 and before the end of step 6: rank 0 (" in ends[2]
    assert "silent corruption after step 3 and before the end of step 6: rank 0 (" in ends[3]
    for run in (checked_run, seldom):
        (event,) = events(run, "silent_corruption")
        assert (event["step"], event["ranks"]) == (6, [0, 1])
    assert [event["step"] for event in events(checked_run, "resume")] == [3]
    assert steps_of(read_metrics(checked_run.metrics)) == expected

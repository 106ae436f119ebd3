"""`checkpoint.export_every`: exports beside checkpoints, in the background, whole or not at all."""

import os
import runpy
import socket
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightscale.cli import main
from lightscale.runs.journal import Journal
from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics
from lightscale.training.checkpoints import exports
from lightscale.training.checkpoints.directories import directory_name, list_steps
from lightscale.training.checkpoints.exports import Exports, wait_for_exports

commands = runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "rank_commands.py"))["commands"]

pytestmark = pytest.mark.timeout(400)

# In the place of `lightscale export`: writes a draft, and waits for the file RUN/go, or RUN/fail.
EXPORT = """
import os, pathlib, socket, sys, time
run, target = pathlib.Path(sys.argv[1].rpartition("@")[0]), pathlib.Path(sys.argv[3])
draft = target.with_name(f"{target.name}.{socket.gethostname()}-{os.getpid()}.tmp")
draft.mkdir(parents=True)
(draft / "step").write_text(sys.argv[1])
(draft / "ranks").write_text(str([name for name in ("RANK", "WORLD_SIZE") if name in os.environ]))
while not (run / "go").exists():
    if (run / "fail").exists():
        sys.exit("error: no such luck")
    time.sleep(0.01)
draft.rename(target)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run with checkpoints of three steps, whose exports wait."""
    monkeypatch.setattr(exports, "_COMMAND", [sys.executable, "-c", EXPORT])
    monkeypatch.setenv("RANK", "0")
    found = RunDirectory(tmp_path / "run")
    for step in (4, 6, 8, 12):
        (found.checkpoints / directory_name(step)).mkdir(parents=True)
    return found


def exports_of(run: RunDirectory, every: int | None = 4) -> Exports:
    return Exports(run, Journal(run, enabled=True), every=every)


def wait(one: Exports, until: Callable[[], object]) -> None:
    deadline = time.monotonic() + 100
    while not until():
        assert time.monotonic() < deadline
        one.poll()
        time.sleep(0.01)


def events(run: RunDirectory, name: str) -> list[Any]:
    return [event["step"] for event in read_lines(run.events) if event["event"] == name]


def drafts(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in run.exports.glob("*.tmp"))


def test_one_after_the_other_and_their_checkpoints_are_kept(run: RunDirectory) -> None:
    with exports_of(run) as one:
        wait(one, lambda: list(run.exports.glob("*.tmp/ranks")))
        assert drafts(run) == [f"step-00000004.{socket.gethostname()}-{one._current.process.pid}.tmp"]
        assert psutil.Process(one._current.process.pid).nice() == min(19, os.nice(0) + 10)
        assert one.needed([4, 6, 8, 12, 16]) == {4, 8, 12, 16}
        (run.path / "go").touch()
        wait(one, lambda: not one.is_busy)
        assert one.needed([4, 8, 12]) == set()
    assert list_steps(run.exports) == [4, 8, 12] == events(run, "export")
    assert (run.exports / "step-00000008/step").read_text() == f"{run.path}@8"
    assert (run.exports / "step-00000008/ranks").read_text() == "[]", "it would be taken for a rank"


def test_a_branch_does_not_export_its_parents_checkpoint(run: RunDirectory) -> None:
    """Its first one, of step 4."""
    (run.path / "go").touch()
    with Exports(run, Journal(run, enabled=True), every=4, after=4) as one:
        assert one.needed([4, 6, 8]) == {8}
        wait(one, lambda: not one.is_busy)
    assert list_steps(run.exports) == [8, 12]


def test_other_ranks_export_nothing(run: RunDirectory) -> None:
    with exports_of(run, every=None) as one:
        one.saved(4)
        one.go_back(0)
        assert (one.is_busy, one.needed([4])) == (False, set())
    assert not run.exports.exists()


def test_a_failing_export_is_reported_and_not_waited_for(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    (run.path / "fail").touch()
    with exports_of(run) as one:
        wait(one, lambda: not one.is_busy)
        assert one.needed([4, 8, 12]) == set(), "its checkpoint may go"
        (run.checkpoints / directory_name(16)).mkdir()
        one.saved(16)
        assert (one.is_busy, one.needed([16])) == (False, set()), "the reason was the same twice"
    assert events(run, "export_failed") == [4, 8]
    assert read_lines(run.events)[0]["reason"] == "no such luck"
    said = capsys.readouterr().err
    assert "WARNING: the export of step 4 failed: no such luck; training continues\n" in said
    assert "step 8 failed: no such luck; training continues without exports until the next start\n" in said
    assert list_steps(run.exports) == []


def test_a_run_that_ends_leaves_nothing_and_a_resumed_one_makes_it(run: RunDirectory) -> None:
    with exports_of(run) as one:
        wait(one, lambda: drafts(run))
        process = one._current.process
    assert process.returncode == -9
    assert (drafts(run), list_steps(run.exports)) == ([], [])
    # As where the rank was killed, and its exporter with it.
    (run.exports / f"step-00000004.{socket.gethostname()}-{process.pid}.tmp").mkdir()
    living = f"step-00000004.{socket.gethostname()}-{os.getpid()}.tmp"
    elsewhere, long_ago = "step-00000004.elsewhere-1.tmp", "step-00000004.elsewhere-2.tmp"
    for name in (living, elsewhere, long_ago):
        (run.exports / name).mkdir()
    os.utime(run.exports / long_ago, (1, 1))
    (run.path / "go").touch()
    with exports_of(run) as one:
        wait(one, lambda: not one.is_busy)
    assert (drafts(run), list_steps(run.exports)) == (sorted([living, elsewhere]), [4, 8, 12])


def test_an_export_that_another_process_finished_first_counts(run: RunDirectory) -> None:
    with exports_of(run) as one:
        wait(one, lambda: drafts(run))
        (run.exports / directory_name(4)).mkdir()
        (run.path / "fail").touch()
        wait(one, lambda: not one.is_busy)
    assert (events(run, "export"), events(run, "export_failed")) == ([4], [8, 12])


def test_a_run_that_goes_back_exports_its_later_steps_again(run: RunDirectory) -> None:
    (run.exports / directory_name(8)).mkdir(parents=True)
    (run.path / "go").touch()
    with exports_of(run) as one:
        wait(one, lambda: not one.is_busy)
        (run.path / "go").unlink()
        one.saved(12)
        wait(one, lambda: drafts(run))
        assert (run.exports / "step-00000012.bad").is_dir(), "made of other weights"
        (run.checkpoints / directory_name(12)).rename(run.checkpoints / "aside")
        (run.checkpoints / directory_name(8)).rename(run.checkpoints / "aside too")
        one.go_back(4)
        assert (one.is_busy, drafts(run), list_steps(run.exports)) == (False, [], [4])
        assert (run.exports / "step-00000008.bad").is_dir()


def test_the_wait_at_the_end_has_bounds(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[int] = []

    def wait_for(one: Exports, *, should_stop: Callable[[], bool] = lambda: False) -> None:
        wait_for_exports(one, largest=int, should_stop=should_stop, beat=lambda: beats.append(1))

    with exports_of(run) as one:
        wait_for(one, should_stop=lambda: len(beats) == 2)
        assert (one.is_busy, len(beats)) == (True, 2)
        monkeypatch.setattr(exports, "MOST_WAIT_S", 0.5)
        wait_for(one)
        assert one.is_busy
        monkeypatch.setattr(exports, "MOST_WAIT_S", 100.0)
        (run.path / "go").touch()
        wait_for(one)
    assert list_steps(run.exports) == [4, 8, 12]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def losses(run: RunDirectory, steps: Collection[int]) -> list[Any]:
    return [(line["loss"], line["grad_norm"]) for line in read_metrics(run.metrics) if line["step"] in steps]


def unhurried_commands(rank: int, world_size: int, init_method: str, *arguments: Any) -> list[tuple[int, str]]:
    """`commands`, with exports of the ranks' own priority: a test waits for them, whatever else the machine does."""
    exports._NICENESS = 0
    return commands(rank, world_size, init_method, *arguments)


@pytest.mark.long
def test_a_run_exports_what_the_command_exports(workplace: Path, run_ranks: Callable[..., list[Any]]) -> None:
    with_exports, without = RunDirectory(workplace / "runs/exported"), RunDirectory(workplace / "runs/not-exported")
    base = ["train", "run.toml", "optimizer.schedule=constant", "train.validate_every=0", "checkpoint.keep_every=none"]
    every = "checkpoint.export_every=4"
    lines = [
        [*base, "train.steps=6", "checkpoint.every=100", every, "--run", str(with_exports.path)],
        [*base, "train.steps=6", "checkpoint.every=4", "--run", str(without.path)],
        # Longer, and from now on with exports: also of the checkpoint that is there.
        [*base, "train.steps=7", "checkpoint.every=4", every, "--run", str(without.path)],
    ]
    (results,) = run_ranks(unhurried_commands, 1, str(workplace), lines, timeout_s=300)
    assert [code for code, _ in results] == [0, 0, 0], results
    assert list_steps(with_exports.checkpoints) == [4, 6], "a checkpoint is saved where an export is due"
    assert list_steps(with_exports.exports) == list_steps(without.exports) == [4]
    assert losses(with_exports, range(1, 7)) == losses(without, range(1, 7))
    assert f"exported step 4 to {without.exports / directory_name(4)} in" in results[2][1]
    by_hand = workplace / "by-hand"
    assert main(["export", f"{with_exports.path}@4", "--to", str(by_hand)]) == 0
    found = files(with_exports.exports / directory_name(4))
    weights = files(without.exports / directory_name(4))["model.safetensors"]
    assert found["model.safetensors"] == weights == files(by_hand)["model.safetensors"]
    # The card has the losses of the steps that were known then.
    assert found.keys() == files(by_hand).keys()
    assert [name for name, text in files(by_hand).items() if found[name] != text and name != "README.md"] == []

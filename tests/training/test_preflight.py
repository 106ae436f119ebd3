"""What would keep a run from working is found before it begins, on all ranks; the rest is warned of and recorded."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightscale.errors import UserError
from lightscale.parallel.agreement import Agreement
from lightscale.runs.run_directory import RunDirectory, read_lines
from lightscale.training import preflight
from lightscale.training.checkpoints.directories import Retention, directory_name
from lightscale.training.preflight import check_before_training, check_clocks, check_shared

pytestmark = pytest.mark.timeout(400)

RunRanks = Callable[..., list[Any]]


def look(rank: int, world_size: int, init_method: str, config: Any, place: str) -> list[Any]:
    """What rank 1's clock and directory are found to be, by each rank; then the whole check, and how long it took."""
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    group = dist.group.WORLD
    assert group is not None
    ranks = Agreement(group)
    late = check_clocks(ranks, (lambda: time.time() - 30) if rank == 1 else time.time)
    equal = check_shared(ranks, Path(place) / "runs" / "new")
    began = time.perf_counter()
    warned: Any
    try:
        warned = check_before_training(config, RunDirectory(place), ranks, 0)
    except UserError as error:
        warned = str(error)
    took_s = time.perf_counter() - began
    dist.destroy_process_group()
    return [late, equal, warned, took_s]


def test_ranks_agree_on_what_they_find(
    run_ranks: RunRanks, tmp_path: Path, tiny_config: Callable[..., Any], make_disk: Callable[[int], Path]
) -> None:
    place = make_disk(10 << 20)
    results = run_ranks(look, 3, tiny_config(), str(place))
    assert [result[:3] for result in results[1:]] == [results[0][:3]] * 2
    (late,), (equal,), refused, seconds = results[0]
    assert (late.result, late.ranks, late.blames_host) == ("warning", (1,), True)
    assert late.found.endswith("s behind others")
    assert (equal.result, equal.found) == ("ok", f"all ranks see the same {place}")
    # 12 bytes for each parameter, and 16 MiB to spare; three at once, when two are kept.
    assert refused.startswith(f"disk: 10.5 MB free in {place}; a checkpoint is 19.2 MB (204,864 parameters)")
    assert refused.endswith("(expected: 57.7 MB free, for 3 more)")
    print(f"the whole check: {seconds:.3f} s")
    assert list(place.iterdir()) == [], "nothing is left"


@pytest.mark.parametrize(
    ("num_full", "num_weights", "result"), [(1, 0, "failed"), (1, 1, "warning"), (3, 99, "warning"), (3, 100, "ok")]
)
def test_the_weights_that_are_kept_count(
    tmp_path: Path,
    tiny_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    num_full: int,
    num_weights: int,
    result: str,
) -> None:
    """204,864 parameters, 12 bytes each in a full checkpoint, 4 in one of weights, of which 100 are still to come."""
    weights, run = 204_864 * 4, RunDirectory(tmp_path)
    full = 3 * weights + (16 << 20)
    for step in (10, 20):
        (run.checkpoints / directory_name(step, "weights")).mkdir(parents=True)
    config = tiny_config("train.steps=1029", "checkpoint.keep_weights_every=10")
    free = num_full * full + num_weights * weights
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    (found,) = preflight.check_disk(config, run.path)
    assert (found.result, "a weights-only checkpoint" in found.found) == (result, True)
    if result != "ok":
        assert found.right is not None and found.right.endswith(
            "for 3 more, and 100 weights-only until the end of the run"
        )


@pytest.mark.parametrize(
    ("words", "bytes_per_parameter"), [(("optimizer.name=lion",), 8), (("optimizer.ema={fast=0.9, slow=0.99}",), 20)]
)
def test_a_first_checkpoint_has_the_state_of_the_optimizer(
    tmp_path: Path, tiny_config: Callable[..., Any], words: tuple[str, ...], bytes_per_parameter: int
) -> None:
    """tests/training/optimizer/test_optimizer.py counts those of all optimizers."""
    expected = 204_864 * bytes_per_parameter + (16 << 20)
    found = preflight.checkpoint_bytes(tiny_config(*words), RunDirectory(tmp_path))
    assert found == (expected, "204,864 parameters")


def test_full_checkpoints_that_are_kept_count(tiny_config: Callable[..., Any]) -> None:
    """As many as a run has at most, and at its end, by what is due and what retention leaves."""
    draw = random.Random(0)
    for _ in range(200):
        parent, steps, keep = draw.choice([0, 20, 37]), draw.randrange(38, 90), draw.randrange(2, 5)
        every, export_every, keep_every = (draw.choice([None, 1, 4, 5, 10, 30]) for _ in range(3))
        config = tiny_config(
            f"train.steps={steps}",
            *([f"train.branch_from=runs/parent@{parent}"] if parent else []),
            f"checkpoint.keep={keep}",
            *(
                f"checkpoint.{key}={value or 'none'}"
                for key, value in (("every", every), ("export_every", export_every), ("keep_every", keep_every))
            ),
        )
        held, most = list[int](), 0
        for step in range(parent + 1, steps + 1):
            if step == steps or any(one and step % one == 0 for one in (every, export_every)):
                held.append(step)
                most = max(most, len(held))
                gone = Retention(keep=keep, keep_every=keep_every).superseded(held, held[::-1][:keep])
                held = [one for one in held if one not in gone]
        assert (config.num_kept(keep), config.num_kept(keep + 1)) == (len(held), most), config.checkpoint


def test_those_that_are_kept_for_ever_take_space(
    tiny_config: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 100, 200, …, 900, and 980, 990 and 1000."""
    config = tiny_config("train.steps=1000", "checkpoint.every=10", "checkpoint.keep_every=100")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=11 * 20 * 10**6))
    (found,) = preflight.check_disk(config, tmp_path)
    assert (found.result, found.right.rpartition(", ")[2]) == ("warning", "for 12 more")


def test_a_branch_keeps_none_of_its_parents_weights(tmp_path: Path, tiny_config: Callable[..., Any]) -> None:
    config = tiny_config(
        *("train.steps=1029", "train.branch_from=runs/parent@1000"),
        *("checkpoint.keep_weights_every=10", "checkpoint.export_every=25"),
    )
    run = RunDirectory(tmp_path)
    # One of an earlier version, of the step at which it branched off, counts for nothing.
    (run.exports / directory_name(1000)).mkdir(parents=True)
    assert (preflight.weights_left(config, run), preflight.exports_left(config, run)) == (2, 1)


@pytest.mark.parametrize(("missing", "result"), [(0, "ok"), (1, "warning")])
def test_exports_that_are_to_come_take_space(
    tiny_config: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int, result: str
) -> None:
    """In bf16; nine of ten are still to be written."""
    run = RunDirectory(tmp_path)
    (run.exports / directory_name(100)).mkdir(parents=True)
    config = tiny_config("train.steps=1029", "checkpoint.export_every=100")
    free = 3 * (3 * 204_864 * 4 + (16 << 20)) + 9 * 204_864 * 2 - missing
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    (found,) = preflight.check_disk(config, run.path)
    assert (found.result, "an export 410 kB" in found.found) == (result, True), found
    if missing:
        assert found.right.endswith("for 3 more, and 9 exports until the end of the run")


@pytest.mark.long
def test_a_run_that_cannot_be_saved_does_not_begin(train: Callable[..., Any], make_disk: Callable[[int], Path]) -> None:
    path = make_disk(12 << 20) / "run"
    ended = train("run.toml", "parallel.sequence=2", "--run", str(path), "--processes", "2")
    assert ended.code == 78, ended.stderr
    assert "disk: " in ended.stderr and "MB free, for 3 more" in ended.stderr
    run = RunDirectory(path)
    status = run.read_status()
    assert status is not None and status.status == "stopped"
    assert read_lines(run.metrics) == []
    assert run.newest_checkpoint() == 0


@pytest.mark.long
def test_what_may_go_wrong_later_is_said_and_recorded(
    train: Callable[..., Any], make_disk: Callable[[int], Path]
) -> None:
    path = make_disk(30 << 20) / "run"
    ended = train("run.toml", "train.steps=10", "train.validate_every=0", "--run", str(path))
    assert ended.code == 0, ended.stderr
    (event,) = [event for event in read_lines(RunDirectory(path).events) if event["event"] == "preflight_warning"]
    assert event["reason"].startswith("disk: ")
    assert f"warning: {event['reason']}" in ended.stderr

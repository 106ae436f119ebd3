"""Followers of a run: what they need is not removed, those that are dead need nothing, and two share the work."""

import json
import os
import time
from pathlib import Path

import pytest

from lightscale.runs import followers
from lightscale.runs.followers import Follower, needed
from lightscale.runs.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def files(run: RunDirectory) -> list[Path]:
    return sorted((run.evaluation / "followers").glob("*.json"))


def another(run: RunDirectory, *, age_s: float = 0.0, **content: object) -> Path:
    """A follower on another machine, which renewed its file then."""
    path = run.evaluation / "followers" / "elsewhere-1.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"tasks": ["lambada"], "done": [], "at": None, **content}))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_nobody_follows(run: RunDirectory) -> None:
    assert needed(run, [1, 2]) == set()
    assert not run.evaluation.exists()


def test_a_checkpoint_is_needed_until_it_is_done(run: RunDirectory) -> None:
    with Follower(run, ["lambada"]) as follower:
        assert needed(run, [100, 200]) == {100, 200}, "also those that came since it looked last"
        assert follower.take(100)
        assert needed(run, [100, 200]) == {100, 200}
        follower.set_done([100])
        assert needed(run, [100, 200, 300]) == {200, 300}
        another(run, done=[200])
        assert needed(run, [100, 200, 300]) == {100, 200, 300}
    assert [path.name for path in files(run)] == ["elsewhere-1.json"], "it removes its own file"
    assert needed(run, [100, 200]) == {100}


def test_a_dead_one_needs_nothing(run: RunDirectory) -> None:
    path = another(run, age_s=followers.STALE_S + 5)
    assert needed(run, [100]) == set()
    with Follower(run, ["lambada"]):
        assert not path.exists(), "the next one removes its file"


def test_a_living_one_renews_its_file(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "RENEW_S", 0.01)
    with Follower(run, ["lambada"]):
        (path,) = files(run)
        os.utime(path, (0, 0))
        deadline = time.monotonic() + 60
        while not needed(run, [100]):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("other", "is_taken"),
    [
        ({"at": 100}, True),
        ({"at": 200}, False),
        ({"at": 100, "tasks": ["text"]}, False),
        ({"at": 100, "age_s": followers.STALE_S + 5}, False),
    ],
)
def test_a_step_that_another_is_at_is_left_to_it(run: RunDirectory, other: dict[str, object], is_taken: bool) -> None:
    with Follower(run, ["lambada", "wikitext-2"]) as follower:
        another(run, **other)  # type: ignore[arg-type]
        assert follower.take(100) is not is_taken
        (own,) = (path for path in files(run) if path.name != "elsewhere-1.json")
        assert json.loads(own.read_text())["at"] == (None if is_taken else 100)


@pytest.mark.parametrize("content", ["", "{", '{"tasks": ["a"], "done": ["b"]}', '{"more": 1}', "[" * 10_000])
def test_a_file_that_cannot_be_read_needs_all_while_it_is_young(run: RunDirectory, content: str) -> None:
    path = another(run)
    path.write_text(content)
    assert needed(run, [100]) == {100}
    os.utime(path, (0, 0))
    assert needed(run, [100]) == set()

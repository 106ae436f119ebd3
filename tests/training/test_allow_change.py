"""What differs from the run that is resumed is refused by name, and accepted by name."""

import hashlib
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.launch.commands.checks import allowed_changes
from lightscale.runs.run_directory import RunDirectory, read_lines
from lightscale.training.checkpoints.directories import directory_name
from lightscale.training.checkpoints.manifest import NAME, read_manifest, write_manifest

commands = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "rank_commands.py"))["commands"]

pytestmark = pytest.mark.timeout(400)

RunRanks = Callable[..., list[Any]]


def at_20(run: RunDirectory, path: Path) -> RunDirectory:
    """A copy of ``run`` as it was after the checkpoint of step 20."""
    shutil.copytree(run.path, path)
    copy = RunDirectory(path)
    copy.status.unlink()
    shutil.rmtree(copy.checkpoints / directory_name(40))
    return copy


def age(run: RunDirectory) -> None:
    """Have the checkpoint written by another torch."""
    path = run.checkpoints / directory_name(20)
    manifest = read_manifest(path)
    (path / NAME).unlink()
    versions = {**manifest.facts["versions"], "torch": "1.0"}
    write_manifest(path, manifest.files, {**manifest.facts, "versions": versions})


def fingerprint(path: Path) -> dict[str, str]:
    """Contents of all files below ``path``."""
    files = (file for file in path.rglob("*") if file.is_file())
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.long
def test_changes_that_ranks_notice(whole: tuple[RunDirectory, Any], workplace: Path, run_ranks: RunRanks) -> None:
    """Another text under the same name, other versions, and a mixer that there is not."""
    refused, other, aged = (
        at_20(whole[0], workplace / "runs" / name) for name in ("refused-data", "other-data", "aged")
    )
    age(aged)
    before = fingerprint(refused.checkpoints)
    layout = ["parallel.sequence=1", "train.steps=40", "train.validate_every=0"]
    of_data = ["train", "run.toml", *layout, "data.store=other", "data.validation.held.store=store", "--run"]
    of_versions = ["train", "run.toml", *layout, "--run", str(aged.path)]
    lines = [
        [*of_data, str(refused.path)],
        [*of_data, str(refused.path), "--allow-change", "versions"],
        [*of_data, str(other.path), "--allow-change", "data"],
        of_versions,
        [*of_versions, "--allow-change=versions.torch"],
        ["train", "run.toml", "model.mixer=tml", "--run", "runs/mixer"],
    ]
    results = run_ranks(commands, 1, str(workplace), lines, timeout_s=200)[0]
    assert [code for code, _ in results] == [78, 78, 0, 78, 0, 78], results
    assert not any("Traceback" in text for _, text in results)
    for _, text in results[:2]:
        assert re.search(
            r"^error: other: the data differs from the data of the earlier steps \(store: \w+ before, \w+ now; source "
            r"words: ",
            text.splitlines()[-1],
        )
    assert fingerprint(refused.checkpoints) == before
    assert 'model.mixer = "tml": unknown mixer tml; did you mean tnl' in results[5][1]
    (changed,) = [event for event in read_lines(other.events) if event["event"] == "data_changed"]
    assert changed["step"] == 20
    assert "store" in changed["changes"]
    assert "versions.torch: 1.0 in the checkpoint, " in results[3][1]
    assert "--allow-change versions" in results[3][1]
    (changed,) = [event for event in read_lines(aged.events) if event["event"] == "versions_changed"]
    assert changed["changes"][0].startswith("versions.torch: 1.0 in the checkpoint, ")
    for run in (other, aged):
        status = run.read_status()
        assert status is not None and (status.status, status.step) == ("finished", 40)


def test_changes_of_the_configuration(workplace: Path, tmp_path: Path) -> None:
    def config(*overrides: str) -> Any:
        return load(workplace / "run.toml", overrides)

    run = RunDirectory(tmp_path / "run")
    run.create_or_open(config())
    changed = config("optimizer.lr=2e-3", "optimizer.eps=1e-6", "train.seed=5")
    # The remedy names all of them.
    hint = " ".join(
        rf"--allow-change {key}" for key in (r"optimizer\.(lr|eps)", r"optimizer\.(lr|eps)", r"train\.seed")
    )
    with pytest.raises(UserError, match=hint):
        run.changes(changed)
    with pytest.raises(UserError, match=r"train\.seed: 0 in the run, 5 now\nRestore") as refusal:
        run.changes(changed, {"optimizer"})
    assert "optimizer" not in str(refusal.value)
    with pytest.raises(UserError, match=r"optimizer\.eps: 1e-08 in the run, 1e-06 now\nRestore"):
        run.changes(changed, {"optimizer.lr", "train"})
    assert not run.create_or_open(changed, {"optimizer", "train.seed"})
    assert load(run.config) == changed
    (event,) = read_lines(run.events)
    assert set(event["changes"]) == {"optimizer.lr", "optimizer.eps", "train.seed"}


def test_keys_of_one_optimizer_or_task_are_keys() -> None:
    keys = {"optimizer.lr", "optimizer.betas", "optimizer.slow_warmup_steps", "task.teacher", "optimizer.groups.a"}
    assert allowed_changes([*keys]) == keys


@pytest.mark.parametrize("key", ["zebra", "optimizer.zebra", "version", ""])
def test_names_that_mean_nothing(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    monkeypatch.chdir(workplace)
    assert main(["train", "run.toml", "--run", "runs/never", f"--allow-change={key}", "--json"]) == 78
    assert f"--allow-change {key}: use a key or section of the configuration" in capsys.readouterr().err
    assert not (workplace / "runs/never").exists()

"""``lightscale checkpoint`` on the checkpoints of a real run, whole and damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors

from lightscale.cli import main
from lightscale.config.files import load, to_toml
from lightscale.runs.lock import RunLock
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.checkpoints.directories import directory_name, list_steps

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """``lightscale checkpoint …``: exit code, stdout, stderr."""

    def command(*words: str) -> tuple[int, str, str]:
        code = main(["checkpoint", *words])
        output = capsys.readouterr()
        return code, output.out, output.err

    return command


@pytest.fixture
def run(whole: tuple[RunDirectory, Any], tmp_path: Path) -> RunDirectory:
    """A copy of a run on two sequence ranks, with checkpoints of the steps 20 and 40."""
    shutil.copytree(whole[0].path, tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def damage(run: RunDirectory, step: int) -> Path:
    path = run.checkpoints / directory_name(step) / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def test_list_and_show(run: RunDirectory, command: Command) -> None:
    code, text, _ = command("list", str(run.path))
    assert code == 0
    lines = [line.split() for line in text.splitlines()]
    assert [line[:3] for line in lines[1:]] == [["20", "full", "5,120"], ["40", "full", "10,240"]]
    assert "sequence 2" in text
    code, text, _ = command("list", str(run.path), "--json")
    rows = json.loads(text)["checkpoints"]
    on_disk = sum(path.stat().st_size for path in (run.checkpoints / directory_name(20)).glob("[rs]*"))
    assert (code, rows[0]["num_bytes"], rows[0]["tokens"], len(rows[0]["hosts"])) == (0, on_disk, 5120, 2)
    code, text, _ = command("show", f"{run.path}@20", "--json")
    shown = json.loads(text)
    assert (code, shown["step"], shown["layout"]["sequence"]) == (0, 20, 2)
    names = {
        kind: {key.partition(".")[2] for key in shown["tensors"] if key.startswith(kind)} for kind in ("model", "exp")
    }
    assert names["model"] == {name.removeprefix("sq.") for name in names["exp"]}
    assert shown["tensors"]["model.embedding.word_embeddings.weight"]["shape"][0] == 320
    text = command("show", str(run.path))[1]
    assert "step: 40" in text and "embedding.word_embeddings.weight" in text


def test_the_files_are_safetensors(run: RunDirectory) -> None:
    """Any tool that knows the format reads them, and every weight is in exactly one of the ranks' files."""
    names: list[str] = []
    for path in sorted((run.checkpoints / directory_name(40)).glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            names += [name for name in file.keys() if name.startswith("exp_avg.")]  # noqa: SIM118 - not a dict
            assert all(file.get_tensor(name).isfinite().all() for name in file.keys())  # noqa: SIM118
    assert len(names) == len(set(names)) > 20


def test_verify_names_the_damaged_file(run: RunDirectory, command: Command) -> None:
    assert command("verify", str(run.path))[:2] == (0, "step 20: intact\nstep 40: intact\n")
    path = damage(run, 20)
    code, text, _ = command("verify", str(run.path))
    assert code == 1
    assert f"step 20: {path}: expected xxh3-128 " in text
    assert "step 40: intact" in text
    assert command("verify", f"{run.path}@40")[0] == 0
    code, text, _ = command("verify", str(run.path), "--json")
    assert [row["damage"] is None for row in json.loads(text)["checkpoints"]] == [False, True]
    # Its manifest is as it was.
    assert command("list", str(run.path))[0] == 0
    (path.parent / "MANIFEST.json").unlink()
    code, text, _ = command("list", str(run.path), "--json")
    assert (code, "is missing" in json.loads(text)["checkpoints"][0]["damage"]) == (1, True)


def test_diff(run: RunDirectory, tmp_path: Path, command: Command) -> None:
    shutil.copytree(run.path, tmp_path / "copy")
    assert command("diff", f"{run.path}@40", f"{tmp_path}/copy@40")[:2] == (0, "all tensors are bitwise equal\n")
    code, text, _ = command("diff", f"{run.path}@20", f"{run.path}@40", "--json")
    found = json.loads(text)
    assert code == 1
    assert found["facts"]["tokens"] == [5120, 10240]
    rows = {row["tensor"]: row for row in found["tensors"]}
    assert all(row["max_difference"] > 0 for row in rows.values())
    assert 0 < rows["model.embedding.word_embeddings.weight"]["relative_rmse"] < 1
    assert "step: 20 and 40" in command("diff", f"{run.path}@20", f"{run.path}@40")[1]


def test_prune(run: RunDirectory, command: Command) -> None:
    for step in (5, 10):
        shutil.copytree(run.checkpoints / directory_name(20), run.checkpoints / directory_name(step))
    # Copies under other names are no good checkpoints.
    assert command("prune", str(run.path), "--keep", "3")[1].startswith("nothing removed: only 2 checkpoints")
    code, text, _ = command("prune", str(run.path), "--dry-run", "--keep-every", "10")
    assert (code, text) == (0, "would be removed: 5; newest intact checkpoints: 20, 40\n")
    assert list_steps(run.checkpoints) == [5, 10, 20, 40]
    stored = load(run.config)
    exporting = stored.checkpoint.model_copy(update={"export_every": 5})
    run.config.write_text(to_toml(stored.model_copy(update={"checkpoint": exporting})))
    (run.exports / directory_name(5)).mkdir(parents=True)
    assert command("prune", str(run.path), "--dry-run")[1].startswith("would be removed: 5;"), "10 is to be exported"
    run.config.write_text(to_toml(stored))
    code, text, _ = command("prune", str(run.path), "--json")
    assert json.loads(text) == {"good": [20, 40], "removed": [5, 10], "dry_run": False}
    assert list_steps(run.checkpoints) == [20, 40]


def test_a_run_that_a_job_holds_is_not_pruned(run: RunDirectory, command: Command) -> None:
    """The job counts and removes checkpoints itself, by what it has verified."""
    shutil.copytree(run.checkpoints / directory_name(20), run.checkpoints / directory_name(10))
    with RunLock(run):
        code, text, errors = command("prune", str(run.path))
        assert (code, text) == (78, "")
        assert f"{run.path} is in use by process" in errors
        assert command("prune", str(run.path), "--dry-run")[:2] == (
            0,
            "would be removed: 10; newest intact checkpoints: 20, 40\n",
        )
    assert list_steps(run.checkpoints) == [10, 20, 40]
    assert command("prune", str(run.path))[0] == 0
    assert list_steps(run.checkpoints) == [20, 40]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["list", "nowhere"], "no run nowhere: neither nowhere nor runs/nowhere exists"),
        (["verify", "RUN@30"], "has no checkpoint of step 30; it has: 20, 40"),
        (["show", "RUN@last"], "the step after @ must be a number"),
        (["diff", "RUN", "RUN@20"], "must be RUN@STEP, like "),
        (["prune", "RUN", "--keep", "1"], "--keep 1: must be at least 2"),
        (["prune", "RUN", "--keep-every", "0"], "--keep-every 0: must be at least 1"),
    ],
)
def test_mistakes(run: RunDirectory, command: Command, words: list[str], message: str) -> None:
    code, text, errors = command(*(word.replace("RUN", str(run.path)) for word in words))
    assert (code, text) == (78, "")
    assert message in errors
    assert list_steps(run.checkpoints) == [20, 40]

"""What `lightscale train` says to mistakes: one clear message, exit code 78, and everything earlier as it was."""

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics
from lightscale.training.beginning import check_beginning
from lightscale.training.checkpoints.directories import directory_name, list_steps
from lightscale.training.checkpoints.manifest import read_manifest, verify_files

# Several starts of several processes, on a machine that may be busy.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def folder(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory of its own, with run.toml and both stores, outside of any job."""
    for name in ("run.toml", "store", "other"):
        (tmp_path / name).symlink_to(workplace / name)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The message to `lightscale train …`, which must be refused before any process starts."""

    def refusal(*words: str) -> str:
        assert main(["train", *words]) == 78
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("error: ")
        assert "Traceback" not in output.err
        return output.err.removeprefix("error: ").rstrip("\n")

    return refusal


def fingerprint(path: Path) -> dict[str, str]:
    """Contents of all files below ``path``."""
    files = (file for file in path.rglob("*") if file.is_file())
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def own_store(folder: Path) -> Path:
    """A copy of the store in place of the link, to be damaged."""
    (folder / "store").unlink()
    shutil.copytree((folder / "run.toml").resolve().parent / "store", folder / "store")
    return folder / "store"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.lrr=1"], "unknown key optimizer.lrr; did you mean optimizer.lr?"),
        (["data.store=nowhere"], "nowhere: no token store; `lightscale data prepare` writes one"),
        (["model.vocab_size=128"], "model.vocab_size = 128 is less than the 300 tokens of sentencepiece"),
        (["data.sources.poems=1"], "poems"),
        (["train.global_batch_size=3"], "train.global_batch_size = 3 is not divisible by train.micro_batch_size = 2"),
        (["--processes", "3"], "train.global_batch_size = 4 is not divisible by"),
        (["parallel.tensor=3", "--processes", "3"], "model.num_heads = 4 is not divisible by parallel.tensor = 3"),
        (["train.init_from=runs/first"], "must be RUN@STEP"),
        (
            ['optimizer.groups={a={parameters=["no"]}}'],
            'groups.a.parameters: "no" is the name of no parameter',
        ),
    ],
)
def test_mistakes_in_the_configuration(
    folder: Path, refusal: Callable[..., str], words: list[str], message: str
) -> None:
    found = refusal("run.toml", *words)
    assert message in found
    assert not (folder / "runs").exists()


def test_first_weights_of_another_model(folder: Path, refusal: Callable[..., str]) -> None:
    wider = load("run.toml", ["model.hidden_size=128"])
    RunDirectory("wider").create(wider)
    found = refusal("run.toml", "train.init_from=wider@4")
    assert 'train.init_from = "wider@4": wider/checkpoints has no checkpoint of step 4; it has: none' in found
    (RunDirectory("wider").checkpoints / directory_name(4)).mkdir(parents=True)
    found = refusal("run.toml", "train.init_from=wider@4")
    assert 'train.init_from = "wider@4": its model.hidden_size is 128 and that of this run 64' in found
    assert not (folder / "runs").exists()
    # A run that has a checkpoint goes on from it.
    config = load("run.toml", ["train.init_from=wider@4"])
    (RunDirectory("begun").checkpoints / directory_name(2)).mkdir(parents=True)
    check_beginning(config, RunDirectory("begun"))


def test_damaged_stores(folder: Path, refusal: Callable[..., str]) -> None:
    store = own_store(folder)
    for name in ("zarr.json", "words/zarr.json", "words/tokens/zarr.json", "words/tokens/c/0", "words/doc_ends/c/0"):
        target = store / name
        data = target.read_bytes()
        for damaged in (None, b"", data[: len(data) // 2], data + b"x"):
            target.unlink(missing_ok=True)
            if damaged is not None:
                target.write_bytes(damaged)
            found = refusal("run.toml")
            # A missing metadata file leaves nothing that could be named more closely than what it was the start of.
            assert str(target.relative_to(folder)) in found or str(target.parent.relative_to(folder)) in found, found
            assert len(found.splitlines()) == 1
        target.write_bytes(data)
    assert not (folder / "runs").exists()


def test_two_configurations_for_one_run(
    folder: Path, workplace: Path, whole: tuple[RunDirectory, Any], refusal: Callable[..., str]
) -> None:
    (folder / "runs").symlink_to(workplace / "runs")
    before = fingerprint(whole[0].path)
    message = refusal(
        "run.toml",
        "parallel.sequence=2",
        "optimizer.lr=2e-3",
        "train.seed=5",
        "--run",
        "runs/whole",
        "--processes",
        "2",
    )
    assert "runs/whole holds a run with another configuration:" in message
    assert "optimizer.lr: 0.001 in the run, 0.002 now" in message
    assert "train.seed: 0 in the run, 5 now" in message
    assert fingerprint(whole[0].path) == before


def test_run_directories_that_are_none(folder: Path, refusal: Callable[..., str]) -> None:
    (folder / "file").write_text("mine")
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.txt").write_text("mine")
    assert "file" in refusal("run.toml", "--run", "file")
    assert "file" in refusal("run.toml", "--run", "file/run")
    assert "mine is not a run directory: it has files (notes.txt) but no config" in refusal("run.toml", "--run", "mine")
    assert (folder / "file").read_text() == (folder / "mine" / "notes.txt").read_text() == "mine"


def test_run_directories_that_cannot_be_read(
    folder: Path, workplace: Path, whole: tuple[RunDirectory, Any], refusal: Callable[..., str]
) -> None:
    shutil.copytree(whole[0].path, folder / "run")
    run, words = RunDirectory(folder / "run"), ["run.toml", "parallel.sequence=2", "--run", "run", "--processes", "2"]
    file, text = run.config, run.config.read_bytes()
    file.write_bytes(b"\xff\x00 damaged\n" + text)
    assert str(file.relative_to(folder)) in refusal(*words)
    file.unlink()
    file.mkdir()
    assert str(file.relative_to(folder)) in refusal(*words)


@pytest.mark.long
def test_a_run_whose_numbers_stay_bad_is_stopped(workplace: Path, train: Callable[..., Any]) -> None:
    words = [
        # Weights grow by 9,999 in every step, until they are infinite.
        "optimizer.lr=100",
        "optimizer.weight_decay=100",
        "optimizer.warmup_steps=0",
        "checkpoint.every=1",
        # Otherwise a save is skipped while the previous one is still being written.
        "checkpoint.asynchronous=false",
        "checkpoint.keep=5",
        "checkpoint.keep_every=none",
    ]
    ended = train("run.toml", *words, "--run", "runs/diverged")
    assert ended.code == 78
    assert "Traceback" not in ended.stderr
    assert re.search(
        r"^error: (steps \d+ to \d+ were skipped|the state after .* is not finite.*), after 3 rollbacks",
        ended.last_line,
    )
    assert "a lower optimizer.lr" in ended.last_line
    run = RunDirectory(workplace / "runs/diverged")
    status = run.read_status()
    assert status is not None and status.status == "stopped"
    assert ended.last_line == f"error: {status.reason.partition(': ')[2]}"
    events = [event["event"] for event in read_lines(run.events)]
    assert (events[0], events[-1]) == ("start", "failed")
    # By steps that were skipped in a row, or because the state was not finite, whichever came first.
    assert [events.count(name) for name in ("rollback", "data_skipped")] == [3, 3]
    assert "step_skipped" in events or "state_not_finite" in events
    # What was finite is recorded and saved; of the last steps, that they were skipped.
    lines = read_metrics(run.metrics)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    good = [line["step"] for line in lines if "skipped" not in line]
    assert good and good == list(range(1, len(good) + 1))
    assert list_steps(run.checkpoints)[-1] < len(lines)
    for step in list_steps(run.checkpoints):
        path = run.checkpoints / f"step-{step:08d}"
        manifest = read_manifest(path)
        verify_files(path, manifest, manifest.files)


@pytest.mark.long
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_run_that_is_removed_under_its_ranks_stops(
    workplace: Path, start: Callable[..., Any], is_replaced: bool
) -> None:
    run = RunDirectory(workplace / "runs" / f"removed-{is_replaced}")
    training = start("run.toml", "train.steps=100000", "--run", str(run.path), "--processes", "2")
    training.wait_for_step(run, 2)
    run.path.rename(workplace / f"moved-{is_replaced}")
    if is_replaced:
        run.path.mkdir()
    ended = training.end()
    assert ended.code == 78
    what = "is another directory now" if is_replaced else "is gone"
    assert f"error: {run.path} {what}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not run.path.exists() or list(run.path.iterdir()) == []
    # What was moved away is as it was, and goes on there.
    moved = RunDirectory(workplace / f"moved-{is_replaced}")
    assert moved.read_status() is None and moved.progress()[0] >= 2

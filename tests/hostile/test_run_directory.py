"""A run directory that is not what it was, or is more than one: removed, replaced, hidden, a mount point, not empty."""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.tokenizers import DESCRIPTION_FILE, copy_tokenizer, files_sha256, train_sentencepiece
from lightscale.errors import UserError
from lightscale.runs.held_directory import DirectoryReplaced
from lightscale.runs.journal import Journal
from lightscale.runs.metrics.jsonl import JsonlSink
from lightscale.runs.metrics.sink import Measurement, RunFacts
from lightscale.runs.run_directory import LineWriter, RunDirectory, read_lines, timestamp
from lightscale.training.train import Trainer

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def run(tmp_path: Path, tiny_config: MakeConfig) -> RunDirectory:
    """A run that this process holds."""
    run = RunDirectory(tmp_path / "runs" / "first")
    run.create_or_open(tiny_config())
    run.hold()
    run.begin_attempt()
    return run


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    random = Random(0)
    texts = [" ".join(f"{random.randrange(300):x}" for _ in range(50)) for _ in range(100)]
    train_sentencepiece(texts, vocab_size=300).save(folder)
    return folder


def removed(run: RunDirectory) -> None:
    shutil.rmtree(run.path)


def emptied(run: RunDirectory) -> None:
    """Removed, and made again: the file system may give the new one the number of the old one."""
    shutil.rmtree(run.path)
    run.path.mkdir()


def moved(run: RunDirectory) -> None:
    run.path.rename(run.path.with_name("elsewhere"))


def replaced(run: RunDirectory) -> None:
    other = RunDirectory(run.path.with_name("other"))
    other.create(load(run.config))
    other.event("start", attempt=1)
    other.write_status("resumable", reason="of another run", step=1, tokens=1)
    shutil.rmtree(run.path)
    other.path.rename(run.path)


def now_a_file(run: RunDirectory) -> None:
    shutil.rmtree(run.path)
    run.path.write_text("")


def content(path: Path) -> dict[str, bytes | None]:
    """Everything at `path` and below."""
    return {str(one): one.read_bytes() if one.is_file() else None for one in (path, *path.rglob("*"))}


@pytest.mark.parametrize("change", [removed, emptied, moved, replaced, now_a_file])
def test_a_directory_that_is_not_the_run_any_more_is_never_written_to(
    run: RunDirectory, change: Callable[[RunDirectory], None], tiny_config: MakeConfig
) -> None:
    sink = JsonlSink(RunFacts(directory=run.path, config=tiny_config()))
    journal = Journal(run, enabled=True)
    writers: list[Callable[[], object]] = [
        lambda: sink.write(Measurement(step=1, attempt=1, time=timestamp(), fields={"loss": 1.0})),
        lambda: journal.note("step_skipped", step=1),
        lambda: journal.event("resumable", step=1),
        lambda: run.write_status("finished", reason="all", step=4, tokens=1024),
        lambda: run.begin_attempt("rollback", step=0),
        run.remove_status,
        run.new_log_directory,
        run.recover_records,
        run.check_held,
    ]
    for write in writers[:3]:
        write()
    assert not run.is_replaced
    change(run)
    before = content(run.path.parent)
    for write in writers:
        with pytest.raises(DirectoryReplaced, match=r"runs/first is (gone|another directory now): it was"):
            write()
    assert run.is_replaced
    assert content(run.path.parent) == before
    assert DirectoryReplaced.EXIT_CODE == 78


def test_every_rank_stops_when_the_first_finds_its_directory_gone(run: RunDirectory) -> None:
    def rank(number: int, found: int) -> SimpleNamespace:
        return SimpleNamespace(directory=run, is_main=number == 0, _largest=lambda value: max(value, found))

    Trainer._check_directory(rank(0, 0))  # type: ignore[arg-type]
    Trainer._check_directory(rank(1, 0))  # type: ignore[arg-type]
    with pytest.raises(DirectoryReplaced, match="runs/first was removed or replaced"):
        Trainer._check_directory(rank(1, 1))  # type: ignore[arg-type]
    removed(run)
    with pytest.raises(DirectoryReplaced, match="is gone"):
        Trainer._check_directory(rank(0, 0))  # type: ignore[arg-type]


def test_a_directory_that_is_renamed_and_put_back_is_the_same(run: RunDirectory) -> None:
    moved(run)
    run.path.with_name("elsewhere").rename(run.path)
    run.event("resumable", step=1)
    assert [one["event"] for one in read_lines(run.events)] == ["start", "resumable"]


def test_a_link_to_the_run_is_as_good_as_the_run(run: RunDirectory) -> None:
    link = RunDirectory(run.path.with_name("link"))
    link.path.symlink_to(run.path)
    link.hold()
    link.event("resumable", step=1)
    with LineWriter(link.metrics) as writer:
        writer.write({"step": 1, "attempt": 1})


def in_a_mount_namespace(code: str, *arguments: str) -> str:
    """Run `code` where it may mount, and nobody else sees it."""
    program = ["unshare", "--mount", "--map-root-user", sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_mount_point_becomes_a_run(tmp_path: Path, tiny_run: Path, needs: Callable[..., None]) -> None:
    needs("mounts of one's own")
    code = """
        import pathlib, subprocess, sys
        from lightscale.config.files import load
        from lightscale.runs.run_directory import RunDirectory
        config, run = load(sys.argv[1]), RunDirectory(sys.argv[2])
        run.path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(run.path)], check=True)
        (run.path / "lost+found").mkdir()
        # What a kill leaves.
        (run.path / ".config.toml.0123").touch()
        print(run.create_or_open(config), run.create_or_open(config), load(run.config) == config)
        run.hold()
        run.begin_attempt()
        print(*sorted(path.name for path in run.path.iterdir()))
        print(*sorted(path.name for path in run.path.parent.iterdir()))
        # A second one over it, as after a careless remount.
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(run.path)], check=True)
        try:
            run.event("resumable")
        except ValueError as error:
            print(error)
        print(len(list(run.path.iterdir())))
    """
    (tmp_path / "runs").mkdir()
    lines = in_a_mount_namespace(code, str(tiny_run), str(tmp_path / "runs" / "mounted")).splitlines()
    assert lines[0] == "True False True"
    assert lines[1] == ".config.toml.0123 config.toml events.jsonl lost+found"
    assert lines[2] == "mounted", "nothing is left beside it"
    assert "mounted is another directory now" in lines[3]
    assert lines[4] == "0"


def test_an_empty_directory_becomes_a_run(tmp_path: Path, tiny_config: MakeConfig) -> None:
    run = RunDirectory(tmp_path / "empty")
    run.path.mkdir()
    assert run.create_or_open(tiny_config())
    assert [path.name for path in run.path.iterdir()] == ["config.toml"]
    # As at the root of a file system, where a rename would fail.
    root = RunDirectory(tmp_path / "root")
    (root.path / "lost+found").mkdir(parents=True)
    assert root.create_or_open(tiny_config())
    assert not root.create(tiny_config("train.seed=1")), "of two only one creates it"
    assert load(root.config) == tiny_config()
    assert sorted(path.name for path in root.path.iterdir()) == ["config.toml", "lost+found"]


def test_what_is_in_a_directory_that_is_no_run_is_said(tmp_path: Path, tiny_config: MakeConfig) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    for number in range(7):
        (folder / f"thesis-{number}.txt").write_text("precious")
    before = content(folder)
    with pytest.raises(UserError, match=r"not a run directory: it has files \(thesis-0.txt, .*, and 2 more\)"):
        RunDirectory(folder).create_or_open(tiny_config())
    assert content(folder) == before


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["missing", "link", "file", "pipe", "empty", "pipe within", "cut", "changed"])
def test_a_tokenizer_that_is_none_is_copied_again(run: RunDirectory, source: Path, kind: str) -> None:
    sha256 = files_sha256(source)
    copy_tokenizer(source, run.tokenizer, sha256=sha256)
    description = run.tokenizer / DESCRIPTION_FILE
    whole = description.read_bytes()
    match kind:
        case "missing" | "link" | "file" | "pipe":
            shutil.rmtree(run.tokenizer)
            make: dict[str, Callable[[], object]] = {
                "missing": lambda: None,
                "link": lambda: run.tokenizer.symlink_to("nowhere"),
                "file": run.tokenizer.touch,
                "pipe": lambda: os.mkfifo(run.tokenizer),
            }
            make[kind]()
        case "empty":
            description.unlink()
        case "pipe within":
            description.unlink()
            os.mkfifo(description)
        case "cut":
            description.write_bytes(whole[: len(whole) // 2])
        case "changed":
            description.write_bytes(b"[1]")
    with pytest.raises(UserError, match="tokenizer"):
        files_sha256(run.tokenizer)
    copy_tokenizer(source, run.tokenizer, sha256=sha256)
    assert files_sha256(run.tokenizer) == sha256
    assert [path.name for path in run.path.glob("tokenizer*")] == ["tokenizer"]


def test_runs_shows_a_run_whose_records_are_all_damaged(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run.events, run.metrics, run.jobs):
        path.write_bytes(b"\0" * 100 + b"\n[1]\n\n")
    run.status.write_bytes(b"\0")
    assert main(["runs", str(run.path)]) == 0
    shown = capsys.readouterr().out
    for words in ("events.jsonl:1: not a JSON object", "metrics.jsonl:1: not a", "not the status of a run"):
        assert words in shown

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightscale import cli
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.evaluation.results import result_path, write_result
from lightscale.launch.commands import runs
from lightscale.launch.commands.runs import RunReader, RunSummary, summarize
from lightscale.runs.lock import RunLock
from lightscale.runs.run_directory import LineWriter, RunDirectory, timestamp

MakeRun = Callable[..., RunDirectory]


@pytest.fixture
def make_run(tmp_path: Path, tiny_config: Callable[..., RunConfig]) -> MakeRun:
    """`make_run("name", steps=3)`: a run of 4 steps that has started and made `steps` of them."""

    def make_run(name: str, *, steps: int = 3) -> RunDirectory:
        run = RunDirectory(tmp_path / "runs" / name)
        run.create_or_open(tiny_config())
        run.begin_attempt()
        with LineWriter(run.metrics) as writer:
            for step in range(1, steps + 1):
                line = {"step": step, "attempt": 1, "time": timestamp(), "tokens": 256 * step}
                writer.write({**line, "loss": 5.0 - step, "step_s": 0.5, "tokens_per_s": 500.0 + step})
        return run

    return make_run


def is_quiet_since(run: RunDirectory, age_s: float) -> None:
    then = time.time() - age_s
    for path in (run.config, run.events, run.metrics):
        os.utime(path, (then, then))


def summary(run: RunDirectory) -> RunSummary:
    return summarize(run, time.time())


def table(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["runs", *arguments]) == 0
    return capsys.readouterr().out


def lock(run: RunDirectory, *, host: str | None, number: int = 7) -> Path:
    path = run.path / "lock" / f"{number:06d}"
    path.parent.mkdir(exist_ok=True)
    path.write_text("" if host is None else json.dumps({"host": host, "process": 1}))
    return path


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Locked by another process, as long as it lives."""
    code = "import fcntl, sys; fcntl.flock(f := open(sys.argv[1]), fcntl.LOCK_EX); print('held', flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdin is not None and holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"held\n"
        yield
    finally:
        holder.kill()
        holder.communicate()


def test_what_a_run_is_like(make_run: MakeRun) -> None:
    found = summary(make_run("first"))
    assert found.run.endswith("runs/first")
    assert (found.step, found.total_steps, found.tokens, found.loss) == (3, 4, 768, 2.0)
    assert found.tokens_per_s == 502.0, "the median"
    assert found.goodput is not None and found.goodput.steps == 3
    assert found.last_event == "start"
    assert found.last_event_age_s == pytest.approx(0, abs=30)
    assert found.active == pytest.approx(time.time(), abs=30)


def test_nothing_is_from_the_future(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock may have been set back since the last event."""
    run, now = make_run("first"), time.time()
    assert summarize(run, now - 3600).last_event_age_s == 0
    assert summarize(run, now + 3600).last_event_age_s == pytest.approx(3600, abs=30)


@pytest.mark.parametrize("status", ["finished", "resumable", "stopped"])
def test_how_it_ended_is_its_state(make_run: MakeRun, status: Any) -> None:
    run = make_run("first")
    run.write_status(status, reason="SIGTERM", step=3, tokens=768)
    found = summary(run)
    assert (found.state, found.note) == (status, "" if status == "finished" else "SIGTERM")


@pytest.mark.parametrize(("age_s", "step_s", "state"), [(200, 1, "running"), (400, 1, "dead"), (400, 30, "running")])
def test_without_a_lock_silence_is_death(make_run: MakeRun, age_s: float, step_s: float, state: str) -> None:
    run = make_run("first")
    with LineWriter(run.metrics) as writer:
        for step in range(4, 30):
            writer.write({"step": step, "attempt": 1, "tokens": 0, "step_s": step_s})
    is_quiet_since(run, age_s)
    assert summary(run).state == state


def test_a_run_that_never_started_is_new(make_run: MakeRun, tiny_config: Callable[..., RunConfig]) -> None:
    run = RunDirectory(make_run("first").path.parent / "second")
    run.create_or_open(tiny_config())
    found = summary(run)
    assert (found.state, found.step, found.goodput, found.last_event) == ("new", 0, None, None)


def test_a_run_that_was_written_whole_has_the_step_of_its_weights(
    make_run: MakeRun, tiny_config: Callable[..., RunConfig]
) -> None:
    run = RunDirectory(make_run("first").path.parent / "mean")
    run.create(tiny_config())
    run.write_status("finished", reason="mean of first@2 and first@3", step=3, tokens=768)
    found = summary(run)
    assert (found.state, found.step, found.tokens) == ("finished", 3, 768)


def test_a_process_that_holds_the_lock_runs_it(make_run: MakeRun) -> None:
    run = make_run("first")
    path = lock(run, host=socket.gethostname())
    with held(path):
        is_quiet_since(run, 1e6)
        assert summary(run).state == "running", "however long it is quiet"
        run.write_status("resumable", reason="", step=3, tokens=1)
        assert summary(run).state == "running", "it is about to start the ranks again"
        run.status.unlink()
    is_quiet_since(run, 0)
    assert summary(run).state == "dead", "it died a moment ago"
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # looking at it has left no lock


def test_the_lock_that_jobs_take_is_understood(make_run: MakeRun) -> None:
    run = make_run("first")
    is_quiet_since(run, 1e6)
    with RunLock(run):
        assert summary(run).state == "running"
    assert summary(run).state == "dead"


def test_a_lock_of_another_machine_lives_as_long_as_it_is_renewed(make_run: MakeRun) -> None:
    run = make_run("first")
    is_quiet_since(run, 1e6)
    path = lock(run, host="elsewhere")
    assert summary(run).state == "running"
    os.utime(path, (time.time() - 90, time.time() - 90))
    assert summary(run).state == "dead"
    path.write_text("{")
    assert summary(run).state == "running", "just written, by nobody knows whom"
    lock(run, host=None, number=8)
    assert summary(run).state == "dead", "given back"


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("config.toml", "[model", "config.toml"),
        ("config.toml", "\udcff", "config.toml"),
        ("config.toml", None, "config.toml"),
    ],
)
def test_a_damaged_run_is_shown_as_such(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], file: str, text: str | None, words: str
) -> None:
    run = make_run("first")
    make_run("second")
    if text is None:
        (run.path / file).unlink()
    else:
        (run.path / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    found = summary(run)
    assert found.state == "damaged"
    assert words in found.note
    shown = table(capsys, str(run.path.parent))
    assert f"{run.path}: {found.note}" in shown
    assert "500" not in found.note and shown.count("3/4") == 1, "the other one is there"


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("metrics.jsonl", "{\n", "metrics.jsonl:4: not a JSON object"),
        ("metrics.jsonl", '{"step_s": 1, "attempt": 1}\n\n', "2 lines cannot be read, the first: "),
        ("events.jsonl", '{"event": 7, "attempt": 1}\n', "event = 7 cannot be"),
        ("events.jsonl", '{"event": "other", "attempt": 1, "time": 7}\n', "time = 7 cannot be"),
        ("status.json", "{", "not the status of a run"),
    ],
)
def test_damaged_records_are_said_and_the_rest_is_shown(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], file: str, text: str, words: str
) -> None:
    run = make_run("first")
    with (run.path / file).open("a") as record:
        record.write(text)
    found = summary(run)
    assert (found.state, found.step, found.smoothed_loss) == ("running", 3, 3.0)
    (said,) = found.damage
    assert words in said
    shown = table(capsys, str(run.path.parent))
    assert f"{run.path}: {said}" in shown
    assert "3/4" in shown


def test_newest_activity_comes_first(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    for name, age_s in (("old", 9000), ("new", 10), ("older", 90000)):
        is_quiet_since(make_run(name), age_s)
    folder = make_run("new").path.parent
    (folder / "notes").mkdir()
    (folder / ".draft").mkdir()
    (folder / ".draft" / "config.toml").write_text("")
    assert cli.main(["runs", str(folder), "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [Path(one["run"]).name for one in records] == ["new", "old", "older"]
    assert records[1]["state"] == "dead"
    assert records[1]["goodput"]["lost_steps"] == 0
    assert records[1]["goodput"]["effective_s"] == 1.5


def test_people_get_a_table(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("first")
    run.event("failed", reason="killed")
    run.write_status("stopped", reason="given up", step=3, tokens=768)
    with LineWriter(run.metrics) as writer:
        losses = {"wiki": {"loss": 2.5}, "code": {"loss": None}}
        writer.write({"step": 3, "attempt": 1, "tokens": 768, "validation": losses})
    shown = table(capsys, str(run.path.parent))
    (row,) = [line for line in shown.splitlines() if "3/4" in line]
    for word in ("runs/first", "stopped", "3/4", "3.0000", "502", "failed"):
        assert word in row
    assert "runs/first: given up" in shown
    assert "wiki 2.5000 code nan" in row
    assert "kept steps" not in shown


def test_the_newest_scores_of_each_task(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("first")
    for step, task, value in ((2, "lambada", 30.0), (3, "lambada", 20.0), (2, "text", None)):
        scores = {
            "perplexity": {"value": value, "standard_error": 0.5},
            "accuracy": {"value": 0.25, "standard_error": None},
        }
        result = {"run": "runs/first", "task": task, "step": step, "requests": 7, "identity": "", "scores": scores}
        write_result(result_path(run, step, task), result)
    (run.evaluation / "step-00000003" / "text.json").write_text("{")
    (run.evaluation / "step-00000003" / "other.json").mkdir()
    write_result(result_path(run, 3, "wrong"), {**result, "scores": {"perplexity": 3.0}})
    assert cli.main(["runs", str(run.path.parent), "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    found = {task: (of["step"], of["scores"]["perplexity"]["value"]) for task, of in record["evaluation"].items()}
    assert found == {"lambada": (3, 20.0), "text": (2, None)}
    assert "lambada 20 text —" in table(capsys, str(run.path.parent))
    shown = table(capsys, str(run.path))
    assert "runs/first@3" in shown and "accuracy" in shown and "20 ± 0.5" in shown


def test_one_run_shows_where_its_time_went(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("first")
    run.event("checkpoint", step=3, stall_s=0.25)
    run.event("checkpoint_failed", step=3)
    shown = table(capsys, str(run.path))
    lines = {line.strip().partition("  ")[0]: line for line in shown.splitlines()}
    assert "1.5 s" in lines["kept steps"] and "3 steps" in lines["kept steps"]
    assert "0.25 s" in lines["saves"] and "1 done, 1 failed" in lines["saves"]


@pytest.mark.parametrize(("key", "text"), [("memory_rss_bytes", "1.23 GB"), ("memory_peak_bytes", "1.23 GB")])
def test_memory_is_that_of_the_newest_line_that_has_it(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], key: str, text: str
) -> None:
    run = make_run("first", steps=0)
    assert summary(run).memory_bytes is None
    with LineWriter(run.metrics) as writer:
        for step, num_bytes in ((1, 10**9), (2, 1_234_000_000)):
            writer.write({"step": step, "attempt": 1, "tokens": step, "step_s": 1.0, key: num_bytes})
        writer.write({"step": 3, "attempt": 1, "tokens": 3, "step_s": 1.0})
    assert summary(run).memory_bytes == 1_234_000_000
    assert text in table(capsys, str(run.path.parent))


def test_ages_are_not_negative(make_run: MakeRun) -> None:
    """The clock of the host that wrote the records is ahead."""
    run = make_run("first")
    assert summary(run).age_s == pytest.approx(0, abs=30)
    found = summarize(run, time.time() - 3600)
    assert (found.age_s, found.last_event_age_s) == (0.0, 0.0)
    assert summarize(run, time.time() + 3600).age_s == pytest.approx(3600, abs=30)


def test_watching_reads_only_what_is_new(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("first")
    reader, now = RunReader(run), time.time()
    assert (reader.summary(now).step, reader.summary(now).smoothed_loss) == (3, 3.0)
    whole, read = runs.read_records, []
    monkeypatch.setattr(runs, "read_records", lambda path: (read.append(path.name), whole(path))[1])
    with LineWriter(run.metrics) as writer:
        writer.write({"step": 4, "attempt": 1, "time": timestamp(), "tokens": 1, "loss": 1.0, "step_s": 1.0})
    os.utime(run.metrics, (now + 1, now + 1))
    found = reader.summary(now + 1)
    assert (found.step, found.smoothed_loss) == (4, 2.5)
    assert found.goodput is not None and found.goodput.steps == 3, "a moment old"
    assert read == ["events.jsonl"]
    found = reader.summary(now + 70)
    assert found.goodput is not None and found.goodput.steps == 4
    assert read.count("metrics.jsonl") == 1


def watched(words: list[str], frames: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of `lightscale runs …`, interrupted after so many frames."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == frames:
            raise KeyboardInterrupt

    monkeypatch.setattr(runs.time, "sleep", pause)
    code = cli.main(["runs", *words])
    assert pauses == [2.5] * frames
    return code


def test_watch_in_a_pipe_prints_again_and_again(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(make_run("first").path.parent)
    assert watched([folder, "--watch", "2.5"], 3, monkeypatch) == cli.EXIT_INTERRUPTED
    output = capsys.readouterr()
    assert [line.count("3/4") for line in output.out.splitlines() if "runs/first" in line] == [1, 1, 1]
    assert output.err == "interrupted\n"
    assert watched([folder, "--json", "--watch", "2.5"], 2, monkeypatch) == cli.EXIT_INTERRUPTED
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)[0]["smoothed_loss"] for line in lines] == [3.0, 3.0]


def test_watch_on_a_terminal_redraws(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(make_run("first").path.parent)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "250")
    assert watched([folder, "--watch", "2.5"], 3, monkeypatch) == cli.EXIT_INTERRUPTED
    shown = capsys.readouterr().out
    assert shown.count("3/4") == 4, "and as it leaves the terminal"
    assert "\x1b[1A\x1b[2K" in shown, "the lines before are written over"
    assert shown.rstrip("\n").endswith("\x1b[?25h"), "the cursor is shown again"


@pytest.mark.parametrize(("word", "message"), [("runs", "put RUN before --watch"), ("0", "must be at least 0.1 s")])
def test_a_wrong_interval_is_refused(capsys: pytest.CaptureFixture[str], word: str, message: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["runs", "--watch", word])
    assert message in capsys.readouterr().err


def test_the_default_is_the_folder_runs(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_run("first").path.parent.parent)
    assert "runs/first" in table(capsys)


@pytest.mark.parametrize(
    ("place", "words"), [("nowhere", "does not exist"), ("file", "is a file"), ("empty", "has no runs")]
)
def test_a_wrong_place_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, words: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    assert cli.main(["runs", str(tmp_path / place)]) == UserError.EXIT_CODE
    printed = capsys.readouterr()
    assert f"{tmp_path / place} {words}" in printed.err
    assert printed.out == ""


def test_it_does_not_wait_for_torch(tmp_path: Path) -> None:
    code = "import sys, lightscale.launch.commands.runs; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"

"""Damaged, cut and foreign records: skipped, counted, said once, and never a reason not to resume."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.loading.samples import recorded_skips
from lightscale.errors import UserError
from lightscale.launch.launcher.reports import read_reports
from lightscale.records import MOST_LINE_BYTES, Records, read_records
from lightscale.runs.goodput import run_goodput
from lightscale.runs.jobs import JobRecord, record_job, recorded_jobs
from lightscale.runs.lock import RunLock
from lightscale.runs.metrics_tail import MetricsTail
from lightscale.runs.run_directory import DAMAGE_EVENT, LineWriter, RunDirectory, read_lines, read_metrics, timestamp
from lightscale.training.health.heartbeat import create_heartbeats, read_heartbeats
from lightscale.training.recovery import recorded_checkpoints

# What is no line of any record.
DAMAGED = [
    b"",
    b"[1]",
    b"null",
    b"7",
    b'"text"',
    b"{",
    b"\0" * 4096,
    b'{"step": 9, "attempt": 1, "event": "start", "job": 1}\0',
    b"\xff\xfe{}",
    '{"step": 9}'.encode("utf-16"),
    b"[" * 100_000,
    b'{"step": ' + b"9" * 5000 + b"}",
    b'{"step": 9, "attempt": 1, "event": "x", "job": 1, "loss": NaN}',
    b'{"event": "\\ud800", "attempt": 1, "step": 1, "job": 1}',
]
# Objects whose fields have other types than the readers rely on.
OF_WRONG_TYPES = {
    "metrics.jsonl": [
        {"attempt": 1},
        {"step": "3", "attempt": 1},
        {"step": True, "attempt": 1},
        {"step": -1, "attempt": 1},
        {"step": 1 << 80, "attempt": 1},
        {"step": 3, "attempt": None},
        {"step": 3, "attempt": 1, "loss": "low"},
        {"step": 3, "attempt": 1, "tokens": 1.5},
        {"step": 3, "attempt": 1, "step_s": [1]},
        {"step": 3, "attempt": 1, "time": "noon"},
        {"step": 3, "attempt": 1, "validation": {"held": 3}},
    ],
    "events.jsonl": [
        {"attempt": 1},
        {"event": 7, "attempt": 1},
        {"event": "start"},
        {"event": "start", "attempt": 1, "time": 7},
        {"event": "resume", "attempt": 1},
        {"event": "checkpoint", "attempt": 1, "step": 4, "removed": "all"},
        {"event": "checkpoint", "attempt": 1, "step": 4, "stall_s": "long"},
        {"event": "data_skipped", "attempt": 1, "at_tokens": 1},
        {"event": "rollback", "attempt": 2, "step": 1, "put_aside": 3},
        {"event": "init_from", "attempt": 1, "manifest": 7},
        {"event": "branch", "attempt": 1, "parent": "a", "step": 3, "manifest": "m", "skips": [[1, -2]]},
        {"event": "branch", "attempt": 1, "parent": "a", "step": 3, "manifest": "m", "skips": [[1, 2, 3]]},
    ],
    "jobs.jsonl": [{"job": "12"}, {"number": 12}, {"job": 12, "scheduler": 1}],
}


@pytest.fixture
def run(tmp_path: Path, tiny_config: Callable[..., RunConfig]) -> RunDirectory:
    """A run of 4 steps that has made 3 of them, saved and stopped."""
    run = RunDirectory(tmp_path / "runs" / "first")
    run.create_or_open(tiny_config())
    run.begin_attempt()
    with LineWriter(run.metrics) as writer:
        for step in (1, 2, 3):
            line = {"step": step, "attempt": 1, "time": timestamp(), "tokens": 256 * step}
            writer.write({**line, "loss": 5.0 - step, "step_s": 0.5, "tokens_per_s": 500.0})
    run.event("checkpoint", step=3, checkpoint="step-00000003")
    record_job(run, JobRecord(number=7))
    run.write_status("resumable", reason="SIGTERM", step=3, tokens=768)
    return run


def records_of(run: RunDirectory) -> tuple[Any, ...]:
    """What every reader makes of the run."""
    tail = MetricsTail(run.metrics)
    tail.refresh(has_validation=True)
    events = [(one["attempt"], one["event"]) for one in read_lines(run.events) if one["event"] != DAMAGE_EVENT]
    goodput = run_goodput(run)
    return (
        events,
        read_metrics(run.metrics),
        recorded_jobs(run),
        run.attempt,
        run.progress(),
        list(tail.steps),
        goodput and (goodput.steps, goodput.saves),
        recorded_skips(run.path),
        recorded_checkpoints(read_lines(run.events), read_lines(run.metrics)),
    )


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
@pytest.mark.parametrize("at_end", [False, True], ids=["within", "at the end"])
def test_every_reader_skips_what_is_no_record(run: RunDirectory, line: bytes, at_end: bool) -> None:
    before = records_of(run)
    for path in (run.events, run.metrics, run.jobs):
        lines = path.read_bytes().splitlines(keepends=True)
        lines.insert(len(lines) if at_end else 1, line + b"\n")
        path.write_bytes(b"".join(lines))
    assert records_of(run) == before
    damage = run.damage()
    assert sorted(damage) == ["events.jsonl", "jobs.jsonl", "metrics.jsonl"]
    assert all("1 line cannot be read: " in text and text.count(".jsonl:") == 1 for text in damage.values())


@pytest.mark.parametrize(
    ("name", "record"), [(name, record) for name, records in OF_WRONG_TYPES.items() for record in records]
)
def test_every_reader_skips_fields_of_wrong_types(run: RunDirectory, name: str, record: dict[str, Any]) -> None:
    before = records_of(run)
    with (run.path / name).open("a") as file:
        file.write(json.dumps(record) + "\n")
    assert records_of(run) == before
    assert list(run.damage()) == [name]


@pytest.mark.parametrize("half", [b"{", b'{"step": 4', b'{"step": 4, "attempt": 1}', b"\0" * 70_000])
def test_a_half_line_goes_when_writing_goes_on(run: RunDirectory, half: bytes) -> None:
    before, whole = records_of(run), run.metrics.read_bytes()
    run.metrics.write_bytes(whole + half)
    assert records_of(run) == before
    assert run.damage() == {}, "it may be a line that is being written"
    LineWriter(run.metrics).close()
    assert run.metrics.read_bytes() == whole


def test_a_start_says_damage_once(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with run.metrics.open("ab") as file:
        file.write(b"\0\0\n[1]\n")
    for _ in range(3):
        run.recover_records()
    said = capsys.readouterr().err
    assert said.count("2 lines cannot be read, the first: ") == said.count("metrics.jsonl:4: ") == 1
    (event,) = [one for one in read_lines(run.events) if one["event"] == DAMAGE_EVENT]
    assert list(event["damage"]) == ["metrics.jsonl"] and event["set_aside"] == {}
    with run.events.open("ab") as file:
        file.write(b"\n")
    run.recover_records()
    assert "events.jsonl" in capsys.readouterr().err, "other damage is said"


def test_damaged_starts_do_not_mix_the_steps_of_attempts(run: RunDirectory) -> None:
    run.events.write_bytes(b"\0" * 500 + b"\n")
    assert run.begin_attempt() == 2, "the metrics know of the first"
    run.event("checkpoint", step=3)
    assert (run.attempt, [one["attempt"] for one in read_lines(run.events)]) == (2, [2, 2])


def make_large(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(10 << 30)


FOREIGN: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "directory": lambda path: (path / "within").mkdir(parents=True),
    "link": lambda path: path.symlink_to(path.with_name("config.toml")),
    "dangling link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "jobs.jsonl", "status.json"])
def test_what_is_no_file_is_set_aside(
    run: RunDirectory, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.path / name
    path.unlink()
    FOREIGN[kind](path)
    records_of(run)  # waits for nobody, and raises nothing
    assert run.read_status() is None or name != "status.json"
    config = run.config.read_bytes()
    run.recover_records()
    assert f"{path}: " in capsys.readouterr().err
    kept = run.path / f"{name}.damaged-1"
    assert os.path.lexists(kept)
    (event,) = [one for one in read_lines(run.events) if one["event"] == DAMAGE_EVENT]
    assert kept.name in event["set_aside"][name]
    run.begin_attempt()
    run.write_status("finished", reason="all", step=4, tokens=1024)
    record_job(run, JobRecord(number=8))
    LineWriter(run.metrics).close()
    assert run.config.read_bytes() == config, "nothing was written through a link"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("ended", [False, True])
def test_a_sparse_file_of_10_gb_is_not_read_whole(run: RunDirectory, ended: bool) -> None:
    before = records_of(run)
    for path in (run.events, run.metrics, run.jobs):
        make_large(path)
        if ended:
            with path.open("ab") as file:
                file.write(b"\n")
    began = time.process_time()
    # The newest lines of the metrics are looked for from the end, and not behind a line that is none.
    found = records_of(run)
    assert (found[:4], found[6:]) == (before[:4], before[6:])
    assert len(run.damage()) == (3 if ended else 0)
    run.begin_attempt()
    with LineWriter(run.metrics) as writer:
        writer.write({"step": 4, "attempt": 2, "tokens": 1024})
    assert (run.attempt, run.progress()) == (2, (4, 1024))
    assert time.process_time() - began < 10


def test_a_long_line_is_skipped(run: RunDirectory) -> None:
    before = records_of(run)
    long = b'{"step": 4, "attempt": 1, "text": "' + b"x" * (100 << 20) + b'"}\n'
    with run.metrics.open("ab") as file:
        file.write(long)
    with LineWriter(run.metrics) as writer:
        writer.write({"step": 4, "attempt": 1})
    assert [one["step"] for one in read_metrics(run.metrics)] == [1, 2, 3, 4]
    assert f"metrics.jsonl:4: longer than {MOST_LINE_BYTES:,} bytes" in run.damage()["metrics.jsonl"]
    assert before[1] == read_metrics(run.metrics)[:3]


@pytest.mark.parametrize("damaged", ["data_skipped", "rollback", None])
def test_one_damaged_line_loses_no_skip(run: RunDirectory, damaged: str | None) -> None:
    skips = [(512, 256), (512, 256), (1024, 512)]
    for at_tokens, skip_tokens in skips:
        skip = {"at_tokens": at_tokens, "skip_tokens": skip_tokens}
        run.event("data_skipped", first_step=3, last_step=3, **skip)
        run.begin_attempt("rollback", step=2, put_aside=[], **skip)
    # Killed between the two.
    run.event("data_skipped", at_tokens=2048, skip_tokens=256)
    expected = [*skips, (2048, 256)]
    assert recorded_skips(run.path) == expected
    lines = run.events.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines[:-1]):
        if damaged and f'"{damaged}"'.encode() in line:
            run.events.write_bytes(b"".join([*lines[:number], b"\0" * len(line), b"\n", *lines[number + 1 :]]))
            assert recorded_skips(run.path) == expected, number


def test_checkpoints_are_not_forgotten_with_their_events() -> None:
    def events(*names: str) -> list[dict[str, Any]]:
        known: dict[str, dict[str, Any]] = {
            "start": {"attempt": 1},
            "saved": {"event": "checkpoint", "attempt": 1, "step": 4, "checkpoint": "step-00000004"},
            "resume": {"attempt": 2, "step": 4, "checkpoint": "step-00000004"},
            "weights": {"attempt": 1, "step": 4},
            "rollback": {"attempt": 2, "step": 0, "put_aside": []},
            "checkpoints_given_up": {"attempt": 2, "step": 4},
        }
        return [{"event": name, **known[name]} for name in names]

    lines = [{"step": 5, "attempt": 1, "checkpoint_step": 4}]
    found = {"step-00000004": 4}
    assert recorded_checkpoints(events("start", "saved"), []) == found
    assert recorded_checkpoints(events("start"), lines) == found, "by the metrics"
    assert recorded_checkpoints(events("start", "resume"), []) == found, "by the resume"
    assert recorded_checkpoints(events("start", "weights"), lines) == {}
    assert recorded_checkpoints(events("start", "saved", "rollback"), lines) == {}
    assert recorded_checkpoints(events("start", "saved", "checkpoints_given_up"), lines) == {}


@pytest.mark.parametrize("kind", ["pipe", "directory", "link"])
def test_a_foreign_lock_is_passed_over(run: RunDirectory, kind: str) -> None:
    (run.path / "lock").mkdir()
    FOREIGN[kind](run.path / "lock" / "000004")
    with RunLock(run):
        assert (run.path / "lock" / "000005").is_file()
    (run.path / "lock" / "²").touch()
    (run.path / "lock" / "٣").touch()
    with RunLock(run):
        pass


@pytest.mark.parametrize("kind", ["pipe", "dangling link"])
def test_a_lock_directory_that_is_none_is_named(run: RunDirectory, kind: str) -> None:
    FOREIGN[kind](run.path / "lock")
    with pytest.raises(UserError, match="lock: must be a directory"), RunLock(run):
        pass


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "status.json"])
def test_somebody_elses_records_are_named(run: RunDirectory, needs: Callable[..., None], name: str) -> None:
    needs("root")  # becomes another user
    # Temporary files of pytest are in a folder that is root's alone.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        there = RunDirectory(shutil.copytree(run.path, Path(folder) / "run"))
        there.path.chmod(0o777)
        (there.path / name).chmod(0o600)
        os.seteuid(65534)
        try:
            with pytest.raises(UserError, match=rf"{name}: user 65534 may not read it"):
                there.recover_records()
        finally:
            os.seteuid(0)
        assert not list(there.path.glob("*.damaged-*")), "no permission is no damage"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\0", b'{"beats": 3, "failures": [], "hang": null}', b"\xff"])
def test_a_damaged_report_is_a_failure_of_its_node(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "node-1.json").write_bytes(content)
    (tmp_path / "node-x.json").write_bytes(b"{}")
    ((node, report),) = read_reports(tmp_path).items()
    assert node == 1
    (failure,) = report.failures
    assert "node 1: " in failure.summary and "node-1.json is unreadable" in failure.summary


def test_heartbeats_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "heartbeats"
    assert read_heartbeats(path) == {}
    create_heartbeats(path, 2)
    for content in (b"", b"\xff" * 1000, path.read_bytes()[:100]):
        path.write_bytes(content)
        assert read_heartbeats(path) == {}
    path.unlink()
    os.mkfifo(path)
    assert read_heartbeats(path) == {}


def test_a_missing_record_has_no_lines(tmp_path: Path) -> None:
    records = read_records(tmp_path / "events.jsonl")
    assert (records.lines, records.num_damaged) == ([], 0)


def test_a_changed_bit_of_a_record_is_noticed(tmp_path: Path) -> None:
    """Each bit of two lines, and of a status; by their hashes, which readers take off."""
    path = tmp_path / "lines.jsonl"
    lines = [{"event": "other", "step": step, "text": "a, b"} for step in range(2)]
    with LineWriter(path) as writer:
        for line in lines:
            writer.write(line)
    assert read_records(path) == Records(lines=lines)
    run = RunDirectory(tmp_path)
    status = run.write_status("stopped", reason="a", step=1, tokens=2)
    assert run.read_status() == status
    for file in (path, run.status):
        whole = file.read_bytes()
        for bit in range(8 * len(whole)):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            if file == path:
                assert read_records(path).num_damaged, damaged
            else:
                assert run.status_fault() or run.read_status() == status, damaged
        file.write_bytes(whole)
    # Written before there were hashes, or by hand.
    path.write_text(json.dumps(lines[0]) + "\n")
    assert read_records(path).lines == lines[:1]

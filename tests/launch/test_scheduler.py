"""The interface of schedulers: commands know nothing else, and one that is added from outside works like those here."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.launch import scheduler as schedulers
from lightscale.launch.commands.submit import submit_run
from lightscale.launch.environment import RankEnvironment
from lightscale.launch.launcher import restart
from lightscale.launch.launcher.torchrun import ThisMachine
from lightscale.launch.scheduler import (
    SCHEDULERS,
    JobRequest,
    JobState,
    Phase,
    Scheduler,
    default_scheduler,
    get_scheduler,
    job_states,
    live_jobs,
)
from lightscale.launch.settings import LaunchSettings
from lightscale.runs.job_environment import JOB_ID, job_id
from lightscale.runs.jobs import JobRecord, record_job, recorded_jobs
from lightscale.runs.run_directory import RunDirectory, read_lines

ROOT = Path(__file__).resolve().parents[2]


class Toy(Scheduler):
    """A queue in a file, TOY_QUEUE, that starts nothing: job numbers to phases. Without the file it does not answer."""

    title = "toy"
    asked: ClassVar[list[tuple[int, ...]]] = []

    def require(self, action: Literal["submit", "cancel"]) -> None:
        if not queue_file().exists():
            raise UserError(f"no toy queue to {action}")

    def check_settings(self, settings: LaunchSettings) -> None:
        if settings.nodes > 1:
            raise UserError(f"launch.nodes = {settings.nodes}: use 1")

    def script(self, job: JobRequest) -> str:
        return f"train {job.run.path} on {job.settings.ranks_per_node} ranks\n"

    def check(self, job: JobRequest) -> None:
        if job.settings.account == "nobody":
            raise UserError("toy: nobody has no account")

    def submit(self, job: JobRequest, *, after: int | None = None) -> int:
        queue = read_queue()
        number = max(map(int, queue), default=0) + 1
        assert after == (number - 1 if number > 1 else None)
        assert job.script.read_text() == self.script(job)
        write_queue({**queue, str(number): "running" if number == 1 else "waiting"})
        (job.run.logs / f"toy-{number}.txt").write_text(f"job {number} speaks\n")
        return number

    def cancel(self, job: JobState, *, now: bool) -> None:
        write_queue({**read_queue(), str(job.number): "ending" if job.phase == "running" and not now else "ended"})

    def state(self, numbers: Sequence[int]) -> dict[int, JobState]:
        self.asked.append(tuple(numbers))
        queue = read_queue() if queue_file().exists() else dict.fromkeys(map(str, numbers), "unknown")
        return {number: JobState(number=number, phase=phase(queue.get(str(number)))) for number in numbers}

    def allocation(self, environ: Mapping[str, str], *, min_nodes: int | None, fits: Callable[[int], bool]) -> Any:
        assert fits(1) and not fits(3)
        return ThisMachine()

    def logs(self, run: RunDirectory) -> list[Path]:
        return sorted(run.logs.glob("toy-*.txt"))

    def job_variables(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        return {JOB_ID: environ["TOY_JOB"]} if "TOY_JOB" in environ else {}

    def rank_variables(self, environ: Mapping[str, str]) -> Mapping[str, str] | None:
        if "TOY_RANK" not in environ:
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        return dict(zip(names, (environ["TOY_RANK"], "2", "0", "1", "n1", "12345"), strict=True))


def phase(text: str | None) -> Phase:
    phases: dict[str, Phase] = {name: name for name in ("waiting", "running", "ending", "unknown")}  # type: ignore[misc]
    return phases.get(text or "", "ended")


def queue_file() -> Path:
    return Path(os.environ["TOY_QUEUE"])


def read_queue() -> dict[str, str]:
    queue: dict[str, str] = json.loads(queue_file().read_text())
    return queue


def write_queue(queue: dict[str, str]) -> None:
    queue_file().write_text(json.dumps(queue))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The scheduler `toy`, as a package of somebody else would add it."""
    module = ModuleType("toy_scheduler")
    module.Toy = Toy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(SCHEDULERS, "toy", "toy_scheduler:Toy")
    monkeypatch.setenv("TOY_QUEUE", str(tmp_path / "queue.json"))
    monkeypatch.setattr(Toy, "asked", [])
    write_queue({})


@pytest.fixture
def folder(tmp_path: Path, tiny_run: Path, monkeypatch: pytest.MonkeyPatch, write_store: Callable[..., None]) -> Path:
    """The current directory, with tiny-run.toml and its store; no scheduler is installed."""
    write_store(tmp_path / "store", 300, text=np.arange(1, 200))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "site"))
    return tmp_path


SUBMIT = ["submit", "tiny-run.toml", "--scheduler", "toy"]


def test_outside_its_folder_no_file_names_slurm() -> None:
    """But one line, that of the table."""
    folder = ROOT / "lightscale/launch/slurm"
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted([*(ROOT / "lightscale").rglob("*.py"), *(ROOT / "lightscale").rglob("*.sh")])
        if not path.is_relative_to(folder)
        for line in path.read_text(encoding="utf-8").splitlines()
        if "slurm" in line.lower()
    ]
    assert found == [f'lightscale/config/schedulers.py: "slurm": "{SCHEDULERS["slurm"]}",']


def test_each_scheduler_of_the_table_is_there() -> None:
    for name in SCHEDULERS:
        assert isinstance(get_scheduler(name), Scheduler)
        assert get_scheduler(name).title
    assert type(get_scheduler()) is type(get_scheduler(default_scheduler()))
    with pytest.raises(UserError, match=f"unknown scheduler abacus; use {', '.join(SCHEDULERS)}"):
        get_scheduler("abacus")


def test_what_asks_for_states_does_not_wait_for_torch(tmp_path: Path) -> None:
    """With the modules of all schedulers."""
    code = (
        "import sys; from lightscale.launch.scheduler import SCHEDULERS, get_scheduler\n"
        "for name in SCHEDULERS: get_scheduler(name)\n"
        "print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"


def test_jobs_of_a_toy_from_submission_to_the_end(toy: None, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory("runs/tiny-run")

    def said(*words: str) -> str:
        assert main(list(words)) == 0
        return capsys.readouterr().out

    assert said(*SUBMIT, "--dry-run", "launch.processes=2") == "train runs/tiny-run on 2 ranks\n"
    assert not run.path.exists()
    assert said(*SUBMIT, "--chain", "3") == "jobs 1, 2, 3 in runs/tiny-run\n"
    lines = read_lines(run.jobs)
    assert [(line["job"], line["scheduler"]) for line in lines] == [(1, "toy"), (2, "toy"), (3, "toy")]
    assert main([*SUBMIT]) == 78
    assert "is in use by job 1 running, 2 waiting, 3 waiting" in capsys.readouterr().err
    (shown,) = json.loads(said("runs", "--json"))
    assert shown["job"] == "1 running"
    assert said("logs", "runs/tiny-run") == "job 3 speaks\n"
    assert said("cancel", "runs/tiny-run", "--waiting") == (
        "job 3 cancelled before it started\njob 2 cancelled before it started\n"
    )
    assert said("cancel", "runs/tiny-run") == "job 1 saves and exits\n"
    assert said("cancel", "runs/tiny-run", "--now") == "job 1 is ending\n"
    write_queue({"1": "running"})
    assert said("cancel", "runs/tiny-run", "--now") == "job 1 cancelled\n"
    assert said("cancel", "runs/tiny-run") == "runs/tiny-run has no waiting or running job\n"
    assert said("logs", "runs/tiny-run", "--follow") == "job 3 speaks\n"
    (shown,) = json.loads(said("runs", "--json"))
    assert shown["job"] is None


def test_a_script_reads_the_same_as_json(toy: None, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> list[Any]:
        assert main([*words, "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    where = {"run": "runs/tiny-run", "scheduler": "toy"}
    assert said(*SUBMIT, "--dry-run") == [{**where, "jobs": [], "script": "train runs/tiny-run on 1 ranks\n"}]
    assert said(*SUBMIT, "--chain", "2") == [{**where, "jobs": [{"number": 1}, {"number": 2}], "finished": False}]
    log = Path("runs/tiny-run/logs/toy-2.txt")
    log.write_text("one\n\ntwo\x0bthree\n")
    lines = [{"file": str(log), "text": text} for text in ("one", "", "two\x0bthree")]
    assert said("logs", "tiny-run") == lines
    assert said("cancel", "tiny-run", "--waiting") == [
        {
            "run": "runs/tiny-run",
            "jobs": [{"number": 2, "phase": "waiting", "state": "", "outcome": "removed"}],
            "unknown": [],
        }
    ]
    for words, phase, outcome in (
        ([], "running", "saving"),
        ([], "ending", "ending"),
        (["--now"], "running", "killed"),
    ):
        write_queue({"1": phase})
        (record,) = said("cancel", "tiny-run", *words)
        assert record["jobs"] == [{"number": 1, "phase": phase, "state": "", "outcome": outcome}]
    write_queue({})
    assert said("cancel", "tiny-run") == [{"run": "runs/tiny-run", "jobs": [], "unknown": []}]
    assert said("logs", "tiny-run", "--follow") == lines
    run = RunDirectory("runs/tiny-run")
    run.write_status("finished", reason="", step=load("tiny-run.toml").total_steps, tokens=0)
    assert said(*SUBMIT) == [{**where, "jobs": [], "finished": True}]


def test_a_scheduler_refuses_before_anything_is_written(
    toy: None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (["--nodes", "2"], "launch.nodes = 2: use 1"),
        (["--account", "nobody"], "nobody has no account"),
        (["--scheduler", "abacus"], "unknown scheduler abacus; use slurm, local, toy"),
    ):
        assert main([*SUBMIT, *words]) == 78
        assert message in capsys.readouterr().err
    queue_file().unlink()
    assert main([*SUBMIT]) == 78
    assert "no toy queue to submit" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_program_submits(toy: None, folder: Path) -> None:
    config = load("tiny-run.toml")
    run = RunDirectory("runs/by-program")
    request = JobRequest(run=run, settings=LaunchSettings(), is_chain=True)
    assert submit_run(config, request, scheduler="toy", count=2) == [1, 2]
    assert recorded_jobs(run) == [JobRecord(number=1, scheduler="toy"), JobRecord(number=2, scheduler="toy")]
    assert load(run.config) == config
    write_queue({})
    run.write_status("finished", reason="", step=config.total_steps, tokens=0)
    assert submit_run(config, request, scheduler="toy") == []
    with pytest.raises(UserError, match=r"launch\.time is not set"):
        submit_run(config, request)


def test_unknown_is_not_ended(toy: None, folder: Path) -> None:
    write_queue({"1": "running"})
    records = [JobRecord(number=number, scheduler="toy") for number in (1, 2)]
    records += [JobRecord(number=1, scheduler="abacus"), JobRecord(number=1)]
    states = job_states([records[3], *records[:3], records[0]])
    assert list(states) == [records[3], *records[:3]]
    # Another machine's scheduler, and one that is not installed here, say nothing.
    assert [states[record].phase for record in records] == ["running", "ended", "unknown", "unknown"]
    assert list(live_jobs(records)) == records[:1]
    assert Toy.asked == [(1, 2, 1), (1, 2)], "once each time"
    queue_file().unlink()
    assert {state.phase for state in job_states(records).values()} == {"unknown"}


def test_the_default_is_not_named_in_records(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of runs are what they were before there were several schedulers."""
    run = RunDirectory("runs/tiny-run")
    run.create(load("tiny-run.toml"))
    record_job(run, JobRecord(number=17))
    (line,) = read_lines(run.jobs)
    assert line.keys() == {"time", "job"}
    assert recorded_jobs(run) == [JobRecord(number=17)]
    asked: list[Sequence[int]] = []

    def state(self: Scheduler, numbers: Sequence[int]) -> dict[int, JobState]:
        asked.append(numbers)
        return {}

    monkeypatch.setattr(type(get_scheduler()), "state", state)
    assert [state.phase for state in job_states(recorded_jobs(run)).values()] == ["unknown"]
    assert asked == [[17]]


def test_the_newest_output_is_that_of_whichever_scheduler(toy: None, folder: Path) -> None:
    run = RunDirectory("runs/tiny-run")
    run.create(load("tiny-run.toml"))
    assert schedulers.newest_job_log(run) is None
    run.logs.mkdir()
    first = run.logs / "toy-1.txt"
    second = run.logs / "slurm-9.out"
    for age_s, path in enumerate((second, first)):
        path.write_text("")
        os.utime(path, (1e9 - age_s, 1e9 - age_s))
    assert schedulers.newest_job_log(run) == second


def test_ranks_and_launchers_of_a_toy(toy: None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = RankEnvironment.read({"TOY_RANK": "1"})
    assert found is not None
    assert (found.launcher, found.rank, found.world_size, found.master_port) == ("toy", 1, 2, 12345)
    with pytest.raises(UserError, match="toy: rank 7 is not one of 2"):
        RankEnvironment.read({"TOY_RANK": "7"})
    started: list[dict[str, Any]] = []

    def run_ranks(run: RunDirectory, command: list[str], **options: Any) -> int:
        started.append(options)
        return 75

    monkeypatch.setattr(restart, "run_ranks", run_ranks)
    monkeypatch.setenv("TOY_JOB", "5")
    # The command sets it in this process; set and removed here, it is removed again at the end.
    monkeypatch.setenv(JOB_ID, "none")
    monkeypatch.delenv(JOB_ID)
    assert main(["train", "tiny-run.toml", "train.device=cpu", "--scheduler", "toy"]) == 75
    (options,) = started
    assert isinstance(options["nodes"], ThisMachine)
    words = shlex.split(options["resume"])
    assert words[:5] == ["lightscale", "submit", "runs/tiny-run/config.toml", "--scheduler", "toy"]
    assert job_id() == "5"


def test_a_scheduler_that_does_not_answer_is_not_taken_for_no_job(
    toy: None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SUBMIT]) == 0
    queue = read_queue()
    queue_file().unlink()
    capsys.readouterr()
    # The toy refuses to cancel without its queue, which SLURM's commands do not know before they are asked.
    queue_file().write_text(json.dumps(dict.fromkeys(queue, "unknown")))
    assert main(["cancel", "runs/tiny-run"]) == os.EX_TEMPFAIL
    output = capsys.readouterr()
    assert "has no waiting or running job" not in output.out
    assert output.err == "job 1: the scheduler does not answer, and the job may wait or run; try again\n"
    assert main(["cancel", "runs/tiny-run", "--json"]) == os.EX_TEMPFAIL
    assert json.loads(capsys.readouterr().out)["unknown"] == [1]
    assert main([*SUBMIT]) == 78
    assert "the scheduler does not answer, and job 1 of this run may wait or run" in capsys.readouterr().err
    assert main(["runs", "runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["job"] == "1 unknown"
    write_queue(queue)
    assert main(["cancel", "runs/tiny-run"]) == 0

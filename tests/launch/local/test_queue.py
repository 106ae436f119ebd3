"""The queue of one machine, with real runners and scripts of a few lines in place of the launcher."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lightscale.errors import UserError
from lightscale.launch.local.queue import Job, Queue
from lightscale.launch.local.scheduler import Local
from lightscale.launch.scheduler import JobRequest, JobState, get_scheduler
from lightscale.launch.settings import LaunchSettings
from lightscale.runs.run_directory import RunDirectory

# A machine that others use too is slow at times.
TIMEOUT_S = 60.0
# A launcher of a few lines: it saves on a stop signal, and writes down what it was given.
SAVES = 'trap "mkdir -p checkpoints/step-$(date +%s%N); exit 75" USR1 TERM\n'
SAYS = 'echo "begin $LIGHTSCALE_JOB_ID $CUDA_VISIBLE_DEVICES" >> ../said\n'
WAITS = "while [ ! -e ../go ]; do sleep 0.05; done\n"

Submit = Callable[..., int]


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    """Of a user of our own, on a machine without GPUs. What still runs at the end is ended."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = Queue()
    yield found
    (tmp_path / "go").touch()
    for job in found.jobs().values():
        for process in (job.runner, job.launcher):
            if process is not None and process.is_running():
                os.kill(process.id, signal.SIGKILL)


@pytest.fixture
def submit(tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """``submit(run, script, **settings)``: a job of the run `run`; returns its number."""

    def submit(name: str, script: str, *, chain: bool = False, after: int | None = None, **settings: object) -> int:
        run = RunDirectory(tmp_path / name)
        run.path.mkdir(exist_ok=True)
        monkeypatch.chdir(run.path)
        request = JobRequest(run=run, settings=LaunchSettings.model_validate(settings), is_chain=chain)
        request.script.write_text(script)
        return get_scheduler("local").submit(request, after=after)

    return submit


def await_(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def phase(number: int) -> str:
    return state(number).phase


def state(number: int) -> JobState:
    return Local().state([number])[number]


def said(tmp_path: Path) -> list[str]:
    file = tmp_path / "said"
    return [" ".join(line.split()) for line in file.read_text().splitlines()] if file.exists() else []


def job_of(queue: Queue, number: int) -> Job:
    job = queue.job(number)
    assert job is not None
    return job


def test_first_in_first_out_one_at_a_time(submit: Submit, queue: Queue, tmp_path: Path) -> None:
    jobs = [submit(name, SAYS + WAITS + "echo end >> ../said; exit 0") for name in ("a", "b", "c")]
    assert jobs == [1, 2, 3]
    await_(lambda: said(tmp_path) == ["begin 1"])
    # Several looks of the others' runners.
    time.sleep(1.5)
    assert [phase(number) for number in jobs] == ["running", "waiting", "waiting"]
    (tmp_path / "go").touch()
    await_(lambda: all(phase(number) == "ended" for number in jobs))
    assert said(tmp_path) == ["begin 1", "end", "begin 2", "end", "begin 3", "end"]
    assert submit("a", "exit 0") == 4, "numbers are not given twice"


def test_no_gpu_is_booked_twice_and_a_large_job_gets_its_turn(
    submit: Submit, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    script = SAYS + "while [ ! -e ../go-$LIGHTSCALE_JOB_ID ]; do sleep 0.05; done"
    jobs = [submit(str(wants), script, gpus_per_node=wants) for wants in (1, 2, 3)] + [submit("one", script)]
    await_(lambda: len(said(tmp_path)) == 2)
    assert state(2).text == "RUNNING (GPU 5,6)"
    (tmp_path / "go-2").touch()
    await_(lambda: phase(2) == "ended")
    # Two GPUs are free: enough for the last job, but the one of three is before it.
    time.sleep(1.0)
    assert [phase(number) for number in jobs] == ["running", "ended", "waiting", "waiting"]
    (tmp_path / "go-1").touch()
    await_(lambda: len(said(tmp_path)) == 3)
    (tmp_path / "go-3").touch()
    await_(lambda: len(said(tmp_path)) == 4)
    (tmp_path / "go-4").touch()
    assert sorted(said(tmp_path)[:2]) == ["begin 1 4", "begin 2 5,6"]
    assert said(tmp_path)[2:] == ["begin 3 4,5,6", "begin 4 4"]
    request = JobRequest(run=RunDirectory("run"), settings=LaunchSettings(gpus_per_node=4))
    with pytest.raises(UserError, match="gpus_per_node = 4: this machine has 3 GPUs"):
        Local().check(request)


def test_cancel_saves_or_not_and_ends_what_waits(submit: Submit, tmp_path: Path) -> None:
    first, second = submit("a", SAVES + SAYS + WAITS, jobs_at_once=2), submit("b", SAYS + WAITS, jobs_at_once=2)
    third = submit("c", SAYS, jobs_at_once=2)
    await_(lambda: len(said(tmp_path)) == 2)
    scheduler = Local()
    scheduler.cancel(state(third), now=True)
    assert phase(third) == "ended"
    scheduler.cancel(state(first), now=False)
    scheduler.cancel(state(second), now=True)
    await_(lambda: phase(first) == phase(second) == "ended")
    assert len(list((tmp_path / "a/checkpoints").iterdir())) == 1
    time.sleep(0.7)
    assert len(said(tmp_path)) == 2, "neither did the third begin, nor the first again"


def test_a_killed_runner_is_not_shown_as_running_and_its_job_goes_on(
    submit: Submit, queue: Queue, tmp_path: Path
) -> None:
    saving, idle = submit("saves", SAVES + SAYS + WAITS), submit("idle", "trap 'exit 75' TERM\n" + SAYS + WAITS)
    last = submit("last", SAYS)
    await_(lambda: len(said(tmp_path)) == 1)
    # It waits still: the next look gives it another runner.
    kill_runner(queue, idle)
    assert phase(idle) == "waiting"
    kill_runner(queue, saving)
    assert phase(saving) != "running"
    await_(lambda: "begin 2" in said(tmp_path))
    assert phase(saving) == "waiting", "behind the others, since it had brought a checkpoint"
    kill_runner(queue, idle)
    await_(lambda: phase(idle) == "ended")
    await_(lambda: len(said(tmp_path)) == 4)
    (tmp_path / "go").touch()
    await_(lambda: phase(saving) == phase(last) == "ended")
    assert said(tmp_path) == ["begin 1", "begin 2", "begin 3", "begin 1"]


def kill_runner(queue: Queue, number: int) -> None:
    runner = job_of(queue, number).runner
    assert runner is not None
    os.kill(runner.id, signal.SIGKILL)
    await_(lambda: not runner.is_running())


def test_a_process_of_before_the_machine_was_restarted_is_dead(submit: Submit, queue: Queue) -> None:
    number = submit("a", SAYS + WAITS)
    runner = job_of(queue, number).runner
    assert runner is not None
    assert runner.is_running()
    assert not runner.model_copy(update={"boot": "another"}).is_running()
    assert not runner.model_copy(update={"started": runner.started - 60}).is_running()


def test_the_time_limit_saves_and_the_job_is_queued_again_behind_others(submit: Submit, tmp_path: Path) -> None:
    first = submit("a", SAVES + SAYS + WAITS, time="0:00:03", signal_s=2)
    second = submit("b", SAYS)
    await_(lambda: len(said(tmp_path)) == 3)
    (tmp_path / "go").touch()
    await_(lambda: phase(first) == phase(second) == "ended")
    assert said(tmp_path)[:3] == ["begin 1", "begin 2", "begin 1"]
    assert (tmp_path / "a/logs/local-1.out").exists()


@pytest.mark.long
def test_a_job_that_neither_saves_nor_leaves_is_killed_at_its_time_limit(submit: Submit, tmp_path: Path) -> None:
    job = submit("a", 'trap "" USR1 TERM\n' + SAYS + WAITS, time="0:00:02", signal_s=1)
    await_(lambda: phase(job) == "ended")
    assert said(tmp_path) == ["begin 1"]
    assert not (tmp_path / "go").exists()


def test_the_next_job_of_a_chain_continues_and_the_end_of_the_run_ends_the_chain(
    submit: Submit, tmp_path: Path
) -> None:
    script = SAYS + "[ $LIGHTSCALE_JOB_ID = 1 ] && exit 75\nexit 0"
    first = submit("a", script, chain=True)
    second = submit("a", script, chain=True, after=first)
    third = submit("a", "sleep 1\n" + script, chain=True, after=second)
    await_(lambda: phase(third) == "ended")
    assert said(tmp_path)[:2] == ["begin 1", "begin 2"]
    assert "begin 3" not in said(tmp_path), "the run was finished"


def test_the_end_of_the_terminal_ends_no_job(
    submit: Submit, queue: Queue, tmp_path: Path, needs: Callable[..., None]
) -> None:
    """Submitted by a process of a terminal of its own, which is then closed."""
    needs("pseudo-terminals")
    run = tmp_path / "a"
    run.mkdir()
    (run / "job.sh").write_text(SAYS + WAITS + "echo end >> ../said\n")
    code = (
        "import signal, time\n"
        # Tests may have been started by nohup, which their children would inherit.
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "from lightscale.launch.scheduler import JobRequest, get_scheduler\n"
        "from lightscale.launch.settings import LaunchSettings\n"
        "from lightscale.runs.run_directory import RunDirectory\n"
        f"request = JobRequest(run=RunDirectory({str(run)!r}), settings=LaunchSettings())\n"
        "get_scheduler('local').submit(request)\n"
        "time.sleep(60)\n"
    )
    process_id, terminal = pty.fork()
    if process_id == 0:
        os.chdir(run)
        os.execv(sys.executable, [sys.executable, "-c", code])
    await_(lambda: said(tmp_path) == ["begin 1"])
    os.close(terminal)
    _, status = os.waitpid(process_id, 0)
    assert os.WTERMSIG(status) == signal.SIGHUP
    time.sleep(0.5)
    assert phase(1) == "running"
    (tmp_path / "go").touch()
    await_(lambda: phase(1) == "ended")
    assert said(tmp_path) == ["begin 1", "end"]


def test_two_submissions_at_once_get_different_numbers(queue: Queue, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from lightscale.launch.scheduler import JobRequest, get_scheduler\n"
        "from lightscale.launch.settings import LaunchSettings\n"
        "from lightscale.runs.run_directory import RunDirectory\n"
        "run = RunDirectory(sys.argv[1])\nrun.path.mkdir()\n"
        "request = JobRequest(run=run, settings=LaunchSettings())\nrequest.script.write_text('exit 0')\n"
        "print('ready', flush=True); input()\n"
        "print(*[get_scheduler('local').submit(request) for _ in range(3)])\n"
    )
    command = [sys.executable, "-c", code]
    both = [
        subprocess.Popen([*command, str(tmp_path / name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    for one in both:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    numbers = [one.communicate("\n", timeout=TIMEOUT_S)[0].split() for one in both]
    assert sorted(int(number) for ones in numbers for number in ones) == [1, 2, 3, 4, 5, 6]


def test_a_damaged_file_is_named_and_stops_nobody(
    submit: Submit, queue: Queue, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = submit("a", "exit 0")
    await_(lambda: phase(ended) == "ended")
    (queue.path / "000007.json").write_text('{"number": 7')
    (queue.path / "000008.json").write_bytes((queue.path / "000001.json").read_bytes())
    number = submit("b", SAYS)
    assert number == 9
    await_(lambda: phase(number) == "ended")
    assert said(tmp_path) == ["begin 9"]
    # Who reads the queue first says so: this process, or the runner of the job that has just ended.
    heard = capfd.readouterr().err + (queue.path / "runners.log").read_text()
    assert re.search(r"000007.json: not a job of the queue .*; set aside as 000007.json.damaged", heard)
    assert phase(7) == phase(8) == "unknown"
    assert "000007.json.damaged" in str(state(7))


def test_a_running_job_restores_its_file(submit: Submit, queue: Queue, tmp_path: Path) -> None:
    number = submit("a", SAYS + WAITS)
    await_(lambda: phase(number) == "running")
    (queue.path / "000001.json").write_text("")
    other = submit("b", SAYS)
    await_(lambda: phase(number) == "running")
    assert phase(other) == "waiting"
    assert len(said(tmp_path)) == 1


def test_what_this_queue_does_not_know_is_unknown(queue: Queue, submit: Submit) -> None:
    assert phase(1) == "unknown", "no queue at all: the job may be of another machine"
    number = submit("a", SAYS + WAITS)
    assert phase(number + 1) == "unknown"
    await_(lambda: phase(number) == "running")
    file = queue.path / "000001.json"
    job = json.loads(file.read_text())
    runner = psutil.Process(job["runner"]["id"])
    runner.suspend()
    file.write_text(json.dumps(job | {"host": "elsewhere"}))
    assert (phase(number), state(number).text) == ("unknown", "on elsewhere")
    file.write_text(json.dumps(job))
    runner.resume()


def test_one_machine_is_one_node() -> None:
    message = "launch.nodes = 2: --scheduler local runs jobs on this machine only; use --nodes 1"
    with pytest.raises(UserError, match=re.escape(message)):
        Local().check_settings(LaunchSettings(nodes=2))


def test_the_script_starts_the_launcher_in_place_of_the_shell(tmp_path: Path, queue: Queue) -> None:
    settings = LaunchSettings(processes=2, setup=["module load cuda"], environment={"A": "b c"}, partition="gpu")
    text = Local().script(JobRequest(run=RunDirectory(tmp_path), settings=settings))
    assert "# Not used on one machine: launch.partition" in text.splitlines()
    assert "module load cuda" in text.splitlines()
    assert 'export A="${A:-b c}"' in text.splitlines()
    command = f"train {tmp_path}/config.toml --run {tmp_path} --scheduler local --processes 2"
    last = text.splitlines()[-1]
    assert last.startswith("exec ")
    assert last.endswith(command)
    assert not queue.path.exists()

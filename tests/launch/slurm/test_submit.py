"""The batch script and its settings, and what is refused before SLURM has anything to do."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.launch.scheduler import live_jobs
from lightscale.launch.settings import load_settings
from lightscale.launch.slurm import client
from lightscale.runs.jobs import JobRecord, record_job, recorded_jobs
from lightscale.runs.lock import RunLock
from lightscale.runs.run_directory import RunDirectory

Run = Any  # conftest.py

TIME = ["--time", "24:00:00"]
SITE = """
[launch]
partition = "gpu"
time = "12:00:00"
gpus_per_node = 2
setup = ["module load cuda"]

[launch.environment]
NCCL_SOCKET_IFNAME = "ib0"
NCCL_DEBUG = 'a "quoted" $word'
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_run: Path, monkeypatch: pytest.MonkeyPatch, write_store: Callable[..., None]) -> Path:
    """The current directory, with tiny-run.toml and its store; settings of a site would be in site/lightscale."""
    write_store(tmp_path / "store", 300, text=np.arange(1, 200))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "site"))
    (tmp_path / "site/lightscale").mkdir(parents=True)
    return tmp_path


def script(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["submit", "tiny-run.toml", *words, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_a_dry_run_shows_the_script_and_touches_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = script(capsys, "--nodes", "2", *TIME, "--partition", "long", "--account", "us")
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert options == [
        "--job-name=tiny-run",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--time=24:00:00",
        "--partition=long",
        "--account=us",
        f"--chdir={folder}",
        f"--output={folder}/runs/tiny-run/logs/slurm-%j.out",
        "--open-mode=append",
        "--signal=B:USR1@300",
        "--requeue",
    ]
    assert "{{" not in text
    assert text.count("queue_again\n") == 2, "saved in time, or killed after progress"
    train = f"train {folder}/runs/tiny-run/config.toml --run {folder}/runs/tiny-run"
    assert f"{train} --scheduler slurm --processes 1 &" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=60)
    assert not (folder / "runs").exists()
    chain = script(capsys, *TIME, "--chain", "3")
    subprocess.run(["bash", "-n"], input=chain, text=True, check=True, timeout=60)
    assert "queue_again\n" not in chain, "the next job of the chain continues"
    assert "#SBATCH --no-kill" in chain.splitlines()


def test_settings_of_the_site_the_run_and_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "site/lightscale/launch.toml").write_text(SITE)
    before = load("tiny-run.toml")
    with (folder / "tiny-run.toml").open("a") as file:
        file.write('\n[launch]\ntime = "6:00:00"\n[launch.environment]\nNCCL_SOCKET_IFNAME = "eth0"\n')
    assert load("tiny-run.toml") == before, "it is no part of the run"
    text = script(capsys, "launch.options=['--qos=high']", "launch.cpus_per_node=8", "--partition", "debug")
    for line in (
        "#SBATCH --time=6:00:00",
        "#SBATCH --partition=debug",
        "#SBATCH --gpus-per-node=2",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --qos=high",
        "module load cuda",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"',
        'export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-eth0}"',
    ):
        assert line in text.splitlines()
    assert "--processes 2 &" in text, "one for each GPU"
    exports = "\n".join(line for line in text.splitlines() if line.startswith("export "))
    shown = 'echo "$NCCL_DEBUG;$NCCL_SOCKET_IFNAME"'
    done = subprocess.run(
        ["bash", "-c", f"{exports}\n{shown}"],
        env={"NCCL_SOCKET_IFNAME": "mine"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == 'a "quoted" $word;mine\n'


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "launch.time is not set; use --time HOURS:MINUTES:SECONDS"),
        (["--time", "10h"], 'command line: launch.time = "10h": must be hours:minutes:seconds or days-hours'),
        ([*TIME, "--nodes", "0"], "command line: launch.nodes = 0: must be a whole number >= 1"),
        ([*TIME, "--nodes", "3"], "train.global_batch_size = 4"),
        ([*TIME, "--nodes", "2", "--processes", "4"], "8 ranks use parallel.tensor=1 parallel.pipeline="),
        (["--time", "5"], "launch.signal_s = 300: must be less than the time limit, launch.time = 5"),
        (["--time", "4:59"], "must be less than the time limit"),
        (["--time", "0:05:00"], "must be less than the time limit"),
        (["--time", "0-0:05"], "must be less than the time limit"),
        (["--time", "5:01", "--nodes", "3"], "train.global_batch_size = 4"),
        (["--time", "1-0", "--nodes", "3"], "train.global_batch_size = 4"),
        (
            [*TIME, "launch.partitoin=gpu"],
            'override "launch.partitoin=gpu": unknown key launch.partitoin; the keys are',
        ),
        ([*TIME, "launch.min_nodes=2"], "launch.min_nodes = 2: must be at most launch.nodes = 1"),
        ([*TIME, "launch.options=['qos']"], 'launch.options has "qos": must be options of the scheduler'),
        ([*TIME, "launch.environment.A-B=1"], "launch.environment.A-B: must be the name of a variable"),
        ([*TIME, "--run", 'a"b'], "which sbatch does not accept"),
        ([*TIME, "--chain", "0"], "--chain 0: must be at least 1"),
        ([*TIME, "data.store=nowhere"], "nowhere"),
        ([*TIME, "--allow-change", "model.depth"], "--allow-change model.depth"),
        ([*TIME], "no SLURM on this machine: sbatch is not in PATH"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert main(["submit", "tiny-run.toml", *words]) == 78
    assert message in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_commands_for_jobs_where_there_is_no_slurm(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory("runs/tiny-run")
    run.create(load("tiny-run.toml"))
    monkeypatch.setenv("PATH", str(folder))
    records = [JobRecord(number=17), JobRecord(number=18)]
    for record in records:
        record_job(run, record)
    assert recorded_jobs(run) == records
    assert live_jobs(records) == {}
    for words, message in (
        (["cancel", "runs/tiny-run"], "no SLURM on this machine: scancel"),
        (["cancel", "runs/other"], "no run runs/other"),
        (["logs", "runs/tiny-run", "--rank", "3"], "has no output of rank 3 yet"),
        (["train", "tiny-run.toml", "--scheduler", "slurm"], "no SLURM on this machine: srun"),
        (
            ["train", "tiny-run.toml", "--min-nodes", "2"],
            "--min-nodes 2: needs --scheduler",
        ),
    ):
        assert main(words) == 78
        assert message in capsys.readouterr().err


def test_logs_of_a_run_without_jobs_are_those_of_its_newest_launch(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory("runs/tiny-run")
    run.create(load("tiny-run.toml"))
    for text in ("first", "second"):
        logs = run.new_log_directory()
        for rank in range(2):
            (logs / f"rank-{rank}.out").write_text(f"{text} of rank {rank}\n")
    for words, shown in (([], "second of rank 0\n"), (["--rank", "1"], "second of rank 1\n")):
        for more in ([], ["--follow"]):
            assert main(["logs", "runs/tiny-run", *words, *more]) == 0
            assert capsys.readouterr().out == shown


def test_what_slurm_or_the_run_refuses(
    cluster: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environment[name])
    for words, message in (
        (["--partition", "gpu"], 'partition "gpu": unknown on this cluster; use high, low, main'),
        (["launch.options=['--mem=99T']"], "error: sbatch: "),
    ):
        assert main(["submit", "tiny-run.toml", *TIME, *words]) == 78
        assert message in capsys.readouterr().err
        assert not (folder / "runs").exists()
    run = RunDirectory("runs/tiny-run")
    run.create(load("tiny-run.toml"))
    assert main(["submit", "tiny-run.toml", *TIME, "optimizer.lr=0.5"]) == 78
    error = capsys.readouterr().err
    assert "optimizer.lr: 0.001 in the run, 0.5 now" in error
    assert "--allow-change optimizer.lr" in error
    with RunLock(run):
        assert main(["submit", "tiny-run.toml", *TIME]) == 78
    assert f"is in use by process {os.getpid()}" in capsys.readouterr().err
    assert recorded_jobs(run) == []
    assert cluster.client("squeue", "--noheader") == ""


def test_the_nodes_of_a_job(
    cluster: Any, new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = new_run()
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environment[name])
    wrap = "--wrap=trap 'exit 0' TERM; sleep 600 & wait"
    job = int(cluster.client("sbatch", "--parsable", "--nodes=2", "--no-kill", "--output=/dev/null", wrap))
    run.await_(lambda: len(client.nodes_of(job)) == 2)
    assert [(node.name, node.address, node.is_up) for node in client.nodes_of(job)] == [
        ("n1", "localhost", True),
        ("n2", "localhost", True),
    ]
    # What a user set up for himself does not matter.
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    record = JobRecord(number=job)
    assert str(live_jobs([record])[record]) == f"{job} RUNNING"
    cluster.client("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    run.await_(lambda: [node.name for node in client.nodes_of(job) if node.is_up] == ["n1"])
    cluster.client("scancel", str(job))
    run.await_(lambda: live_jobs([record]) == {})
    assert client.job_states([job])[job].phase == "ended"
    settings = load_settings(run.folder / "run.toml", [], {"time": "10", "nodes": 2})
    assert (settings.nodes, settings.partition) == (2, None)


@pytest.mark.parametrize(
    ("answer", "phases"),
    [
        ("echo '17|PENDING|Priority'; echo '18|COMPLETING|None'", ["waiting", "ending", "ended"]),
        ("echo '17|RUNNING|None'; echo '19|REQUEUED|BeginTime'", ["running", "ended", "waiting"]),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", ["ended"] * 3),
        (
            "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1",
            ["unknown"] * 3,
        ),
        ("sleep 10", ["unknown"] * 3),
        (None, ["unknown"] * 3),
    ],
)
def test_states_of_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str | None, phases: list[str]) -> None:
    """No answer is not the answer that there is no job."""
    if answer is not None:
        squeue = tmp_path / "squeue"
        squeue.write_text(f"#!/bin/sh\n{answer}\n")
        squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if answer is not None else str(tmp_path))
    monkeypatch.setattr(client, "_STATE_TIMEOUT_S", 0.5)
    states = client.job_states([17, 18, 19])
    assert [states[number].phase for number in (17, 18, 19)] == phases
    if phases[0] == "waiting":
        assert str(states[17]) == "17 PENDING (Priority)"


@pytest.mark.parametrize(
    ("launcher", "status", "requeue", "ended", "calls"),
    [
        # A controller that is away, twice.
        (75, "resumable", "1-", 75, ["requeue 17"] * 3),
        # Saved: again, unless it was cancelled. One that never could is not done either.
        (75, "resumable", "11", 75, ["requeue 17"]),
        (75, "resumable", "10", 0, []),
        (75, "resumable", "00", 75, ["requeue 17"]),
        # Finished, or nothing to do but for a person: the rest of the chain would only repeat it.
        (0, "finished", "11", 0, ["cancel --waiting"]),
        (78, "stopped", "11", 78, ["cancel --waiting"]),
        # Refused, as where another job holds the run: that one's chain is none of its business.
        (78, "resumable", "11", 78, []),
        (78, None, "11", 78, []),
    ],
)
def test_what_a_job_does_when_its_launcher_has_ended(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    launcher: int,
    status: str | None,
    requeue: str,
    ended: int,
    calls: list[str],
) -> None:
    """The script itself, with stand-ins for Python and SLURM's commands."""
    programs = {
        "python": 'case "$*" in *" train "*) exit "$LAUNCHER";; *) echo "cancel ${!#}" >> "$CALLS";; esac',
        # At the start the first digit, at the end the second.
        "scontrol": 'if [ "$1" != show ]; then echo "$*" >> "$CALLS"; '
        '[ "${REQUEUE:1}" != - ] || [ "$(wc -l < "$CALLS")" -gt 2 ] || '
        "{ echo 'slurm_update error: Unable to contact slurm controller (connect failure)' >&2; exit 1; }; "
        'elif mkdir "$CALLS.begun" 2> /dev/null; then '
        'echo "   Requeue=${REQUEUE:0:1} Restarts=0"; else echo "   Requeue=${REQUEUE:1} Restarts=0"; fi',
        "sleep": ":",
    }
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setattr("sys.executable", str(folder / "bin" / "python"))
    (folder / "job.sh").write_text(script(capsys, *TIME))
    run = RunDirectory("runs/tiny-run")
    run.path.mkdir(parents=True)
    if status is not None:
        run.write_status(status, reason="", step=1, tokens=8)  # type: ignore[arg-type]
    environment = {
        "PATH": f"{folder / 'bin'}:/usr/bin:/bin", "CALLS": str(folder / "calls"), "SLURM_JOB_ID": "17",
        "LAUNCHER": str(launcher), "REQUEUE": requeue,
    }  # fmt: skip
    done = subprocess.run(["bash", "job.sh"], env=environment, cwd=folder, timeout=30, check=False)
    said = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    assert (done.returncode, said) == (ended, calls)

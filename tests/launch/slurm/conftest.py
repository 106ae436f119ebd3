"""A SLURM cluster of two nodes on this machine, by the real daemons: own configuration, directories, ports and key.

    tests ──sbatch, squeue, …──▶ slurmctld ──▶ slurmd n1, slurmd n2   (their processes authenticate by a munged of ours)

Requeued jobs wait only as long as they must: by default SLURM looks at them once a minute. Clusters of two test
processes do not meet: their job numbers differ, of which the ports of jobs are made.

`n1` is the node of the batch scripts. Partitions: `main`; `low`, whose jobs are preempted by those of `high`.
"""

import contextlib
import itertools
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from lightscale.runs.jobs import recorded_jobs
from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics
from lightscale.training.health.fault_injection import fault_file

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
# Daemons are in folders that the PATH of users lacks.
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
# A machine that others use too is slow at times.
TIMEOUT_S = 600.0
DAEMONS_S = 60.0
# Of a preempted job, to save.
GRACE_S = 120

SLURM_CONF = """
ClusterName=test
FirstJobId={ports[0]}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=300
KillWait=2
MinJobAge=3600
SchedulerParameters=sched_min_interval=0,sched_interval=1,bf_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=localhost Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname=localhost Port={ports[2]} CPUs=4
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=OFF
PartitionName=low Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=high Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""

# Two ranks need some seconds for its 40 steps, and checkpoints are where the tests expect them.
RUN = f"""
extends = ["{ROOT}/tests/helpers/small-run.toml"]

[optimizer]
schedule = "cosine"
warmup_steps = 5

[train]
steps = 40

[checkpoint]
every = 10
"""


class Cluster:
    """The daemons, and their clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The nodes share the cores of this machine: threads would only wait for each other.
        own = {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self.environment = {**os.environ, **own}
        for name in list(self.environment):
            if name.startswith(("SLURM_", "SBATCH_", "OMPI_", "PMI_")) and name != "SLURM_CONF":
                del self.environment[name]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, tuple[str, ...]] = {"controller": ("slurmctld", "-D")}
        self._commands |= {node: ("slurmd", "-D", "-N", node) for node in ("n1", "n2")}

    def begin(self) -> None:
        """Start everything; raises OSError or RuntimeError where that cannot be done."""
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        conf = SLURM_CONF.format(folder=self.folder, host=socket.gethostname(), ports=free_ports(3), grace_s=GRACE_S)
        (self.folder / "slurm.conf").write_text(conf)
        files = {name: self.folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        options = [f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in files.items()]
        self._commands["munged"] = ("munged", "--foreground", "--force", f"--key-file={key}", *options)
        self.start("munged")
        self._await(files["socket"].exists)
        for name in ("controller", "n1", "n2"):
            self.start(name)
        self._await(self._is_idle)

    def start(self, name: str) -> None:
        """The daemon of that name: munged, controller, n1, n2."""
        words = self._commands[name]
        with (self.folder / f"{name}.out").open("a") as log:
            self._daemons[name] = subprocess.Popen(
                words,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """SIGKILL to that daemon; of a node also to all that runs there, as when its power fails."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()
        for process in self._processes() if name in ("n1", "n2") else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.environ().get("SLURMD_NODENAME") == name:
                    # The slurmstepd above it belongs to nobody.
                    victims = [process, *(one for one in process.parents() if one.name().startswith("slurmstepd"))]
                    for victim in victims:
                        victim.kill()

    def end(self) -> None:
        """End everything that was started, the processes of jobs too."""
        for daemon in reversed(self._daemons.values()):
            for process in descendants(daemon.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            daemon.kill()
            daemon.wait()
        # Steps detach themselves from the daemon that started them, and may be starting something just now.
        while remains := self._processes():
            for process in remains:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(remains, timeout=DAEMONS_S)

    def _processes(self) -> list[psutil.Process]:
        """What is there of this cluster, its jobs too, beside the clients of the tests."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                is_ours = process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if is_ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def recover(self) -> None:
        """Wait until both nodes are idle again, whatever a test did to them."""
        for name in self._commands.keys() - self._daemons.keys():
            self.start(name)
        for node in ("n1", "n2"):
            self.try_client("scontrol", "update", f"nodename={node}", "state=resume")
        self._await(self._is_idle)

    def _is_idle(self) -> bool:
        return self.try_client("sinfo", "--noheader", "--partition=main", "--format=%T %D").strip() == "idle 2"

    def client(self, *words: str, check: bool = True) -> str:
        """What a command prints."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def try_client(self, *words: str) -> str:
        return self.client(*words, check=False)

    def _await(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DAEMONS_S
        while not condition():
            if any(daemon.poll() is not None for daemon in self._daemons.values()) or time.monotonic() > deadline:
                logs = [path.read_text(errors="replace")[-500:] for path in self.folder.glob("*.out")]
                raise RuntimeError(" ".join(logs).strip() or "its nodes do not come up")
            time.sleep(0.1)


def descendants(process_id: int) -> list[psutil.Process]:
    try:
        return psutil.Process(process_id).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@pytest.fixture(scope="session")
def cluster(needs: Callable[..., None]) -> Iterator[Cluster]:
    """Two nodes, idle; skips where there is no SLURM, or no right to start one."""
    needs(*PROGRAMS, "root")  # its daemons run jobs of any user
    # Paths of sockets are short.
    folder = Path(tempfile.mkdtemp(prefix="lightscale-slurm-"))
    folder.chmod(0o755)
    cluster = Cluster(folder)
    try:
        try:
            cluster.begin()
        except (OSError, RuntimeError) as error:
            pytest.skip(f"SLURM does not start here: {error}")
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


class Run:
    """A run as jobs of the cluster; `words` are those of its configuration."""

    def __init__(self, cluster: Cluster, folder: Path, path: str, words: tuple[str, ...]) -> None:
        self.cluster = cluster
        self.directory = RunDirectory(folder / path)
        self.folder, self._path, self._words = folder, path, words
        self._faults = folder / f"{path}.faults"
        self._faults.mkdir(parents=True)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`lightscale …` in the folder of the runs."""
        environment = {
            **self.cluster.environment,
            "CUDA_VISIBLE_DEVICES": "",
            "LIGHTSCALE_FAULT": f"@{self._faults}",
            "XDG_CONFIG_HOME": str(self.folder / "no-settings"),
        }
        return subprocess.run(
            [sys.executable, "-P", "-m", "lightscale", *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def rank_command(self) -> list[str]:
        """`lightscale train`, for whoever starts ranks by other means."""
        words = [*self._words, "--run", str(self.directory.path)]
        return [sys.executable, "-P", "-m", "lightscale", "train", str(self.folder / "run.toml"), *words]

    def submit(self, *options: str) -> list[int]:
        """Submit it on two nodes; returns the jobs."""
        before = len(recorded_jobs(self.directory))
        words = ["submit", "run.toml", *self._words, "--run", self._path, "--nodes", "2", "--time", "2:00:00", *options]
        done = self.command(*words)
        assert done.returncode == 0, done.stderr
        jobs = [record.number for record in recorded_jobs(self.directory)[before:]]
        assert f"{', '.join(map(str, jobs))} in {self._path}" in done.stdout
        return jobs

    def slow(self, step: int, step_s: float = 20.0) -> None:
        """After the `step`th step of a start, until `speed_up`, each takes `step_s` seconds.

        On a machine that is busy enough, many steps could be done before a test has noticed the first.
        """
        fault_file(self._faults, 0).write_text(f"slow={step_s}@step:begin#{step + 1}")

    def speed_up(self) -> None:
        fault_file(self._faults, 0).unlink(missing_ok=True)

    def wait_for_step(self, step: int) -> None:
        self.await_(lambda: self.directory.progress()[0] >= step)

    def wait_for_event(self, name: str) -> dict[str, Any]:
        self.await_(lambda: bool(self.events(name)))
        return self.events(name)[-1]

    def wait_stopped(self, signal: str) -> None:
        """Until all ranks have saved because of `signal`; afterwards steps are not slow any more."""
        self.await_(lambda: f"{signal}: finishing this step" in self.output())
        self.speed_up()
        self.await_(lambda: f"stopped by {signal}\n" in self.output() and "resumable at step" in self.output())

    def wait_finished(self) -> None:
        """Until all steps are done and no job is left."""
        self.await_(lambda: self._status() == "finished")
        self.await_(lambda: not self.cluster.client("squeue", "--noheader").strip())

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.directory.events) if event["event"] in names]

    def processes(self, **variables: str) -> list[psutil.Process]:
        """Those of the cluster's jobs that have `variables`."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                is_ours = environment.get("SLURM_CONF") == self.cluster.environment["SLURM_CONF"]
                if is_ours and all(environment.get(name) == value for name, value in variables.items()):
                    found.append(process)
        return found

    def launcher(self) -> psutil.Process:
        """`lightscale train` of the job."""
        found = []
        for process in self.processes(SLURM_PROCID="0"):
            with contextlib.suppress(psutil.Error):
                if {"train", "--scheduler"} <= set(process.cmdline()):
                    found.append(process)
        (launcher,) = found
        return launcher

    def output(self) -> str:
        """What all its jobs printed."""
        return "".join(path.read_text() for path in sorted(self.directory.logs.glob("slurm-*.out")))

    def trajectory(self) -> dict[int, tuple[Any, ...]]:
        """Step to what must be the same, bit by bit, in a run that nothing happened to."""
        lines = read_metrics(self.directory.metrics)
        return {line["step"]: (line["tokens"], line["loss"], line["grad_norm"], line["lr"]) for line in lines}

    def _status(self) -> str | None:
        status = self.directory.read_status()
        assert status is None or status.status != "stopped", self.output()
        return None if status is None else status.status

    def await_(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain\n{self.cluster.client('squeue')}\n{self.output()}"
            time.sleep(0.2)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory, write_store: Callable[..., None]) -> Path:
    """run.toml and its store; runs are beside them."""
    folder = tmp_path_factory.mktemp("slurm")
    write_store(folder / "store", 300, text=np.random.default_rng(0).integers(1, 300, 20000))
    (folder / "run.toml").write_text(RUN)
    return folder


@pytest.fixture
def new_run(cluster: Cluster, workplace: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Run]]:
    """``new_run("section.key=value", …)``: a run of this test; afterwards no job is left and no node hurt."""
    numbers = itertools.count()
    name = re.sub(r"\W+", "-", request.node.name).strip("-")

    def new_run(*words: str) -> Run:
        return Run(cluster, workplace, f"runs/{name}-{next(numbers)}", words)

    yield new_run
    cluster.client("scancel", "--user=root", "--signal=KILL", "--full", check=False)
    cluster.client("scancel", "--user=root", check=False)
    cluster.recover()


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster, workplace: Path) -> Callable[..., Run]:
    """``undisturbed("section.key=value", …)``: the same run by the launcher on this machine alone, in one go."""
    runs: dict[tuple[str, ...], Run] = {}

    def undisturbed(*words: str) -> Run:
        if words not in runs:
            path = f"runs/undisturbed-{len(runs)}"
            run = Run(cluster, workplace, path, words)
            done = run.command("train", "run.toml", *words, "--run", path, "--processes", "2")
            assert done.returncode == 0, done.stderr
            runs[words] = run
        return runs[words]

    return undisturbed

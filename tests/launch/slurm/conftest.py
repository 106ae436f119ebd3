"""A SLURM cluster of two nodes on this machine, by the real daemons: own configuration, directories, ports and key.

    tests ──sbatch, squeue, …──▶ slurmctld ──▶ slurmd n1, slurmd n2   (their processes authenticate by a munged of ours)

`n1` is the node of the batch scripts. Partitions: `main`; `low`, whose jobs are preempted by those of `high`.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from lightscale.training.run_directory import RunDirectory, read_lines, read_metrics

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
# Daemons are in folders that the PATH of users lacks.
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
# A machine that others use too is slow at times.
TIMEOUT_S = 300.0
# Of a preempted job, to save.
GRACE_S = 120

SLURM_CONF = """
ClusterName=test
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
KillWait=60
MinJobAge=3600
SchedulerParameters=sched_min_interval=0,bf_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=localhost Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname=localhost Port={ports[2]} CPUs=4
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=OFF
PartitionName=low Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=high Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    """The daemons, and their clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in list(self.environment):
            if name.startswith(("SLURM_", "SBATCH_", "OMPI_", "PMI_")) and name != "SLURM_CONF":
                del self.environment[name]
        self._daemons: list[subprocess.Popen[bytes]] = []

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
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *options)
        self._await(files["socket"].exists)
        self._daemon("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._daemon("slurmd", "-D", "-N", node)
        self._await(lambda: self.try_client("sinfo", "--noheader", "--format=%T %D").strip() == "idle 2")

    def end(self) -> None:
        """End everything that was started, the processes of jobs too."""
        for daemon in reversed(self._daemons):
            for process in descendants(daemon.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            daemon.kill()
            daemon.wait()
        # Steps detach themselves from the daemon that started them.
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    process.kill()

    def client(self, *words: str, check: bool = True) -> str:
        """What a command prints."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def try_client(self, *words: str) -> str:
        return self.client(*words, check=False)

    def _daemon(self, *words: str) -> None:
        with (self.folder / f"{words[0]}-{len(self._daemons)}.out").open("w") as log:
            self._daemons.append(
                subprocess.Popen(
                    words,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _await(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            if any(daemon.poll() is not None for daemon in self._daemons) or time.monotonic() > deadline:
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

"""The process of one job: it waits for the job's turn, starts its script, and records the result.

    lightscale submit ──▶ runner (a session of its own) ── at its turn ──▶ job.sh ── exec ──▶ launcher ──▶ ranks

When the runner is killed, the kernel sends SIGTERM to the launcher, which saves. On SIGTERM (a shutdown of the machine)
the runner passes the signal on and leaves the job in the queue.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from lightscale.config.schedulers import SCHEDULERS
from lightscale.launch.local.queue import Job, Process, Queue
from lightscale.launch.scheduler import get_scheduler
from lightscale.runs.job_environment import JOB_ID, NODE_NAME, SUBMIT_HOST
from lightscale.runs.run_directory import RunDirectory

# How soon a change of the queue is seen. A look costs one call of the kernel, as long as nothing has changed.
_POLL_S = 0.3
# What changes no file is looked for now and then: a job whose runner was killed.
_LOOK_S = 5.0
# Between SIGTERM and SIGKILL.
_KILL_WAIT_S = 5.0
# Of the launcher, see `../launcher/restart.py`: saved in time with steps left; and those after which another job of the
# run would only repeat it.
_SAVED, _FINAL = 75, (0, 70, 74, 78)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class JobRunner:
    """Runs the job `number` of `queue`."""

    def __init__(self, queue: Queue, number: int) -> None:
        self._queue, self._number = queue, number
        self._job: Job | None = None
        self._is_leaving = False
        self._process = Process.of(os.getpid())

    def run(self) -> None:
        """Run until the job has ended, or this process must exit."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._leave)
        while (started := self._start_in_turn()) is not None:
            launcher, descriptors = started
            code = self._wait(launcher)
            for descriptor in descriptors:
                os.close(descriptor)
            self._conclude(code)

    def _leave(self, signum: int, frame: FrameType | None) -> None:
        self._is_leaving = True

    def _start_in_turn(self) -> tuple[subprocess.Popen[bytes], list[int]] | None:
        """The launcher and what it has booked; None: the job is not to be run by this process."""
        seen, looked_s = -1, 0.0
        while not self._is_leaving:
            changed = self._queue.path.stat().st_mtime_ns
            if changed != seen or time.monotonic() - looked_s > _LOOK_S:
                seen, looked_s = changed, time.monotonic()
                with self._queue.locked():
                    self._queue.resume()
                    job = self._own()
                    if job is None:
                        return None
                    if self._queue.is_turn(job) and (booked := self._queue.book(job)) is not None:
                        return self._start(job, booked), list(booked.values())
            time.sleep(_POLL_S)
        return None

    def _own(self) -> Job | None:
        """The job as it is now; None: it was cancelled, or is another process's. A file that was lost is restored."""
        job = self._queue.job(self._number)
        if job is None and self._job is not None:
            self._queue.write(self._job)
            job = self._job
        self._job = job
        if job is None or job.phase == "ended" or self._process is None or job.runner is None:
            return None
        return job if job.runner.id == self._process.id else None

    def _start(self, job: Job, booked: dict[str, int]) -> subprocess.Popen[bytes]:
        run = RunDirectory(job.run)
        before = run.newest_checkpoint()
        run.logs.mkdir(exist_ok=True)
        with (run.logs / f"local-{job.number}.out").open("ab") as log:
            launcher = subprocess.Popen(
                ["/bin/bash", str(job.run / "job.sh")],
                cwd=job.directory,
                env=_environment(job, list(booked)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # The locks of what it has booked are its own too, and outlive this process.
                pass_fds=list(booked.values()),
                # This process has no other thread, which is what the rule is about.
                preexec_fn=_save_with_parent,  # noqa: PLW1509
            )
        started = {"phase": "running", "before": before, "booked": list(booked), "launcher": Process.of(launcher.pid)}
        self._job = job.model_copy(update=started)
        self._queue.write(self._job)
        return launcher

    def _wait(self, launcher: subprocess.Popen[bytes]) -> int:
        """Its exit code, negative for a signal; it is told to stop at the time limit, and when the job is cancelled."""
        begun_s = time.monotonic()
        sent: dict[signal.Signals, float] = {}
        while True:
            try:
                return launcher.wait(timeout=_POLL_S)
            except subprocess.TimeoutExpired:
                pass
            job = self._queue.job(self._number)
            if job is None:
                with self._queue.locked():
                    job = self._own()
            wanted = self._wanted(job, time.monotonic() - begun_s)
            if wanted is not None and wanted not in sent:
                sent[wanted] = time.monotonic()
                launcher.send_signal(wanted)
            # A machine that is shut down kills by itself, when its own time is over.
            is_killed = wanted is signal.SIGTERM and not self._is_leaving
            if is_killed and time.monotonic() - sent[signal.SIGTERM] > _KILL_WAIT_S:
                os.killpg(launcher.pid, signal.SIGKILL)

    def _wanted(self, job: Job | None, running_s: float) -> signal.Signals | None:
        """What the launcher is to be sent, if it was not yet."""
        stop = None if job is None else job.stop
        limit_s = None if job is None else job.time_s
        if stop == "now" or self._is_leaving or (limit_s is not None and running_s > limit_s):
            return signal.SIGTERM
        if stop == "save" or (job is not None and limit_s is not None and running_s > limit_s - job.signal_s):
            return signal.SIGUSR1
        return None

    def _conclude(self, code: int) -> None:
        """The job has ended, or is queued again."""
        with self._queue.locked():
            job = self._own()
            if job is None:
                return
            # Killed, as when memory is short: again, if it has brought a checkpoint.
            has_saved = code == _SAVED or (code < 0 and job.has_progressed())
            if has_saved and job.stop is None and not job.is_chain:
                # Without a runner where this process leaves: the next `submit` or `runs` starts one.
                runner = None if self._is_leaving else self._process
                self._queue.write(self._queue.queued_again(job).model_copy(update={"runner": runner}))
                return
            self._queue.write(job.model_copy(update={"phase": "ended"}))
            if code in _FINAL:
                self._queue.end_waiting(job.run)


def _environment(job: Job, booked: list[str]) -> dict[str, str]:
    """Of the job. It may have been submitted from within a job of another scheduler, to which it does not belong."""
    prefixes = tuple(filter(None, (get_scheduler(name).variables_prefix for name in SCHEDULERS)))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    gpus = booked if job.gpus else []
    return inherited | {
        JOB_ID: str(job.number),
        NODE_NAME: job.host,
        SUBMIT_HOST: job.host,
        # nvidia-smi's numbers, by which GPUs are booked, are in this order.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
    }


def _save_with_parent() -> None:
    """SIGTERM when the runner ends; it stays so over exec, from the script to the launcher."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    JobRunner(Queue(Path(sys.argv[1])), int(sys.argv[2])).run()

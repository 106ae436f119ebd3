"""The program of the launcher's tests: `ranks.py launch RUN BEHAVIOUR` starts ranks of the same program.

A rank pretends to train: a step takes 20 ms, and after each the ranks agree on stopping: through files, or,
where it matters how they lose one another, through gloo. BEHAVIOUR says how it ends.
"""

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from lightscale.errors import UserError
from lightscale.launch.rank import run_rank
from lightscale.training.run_directory import RunDirectory
from lightscale.training.signals import StopSignal

STEP_S = 0.02
SAVE_S = 0.5
TOKENS_PER_STEP = 100
WORLD_SIZE = 2


def launch(path: str, behaviour: str) -> int:
    Path(path).mkdir(parents=True, exist_ok=True)
    # Only the launcher needs torch, whose import takes longer than everything else here.
    torchrun = importlib.import_module("lightscale.launch.torchrun")
    command = [sys.executable, __file__, "rank", path, behaviour]
    try:
        code: int = torchrun.run_ranks(RunDirectory(path), command, processes=WORLD_SIZE, resume="the same command")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return UserError.EXIT_CODE
    return code


def launch_each(folder: str, *behaviours: str) -> int:
    """One launch after the other from this process; FOLDER/BEHAVIOUR.log and .code keep how it went."""
    for behaviour in behaviours:
        stem = f"{folder}/{behaviour}"
        with Path(f"{stem}.log").open("w") as log:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(log.fileno(), stream.fileno())
        code = launch(stem, behaviour)
        Path(f"{stem}.code").write_text(str(code))
    return 0


def rank(path: str, behaviour: str) -> int:
    return run_rank(lambda: work(RunDirectory(path), behaviour, int(os.environ["RANK"])))


def work(run: RunDirectory, behaviour: str, rank: int) -> int:
    (run.path / f"pid-{rank}").write_text(str(os.getpid()))
    (run.path / f"environment-{rank}").write_text("\n".join(f"{k}={v}" for k, v in sorted(os.environ.items())))
    if rank == 0:
        run.begin_attempt()
    if behaviour == "starting":
        time.sleep(60)
    if behaviour == "mistake":
        raise UserError("data.store = nowhere: no such store")
    all_reduce_max = gloo() if behaviour == "crash" else through_files(run, rank)
    with StopSignal(announce=rank == 0) as stop:
        count_signals(run, rank)
        for step in range(1, 3000):
            time.sleep(STEP_S)
            print(f"rank {rank} step {step}")
            misbehave(behaviour, rank, step)
            if stop.should_stop(all_reduce_max):
                time.sleep(60 if behaviour == "slow_save" else SAVE_S)
                (run.path / f"saved-{rank}").write_text(str(step))
                end(run, rank, "resumable", stop.reason, step, all_reduce_max)
                return 0
            if behaviour in ("finished", "stopped") and step == 5:
                end(run, rank, behaviour, "as asked", step, all_reduce_max)
                return 0
    raise AssertionError("nobody stopped the ranks")


def misbehave(behaviour: str, rank: int, step: int) -> None:
    if rank == 1 and step == 5:
        if behaviour == "crash":
            raise ZeroDivisionError("the second rank is broken")
        if behaviour == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "silent":
            print("said before the end", file=sys.stderr)
            os._exit(3)
    if behaviour == "statusless" and step == 5:
        sys.exit(0)


def count_signals(run: RunDirectory, rank: int) -> None:
    """Leave a line in a file for each signal that comes, then do what the signal does."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        handler: Any = signal.getsignal(signum)

        def note(number: int, frame: object, handler: Callable[..., None] = handler) -> None:
            with (run.path / f"signals-{rank}").open("a") as file:
                file.write(f"{signal.Signals(number).name}\n")
            handler(number, frame)

        signal.signal(signum, note)


def through_files(run: RunDirectory, rank: int) -> Callable[[int], int]:
    calls = iter(range(1 << 30))

    def all_reduce_max(value: int) -> int:
        stem = f"reduce-{next(calls)}"
        draft = run.path / f"draft-{rank}"
        draft.write_text(str(value))
        draft.rename(run.path / f"{stem}-{rank}")
        paths = [run.path / f"{stem}-{peer}" for peer in range(WORLD_SIZE)]
        while not all(path.exists() for path in paths):
            time.sleep(0.002)
            for peer in range(WORLD_SIZE):
                lose(run, peer)
        return max(int(path.read_text()) for path in paths)

    return all_reduce_max


def lose(run: RunDirectory, peer: int) -> None:
    """Fail as collectives do: as soon as a peer is gone, before the launcher has seen it."""
    path = run.path / f"pid-{peer}"
    pid = int(path.read_text() or os.getpid()) if path.exists() else os.getpid()
    if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
        raise ConnectionError(f"lost rank {peer}")


def gloo() -> Callable[[int], int]:
    torch = importlib.import_module("torch")
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=20))

    def all_reduce_max(value: int) -> int:
        tensor = torch.tensor(value)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
        return int(tensor)

    return all_reduce_max


def end(run: RunDirectory, rank: int, status: Any, reason: str | None, step: int, all_reduce_max: Any) -> None:
    all_reduce_max(0)
    if rank == 0:
        run.write_status(status, reason=reason or "", step=step, tokens=step * TOKENS_PER_STEP)


COMMANDS: dict[str, Callable[..., int]] = {"launch": launch, "launch_each": launch_each, "rank": rank}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv[1]](*sys.argv[2:]))

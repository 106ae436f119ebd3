"""The program of the launcher's tests: `ranks.py launch RUN BEHAVIOUR [POLICY]` starts ranks of the same program.

A rank pretends to train: a step takes 20 ms, and after each the ranks agree on stopping: through files, or, where it
matters how they lose one another, through gloo, for which they have to import torch. BEHAVIOUR says how it ends; what
is written NAME@COUNT happens in the first COUNT starts only. A "checkpoint" is an empty directory. POLICY is JSON:
fields of RestartConfig, and `again`, `deadline_s` and `processes` beside them.
"""

import atexit
import ctypes
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from lightscale.config.schema import RestartConfig
from lightscale.errors import UserError
from lightscale.launch.launcher.rank import run_rank
from lightscale.launch.launcher.rendezvous import CannotStart
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.health.heartbeat import Heartbeat
from lightscale.training.signals import StopSignal

STEP_S = 0.02
SAVE_S = 0.5
TOKENS_PER_STEP = 100
START_TIMEOUT_S = 120
EXCHANGE_TIMEOUT_S = 12


def launch(path: str, behaviour: str, policy: str = "{}") -> int:
    Path(path).mkdir(parents=True, exist_ok=True)
    # Only the launcher needs torch, whose import takes longer than everything else here.
    restart = importlib.import_module("lightscale.launch.launcher.restart")
    fields = {"again": False, "deadline_s": None, "processes": 2, **json.loads(policy)}
    processes = fields.pop("processes")
    own = {name: fields.pop(name) for name in ("again", "deadline_s")}
    config = RestartConfig(**fields)
    command = [sys.executable, str(Path(__file__).resolve()), "rank", path, behaviour, str(config.hang_timeout_s)]
    try:
        code: int = restart.run_ranks(
            RunDirectory(path),
            command,
            processes=processes,
            resume="the same command",
            policy=restart.RestartPolicy(config=config, **own),
            # The agents of `test_agent.py` start new processes.
            nodes=importlib.import_module("lightscale.launch.launcher.torchrun").ThisMachine(do),
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.EXIT_CODE
    return code


def host(path: str, behaviour: str, place: str) -> int:
    """The launcher of one host; `place` is JSON: port, node and num_nodes."""
    names = ("by_hand", "rendezvous", "restart")
    by_hand, rendezvous, restart = (importlib.import_module(f"lightscale.launch.launcher.{name}") for name in names)
    config = RestartConfig()
    try:
        code: int = by_hand.run_host(
            RunDirectory(path),
            [sys.executable, str(Path(__file__).resolve()), "rank", path, behaviour, str(config.hang_timeout_s)],
            processes=1,
            rendezvous=rendezvous.Rendezvous(address="127.0.0.1", of_agents=False, **json.loads(place)),
            resume="the same command",
            policy=restart.RestartPolicy(config=config, again=False),
            program=do,
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.EXIT_CODE
    return code


def launch_each(folder: str, behaviours: str) -> int:
    """One launch after the other from this process; FOLDER/BEHAVIOUR.log and .code keep how it went.

    `behaviours`: a JSON object of the policy for each.
    """
    for behaviour, policy in json.loads(behaviours).items():
        stem = f"{folder}/{behaviour}"
        with Path(f"{stem}.log").open("w") as log:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(log.fileno(), stream.fileno())
        code = launch(stem, behaviour, json.dumps(policy))
        Path(f"{stem}.code").write_text(str(code))
    return 0


def do(command: Sequence[str]) -> int:
    """A rank's command line, in a fork of the launcher."""
    return rank(*command[3:])


def rank(path: str, behaviour: str, hang_timeout_s: str) -> int:
    return run_rank(lambda: work(RunDirectory(path), behaviour, int(os.environ["RANK"]), float(hang_timeout_s)))


def work(run: RunDirectory, behaviour: str, rank: int, hang_timeout_s: float) -> int:
    heartbeat = Heartbeat(hang_timeout_s)
    heartbeat.beat("starting", step=0)
    name, _, count = behaviour.partition("@")
    if count and len(list(run.logs.iterdir())) > int(count):
        name = "finished"
    use_gloo = behaviour.partition("@")[0] == "late" or behaviour == "crash"
    deaf = behaviour == "refused_deaf"
    # What is left of an earlier start must not be taken for signs of this one.
    logs = max(run.logs.iterdir())
    return pretend(run, name, rank, heartbeat, gloo if use_gloo else lambda: through_files(logs, rank, deaf=deaf))


def pretend(
    run: RunDirectory, behaviour: str, rank: int, heartbeat: Heartbeat, connect: Callable[[], Callable[[int], int]]
) -> int:
    (run.path / f"pid-{rank}").write_text(str(os.getpid()))
    (run.path / f"environment-{rank}").write_text("\n".join(f"{k}={v}" for k, v in sorted(os.environ.items())))
    if rank == 0:
        run.begin_attempt()
    if behaviour == "starting":
        time.sleep(60)
    if behaviour == "mistake":
        raise UserError("data.store = nowhere: no such store")
    if behaviour == "wall":
        raise RuntimeError(f"no thread for process {os.getpid()}")
    if behaviour == "limit" and rank == 1:
        # Another error of the same limit in the second start, behind a step.
        if len(list(run.logs.iterdir())) == 1:
            raise MemoryError
        heartbeat.beat("forward", step=1)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 16 bytes.")
    if behaviour == "absent":
        raise CannotStart("rank 1 did not come")
    if behaviour == "no_checkpoint":
        raise NoGood("no checkpoint is whole")
    all_reduce_max = connect()
    with StopSignal(announce=rank == 0) as stop:
        count_signals(run, rank)
        for step in range(1, 3000):
            heartbeat.beat("reading data", step=step)
            time.sleep(STEP_S)
            print(f"rank {rank} step {step}")
            misbehave(behaviour, rank, step)
            heartbeat.beat("agreeing", step=step)
            if behaviour == "progress" and rank == 1 and step == 5:
                new_checkpoint(run)
                # A limit, met again and again, but each time behind a checkpoint.
                raise MemoryError("but not for nothing")
            if stop.should_stop(all_reduce_max):
                heartbeat.beat("saving", step=step)
                save(run, behaviour)
                (run.path / f"saved-{rank}").write_text(str(step))
                heartbeat.beat("leaving", step=step)
                end(run, rank, "resumable", stop.reason, step, all_reduce_max)
                return 0
            if behaviour in ("finished", "stopped") and step == 5:
                heartbeat.beat("leaving", step=step)
                end(run, rank, behaviour, "as asked", step, all_reduce_max)
                return 0
    raise AssertionError("nobody stopped the ranks")


def save(run: RunDirectory, behaviour: str) -> None:
    time.sleep(60 if behaviour == "slow_save" else SAVE_S)
    while behaviour == "held_save" and not (run.path / "go").exists():
        time.sleep(0.01)


def misbehave(behaviour: str, rank: int, step: int) -> None:
    if rank == 1 and step == 5:
        if behaviour == "crash":
            raise ZeroDivisionError("the second rank is broken")
        if behaviour.startswith("refused"):
            raise UserError("block 3 is not what was prepared")
        if behaviour == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "suspended":
            os.kill(os.getpid(), signal.SIGSTOP)
        if behaviour == "locked":
            while True:
                # Not CDLL: that one lets go of the interpreter meanwhile.
                ctypes.PyDLL(None).sleep(1000)
        if behaviour == "stuck":
            stuck_reader()
        if behaviour == "late":
            time.sleep(2 * EXCHANGE_TIMEOUT_S)
        if behaviour == "silent":
            print("said before the end", file=sys.stderr)
            os._exit(3)
    if behaviour == "statusless" and step == 5:
        sys.exit(0)


def stuck_reader() -> None:
    threading.Event().wait()


class NoGood(UserError):
    EXIT_CODE = 74


def new_checkpoint(run: RunDirectory) -> None:
    steps = [int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*")]
    (run.checkpoints / f"step-{max(steps, default=0) + 1:08d}").mkdir(parents=True)


def count_signals(run: RunDirectory, rank: int) -> None:
    """Leave a line in a file for each signal that comes, then do what the signal does."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        handler: Any = signal.getsignal(signum)

        def note(number: int, frame: object, handler: Callable[..., None] = handler) -> None:
            with (run.path / f"signals-{rank}").open("a") as file:
                file.write(f"{signal.Signals(number).name}\n")
            handler(number, frame)

        signal.signal(signum, note)


def through_files(folder: Path, rank: int, *, deaf: bool = False) -> Callable[[int], int]:
    """`deaf`: whether a rank waits for one that is lost."""
    world_size = int(os.environ["WORLD_SIZE"])
    draft = folder / f"draft-{rank}"
    draft.write_text(str(os.getpid()))
    draft.rename(folder / f"pid-{rank}")
    calls = iter(range(1 << 30))

    def all_reduce_max(value: int) -> int:
        stem = f"reduce-{next(calls)}"
        draft.write_text(str(value))
        draft.rename(folder / f"{stem}-{rank}")
        paths = [folder / f"{stem}-{peer}" for peer in range(world_size)]
        while True:
            # Asked before: a peer that has left has left its value first.
            lost = [peer for peer in range(world_size) if is_lost(folder, peer)]
            if all(path.exists() for path in paths):
                break
            if lost and not deaf:
                raise ConnectionError(f"lost rank {lost[0]}")
            time.sleep(0.002)
        return max(int(path.read_text()) for path in paths)

    return all_reduce_max


def is_lost(folder: Path, peer: int) -> bool:
    """As collectives find it: as soon as a peer is gone, before the launcher has seen it."""
    path = folder / f"pid-{peer}"
    pid = int(path.read_text()) if path.exists() else os.getpid()
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def gloo() -> Callable[[int], int]:
    torch = importlib.import_module("torch")
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=START_TIMEOUT_S))
    # On a busy machine gloo's threads outlive the interpreter otherwise, and the process aborts while it leaves.
    atexit.register(torch.distributed.destroy_process_group)
    group = torch.distributed.new_group(timeout=timedelta(seconds=EXCHANGE_TIMEOUT_S))

    def all_reduce_max(value: int) -> int:
        tensor = torch.tensor(value)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=group)
        return int(tensor)

    return all_reduce_max


def end(run: RunDirectory, rank: int, status: Any, reason: str | None, step: int, all_reduce_max: Any) -> None:
    if rank == 0:
        run.write_status(status, reason=reason or "", step=step, tokens=step * TOKENS_PER_STEP)
    # As in training: launchers of several hosts look for it when their own ranks are gone.
    all_reduce_max(0)


COMMANDS: dict[str, Callable[..., int]] = {"launch": launch, "host": host, "launch_each": launch_each, "rank": rank}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv[1]](*sys.argv[2:]))

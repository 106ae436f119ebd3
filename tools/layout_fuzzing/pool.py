"""Ranks that stay: processes that have imported everything, and take one job after another."""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from layout_fuzzing.running import Job, run

# Some process groups stay when their meshes end, and threads of gloo poll the closed connections: after 700 cases two
# thousand of them did nothing else.
_JOBS = 200
"""After so many, ranks are new ones."""
_PRELOAD = ["lightscale.training.train", "layout_fuzzing.running"]


class RankError(Exception):
    """A rank failed or hung; the message is what it printed, its traceback among it."""


class RankPool:
    """As a context manager; ``run`` gives jobs to the first ranks of the pool."""

    def __init__(self, size: int, *, timeout_s: float = 90.0) -> None:
        self.size, self.timeout_s = size, timeout_s
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._ranks: list[tuple[Any, Connection]] = []
        self._number = 0

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._folder.cleanup()

    def run(self, world_size: int, job: Job) -> list[dict[str, float]]:
        """What every rank found, by rank. RankError where one failed; the next call has new ranks."""
        if self._number % _JOBS == 0:
            self._end()
        while len(self._ranks) < self.size:
            self._start(len(self._ranks))
        self._number += 1
        method = f"file://{self._folder.name}/meet-{self._number}"
        used = self._ranks[:world_size]
        for rank, (_, pipe) in enumerate(used):
            pipe.send((rank, world_size, method, job, self.timeout_s))
        deadline, found = time.monotonic() + self.timeout_s + 5, dict[int, Any]()
        while len(found) < world_size:
            for rank, (process, pipe) in enumerate(used):
                if rank not in found and pipe.poll(0.002):
                    with contextlib.suppress(EOFError, ConnectionError):
                        found[rank] = pipe.recv()
                if rank not in found and not process.is_alive():
                    found[rank] = f"rank {rank} died (exit code {process.exitcode})"
            failed = {rank: one for rank, one in found.items() if isinstance(one, str)}
            if failed or time.monotonic() > deadline:
                # The others wait for it in a collective.
                texts = [f"--- rank {rank} ---\n{one}{self._log(rank)}" for rank, one in failed.items()]
                self._end()
                raise RankError("\n".join(texts) or f"hung for {self.timeout_s:.0f} s")
        return [found[rank] for rank in range(world_size)]

    def _start(self, rank: int) -> None:
        own, other = self._context.Pipe()
        log = f"{self._folder.name}/log-{rank}"
        process = self._context.Process(target=_serve, args=(other, log), daemon=True)
        process.start()
        other.close()
        self._ranks.append((process, own))

    def _log(self, rank: int) -> str:
        path = Path(f"{self._folder.name}/log-{rank}")
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def _end(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []


def _serve(pipe: Connection, log: str) -> None:
    """Jobs until the other end is closed."""
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    faulthandler.enable()
    torch.set_num_threads(1)
    # Megatron collects garbage before every save and load, which takes longer than all else here.
    gc.freeze()
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            rank, world_size, method, job, timeout_s = pipe.recv()
            faulthandler.dump_traceback_later(timeout_s, exit=True)
            try:
                found: Any = run(rank, world_size, method, job, timeout_s)
            except Exception:  # noqa: BLE001 - whatever it is, it is the case's result
                found = traceback.format_exc()
            faulthandler.cancel_dump_traceback_later()
            # Engines are cycles: until they are collected, their process groups keep threads that poll.
            gc.collect()
            pipe.send(found)

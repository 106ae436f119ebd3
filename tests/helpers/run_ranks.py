"""Run a test's function on several processes, one per rank, under a hard timeout.

A failure or a hang of any rank ends all of them, and what the rank itself printed, its traceback first, becomes the
failure message. Ranks are forked from a server that has imported torch and Megatron and done nothing else: importing
them takes seconds of each. Where there is a GPU they are spawned: the imports begin CUDA, which survives no fork. The
file is also what each rank runs: it loads the test's file by path, so that test modules need not be importable.
"""

import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import pickle
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

_POLL_S = 0.02
_LAST_WORDS_S = 0.5
_RANK = "a rank"  # the module's name in the processes
_HAS_GPU = Path("/dev/nvidiactl").exists()  # asked without CUDA
CONTEXT = multiprocessing.get_context("spawn" if _HAS_GPU else "forkserver")
if not _HAS_GPU:
    CONTEXT.set_forkserver_preload(["pytest", "lightscale.training.train"])


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """``[function(rank, world_size, init_method, *args) for every rank]``, each in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        (folder / "args").write_bytes(pickle.dumps(args))
        # Interpreted kernels are not for ranks unless asked for: importing Triton takes a second of each.
        inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "TRITON_INTERPRET")}
        environment = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", **(env or {})}
        logs = [(folder / f"log-{rank}").open("w+b") for rank in range(world_size)]
        processes = []
        for rank in range(world_size):
            job = (function.__code__.co_filename, function.__name__, rank, world_size, name, timeout_s, environment)
            # By path, because pytest imports no file by a name that another process could import.
            process = CONTEXT.Process(target=runpy.run_path, args=(__file__, {"JOB": job}, _RANK), daemon=True)
            process.start()
            processes.append(process)
        try:
            _wait(processes, logs, function.__name__, timeout_s)
            return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]
        finally:
            for process in processes:
                process.kill()
                process.join()
            for log in logs:
                log.close()


def _wait(processes: list[BaseProcess], logs: list[IO[bytes]], name: str, timeout_s: float) -> None:
    # Ranks dump their stacks at the timeout; a little more lets the dumps be written.
    deadline = time.monotonic() + timeout_s + 2.0
    while any(process.exitcode is None for process in processes):
        if _failed(processes) or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    stuck = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    failed = _failed(processes)  # after what is stuck, or one that fails now would be neither
    if not failed and not stuck:
        return
    # The first to fail is the cause; others usually only lost their peer. But all ranks dump their stacks at one time.
    time.sleep(_LAST_WORDS_S)
    guilty = failed + [rank for rank in _failed(processes) if rank not in failed] or stuck
    what = "failed" if failed else f"hung for {timeout_s:.0f} s"
    reports = []
    for rank in guilty:
        logs[rank].seek(0)
        reports.append(f"--- rank {rank} of {len(processes)} ---\n{logs[rank].read().decode(errors='replace')}")
    raise AssertionError(f"{name}: rank {guilty[0]} {what}\n" + "\n".join(reports))


def _failed(processes: list[BaseProcess]) -> list[int]:
    return [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]


def _child(
    file: str, name: str, rank: int, world_size: int, folder: str, timeout_s: float, environment: dict[str, str]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    log = os.open(Path(folder) / f"log-{rank}", os.O_WRONLY | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    faulthandler.enable()  # a fatal signal leaves a stack too
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    import torch

    torch.set_num_threads(1)
    if environment.get("TRITON_INTERPRET") == "1":
        runpy.run_path(str(Path(__file__).with_name("interpreter.py")))["patch_language_once"]()
    spec = importlib.util.spec_from_file_location("test_on_ranks", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # What is imported stays: 340 000 objects, in memory that ranks share with the server. Each collection, and every
    # mesh begins with one, would visit them all and so copy that memory.
    gc.freeze()
    args = pickle.loads((Path(folder) / "args").read_bytes())
    result = getattr(module, name)(rank, world_size, f"file://{folder}/store", *args)
    (Path(folder) / f"result-{rank}").write_bytes(pickle.dumps(result))


if __name__ == _RANK:
    _child(*globals()["JOB"])

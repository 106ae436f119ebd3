"""Run a test's function on several processes, one per rank, under a hard timeout.

A failure or a hang of any rank ends all of them, and what the rank itself printed, its traceback first, becomes the
failure message. The file is also what each process runs: it loads the test's file by path, so that test modules need
not be importable.
"""

import faulthandler
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_POLL_S = 0.02


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
        command = [sys.executable, __file__, function.__code__.co_filename, function.__name__]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(world_size), str(folder), str(timeout_s)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            _wait(processes, logs, function.__name__, timeout_s)
            return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for log in logs:
                log.close()


def _wait(processes: list[subprocess.Popen[bytes]], logs: list[Any], name: str, timeout_s: float) -> None:
    # Ranks dump their stacks at the timeout; a little more lets the dumps be written.
    deadline = time.monotonic() + timeout_s + 2.0
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
    stuck = [rank for rank, process in enumerate(processes) if process.poll() is None]
    if not failed and not stuck:
        return
    # The first to fail is the cause; the others usually only lost their peer.
    guilty = failed or stuck
    what = "failed" if failed else f"hung for {timeout_s:.0f} s"
    reports = []
    for rank in guilty:
        logs[rank].seek(0)
        reports.append(f"--- rank {rank} of {len(processes)} ---\n{logs[rank].read().decode(errors='replace')}")
    raise AssertionError(f"{name}: rank {guilty[0]} {what}\n" + "\n".join(reports))


def _child() -> None:
    file, name, rank, world_size, folder, timeout_s = sys.argv[1:]
    faulthandler.dump_traceback_later(float(timeout_s), exit=True)
    import torch

    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("test_on_ranks", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    args = pickle.loads((Path(folder) / "args").read_bytes())
    result = getattr(module, name)(int(rank), int(world_size), f"file://{folder}/store", *args)
    (Path(folder) / f"result-{rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _child()

"""Several `lightscale` commands in one process, as a rank that torchrun started. Loaded by path (runpy)."""

import contextlib
import os
import random
import socket
import time
from pathlib import Path

from lightscale.cli import main


def _free_port() -> int:
    """Below those that the system gives to connections: none of theirs takes it before the rank listens there."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def commands(
    rank: int, world_size: int, init_method: str, folder: str, lines: list[list[str]]
) -> list[tuple[int, str]]:
    """Exit code and stderr of `lightscale …` for each of ``lines``, as a rank that torchrun started."""
    os.chdir(folder)
    results = []
    for number, words in enumerate(lines):
        port_file = Path(init_method.removeprefix("file://") + f"-port-{number}")
        if rank == 0:
            port_file.with_suffix(".tmp").write_text(str(_free_port()))
            port_file.with_suffix(".tmp").rename(port_file)
        while not port_file.exists():
            time.sleep(0.01)
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port_file.read_text(),
        )
        # A file, because a rank's fault handler writes to stderr's descriptor.
        with Path(f"{port_file}-{rank}").open("w+") as captured, contextlib.redirect_stderr(captured):
            code = main(words)
            captured.seek(0)
            results.append((code, captured.read()))
    return results

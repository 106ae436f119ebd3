"""Ranks started by hand, as on several hosts, one of them with a different input."""

import json
import random
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError
from lightscale.launch.chaos.faults.drawing import shuffled_cycle
from lightscale.launch.chaos.harness.training import own_environment
from lightscale.launch.chaos.harness.trial import SLOW_POLL_S, Bound, Runner, Subject

WAYS = ("learning rate", "seed", "content of the store", "layout")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A different input of one rank, and its words in messages."""

    override: str
    key: str
    values: tuple[str, str]
    """Value of the other ranks, and of this one."""


@dataclass(frozen=True, kw_only=True)
class DisagreeingRank:
    """Kills everything and starts all ranks by hand, `rank` with a different input: all must refuse."""

    way: str
    """One of `WAYS`."""
    rank: int
    bound: ClassVar[Bound] = Bound(saves=2, seconds=120)

    @property
    def kind(self) -> str:
        """What it is, for the table."""
        return f"a rank with another {self.way}"

    def inject(self, run: Runner) -> None:
        """Start them and read their output; the next start is correct again."""
        run.bring_down(lambda: True)
        run.mend_for_start()
        path = run.training.run.path
        other = difference(run.subject, self.way)
        before = _tree(path)
        missed = self._refused(run, other)
        if missed is None and (changes := _tree(path) ^ before):
            missed = f"something was written: {', '.join(sorted({name for name, _, _ in changes}))}"
        run.settle()
        run.happened(self, lambda since: missed)

    def _refused(self, run: Runner, other: Difference) -> str | None:
        world_size, log, hosts = run.subject.processes, run.training.log, run.training.hosts
        local_size = world_size // len(hosts)
        outputs = [log.with_suffix(f".rank-{rank}.log") for rank in range(world_size)]
        ranks = []
        address = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(_free_port())}
        try:
            for rank, path in enumerate(outputs):
                host, local_rank = hosts[rank // local_size], rank % local_size
                numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size}
                numbers["LOCAL_WORLD_SIZE"] = local_size
                environment = own_environment() | address | {name: str(value) for name, value in numbers.items()}
                environment |= host.variables
                command = host.inside([*run.training.command, *([other.override] if rank == self.rank else [])])
                with path.open("wb") as file:
                    ranks.append(
                        subprocess.Popen(
                            command,
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=file,
                            stderr=file,
                            start_new_session=True,
                        )
                    )
            codes = _wait(ranks, run.patience_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in outputs]
        for path in outputs:
            path.unlink()
        for rank, (code, text) in enumerate(zip(codes, texts, strict=True)):
            if code != UserError.EXIT_CODE:
                return f"rank {rank} ended with {code}, not {UserError.EXIT_CODE}: {_tail(text)}"
            if not names(text, other, self.rank, [hosts[rank // local_size].name for rank in range(world_size)]):
                return f"rank {rank} did not name {other.key} with both values: {_tail(text)}"
        return None


def names(text: str, other: Difference, rank: int, hosts: Sequence[str]) -> bool:
    """Whether a line of `text` has the key, the host and number of `rank`, and both values; `hosts`: of all ranks."""
    usual, odd = map(re.escape, other.values)
    anywhere = "|".join(map(re.escape, {host for one, host in enumerate(hosts) if one != rank}))
    parts = [rf"\b{usual} on ({anywhere}) \(rank", rf"\b{odd} on {re.escape(hosts[rank])} \(rank {rank}\)"]
    lines = [line.strip() for line in text.splitlines()]
    return any(line.startswith(f"{other.key}: ") and all(re.search(part, line) for part in parts) for line in lines)


def difference(subject: Subject, way: str) -> Difference:
    """The difference of one of `WAYS` for a run of `subject`."""
    config = subject.config
    if way == "content of the store":
        assert config.data.store is not None, "the campaign tries this on one store"
        stores = config.data.store, subject.other_store
        first, second = (f"sha256 {TokenStore(store).fingerprint()[:16]}" for store in stores)
        return Difference(override=f"data.store={stores[1]}", key="content of data.store", values=(first, second))
    key, before, now = _other_value(config, way, subject.processes)
    return Difference(override=f"{key}={json.dumps(now)}", key=key, values=(json.dumps(before), json.dumps(now)))


def _other_value(config: RunConfig, way: str, processes: int) -> tuple[str, float, float]:
    if way == "learning rate":
        return "optimizer.lr", config.optimizer.lr, 2 * config.optimizer.lr
    if way == "seed":
        return "train.seed", config.train.seed, config.train.seed + 1
    assert way == "layout", way
    ranks = config.parallel.sequence
    return "parallel.sequence", ranks, 1 if ranks > 1 else max(2, processes)


def _tree(path: Path) -> set[tuple[str, int, int]]:
    """Name, size and time of change of everything below `path`."""
    found = set()
    for one in path.rglob("*"):
        # A launcher that was killed leaves a link to its heartbeats that leads nowhere.
        status = one.lstat()
        found.add((str(one.relative_to(path)), status.st_size if one.is_file() else 0, status.st_mtime_ns))
    return found


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int | None]:
    """The exit codes; None of a process that has not ended in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(SLOW_POLL_S)
    return [process.poll() for process in processes]


def _tail(text: str) -> str:
    return " / ".join(text.splitlines()[-3:])


def draw_disagreeing_ranks(generator: random.Random, number: int, processes: int) -> Iterator[DisagreeingRank]:
    """Draw each way equally often, on any rank."""
    for way in shuffled_cycle(generator, WAYS, number):
        yield DisagreeingRank(way=way, rank=generator.randrange(processes))

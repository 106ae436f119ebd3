"""Launchers under way, whose ranks are those of `ranks.py`."""

import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightscale.data_pipeline.store.token_store import StoreWriter

PROGRAM = Path(__file__).with_name("ranks.py")
# A machine that others use too is slow at times.
TIMEOUT_S = 120.0
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


class Words:
    """A tokenizer with as many words as one asks for; no text passes through it."""

    name = "words"
    eot_id = 0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        # Runs keep the files and compare their hash; nobody loads them.
        self._model = f"{vocab_size} words".encode()
        self.sha256 = hashlib.sha256(self._model).hexdigest()

    def encode(self, text: str) -> Any:
        raise AssertionError(text)

    def decode(self, ids: Any) -> str:
        raise AssertionError(ids)

    def save(self, directory: Path) -> None:
        (directory / "sentencepiece.model").write_bytes(self._model)
        (directory / "tokenizer.json").write_text(json.dumps({"kind": "sentencepiece", "sha256": self.sha256}))


@pytest.fixture(scope="session")
def write_store() -> Callable[..., None]:
    """``write_store(path, vocab_size, source=tokens, …)``: a token store with one document in each source."""

    def write_store(path: Path, vocab_size: int, **sources: np.ndarray) -> None:
        with StoreWriter(path, Words(vocab_size)) as writer:
            for name, tokens in sources.items():
                writer.source(name).append(tokens.astype(np.uint32), num_bytes=tokens.size)
            writer.finish({})

    return write_store


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a launcher ended."""

    run: Path
    code: int
    output: str

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads((self.run / "status.json").read_text())
        return status

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Those called `names`, or all."""
        events = map(json.loads, (self.run / "events.jsonl").read_text().splitlines())
        return [event for event in events if not names or event["event"] in names]


class Forked:
    """A process that was forked from this one, which has imported torch; that alone takes a launcher seconds."""

    def __init__(self, main: Callable[[], int], *, stdin: int, stdout: int, stderr: int, prepare: Callable[[], None]):
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                # A session of its own: as in a terminal, its ranks are not in its process group.
                os.setsid()
                for number, file in enumerate((stdin, stdout, stderr)):
                    os.dup2(file, number)
                prepare()
                # Those of pytest lead elsewhere.
                sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                os.environ.pop("OMP_NUM_THREADS", None)
                code = main()
            except BaseException:  # noqa: BLE001 - shown, and its exit code is 1
                traceback.print_exc()
            finally:
                with contextlib.suppress(OSError):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float = TIMEOUT_S) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline, "it does not end"
            time.sleep(0.01)
        return code

    def send_signal(self, signum: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def load_program() -> Any:
    """`ranks.py` as a module."""
    spec = importlib.util.spec_from_file_location("lightscale_ranks", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Launcher:
    """A running launcher; its output goes to a file, so that nobody has to read it meanwhile."""

    def __init__(
        self,
        run: Path,
        behaviour: str,
        policy: dict[str, Any],
        *,
        terminal: int | None = None,
        prepare: Callable[[], None] = lambda: None,
        place: dict[str, int] | None = None,
    ) -> None:
        """`terminal`: its stdin and stderr; `prepare`: called in its process first; `place`: of one host of several."""
        self.run = run
        self.processes: int = policy.get("processes", 2)
        run.mkdir(exist_ok=place is not None)
        self._log = run.parent / (f"{run.name}.log" if place is None else f"{run.name}-{place['node']}.log")
        program = load_program()
        words = (str(run), behaviour, json.dumps(policy if place is None else place))
        main = program.launch if place is None else program.host
        # What is in buffers here would be written by both.
        sys.stdout.flush()
        sys.stderr.flush()
        with self._log.open("w") as log, Path(os.devnull).open() as nothing:
            self.process = Forked(
                lambda: int(main(*words)),
                stdin=nothing.fileno() if terminal is None else terminal,
                stdout=log.fileno(),
                stderr=log.fileno() if terminal is None else terminal,
                prepare=prepare,
            )

    def wait(self) -> Ended:
        code = self.process.wait(timeout=TIMEOUT_S)
        return Ended(run=self.run, code=code, output=self._log.read_text())

    def working(self) -> list[int]:
        """Wait until all ranks train, and return their process ids."""
        await_(lambda: all(self._steps(rank) >= 3 for rank in range(self.processes)))
        return [int((self.run / f"pid-{rank}").read_text()) for rank in range(self.processes)]

    def said(self) -> str:
        """Output so far."""
        return self._log.read_text()

    def signals(self, rank: int) -> list[str]:
        path = self.run / f"signals-{rank}"
        return path.read_text().split() if path.exists() else []

    def kill(self) -> None:
        for path in self.run.glob("pid-*"):
            with contextlib.suppress(ValueError, ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def _steps(self, rank: int) -> int:
        """In the newest launch."""
        newest = sorted(self.run.glob("logs/*"))[-1:]
        return sum((path / f"rank-{rank}.out").read_text().count("step") for path in newest if _has(path, rank))


def _has(logs: Path, rank: int) -> bool:
    return (logs / f"rank-{rank}.out").exists()


def await_(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    """`start(behaviour, policy)`: a launcher whose processes are gone after the test."""
    launchers: list[Launcher] = []

    def start(behaviour: str, policy: dict[str, Any] | None = None, **options: Any) -> Launcher:
        name = "hosts" if "place" in options else f"run-{len(launchers)}"
        launchers.append(Launcher(tmp_path / name, behaviour, policy or {}, **options))
        return launchers[-1]

    yield start
    for launcher in launchers:
        launcher.kill()


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Wait until a condition holds, but not for ever."""
    return await_


@pytest.fixture(scope="session")
def launch_each() -> Callable[..., dict[str, Ended]]:
    """`launch_each(folder, behaviours)`: what becomes of ranks that end by themselves, one launch after the other."""

    def launch_each(folder: Path, behaviours: dict[str, dict[str, Any]]) -> dict[str, Ended]:
        command = [sys.executable, str(PROGRAM), "launch_each", str(folder), json.dumps(behaviours)]
        subprocess.run(command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, timeout=2 * TIMEOUT_S, check=True)
        return {
            behaviour: Ended(
                run=folder / behaviour,
                code=int((folder / f"{behaviour}.code").read_text()),
                output=(folder / f"{behaviour}.log").read_text(),
            )
            for behaviour in behaviours
        }

    return launch_each

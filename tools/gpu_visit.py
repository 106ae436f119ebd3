"""A check of a bare machine within a budget: ``gpu_check.py --budget SECONDS --out FOLDER``.

Parts run by their worth. Each operator has a process of its own, because an illegal access ends whatever shares one.
What is found is kept after each process. The next visit to the same folder runs what has no result yet, then what
failed.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightscale.runs.run_directory import write_atomically

ROOT = Path(__file__).resolve().parent.parent
STATE, PAGE, ARCHIVE = "visit.json", "visit.md", "visit.tar.gz"
TIMED_OUT = 124
LEAST_S = 15.0
"""Less is not worth the start of a process."""
RESERVE_S = 10.0
"""For the page and the archive at the end."""
_FOLDER = "{folder}"
_PYTEST = (sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-rfE", "-q", "-p", "no:cacheprovider")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command, or tests of which each group is a process."""

    limit_s: float
    command: tuple[str, ...]
    full: tuple[str, ...] = ()
    """Added to the command for full sizes."""
    small: tuple[str, ...] = ()
    """Added to the command for small sizes."""
    grouped: bool = False
    """The command is pytest: one process for each operator or mixer."""
    jobs: int = 1
    """Processes at a time; most of their time goes to compilers on the host."""
    without: str = ""
    """A pattern of tests to leave out."""


def _tests(limit_s: float, jobs: int, *paths: str, without: str = "", small: tuple[str, ...] = ()) -> Part:
    return Part(
        limit_s=limit_s, jobs=jobs, command=(*_PYTEST, *paths), grouped=True, without=without, small=small
    )  # fmt: skip


def _train(limit_s: float, config: str, lengths: tuple[int, ...], *more: str) -> Part:
    longest = str(max(lengths))
    full = (f"configs/{config}.toml", "--lengths", *map(str, lengths), "--tokens-per-step", longest)
    tiny = (f"configs/{config.partition('-')[0]}-tiny.toml", "--lengths", "128", "256", "--tokens-per-step", "512")
    return Part(
        limit_s=limit_s,
        command=(sys.executable, "tools/bench.py", "train", "--save", _FOLDER),
        full=(*full, "--micro-batch-tokens", longest, *more),
        small=(*tiny, "--micro-batch-tokens", "256", "--repeats", "1", *more),
    )


def _measured(limit_s: float, name: str) -> Part:
    command = (sys.executable, "tools/gpu_measurements.py", name, "--out", _FOLDER)
    return Part(limit_s=limit_s, command=command, small=("--small",))


_OPERATORS = ("tests/gpu/test_operators_on_gpu.py", "tests/gpu/test_lightning_on_gpu.py")
_LARGEST = "more_than_two_to_the_31"
_FEW = ("-k", "test_equals_the_reference_in_fp64 and (norm and float32-1000 or silu-float32)")
PARTS = {
    "environment": _measured(60, "environment"),
    "operators": _tests(170, 8, *_OPERATORS, without=_LARGEST, small=_FEW),
    "models": _tests(100, 6, "tests/gpu/test_on_gpu.py", without="bf16_training", small=("--small", "-k", "tnl")),
    "tnl": _train(60, "tnl-1b", (8192, 65536)),
    "fp8": Part(
        limit_s=60,
        command=(sys.executable, "tools/bench.py", "train-fp8", "--save", _FOLDER),
        full=("configs/tnl-1b.toml",),
        small=("configs/tnl-tiny.toml", "--length", "128", "--tokens-per-step", "256", "--repeats", "1"),
    ),
    "kernels": Part(
        limit_s=70,
        command=(sys.executable, "tools/bench.py", "kernels", "--save", _FOLDER),
        full=("--repeats", "3"),
        small=("--small", "--repeats", "1"),
    ),
    "hgrn2": _train(50, "hgrn2-1b", (8192, 65536)),
    "profile": _measured(50, "profile"),
    "run": _measured(70, "run"),
    "bf16": _tests(60, 1, "tests/gpu/test_on_gpu.py", without="equals_the_cpu", small=("--small",)),
    "lightnet": _train(50, "lightnet-1b", (8192, 65536)),
    "llama": _train(50, "llama-1b", (8192, 65536)),
    "losses": _measured(120, "losses"),
    "int32": _tests(90, 1, *_OPERATORS, without=f"^(?!.*{_LARGEST})"),
    "long": _train(60, "tnl-1b", (262144,)),
    "million": _train(80, "tnl-160m", (1048576,), "--recompute", "full"),
    "checkpoint": Part(
        limit_s=60,
        command=(sys.executable, "tools/bench.py", "checkpoint", "--save", _FOLDER, "--ranks", "1"),
        full=("--state-mb", "2000"),
        small=("--state-mb", "50"),
    ),
}
"""In the order of their worth."""


def run_command(words: tuple[str, ...], limit_s: float, log: Path) -> int:
    """The exit code, 124 at the limit; what the command has started ends with it."""
    with log.open("ab") as file:
        process = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(max(limit_s, 0.1))
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def groups(tests: list[str], without: str) -> dict[str, list[str]]:
    """Ids of tests by operator or mixer: the first word of their parameters, else the test's name."""
    found: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        if without and re.search(without, test):
            continue
        first = re.search(r"\[([a-zA-Z_ ]+?)(?:-|\])", test)
        found[first[1] if first else test.rpartition("::")[2].partition("[")[0]].append(test)
    return dict(found)


class Visit:
    """One visit: what was found in this folder before, and what is found now."""

    def __init__(self, folder: Path, budget_s: float) -> None:
        self._folder = folder
        self._end = time.monotonic() + budget_s - RESERVE_S
        self._lock = threading.Lock()
        self._results = folder / "results"
        self._results.mkdir(parents=True, exist_ok=True)
        state = folder / STATE
        self.found: dict[str, Any] = json.loads(state.read_text("utf-8")) if state.exists() else {}

    def run(self, parts: dict[str, Part], *, small: bool = False) -> int:
        """Exit code 1 if anything failed or had no time."""
        # New ones first: a failure is a finding already.
        for name in sorted(parts, key=self._failed):
            part = parts[name]
            left = self._end - time.monotonic()
            if self._passed(name):
                continue
            if left < min(LEAST_S, part.limit_s):
                self.found.setdefault(name, {"exit_code": None, "why": "no time"})
                continue
            limit_s = min(part.limit_s, left)
            began = time.monotonic()
            command = (*part.command, *(part.small if small else part.full))
            try:
                result = (
                    self._grouped(name, part, command, limit_s) if part.grouped else self._one(name, command, limit_s)
                )
            except (OSError, subprocess.SubprocessError) as error:
                result = {"exit_code": 1, "why": repr(error)[:300]}
            self._keep(name, result | {"seconds": time.monotonic() - began})
            # Whoever ends the visit from outside finds what there was until then.
            self._archive()
        self._write()
        self._archive()
        return int(not all(map(self._passed, parts)))

    def _passed(self, name: str) -> bool:
        return name in self.found and self.found[name]["exit_code"] == 0

    def _failed(self, name: str) -> bool:
        return name in self.found and self.found[name]["exit_code"] not in (0, None)

    def _one(self, name: str, command: tuple[str, ...], limit_s: float) -> dict[str, Any]:
        words = tuple(str(self._results) if word == _FOLDER else word for word in command)
        return {"exit_code": run_command(words, limit_s, self._log(name))}

    def _grouped(self, name: str, part: Part, command: tuple[str, ...], limit_s: float) -> dict[str, Any]:
        end = time.monotonic() + limit_s
        listing = subprocess.run(
            [*command, "--collect-only"], cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
        )
        by_group = groups([line for line in listing.stdout.splitlines() if "::" in line], part.without)
        if not by_group:
            self._log(name).write_text(listing.stdout + listing.stderr, encoding="utf-8")
            return {"exit_code": listing.returncode or 5, "why": "no tests"}

        def one(group: str) -> None:
            key = f"{name}/{group}"
            if self._passed(key) or time.monotonic() >= end:
                return
            slug = re.sub(r"\W+", "-", key)
            lines = self._results / f"{slug}.jsonl"
            lines.unlink(missing_ok=True)
            # A test that is named needs no selection besides; what selects tests is left out.
            before = command[: command.index(sys.executable)]
            words = (*before, *_PYTEST, *(["--small"] if "--small" in command else []), "--results", str(lines))
            code = run_command((*words, *by_group[group]), end - time.monotonic(), self._log(slug))
            outcomes = (
                [json.loads(line)["outcome"] for line in lines.read_text().splitlines()] if lines.exists() else []
            )
            # Tests that all skip have shown nothing.
            shown = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
            self._keep(key, {"exit_code": code or int("passed" not in shown), "tests": shown})

        with ThreadPoolExecutor(part.jobs) as pool:
            list(pool.map(one, by_group))
        bad = [group for group in by_group if not self._passed(f"{name}/{group}")]
        return {"exit_code": int(bool(bad)), "why": ", ".join(bad)}

    def _log(self, name: str) -> Path:
        return self._results / f"{re.sub(r'[^A-Za-z0-9]+', '-', name)}.log"

    def _keep(self, name: str, result: dict[str, Any]) -> None:
        with self._lock:
            self.found[name] = result
            self._write()

    def _write(self) -> None:
        write_atomically(self._folder / STATE, json.dumps(self.found, indent=1) + "\n")
        write_atomically(self._folder / PAGE, self._page())

    def _page(self) -> str:
        lines = ["# Visit to a GPU", "", "| part | exit code | seconds | what |", "|---|---|---|---|"]
        for name, result in self.found.items():
            what = ", ".join(f"{count} {outcome}" for outcome, count in result.get("tests", {}).items())
            code = "-" if result["exit_code"] is None else result["exit_code"]
            lines.append(f"| {name} | {code} | {result.get('seconds', 0):.0f} | {what or result.get('why', '')} |")
        for name in filter(self._failed, self.found):
            log = self._log(name)
            if log.exists():
                # The reason, without the archive.
                lines += ["", f"## {name}", "", "```", *log.read_text(errors="replace").splitlines()[-12:], "```"]
        return "\n".join(lines) + "\n"

    def _archive(self) -> None:
        made = self._folder / f".{ARCHIVE}"
        with tarfile.open(made, "w:gz") as tar:
            for path in [self._folder / STATE, self._folder / PAGE, *sorted(self._results.rglob("*"))]:
                if path.is_file():
                    tar.add(path, path.relative_to(self._folder))
        made.rename(self._folder / ARCHIVE)

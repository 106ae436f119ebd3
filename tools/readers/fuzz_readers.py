#!/usr/bin/env python
"""Fuzzes every reader of what others wrote (``reader_targets.py``): each input is read, or refused by name.

    python tools/readers/fuzz_readers.py --seconds 60                   # all readers, a minute each
    python tools/readers/fuzz_readers.py json warc --runs 5000 --seed 7

A finding is any other exception than UserError, an error that does not name the file, more than 5 s, memory beyond
ten times the input and 64 MB, and the end of the process. Findings are made smaller and kept in FOLDER/findings, inputs
that reached new lines in FOLDER/corpus. With atheris (``make fuzz``) coverage leads the way; without it mutations are
drawn. Each reader has a process of its own.
"""

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from mutations import MOST_BYTES, mutated

_MOST_S = 5.0
_STOPPED_S = 30.0
"""Of an input in code that no signal interrupts."""
_MOST_TIMES, _SPARE_BYTES = 10, 64 * 2**20
_LIMIT_BYTES = 6 * 2**30
"""Of the address space: what asks for more gets a MemoryError, and the machine goes on."""
_INSTRUMENTED = ("lightscale", "jinja2", "warcio", "tomllib", "tarfile", "json", "csv")
_SMALLER_S = 20.0
_INPUT = "input"
"""Link to the file that is read, in the scratch folder of a process."""
DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / "build" / "fuzz"


class _TooLong(BaseException):
    """Not an Exception: what is read may catch these."""


class Reader:
    """One target in a folder, and what is wrong with its answers."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._folder = name, folder
        targets = importlib.import_module("reader_targets")
        self._target = targets.TARGETS[name]
        self._user_error: type[Exception] = importlib.import_module("lightscale.errors").UserError
        self._path = folder / self._target.file
        self.valid: list[bytes] = list(self._target.valid(folder))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        (folder / _INPUT).symlink_to(self._target.file)
        self.outcomes = Counter[str]()
        signal.signal(signal.SIGALRM, _raise_too_long)

    def fault(self, data: bytes) -> tuple[str, str] | None:
        """The kind of finding that ``data`` is, short and the same for one cause, and what happened; or None."""
        self._path.write_bytes(data)
        _forget_peak()
        before, begin = _memory("VmRSS"), time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_REAL, _MOST_S)
            try:
                self._target.read(self._path)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            self.outcomes["read"] += 1
        except self._user_error as error:
            self.outcomes["refused"] += 1
            if str(self._folder) not in str(error):
                return f"no name {_place(error)}", f"an error that does not name the file: {error}"
        except _TooLong as error:
            return f"time {_place(error)}", f"more than {_MOST_S:.0f} s\n{_traced(error)}"
        except Exception as error:  # noqa: BLE001 - what is looked for
            return f"{type(error).__name__} {_place(error)}", _traced(error)
        took = _memory("VmHWM") - before
        if took > _MOST_TIMES * len(data) + _SPARE_BYTES:
            return "memory", f"{took / 2**20:.0f} MB for an input of {len(data)} bytes"
        if (seconds := time.monotonic() - begin) > _MOST_S:
            return "time", f"{seconds:.0f} s"
        return None

    def changed(self, data: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
        """A mutation of ``data``, or of what is in it."""
        inside = self._target.inside
        if inside is not None and generator.random() < 0.5:
            # Whatever a decoder says of what is none.
            with contextlib.suppress(Exception):
                within = inside.unpack(data)
                return bytes(inside.pack(mutated(within, generator, [], MOST_BYTES)))[:MOST_BYTES]
        return mutated(data, generator, others)

    def smaller(self, data: bytes, kind: str) -> bytes:
        """A shorter input with the same kind of finding."""
        deadline, size = time.monotonic() + _SMALLER_S, len(data) // 2
        while size and time.monotonic() < deadline:
            at, was = 0, len(data)
            while at < len(data) and time.monotonic() < deadline:
                shorter = data[:at] + data[at + size :]
                found = self.fault(shorter)
                if found is not None and found[0] == kind:
                    data = shorter
                else:
                    at += size
            if len(data) == was:
                size //= 2
        return data


def _raise_too_long(number: int, frame: FrameType | None) -> None:
    raise _TooLong


def _place(error: BaseException) -> str:
    """The innermost line of lightscale, or of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "lightscale" in Path(frame.filename).parts] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].name}"


def _traced(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    return text if len(text) < 6000 else f"{text[:2000]}\n…\n{text[-4000:]}"


def _memory(key: str) -> int:
    """Bytes of this process by a key of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


def _forget_peak() -> None:
    """VmHWM begins again."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class Findings:
    """Findings in FOLDER/findings/READER, the first of each kind, made smaller."""

    def __init__(self, folder: Path, reader: Reader) -> None:
        self._folder, self._reader = folder / "findings" / reader.name, reader
        self.kinds = Counter[str]()

    def look(self, data: bytes) -> None:
        """Read ``data``, and keep it where it is a finding."""
        if (found := self._reader.fault(data)) is None:
            return
        kind, what = found
        self.kinds[kind] += 1
        if self.kinds[kind] == 1:
            small = data if kind.startswith("time") else self._reader.smaller(data, kind)
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / _digest(small)).write_bytes(small)
            (self._folder / f"{_digest(small)}.txt").write_text(f"{kind}\n{what}\n", encoding="utf-8")


def work(args: argparse.Namespace) -> None:
    """Of one reader: fuzz it in this process, and leave counts.json in the scratch folder again and again."""
    name, scratch = args.readers[0], args.work
    atheris: Any = None
    if args.runs is None and importlib.util.find_spec("atheris") is not None:
        atheris = importlib.import_module("atheris")
        with atheris.instrument_imports(include=list(_INSTRUMENTED)):
            importlib.import_module("reader_targets")
    reader = Reader(name, scratch)
    findings = Findings(args.folder, reader)
    corpus = args.folder / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    kept = [path.read_bytes() for path in sorted(corpus.iterdir())]
    for data in (*reader.valid, *kept):
        findings.look(data)
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + _LIMIT_BYTES, resource.RLIM_INFINITY))
    inputs = [*reader.valid, *kept]
    begin, runs, counted = time.monotonic(), 0, 0.0

    def count() -> None:
        counts = {"runs": runs, "seconds": round(time.monotonic() - begin, 1), "cpu_s": round(time.process_time(), 1)}
        more = {"outcomes": dict(reader.outcomes), "findings": dict(findings.kinds), "coverage": atheris is not None}
        (scratch / "counts.json").write_text(json.dumps(counts | more), encoding="utf-8")

    def one(data: bytes) -> None:
        nonlocal runs, counted
        runs += 1
        findings.look(data)
        # libFuzzer ends the process itself.
        if time.monotonic() - counted > 1:
            counted = time.monotonic()
            count()

    if atheris is None:
        generator = random.Random(f"{name} {args.seed}")
        while runs < args.runs if args.runs is not None else time.monotonic() < begin + args.seconds:
            one(reader.changed(generator.choice(inputs), generator, inputs))
        count()
        return
    for data in reader.valid:
        (corpus / _digest(data)).write_bytes(data)

    def change(data: bytes, most_bytes: int, seed: int) -> bytes:
        generator = random.Random(seed)
        if generator.random() < 0.3:
            found: bytes = atheris.Mutate(data, len(data))
            return found
        return reader.changed(data, generator, inputs)[:most_bytes]

    flags = [f"-max_total_time={int(args.seconds)}", f"-max_len={MOST_BYTES}", f"-seed={args.seed}"]
    # Findings are this program's to judge; what ends the process is found by the file that is still there.
    flags += [f"-timeout={int(_STOPPED_S)}", "-rss_limit_mb=0", f"-artifact_prefix={scratch}/", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], one, custom_mutator=change)
    count()
    atheris.Fuzz()


def fuzz(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Fuzz one reader in processes of its own until its time is over; what ends a process is a finding too."""
    end, counts = time.monotonic() + args.seconds, dict[str, Any]()
    ends = Counter[str]()
    number = 0
    while True:
        left = max(1.0, end - time.monotonic())
        with tempfile.TemporaryDirectory(prefix=f"fuzz-{name}-") as scratch:
            words = [name, "--work", scratch, "--folder", str(args.folder), "--seed", str(args.seed + number)]
            words += ["--seconds", str(left)] if args.runs is None else ["--runs", str(args.runs)]
            code, log = _process(words, left + 120 + (0 if args.runs is None else args.runs))
            with contextlib.suppress(OSError, ValueError):
                _add(counts, json.loads(Path(scratch, "counts.json").read_text(encoding="utf-8")))
            if code == 0:
                break
            kind = f"exit code {code}"
            ends[kind] += 1
            file = _left_input(Path(scratch))
            if file is not None:
                kept = args.folder / "findings" / name
                kept.mkdir(parents=True, exist_ok=True)
                (kept / _digest(file)).write_bytes(file)
                (kept / f"{_digest(file)}.txt").write_text(f"{kind}\n{log[-4000:]}\n", encoding="utf-8")
        number += 1
        if time.monotonic() >= end - 5 or number >= 5:
            break
    counts["findings"] = {**counts.get("findings", {}), **ends}
    return counts


def _left_input(scratch: Path) -> bytes | None:
    """The input that a process left when it ended."""
    path = scratch / _INPUT
    return path.read_bytes() if path.is_file() else None


def _process(words: list[str], most_s: float) -> tuple[int, str]:
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=most_s, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        return 124, (error.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout.decode(errors="replace")


def _add(total: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict):
            total[key] = dict(Counter(total.get(key, {})) + Counter(value))
        else:
            total[key] = value if isinstance(value, bool) else round(total.get(key, 0) + value, 1)


def _machine() -> Iterator[str]:
    text = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    for line in text.splitlines():
        if line.startswith(("Model name:", "CPU(s):")):
            yield " ".join(line.split())


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz; exit code 1 where there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readers", nargs="*", metavar="READER", help="names of reader_targets.TARGETS (default: all)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each reader (default: 60)")
    parser.add_argument("--runs", type=int, help="inputs of each reader, drawn without coverage, in place of --seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="for corpus and findings")
    parser.add_argument("--out", type=Path, help="JSON file for the counts")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.work is not None:
        work(args)
        return 0
    names = args.readers or list(importlib.import_module("reader_targets").TARGETS)
    result: dict[str, Any] = {
        "command": " ".join(
            ["python tools/readers/fuzz_readers.py", *(sys.argv[1:] if arguments is None else arguments)]
        ),
        "machine": list(_machine()),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "readers": {},
    }
    for name in names:
        result["readers"][name] = counts = fuzz(name, args)
        print(
            f"{name:28} {counts.get('runs', 0):>9} inputs {counts.get('seconds', 0):>8} s  {counts['findings']}",
            flush=True,
        )
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(counts["findings"] for counts in result["readers"].values()))


if __name__ == "__main__":
    sys.exit(main())

"""Faults seeded on purpose: each mutant of mutants.toml is applied to a copy, and the test that finds it is named.

    python tools/mutants.py                                     # all, on the working tree
    python tools/mutants.py --only loader-epoch-seed            # one
    python tools/mutants.py --at a378e96 --json found.json      # all, at a commit; results are merged into a file
    python tools/mutants.py --json found.json --table TABLE.md  # the same with a table of all results in the file

A mutant is an exact change of one place. It is applied to a scratch copy of the repository with an environment of its
own, which imports the copy. The mutated module must import. Then the mutant's tests run, `long` ones too and `soak`
ones never, up to the first failure. At the end the failing tests run once more without mutants, where they must pass.
Exit code 1: a mutant was not found, or a test fails without it.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("mutants.toml")
WORKING_TREE = "working tree"
_MARKS = "not soak and not gpu and not twin"
_TIMEOUT_S = 600
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.*?)(?: - (.*))?$", re.MULTILINE)
# Of a test: beside other work the suite's own limit would pass for a finding.
_TEST_TIMEOUT_S = 400
_NO_IMPORT = re.compile(r"\b(?:ImportError|ModuleNotFoundError|NameError|SyntaxError|IndentationError)\b")
_TESTS_FAILED, _NONE_COLLECTED = 1, 5


class Place(NamedTuple):
    """An exact change of a file."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A change of one place."""

    name: str
    kind: str
    """Of the fault, in a few words."""
    file: str
    old: str
    """Text that the file has once."""
    new: str
    tests: tuple[str, ...]
    """Files or ids of pytest, in the order in which they run."""
    moved: Mapping[str, str] | None = None
    """``file``, ``old`` and ``new`` of the same fault in commits in which the code stands elsewhere."""

    def places(self) -> list[Place]:
        """Where the fault is seeded: the first of these that is there."""
        here = Place(self.file, self.old, self.new)
        return [here] if self.moved is None else [here, Place(**self.moved)]


def read_mutants(path: Path = TABLE) -> list[Mutant]:
    """Those of the table."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


class Copy:
    """A copy of the repository with an environment that imports it."""

    def __init__(self, root: Path, revision: str | None) -> None:
        """``revision``: a commit; None: the working tree."""
        self.root = root
        if revision is None:
            _copy_working_tree(root)
        else:
            archive = subprocess.run(["git", "archive", revision], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True)
            subprocess.run(["tar", "-x"], cwd=root, input=archive.stdout, check=True)
        self._python = self._make_environment()

    def _make_environment(self) -> Path:
        """As ``make install`` leaves it: the same packages as here, and this copy in place of this repository."""
        bin_ = self.root / ".venv" / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.root / ".venv"], check=True)
        own = Path(sys.prefix) / "bin"
        for path in own.iterdir():
            target = bin_ / path.name
            if target.exists() or not path.is_file():
                continue
            text = path.read_bytes()
            if text.startswith(f"#!{own}".encode()):
                target.write_bytes(text.replace(str(own).encode(), str(bin_).encode(), 1))
                target.chmod(0o755)
            else:
                target.symlink_to(path)
        (site,) = (self.root / ".venv").glob("lib/python*/site-packages")
        # The packages of an editable installation are named in .pth files of their own, which nobody reads here.
        packages = dict.fromkeys(entry for entry in sys.path if Path(entry).name == "site-packages")
        (site / "copy.pth").write_text("".join(f"{entry}\n" for entry in [self.root, *packages]), encoding="utf-8")
        return bin_ / "python"

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[bool]:
        """Whether the copy has the mutant's place, which is changed inside."""
        for place in mutant.places():
            path = self.root / place.file
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            if text.count(place.old) == 1:
                path.write_text(text.replace(place.old, place.new), encoding="utf-8")
                break
        else:
            yield False
            return
        try:
            yield True
        finally:
            path.write_text(text, encoding="utf-8")

    def run(self, arguments: Sequence[str], timeout_s: float = _TIMEOUT_S) -> tuple[int, str]:
        """Exit code and output of this copy's Python; what it started ends with it."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST_"))}
        # All cases of those that a run draws some of.
        environment |= {"COLUMNS": "400", "VIRTUAL_ENV": str(self.root / ".venv"), "LIGHTSCALE_TEST_SEED": "all"}
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [self._python, *arguments],
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout_s)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
            output.seek(0)
            return code, output.read()

    def pytest(self, tests: Sequence[str], *options: str, timeout_s: float = _TIMEOUT_S) -> tuple[int, str]:
        """Exit code and output of some tests."""
        fixed = ("-o", f"timeout={_TEST_TIMEOUT_S}", "-q", "-rfE", "--tb=line", "-p", "no:xdist")
        return self.run(["-m", "pytest", *fixed, "-m", _MARKS, *options, *tests], timeout_s)


def _copy_working_tree(root: Path) -> None:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        source, target = REPOSITORY / name, root / name
        if source.is_file() or source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def find(copy: Copy, mutant: Mutant) -> dict[str, Any]:
    """What finds ``mutant``: ``status`` and, where a test does, its id in ``test``; ``seconds`` of the tests."""
    with copy.mutated(mutant) as is_there:
        if not is_there:
            return {"status": "not there"}
        began = time.monotonic()
        tests = [test for test in mutant.tests if has_test(copy.root, test)]
        code, output = copy.pytest(tests, "-x") if tests else (_NONE_COLLECTED, "")
        seconds = round(time.monotonic() - began, 1)
    if code in (0, _NONE_COLLECTED):
        return {"status": "not found", "seconds": seconds}
    failed: list[tuple[str, str]] = _FAILED.findall(output)
    if _NO_IMPORT.search(output):
        return {"status": "does not import", "seconds": seconds, "output": output[-2000:]}
    if code != _TESTS_FAILED or not failed or "::" not in failed[0][0]:
        return {"status": "no answer", "seconds": seconds, "output": output[-2000:]}
    test, reason = failed[0]
    return {"status": "found", "test": test, "reason": reason, "seconds": seconds}


def has_test(root: Path, test: str) -> bool:
    """Whether there is a file, and in it a function, of that id; cases are not looked for."""
    file, _, function = test.partition("::")
    path = root / file
    if not path.is_file():
        return False
    return not function or f"\ndef {function.partition('[')[0]}(" in path.read_text(encoding="utf-8")


def failing_without(copy: Copy, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Which of the tests that found a mutant fail without any."""
    tests = sorted({one["test"] for one in found.values() if "test" in one})
    if not tests:
        return []
    code, output = copy.pytest(tests, timeout_s=_TIMEOUT_S * 6)
    if code not in (0, _TESTS_FAILED):
        return [f"no answer: {output[-2000:]}"]
    failed = {test for test, _ in _FAILED.findall(output)}
    return [test for test in tests if test in failed]


def run(revision: str | None, mutants: Sequence[Mutant], keep: Path | None, key: str) -> bool:
    """Run ``mutants``; results go to the file ``keep`` one by one. Whether each was found, or is not there."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder), revision)
        for mutant in mutants:
            result = found[mutant.name] = find(copy, mutant)
            print(f"{mutant.name}: {result.get('test', result['status'])} ({result.get('seconds', 0)} s)", flush=True)
            if "output" in result:
                print(result.pop("output"), flush=True)
            if keep is not None:
                _keep(keep, key, revision, {mutant.name: result})
        wrong = failing_without(copy, found)
    for test in wrong:
        print(f"fails without a mutant: {test}")
    return not wrong and all(one["status"] in ("found", "not there") for one in found.values())


def _kept(path: Path) -> dict[str, Any]:
    runs: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return runs


def _keep(path: Path, key: str, revision: str | None, found: Mapping[str, Mapping[str, Any]]) -> None:
    runs = _kept(path)
    entry = runs.setdefault(key, {})
    described = ["git", "rev-parse", "--short=7", revision or "HEAD"]
    commit = subprocess.run(described, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True, text=True).stdout.strip()
    entry |= {"commit": commit, "date": time.strftime("%Y-%m-%d"), "machine": _machine()}
    entry["mutants"] = {**entry.get("mutants", {}), **found}
    path.write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{cpu}, {os.cpu_count()} cores"


def table(runs: Mapping[str, Any], mutants: Sequence[Mutant]) -> str:
    """The results of all runs in Markdown, a line for each mutant."""
    # The working tree last: what is now stands behind what was.
    keys = sorted(runs, key=lambda key: key == WORKING_TREE)
    lines = ["# Mutants", ""]
    lines += [
        "Each mutant is a fault seeded on purpose in one place. The table names the first test that finds it, of those",
        "that `tools/mutants.toml` names for it. These tests belong to the default and the long suite; `soak` tests do",
        "not run. `not found`: none of these tests fails. `not there`: the commit does not have the mutant's text.",
        "Seconds are measured up to the first failure, in one process, beside other work on the machine.",
        "",
    ]
    for key in keys:
        one = runs[key]
        command = "python tools/mutants.py" + ("" if key == WORKING_TREE else f" --at {key}")
        counted = [found["status"] for found in one["mutants"].values()]
        numbers = ", ".join(f"{counted.count(status)} {status}" for status in dict.fromkeys(sorted(counted)))
        lines.append(f"- `{command}`: commit {one['commit']}, {one['date']}, {one['machine']}; {numbers}.")
    head = ["mutant", "kind", "file"]
    for key in keys:
        head += [f"test that finds it, {runs[key]['commit']}", "s"]
    lines += ["", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for mutant in mutants:
        cells = [mutant.name, mutant.kind, f"`{mutant.file.removeprefix('lightscale/')}`"]
        for key in keys:
            found = runs[key]["mutants"].get(mutant.name, {"status": "not run"})
            test = found.get("test", "").removeprefix("tests/").replace("|", "\\|")
            cells += [f"`{test}`" if test else found["status"], str(found.get("seconds", ""))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", action="append", help="run this mutant; may be given several times")
    parser.add_argument("--at", metavar="REV", help="use this commit in place of the working tree")
    parser.add_argument("--json", metavar="FILE", type=Path, help="merge the results into this file")
    parser.add_argument("--table", metavar="FILE", type=Path, help="write a table of all results in the file of --json")
    parser.add_argument("--missing", action="store_true", help="run the mutants without a result in the file of --json")
    parser.add_argument("--no-run", action="store_true", help="write the table alone")
    parser.add_argument("--list", action="store_true", help="print names, kinds and files of the mutants")
    arguments = parser.parse_args()
    every = read_mutants()
    names = {mutant.name for mutant in every}
    if unknown := sorted(set(arguments.only or ()) - names):
        parser.error(f"no mutant {', '.join(unknown)}; list them with --list")
    if (arguments.table is not None or arguments.missing) and arguments.json is None:
        parser.error("--table and --missing need --json, the file that has the results")
    if arguments.list:
        for mutant in every:
            print(f"{mutant.name}: {mutant.kind} ({mutant.file})")
        return 0
    chosen = [mutant for mutant in every if arguments.only is None or mutant.name in arguments.only]
    key = arguments.at or WORKING_TREE
    if arguments.missing:
        known = _kept(arguments.json).get(key, {}).get("mutants", {})
        chosen = [mutant for mutant in chosen if mutant.name not in known]
    is_good = arguments.no_run or run(arguments.at, chosen, arguments.json, key)
    if arguments.table is not None:
        arguments.table.write_text(table(_kept(arguments.json), every), encoding="utf-8")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

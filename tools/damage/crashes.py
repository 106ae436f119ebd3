#!/usr/bin/env python
"""Power failures at every write of a command: each folder that may be left opens right, or is refused by name.

    python tools/damage/crashes.py --json benchmarks/crashes.json
    python tools/damage/crashes.py run export          # only these

The system calls of a command that writes are recorded once, by strace (``system_calls.py``). Every prefix of
them, with unsynced changes lost or in another order (``disk_states.py``), becomes a folder, which is opened as
lightscale opens it. What was reported as written must be there: a saved checkpoint, an earlier store. Some folders also
go on: the same command, given again, must end with the same files.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from crash_case import ABSENT, EARLIER, REFUSED, WHOLE, Case, Context, Wrong, the_same
from disk_states import State, states
from record_cases import queue_case, study_case
from rich.console import Console
from rich.progress import track
from system_calls import Files, Recording, Write, record

from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.store.verify import verify_store
from lightscale.errors import UserError
from lightscale.evaluation.results import read_result
from lightscale.exchange.files import checksums
from lightscale.records import read_records
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.checkpoints.directories import directory_name, list_steps
from lightscale.training.checkpoints.reader import verify

_CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_COMMAND = (sys.executable, "-m", "lightscale")
# Nobody reads them back, and nothing follows from them.
_LOGS = (r".*/logs(/.*)?", r".*\.log")
RUN = f"""
extends = ["{_CONFIGS}/arch/tnl.toml", "{_CONFIGS}/size/tiny.toml"]
[model]
vocab_size = 320
num_layers = 1
hidden_size = 16
num_heads = 2
intermediate_size = 16
[data]
store = "STORE"
sequence_length = 64
[train]
steps = 3
global_batch_size = 2
[checkpoint]
every = 1
keep = 2
[optimizer]
lr = 1e-3
warmup_steps = 0
[metrics]
sinks = ["jsonl"]
"""


def try_case(case: Case, console: Console, *, again: int, seed: int) -> dict[str, Any]:
    """Record the command, and open every state. ``again``: number of states in which the command is given again."""
    before = _looked(case)
    with _environment(case.environment):
        recording = record([*case.program, *case.command], case.folder, cwd=case.folder.parent, ignored=case.ignored)
    after, final = _looked(case), case.final()
    disk = _Disk(case.folder)
    seen: dict[str, Any] = {}
    all_files: set[str] = set()
    distinct: list[State] = []
    outcomes, points, number = Counter[str](), Counter[str](), 0
    failures: list[dict[str, Any]] = []
    found = states(recording, (*_LOGS, *case.ignored))
    for state in track(found, case.name, console=console, disable=not console.is_terminal):
        number += 1
        files = state.tree.files()
        key = _hash({path: content for path, content in files.items() if re.fullmatch(case.read, path)})
        if key not in seen:
            disk.become(files)
            seen[key] = _looked(case)
        if (whole := _hash(files)) not in all_files:
            all_files.add(whole)
            distinct.append(state)
        context = Context(before=before, after=after, reported=_reported(recording, state.point))
        try:
            outcomes[_judged(case, context, seen[key])] += 1
        except Wrong as error:
            failures.append(
                {"point": state.point, "how": state.how, "error": str(error), "last": _last(recording, state)}
            )
    for operation in recording.operations:
        points[type(operation).__name__.lower()] += 1
    chosen = random.Random(f"{case.name} {seed}").sample(distinct, min(again, len(distinct)))
    for state in track(chosen, f"{case.name}, again", console=console, disable=not console.is_terminal):
        disk.become(state.tree.files())
        failures += [{"point": state.point, "how": state.how, "again": error} for error in _again(case, final)]
        disk.forget()
    return {
        "case": case.name,
        "command": case.label or " ".join(case.command[:2]),
        "write_points": dict(points),
        "states": number,
        "distinct": len(distinct),
        "opened": len(seen),
        "outcomes": dict(sorted(outcomes.items())),
        "again": len(chosen),
        "failures": failures,
    }


def _looked(case: Case) -> Any:
    """What ``look`` gives, or the exception by which it refuses."""
    try:
        return case.look()
    except (UserError, FileNotFoundError) as error:
        return error
    except Exception as error:  # noqa: BLE001 - a reader without a message of its own
        return Wrong(f"{type(error).__name__}: {error}")


def _judged(case: Case, context: Context, found: Any) -> str:
    if isinstance(found, Wrong):
        raise found
    if isinstance(found, FileNotFoundError | UserError):
        if context.before is not None and not isinstance(context.before, Exception):
            raise Wrong(f"the earlier files are lost: {found}")
        return ABSENT if isinstance(found, FileNotFoundError) else REFUSED
    return case.judge(context, found)


def _again(case: Case, final: Any) -> Iterator[str]:
    with _environment(case.environment):
        done = subprocess.run(
            [*case.program, *case.command], cwd=case.folder.parent, capture_output=True, text=True, check=False
        )
    if done.returncode:
        yield f"exit code {done.returncode}: {done.stderr[-1500:]}"
        return
    try:
        found = case.final()
    except (UserError, FileNotFoundError) as error:
        yield f"the command ends well, with files that are refused: {error}"
    else:
        if found != final:
            yield "the command ends with other files"


def _reported(recording: Recording, point: int) -> bytes:
    written = recording.operations[:point]
    return b"".join(
        one.data for one in written if isinstance(one, Write) and recording.paths[one.inode].endswith("events.jsonl")
    )


def _last(recording: Recording, state: State) -> str:
    if not state.point:
        return ""
    last = recording.operations[state.point - 1]
    changes = getattr(last, "changes", None)
    if changes is None:
        return f"{type(last).__name__.lower()} {recording.paths.get(last.inode)}"  # type: ignore[union-attr]
    return ", ".join(
        f"{recording.paths.get(directory, '')}/{name} {'removed' if inode is None else 'made'}"
        for directory, name, inode in changes
    )


def _hash(files: Files) -> str:
    return hashlib.blake2b(repr([(path, _digest(content)) for path, content in files.items()]).encode()).hexdigest()


@functools.lru_cache(maxsize=4096)
def _digest(content: bytes | str | None) -> str:
    """Most files are the same in most states."""
    return hashlib.blake2b(content).hexdigest() if isinstance(content, bytes) else repr(content)


class _Disk:
    """A folder that becomes one state after another."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._now = folder, dict[str, Any]()
        self.forget()

    def forget(self) -> None:
        """Begin with nothing: somebody wrote here."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        self._now = {}

    def become(self, files: Files) -> None:
        """Have these files."""
        kept = {path for path, content in self._now.items() if path in files and type(content) is type(files[path])}
        for path in sorted(self._now.keys() - kept, reverse=True):
            target = self._folder / path
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
        for path, content in sorted(files.items()):
            target = self._folder / path
            if path in kept and self._now[path] == content:
                continue
            if content is None:
                target.mkdir()
            elif isinstance(content, str):
                target.unlink(missing_ok=True)
                target.symlink_to(content)
            else:
                target.write_bytes(content)
        self._now = dict(files)


# ----- what is written, and opened -----------------------------------------------------------------------------------


def store_case(work: Path) -> Case:
    """`data prepare`"""
    _write_words(work / "words.jsonl", 30, seed=0)
    out = work / "disk/store"
    command = ("data", "prepare", str(work / "words.jsonl"), "--out", str(out), "--vocab-size", "320", "--workers", "1")
    look = lambda: _store(out)  # noqa: E731
    return Case(
        name="store", read=r"store(/.*)?", command=command, folder=work / "disk", look=look, judge=the_same, final=look
    )


def growth_case(work: Path) -> Case:
    """`data add`: the earlier store stays, whatever happens."""
    prepared = store_case(work)
    _run(prepared.command)
    _write_words(work / "more.jsonl", 10, seed=1)
    store, out = work / "disk/store", work / "disk/grown"
    command = ("data", "add", str(store), str(work / "more.jsonl"), "--out", str(out), "--workers", "1")

    def look() -> Any:
        earlier = _store(store)
        try:
            return earlier, _store(out)
        except (FileNotFoundError, UserError):
            return earlier, None

    return Case(
        name="growth",
        read=r"(store|grown)(/.*)?",
        command=command,
        folder=work / "disk",
        look=look,
        judge=the_same,
        final=look,
    )


def _store(path: Path) -> Any:
    if not path.exists():
        raise FileNotFoundError(path)
    faults = verify_store(path, lambda step, done, total: None).faults
    if faults:
        raise UserError(faults[0])
    store = TokenStore(path)
    sources = [store.source(name) for name in sorted(store.sources)]
    return store.fingerprint(), [source.read(0, source.num_tokens).tolist() for source in sources]


def run_case(work: Path) -> Case:
    """`train` on two ranks, with a checkpoint of each step."""
    _prepare_run(work)
    command = ("train", str(work / "run.toml"), "--run", str(work / "disk/a"), "--processes", "2")
    return _training_case("run", work, command)


def resume_case(work: Path) -> Case:
    """`train` goes on with a run that has checkpoints."""
    _prepare_run(work)
    command = ("train", str(work / "run.toml"), "--run", str(work / "disk/a"), "--processes", "1")
    _run(command)
    return _training_case("resume", work, (*command, "train.steps=5"))


def _training_case(name: str, work: Path, command: tuple[str, ...]) -> Case:
    run = work / "disk/a"
    of_steps: dict[int, dict[str, str]] = {}

    def look() -> Any:
        return _run_directory(run)

    def judge(context: Context, found: Any) -> str:
        checkpoints, lines, _ = found
        for step, tensors in checkpoints.items():
            if of_steps.setdefault(step, tensors) != tensors:
                raise Wrong(f"the checkpoint of step {step} opens, with other contents than were written")
        reported = [json.loads(line) for line in context.reported.splitlines()]
        newest = max([one["step"] for one in reported if one["event"] == "checkpoint"], default=0)
        earlier = 0 if isinstance(context.before, Exception) else max(context.before[0], default=0)
        if max(checkpoints, default=0) < max(newest, earlier):
            raise Wrong(
                f"the newest checkpoint is {max(checkpoints, default=0)}, and {max(newest, earlier)} was reported"
            )
        if unknown := [line for line in lines if line not in context.after[1]]:
            raise Wrong(f"a record was never written: {unknown[0][:200]}")
        return WHOLE if found == context.after else EARLIER

    def final() -> Any:
        checkpoints, _, _ = _run_directory(run)
        return checkpoints[max(checkpoints)]

    return Case(
        name=name, read=r"(?!.*\.tmp).*", command=command, folder=work / "disk", look=look, judge=judge, final=final
    )


def _run_directory(path: Path) -> tuple[dict[int, dict[str, str]], set[str], Any]:
    """Hashes of the weights in each whole checkpoint, the lines of the records, and the status."""
    if not path.exists():
        raise FileNotFoundError(path)
    run = RunDirectory(path)
    checkpoints = {}
    for step in list_steps(run.checkpoints):
        folder = run.checkpoints / directory_name(step)
        with contextlib.suppress(UserError):
            manifest = verify(folder, step)
            checkpoints[step] = {
                name: hashlib.blake2b((folder / name).read_bytes()).hexdigest()
                for name in manifest.files
                if name.endswith(".safetensors")
            }
    lines = set()
    for records in (run.metrics, run.events):
        if records.exists():
            lines |= {json.dumps(line, sort_keys=True) for line in read_records(records).lines}
    return checkpoints, lines, run.read_status()


def export_case(work: Path) -> Case:
    """`export`"""
    _prepare_run(work)
    _run(("train", str(work / "run.toml"), "--run", str(work / "disk/a"), "--processes", "1"))
    out = work / "disk/exported"

    def look() -> Any:
        if not out.exists():
            raise FileNotFoundError(out)
        if faults := checksums.checksum_faults(out, lambda step, done, total: None):
            raise UserError(faults[0])
        files = sorted(path for path in out.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in files if path.name != "README.md"}

    command = ("export", str(work / "disk/a"), "--to", str(out))
    return Case(
        name="export",
        read="exported(/.*)?",
        command=command,
        folder=work / "disk",
        look=look,
        judge=the_same,
        final=look,
    )


def evaluation_case(work: Path) -> Case:
    """`evaluate`"""
    _prepare_run(work)
    _run(("train", str(work / "run.toml"), "--run", str(work / "disk/a"), "--processes", "1"))
    task = work / "words-task.toml"
    task.write_text('kind = "perplexity"\npaths = ["words.jsonl"]\n')
    result = work / "disk/a/evaluation/step-00000003/words-task.json"

    def look() -> Any:
        found = read_result(result)
        if found is None:
            raise FileNotFoundError(result)
        return {key: value for key, value in found.items() if key in ("task", "scores", "identity")}

    command = ("evaluate", str(work / "disk/a"), "--tasks", str(task), "--processes", "1")
    return Case(
        name="evaluation",
        read="a/evaluation(/.*)?",
        command=command,
        folder=work / "disk",
        look=look,
        judge=the_same,
        final=look,
    )


CASES = {
    "store": store_case,
    "growth": growth_case,
    "run": run_case,
    "resume": resume_case,
    "export": export_case,
    "evaluation": evaluation_case,
    "study": study_case,
    "queue": queue_case,
}


def _prepare_run(work: Path) -> None:
    _write_words(work / "words.jsonl", 30, seed=0)
    _run(("data", "prepare", str(work / "words.jsonl"), "--out", str(work / "store"), "--vocab-size", "320"))
    (work / "run.toml").write_text(RUN.replace("STORE", str(work / "store")))


def _write_words(path: Path, documents: int, seed: int) -> None:
    generator = random.Random(seed)
    words = ["".join(generator.choices("abcdefgh", k=5)) for _ in range(50)]
    path.write_text("\n".join(json.dumps({"text": " ".join(generator.choices(words, k=60))}) for _ in range(documents)))


def _run(command: Sequence[str]) -> None:
    done = subprocess.run([*_COMMAND, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"lightscale {' '.join(command)}: exit code {done.returncode}\n{done.stderr}")


@contextlib.contextmanager
def _environment(changed: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the cases; exit code 1 where a state opens wrong, 2 where nothing can be recorded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument(
        "--again", type=int, default=6, help="states of a case in which the command is given again (default: 6)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file of the result")
    args = parser.parse_args(arguments)
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"unknown case {min(unknown)}; known: {', '.join(CASES)}")
    if shutil.which("strace") is None:
        print("error: strace is not installed", file=sys.stderr)
        return 2
    console, results = Console(stderr=True), []
    for name in args.cases or CASES:
        with tempfile.TemporaryDirectory(prefix="lightscale-crashes-") as folder:
            work = Path(folder).resolve()
            (work / "disk").mkdir()
            results.append(try_case(CASES[name](work), console, again=args.again, seed=args.seed))
        print(json.dumps(results[-1]))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if any(one["failures"] for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())

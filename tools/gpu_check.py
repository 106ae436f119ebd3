#!/usr/bin/env python
"""What only a GPU can show: ``make gpu-check``.

Correctness on the device against fp64 comes first, then the speed of the kernels, one scan of whole documents beside
two, a short training run, and whole steps over growing lengths. A part that fails does not keep the later ones from
running. What was measured is saved as it is found, so that a check that is cut off keeps what it has; the exit code is
0 only if every part ran, every test passed and no target was missed. ``--small`` runs all of it at sizes that take
seconds, which shows that the check itself works on a machine before it is given hours there.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import gpu_visit
from bench import machine, saved_as
from lightscale.errors import UserError
from lightscale.runs.run_directory import write_atomically
from plot_kernels import check_matplotlib

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "{results}"
"""In a command: where tests write what they found."""
FOLDER = "{folder}"
"""In a command: where benchmarks are saved."""
TIMED_OUT = 124
SMALL = "small sizes (--small): they show that the check runs, not its speed"

console = Console(stderr=True, highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One command of the check."""

    command: tuple[str, ...]
    benchmark: str | None = None
    """The benchmark of ``bench.py`` that it saves."""
    small: tuple[str, ...] = ()
    """What ``--small`` adds to the command."""


def _benchmark(name: str, *, small: tuple[str, ...]) -> Part:
    command = (sys.executable, "tools/bench.py", name, "--save", FOLDER)
    return Part(command=command, benchmark=name, small=small)


def _tests(*arguments: str, small: tuple[str, ...]) -> Part:
    # -P: the folders of the current directory are no packages.
    command = (sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-rfE", "--results", RESULTS, *arguments)
    return Part(command=command, small=small)


PARTS = {
    # Most of the time goes to compiling kernels, side by side; the largest tensors are in one process, one by one.
    "operators": _tests(
        "tests/gpu",
        *("--ignore", "tests/gpu/test_on_gpu.py", "--ignore", "tests/gpu/test_ranks_on_gpu.py"),
        *("-n", "4", "--dist", "loadgroup"),
        # Those whose tensors are smallest.
        small=("-n", "0", "-k", "test_equals_the_reference_in_fp64 and (norm and float32-1000 or silu-float32)"),
    ),
    "models": _tests("tests/gpu/test_on_gpu.py", small=("--small",)),
    "ranks": _tests("tests/gpu/test_ranks_on_gpu.py", small=("--small", "-k", "tnl or resumed")),
    "kernels": _benchmark("kernels", small=("--small", "--repeats", "1")),
    "scans": _benchmark("scans", small=("--tokens", "128", "256", "--heads", "2", "--width", "32", "--repeats", "1")),
    "learn": _benchmark(
        "learn",
        small=(
            *("--steps", "30", "model.num_layers=1", "data.sequence_length=64", "optimizer.warmup_steps=0"),
            *("train.global_batch_size=4", "train.micro_batch_size=4"),
        ),
    ),
    "fp8": _benchmark(
        "train-fp8",
        small=("configs/tnl-tiny.toml", "--length", "128", "--tokens-per-step", "256", "--repeats", "1"),
    ),
    "train": _benchmark(
        "train",
        small=(
            *("configs/tnl-tiny.toml", "--lengths", "128", "256", "--tokens-per-step", "512"),
            *("--micro-batch-tokens", "256", "--repeats", "1"),
        ),
    ),
}


SEVERAL_GPUS = ("ranks",)
"""Parts for nodes with more than one GPU."""


def possible_parts(*, small: bool = False) -> dict[str, Part]:
    """Those that this machine's GPUs can show."""
    several = torch.cuda.device_count() > 1
    parts = {name: part for name, part in PARTS.items() if several or name not in SEVERAL_GPUS}
    if not small:
        return parts
    return {name: replace(part, command=(*part.command, *part.small)) for name, part in parts.items()}


def check_device() -> None:
    """Refuse where nothing of this could run.

    Raises:
        UserError: it names what is missing.
    """
    needs = "gpu-check needs a GPU"
    if torch.version.cuda is None:
        raise UserError(f"{needs} and a torch with CUDA: torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        raise UserError(f"{needs}: torch {torch.__version__} finds none; check `nvidia-smi`")
    if find_spec("triton") is None:
        raise UserError(f"{needs} and the package triton, which is not installed")
    if find_spec("fla") is None:
        console.print("fla-core is not installed: comparison with its kernels skipped; use `pip install fla-core`")


def run_part(part: Part, results: Path, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run a command to its end or its limit, and collect what it saved."""
    values = {RESULTS: str(results), FOLDER: str(folder)}
    command = [values.get(word, word) for word in part.command]
    began, started = time.monotonic(), time.time()
    # A session of its own, so that what it has started ends with it.
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=sys.stderr)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = TIMED_OUT
        console.print(f"[red]stopped after the limit of {limit_s:g} s[/red]")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found: dict[str, Any] = {"exit_code": code, "seconds": time.monotonic() - began}
    if part.benchmark is None:
        return found | {"tests": read_results(results)}
    saved = saved_as(folder, part.benchmark, machine())
    # A file of an earlier run of today says nothing about this one.
    if not saved.exists() or saved.stat().st_mtime < started:
        return found | {"saved": None, "missed": ["nothing was saved"]}
    figures = json.loads(saved.read_text(encoding="utf-8"))
    # What is wrong with one part does not end the others.
    missed = figures.get("verdict", {}).get("missed", ["its file has no verdict"])
    missed += [] if figures["complete"] else ["it was stopped early"]
    return found | {"saved": saved.name, "missed": missed}


def read_results(path: Path) -> list[dict[str, Any]]:
    """What the tests wrote, one line each (``tests/gpu/conftest.py``)."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def failed(found: dict[str, Any]) -> bool:
    """Whether a part did not do what it should; tests that all skip have shown nothing."""
    nothing_passed = "tests" in found and not any(test["outcome"] == "passed" for test in found["tests"])
    return bool(found["exit_code"] or found.get("missed") or nothing_passed)


def run(parts: dict[str, Part], folder: Path, limit_s: float, *, small: bool = False) -> dict[str, dict[str, Any]]:
    """All parts, one after the other; the file of the whole check grows with each."""
    host = machine() | ({"sizes": SMALL} if small else {})
    path = saved_as(folder, "gpu-check", host)
    found: dict[str, dict[str, Any]] = {}
    for number, (name, part) in enumerate(parts.items(), start=1):
        console.rule(f"[bold]{name}[/bold], {number} of {len(parts)}")
        results = path.with_name(f"{path.stem}_{name}.jsonl")
        results.unlink(missing_ok=True)
        found[name] = run_part(part, results, folder, limit_s)
        write_atomically(path, json.dumps({"machine": host, "parts": found}, indent=1) + "\n")
        write_atomically(path.with_suffix(".md"), page(host, found))
        results.unlink(missing_ok=True)
    console.print(f"written to {path}")
    return found


def what_was_found(part: dict[str, Any]) -> list[str]:
    """In words: how many tests passed, what was saved, and what is wrong."""
    if "tests" in part:
        outcomes = [test["outcome"] for test in part["tests"]]
        what = [f"{outcomes.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped")]
        what += [test["test"] for test in part["tests"] if test["outcome"] == "failed"]
    else:
        what = [f"saved {part['saved']}" if part["saved"] else "", *part["missed"]]
    return [*filter(None, what), *([f"exit code {part['exit_code']}"] if part["exit_code"] else [])]


def page(host: dict[str, Any], found: dict[str, dict[str, Any]]) -> str:
    """The whole check on one page, Markdown: every part, and how far the operators are from fp64."""
    lines = ["# GPU check", ""]
    if note := host.get("note"):
        lines += [f"**{note}**", ""]
    lines += [f"{'Run' if note else 'Measured'} by `make gpu-check` on:", ""]
    lines += [f"- {key}: {value}" for key, value in host.items() if key != "note"]
    lines += ["", "| part | | seconds | what |", "|---|---|---|---|"]
    for name, part in found.items():
        mark = "**failed**" if failed(part) else "ok"
        lines.append(f"| {name} | {mark} | {part['seconds']:.0f} | {'<br>'.join(what_was_found(part))} |")
    # Of operators; tests of models and ranks have none.
    errors = [(test["test"], test.get("errors", {})) for part in found.values() for test in part.get("tests", ())]
    if any(by_result for _, by_result in errors):
        lines += ["", "| test | largest error to fp64, RMSE by RMSE |", "|---|---|"]
        lines += [
            f"| `{name}` | {max(by_result.values()):.2g} ({max(by_result, key=by_result.__getitem__)}) |"
            for name, by_result in errors
            if by_result
        ]
    return "\n".join(lines) + "\n"


def summary(found: dict[str, dict[str, Any]]) -> Table:
    """One line for each part, and what is wrong below it."""
    table = Table("part", "", "seconds", "what")
    for name, part in found.items():
        mark = "[red]failed[/red]" if failed(part) else "ok"
        table.add_row(name, mark, f"{part['seconds']:.0f}", "\n".join(what_was_found(part)))
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 if anything failed or missed its target, 78 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.py", description=("Run the checks that need a GPU, and record their figures.")
    )
    parser.add_argument("--only", metavar="PART", nargs="+", help="parts (default: all)")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="all parts together, by their worth; needs --out"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="results of visits; the next one runs what has no result yet"
    )
    parser.add_argument(
        "--save",
        type=Path,
        default=ROOT / "benchmarks",
        metavar="FOLDER",
        help="folder of the results (default: benchmarks)",
    )
    parser.add_argument("--small", action="store_true", help="small sizes, to test that the check itself runs")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="limit of each part, in seconds (default 1800)")
    args = parser.parse_args(arguments)
    if (args.budget is None) != (args.out is None):
        parser.error("--budget and --out belong together")
    known = PARTS if args.budget is None else gpu_visit.PARTS
    args.only = args.only or list(known)
    if unknown := [name for name in args.only if name not in known]:
        parser.error(f"unknown parts: {', '.join(unknown)}; use {', '.join(known)}")
    try:
        check_device()
        if args.budget is not None:
            chosen = {name: part for name, part in gpu_visit.PARTS.items() if name in args.only}
            return gpu_visit.Visit(args.out.resolve(), args.budget).run(chosen, small=args.small)
        check_matplotlib()
        parts = {name: part for name, part in possible_parts(small=args.small).items() if name in args.only}
        if absent := [name for name in args.only if name not in parts]:
            console.print(f"skipped because this machine has one GPU: {', '.join(absent)}")
        found = run(parts, args.save.resolve(), args.limit_s, small=args.small)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return UserError.EXIT_CODE
    console.print(summary(found))
    return int(any(failed(part) for part in found.values()))


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
"""Parts of a visit to a GPU beside tests and benchmarks: ``python tools/gpu_measurements.py NAME --out FOLDER``.

``environment``: versions, imports, the copy bandwidth and the bf16 matrix rate of the card. ``profile``: a step of a 1B
model by kernel, its launches and its idle time. ``run``: corpus, training, a save and generation by the real commands.
``losses``: the losses of a short bf16 training beside those of the CPU. Each writes ``FOLDER/NAME.json``.
"""

import argparse
import importlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import train
from lightscale.runs.run_directory import RunDirectory, read_metrics, write_atomically

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "numpy", "megatron-core", "zarr", "pydantic", "fla-core", "transformers")
IMPORTS = ("lightscale.cli", "lightscale.training.train", "lightscale.data_pipeline", "megatron.core", "zarr")
STORE = ROOT.parent / "stdlib-store"
"""Tokens that came with the source (``make bundle``); without them the corpus is prepared first."""
STORE_COMMAND = (
    *("data", "prepare", "--corpus", "stdlib", "--vocab-size", "4096", "--validation", "0.02"),
    "--out",
)
"""Makes it, with a folder behind it."""
LONG_GAP_US = 20
MOST_LOSS_ERROR = 0.05
"""Nats between bf16 on a GPU and on a CPU over the first 30 steps, of losses around 8."""

Figures = dict[str, Any]


def environment(folder: Path, small: bool) -> Figures:
    """Versions; imports that fail; bytes per second of a copy and FLOP/s of a product, both directions of memory."""
    found: Figures = {"python": platform.python_version(), "cuda": torch.version.cuda, "versions": {}, "failed": {}}
    for name in PACKAGES:
        try:
            found["versions"][name] = version(name)
        except PackageNotFoundError:
            found["versions"][name] = None
    for name in IMPORTS:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever a package raises is the finding
            found["failed"][name] = repr(error)[:300]
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        numbers, width = (2**16, 256) if small else (2**30, 8192)
        source = torch.randn(numbers, device="cuda")
        target = torch.empty_like(source)
        copy_s = device_seconds(lambda: target.copy_(source))
        a, b = (torch.randn(width, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        found |= {
            "card": card.name,
            "memory_bytes": card.total_memory,
            "multiprocessors": card.multi_processor_count,
            "copy_bytes_per_s": 2 * source.nbytes / copy_s,
            "bf16_flops_per_s": 2 * width**3 / device_seconds(lambda: a @ b),
        }
    return found


def device_seconds(call: Callable[[], Any], times: int = 10) -> float:
    """Seconds of one call on the device."""
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times / 1000


def profile_step(folder: Path, small: bool) -> Figures:
    """Kernels of two steps by time; launches of a step; the share of time in which the device does nothing."""
    case = train.Case(
        config_path=str(ROOT / f"configs/{'tnl-tiny' if small else 'tnl-1b'}.toml"),
        length=256 if small else 8192,
        sequences=1,
        micro=1,
        recompute="none",
        steps=2,
    )
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as recorded:
        measured = train.measure(case)
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = sorted(recorded.key_averages(), key=lambda row: -getattr(row, key))[:50]
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in recorded.events() or ()
        if event.device_type == DeviceType.CUDA
    ]
    return {
        "measured": measured,
        "sorted_by": key,
        "kernels": [[row.key[:120], row.count, getattr(row, key)] for row in rows],
        # One step warms up.
        "launches_per_step": len(spans) / (case.steps + 1) if on_gpu else None,
        **idle(spans),
    }


def idle(spans: Iterable[tuple[float, float]]) -> Figures:
    """Of intervals in µs: the share of the time from first to last that none covers, and its long gaps."""
    merged: list[list[float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    if not merged:
        return {"idle_share": None, "long_gaps": None}
    gaps = [after[0] - before[1] for before, after in pairwise(merged)]
    whole = merged[-1][1] - merged[0][0]
    return {"idle_share": sum(gaps) / whole if whole else 0.0, "long_gaps": sum(gap > LONG_GAP_US for gap in gaps)}


def a_run(folder: Path, small: bool) -> Figures:
    """The stall of a save, tokens per second of training and of generation, by the commands that users type."""
    run, store = folder / "run", _store(folder)
    sizes = ["model.num_layers=1", "data.sequence_length=64"] if small else []
    steps = 6 if small else 40
    _lightscale(
        "train", "quickstart", "--run", str(run), f"train.steps={steps}", f"data.store={store}", *_STEADY,
        f"checkpoint.every={steps // 2}", "--processes", "1", *sizes,
    )  # fmt: skip
    text = _lightscale("generate", str(run), "--prompt", "def ", "--tokens", "16" if small else "512", "--json")
    records = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    metrics = read_metrics(RunDirectory(run).metrics)
    return {"last": metrics[-1], "saves": [row for row in metrics if "checkpoint_stall_s" in row], "generated": records}


def losses(folder: Path, small: bool) -> Figures:
    """Steps of a 160M model in bf16 on the GPU and on the CPU, from the same weights and data."""
    store = _store(folder)
    steps, sizes = (4, ["model.num_layers=1"]) if small else (30, [])
    words = [
        "tnl-160m", "model.vocab_size=4096", f"data.store={store}", "data.sequence_length=256", f"train.steps={steps}",
        "train.global_batch_size=2", "train.micro_batch_size=2", "train.precision=bf16", "train.validate_every=0",
        *_STEADY, *sizes,
    ]  # fmt: skip
    by_device: dict[str, list[float]] = {}
    for device in ("cuda" if torch.cuda.is_available() else "cpu", "cpu"):
        run = folder / f"losses-{len(by_device)}"
        _lightscale("train", *words, f"train.device={device}", "--run", str(run), "--processes", "1")
        by_device[run.name] = [row["loss"] for row in read_metrics(RunDirectory(run).metrics) if "loss" in row]
    first, second = by_device.values()
    error = max(abs(a - b) for a, b in zip(first, second, strict=True))
    return {"losses": by_device, "error": error, "failed": {} if error < MOST_LOSS_ERROR else {"losses": f"{error:g}"}}


_STEADY = ("optimizer.schedule=constant", "optimizer.warmup_steps=0")
MEASUREMENTS = {"environment": environment, "profile": profile_step, "run": a_run, "losses": losses}


def _store(folder: Path) -> Path:
    """Tokens of Python's standard library, in a vocabulary of 4,096."""
    if STORE.exists():
        return STORE
    made = folder / "store"
    if not made.exists():
        _lightscale(*STORE_COMMAND, str(made))
    return made


def _lightscale(*words: str) -> str:
    """Standard output of a command; SystemExit where it fails."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "lightscale", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"error: lightscale {' '.join(words)}: exit code {done.returncode}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 if something that must hold does not."""
    parser = argparse.ArgumentParser(description="Measure what only a GPU can show.")
    parser.add_argument("name", choices=MEASUREMENTS)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--small", action="store_true", help="sizes that take seconds")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    found = MEASUREMENTS[args.name](args.out.resolve(), args.small)
    found["seconds"] = time.monotonic() - began
    text = json.dumps(found, indent=1, default=str) + "\n"
    write_atomically(args.out / f"{args.name}.json", text)
    print(text)
    return int(bool(found.get("failed")))


if __name__ == "__main__":
    sys.exit(main())

"""Exports: peak memory and speed, beside a plain copy of the same bytes.

``run`` writes a checkpoint of random weights; then in turns its file is copied, and exported by `lightscale export` in
a process of its own. Both end when what they wrote is on disk. An export is timed from the start of its process to its
end, tokenizer and hashes included; its peak memory has what importing PyTorch takes in it.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from lightscale.config.files import load
from lightscale.config.model import ModelConfig
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer, Tokenizer
from lightscale.files import sync
from lightscale.models.accounting import parameter_shapes
from lightscale.parallel.shards import Box
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.checkpoints.directories import STATE, TENSORS, directory_name, environment, rank_stem
from lightscale.training.checkpoints.header import write_header
from lightscale.training.checkpoints.manifest import write_manifest, write_synced
from lightscale.training.checkpoints.tensor_file import write_blocks

MOST_PEAK_BYTES, LEAST_OF_COPY = 1_500_000_000, 0.5
DTYPES = ("fp32", "bf16")
_BLOCK_NUMBERS = 1 << 23
# The command, and what its process held at most: the kernel's own record, which begins with the process.
_EXPORT = """
import re, sys
from lightscale.cli import main
code = main(["export", *sys.argv[1:]])
print(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
sys.exit(code)
"""


def run(config: str, *, repeats: int, folder: Path | None) -> dict[str, Any]:
    """Medians, ratios within a turn, and whether they are what they should be; the first turn is not counted."""
    with tempfile.TemporaryDirectory(prefix="bench-export-", dir=folder) as name:
        own = Path(name)
        source = write_run(own / "run", load(config), byte_tokenizer())
        size = source.stat().st_size
        turns = [_turn(source, own) for _ in range(repeats + 1)][1:]
    figures: dict[str, Any] = {"bytes": size, "parameters": size // 4, "samples": turns}
    for key in turns[0]:
        figures[key] = statistics.median(turn[key] for turn in turns)
    figures["peak_bytes"] = max(turn[f"{dtype}_peak_bytes"] for turn in turns for dtype in DTYPES)
    figures["of_copy"] = statistics.median(turn["copy_s"] / turn["fp32_s"] for turn in turns)
    figures["targets"] = {"peak_bytes": MOST_PEAK_BYTES, "of_copy": LEAST_OF_COPY}
    figures["reached"] = figures["peak_bytes"] <= MOST_PEAK_BYTES and figures["of_copy"] >= LEAST_OF_COPY
    return figures


def _turn(source: Path, folder: Path) -> dict[str, float]:
    copied = folder / "copied"
    began = time.perf_counter()
    shutil.copyfile(source, copied)
    sync(copied)
    found: dict[str, float] = {"copy_s": time.perf_counter() - began}
    copied.unlink()
    for dtype in DTYPES:
        target = folder / dtype
        command = [sys.executable, "-c", _EXPORT, str(folder / "run"), "--to", str(target), "--dtype", dtype]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found[f"{dtype}_s"] = time.perf_counter() - began
        if done.returncode:
            raise RuntimeError(done.stderr)
        found[f"{dtype}_peak_bytes"] = int(done.stdout.split()[-1]) * 1024
        shutil.rmtree(target)
    return found


def byte_tokenizer() -> TiktokenTokenizer:
    """A token for each byte."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    return TiktokenTokenizer(
        name="bytes", pat_str="(?s:.+)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256}
    )


def write_run(path: Path, configured: RunConfig, tokenizer: Tokenizer) -> Path:
    """A run of ``configured`` with random weights; the file of its checkpoint. Nothing is built."""
    run = RunDirectory(path)
    run.create(configured)
    run.tokenizer.mkdir()
    tokenizer.save(run.tokenizer)
    directory = run.checkpoints / directory_name(0, "weights")
    directory.mkdir(parents=True)
    name = f"{rank_stem(0)}{TENSORS}"
    files = {name: write_blocks(directory / name, _random_blocks(configured.model))}
    state = f'{{"step": 0, "data": {{"tokens": 0, "fingerprint": {{"tokenizer": "{tokenizer.sha256}"}}}}}}'
    files[STATE] = write_synced(directory / STATE, state.encode())
    layout = dict.fromkeys(("tensor", "pipeline", "sequence", "data"), 1)
    facts = {"step": 0, "contents": "weights", "layout": layout, "versions": environment(), "hosts": ["here"]}
    write_manifest(directory, files, facts)
    return directory / name


def _random_blocks(model: ModelConfig) -> Iterator[memoryview]:
    boxes = [
        Box(key=f"model.{key}", shape=shape, offset=(0,) * len(shape), sizes=shape)
        for key, shape in parameter_shapes(model).items()
    ]
    yield memoryview(write_header([(box, "F32") for box in boxes]))
    # One block again and again: what the numbers are decides neither memory nor time.
    block = torch.empty(_BLOCK_NUMBERS).normal_(std=0.02)
    for box in boxes:
        left = prod(box.shape)
        while left:
            part = block[: min(left, _BLOCK_NUMBERS)]
            left -= len(part)
            yield part.view(torch.uint8).numpy().data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and where its files go."""
    parser.add_argument("--config", default="tnl-1b", help="configuration of the model (default tnl-1b)")
    parser.add_argument("--folder", type=Path, help="directory for the files (default: temporary files)")


def table(figures: dict[str, Any]) -> Table:
    """For people."""
    rows = Table("figure")
    rows.add_column("value", justify="right")
    rows.add_row("parameters, million", f"{figures['parameters'] / 1e6:.0f}")
    for key in ("copy_s", *(f"{dtype}_s" for dtype in DTYPES)):
        rows.add_row(key.replace("_s", ", s"), f"{figures[key]:.1f}")
    for dtype in DTYPES:
        rows.add_row(f"{dtype}, peak MB", f"{figures[f'{dtype}_peak_bytes'] / 1e6:.0f}")
    rows.add_row("fp32, speed of a copy", f"{figures['of_copy']:.2f} (at least {LEAST_OF_COPY})")
    rows.add_row("largest peak, MB", f"{figures['peak_bytes'] / 1e6:.0f} (at most {MOST_PEAK_BYTES / 1e6:.0f})")
    return rows

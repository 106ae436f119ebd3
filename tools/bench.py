#!/usr/bin/env python
"""Benchmarks: ``python tools/bench.py NAME [--json]``.

A benchmark that compares ways to do the same work times them in one run and lets them take turns, so that a
machine that slows down slows all of them; what counts is the ratio of the medians.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lightscale.kernels.lightning import (
    DEFAULT_CHUNK_SIZE,
    lightning_attention,
    lightning_attention_reference,
)

# Way → pass → the work, ready to run; every way has the same passes.
Ways = dict[str, dict[str, Callable[[], object]]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a benchmark found: its settings, its figures for machines, and a table of them for people."""

    settings: dict[str, Any]
    figures: dict[str, Any]
    table: Table


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One subcommand. ``run`` finds ``repeats`` among its arguments beside its own."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Report]


def lightning_arguments(parser: argparse.ArgumentParser) -> None:
    """The shape of the operator."""
    parser.add_argument("--tokens", type=positive, default=4096, help="tokens of the row (default 4096)")
    parser.add_argument("--heads", type=positive, default=8, help="heads (default 8)")
    parser.add_argument("--width", type=positive, default=64, help="width of keys and values (default 64)")
    parser.add_argument(
        "--chunk-size",
        type=positive,
        default=DEFAULT_CHUNK_SIZE,
        help=f"tokens of a chunk (default {DEFAULT_CHUNK_SIZE})",
    )


def run_lightning(args: argparse.Namespace) -> Report:
    """Lightning attention in chunks, by its recurrence under autograd, and causal softmax attention."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, args.tokens, args.heads, args.width)
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
    do = torch.randn(shape, generator=generator)
    log_decay = -(2.0 ** -torch.arange(1, args.heads + 1))
    # Softmax attention gets the layout that it is made for, (B, H, T, width).
    q_h, k_h, v_h = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v))
    do_h = do.transpose(1, 2).contiguous()
    ways: Ways = {
        "chunked": passes(
            lambda: lightning_attention(q, k, v, log_decay, chunk_size=args.chunk_size, backend="chunked")[0],
            (q, k, v),
            do,
        ),
        "naive": passes(lambda: lightning_attention_reference(q, k, v, log_decay)[0], (q, k, v), do),
        "sdpa": passes(lambda: scaled_dot_product_attention(q_h, k_h, v_h, is_causal=True), (q_h, k_h, v_h), do_h),
    }
    options = {name: getattr(args, name) for name in ("tokens", "heads", "width", "chunk_size")}
    settings = {"dtype": "float32", "rows": 1} | options
    return compare(ways, subject="chunked", settings=settings, repeats=args.repeats)


# A new benchmark is one entry here.
BENCHMARKS = {
    "lightning": Benchmark(
        summary="lightning attention on the CPU: chunked, naive recurrence, softmax attention (SDPA)",
        add_arguments=lightning_arguments,
        run=run_lightning,
    ),
}


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def passes(
    forward: Callable[[], Tensor], leaves: tuple[Tensor, ...], cotangent: Tensor
) -> dict[str, Callable[[], object]]:
    """An operator's forward alone, and its forward with its backward."""

    def forward_alone() -> Tensor:
        with torch.no_grad():
            return forward()

    return {
        "forward": forward_alone,
        "forward_backward": lambda: torch.autograd.grad(forward(), leaves, cotangent),
    }


def time_in_turns(ways: Ways, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every pass of every way, ``repeats`` times in turns, after one round that does not count."""
    samples_s: dict[str, dict[str, list[float]]] = {way: {name: [] for name in ways[way]} for way in ways}
    for repeat in range(repeats + 1):
        for way, works in ways.items():
            for name, work in works.items():
                start = time.perf_counter()
                work()
                if repeat:
                    samples_s[way][name].append(time.perf_counter() - start)
    return samples_s


def compare(ways: Ways, *, subject: str, settings: dict[str, Any], repeats: int) -> Report:
    """Medians of all ways, and how many times longer than ``subject`` the others take."""
    samples_s = time_in_turns(ways, repeats)
    median_s = {
        way: {name: statistics.median(samples) for name, samples in by_name.items()}
        for way, by_name in samples_s.items()
    }
    ratios = {
        way: {name: seconds / median_s[subject][name] for name, seconds in by_name.items()}
        for way, by_name in median_s.items()
    }
    table = Table()
    table.add_column("way")
    for name in median_s[subject]:
        table.add_column(f"{name.replace('_', ' + ')}, ms", justify="right")
        table.add_column(f"÷ {subject}", justify="right")
    for way, by_name in median_s.items():
        cells = [(f"{seconds * 1e3:.1f}", f"{ratios[way][name]:.1f}") for name, seconds in by_name.items()]
        table.add_row(way, *(cell for pair in cells for cell in pair))
    return Report(
        settings=settings | {"repeats": repeats},
        figures={"subject": subject, "median_s": median_s, "ratios": ratios, "samples_s": samples_s},
        table=table,
    )


def machine() -> dict[str, Any]:
    """What the figures depend on and their reader must know."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def cpu_model() -> str:
    """The processor's name; Linux tells it in /proc only."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark and print its report."""
    parser = argparse.ArgumentParser(prog="bench.py", description="Times of lightscale's parts, side by side.")
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, benchmark in BENCHMARKS.items():
        command = commands.add_parser(name, help=benchmark.summary, description=benchmark.summary)
        command.add_argument("--json", action="store_true", help="print one JSON object, with every sample")
        command.add_argument("--repeats", type=positive, default=5, help="turns that count (default 5)")
        command.add_argument("--threads", type=positive, help="threads of torch (default: torch's choice)")
        benchmark.add_arguments(command)
    args = parser.parse_args(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)

    report = BENCHMARKS[args.name].run(args)
    host = machine()
    if args.json:
        print(json.dumps({"benchmark": args.name, "machine": host, "settings": report.settings} | report.figures))
        return 0
    print(
        f"{args.name} on {host['cpu']}, {host['threads']} threads of {host['cores']} cores, {host['date']}, "
        f"torch {host['torch']}, python {host['python']}"
    )
    print(", ".join(f"{key} {value}" for key, value in report.settings.items()))
    Console().print(report.table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

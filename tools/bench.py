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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import bench_checkpoint
import bench_kernels
import bench_learn
import bench_loader
import bench_plot
import bench_prepare
import bench_sequence
import bench_train
import bench_tune
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from lightscale.errors import UserError
from lightscale.kernels.gla import gla, gla_reference
from lightscale.kernels.lightnet import Angles, lightnet_attention, lightnet_attention_reference
from lightscale.kernels.lightning import (
    DEFAULT_CHUNK_SIZE,
    lightning_attention,
    lightning_attention_reference,
)
from lightscale.kernels.tpe import tpe_scan, tpe_scan_reference
from lightscale.training.run_directory import write_atomically

# Way → pass → the work, ready to run.
Ways = dict[str, dict[str, Callable[[], object]]]

# What a linear mixer must reach on a CPU, forward and backward together.
LEAST_SPEEDUP = 4.0
GROWTH_AIM, GROWTH_LIMIT = 1.25, 1.5

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
# A work that took longer than this in the first round counts from there, and is not run again.
SLOW_S = 10.0


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
    run: Callable[[argparse.Namespace], Iterator[Report]]
    """Yields what is known so far, at least once: what takes long and is cut off keeps what it has."""
    threads: int | None = None
    """Threads of torch unless the command line says otherwise; None: torch's choice."""
    repeats: int = 5
    """Turns that count, unless the command line says otherwise."""
    draw: Callable[[dict[str, Any], Path], None] | None = None
    """Draws what was saved, as a PNG beside it."""


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


def run_lightning(args: argparse.Namespace) -> Iterator[Report]:
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
    yield compare(ways, subject="chunked", settings=settings, repeats=args.repeats)


@dataclass(frozen=True, kw_only=True)
class Operator:
    """The operator of a mixer, without projections."""

    inputs: Callable[[int], tuple[Tensor, ...]]
    """For a row of so many tokens; gradients are taken of those that require one."""
    fast: Callable[..., Tensor]
    """What training uses."""
    naive: Callable[..., Tensor] | None = None
    """The recurrence, one token at a time; None: there is none."""

    def forward_backward(self, form: Callable[..., Tensor], num_tokens: int, *, calls: int) -> Callable[[], object]:
        """``form`` on a row of ``num_tokens`` tokens with its backward, ``calls`` times."""
        inputs = self.inputs(num_tokens)
        leaves = tuple(x for x in inputs if x.requires_grad)
        with torch.no_grad():
            cotangent = torch.randn_like(form(*inputs))

        def work() -> None:
            for _ in range(calls):
                torch.autograd.grad(form(*inputs), leaves, cotangent)

        return work


class Inputs:
    """Random inputs of the operators, for one row."""

    def __init__(self, num_heads: int, width: int) -> None:
        self.num_heads, self.width = num_heads, width
        self._generator = torch.Generator().manual_seed(0)

    def _leaf(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).requires_grad_()

    def plain(self, num_tokens: int, *, key_width: int | None = None) -> tuple[Tensor, ...]:
        """q, k, v."""
        q, k = (self._leaf(1, num_tokens, self.num_heads, key_width or self.width) for _ in range(2))
        return q, k, self._leaf(1, num_tokens, self.num_heads, self.width)

    def doubled_keys(self, num_tokens: int) -> tuple[Tensor, ...]:
        """q, k, v as after LRPE."""
        return self.plain(num_tokens, key_width=2 * self.width)

    def fixed_decay(self, num_tokens: int) -> tuple[Tensor, ...]:
        """q, k, v and a decay per head."""
        return *self.plain(num_tokens), -(2.0 ** -torch.arange(1, self.num_heads + 1))

    def data_dependent_decay(self, num_tokens: int) -> tuple[Tensor, ...]:
        """q, k, v and a decay per token and channel, k what it leaves."""
        q, _, v = self.plain(num_tokens)
        log_decay = logsigmoid(torch.randn(q.shape, generator=self._generator))
        k = -torch.expm1(log_decay)
        return q, k.requires_grad_(), v, log_decay.requires_grad_()

    def angles(self, num_tokens: int) -> tuple[Tensor, ...]:
        """q, k, v, and theta and positions of LRPE."""
        theta = torch.logspace(0, -4, self.num_heads * self.width).view(self.num_heads, self.width)
        return *self.plain(num_tokens), theta, torch.arange(num_tokens)[None]

    def stream(self, num_tokens: int) -> tuple[Tensor, ...]:
        """x, decays with time scales from 1 to 4096 tokens, and γ."""
        channels = self.num_heads * self.width
        log_decay = -torch.logspace(0, -12, self.width, base=2)
        return self._leaf(1, num_tokens, channels), log_decay.requires_grad_(), self._leaf(channels, self.width)

    def heads_first(self, num_tokens: int) -> tuple[Tensor, ...]:
        """q, k, v in the layout that softmax attention is made for, (B, H, T, width)."""
        q, k, v = (self._leaf(1, self.num_heads, num_tokens, self.width) for _ in range(3))
        return q, k, v


def operators(num_heads: int, width: int) -> dict[str, Operator]:
    """By mixer. ``tpe`` is no mixer, but a scan over all channels, once in a model."""
    inputs = Inputs(num_heads, width)
    return {
        "tnl": Operator(
            inputs=inputs.fixed_decay,
            fast=lambda *x: lightning_attention(*x, backend="chunked")[0],
            naive=lambda *x: lightning_attention_reference(*x)[0],
        ),
        "cosformer2": Operator(
            inputs=inputs.doubled_keys,
            fast=lambda *x: lightning_attention(*x, backend="chunked")[0],
            naive=lambda q, k, v: lightning_attention_reference(q, k, v, None)[0],
        ),
        "hgrn2": Operator(
            inputs=inputs.data_dependent_decay,
            fast=lambda *x: gla(*x, backend="chunked")[0],
            naive=lambda *x: gla_reference(*x)[0],
        ),
        "lightnet": Operator(
            inputs=inputs.angles,
            fast=lambda q, k, v, *angles: lightnet_attention(q, k, v, angles=Angles(*angles), backend="chunked")[0],
            naive=lambda q, k, v, *angles: lightnet_attention_reference(q, k, v, angles=Angles(*angles))[0],
        ),
        "tpe": Operator(
            inputs=inputs.stream,
            fast=lambda *x: tpe_scan(*x, backend="chunked")[0],
            naive=lambda *x: tpe_scan_reference(*x)[0],
        ),
        "llama": Operator(
            inputs=inputs.heads_first,
            fast=lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
        ),
    }


def mixers_arguments(parser: argparse.ArgumentParser) -> None:
    """The shape of the operators, and what tells the time."""
    parser.add_argument(
        "--tokens",
        type=positive,
        nargs="+",
        default=[2048, 8192, 32768],
        help="tokens of the row; the recurrence runs at the smallest (default 2048 8192 32768)",
    )
    parser.add_argument("--heads", type=positive, default=4, help="heads (default 4)")
    parser.add_argument("--width", type=positive, default=64, help="width of a head (default 64)")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="cpu",
        help="cpu: seconds of this process's threads, which others hardly disturb (default cpu)",
    )


def run_mixers(args: argparse.Namespace) -> Iterator[Report]:
    """Every mixer's operator at several lengths, and its recurrence at the smallest; softmax attention beside them."""
    lengths = sorted(set(args.tokens))
    # About the same work in a sample of every length.
    calls = {n: lengths[-1] // n for n in lengths}
    ways: Ways = {}
    for name, operator in operators(args.heads, args.width).items():
        ways[name] = {str(n): operator.forward_backward(operator.fast, n, calls=calls[n]) for n in lengths}
        if operator.naive is not None:
            ways[name]["naive"] = operator.forward_backward(operator.naive, lengths[0], calls=1)
    samples_s = time_in_turns(ways, args.repeats, clock=CLOCKS[args.clock])
    tokens = {str(n): calls[n] * n for n in lengths} | {"naive": lengths[0]}
    mixers = {
        name: scaling({work: statistics.median(taken) / tokens[work] for work, taken in samples.items()}, lengths)
        for name, samples in samples_s.items()
    }
    options = {name: getattr(args, name) for name in ("heads", "width", "clock", "repeats")}
    yield Report(
        settings={"dtype": "float32", "rows": 1, "tokens": lengths} | options,
        figures={
            "targets": {"speedup": LEAST_SPEEDUP, "growth_aim": GROWTH_AIM, "growth_limit": GROWTH_LIMIT},
            "mixers": mixers,
            "samples_s": samples_s,
        },
        table=mixers_table(mixers, lengths),
    )


def scaling(s_per_token: dict[str, float], lengths: list[int]) -> dict[str, Any]:
    """How a mixer's time per token grows with the length, and how many times its recurrence's it is."""
    found: dict[str, Any] = {"s_per_token": s_per_token}
    found["growth"] = s_per_token[str(lengths[-1])] / s_per_token[str(lengths[0])]
    if "naive" in s_per_token:
        found["speedup"] = s_per_token["naive"] / s_per_token[str(lengths[0])]
        found["reached"] = found["speedup"] >= LEAST_SPEEDUP and found["growth"] <= GROWTH_LIMIT
    return found


def mixers_table(mixers: dict[str, dict[str, Any]], lengths: list[int]) -> Table:
    """One line for each mixer."""
    table = Table(
        title="forward + backward, µs per token",
        caption=f"speed-up: of the fast form over the recurrence at {lengths[0]} tokens, at least {LEAST_SPEEDUP:g}\n"
        f"growth: {lengths[-1]} tokens beside {lengths[0]}, aim {GROWTH_AIM}, limit {GROWTH_LIMIT}",
    )
    table.add_column("mixer")
    for heading in ("naive", *map(str, lengths), "speed-up", "growth"):
        table.add_column(heading, justify="right")
    for name, found in mixers.items():
        seconds = found["s_per_token"]
        times = [f"{seconds[work] * 1e6:.1f}" if work in seconds else "" for work in ("naive", *map(str, lengths))]
        speedup = f"{found['speedup']:.1f}" if "speedup" in found else ""
        mark = "" if found.get("reached", True) else " [red]missed[/red]"
        table.add_row(name, *times, speedup, f"{found['growth']:.2f}{mark}")
    return table


def run_kernels(args: argparse.Namespace) -> Iterator[Report]:
    """The Triton kernels on a GPU; elsewhere their chunked forms, at sizes for a CPU."""
    if args.tune:
        bench_tune.check_device()
    bench = bench_kernels.Bench.here(args.repeats)
    settings = {"repeats": args.repeats}
    figures: dict[str, Any] = {}
    for figures in bench_kernels.run(bench, args.shapes):
        yield Report(settings=settings, figures=figures, table=bench_kernels.table(figures))
    for tuned in bench_tune.tune(bench) if args.tune else ():
        table = bench_kernels.table(figures)
        table.caption = "\n".join([str(table.caption), *bench_tune.said(tuned)])
        yield Report(settings=settings, figures=figures | {"tiles": tuned}, table=table)


def run_train(args: argparse.Namespace) -> Iterator[Report]:
    """Whole training steps over growing lengths."""
    for figures in bench_train.run_arguments(args):
        settings = {name: figures[name] for name in ("config", "tokens_per_step")}
        others = {name: value for name, value in figures.items() if name not in settings}
        yield Report(settings=settings, figures=others, table=bench_train.table(figures))


def run_learn(args: argparse.Namespace) -> Iterator[Report]:
    """A short run of training."""
    figures = bench_learn.run(args.config, steps=args.steps, store=args.store, overrides=args.overrides)
    settings = {name: getattr(args, name) for name in ("config", "steps", "overrides")}
    yield Report(settings=settings, figures=figures, table=bench_learn.table(figures))


def run_sequence(args: argparse.Namespace) -> Iterator[Report]:
    """What the exchanges of states send, against the formulas, and for how long they are waited for."""
    settings = bench_sequence.settings_of(args)
    figures = bench_sequence.run(settings)
    yield Report(settings=asdict(settings), figures=figures, table=bench_sequence.table(figures))


def run_checkpoint(args: argparse.Namespace) -> Iterator[Report]:
    """What a step waits for when the run is saved."""
    settings = bench_checkpoint.Settings(
        ranks=args.ranks, state_bytes=round(args.state_mb * 1e6), repeats=args.repeats, folder=args.folder
    )
    figures = bench_checkpoint.run(settings)
    yield Report(settings=figures.pop("settings"), figures=figures, table=bench_checkpoint.table(figures))


def data_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured of the corpus pipeline."""
    parser.add_argument("--documents", type=Path, help="English jsonl (default: pages of Debian packages)")
    parser.add_argument("--only", choices=("loader", "prepare"), help="one half (default: both)")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peaks of memory, which take longest")


def run_data(args: argparse.Namespace) -> Iterator[Report]:
    """The loader beside a raw copy, zarr and other loaders; the whole pipeline beside datatrove."""
    figures: dict[str, Any] = {}
    if args.only != "prepare":
        figures["loader"] = bench_loader.run(repeats=args.repeats)
    if args.only != "loader":
        figures["prepare"] = bench_prepare.run(args.documents, repeats=args.repeats, memory=not args.no_memory)
    table = Table("figure")
    table.add_column("value", justify="right")
    for name, value in _flat(figures):
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    yield Report(settings={"repeats": args.repeats}, figures=figures, table=table)


def _flat(nested: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif not key.endswith("samples_s"):
            yield f"{prefix}{key}", value


# A new benchmark is one entry here.
BENCHMARKS = {
    "lightning": Benchmark(
        summary="lightning attention on the CPU: chunked, naive recurrence, softmax attention (SDPA)",
        add_arguments=lightning_arguments,
        run=run_lightning,
    ),
    "mixers": Benchmark(
        summary="the operators of all mixers on the CPU: chunked at growing lengths, naive recurrence, SDPA",
        add_arguments=mixers_arguments,
        run=run_mixers,
        # Two threads that wait for each other are slowed many times over by a third that wants a core.
        threads=1,
    ),
    "kernels": Benchmark(
        summary="Triton kernels beside fla-core's and PyTorch's flash attention, and their floor (on a GPU)",
        add_arguments=bench_kernels.add_arguments,
        run=run_kernels,
        repeats=10,
        draw=bench_plot.draw,
    ),
    "train": Benchmark(
        summary="tokens/s, MFU and memory of whole training steps over growing lengths, on one device",
        add_arguments=bench_train.add_arguments,
        run=run_train,
        # A step of half a million tokens takes seconds, and there are nine lengths.
        repeats=2,
    ),
    "learn": Benchmark(
        summary="a short training run by `lightscale train`: losses, tokens/s",
        add_arguments=bench_learn.add_arguments,
        run=run_learn,
    ),
    "sequence": Benchmark(
        summary="exchanges of states between sequence ranks: calls, bytes, and time waited for, on CPU processes",
        add_arguments=bench_sequence.add_arguments,
        run=run_sequence,
        threads=1,
    ),
    "checkpoint": Benchmark(
        summary="saving on CPU processes: what a step waits for, beside a plain copy and a synchronous save",
        add_arguments=bench_checkpoint.add_arguments,
        run=run_checkpoint,
        threads=1,
    ),
    "data": Benchmark(
        summary="corpus pipeline: loader beside memmap, zarr, Megatron; preparation beside datatrove; memory",
        add_arguments=data_arguments,
        run=run_data,
        threads=1,
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


def time_in_turns(
    ways: Ways, repeats: int, *, clock: Callable[[], float] = time.perf_counter
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every pass of every way, ``repeats`` times in turns, after one round that does not count.

    A pass of more than ``SLOW_S`` is the exception: its one sample is that of the first round.
    """
    samples_s: dict[str, dict[str, list[float]]] = {way: {name: [] for name in ways[way]} for way in ways}
    slow = set()
    for repeat in range(repeats + 1):
        for way, works in ways.items():
            for name, work in works.items():
                if (way, name) in slow:
                    continue
                start = clock()
                work()
                elapsed_s = clock() - start
                if repeat == 0 and elapsed_s > SLOW_S:
                    slow.add((way, name))
                if repeat or (way, name) in slow:
                    samples_s[way][name].append(elapsed_s)
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


def saved_as(folder: Path, name: str, host: dict[str, Any]) -> Path:
    """The file of a benchmark on this device and day.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        raise UserError(f"--save {folder}: no such folder")
    device = torch.cuda.get_device_name().replace(" ", "-") if torch.cuda.is_available() else "cpu"
    return folder / f"{name}_{device}_{host['date']}.json"


def finish(path: Path, figures: dict[str, Any]) -> None:
    """Write everything, and its picture."""
    write_atomically(path, json.dumps(figures | {"complete": True}, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)
    if (draw := BENCHMARKS[figures["benchmark"]].draw) is not None:
        draw(figures, path.with_suffix(".png"))
        print(f"drawn to {path.with_suffix('.png')}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark and print its report."""
    parser = argparse.ArgumentParser(prog="bench.py", description="Times of lightscale's parts, side by side.")
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, benchmark in BENCHMARKS.items():
        command = commands.add_parser(name, help=benchmark.summary, description=benchmark.summary)
        command.add_argument("--json", action="store_true", help="print one JSON object, with every sample")
        pictured = " and draw it" if benchmark.draw else ""
        command.add_argument(
            "--save", type=Path, metavar="FOLDER", help=f"also write that object to a file in FOLDER{pictured}"
        )
        command.add_argument(
            "--repeats",
            type=positive,
            default=benchmark.repeats,
            help=f"turns that count (default {benchmark.repeats})",
        )
        command.add_argument(
            "--threads",
            type=positive,
            default=benchmark.threads,
            help=f"threads of torch (default: {benchmark.threads or 'torch chooses'})",
        )
        benchmark.add_arguments(command)
    args = parser.parse_args(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)

    host = machine()
    figures: dict[str, Any] = {}
    try:
        path = None if args.save is None else saved_as(args.save, args.name, host)
        if path is not None and BENCHMARKS[args.name].draw is not None:
            bench_plot.check_matplotlib()
        for report in BENCHMARKS[args.name].run(args):
            figures = {"benchmark": args.name, "machine": host, "settings": report.settings} | report.figures
            if path is not None:
                write_atomically(path, json.dumps(figures | {"complete": False}, indent=1) + "\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return UserError.EXIT_CODE
    if path is not None:
        finish(path, figures)
    if args.json:
        print(json.dumps(figures))
        return 0
    print(
        f"{args.name} on {host['cpu']}, {host['threads']} threads of {host['cores']} cores, {host['date']}, "
        f"torch {host['torch']}, python {host['python']}"
    )
    print(", ".join(f"{key} {value}" for key, value in report.settings.items()))
    Console(width=None if sys.stdout.isatty() else 140).print(report.table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

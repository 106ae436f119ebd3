#!/usr/bin/env python
"""Benchmarks: ``python tools/bench.py NAME [--json]``; each lives in a file beside this one."""

import argparse
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import plot_kernels
from benchmarks import (
    checkpoint,
    cpu_training,
    evaluate,
    evaluation_memory,
    exports,
    gpu_kernels,
    lion,
    operators,
    optimizers,
    scans,
    sequence,
    start,
    train,
    tune,
)
from benchmarks.corpora import dedup, loader, preparation_costs, prepare, prepare_restart
from benchmarks.learning import (
    answers,
    convert,
    copying,
    digits,
    distill,
    fp8,
    learn,
    mup,
    pathfinder,
    trained_optimizers,
)
from benchmarks.turns import BenchmarkReport, positive
from cuda_twin.installation import NOTE, in_twin
from lightscale.errors import UserError
from lightscale.runs.run_directory import write_atomically


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One subcommand. ``run`` finds ``repeats`` among its arguments beside its own."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Iterator[BenchmarkReport]]
    """Yields what is known so far, at least once: what takes long and is cut off keeps what it has."""
    threads: int | None = None
    """Threads of torch unless the command line says otherwise; None: torch's choice."""
    repeats: int = 5
    """Turns that count, unless the command line says otherwise."""
    draw: Callable[[dict[str, Any], Path], None] | None = None
    """Draws what was saved, as a PNG beside it."""


def run_kernels(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """The Triton kernels on a GPU; elsewhere their chunked forms, at sizes for a CPU."""
    if args.tune:
        tune.check_device()
    bench = gpu_kernels.Bench.here(args.repeats, small=args.small)
    settings = {"repeats": args.repeats, "small": args.small}
    figures: dict[str, Any] = {}
    for figures in gpu_kernels.run(bench, args.shapes):
        yield BenchmarkReport(settings=settings, figures=figures, table=gpu_kernels.table(figures))
    for tuned in tune.tune(bench) if args.tune else ():
        table = gpu_kernels.table(figures)
        table.caption = "\n".join([str(table.caption), *tune.said(tuned)])
        yield BenchmarkReport(settings=settings, figures=figures | {"tiles": tuned}, table=table)


def run_train(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """Whole training steps over growing lengths."""
    for figures in train.run_arguments(args):
        settings = {name: figures[name] for name in ("config", "tokens_per_step")}
        others = {name: value for name, value in figures.items() if name not in settings}
        yield BenchmarkReport(settings=settings, figures=others, table=train.table(figures))


def run_train_fp8(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """Whole training steps in bf16, and with products in 8 bits."""
    settings = {name: getattr(args, name) for name in ("config", "length", "tokens_per_step", "repeats")}
    for figures in train.run_fp8(args):
        yield BenchmarkReport(settings=settings, figures=figures, table=train.fp8_table(figures))


def run_learn(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """A short run of training."""
    figures = learn.run(args.config, steps=args.steps, store=args.store, overrides=args.overrides)
    settings = {name: getattr(args, name) for name in ("config", "steps", "overrides")}
    yield BenchmarkReport(settings=settings, figures=figures, table=learn.table(figures))


def run_start(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """CPU time of starts."""
    figures = start.run(args.ranks, repeats=args.repeats, store=args.store)
    settings = {"config": start.CONFIG, "ranks": args.ranks, "repeats": args.repeats}
    yield BenchmarkReport(settings=settings, figures=figures, table=start.table(figures))


def run_sequence(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """What the exchanges of states send, against the formulas, and for how long they are waited for."""
    settings = sequence.settings_of(args)
    figures = sequence.run(settings)
    yield BenchmarkReport(settings=asdict(settings), figures=figures, table=sequence.table(figures))


def run_checkpoint(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """What a step waits for when the run is saved."""
    settings = checkpoint.CheckpointSettings(
        ranks=args.ranks, state_bytes=round(args.state_mb * 1e6), repeats=args.repeats, folder=args.folder
    )
    figures = checkpoint.run(settings)
    yield BenchmarkReport(settings=figures.pop("settings"), figures=figures, table=checkpoint.table(figures))


def run_convert(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """A LLaMA that becomes linear beside linear models from nothing."""
    settings = {name: getattr(args, name) for name in ("mixers", "source_steps", "steps", "repeats")}
    for figures in convert.run(args):
        yield BenchmarkReport(settings=settings, figures=figures, table=convert.table(figures))


def run_distill(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """A LLaMA that becomes a hybrid, with and without distillation."""
    settings = {name: getattr(args, name) for name in ("tokenizer", "mixer", "source_steps", "steps", "shares")}
    for figures in distill.run(args):
        yield BenchmarkReport(settings=settings, figures=figures, table=distill.table(figures))


def run_answers(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """A model that answers, by all weights and by LoRA."""
    names = ("talks", "held_out", "base_steps", "steps", "rate", "lora_steps", "lora_rate")
    settings = {name: getattr(args, name) for name in names}
    for figures in answers.run(args):
        yield BenchmarkReport(settings=settings, figures=figures, table=answers.table(figures))


def run_digits(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """Classifiers of images."""
    settings = {name: getattr(args, name) for name in ("steps", "repeats")}
    for figures in digits.classify(args):
        yield BenchmarkReport(settings=settings, figures=figures, table=digits.classified_table(figures))


def run_pathfinder(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """A classifier of paths."""
    settings = {name: getattr(args, name) for name in ("first_steps", "documents", "held_out", "overrides")}
    for figures in pathfinder.train(args):
        yield BenchmarkReport(settings=settings, figures=figures, table=pathfinder.table(figures))


def run_drawn_digits(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """Diffusion transformers with mixers of one scan and of two."""
    names = ("steps", "judge_steps", "width", "layers", "count", "draw_steps", "guidance")
    settings = {name: getattr(args, name) for name in names}
    for figures in digits.draw_digits(args):
        yield BenchmarkReport(settings=settings, figures=figures, table=digits.drawn_table(figures))


def run_copying(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """Accuracies of the copying task over steps."""
    settings = {name: getattr(args, name) for name in ("lengths", "models", "seed", "repeats")}
    for figures in copying.run(args):
        yield BenchmarkReport(settings=settings, figures=figures, table=copying.table(figures))


def run_exports(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """Memory and speed of `lightscale export`."""
    figures = exports.run(args.config, repeats=args.repeats, folder=args.folder)
    settings = {"config": args.config, "repeats": args.repeats}
    yield BenchmarkReport(settings=settings, figures=figures, table=exports.table(figures))


def run_evaluation_memory(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """Peak memory of stateful perplexity at two lengths."""
    settings = {"mixers": args.mixers, "row_tokens": args.row_tokens}
    for figures in evaluation_memory.run(args.mixers, row_tokens=args.row_tokens):
        yield BenchmarkReport(settings=settings, figures=figures, table=evaluation_memory.table(figures))


def run_evaluate(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """Requests per second of evaluation, side by side."""
    for figures in evaluate.run_arguments(args):
        settings = evaluate.SIZE | {"questions": args.questions, "repeats": args.repeats}
        yield BenchmarkReport(settings=settings, figures=figures, table=evaluate.table(figures))


def run_dedup(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """Deduplication over growing corpora."""
    for figures in dedup.run(args.documents, args.repeats):
        settings = {"bands": dedup.NUM_BANDS, "repeats": args.repeats}
        yield BenchmarkReport(settings=settings, figures=figures, table=dedup.table(figures))


def run_preparation_costs(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """What a preparation costs beside its texts."""
    for figures in preparation_costs.run(args.units, args.repeats):
        settings = {"units": args.units, "repeats": args.repeats}
        yield BenchmarkReport(settings=settings, figures=figures, table=preparation_costs.table(figures))


def run_prepare_restart(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """What a preparation unpacks again, beside what it prepares."""
    for figures in prepare_restart.run(args.documents, repeats=args.repeats, tokenizer=args.tokenizer):
        settings = {"tokenizer": args.tokenizer, "repeats": args.repeats}
        yield BenchmarkReport(settings=settings, figures=figures, table=prepare_restart.table(figures))


def data_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured of the corpus pipeline."""
    parser.add_argument("--documents", type=Path, help="English jsonl (default: pages of Debian packages)")
    parser.add_argument("--only", choices=("loader", "prepare"), help="one half (default: both)")
    parser.add_argument("--no-memory", action="store_true", help="skip the peak memory, the slowest part")


def run_data(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """The loader beside a raw copy, zarr and other loaders; the whole pipeline beside datatrove."""
    figures: dict[str, Any] = {}
    if args.only != "prepare":
        figures["loader"] = loader.run(repeats=args.repeats)
    if args.only != "loader":
        figures["prepare"] = prepare.run(args.documents, repeats=args.repeats, memory=not args.no_memory)
    table = Table("figure")
    table.add_column("value", justify="right")
    for name, value in _flat(figures):
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    yield BenchmarkReport(settings={"repeats": args.repeats}, figures=figures, table=table)


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
        add_arguments=operators.lightning_arguments,
        run=operators.run_lightning,
    ),
    "mixers": Benchmark(
        summary="the operators of all mixers on the CPU: chunked at growing lengths, naive recurrence, SDPA",
        add_arguments=operators.mixers_arguments,
        run=operators.run_mixers,
        # Two threads that wait for each other are slowed many times over by a third that wants a core.
        threads=1,
    ),
    "lion": Benchmark(
        summary="LION's operator on the CPU: time per token at two lengths, beside the masked full matrix",
        add_arguments=lion.add_arguments,
        run=lion.run,
        threads=1,
        repeats=3,
    ),
    "optimizers": Benchmark(
        summary="steps of every optimizer on the CPU, in time, and the bytes of its state per parameter",
        add_arguments=optimizers.add_arguments,
        run=optimizers.run,
        threads=1,
    ),
    "copying": Benchmark(
        summary="the copying task, learned by both forms of CausalRN, a transformer and a linear transformer",
        add_arguments=copying.add_arguments,
        run=run_copying,
        threads=1,
        repeats=3,
        draw=copying.draw,
    ),
    "kernels": Benchmark(
        summary="Triton kernels compared with fla-core, PyTorch's flash attention and their lower bound (on a GPU)",
        add_arguments=gpu_kernels.add_arguments,
        run=run_kernels,
        repeats=10,
        draw=plot_kernels.draw,
    ),
    "scans": Benchmark(
        summary="whole documents read by one scan and by two, forward and backward, beside plain PyTorch",
        add_arguments=scans.add_arguments,
        run=scans.run,
        threads=1,
        draw=scans.draw,
    ),
    "train": Benchmark(
        summary="tokens/s, MFU and memory of whole training steps over growing lengths, on one device",
        add_arguments=train.add_arguments,
        run=run_train,
        # A step of half a million tokens takes seconds, and there are nine lengths.
        repeats=2,
    ),
    "train-fp8": Benchmark(
        summary="tokens/s and memory of whole training steps with train.fp8, beside the same without, on one device",
        add_arguments=train.fp8_arguments,
        run=run_train_fp8,
        repeats=3,
    ),
    "cpu-training": Benchmark(
        summary="training steps of small models on one thread, tokens per CPU second, beside transformers' LLaMA",
        add_arguments=cpu_training.add_arguments,
        run=cpu_training.run,
        threads=1,
    ),
    "learn": Benchmark(
        summary="a short training run by `lightscale train`: losses, tokens/s",
        add_arguments=learn.add_arguments,
        run=run_learn,
    ),
    "start": Benchmark(
        summary="CPU time of starting a run of one step, all processes together",
        add_arguments=start.add_arguments,
        run=run_start,
        repeats=3,
    ),
    "sequence": Benchmark(
        summary="exchanges of states between sequence ranks: calls, bytes and waiting time, on CPU processes",
        add_arguments=sequence.add_arguments,
        run=run_sequence,
        threads=1,
    ),
    "checkpoint": Benchmark(
        summary="saving on CPU processes: waiting time of a step, compared with a plain copy and a synchronous save",
        add_arguments=checkpoint.add_arguments,
        run=run_checkpoint,
        threads=1,
    ),
    "convert": Benchmark(
        summary=(
            "a LLaMA converted to a linear model by train.init_from, compared with linear models from scratch, at "
            "equal tokens"
        ),
        add_arguments=convert.add_arguments,
        run=run_convert,
        repeats=1,
        draw=convert.draw,
    ),
    "distill": Benchmark(
        summary="a LLaMA that becomes a hybrid by distillation, beside conversion alone, at shares of its tokens",
        add_arguments=distill.add_arguments,
        run=run_distill,
        repeats=1,
        draw=distill.draw,
    ),
    "mup": Benchmark(
        summary="the best learning rate of three widths, with µP and without it",
        add_arguments=mup.add_arguments,
        run=mup.run,
        threads=1,
        repeats=2,
        draw=mup.draw,
    ),
    "optimizers-trained": Benchmark(
        summary="optimizers and schedules on models of three mixers, at equal tokens and tuned rates, three seeds",
        add_arguments=trained_optimizers.add_arguments,
        run=trained_optimizers.run,
        threads=1,
        repeats=1,
        draw=trained_optimizers.draw,
    ),
    "fp8": Benchmark(
        summary="losses of a small model trained in bf16, with and without simulated products in 8 bits",
        add_arguments=fp8.add_arguments,
        run=fp8.run,
        threads=1,
    ),
    "answers": Benchmark(
        summary="a small base that is fine-tuned on conversations, by all weights and by LoRA: its right answers",
        add_arguments=answers.add_arguments,
        run=run_answers,
        repeats=1,
        draw=answers.draw,
    ),
    "digits": Benchmark(
        summary="digits of 8 x 8 pixels, classified by four mixers: accuracies, and curves over resolution",
        add_arguments=digits.add_classify_arguments,
        run=run_digits,
        # Each is a seed.
        repeats=3,
        draw=digits.draw,
    ),
    "drawn-digits": Benchmark(
        summary="digits drawn by diffusion transformers, with mixers of one scan, of two, and softmax attention",
        add_arguments=digits.add_draw_arguments,
        run=run_drawn_digits,
        repeats=1,
    ),
    "pathfinder": Benchmark(
        summary="Pathfinder at 32 x 32 pixels by LION-S: accuracies on held-out images of each length, over the steps",
        add_arguments=pathfinder.add_arguments,
        run=run_pathfinder,
        repeats=1,
        draw=pathfinder.draw,
    ),
    "export": Benchmark(
        summary="`lightscale export` of random weights: peak memory, and speed beside a plain copy of the bytes",
        add_arguments=exports.add_arguments,
        run=run_exports,
        # Gigabytes are written in each turn.
        repeats=3,
    ),
    "evaluation-memory": Benchmark(
        summary="stateful perplexity of one document: peak memory at 1M tokens beside that at 64K",
        add_arguments=evaluation_memory.add_arguments,
        run=run_evaluation_memory,
        repeats=1,
    ),
    "evaluate": Benchmark(
        summary="evaluation: packed rows beside padded, prefixes kept or not, ours beside lm-eval's hf class",
        add_arguments=evaluate.add_arguments,
        run=run_evaluate,
        threads=1,
        repeats=3,
    ),
    "dedup": Benchmark(
        summary="duplicates among 100 thousand to 10 million documents: CPU time, files opened, bytes read for each",
        add_arguments=dedup.add_arguments,
        run=run_dedup,
        threads=1,
        repeats=3,
    ),
    "preparation-costs": Benchmark(
        summary="fixed costs of a preparation, as used by `data plan --hosts`: per unit, task and file",
        add_arguments=preparation_costs.add_arguments,
        run=run_preparation_costs,
        threads=1,
        repeats=3,
    ),
    "prepare-restart": Benchmark(
        summary=(
            "a preparation restarted inside a compressed file of one piece: unpacking the skipped part, and preparing"
        ),
        add_arguments=prepare_restart.add_arguments,
        run=run_prepare_restart,
        threads=1,
        repeats=3,
    ),
    "data": Benchmark(
        summary="corpus pipeline: loader beside memmap, zarr, Megatron; preparation beside datatrove; memory",
        add_arguments=data_arguments,
        run=run_data,
        threads=1,
    ),
}


def machine() -> dict[str, Any]:
    """What the figures depend on and their reader must know."""
    note = {"note": NOTE} if in_twin() else {}
    return note | {
        "gpus": gpus(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def gpus() -> str:
    """Those of this machine, as the driver names them."""
    if not torch.cuda.is_available():
        return "none"
    names = Counter(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    return ", ".join(f"{count} x {name}" for name, count in names.items())


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
    """Write everything, and its picture where matplotlib is installed; a machine with GPUs may lack it."""
    write_atomically(path, json.dumps(figures | {"complete": True}, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)
    if (draw := BENCHMARKS[figures["benchmark"]].draw) is None:
        return
    if find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed; use `pip install matplotlib`", file=sys.stderr)
    else:
        draw(figures, path.with_suffix(".png"))
        print(f"drawn to {path.with_suffix('.png')}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark and print its report."""
    parser = argparse.ArgumentParser(prog="bench.py", description="Benchmarks of the parts of lightscale.")
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
            help=f"number of measured turns (default {benchmark.repeats})",
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
        # Some benchmarks work in a folder of their own.
        path = None if args.save is None else saved_as(args.save, args.name, host).resolve()
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
    if torch.cuda.is_available():
        print(f"GPUs: {host['gpus']}. {host.get('note', '')}".strip())
    print(", ".join(f"{key} {value}" for key, value in report.settings.items()))
    Console(width=None if sys.stdout.isatty() else 140).print(report.table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Training steps on one thread of a CPU: tokens per CPU second of small models, beside transformers' LLaMA.

Every step is complete: forward, backward, norm and clipping of the gradients, AdamW. transformers' LLaMA has the same
shape, SDPA and PyTorch's fused AdamW. Each model has a process of its own, as its users have, and its allocator as they
have it; the processes take turns, on random tokens.

What is reachable is measured beside it: the share of a step that is spent in matrix products and in PyTorch's SDPA,
which no change of ours makes faster. A model whose other work cost nothing would be as many times as fast as
transformers' LLaMA as its column "products alone" says. Lines "by MKL" are the same steps with the products that
PyTorch takes by itself, in place of those that a run on CPUs chooses.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.train import random_batches
from benchmarks.turns import BenchmarkReport, positive
from lightscale.config.files import load
from lightscale.config.model import ModelConfig
from lightscale.config.schema import RunConfig
from lightscale.parallel.device.products import use_mkl_products
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.training.build import build_engine

MODELS = ("llama", "tnl", "hgrn2", "lightnet")
OTHER, BY_MKL = "transformers LLaMA", ", by MKL"
SHORT, LONG = 512, 8192
# 2048 tokens, the step of configs/recipe/first-run.toml; at least one row.
STEP_TOKENS = 2048
TARGETS = {SHORT: dict.fromkeys(MODELS, 1.1), LONG: {"llama": 1.5, "tnl": 3.5, "hgrn2": 3.5, "lightnet": 3.5}}
"""Least tokens per CPU second, as multiples of transformers' LLaMA."""

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "_scaled_dot_product_flash_attention_for_cpu"}
"""Operations of PyTorch that multiply matrices, without the marks of those in place and of backward passes."""

Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One measured length."""

    size: str
    """A file of configs/size."""
    length: int

    def config(self, model: str) -> RunConfig:
        """The run of ``model``, with the vocabulary of the recipe for CPUs."""
        rows = max(1, STEP_TOKENS // self.length)
        overrides = [
            "data.store=random",
            "train.validate_every=0",
            f"data.sequence_length={self.length}",
            f"train.global_batch_size={rows}",
            f"train.micro_batch_size={rows}",
        ]
        root = Path(__file__).resolve().parents[2] / "configs"
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            parts = [root / "arch" / f"{model}.toml", root / "size" / f"{self.size}.toml"]
            parts.append(root / "recipe" / "first-run.toml")
            file.write(f"extends = {[str(part) for part in parts]}\n")
            file.flush()
            return load(Path(file.name), overrides)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Lengths, models and size."""
    parser.add_argument("--lengths", type=positive, nargs="+", default=[SHORT, LONG], help="tokens (default 512 8192)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--size", default="3M", help="file of configs/size (default 3M)")


def run(args: argparse.Namespace) -> Iterator[BenchmarkReport]:
    """The report so far after every length."""
    settings = {name: getattr(args, name) for name in ("size", "lengths", "models", "repeats")}
    lines: list[dict[str, Any]] = []
    for length in args.lengths:
        lines += measure(Shape(size=args.size, length=length), args.models, args.repeats)
        figures = {"lines": lines.copy(), "targets": TARGETS, "verdict": {"missed": missed(lines, args.size)}}
        yield BenchmarkReport(settings=settings, figures=figures, table=table(figures))


class Worker:
    """A process with one model, which makes a step when it is asked to."""

    def __init__(self, model: str, shape: Shape) -> None:
        # Not forked: a copy of this process would have its allocator's state and PyTorch's threads.
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, model, shape), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, what: str) -> float:
        """CPU seconds of a "step", or the share of products of a "profile". RuntimeError: the process has ended."""
        try:
            self._ours.send(what)
            found: float = self._ours.recv()
        except (EOFError, OSError) as fault:
            self._process.join()
            raise RuntimeError(f"a process of the benchmark ended with {self._process.exitcode}") from fault
        return found

    def end(self) -> None:
        """End the process; it removes its folder."""
        with suppress(OSError):
            self._ours.send("end")
        self._process.join(timeout=60)
        self._process.kill()


def _serve(connection: Connection, model: str, shape: Shape) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        if model == OTHER:
            step = transformers_step(shape.config("llama"))
        else:
            mesh = ends.enter_context(start_mesh(device="cpu", init_method=f"file://{folder}/store"))
            if model.endswith(BY_MKL):
                use_mkl_products()
            step = own_step(shape.config(model.removesuffix(BY_MKL)), mesh)
        while (what := connection.recv()) != "end":
            if what == "profile":
                connection.send(share_of_products(step))
                continue
            start = time.process_time()
            step()
            connection.send(time.process_time() - start)


def measure(shape: Shape, models: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """A line for each model at one length."""
    known = shape.config("llama")
    workers = {name: Worker(name, shape) for name in (OTHER, *models, *(f"{name}{BY_MKL}" for name in models))}
    samples_s: dict[str, list[float]] = {name: [] for name in workers}
    try:
        # The first two rounds do not count: buffers and the allocator grow in them.
        for repeat in range(-2, repeats):
            for name, worker in workers.items():
                elapsed_s = worker.ask("step")
                if repeat >= 0:
                    samples_s[name].append(elapsed_s)
        shares = {name: worker.ask("profile") for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.end()
    tokens = known.train.global_batch_size * shape.length
    times_s = {name: statistics.median(found) for name, found in samples_s.items()}
    speeds = {name: tokens / time_s for name, time_s in times_s.items()}
    print(", ".join(f"{name} {speed:,.0f}" for name, speed in speeds.items()), file=sys.stderr, flush=True)
    return [
        {
            "model": name,
            "length": shape.length,
            "tokens_per_step": tokens,
            "tokens_per_cpu_s": speed,
            "times_transformers": speed / speeds[OTHER],
            "share_of_products": shares[name],
            "times_with_products_alone": times_s[OTHER] / (times_s[name] * shares[name]),
            "samples_s": samples_s[name],
        }
        for name, speed in speeds.items()
    ]


def share_of_products(step: Step) -> float:
    """The share of the time of a step in ``PRODUCTS``."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    times = {event.key.removeprefix("aten::"): event.self_cpu_time_total for event in found.key_averages()}
    of_products = sum(time for name, time in times.items() if name.removesuffix("_backward").rstrip("_") in PRODUCTS)
    return of_products / sum(times.values())


def own_step(config: RunConfig, mesh: Mesh) -> Step:
    """A step of training as `lightscale train` makes it."""
    engine = build_engine(config, mesh, vocab_size=config.model.vocab_size, trainable=True)
    batches = random_batches(config, mesh.device)

    def step() -> None:
        engine.forward_backward(batches)
        engine.step(1e-4)

    return step


def transformers_step(config: RunConfig) -> Step:
    """A step of transformers' LLaMA on the same tokens."""
    # Slow to import, and an extra.
    from transformers import LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    module = LlamaForCausalLM(llama_config(config.model, config.data.sequence_length)).train()
    options: Any = config.optimizer  # AdamW's, whose betas the shared type lacks
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=1e-4, betas=options.betas, weight_decay=options.weight_decay, fused=True
    )
    batches = [(one.tokens, one.labels.contiguous()) for one in random_batches(config, torch.device("cpu"))]

    def step() -> None:
        optimizer.zero_grad()
        for tokens, labels in batches:
            # Labels are shifted already: the loss is of all tokens, as in the other models.
            module(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()

    return step


def llama_config(model: ModelConfig, length: int) -> Any:
    """The shape of ``model`` as transformers describes it."""
    from transformers import LlamaConfig  # noqa: PLC0415

    return LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        max_position_embeddings=length,
        tie_word_embeddings=model.tie_word_embeddings,
        attn_implementation="sdpa",
    )


def missed(lines: list[dict[str, Any]], size: str) -> list[str]:
    """The targets that figures miss; they are for the size 3M."""
    judged = [
        (line, TARGETS[line["length"]][line["model"]])
        for line in lines
        if size == "3M" and line["model"] in TARGETS.get(line["length"], {})
    ]
    return [
        f"{line['model']} at {line['length']}: {line['times_transformers']:.2f} times, target {target}"
        for line, target in judged
        if line["times_transformers"] < target
    ]


def table(figures: dict[str, Any]) -> Table:
    """A line for each model and length."""
    made = Table(caption="\n".join(f"missed: {one}" for one in figures["verdict"]["missed"]) or None)
    for heading in ("tokens", "model", "tokens / CPU s", f"times {OTHER}", "products alone"):
        made.add_column(heading, justify="left" if heading == "model" else "right")
    for line in figures["lines"]:
        cells = (
            f"{line['tokens_per_cpu_s']:,.0f}",
            f"{line['times_transformers']:.2f}",
            f"{line['times_with_products_alone']:.2f}",
        )
        made.add_row(str(line["length"]), line["model"], *cells)
    return made

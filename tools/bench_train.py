"""Speed and memory of whole training steps over growing lengths, at constant tokens per step, on one device.

Each length runs in a process of its own, so that its peak of memory is its own. Tokens are random: what is measured
does not depend on them. MFU counts the matrix products that the model needs (``models/flops.py``), without
recomputation.
"""

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from lightscale.config import RunConfig
from lightscale.config_files import load
from lightscale.data_pipeline.windows import Batch
from lightscale.errors import UserError
from lightscale.models.flops import training_flops_per_token
from lightscale.parallel.engine import Engine
from lightscale.parallel.mesh import start_mesh
from lightscale.training.build import build_engine
from lightscale.training.metrics import device_peak_flops

LENGTHS = tuple(2**power for power in range(11, 20))  # 2K … 512K
TOKENS_PER_STEP = 2**19
CPU_CONFIG, CPU_LENGTHS, CPU_TOKENS_PER_STEP = "configs/tnl-tiny.toml", (128, 512, 2048), 2**12
# tokens/s at the longest length, as a share of that at 8K (of the shortest, where 8K is not measured).
REFERENCE_LENGTH = 8192


def run(
    config_path: str, *, lengths: Sequence[int], tokens_per_step: int, micro_batch_tokens: int, steps: int = 5
) -> dict[str, Any]:
    """The figures of every length; the median of ``steps`` steps behind one that warms up.

    Args:
        config_path: a run configuration; its length, batch and steps are replaced.
        lengths: tokens of a sequence; each must divide ``tokens_per_step``.
        micro_batch_tokens: tokens that go through the model at once, at least one sequence.
    """
    for length in lengths:
        if tokens_per_step % length:
            raise UserError(f"--tokens-per-step {tokens_per_step} is not divisible by the length {length}")
    by_length = {}
    for length in lengths:
        sequences = tokens_per_step // length
        micro = max(1, min(sequences, micro_batch_tokens // length))
        while sequences % micro:
            micro -= 1
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            by_length[length] = pool.submit(measure, config_path, length, sequences, micro, steps).result()
    reference = REFERENCE_LENGTH if REFERENCE_LENGTH in by_length else lengths[0]
    of_reference = by_length[reference]["tokens_per_s"]
    for figures in by_length.values():
        figures["ratio"] = figures["tokens_per_s"] / of_reference
    return {
        "config": config_path,
        "tokens_per_step": tokens_per_step,
        "reference_length": reference,
        "lengths": by_length,
    }


def measure(config_path: str, length: int, sequences: int, micro: int, steps: int) -> dict[str, Any]:
    """One length, in this process."""
    overrides = [
        f"data.sequence_length={length}",
        f"train.global_batch_size={sequences}",
        f"train.micro_batch_size={micro}",
    ]
    config = load(Path(config_path), overrides)
    with (
        tempfile.TemporaryDirectory() as folder,
        start_mesh(init_method=f"file://{folder}/store") as mesh,
    ):
        engine = build_engine(config, mesh, vocab_size=config.model.vocab_size, trainable=True)
        batches = random_batches(config, mesh.device)
        _step(engine, batches)
        samples = [_step(engine, batches) for _ in range(steps)]
        device = torch.cuda.get_device_name() if mesh.device.type == "cuda" else "CPU"
        on_gpu = mesh.device.type == "cuda"
        peak = (
            torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
    seconds = statistics.median(samples)
    tokens_per_s = sequences * length / seconds
    flops, peak_flops = training_flops_per_token(config.model, length), device_peak_flops(device)
    return {
        "device": device,
        "micro_batch_size": micro,
        "step_s": seconds,
        "samples_s": samples,
        "tokens_per_s": tokens_per_s,
        "flops_per_token": flops,
        "mfu": None if peak_flops is None else tokens_per_s * flops / peak_flops,
        "peak_memory_bytes": peak,
    }


def random_batches(config: RunConfig, device: torch.device) -> list[Batch]:
    """A step's micro-batches."""
    micro, length = config.train.micro_batch_size, config.data.sequence_length
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(config.train.global_batch_size // micro):
        tokens = torch.randint(0, config.model.vocab_size, (micro, length + 1), generator=generator)
        batch = Batch(
            tokens=tokens[:, :-1],
            labels=tokens[:, 1:],
            loss_mask=torch.ones(micro, length),
            piece_slots=torch.arange(micro) * length,
            piece_positions=torch.zeros(micro, dtype=torch.int64),
        )
        batches.append(batch.to(device))
    return batches


def _step(engine: Engine, batches: list[Batch]) -> float:
    start = time.perf_counter()
    engine.forward_backward(batches)
    engine.step(1e-4)  # reads the norm, which waits for the device
    return time.perf_counter() - start


def table(figures: dict[str, Any]) -> Table:
    """For people."""
    found = Table()
    for name in (
        "length",
        "micro-batch",
        "s a step",
        "tokens/s",
        f"÷ {figures['reference_length']:,}",
        "MFU",
        "peak memory",
    ):
        found.add_column(name, justify="right")
    for length, row in figures["lengths"].items():
        found.add_row(
            f"{length:,}",
            str(row["micro_batch_size"]),
            f"{row['step_s']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['ratio']:.2f}",
            "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
            f"{row['peak_memory_bytes'] / 2**30:.2f} GiB",
        )
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``bench.py train``. What is not given depends on whether there is a GPU."""
    parser.add_argument(
        "config", nargs="?", help=f"run configuration (default: {CPU_CONFIG}, on GPUs configs/tnl-1b.toml)"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", help="tokens of a sequence (default: 2K … 512K; on CPUs 128 … 2K)"
    )
    parser.add_argument(
        "--tokens-per-step", type=int, help=f"(default {TOKENS_PER_STEP:,}; on CPUs {CPU_TOKENS_PER_STEP:,})"
    )
    parser.add_argument("--micro-batch-tokens", type=int, default=16384, help="tokens at once (default 16384)")


def run_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """``run`` with the defaults of this machine."""
    on_gpu = torch.cuda.is_available()
    return run(
        args.config or ("configs/tnl-1b.toml" if on_gpu else CPU_CONFIG),
        lengths=args.lengths or (LENGTHS if on_gpu else CPU_LENGTHS),
        tokens_per_step=args.tokens_per_step or (TOKENS_PER_STEP if on_gpu else CPU_TOKENS_PER_STEP),
        micro_batch_tokens=args.micro_batch_tokens,
        steps=args.repeats,
    )

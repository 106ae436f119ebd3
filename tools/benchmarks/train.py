"""Speed and memory of whole training steps over growing lengths, at constant tokens per step, on one device.

Each length runs in a process of its own, so that its peak of memory is its own. Tokens are random: what is measured
does not depend on them. MFU counts the matrix products that the model needs (``models/flops.py``), without
recomputation. What does not fit in memory is tried again with more of its activations recomputed.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from lightscale.config.files import load
from lightscale.config.layout import check_layout
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.loading.windows import Batch
from lightscale.errors import UserError
from lightscale.models.flops import training_flops_per_token
from lightscale.parallel.engine import Engine
from lightscale.parallel.mesh import start_mesh
from lightscale.planning.memory import fullest_rank
from lightscale.runs.metrics.peak_flops import device_peak_flops
from lightscale.training.build import build_engine
from lightscale.training.health.memory import peak_memory_bytes

LENGTHS = tuple(2**power for power in range(11, 20))  # 2K … 512K
TOKENS_PER_STEP = 2**19
GPU_CONFIG, CPU_CONFIG = "configs/tnl-1b.toml", "configs/tnl-tiny.toml"
CPU_LENGTHS, CPU_TOKENS_PER_STEP = (128, 512, 2048), 2**12
# tokens/s at the longest length, as a share of that at 8K (of the shortest, where 8K is not measured).
REFERENCE_LENGTH = 8192
# From the fastest to the one that needs least memory.
RECOMPUTE = ("none", "selective", "full")
# Of GPU_CONFIG on an H200: MFU at the reference length, and the share of its tokens/s at the longest length.
TARGET_DEVICE, TARGET_MFU, TARGET_RATIO = "H200", 0.5, 0.95


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one process measures."""

    config_path: str
    length: int
    sequences: int
    """Of a step."""
    micro: int
    """Sequences that go through the model at once."""
    recompute: str
    steps: int
    fp8: str = "none"


Measure = Callable[[Case], dict[str, Any]]


def measure_apart(case: Case) -> dict[str, Any]:
    """``measure`` in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, case).result()


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What all lengths share."""

    config_path: str
    """A run configuration; its length, batch and steps are replaced."""
    tokens_per_step: int
    micro_batch_tokens: int
    """Tokens that go through the model at once, at least one sequence."""
    steps: int
    """That count, behind one that warms up."""
    fp8: str = "none"

    def case(self, length: int, recompute: str) -> Case:
        """Micro-batches divide the step's sequences."""
        sequences = self.tokens_per_step // length
        micro = max(1, min(sequences, self.micro_batch_tokens // length))
        while sequences % micro:
            micro -= 1
        return Case(
            config_path=self.config_path,
            length=length,
            sequences=sequences,
            micro=micro,
            recompute=recompute,
            steps=self.steps,
            fp8=self.fp8,
        )


def run(
    settings: TrainSettings, lengths: Sequence[int], *, recompute: str = "auto", measure_one: Measure = measure_apart
) -> Iterator[dict[str, Any]]:
    """The figures so far, after every length, the shortest first.

    ``recompute``: one of RECOMPUTE for all lengths, or "auto": the fastest that fits. A length that needs more of it
    than the reference length is compared with that at the same, too.

    Raises:
        UserError: a length does not divide the tokens of a step.
    """
    for length in lengths:
        if settings.tokens_per_step % length:
            raise UserError(f"--tokens-per-step {settings.tokens_per_step} is not divisible by the length {length}")
    lengths = sorted(set(lengths))
    reference = REFERENCE_LENGTH if REFERENCE_LENGTH in lengths else lengths[0]
    attempts = Attempts(settings, list(RECOMPUTE) if recompute == "auto" else [recompute], measure_one)
    found: dict[int, dict[str, Any]] = {}
    of_reference: dict[str, dict[str, Any]] = {}
    for length in lengths:
        row = attempts.fastest(length)
        if row is not None:
            found[length] = row
            if length == reference:
                of_reference[row["recompute"]] = row
            elif of_reference and row["recompute"] not in of_reference:
                again = attempts.attempt(reference, row["recompute"])
                of_reference |= {} if again is None else {row["recompute"]: again}
            _compare(found, reference, of_reference)
        figures = {
            "config": settings.config_path,
            "tokens_per_step": settings.tokens_per_step,
            "reference_length": reference,
            "lengths": found,
            "failures": attempts.failures,
        }
        yield figures | {"verdict": judge(figures)}


class Attempts:
    """Measures with as little recomputation as memory allows. What did not fit is not tried at longer lengths."""

    def __init__(self, settings: TrainSettings, levels: list[str], measure_one: Measure) -> None:
        self._settings, self._levels, self._measure_one = settings, levels, measure_one
        self.failures: list[dict[str, Any]] = []

    def fastest(self, length: int) -> dict[str, Any] | None:
        """The figures of a length, or None when it does not fit."""
        while self._levels:
            row = self.attempt(length, self._levels[0])
            if row is not None:
                return row
            self._levels.pop(0)
        if not any(failure["length"] == length for failure in self.failures):
            self.failures.append({"length": length, "recompute": None, "reason": "shorter sequences do not fit"})
        return None

    def attempt(self, length: int, level: str) -> dict[str, Any] | None:
        """The figures at one level, or None; a process that dies counts as one that does not fit."""
        try:
            row = self._measure_one(self._settings.case(length, level))
        except (torch.cuda.OutOfMemoryError, BrokenProcessPool) as error:
            self.failures.append({"length": length, "recompute": level, "reason": type(error).__name__})
            print(f"{length} tokens, recompute {level}: {type(error).__name__}", file=sys.stderr, flush=True)
            return None
        print(f"{length} tokens, recompute {level}: {row['tokens_per_s']:,.0f} tokens/s", file=sys.stderr, flush=True)
        return row


def _compare(found: dict[int, dict[str, Any]], reference: int, of_reference: dict[str, dict[str, Any]]) -> None:
    """Put beside each length what the reference length reaches: as it runs best, and at the same recomputation."""
    if reference not in found:
        return
    for row in found.values():
        row["ratio"] = row["tokens_per_s"] / found[reference]["tokens_per_s"]
        same = of_reference.get(row["recompute"])
        row["ratio_at_same_recompute"] = None if same is None else row["tokens_per_s"] / same["tokens_per_s"]


def judge(figures: dict[str, Any]) -> dict[str, Any]:
    """Which targets are missed; targets None: none is set for this configuration and device."""
    found, longest = figures["lengths"], LENGTHS[-1]
    device = next((row["device"] for row in found.values()), "")
    unfitted = {failure["length"] for failure in figures["failures"]} - set(found)
    missed = [f"{length} tokens do not fit in memory" for length in sorted(unfitted)]
    if TARGET_DEVICE not in device or Path(figures["config"]).name != Path(GPU_CONFIG).name:
        return {"targets": None, "missed": missed}
    if REFERENCE_LENGTH in found and found[REFERENCE_LENGTH]["mfu"] < TARGET_MFU:
        missed.append(f"MFU at {REFERENCE_LENGTH}: {found[REFERENCE_LENGTH]['mfu']:.3f}, target {TARGET_MFU}")
    if longest in found and found[longest]["ratio"] < TARGET_RATIO:
        missed.append(
            f"tokens/s at {longest}: {found[longest]['ratio']:.3f} of those at {figures['reference_length']}, "
            f"target {TARGET_RATIO}"
        )
    return {"targets": {"mfu": TARGET_MFU, "ratio": TARGET_RATIO}, "missed": missed}


def measure(case: Case) -> dict[str, Any]:
    """One length, in this process."""
    overrides = [
        f"data.sequence_length={case.length}",
        f"train.global_batch_size={case.sequences}",
        f"train.micro_batch_size={case.micro}",
        f"train.recompute={case.recompute}",
        f"train.fp8={case.fp8}",
    ]
    config = load(Path(case.config_path), overrides)
    with (
        tempfile.TemporaryDirectory() as folder,
        start_mesh(init_method=f"file://{folder}/store") as mesh,
    ):
        engine = build_engine(config, mesh, vocab_size=config.model.vocab_size, trainable=True)
        batches = random_batches(config, mesh.device)
        _step(engine, batches)
        samples = [_step(engine, batches) for _ in range(case.steps)]
        on_gpu = mesh.device.type == "cuda"
        device = torch.cuda.get_device_name() if on_gpu else "CPU"
        peak = torch.cuda.max_memory_allocated() if on_gpu else peak_memory_bytes()
    seconds = statistics.median(samples)
    tokens_per_s = case.sequences * case.length / seconds
    flops, peak_flops = training_flops_per_token(config.model, case.length), device_peak_flops(device)
    return {
        "device": device,
        "micro_batch_size": case.micro,
        "recompute": case.recompute,
        "fp8": case.fp8,
        "step_s": seconds,
        "samples_s": samples,
        "tokens_per_s": tokens_per_s,
        "flops_per_token": flops,
        "mfu": None if peak_flops is None else tokens_per_s * flops / peak_flops,
        "peak_memory_bytes": peak,
        "planned_memory_bytes": fullest_rank(config, check_layout(config, 1)).total_bytes,
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
            start_slots=torch.arange(micro) * length,
            start_positions=torch.zeros(micro, dtype=torch.int64),
            sources=torch.zeros(micro, dtype=torch.int64),
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
    failures = [f"{x['length']:,} tokens, recompute {x['recompute']}: {x['reason']}" for x in figures["failures"]]
    missed = [f"missed: {one}" for one in figures["verdict"]["missed"]]
    found = Table(caption="\n".join([*failures, *missed]) or None)
    reference = f"÷ {figures['reference_length']:,}"
    for name in (
        "length",
        "micro-batch",
        "recompute",
        "s a step",
        "tokens/s",
        reference,
        "MFU",
        "peak memory",
        "planned",
    ):
        found.add_column(name, justify="right")
    for length, row in figures["lengths"].items():
        found.add_row(
            f"{length:,}",
            str(row["micro_batch_size"]),
            row["recompute"],
            f"{row['step_s']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['ratio']:.2f}" if "ratio" in row else "",
            "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
            *(f"{row[name] / 2**30:.2f} GiB" for name in ("peak_memory_bytes", "planned_memory_bytes")),
        )
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``bench.py train``. What is not given depends on whether there is a GPU."""
    parser.add_argument("config", nargs="?", help=f"run configuration (default: {CPU_CONFIG}, on GPUs {GPU_CONFIG})")
    parser.add_argument(
        "--lengths", type=int, nargs="+", help="tokens of a sequence (default: 2K … 512K; on CPUs 128 … 2K)"
    )
    parser.add_argument(
        "--tokens-per-step", type=int, help=f"(default {TOKENS_PER_STEP:,}; on CPUs {CPU_TOKENS_PER_STEP:,})"
    )
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=16384, help=("tokens processed at once (default 16384)")
    )
    parser.add_argument(
        "--recompute",
        choices=("auto", *RECOMPUTE),
        default="auto",
        help="activations to recompute in the backward pass; auto: as few as memory allows (default auto)",
    )


def run_arguments(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """``run`` with the defaults of this machine."""
    on_gpu = torch.cuda.is_available()
    settings = TrainSettings(
        config_path=args.config or (GPU_CONFIG if on_gpu else CPU_CONFIG),
        tokens_per_step=args.tokens_per_step or (TOKENS_PER_STEP if on_gpu else CPU_TOKENS_PER_STEP),
        micro_batch_tokens=args.micro_batch_tokens,
        steps=args.repeats,
    )
    return run(settings, args.lengths or (LENGTHS if on_gpu else CPU_LENGTHS), recompute=args.recompute)


def fp8_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``bench.py train-fp8``."""
    on_gpu = torch.cuda.is_available()
    config, length = (GPU_CONFIG, REFERENCE_LENGTH) if on_gpu else (CPU_CONFIG, CPU_LENGTHS[0])
    parser.add_argument("config", nargs="?", default=config, help="run configuration (default: %(default)s)")
    parser.add_argument("--length", type=int, default=length, help="tokens of a sequence (default %(default)s)")
    parser.add_argument("--tokens-per-step", type=int, default=8 * length, help="(default %(default)s)")


def run_fp8(args: argparse.Namespace, measure_one: Measure = measure_apart) -> Iterator[dict[str, Any]]:
    """The same steps without and with ``train.fp8``, with as little recomputation as each needs."""
    found: dict[str, Any] = {}
    for fp8 in ("none", "current"):
        settings = TrainSettings(
            config_path=args.config,
            tokens_per_step=args.tokens_per_step,
            micro_batch_tokens=args.tokens_per_step,
            steps=args.repeats,
            fp8=fp8,
        )
        attempts = Attempts(settings, list(RECOMPUTE), measure_one)
        row = attempts.fastest(args.length)
        found[fp8] = attempts.failures if row is None else row
        reasons = {way: row for way, row in found.items() if isinstance(row, list)}
        missed = [f"train.fp8 = {way}: {one['reason']}" for way, failures in reasons.items() for one in failures]
        yield found | {"verdict": {"missed": missed}}


def fp8_table(figures: dict[str, Any]) -> Table:
    """Both, for people."""
    shown = Table("train.fp8", "recompute", "s a step", "tokens/s", "peak memory", "planned")
    for fp8 in ("none", "current"):
        row = figures.get(fp8)
        if isinstance(row, list):
            shown.add_row(fp8, *("; ".join(failure[name] or "" for failure in row) for name in ("recompute", "reason")))
        elif row is not None:
            memory = (f"{row[name] / 2**30:.2f} GiB" for name in ("peak_memory_bytes", "planned_memory_bytes"))
            shown.add_row(fp8, row["recompute"], f"{row['step_s']:.3f}", f"{row['tokens_per_s']:,.0f}", *memory)
    return shown

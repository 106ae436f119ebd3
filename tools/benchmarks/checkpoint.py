"""Checkpoints: how long a step waits for one, beside a plain copy of the same bytes and a synchronous save.

``run`` starts processes that share a model of a few layers, each with as much state as asked for. In turns every rank
copies its state, on a GPU or not, into memory of the host that is there already, saves and waits for the end, and saves
in the background; between the turns it changes every weight. What counts is the ratio within a turn, of the slowest
rank.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.table import Table

from lightscale.config.model import ModelConfig
from lightscale.config.schema import DataConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from lightscale.parallel.engine import Engine
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.training.build import build_engine
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver

# fp32 weights and the two moments of AdamW.
_BYTES_PER_WEIGHT = 12
_LAYERS, _HEADS = 4, 4
MOST_OF_SYNCHRONOUS, MOST_OF_COPY = 0.3, 2.0


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """What is measured, the same on every rank."""

    ranks: int = 2
    state_bytes: int = 200_000_000
    """Of each rank."""
    repeats: int = 5
    folder: Path | None = None
    """Where the checkpoints go; None: where temporary files do."""


def run(settings: CheckpointSettings) -> dict[str, Any]:
    """Median seconds of the slowest rank for each way, the ratios, and whether they are what they should be."""
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=settings.folder) as folder:
        started = mp.spawn(_rank, args=(folder, settings), nprocs=settings.ranks, join=False)
        try:
            while not started.join():
                pass
        finally:
            for process in started.processes:
                process.kill()
        found = [torch.load(Path(folder) / f"rank-{rank}") for rank in range(settings.ranks)]
    turns = [
        {name: max(one["turns"][turn][name] for one in found) for name in found[0]["turns"][turn]}
        for turn in range(settings.repeats)
    ]
    figures: dict[str, Any] = {
        "settings": {**asdict(settings), "folder": str(settings.folder or tempfile.gettempdir())},
        "state_bytes": [one["state_bytes"] for one in found],
        "samples_s": {name: [turn[name] for turn in turns] for name in turns[0]},
    }
    for name in turns[0]:
        figures[name] = statistics.median(turn[name] for turn in turns)
    figures["stall_to_synchronous"] = statistics.median(turn["stall_s"] / turn["synchronous_s"] for turn in turns)
    figures["stall_to_copy"] = statistics.median(turn["stall_s"] / turn["copy_s"] for turn in turns)
    figures["targets"] = {"stall_to_synchronous": MOST_OF_SYNCHRONOUS, "stall_to_copy": MOST_OF_COPY}
    figures["reached"] = all(figures[name] <= most for name, most in figures["targets"].items())
    return figures


def _model(settings: CheckpointSettings) -> ModelConfig:
    """As wide as the ranks need to have so much state: tensor ranks share it out evenly."""
    weights = settings.state_bytes * settings.ranks / _BYTES_PER_WEIGHT
    # 4 d² of the mixer, 3 d · 2 d of the linear unit, and an embedding of 8 d² / layers.
    unit = _HEADS * 8 * settings.ranks
    width = max(1, round((weights / (_LAYERS * 12)) ** 0.5 / unit)) * unit
    return ModelConfig(
        num_layers=_LAYERS,
        hidden_size=width,
        num_heads=_HEADS,
        intermediate_size=2 * width,
        vocab_size=8 * width // unit * unit,
    )


def _rank(rank: int, folder: str, settings: CheckpointSettings) -> None:
    torch.set_num_threads(1)
    config = RunConfig(
        model=_model(settings),
        data=DataConfig(store=Path("store"), sequence_length=64),
        parallel=ParallelConfig(tensor=settings.ranks),
        optimizer=OptimizerConfig(lr=1e-3),
        train=TrainConfig(steps=1, global_batch_size=1),
    )
    with start_mesh(
        tensor=settings.ranks,
        rank=rank,
        local_rank=rank,
        world_size=settings.ranks,
        init_method=f"file://{folder}/rendezvous",
    ) as mesh:
        engine = build_engine(config, mesh, vocab_size=config.model.vocab_size, trainable=True)
        turns = _measure(engine, mesh, Path(folder) / "checkpoints", settings.repeats)
        state = sum(shard.data.nbytes for shard in engine.owned_shards())
        torch.save({"turns": turns, "state_bytes": state}, Path(folder) / f"rank-{rank}")


def _measure(engine: Engine, mesh: Mesh, directory: Path, repeats: int) -> list[dict[str, float]]:
    saver = Saver(directory, mesh)
    saver.reserve(engine)
    on_gpu = mesh.device.type == "cuda"
    copies = [torch.zeros_like(shard.data, device="cpu", pin_memory=on_gpu) for shard in engine.owned_shards()]

    def copy() -> None:
        for target, shard in zip(copies, engine.owned_shards(), strict=True):
            target.copy_(shard.data)

    turns = []
    for turn in range(repeats + 1):
        step = 2 * turn
        seconds = {
            "copy_s": _timed(copy, mesh),
            "synchronous_s": _timed(lambda step=step: saver.save(engine, step=step, common={}, facts={}), mesh),  # type: ignore[misc]
        }
        stall = _timed(lambda step=step: saver.begin(engine, step=step + 1, common={}, facts={}), mesh)  # type: ignore[misc]
        for shard in engine.owned_shards():
            shard.data.add_(1.0)
        saved = saver.finish()
        turns.append({**seconds, "stall_s": stall, "write_s": saved.write_s})
        _check(engine, mesh, directory, step + 1)
        if mesh.rank == 0:
            for path in directory.iterdir():
                shutil.rmtree(path)
        dist.barrier(group=mesh.control)
    # The first turn touches all memory for the first time.
    return turns[1:]


def _check(engine: Engine, mesh: Mesh, directory: Path, step: int) -> None:
    """The bytes saved are those at the call: one less than what was made of them meanwhile."""
    changed = [shard.data.clone() for shard in engine.owned_shards()]
    assert Checkpoints(directory, mesh).restore(engine, step=step) is not None
    for shard, after in zip(engine.owned_shards(), changed, strict=True):
        if not torch.equal(shard.data + 1.0, after):
            raise RuntimeError(f"{shard.box.key}: the checkpoint differs from the state at the beginning of the save")


def _timed(action: Callable[[], object], mesh: Mesh) -> float:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier(group=mesh.control)
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The size of the state, and where it goes."""
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--state-mb", type=float, default=200.0, help="state per rank, in MB (default 200)")
    parser.add_argument("--folder", type=Path, help="directory for the checkpoints (default: temporary files)")


def table(figures: dict[str, Any]) -> Table:
    """For people."""
    rows = Table("figure")
    rows.add_column("value", justify="right")
    rows.add_row("state of a rank, MB", f"{max(figures['state_bytes']) / 1e6:.0f}")
    for name in ("copy_s", "stall_s", "synchronous_s", "write_s"):
        rows.add_row(name.replace("_s", ", ms"), f"{1e3 * figures[name]:.1f}")
    for name, most in figures["targets"].items():
        rows.add_row(name.replace("_", " "), f"{figures[name]:.2f} (at most {most})")
    return rows

"""A short training run of this machine, with the real command: its losses, its speed, and whether it learns.

The corpus is the Python standard library, of which every machine that runs this has some edition.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.command import run_lightscale
from lightscale.runs.run_directory import RunDirectory, read_metrics

CONFIG = "configs/quickstart.toml"
VOCAB_SIZE = 4096
AVERAGED_STEPS = 5
# nats per token. Only learning how often each token occurs takes more than that off the loss of a new model.
LEAST_FALL = 1.0


def run(config: str, *, steps: int, store: Path | None, overrides: list[str]) -> dict[str, Any]:
    """Prepare a corpus unless ``store`` is one, train ``steps`` steps on one device, and read the metrics.

    Raises:
        UserError: a command failed; it has said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        if store is None:
            store = Path(folder) / "store"
            arguments = f"data prepare --corpus stdlib --vocab-size {VOCAB_SIZE} --validation 0.02 --out"
            run_lightscale(*arguments.split(), str(store))
        directory = RunDirectory(Path(folder) / "run")
        common = [f"data.store={store}", f"train.steps={steps}", "optimizer.schedule=constant", *overrides]
        run_lightscale("train", config, "--run", str(directory.path), "--processes", "1", *common)
        lines = [line for line in read_metrics(directory.metrics) if "loss" in line]
    return {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", **figures(lines)}


def figures(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the metrics of a run's steps. The speed is that of the steps' second half, when everything is compiled."""
    losses = [line["loss"] for line in lines]
    late = sorted(line["tokens_per_s"] for line in lines[len(lines) // 2 :])
    last = losses[-AVERAGED_STEPS:]
    fall = losses[0] - sum(last) / len(last)
    missed = [] if fall > LEAST_FALL else [f"the loss fell by {fall:.3f} nats per token, not by {LEAST_FALL}"]
    return {
        "losses": losses,
        "fall": fall,
        "tokens_per_s": late[len(late) // 2],
        "mfu": [line["mfu"] for line in lines][-1],
        "verdict": {"missed": missed},
    }


def table(found: dict[str, Any]) -> Table:
    """For people."""
    made = Table(caption="\n".join(found["verdict"]["missed"]) or None)
    for name in ("steps", "first loss", f"mean of the last {AVERAGED_STEPS}", "tokens/s", "MFU"):
        made.add_column(name, justify="right")
    losses = found["losses"]
    mfu = "-" if found["mfu"] is None else f"{found['mfu']:.1%}"
    last = losses[0] - found["fall"]
    made.add_row(str(len(losses)), f"{losses[0]:.3f}", f"{last:.3f}", f"{found['tokens_per_s']:,.0f}", mfu)
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``bench.py learn``."""
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values of the configuration")
    parser.add_argument("--config", default=CONFIG, help=f"run configuration (default {CONFIG})")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps (default 50)")
    parser.add_argument("--store", type=Path, help="token store (default: one made of the Python standard library)")

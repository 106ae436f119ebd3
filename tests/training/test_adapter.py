"""Adapters beside a frozen run by the commands: what is trained and stored, resumption, refusals, exports."""

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightscale.config.files import load
from lightscale.models.adapters import trained_shapes
from lightscale.runs.run_directory import RunDirectory, read_metrics
from lightscale.training.checkpoints.directories import directory_name

commands = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "rank_commands.py"))["commands"]
RunRanks = Callable[..., list[Any]]
STEPS = 4
RUN = """\
[model]
mixer = ["tnl", "gated-delta-net"]
vocab_size = 128
num_layers = 2
hidden_size = 32
num_heads = 2
intermediate_size = 48
norm = "rmsnorm"
[data]
store = "store"
sequence_length = 64
[optimizer]
lr = 1e-2
warmup_steps = 1
[train]
steps = 4
global_batch_size = 4
[checkpoint]
every = 2
"""
CORPUS = 'tokenizer = "ascii"\n[sources.text]\npaths = ["text.jsonl"]\n'
ADAPTER = ["train.init_from=runs/base@4", "adapter.r=3", "adapter.lora_alpha=6", "optimizer.lr=1e-2"]
LORA, DORA = [["train", "run.toml", *ADAPTER, f"adapter.name={name}"] for name in ("lora", "dora")]


def prepared(folder: Path) -> None:
    lines = [{"text": f"the sum of {one} and {two} is {one + two}. " * 8} for one in range(9) for two in range(9)]
    (folder / "text.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "corpus.toml").write_text(CORPUS)
    (folder / "run.toml").write_text(RUN)


def on_one_process(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    """A base, adapters beside it, and these once more from their first checkpoint."""
    lines = [
        ["data", "prepare", "corpus.toml", "--out", "store"],
        ["train", "run.toml", "--run", "runs/base"],
        ["train", "run.toml", "train.seed=1", "--run", "runs/other"],
        [*LORA, "--run", "runs/lora"],
        [*DORA, "adapter.target_modules=['*.q', '*.mlp.*']", "--run", "runs/dora"],
    ]
    found = commands(rank, world_size, f"{init_method}-whole", folder, lines)
    for name in ("resumed", "elsewhere", "moved", "forgot"):
        run = RunDirectory(f"runs/{name}")
        shutil.copytree("runs/lora", run.path)
        shutil.rmtree(run.checkpoints / directory_name(STEPS))
        run.status.unlink()
    # Without its record, the checkpoint itself has the base.
    run.events.write_text("".join(line for line in run.events.open() if "init_from" not in line))
    moved = ["train.init_from=runs/other@4", "--allow-change", "train.init_from"]
    again = [
        [*LORA, "--run", "runs/resumed"],
        [*LORA, *moved, "--run", "runs/moved"],
        [*LORA, *moved, "--run", "runs/forgot"],
        ["train", "run.toml", "train.init_from=runs/lora@4", "--run", "runs/whole"],
        [*LORA, "adapter.target_modules=['*.qq']", "--run", "runs/none"],
        [*LORA, "train.init_from=none", "--run", "runs/none"],
        [*LORA, "model.mixer=tnl", "--run", "runs/none"],
        ["generate", "runs/lora", "--prompt", "the sum", "--tokens", "4"],
        ["export", "runs/lora", "--to", "refused"],
    ]
    return [*found, *commands(rank, world_size, f"{init_method}-again", folder, again)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    prepared(folder)
    return folder


@pytest.mark.timeout(600)
def test_adapters_alone_are_trained_stored_and_resumed(
    folder: Path, run_ranks: RunRanks, steps_of: Callable[..., dict[int, tuple[Any, ...]]]
) -> None:
    (results,) = run_ranks(on_one_process, 1, str(folder), timeout_s=500)
    codes, outputs = zip(*results, strict=True)
    assert codes[:6] == (0,) * 6, results
    assert "of them are trained" in outputs[3]
    runs = {name: RunDirectory(folder / "runs" / name) for name in ("base", "lora", "dora", "resumed", "elsewhere")}
    metrics = {name: read_metrics(run.metrics) for name, run in runs.items()}
    # The base goes on from where it ended, and DoRA's norms are those of its rows.
    last = metrics["base"][-1]["loss"]
    for name in ("lora", "dora"):
        assert metrics[name][0]["loss"] == pytest.approx(last, abs=0.3)
        assert metrics[name][-1]["loss"] < metrics[name][0]["loss"]
        check_stored(runs[name])
    assert metrics["lora"][0]["loss"] == metrics["dora"][0]["loss"]
    assert steps_of(metrics["resumed"]) == steps_of(metrics["lora"])
    assert "is not the checkpoint that runs/moved started from" in outputs[6]
    assert "was trained beside another frozen model: runs/base/checkpoints/step-00000004" in outputs[7]
    assert "runs/lora holds adapters, and train.init_from needs a whole model" in outputs[8]
    assert '"*.qq" is the name of no linear map of the model; a name is layers.' in outputs[9]
    assert "[adapter] trains matrices beside frozen weights" in outputs[10]
    assert "its model differs from [model] of this run" in outputs[11]
    assert "use --adapter for PEFT's files, or --merge" in outputs[13]
    assert all(codes[6:12]) and codes[12] == 0 and codes[13], results
    lines = [[*LORA, "parallel.tensor=2", "--run", "runs/elsewhere"]]
    for ((code, stderr),) in run_ranks(commands, 2, str(folder), lines, timeout_s=300):
        assert code == 0, stderr
    found = read_metrics(runs["elsewhere"].metrics)
    for one, other in zip(found[STEPS // 2 :], metrics["lora"][STEPS // 2 :], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def check_stored(run: RunDirectory) -> None:
    """A checkpoint has the fp32 weights and both moments of the adapters, and nothing else."""
    directory = run.checkpoints / directory_name(STEPS)
    stored = load_file(directory / "rank-00000.safetensors")
    expected = trained_shapes(load(run.config))
    numbers = sum(torch.Size(shape).numel() for shape in expected.values())
    assert sum(one.numel() * one.element_size() for one in stored.values()) == 3 * 4 * numbers
    base = json.loads((directory / "MANIFEST.json").read_text())["base"]
    assert base["checkpoint"].endswith("base/checkpoints/step-00000004")
    assert base["step"] == STEPS

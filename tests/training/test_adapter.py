"""Adapters beside a frozen run by the commands: what is trained and stored, resumption, refusals, exports."""

import contextlib
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lightscale
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.models.adapters import trained_shapes
from lightscale.runs.run_directory import RunDirectory, read_metrics
from lightscale.training.checkpoints.directories import directory_name

HELPERS = Path(__file__).parents[1] / "helpers"
commands = runpy.run_path(str(HELPERS / "rank_commands.py"))["commands"]
tuned = SimpleNamespace(**runpy.run_path(str(HELPERS / "tuned_runs.py")))
RunRanks = Callable[..., list[Any]]
STEPS = 4
RUN = f"""\
{tuned.MODEL.format(mixer='["tnl", "gated-delta-net"]')}
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
# What is drawn is the same when a run resumes, and on other ranks.
LORA.append("adapter.lora_dropout=0.2")


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
    *_, run = tuned.interrupted("runs/lora", ("resumed", "elsewhere", "moved", "forgot"), step=STEPS)
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
        ["export", "runs/base", "--to", "base", "--dtype", "fp32"],
        ["export", "runs/lora", "--to", "merged", "--dtype", "fp32", "--merge"],
        ["export", "runs/lora", "--to", "peft", "--dtype", "fp32", "--adapter", "--base", "base"],
        [*LORA, "model.norm_eps=1e-2", "train.steps=1", "--run", "runs/other-norm"],
    ]
    return [*found, *commands(rank, world_size, f"{init_method}-again", folder, again)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    prepared(folder)
    return folder


def test_averages_of_adapters_are_refused(folder: Path) -> None:
    """No command could read them."""
    with pytest.raises(UserError, match=r"optimizer\.ema averages whole models"):
        load(folder / "run.toml", [*ADAPTER, "adapter.name=lora", "optimizer.ema={slow = 0.9}"])


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
    assert all(codes[6:12]) and codes[12] == 0 and codes[13] and codes[14:] == (0,) * 4, results
    assert "model.norm_eps = 0.01 here and 1e-06 there: kept weights compute something else" in outputs[17]
    assert "compute something else" not in outputs[3]
    check_exported(folder)
    lines = [[*LORA, "parallel.tensor=2", "--run", "runs/elsewhere"]]
    for ((code, stderr),) in run_ranks(commands, 2, str(folder), lines, timeout_s=300):
        assert code == 0, stderr
    found = read_metrics(runs["elsewhere"].metrics)
    tuned.check_losses(found, metrics["lora"], first=STEPS // 2, rel=1e-5)


def check_exported(folder: Path) -> None:
    """The merged model has the weights of the base and of PEFT's files, without PEFT, and gives the run's logits."""
    base, merged = (load_file(folder / name / "model.safetensors") for name in ("base", "merged"))
    adapters = load_file(folder / "peft" / "adapter_model.safetensors")
    config = json.loads((folder / "peft" / "adapter_config.json").read_text())
    assert (config["lora_dropout"], config["r"], config["lora_alpha"]) == (0.2, 3, 6)
    changed = set()
    for key, a in adapters.items():
        module, _, kind = key.removeprefix("base_model.model.").partition(".lora_")
        if kind != "A.weight":
            continue
        b, name = adapters[key.replace("lora_A", "lora_B")], f"{module}.weight"
        torch.testing.assert_close(merged[name], base[name] + 2 * b @ a, rtol=1e-6, atol=1e-6)
        assert (merged[name] - base[name]).abs().max() > 1e-4
        changed.add(name)
    assert merged.keys() == base.keys() and len(changed) > 10
    assert all(torch.equal(merged[name], base[name]) for name in base.keys() - changed)
    # The path of the frozen model is relative to the directory of the commands.
    with contextlib.chdir(folder):
        run, whole = (lightscale.load(name) for name in ("runs/lora", "merged"))
    ids = run.ids("the sum of 3 and 4 is")[None]
    torch.testing.assert_close(whole.logits(ids), run.logits(ids), rtol=1e-4, atol=1e-5)


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


def of_other_features(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    """An annealed branch, growing lengths, and a run that begins from a merged model."""
    short = [*LORA, "optimizer.schedule=wsd", "optimizer.decay_steps=1", "train.steps=6"]
    lengths = ["data.curriculum=[{sequence_length = 32, until_tokens = 256}]", "--run", "runs/lengths"]
    lines = [
        ["data", "prepare", "corpus.toml", "--out", "store"],
        ["train", "run.toml", "--run", "runs/base"],
        [*short, "--run", "runs/stable"],
        ["train", "runs/stable", "--anneal", "2", "--step", "4", "--run", "runs/annealed"],
        [*LORA, *lengths],
        [*DORA, "data.packing=whole", *lengths[:1], "--run", "runs/whole"],
        ["export", "runs/annealed", "--merge", "--dtype", "fp32", "--to", "merged"],
        ["import", "merged", "--run", "runs/again"],
        ["train", "run.toml", *ADAPTER, "train.init_from=runs/again@0", "adapter.name=lora", "--run", "runs/second"],
        ["train", "run.toml", "train.init_from=runs/annealed@6", "adapter.name=lora", "--run", "runs/none"],
    ]
    return commands(rank, world_size, init_method, folder, lines)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_adapters_are_annealed_take_lengths_and_begin_from_merged_ones(
    tmp_path: Path, run_ranks: RunRanks, steps_of: Callable[..., dict[int, tuple[Any, ...]]]
) -> None:
    prepared(tmp_path)
    (results,) = run_ranks(of_other_features, 1, str(tmp_path), timeout_s=800)
    *done, (code, output) = results
    assert not [one for one in done if one[0]], results
    assert code and "runs/annealed holds adapters, and train.init_from needs a whole model" in output
    names = ("stable", "annealed", "lengths", "whole", "second")
    metrics = {name: read_metrics(RunDirectory(tmp_path / "runs" / name).metrics) for name in names}
    # A branch continues the adapters of its parent, with lower rates.
    steps = steps_of(metrics["annealed"])
    assert sorted(steps) == [5, 6]
    assert metrics["annealed"][-1]["lr"] < metrics["stable"][4]["lr"]
    assert steps[5][1] == steps_of(metrics["stable"])[5][1], "the same weights and data at first"
    for name in ("lengths", "whole"):
        assert metrics[name][-1]["loss"] < metrics[name][0]["loss"], name
    assert metrics["second"][0]["loss"] == pytest.approx(metrics["annealed"][-1]["loss"], abs=0.5)
